"""A trained model as a plain inference program: tokens in, logits of one position or an encoder's states out.

In float32 the adapter is merged into the weights. On quantized weights it stays beside them as a constant:
merging first and quantizing then would round weights that the adapter was not trained with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from prge.contract import TensorSpec
from prge.engine import Array
from prge.errors import BundleError
from prge.files.peft import PeftAdapter
from server_export.check.engine import loaded_method
from server_export.lower.program import write_program
from server_export.model import attention, readout
from server_export.model.loading import LoadedModel
from server_export.model.lora_fa import convert_conv1d, replace_module
from server_export.model.positions import position_numbers
from server_export.model.quantization import QuantizationReport, dequantize, quantize
from server_export.model.rotary import make_rotary_constant

PROGRAM, METHOD = "program.pte", "forward"
# Of a manifest that describes no bundle: those have another number.
FORMAT = 1
# Of float32 answers, in units of their deviation or 1. Tiny models of 12 architectures and stories260K differ
# by less than 1e-5.
FLOAT_TOLERANCE = 1e-4
# Of a quantized program's answers: by how much of what rounding activations changes they may differ from the
# quantized model's, and by how much of what quantization changes from the float model's. Tiny models differ
# by less than 1e-4 of the first and by 1 of the second. In deeper ones last bits flip codes, until errors of
# rounding are independent and differ by sqrt(2) of their size: babyllama differs by 0.54 and 0.85 in int8, by
# 1.22 and 0.98 in int4.
FLIPPED, CHANGED = 2.0, 1.5
_ROWS = 3


class FixedLoraLinear(nn.Module):
    """A frozen linear layer with one adapter that no longer changes; `lora_a` carries alpha / rank."""

    lora_a: torch.Tensor
    lora_b: torch.Tensor

    def __init__(self, base: nn.Module, lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("lora_a", lora_a)
        self.register_buffer("lora_b", lora_b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


class InferenceProgram(nn.Module):
    """(tokens, positions) -> logits [1, vocabulary]; (tokens, attention_mask) -> pooled, or class scores."""

    position_ids: torch.Tensor
    token_type_ids: torch.Tensor

    def __init__(self, loaded: LoadedModel, spec: InferenceSpec) -> None:
        super().__init__()
        position_ids = position_numbers(loaded, spec.length)
        self.model: Any = loaded.model
        self.is_decoder = loaded.is_decoder
        self.pool = readout.pooling_of(spec.pooling)
        accepted = inspect.signature(self.model.forward).parameters
        has_types = any(name.endswith("token_type_embeddings") for name, _ in self.model.named_modules())
        self.given = {"position_ids", *(["token_type_ids"] if has_types else [])} & set(accepted)
        self.register_buffer("position_ids", position_ids, persistent=False)
        self.register_buffer("token_type_ids", torch.zeros_like(position_ids), persistent=False)
        convert_conv1d(self.model)
        attention.register()
        self.model.set_attn_implementation(attention.NAME)
        make_rotary_constant(self.model)

    def set_head(self, head: Mapping[str, Array]) -> None:
        """Make an encoder answer class scores."""
        weight, bias = (torch.from_numpy(np.array(head[name], np.float32)) for name in ("weight", "bias"))
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight, layer.bias = (nn.Parameter(value, requires_grad=False) for value in (weight, bias))
        self.head = layer

    def forward(self, tokens: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Tokens i64 [1, length]; other is positions i64 [1, 1] or attention_mask i64 [1, length]."""
        answer = self.answer(tokens, other)
        return self.head(answer) if hasattr(self, "head") else answer

    def answer(self, tokens: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Logits, or pooled states before the head."""
        if not self.is_decoder:
            mask = other.to(torch.float32)
            states = self._call(tokens, attention.padding_mask(mask)).last_hidden_state
            return self.pool(states, mask)
        asked = self.model.get_output_embeddings().register_forward_pre_hook(
            lambda _, inputs: (readout.at_positions(inputs[0], other),)
        )
        with asked:
            logits: torch.Tensor = self._call(tokens, None).logits
        return logits.reshape(1, -1)

    def _call(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> Any:
        given = {name: getattr(self, name) for name in self.given}
        # Without keys and values of earlier calls: a program has none.
        return self.model(input_ids=tokens, attention_mask=mask, use_cache=False, return_dict=True, **given)


@dataclass(frozen=True)
class InferenceSpec:
    """A program's shape, `length` tokens; how an encoder pools; the quantization of the frozen layers."""

    length: int
    pooling: str
    scheme: str


@dataclass(frozen=True)
class BuiltInference:
    """What is known of a lowered program that was verified against its module."""

    inputs: tuple[TensorSpec, ...]
    output: TensorSpec
    quantization: QuantizationReport
    checks: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Its part of the manifest."""
        return {
            "format": FORMAT,
            "kind": "inference",
            "inputs": [asdict(spec) for spec in self.inputs],
            "outputs": [asdict(self.output)],
            "quantization": self.quantization.to_json(),
            "verification": {**self.checks, "rows": _ROWS},
        }


def attach_fixed(model: nn.Module, adapter: PeftAdapter) -> None:
    """Put a trained adapter beside the layers that it names."""
    convert_conv1d(model)
    for name in adapter.lora_a:
        lora_a = torch.from_numpy(adapter.lora_a[name]) * adapter.scale_of(name)
        lora_b = torch.from_numpy(adapter.lora_b[name])
        replace_module(model, name, FixedLoraLinear(model.get_submodule(name), lora_a, lora_b))


def build_inference(
    folder: Path, loaded: LoadedModel, spec: InferenceSpec, head: Mapping[str, Array] | None = None
) -> BuiltInference:
    """Lower a model, changed in place, to `program.pte` in `folder`, and compare the program with the model.

    Raises:
        BundleError: it can't be lowered, or the program returns something else than the model.
    """
    config = loaded.config
    module_inputs = _input_specs(loaded.is_decoder, spec.length)
    examples = [_example(module_inputs, config, seed) for seed in range(_ROWS)]
    reference = torch.stack([_reference(loaded, spec, example) for example in examples])
    module = InferenceProgram(loaded, spec).eval()

    def eager(forward: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([forward(*example) for example in examples])

    check_exact("module", eager(module.answer), reference)
    if head is not None:
        module.set_head(head)
    exact = eager(module)
    quantization = quantize(module, spec.scheme)
    expected = eager(module)
    program = folder / PROGRAM
    write_program(program, {METHOD: (module, examples[0])})
    answers = torch.stack([loaded_method(program, METHOD, example)()[0] for example in examples])
    if spec.scheme == "fp32":
        checks = check_exact("program", answers, expected)
    else:
        dequantize(module)
        checks = check_quantized(answers, expected, eager(module), exact)
    name = "logits" if loaded.is_decoder else "pooled" if head is None else "scores"
    output = TensorSpec(name, "float32", tuple(expected.shape[1:]))
    return BuiltInference(module_inputs, output, quantization, checks)


def padded_tokens(tokens: torch.Tensor, attention_mask: torch.Tensor, config: Any) -> torch.Tensor:
    """Tokens with the padding token where the mask is 0 and nowhere else: RoBERTa counts positions by it."""
    padding = getattr(config, "pad_token_id", None)
    if padding is None:
        return tokens
    other = padding + 1 if padding + 1 < config.vocab_size else 0
    return torch.where(attention_mask.bool(), torch.where(tokens == padding, other, tokens), padding)


def check_exact(name: str, answers: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Largest difference of float32 answers, and what is allowed, as the manifest has them.

    Raises:
        BundleError: they differ by more, or aren't finite.
    """
    difference = float((answers - expected).abs().max())
    tolerance = FLOAT_TOLERANCE * max(1.0, float(expected.std()))
    if not difference <= tolerance:
        raise BundleError(
            f"the {name} and what it was made of differ by {difference:.3g}, allowed is {tolerance:.3g}",
            remedy="report it with the name of the model",
        )
    return {"max_absolute_difference": difference, "tolerance": tolerance}


def check_quantized(
    answers: torch.Tensor, expected: torch.Tensor, smooth: torch.Tensor, exact: torch.Tensor
) -> dict[str, float]:
    """Differences of a quantized program's answers, and what is allowed, as the manifest has them.

    All are root mean squares in units of the answers' deviation: engine and eager model round the same
    activations, so that a last bit that differs may flip a code, and the largest difference says little.

    Args:
        answers: of the program in the engine, a row first.
        expected: of the quantized model in eager mode.
        smooth: of the same without rounding of activations.
        exact: of the model before it was quantized.

    Raises:
        BundleError: they differ by more, or aren't finite.
    """
    unit = exact.std().clamp_min(FLOAT_TOLERANCE)

    def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        return float((ours - theirs).square().mean().sqrt() / unit)

    checks: dict[str, float] = {}
    for name, other, allowed in (
        ("quantized", expected, FLIPPED * difference(expected, smooth)),
        ("float", exact, CHANGED * difference(expected, exact)),
    ):
        found, allowed = difference(answers, other), allowed + FLOAT_TOLERANCE
        if not found <= allowed:
            raise BundleError(
                f"the program's answers differ from the {name} model's by {found:.3g} of a deviation, "
                f"allowed is {allowed:.3g}",
                remedy="publish it with --quantize fp32, or report it with the name of the model",
            )
        checks |= {f"{name}_difference": found, f"{name}_tolerance": allowed}
    return checks


def _reference(loaded: LoadedModel, spec: InferenceSpec, example: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What the untouched model answers."""
    tokens, other = example
    with torch.no_grad():
        if loaded.is_decoder:
            logits = loaded.model(input_ids=tokens, return_dict=True).logits
            return logits[:, int(other)]
        states = loaded.model(input_ids=tokens, attention_mask=other, return_dict=True).last_hidden_state
        return readout.pooling_of(spec.pooling)(states, other.to(states.dtype))


def _input_specs(is_decoder: bool, length: int) -> tuple[TensorSpec, ...]:
    tokens = TensorSpec("tokens", "int64", (1, length))
    if is_decoder:
        return tokens, TensorSpec("positions", "int64", (1, 1))
    return tokens, TensorSpec("attention_mask", "int64", (1, length))


def _example(inputs: tuple[TensorSpec, ...], config: Any, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    length = inputs[0].shape[1]
    end = length if seed == 0 else int(torch.randint(1, length + 1, (1,), generator=generator))
    tokens = torch.randint(0, config.vocab_size, (1, length), generator=generator)
    if inputs[1].name == "positions":
        return tokens, torch.tensor([[end - 1]])
    mask = (torch.arange(length) < end).long().reshape(1, length)
    return padded_tokens(tokens, mask, config), mask
