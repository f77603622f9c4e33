"""A trained decoder as the program that ExecuTorch's LLM runner takes: tokens in, logits of the next one out.

Made by transformers' own integration: keys and values of earlier calls are buffers of the program. A prompt
is computed in one call, for the number of tokens is open. Python's `TextLLMRunner` runs it, and what apps of
Android and iOS have; they read the metadata that is written here as methods without inputs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prge.errors import BundleError, ConfigError, refused_as
from server_export.adapter.layers import convert_conv1d, replace_module
from server_export.check.engine import opened_method
from server_export.checkpoint.experts import expert_layers
from server_export.checkpoint.loading import LoadedModel
from server_export.library_errors import TRANSFORMERS_ERRORS, torch_export_errors
from server_export.lower.program import lowered
from server_export.publishing.module_quantization import quantized_and_checked
from server_export.publishing.program import METHOD, PROGRAM, ROWS, Built
from server_export.quantize.quantization import NO_LAYERS, BundleLayers
from server_export.trace import attention
from server_export.trace.patterns import functions_of

# Of a prompt in one call: the runner cuts longer ones. Memory is planned for it, and products of more rows
# are hardly faster.
MOST_AT_ONCE = 256
# Tokens of the call that is traced.
_EXAMPLE = 7


@dataclass(frozen=True)
class LlmSpec:
    """Tokens of prompt and answer together; quantization of the frozen layers; tokens that begin and end.

    Raises:
        ConfigError: there are too few tokens.
    """

    length: int
    scheme: str
    bos: int | None
    eos: Sequence[int]

    def __post_init__(self) -> None:
        if self.length < _EXAMPLE:
            raise ConfigError(
                "the program can't be made:",
                [f"sequence_length is {self.length}, at least {_EXAMPLE} are needed"],
                code="sequence-too-short",
            )

    @property
    def at_once(self) -> int:
        """The most tokens of a call."""
        return min(self.length, MOST_AT_ONCE)

    def facts(self, vocabulary: int) -> dict[str, Any]:
        """What the runner asks a program for."""
        known = {
            "get_max_seq_len": self.at_once,
            "get_max_context_len": self.length,
            "get_vocab_size": vocabulary,
            "use_kv_cache": True,
            "use_sdpa_with_kv_cache": False,
            "enable_dynamic_shape": True,
            "get_bos_id": self.bos,
            "get_eos_ids": list(self.eos) or None,
        }
        return {name: value for name, value in known.items() if value is not None}


class TanhGelu(nn.Module):
    """GELU in its tanh form, spelled out: XNNPACK takes the operator for the exact form."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x of any shape."""
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def check_generates(loaded: LoadedModel) -> None:
    """Raise BundleError unless a model writes."""
    if not loaded.is_decoder:
        raise BundleError(
            f"{loaded.name_or_path} can't be published for a runner that generates: it is an encoder",
            remedy="publish it as program instead",
            code="llm-of-encoder",
        )
    if functions_of(loaded.model):
        raise BundleError(
            f"{loaded.name_or_path} can't be published for a runner that generates: it has recurrences or "
            "short convolutions, and the runner keeps nothing but keys and values between calls",
            remedy="write with prge generate, or publish the adapter or the merged model",
            code="llm-of-recurrence",
        )
    if expert_layers(loaded.model):
        raise BundleError(
            f"{loaded.name_or_path} can't be published for a runner that generates: one program can't "
            "choose among experts",
            remedy="publish it as peft or merged, or write with `prge generate`",
            code="experts-in-one-program",
        )


def ends_of(model: Any, tokenizer: Any, stops: Sequence[int] = ()) -> tuple[int | None, tuple[int, ...]]:
    """The token that begins a text, and those that end one.

    The model's settings of generation may know more of them than the tokenizer; `stops` are those that the
    bundle stops at.
    """
    settings = model.generation_config
    bos = settings.bos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ends = settings.eos_token_id
    ends = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id, *stops]
    return bos, tuple(dict.fromkeys(end for end in ends if end is not None))


