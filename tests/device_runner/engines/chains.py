"""Exported chains, and the whole models that they must answer like, in PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.func import functional_call

from device_runner.engines.opening import OpenEngine, open_engine
from device_runner.engines.speaking import open_speaker
from prge.engine import Array, Call, Directions, Engine, FloatArray, Target, TokenSequence
from prge.files.adapter import adapter_size
from prge.files.bundle import Bundle, open_bundle
from prge.files.peft import write_peft
from prge.files.signatures import BACK, STACK, TANGENT
from prge.learning import vocabulary
from prge.model_spec import AdaptedModule, ModelSpec, matrices
from tests.templates import random_adapter
from tests.tiny_models import save_model

TOKENS = 16
# More than a call computes at once.
POSITIONS = 224


def export_chain(
    folder: Path, architecture: str, layers: int = 0, positions: int = 0, **settings: Any
) -> Path:
    """A folder with `model` and `bundle`: a tiny model for rows of TOKENS, with all roles if none are given.

    It has two blocks, or so many layers of a Llama, and 64 positions, or so many. Its vocabulary is read in
    four pieces, as a large one is.
    """
    from server_export.export import ExportConfig, export

    changes = {"num_hidden_layers": layers} if layers else {}
    if positions:
        changes["n_positions" if architecture == "gpt2" else "max_position_embeddings"] = positions
    save_model(folder / "model", architecture, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "_LARGEST_PIECE", 2048)
        export(
            ExportConfig(
                model=str(folder / "model"),
                out=folder / "bundle",
                **{"rank": 2, "sequence_length": TOKENS, **settings},
            )
        )
    return folder


@dataclass
class Whole:
    """The model of a chain in PyTorch, which merges an adapter, given by its values.

    `lora_a` are scaled; `pooling` is that of an encoder.
    """

    model: Any
    modules: tuple[AdaptedModule, ...]
    lora_a: dict[str, torch.Tensor]
    scale: float = 1.0
    pooling: str = ""

    @classmethod
    def of(cls, folder: Path, dtype: torch.dtype = torch.float32) -> Whole:
        """From what `export_chain` wrote."""
        from server_export.adapter.layers import convert_conv1d

        bundle = open_bundle(folder / "bundle")
        model = text_model(folder, bundle)
        # GPT-2's layers keep their weights transposed.
        convert_conv1d(model)
        tensors = load_file(bundle.adapter / "adapter_model.safetensors")
        scale = bundle.manifest["lora"]["alpha"] / bundle.manifest["lora"]["rank"]
        lora_a = {
            module.name: torch.from_numpy(
                next(value for key, value in tensors.items() if f".{module.name}.lora_A" in f".{key}") * scale
            )
            for module in bundle.chain.modules
        }
        lora_a = {name: matrix.to(dtype) for name, matrix in lora_a.items()}
        pooling = bundle.chain.pooling if bundle.chain.is_encoder else ""
        return cls(model.requires_grad_(False).to(dtype), bundle.chain.modules, lora_a, scale, pooling)

    def outputs(self, sequences: Iterable[TokenSequence], values: torch.Tensor) -> torch.Tensor:
        """An engine's outputs of sequences with one adapter; they can be differentiated."""
        found = []
        # One by one: some models answer no number where there is padding.
        for sequence in sequences:
            tokens = torch.tensor([sequence.tokens])
            if self.pooling:
                states = self.states(tokens, values)[0]
                found.append(states[0] if self.pooling == "first" else states.mean(0))
            else:
                logprobs = torch.log_softmax(self.logits(tokens, values)[0], -1)
                positions = [target.position for target in sequence.targets]
                found.append(logprobs[positions, [target.token for target in sequence.targets]])
        return torch.stack(found) if self.pooling else torch.cat(found)

    def logits(self, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Logits [rows, tokens, vocabulary] with one adapter."""
        found: torch.Tensor = self._called(values, input_ids=tokens, use_cache=False).logits
        return found

    def states(self, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Logits, or an encoder's states, of tokens with one adapter."""
        return self.answered(self._called(values, input_ids=tokens))

    def _called(self, values: torch.Tensor, **given: Any) -> Any:
        usual = torch.get_default_dtype()
        # Some models make numbers as they run.
        torch.set_default_dtype(self.model.dtype)
        try:
            return functional_call(self.model, self.merged(values), (), given, tie_weights=False)
        finally:
            torch.set_default_dtype(usual)

    @staticmethod
    def answered(output: Any) -> torch.Tensor:
        """Logits or states of what a model answers."""
        found: torch.Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
        return found

    def merged(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """The model's parameters with one adapter; layers that share a weight have adapters of their own."""
        parameters: dict[str, torch.Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        adapter = matrices_of(self.modules, values)
        for name, frozen in self.lora_a.items():
            key, trained = f"{name}.weight", adapter.get(f"lora_a.{name}")
            lora_a = frozen if trained is None else trained * self.scale
            parameters[key] = parameters[key] + adapter[f"lora_b.{name}"].T @ lora_a
        return parameters


def matrices_of(modules: Sequence[AdaptedModule], values: torch.Tensor) -> dict[str, torch.Tensor]:
    """The trained matrices by name, as views of an adapter's values."""
    trained = matrices(modules)
    parts = values.split([matrix.size for matrix in trained])
    return {
        matrix.name: part.reshape(matrix.rank, matrix.width)
        for matrix, part in zip(trained, parts, strict=True)
    }


def text_model(folder: Path, bundle: Bundle) -> Any:
    """The model of a chain as transformers has it, or the text part of one."""
    from server_export.checkpoint.loading import load_model

    model: Any = load_model(str(folder / "model"), pooled=bundle.chain.is_encoder).model
    model.set_experts_implementation("eager")
    return model


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    """Some loss of outputs, in their precision: every one counts, and not in a line."""
    weights = torch.rand(outputs.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return (weights.to(outputs.dtype) * torch.sin(outputs)).sum() / len(outputs)


def slope_of(outputs: Array) -> Array:
    """Derivative of `loss_of` by the outputs."""
    given = torch.tensor(outputs, dtype=torch.float64, requires_grad=True)
    loss_of(given).backward()
    assert given.grad is not None
    return given.grad.numpy()


def by_autograd(whole: Whole, call: Call) -> tuple[FloatArray, FloatArray]:
    """Outputs of a call with one copy, and the gradient of `loss_of` by its values, in PyTorch."""
    values = torch.tensor(call.adapters[0], dtype=whole.model.dtype, requires_grad=True)
    outputs = whole.outputs(call.sequences, values)
    loss_of(outputs).backward()
    assert values.grad is not None
    return outputs.detach().numpy(), values.grad.numpy()


def derivatives(
    whole: Whole, call: Call, directions: Directions, query: int, number: int
) -> tuple[FloatArray, FloatArray]:
    """Outputs of a sequence of a call with one copy, and their derivatives along a direction, in PyTorch."""
    dtype = whole.model.dtype
    outputs, changes = torch.autograd.functional.jvp(
        lambda values: whole.outputs(call.sequences[number : number + 1], values),
        torch.tensor(call.adapters[0], dtype=dtype),
        direction_of(whole.modules, directions, query, number).to(dtype),
    )
    return outputs.detach().numpy(), changes.detach().numpy()


def split(model: ModelSpec, call: Call, outputs: FloatArray) -> list[FloatArray]:
    """Outputs [..., targets] or [..., sequences, width] of each sequence."""
    if model.is_encoder:
        return [outputs[..., number : number + 1, :] for number in range(len(call.sequences))]
    ends = np.cumsum([len(sequence.targets) for sequence in call.sequences])
    return np.split(outputs, ends[:-1], -1)


def computed(engine: Engine, role: str, call: Call) -> tuple[FloatArray, ...]:
    """What an engine answers to a call in a role, along `directions_of` or with `slope_of`."""
    if role == STACK:
        return (engine.forward(call),)
    if role == TANGENT:
        return engine.jvp(call, directions_of(engine.model, 2, len(call.sequences)))
    return engine.vjp(call, slope_of)


def bits(arrays: Iterable[Array]) -> list[bytes]:
    """Of each array."""
    return [array.tobytes() for array in arrays]


def opened(bundle: Bundle, role: str, engine: str = "native", **more: Any) -> OpenEngine:
    """The engine of a bundle for a role."""
    return open_engine(bundle, role, engine=engine, **more)  # type: ignore[arg-type]


def call_of(
    model: ModelSpec, sequences: int, copies: int = 1, lengths: Sequence[int] = (), seed: int = 0
) -> Call:
    """Sequences with targets that repeat, and copies of an adapter.

    Args:
        model: of the engine.
        sequences: how many.
        copies: of the adapter.
        lengths: of the sequences, over and over; by default any, the first one's as long as can be.
        seed: of all numbers.
    """
    random, longest = np.random.default_rng(seed), model.sequence_length
    sizes = np.resize(lengths, sequences) if lengths else random.integers(1, longest + 1, sequences)
    if not lengths:
        sizes[0] = longest
    words = [0, model.vocabulary_size // 2, model.vocabulary_size - 1]
    made = []
    for length in sizes.tolist():
        tokens = random.integers(3, model.vocabulary_size, length).tolist()
        count = 0 if model.is_encoder else random.integers(longest // 2, 2 * longest) + 1
        positions, chosen = random.integers(0, length, count), random.choice(words, count)
        targets = (Target(*pair, 1.0, 0) for pair in zip(positions.tolist(), chosen.tolist(), strict=True))
        made.append(TokenSequence(tuple(tokens), tuple(targets)))
    size = copies, adapter_size(model.modules)
    return Call(tuple(made), np.float32(0.3) * random.standard_normal(size, np.float32))


def directions_of(model: ModelSpec, queries: int, sequences: int) -> dict[str, FloatArray]:
    """A direction for each query and sequence."""
    random = np.random.default_rng(5)
    return {
        name: random.standard_normal((queries, sequences, width), np.float32)
        for matrix in matrices(model.modules)
        for name, width in ((matrix.u, matrix.rank), (matrix.v, matrix.width))
    }


def direction_of(
    modules: Sequence[AdaptedModule], directions: Directions, query: int, number: int
) -> torch.Tensor:
    """The direction of a query and sequence, as an adapter's values."""
    products = [
        np.outer(directions[matrix.u][query, number], directions[matrix.v][query, number]).ravel()
        for matrix in matrices(modules)
    ]
    return torch.from_numpy(np.concatenate(products))


@contextmanager
def counted_loads(engine: OpenEngine) -> Iterator[list[tuple[int, str]]]:
    """The blocks and roles that are loaded meanwhile."""
    blocks: Any = engine.blocks
    load, found = blocks._load, []

    def counted(number: int, role: str, arena: Any) -> Any:
        found.append((number, role))
        return load(number, role, arena)

    blocks._load = counted
    yield found
    blocks._load = load


def gradient_error(folder: Path, bundle: Bundle, longest: int = 0, rows: int = 3) -> float:
    """How far an exact gradient is from autograd's in double precision, as a part of its largest entry."""
    call = _call_up_to(bundle, longest, rows)
    _, expected = by_autograd(Whole.of(folder, torch.float64), call)
    _, found = opened(bundle, BACK).engine.vjp(call, slope_of)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def tangent_error(folder: Path, bundle: Bundle, longest: int = 0, rows: int = 2, queries: int = 2) -> float:
    """How far tangents are from the derivatives of autograd, as a part of the largest."""
    call, model = _call_up_to(bundle, longest, rows), bundle.chain.model
    directions = directions_of(model, queries, rows)
    _, tangents = opened(bundle, TANGENT).engine.jvp(call, directions)
    whole, error, largest = Whole.of(folder, torch.float64), 0.0, 0.0
    values = torch.tensor(call.adapters[0], dtype=torch.float64, requires_grad=True)
    for number, of_sequence in enumerate(split(model, call, tangents)):
        outputs = whole.outputs(call.sequences[number : number + 1], values)
        # One sum of all outputs, each with a weight of its own.
        weights = torch.linspace(1, 2, outputs.numel(), dtype=torch.float64).reshape(outputs.shape)
        (slope,) = torch.autograd.grad((weights * outputs).sum(), values)
        for query in range(queries):
            expected = float(slope @ direction_of(model.modules, directions, query, number).double())
            found = float((of_sequence[query] * weights.numpy()).sum())
            error, largest = max(error, abs(found - expected)), max(largest, abs(expected))
    return error / largest


def _call_up_to(bundle: Bundle, longest: int, rows: int) -> Call:
    """Sequences of all lengths, up to what the chain takes or `longest`."""
    model = bundle.chain.model
    return call_of(replace(model, sequence_length=longest) if longest else model, rows)


def spoken_and_expected(
    folder: Path, bundle: Bundle, whole: Whole, count: int, prompt: int = 5
) -> tuple[list[int], list[int]]:
    """So many tokens that follow a prompt with a random adapter, of the engine and of transformers."""
    adapter = random_adapter(bundle.chain.modules, 1, 0.3)
    start = np.random.default_rng(0).integers(3, bundle.chain.vocabulary_size, prompt).tolist()
    speaker = open_speaker(bundle)
    sequence = speaker.open(adapter)
    logits, written = speaker.feed(sequence, start), list[int]()
    for _ in range(count):
        written.append(int(logits.argmax()))
        logits = speaker.step({sequence: written[-1]})[sequence]
    model = Whole.of(folder).model
    merged = whole.merged(torch.from_numpy(adapter.values))
    for name, parameter in model.named_parameters():
        parameter.copy_(merged[name])
    # Without words that some models are made to begin or end with.
    model.generation_config = type(model.generation_config)()
    found = model.generate(torch.tensor([start]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return written, found[0, prompt:].tolist()


def published_error(folder: Path, bundle: Bundle, whole: Whole) -> float:
    """How far PEFT's answers with a published adapter are from the model's, as a part of the largest."""
    from peft import PeftModel

    from server_export.publish import publish
    from server_export.publishing.settings import PublishConfig

    adapter = random_adapter(bundle.chain.modules, 1, 0.3)
    write_peft(folder / "trained", adapter, bundle.adapter, {"state.json": b"{}"})
    published = publish(
        PublishConfig(
            folder / "trained", folder / "peft", bundle=folder / "bundle", model=str(folder / "model")
        )
    )
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        expected = whole.states(tokens, torch.from_numpy(adapter.values))
        base = text_model(folder, bundle)
        found = Whole.answered(PeftModel.from_pretrained(base, str(published)).eval()(input_ids=tokens))
    return float((found - expected).abs().max() / expected.abs().max())
