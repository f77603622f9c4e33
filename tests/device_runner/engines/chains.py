"""Exported chains, calls of them, and PyTorch's outputs for the same calls."""

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
from device_runner.engines.generator import open_generation_engine
from device_runner.engines.native import runtime as native_runtime
from device_runner.engines.opening import OpenEngine, open_engine
from prge.engine import Array, Call, Engine, FloatArray, Target, TokenSequence
from prge.formats.adapter import Adapter, adapter_size
from prge.formats.bundle import Bundle, open_bundle
from prge.formats.peft import write_peft
from prge.formats.signatures import BACKWARD, FORWARD, JVP
from prge.model_spec import ModelSpec, matrices
from prge.numerics import vocabulary_shards as vocabulary
from server_export.checkpoint.loading import load_model
from server_export.oracle import TorchEngine, load_base_model
from tests.templates import random_adapter
from tests.tiny_models import save_model

TOKENS = 16
# More positions than one call computes.
POSITIONS = 224


def export_chain(
    folder: Path, architecture: str, layers: int = 0, positions: int = 0, **settings: Any
) -> Path:
    """Return a folder with `model` and `bundle`: a tiny model for rows of TOKENS, by default with all roles.

    It has two blocks, or the given number of Llama layers, and by default 64 positions. Its vocabulary is
    read in four shards, like a large one.
    """
    from server_export.export import ExportConfig, export

    changes = {"num_hidden_layers": layers} if layers else {}
    if positions:
        changes["n_positions" if architecture == "gpt2" else "max_position_embeddings"] = positions
    save_model(folder / "model", architecture, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "_MAX_SHARD_SIZE", 2048)
        export(
            ExportConfig(
                model=str(folder / "model"),
                out=folder / "bundle",
                **{"rank": 2, "sequence_length": TOKENS, **settings},
            )
        )
    return folder


def oracle_of(folder: Path, dtype: torch.dtype = torch.float32) -> TorchEngine:
    """Return PyTorch's outputs of the model and bundle that `export_chain` wrote."""
    bundle = open_bundle(folder / "bundle")
    return TorchEngine.of(bundle, load_base_model(bundle, str(folder / "model"))).to(dtype)


