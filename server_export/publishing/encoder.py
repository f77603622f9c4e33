"""A trained encoder as a plain inference program: tokens in, pooled states or class scores out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from prge.engine import Array
from server_export.adapter.layers import convert_conv1d
from server_export.check.engine import loaded_method
from server_export.checkpoint.classifier import given_to_base, states_of
from server_export.checkpoint.loading import LoadedModel
from server_export.lower.program import write_program
from server_export.publishing.program import METHOD, PROGRAM, ROWS, Built, quantized_and_checked
from server_export.quantize.quantization import NO_LAYERS, BundleLayers
from server_export.trace import attention, readout
from server_export.trace.positions import position_numbers
from server_export.trace.rotary import make_rotary_constant


class EncoderProgram(nn.Module):
    """(tokens, attention_mask), i64 [1, length] both -> pooled states [1, width], or class scores."""

    position_ids: torch.Tensor
    token_type_ids: torch.Tensor

    def __init__(self, loaded: LoadedModel, length: int, pooling: str, head: nn.Linear | None = None) -> None:
        super().__init__()
        position_ids = position_numbers(loaded, length)
        self.model: Any = loaded.model
        self.pool = readout.pooling_of(pooling)
        self.head = head
        self.has_own_head = loaded.classifier is not None
        base: Any = getattr(self.model, self.model.base_model_prefix) if self.has_own_head else self.model
        accepted = inspect.signature(base.forward).parameters
        has_types = any(name.endswith("token_type_embeddings") for name, _ in self.model.named_modules())
        self.given = {"position_ids", *(["token_type_ids"] if has_types else [])} & set(accepted)
        self.register_buffer("position_ids", position_ids, persistent=False)
        self.register_buffer("token_type_ids", torch.zeros_like(position_ids), persistent=False)
        convert_conv1d(self.model)
        attention.register()
        self.model.set_attn_implementation(attention.NAME)
        make_rotary_constant(self.model)

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """See the class."""
        mask = attention_mask.to(torch.float32)
        given = {name: getattr(self, name) for name in self.given}
        given |= {"attention_mask": attention.padding_mask(mask), "return_dict": True}
        if self.has_own_head:
            with given_to_base(self.model, given):
                answer = self.model(input_ids=tokens, attention_mask=mask, return_dict=True)
        else:
            answer = self.model(input_ids=tokens, **given)
        pooled = self.pool(states_of(answer, tokens.shape[1]), mask)
        return pooled if self.head is None else self.head(pooled)


def build_encoder(
    folder: Path,
    loaded: LoadedModel,
    length: int,
    pooling: str,
    scheme: str,
    head: Mapping[str, Array] | None = None,
    layers: BundleLayers = NO_LAYERS,
) -> Built:
    """Lower an encoder, changed in place, to `program.pte` in `folder`, and compare the program with it.

    Args:
        folder: where to.
        loaded: the encoder.
        length: tokens of a row.
        pooling: of the states; see server_export.trace.readout.
        scheme: quantization of the frozen layers.
        head: `weight` [classes, width] and `bias` of a classification head.
        layers: as the bundle has them that the adapter was trained with.

    Raises:
        BundleError: it can't be lowered, or the program returns something else than the model.
    """
    layer = None if head is None else linear_of(head)
    rows = [_row(loaded.config, length, seed) for seed in range(ROWS)]
    reference = torch.stack([_reference(loaded, pooling, layer, row) for row in rows])
    module = EncoderProgram(loaded, length, pooling, layer).eval()

    def eager() -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([module(*row) for row in rows])

    def lower() -> torch.Tensor:
        program = folder / PROGRAM
        write_program(program, {METHOD: (module, rows[0])})
        return torch.stack([loaded_method(program, METHOD, row)()[0] for row in rows])

    quantization, checks = quantized_and_checked(module, scheme, reference, eager, lower, layers)
    inputs = [{"name": name, "dtype": "int64", "shape": (1, length)} for name in ("tokens", "attention_mask")]
    name, shape = "pooled" if layer is None else "scores", tuple(reference.shape[1:])
    facts = {"inputs": inputs, "outputs": [{"name": name, "dtype": "float32", "shape": shape}]}
    return Built("inference", facts, quantization, checks)


def linear_of(head: Mapping[str, Array]) -> nn.Linear:
    """The layer of a head with `weight` and `bias`."""
    weight, bias = (torch.from_numpy(np.array(head[name], np.float32)) for name in ("weight", "bias"))
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = (nn.Parameter(value, requires_grad=False) for value in (weight, bias))
    return layer


def _reference(
    loaded: LoadedModel, pooling: str, head: nn.Linear | None, row: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """What the untouched model answers."""
    tokens, mask = row
    with torch.no_grad():
        answer = loaded.model(input_ids=tokens, attention_mask=mask, return_dict=True)
        states = states_of(answer, tokens.shape[1])
        pooled = readout.pooling_of(pooling)(states, mask.to(states.dtype))
        return pooled if head is None else head(pooled)


def _row(config: Any, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask; the padding token stands where the mask is 0 alone: RoBERTa counts positions by it."""
    generator = torch.Generator().manual_seed(seed)
    end = length if seed == 0 else int(torch.randint(1, length + 1, (1,), generator=generator))
    tokens = torch.randint(0, config.vocab_size, (1, length), generator=generator)
    mask = (torch.arange(length) < end).long().reshape(1, length)
    padding = getattr(config, "pad_token_id", None)
    if padding is not None:
        other = padding + 1 if padding + 1 < config.vocab_size else 0
        tokens = torch.where(mask.bool(), torch.where(tokens == padding, other, tokens), padding)
    return tokens, mask
