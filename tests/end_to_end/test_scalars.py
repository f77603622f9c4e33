"""The whole chain on a small Llama: rows to scalars, in eager PyTorch and on the engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from prge.estimators import Step

pytest.importorskip("torch")

import torch
from eager_engine import EagerEngine

from device_runner.engines.executorch_engine import ExecutorchEngine
from prge.adapter import Adapter
from prge.bundle import Bundle
from prge.differences import Antithetic, Differences, OneSided, Rule
from prge.directions import Directions
from prge.engine import Engine
from prge.examples import Example
from prge.sampling import Sampler
from server_export.lower.lowering import lower
from server_export.lower.method_graphs import export_programs
from server_export.model.program import BuiltProgram
from tests.rows import choice, completion
from tests.server_export.programs import build

torch.set_num_threads(1)

QUERIES = 3
ROWS: dict[str, Sequence[Example]] = {
    "completions": [completion(row, [1, row + 3, row + 7, 9, row + 11], 2) for row in range(1, 9)],
    "candidates": [choice(row, [1, row + 3, row + 7], [40, 41], row % 2) for row in range(1, 9)],
}


def _program(copies: int, layers: int = 2) -> BuiltProgram:
    torch.manual_seed(0)
    shallow = {"num_hidden_layers": layers}
    return build("llama", shallow, target_modules="all-linear", copies=copies, batch_size=2)


def _adapter(built: BuiltProgram) -> Adapter:
    adapter = Adapter.zeros(built.contract.modules)
    adapter.values[:] = np.random.default_rng(0).normal(size=adapter.size) * 0.05
    return adapter


def _scalars(engine: Engine, adapter: Adapter, rule: Rule, rows: str) -> np.ndarray:
    batches = Sampler(ROWS[rows], engine.contract, seed=1, calls=2).batches(0)
    return Differences(rule).measure(engine, Step(adapter, batches, 1, 0)).scalars


@pytest.mark.parametrize("rows", ROWS)
def test_scalars_are_the_derivatives_of_autograd(rows: str) -> None:
    """In float64, sign included."""
    built = _program(copies=1)
    engine = EagerEngine(built.module, built.contract, torch.float64)
    adapter = _adapter(built)
    exact = np.zeros(adapter.size)
    batches = Sampler(ROWS[rows], engine.contract, seed=1, calls=2).batches(0)
    for batch in batches:
        inputs = {**batch.inputs(1, False), **{m.input_name: v[None] for m, v in _modules(adapter)}}
        weights = -batch.weights / (batch.examples * len(batches))
        if rows == "candidates":
            logprobs = engine.forward(inputs)["logprobs"][:, :2].astype(np.float64)
            posterior = np.exp(logprobs - np.logaddexp(*logprobs.T)[:, None])
            weights[:, :2] *= np.eye(2)[batch.labels] - posterior
        gradients = engine.gradients(inputs, weights)
        exact += np.concatenate([gradients[module.input_name].ravel() for module, _ in _modules(adapter)])
    directions = Directions("rademacher", 1, 0, adapter.size)
    expected = [directions(query) @ exact for query in range(QUERIES)]
    found = _scalars(engine, adapter, Antithetic(QUERIES, 1e-4), rows)
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
    assert np.abs(expected).min() > 0.02


def _modules(adapter: Adapter) -> list[tuple[object, np.ndarray]]:  # type: ignore[type-arg]
    return [(module, adapter.named()[module.name]) for module in adapter.modules]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ExecutorchEngine]:
    """The same model with one copy, two, q and 2q copies."""
    found = {}
    for copies in (1, 2, QUERIES, 2 * QUERIES):
        folder = tmp_path_factory.mktemp("programs")
        built = _program(copies, layers=1)
        lowered = lower(export_programs(built))
        (folder / "program.pte").write_bytes(lowered.buffer)
        found[copies] = ExecutorchEngine.load(Bundle(folder, built.contract, {}), check=False)
    return found


@pytest.mark.export
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "rule", [Antithetic(QUERIES, 1e-2), OneSided(QUERIES, 1e-2)], ids=["antithetic", "one-sided"]
)
def test_copies_change_the_speed_and_nothing_else(
    engines: dict[int, ExecutorchEngine], rule: Rule, rows: str
) -> None:
    adapter = _adapter(_program(1, layers=1))
    found = {copies: _scalars(engine, adapter, rule, rows) for copies, engine in engines.items()}
    for scalars in found.values():
        np.testing.assert_allclose(scalars, found[1], atol=1e-6)
    assert np.abs(found[1]).min() > 1e-3