def logits_of(oracle: TorchEngine, adapter: Adapter, tokens: Sequence[int]) -> FloatArray:
    """Return the logits [tokens, vocabulary] after each token of a text."""
    values = torch.from_numpy(adapter.values).to(oracle.dtype)
    with torch.no_grad():
        result: FloatArray = oracle.logits(torch.tensor([tokens]), values)[0].numpy()
    return result


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    """Return a nonlinear loss of all outputs, in their precision."""
    weights = torch.rand(outputs.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return (weights.to(outputs.dtype) * torch.sin(outputs)).sum() / len(outputs)


def loss_gradient_of(outputs: Array) -> Array:
    """Return the gradient of `loss_of` with respect to the outputs."""
    outputs_tensor = torch.tensor(outputs, dtype=torch.float64, requires_grad=True)
    loss_of(outputs_tensor).backward()
    assert outputs_tensor.grad is not None
    return outputs_tensor.grad.numpy()


def split(model: ModelSpec, call: Call, outputs: FloatArray) -> list[FloatArray]:
    """Split outputs [..., targets] or [..., sequences, width] by sequence."""
    if model.is_encoder:
        return [outputs[..., number : number + 1, :] for number in range(len(call.sequences))]
    ends = np.cumsum([len(sequence.targets) for sequence in call.sequences])
    return np.split(outputs, ends[:-1], -1)


def computed(engine: Engine, role: str, call: Call) -> tuple[FloatArray, ...]:
    """Return an engine's outputs of a call in a role, along `directions_of` or with `loss_gradient_of`."""
    if role == FORWARD:
        return (engine.forward(call),)
    if role == JVP:
        return engine.jvp(call, directions_of(engine.model, 2, len(call.sequences)))
    return engine.vjp(call, loss_gradient_of)


def bits(arrays: Iterable[Array]) -> list[bytes]:
    """Return the bits of each array."""
    return [array.tobytes() for array in arrays]


def opened(bundle: Bundle, role: str, engine: str = "native", **more: Any) -> OpenEngine:
    """Open the engine of a bundle for a role."""
    return open_engine(bundle, role, engine=engine, **more)  # type: ignore[arg-type]


def call_of(
    model: ModelSpec, sequences: int, copies: int = 1, lengths: Sequence[int] = (), seed: int = 0
) -> Call:
    """Return a call of sequences with repeated targets, and copies of an adapter.

    Args:
        model: spec of the engine's model.
        sequences: number of sequences.
        copies: number of copies of the adapter.
        lengths: lengths of the sequences, repeated; by default random ones, the first as long as possible.
        seed: seed of all random values.
    """
    random, longest = np.random.default_rng(seed), model.sequence_length
    sizes = np.resize(lengths, sequences) if lengths else random.integers(1, longest + 1, sequences)
    if not lengths:
        sizes[0] = longest
    candidates = [0, model.vocabulary_size // 2, model.vocabulary_size - 1]
    result = []
    for length in sizes.tolist():
        tokens = random.integers(3, model.vocabulary_size, length).tolist()
        count = 0 if model.is_encoder else random.integers(longest // 2, 2 * longest) + 1
        positions, chosen = random.integers(0, length, count), random.choice(candidates, count)
        targets = (Target(*pair, 1.0, 0) for pair in zip(positions.tolist(), chosen.tolist(), strict=True))
        result.append(TokenSequence(tuple(tokens), tuple(targets)))
    size = copies, adapter_size(model.modules)
    return Call(tuple(result), np.float32(0.3) * random.standard_normal(size, np.float32))


def directions_of(model: ModelSpec, queries: int, sequences: int) -> dict[str, FloatArray]:
    """Return a direction for each query and sequence."""
    random = np.random.default_rng(5)
    return {
        name: random.standard_normal((queries, sequences, width), np.float32)
        for matrix in matrices(model.modules)
        for name, width in ((matrix.u, matrix.rank), (matrix.v, matrix.width))
    }


@contextmanager
def counted_loads(engine: OpenEngine) -> Iterator[list[tuple[int, str]]]:
    """Count the blocks and roles that are loaded in the meantime."""
    numbers = {id(file): number for number, file in engine.blocks.files.items()}
    result: list[tuple[int, str]] = []

    def noted(load: Callable[..., Any]) -> Callable[..., Any]:
        def loading(program: Any, role: str, weights: Any, arena: Any = None) -> Any:
            result.append((numbers[id(weights)], role))
            return load(program, role, weights, arena)

        return loading

    with pytest.MonkeyPatch.context() as patch:
        for runtime in (native_runtime, torch_runtime):
            patch.setattr(runtime.Program, "load", noted(runtime.Program.load))
        yield result


def gradient_error(folder: Path, bundle: Bundle, longest: int = 0, rows: int = 3) -> float:
    """Return the error of a gradient against autograd in double precision, relative to its largest entry."""
    call = _call_up_to(bundle, longest, rows)
    _, expected = oracle_of(folder, torch.float64).vjp(call, loss_gradient_of)
    _, result = opened(bundle, BACKWARD).engine.vjp(call, loss_gradient_of)
    return float(np.abs(result - expected).max() / np.abs(expected).max())


def tangent_error(folder: Path, bundle: Bundle, longest: int = 0, rows: int = 2, queries: int = 2) -> float:
    """Return the error of tangents against derivatives in double precision, relative to the largest."""
    call, model = _call_up_to(bundle, longest, rows), bundle.chain.model
    directions = directions_of(model, queries, rows)
    tangents, exact = (
        split(model, call, engine.jvp(call, directions)[1])
        for engine in (opened(bundle, JVP).engine, oracle_of(folder, torch.float64))
    )
    error = largest = 0.0
    for result, expected in zip(tangents, exact, strict=True):
        # One sum of all outputs, each with a weight of its own.
        weights = np.linspace(1, 2, expected[0].size).reshape(expected[0].shape)
        for query in range(queries):
            change = float((expected[query] * weights).sum())
            error = max(error, abs(float((result[query] * weights).sum()) - change))
            largest = max(largest, abs(change))
    return error / largest


def _call_up_to(bundle: Bundle, longest: int, rows: int) -> Call:
    """Return a call of sequences of all lengths, up to the chain's limit or `longest`."""
    model = bundle.chain.model
    return call_of(replace(model, sequence_length=longest) if longest else model, rows)


def spoken_and_expected(
    folder: Path, bundle: Bundle, count: int, prompt: int = 5
) -> tuple[list[int], list[int]]:
    """Generate tokens after a prompt with a random adapter, by the engine and by transformers."""
    adapter = random_adapter(bundle.chain.modules, 1, 0.3)
    start = np.random.default_rng(0).integers(3, bundle.chain.vocabulary_size, prompt).tolist()
    generation_engine = open_generation_engine(bundle)
    sequence = generation_engine.open(adapter)
    logits, written = generation_engine.feed(sequence, start), list[int]()
    for _ in range(count):
        written.append(int(logits.argmax()))
        logits = generation_engine.step({sequence: written[-1]})[sequence]
    oracle = oracle_of(folder)
    # Without the special tokens that some models start or end with.
    oracle.network.generation_config = type(oracle.network.generation_config)()
    with oracle.adapted(torch.from_numpy(adapter.values)):
        result = oracle.network.generate(
            torch.tensor([start]), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return written, result[0, prompt:].tolist()


def published_error(folder: Path, bundle: Bundle) -> float:
    """Return the error of PEFT's outputs with a published adapter, relative to the largest."""
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
    # With the original weights, for which an adapter is published.
    plain, base = (load_model(str(folder / "model"), pooled=bundle.chain.is_encoder) for _ in range(2))
    oracle = TorchEngine.of(bundle, plain)
    network: Any = base.model
    network.set_experts_implementation("eager")
    with torch.no_grad():
        expected = _answers(oracle.call(torch.from_numpy(adapter.values), input_ids=tokens))
        result = _answers(PeftModel.from_pretrained(network, str(published)).eval()(input_ids=tokens))
    return float((result - expected).abs().max() / expected.abs().max())


def _answers(output: Any) -> torch.Tensor:
    """Return logits or hidden states of a model's result."""
    result: torch.Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return result
