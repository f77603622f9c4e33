"""Exported chains, calls of them, and what PyTorch computes of the same calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from device_runner.engines import torch_runtime
from device_runner.engines.native import runtime as native_runtime
from device_runner.engines.opening import OpenEngine, open_engine
from device_runner.engines.speaking import open_speaker
from prge.engine import Array, Call, Engine, FloatArray, Target, TokenSequence
from prge.files.adapter import Adapter, adapter_size
from prge.files.bundle import Bundle, open_bundle
from prge.files.peft import write_peft
from prge.files.signatures import BACK, STACK, TANGENT
from prge.learning import vocabulary
from prge.model_spec import ModelSpec, matrices
from server_export.checkpoint.loading import load_model
from server_export.oracle import TorchEngine, open_base
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


def oracle_of(folder: Path, dtype: torch.dtype = torch.float32) -> TorchEngine:
    """What PyTorch computes of the model and the bundle that `export_chain` wrote."""
    bundle = open_bundle(folder / "bundle")
    return TorchEngine.of(bundle, open_base(bundle, str(folder / "model"))).to(dtype)


def logits_of(oracle: TorchEngine, adapter: Adapter, tokens: Sequence[int]) -> FloatArray:
    """Logits [tokens, vocabulary] of what follows each token of a text."""
    values = torch.from_numpy(adapter.values).to(oracle.dtype)
    with torch.no_grad():
        found: FloatArray = oracle.logits(torch.tensor([tokens]), values)[0].numpy()
    return found


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


@contextmanager
def counted_loads(engine: OpenEngine) -> Iterator[list[tuple[int, str]]]:
    """The blocks and roles that are loaded meanwhile."""
    numbers = {id(file): number for number, file in engine.blocks.files.items()}
    found: list[tuple[int, str]] = []

    def noted(load: Callable[..., Any]) -> Callable[..., Any]:
        def loading(program: Any, role: str, weights: Any, arena: Any = None) -> Any:
            found.append((numbers[id(weights)], role))
            return load(program, role, weights, arena)

        return loading

    with pytest.MonkeyPatch.context() as patch:
        for runtime in (native_runtime, torch_runtime):
            patch.setattr(runtime.Program, "load", noted(runtime.Program.load))
        yield found


def gradient_error(folder: Path, bundle: Bundle, longest: int = 0, rows: int = 3) -> float:
    """How far an exact gradient is from autograd's in double precision, as a part of its largest entry."""
    call = _call_up_to(bundle, longest, rows)
    _, expected = oracle_of(folder, torch.float64).vjp(call, slope_of)
    _, found = opened(bundle, BACK).engine.vjp(call, slope_of)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def tangent_error(folder: Path, bundle: Bundle, longest: int = 0, rows: int = 2, queries: int = 2) -> float:
    """How far tangents are from the derivatives in double precision, as a part of the largest."""
    call, model = _call_up_to(bundle, longest, rows), bundle.chain.model
    directions = directions_of(model, queries, rows)
    tangents, exact = (
        split(model, call, engine.jvp(call, directions)[1])
        for engine in (opened(bundle, TANGENT).engine, oracle_of(folder, torch.float64))
    )
    error = largest = 0.0
    for found, expected in zip(tangents, exact, strict=True):
        # One sum of all outputs, each with a weight of its own.
        weights = np.linspace(1, 2, expected[0].size).reshape(expected[0].shape)
        for query in range(queries):
            change = float((expected[query] * weights).sum())
            error = max(error, abs(float((found[query] * weights).sum()) - change))
            largest = max(largest, abs(change))
    return error / largest


def _call_up_to(bundle: Bundle, longest: int, rows: int) -> Call:
    """Sequences of all lengths, up to what the chain takes or `longest`."""
    model = bundle.chain.model
    return call_of(replace(model, sequence_length=longest) if longest else model, rows)


def spoken_and_expected(
    folder: Path, bundle: Bundle, count: int, prompt: int = 5
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
    oracle = oracle_of(folder)
    # Without words that some models are made to begin or end with.
    oracle.network.generation_config = type(oracle.network.generation_config)()
    with oracle.adapted(torch.from_numpy(adapter.values)):
        found = oracle.network.generate(
            torch.tensor([start]), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return written, found[0, prompt:].tolist()


def published_error(folder: Path, bundle: Bundle) -> float:
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
    # Of the weights as they are: an adapter is published for these.
    plain, base = (load_model(str(folder / "model"), pooled=bundle.chain.is_encoder) for _ in range(2))
    oracle = TorchEngine.of(bundle, plain)
    network: Any = base.model
    network.set_experts_implementation("eager")
    with torch.no_grad():
        expected = _answers(oracle.call(torch.from_numpy(adapter.values), input_ids=tokens))
        found = _answers(PeftModel.from_pretrained(network, str(published)).eval()(input_ids=tokens))
    return float((found - expected).abs().max() / expected.abs().max())


def _answers(output: Any) -> torch.Tensor:
    """Logits or states of what a model returns."""
    found: torch.Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return found
