"""A trained model as a plain inference program: tokens in, logits of one position or an encoder's states out.

In float32 the adapter is merged into the weights. On quantized weights it stays beside them as a constant:
merging first and quantizing then would round weights that the adapter was not trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from prge.bundle import PROGRAM
from prge.contract import AdaptedModule, Contract, TensorSpec
from prge.engine import Array
from prge.errors import BundleError
from prge.peft import PeftAdapter
from server_export.check.verification import FP32_TOLERANCE, run_program
from server_export.lower.lowering import LoweringReport, export_graph, lower
from server_export.model import attention, readout
from server_export.model.loading import LoadedModel
from server_export.model.lora_fa import CallInputs, convert_conv1d, replace_module
from server_export.model.program import STEP_METHOD, StackProgram, position_numbers
from server_export.model.quantization import QuantizationReport, quantize
from server_export.model.rotary import make_rotary_constant

# Of a quantized program's answers, as parts of their deviation: tiny models of 12 architectures, stories260K
# and babyllama, with adapters and without, differ from the quantized model by 2e-7 to 0.005, from the float
# model by 0.004 to 0.024 in int8 and 0.05 to 0.22 in int4. An unrelated model's answers differ by 1 and more.
QUANTIZED_TOLERANCE = 0.05
FLOAT_TOLERANCES = {"8da8w": 0.1, "8da4w": 0.5}
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


class InferenceProgram(StackProgram):
    """(tokens, positions) -> logits [1, vocabulary]; (tokens, attention_mask) -> pooled, or class scores."""

    def set_head(self, head: Mapping[str, Array] | None) -> None:
        """Make an encoder answer class scores."""
        if head is None:
            return
        weight, bias = (torch.from_numpy(np.array(head[name], np.float32)) for name in ("weight", "bias"))
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight, layer.bias = (nn.Parameter(value, requires_grad=False) for value in (weight, bias))
        self.head = layer

    def forward(self, tokens: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        """Tokens i64 [1, length]; rest is positions i64 [1, 1] or attention_mask i64 [1, length]."""
        answer = self.answer(tokens, rest[0])
        return self.head(answer) if hasattr(self, "head") else answer

    def answer(self, tokens: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Logits, or pooled states before the head."""
        if self.contract.is_encoder:
            return self._pooled(tokens, other)
        self.inputs.positions = other
        try:
            return self._call(tokens, None).logits.reshape(1, -1)
        finally:
            self.inputs.clear()


@dataclass(frozen=True)
class InferenceSpec:
    """Shape of a program: `length` tokens; `modules` name the adapted layers; `pooling` is an encoder's."""

    length: int
    modules: tuple[AdaptedModule, ...]
    pooling: str
    scheme: str


@dataclass(frozen=True)
class BuiltInference:
    """What is known of a lowered program that was verified against its module."""

    inputs: tuple[TensorSpec, ...]
    output: TensorSpec
    quantization: QuantizationReport
    lowering: LoweringReport
    checks: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Its part of the manifest."""
        return {
            "kind": "inference",
            "inputs": [asdict(spec) for spec in self.inputs],
            "outputs": [asdict(self.output)],
            "quantization": self.quantization.to_json(),
            "lowering": self.lowering.to_json(),
            "verification": {**self.checks, "rows": _ROWS},
        }


def attach_fixed(model: nn.Module, adapter: PeftAdapter) -> None:
    """Put a trained adapter beside the layers that it names."""
    convert_conv1d(model)
    for name in adapter.lora_a:
        lora_a = torch.from_numpy(adapter.lora_a[name]) * adapter.scale
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
    module = _module(loaded, spec)

    def eager(forward: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([forward(*example) for example in examples])

    check_exact("module", eager(module.answer), reference)
    module.set_head(head)
    exact = eager(module)
    quantization = quantize(module, spec.scheme)
    expected = eager(module)
    lowered = lower({STEP_METHOD: export_graph(module, examples[0])})
    program = folder / PROGRAM
    lowered.write(program)
    answers = torch.stack([run_program(program, example)[0] for example in examples])
    if spec.scheme == "fp32":
        checks = check_exact("program", answers, expected)
    else:
        checks = check_quantized(answers, expected, exact, spec.scheme)
    name = "logits" if loaded.is_decoder else "pooled" if head is None else "scores"
    output = TensorSpec(name, "float32", tuple(expected.shape[1:]))
    return BuiltInference(module_inputs, output, quantization, lowered.reports[STEP_METHOD], checks)


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
    tolerance = FP32_TOLERANCE * max(1.0, float(expected.std()))
    if not difference <= tolerance:
        raise BundleError(
            f"the {name} and what it was made of differ by {difference:.3g}, allowed is {tolerance:.3g}",
            remedy="report it with the name of the model",
        )
    return {"max_absolute_difference": difference, "tolerance": tolerance}


def check_quantized(
    answers: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor, scheme: str
) -> dict[str, float]:
    """Differences of a quantized program's answers, and what is allowed, as the manifest has them.

    All are root mean squares in units of the answers' deviation: engine and eager model round the same
    activations, so that a last bit that differs may flip a code, and the largest difference says little.

    Args:
        answers: of the program in the engine, a row first.
        expected: of the quantized model in eager mode.
        exact: of the model before it was quantized.
        scheme: of the frozen layers.

    Raises:
        BundleError: they differ by more, or aren't finite.
    """
    checks: dict[str, float] = {}
    for name, other, allowed in (
        ("quantized_difference", expected, QUANTIZED_TOLERANCE),
        ("float_difference", exact, FLOAT_TOLERANCES[scheme]),
    ):
        difference = float((answers - other).square().mean().sqrt() / exact.std().clamp_min(FP32_TOLERANCE))
        if not difference <= allowed:
            model = name.split("_")[0]
            raise BundleError(
                f"the program's answers differ from the {model} model's by {difference:.3g} of a deviation, "
                f"allowed is {allowed:.3g}",
                remedy="publish it with --quantize fp32, or report it with the name of the model",
            )
        checks |= {name: difference, name.replace("difference", "tolerance"): allowed}
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


def _module(loaded: LoadedModel, spec: InferenceSpec) -> InferenceProgram:
    model = loaded.model
    position_ids = position_numbers(loaded, spec.length)
    convert_conv1d(model)
    contract = Contract(
        kind="stack",
        readout="logprobs" if loaded.is_decoder else "pooled",
        copies=1,
        batch_size=1,
        sequence_length=spec.length,
        positions=1 if loaded.is_decoder else 0,
        width=int(loaded.config.hidden_size),
        vocabulary_size=int(model.get_input_embeddings().weight.shape[0]),
        label_tokens=(),
        modules=spec.modules,
    )
    call = CallInputs()
    if loaded.is_decoder:
        readout.insert_head(model, call)
    attention.register()
    model.set_attn_implementation(attention.NAME)
    make_rotary_constant(model)
    return InferenceProgram(model, call, contract, spec.pooling, position_ids).eval()


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
