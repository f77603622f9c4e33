"""Publish a trained decoder as a program for ExecuTorch's LLM runner, from tokens to next-token logits.

transformers' own integration makes the program: keys and values of earlier calls are buffers of the program.
The number of tokens is dynamic, so a prompt is computed in one call. Python's `TextLLMRunner` and the runners
of Android and iOS apps read the metadata that is written here as methods without inputs.
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
from server_export.check.engine import load_method
from server_export.checkpoint.experts import expert_layers
from server_export.checkpoint.loading import LoadedModel
from server_export.library_errors import TRANSFORMERS_ERRORS, torch_export_errors
from server_export.lower.program import lower_programs
from server_export.publishing.module_quantization import quantized_and_checked
from server_export.publishing.program import METHOD, PROGRAM, ROWS, BuiltProgram
from server_export.quantize.quantization import NO_LAYERS, BundleLayers
from server_export.trace import attention
from server_export.trace.patterns import replaceable_functions

# Most tokens of one call: the runner splits longer prompts. Memory is planned for this number, and matrix
# products of more rows are hardly faster.
MAX_TOKENS_PER_CALL = 256
# Tokens of the traced call.
_EXAMPLE_TOKENS = 7


@dataclass(frozen=True)
class LlmSpec:
    """Settings of a decoder's program.

    Attributes:
        length: most tokens of prompt and completion together.
        scheme: quantization of the frozen layers.
        bos: id of the token that begins a text; None: there is none.
        eos: ids of the tokens that end a text.

    Raises:
        ConfigError: `length` is too small.
    """

    length: int
    scheme: str
    bos: int | None
    eos: Sequence[int]

    def __post_init__(self) -> None:
        if self.length < _EXAMPLE_TOKENS:
            raise ConfigError(
                "Cannot build the program:",
                [f"sequence_length is {self.length}, must be at least {_EXAMPLE_TOKENS}"],
                code="sequence-too-short",
            )

    @property
    def tokens_per_call(self) -> int:
        """Most tokens of a call."""
        return min(self.length, MAX_TOKENS_PER_CALL)

    def metadata(self, vocabulary: int) -> dict[str, Any]:
        """Return the metadata that the runner reads from a program; `vocabulary` is the number of tokens."""
        values = {
            "get_max_seq_len": self.tokens_per_call,
            "get_max_context_len": self.length,
            "get_vocab_size": vocabulary,
            "use_kv_cache": True,
            "use_sdpa_with_kv_cache": False,
            "enable_dynamic_shape": True,
            "get_bos_id": self.bos,
            "get_eos_ids": list(self.eos) or None,
        }
        return {name: value for name, value in values.items() if value is not None}


class TanhGelu(nn.Module):
    """The tanh approximation of GELU in elementary operators.

    XNNPACK would compute the operator as the exact GELU.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the activation of a tensor of any shape."""
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def check_can_generate(loaded: LoadedModel) -> None:
    """Raise BundleError unless ExecuTorch's LLM runner can generate text with a model."""
    if not loaded.is_decoder:
        raise BundleError(
            f"{loaded.name_or_path} can't be published as llm: it is an encoder.",
            remedy="Publish it as program instead.",
            code="llm-of-encoder",
        )
    if replaceable_functions(loaded.model):
        raise BundleError(
            f"{loaded.name_or_path} can't be published as llm: it has recurrences or short convolutions, and "
            "the program keeps only keys and values between calls.",
            remedy="Use prge generate, or publish the adapter or the merged model.",
            code="llm-of-recurrence",
        )
    if expert_layers(loaded.model):
        raise BundleError(
            f"{loaded.name_or_path} can't be published as llm: a program can't route to experts.",
            remedy="Publish it as peft or merged, or use `prge generate`.",
            code="experts-in-one-program",
        )