def build_llm(folder: Path, loaded: LoadedModel, spec: LlmSpec, layers: BundleLayers = NO_LAYERS) -> Built:
    """Lower a decoder, changed in place, to `program.pte` in `folder`, and compare the program with it.

    Args:
        folder: where to.
        loaded: the decoder.
        spec: of the program.
        layers: as the bundle has them that the adapter was trained with.

    Raises:
        BundleError: transformers' integration or ExecuTorch doesn't take the architecture, or the program
            returns something else than the model.
    """
    from executorch.exir import ExecutorchBackendConfig

    model: Any = loaded.model
    rows = [_tokens(seed, spec.length, model.config.vocab_size) for seed in range(ROWS)]
    with torch.no_grad():
        reference = torch.stack([model(input_ids=row).logits[0, -2:] for row in rows])
    exportable = _exportable(model, spec)

    def eager() -> torch.Tensor:
        with torch.no_grad():
            return _last_two(rows, spec, lambda tokens, start: exportable(tokens, None, start))

    facts = spec.facts(model.config.vocab_size)

    def lower() -> torch.Tensor:
        program = folder / PROGRAM
        # New keys and values go into the buffers themselves, instead of copies of them.
        config = ExecutorchBackendConfig(run_reinplace_pass=True)
        exported = _exported(exportable, spec)
        with warnings.catch_warnings():
            # A cache begins as zeros: so does all memory of ExecuTorch's module. Positions come with a call.
            warnings.filterwarnings("ignore", "Mutation on a buffer", UserWarning)
            executorch = lowered({METHOD: exported}, config, facts)
        with program.open("wb") as stream:
            executorch.write_to_file(stream)
        call = opened_method(program, METHOD)
        return _last_two(rows, spec, lambda tokens, start: call(tokens, start)[0])

    quantization, checks = quantized_and_checked(
        exportable.model, spec.scheme, reference, eager, lower, layers
    )
    return Built("llm", {"runner": facts}, quantization, checks)


def _exportable(model: Any, spec: LlmSpec) -> Any:
    """transformers' module of a model with a cache.

    It takes tokens i64 [1, n], None and the position of the first [1]; gives logits [1, 1, vocabulary] of the
    last token.
    """
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    convert_conv1d(model)
    for name in [name for name, module in model.named_modules() if type(module).__name__ == "GELUTanh"]:
        replace_module(model, name, TanhGelu())
    attention.register()
    with _refused(TRANSFORMERS_ERRORS):
        model.set_attn_implementation(attention.CACHED)
        model.config.use_cache = model.generation_config.use_cache = True
        model.generation_config.cache_implementation = "static"
        model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0][:, -1:],))
        module = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=spec.length)
        return module.model.eval()


def _exported(exportable: Any, spec: LlmSpec) -> torch.export.ExportedProgram:
    """The module as a graph of any number of tokens."""
    example = _tokens(0, _EXAMPLE, exportable.model.config.vocab_size)
    tokens = torch.export.Dim("tokens", min=1, max=spec.at_once)
    with _refused(torch_export_errors()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Not traced by Dynamo, the buffers of the cache would be constants.
        return torch.export.export(
            exportable,
            (),
            {"input_ids": example, "cache_position": torch.zeros(1, dtype=torch.long)},
            dynamic_shapes={"input_ids": {1: tokens}, "cache_position": None},
            strict=True,
        )


def _refused(errors: tuple[type[Exception], ...]) -> AbstractContextManager[None]:
    return refused_as(
        "no-program-with-cache",
        "transformers can't make a program with a cache of this architecture",
        errors,
        remedy="publish it as merged instead",
    )


def _last_two(
    rows: Sequence[torch.Tensor], spec: LlmSpec, call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Logits [rows, 2, vocabulary] after all but one token of a row, in calls as the runner makes them, and
    after that token."""
    answers = []
    for row in rows:
        start, logits = 0, []
        for part in (*row[:, :-1].split(spec.at_once, 1), row[:, -1:]):
            logits.append(call(part.contiguous(), torch.tensor([start])).reshape(-1).clone())
            start += part.shape[1]
        answers.append(torch.stack(logits[-2:]))
    return torch.stack(answers)


def _tokens(seed: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(seed))