def bos_and_eos_ids(
    model: Any, tokenizer: Any, stops: Sequence[int] = ()
) -> tuple[int | None, tuple[int, ...]]:
    """Return the id of the token that begins a text, and the ids of the tokens that end one.

    Args:
        model: model of transformers, whose generation config may have more such tokens than the tokenizer.
        tokenizer: tokenizer of transformers.
        stops: further tokens that the bundle stops at.
    """
    settings = model.generation_config
    bos = settings.bos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ends = settings.eos_token_id
    ends = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id, *stops]
    return bos, tuple(dict.fromkeys(end for end in ends if end is not None))


def build_llm(
    folder: Path, loaded: LoadedModel, spec: LlmSpec, layers: BundleLayers = NO_LAYERS
) -> BuiltProgram:
    """Lower a decoder to `program.pte` in `folder`, and compare the program with the decoder.

    Args:
        folder: folder of the program.
        loaded: the decoder, which is changed in place.
        spec: settings of the program.
        layers: the quantized layers of the bundle that the adapter was trained with.

    Raises:
        BundleError: transformers' integration or ExecuTorch doesn't support the architecture, or outputs of
            the program differ from the decoder's.
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

    metadata = spec.metadata(model.config.vocab_size)

    def lower() -> torch.Tensor:
        program = folder / PROGRAM
        # With this pass, new keys and values are written to the buffers in place.
        config = ExecutorchBackendConfig(run_reinplace_pass=True)
        exported = _exported(exportable, spec)
        with warnings.catch_warnings():
            # Initial values of buffers are lost, but a cache begins with zeros, like ExecuTorch's memory.
            warnings.filterwarnings("ignore", "Mutation on a buffer", UserWarning)
            executorch = lower_programs({METHOD: exported}, config, metadata)
        with program.open("wb") as stream:
            executorch.write_to_file(stream)
        call = load_method(program, METHOD)
        return _last_two(rows, spec, lambda tokens, start: call(tokens, start)[0])

    quantization, checks = quantized_and_checked(
        exportable.model, spec.scheme, reference, eager, lower, layers
    )
    return BuiltProgram("llm", {"runner": metadata}, quantization, checks)


def _exportable(model: Any, spec: LlmSpec) -> Any:
    """Return transformers' exportable module of a model with a static cache.

    Its inputs are tokens i64 [1, n], None, and the position i64 [1] of the first token. Its output are the
    logits [1, 1, vocabulary] of the last token.
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
    """Export the module with a dynamic number of tokens."""
    example = _tokens(0, _EXAMPLE_TOKENS, exportable.model.config.vocab_size)
    tokens = torch.export.Dim("tokens", min=1, max=spec.tokens_per_call)
    with _refused(torch_export_errors()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Without strict, the buffers of the cache would become constants.
        return torch.export.export(
            exportable,
            (),
            {"input_ids": example, "cache_position": torch.zeros(1, dtype=torch.long)},
            dynamic_shapes={"input_ids": {1: tokens}, "cache_position": None},
            strict=True,
        )


def _refused(errors: tuple[type[Exception], ...]) -> AbstractContextManager[None]:
    """Return a context manager that turns these exceptions of transformers or torch into Refusals."""
    return refused_as(
        "no-program-with-cache",
        "transformers can't make a program with a cache of this architecture",
        errors,
        remedy="Publish it as merged instead.",
    )


def _last_two(
    rows: Sequence[torch.Tensor], spec: LlmSpec, call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Compute the logits [rows, 2, vocabulary] of the last two tokens of each row.

    The last token has a call of its own; the tokens before it are split as the runner splits a prompt.
    """
    outputs = []
    for row in rows:
        start, logits = 0, []
        for part in (*row[:, :-1].split(spec.tokens_per_call, 1), row[:, -1:]):
            logits.append(call(part.contiguous(), torch.tensor([start])).reshape(-1).clone())
            start += part.shape[1]
        outputs.append(torch.stack(logits[-2:]))
    return torch.stack(outputs)


def _tokens(seed: int, length: int, vocabulary: int) -> torch.Tensor:
    """Return random tokens i64 [1, length]."""
    return torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(seed))
