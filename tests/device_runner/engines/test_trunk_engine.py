"""Trunk and step as one engine: every row goes through the trunk once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from device_runner.engines.programs import Programs
from device_runner.engines.trunk_cache import TrunkCache
from device_runner.engines.trunk_engine import TrunkEngine
from prge.bundle import Bundle
from prge.contract import Contract, TensorSpec
from prge.engine import Array
from prge.errors import EngineError
from tests.bundles import make_contract

WHOLE = make_contract(batch_size=3, shared_rows=True)
CUT = (TensorSpec("trunk.0", "float32", (3, 16, 2)),)
TRUNK, STEP = WHOLE.divided(CUT)


class Trunk:
    """States that tell their tokens apart."""

    contract = TRUNK

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if "tokens" not in inputs:
            raise EngineError("the input tokens is missing")
        tokens = inputs["tokens"]
        assert tokens.shape == TRUNK.inputs[0].shape
        self.calls.append(tokens[:, 0].tolist())
        return {"trunk.0": np.stack([tokens, tokens**2], -1).astype(np.float32)}


class Step:
    """Answers the states that it gets."""

    contract = STEP

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        assert sorted(inputs) == sorted(spec.name for spec in STEP.inputs)
        answer = inputs["trunk.0"].sum((1, 2))
        return {"logprobs": np.repeat(answer, STEP.copies * STEP.positions).reshape(STEP.outputs[0].shape)}


def tokens(*rows: int) -> dict[str, Array]:
    """A call's inputs, each row full of one number."""
    return {
        spec.name: np.repeat(np.array(rows), 16).reshape(3, 16)
        if spec.name == "tokens"
        else np.zeros(spec.shape, spec.dtype)
        for spec in WHOLE.inputs
    }


@pytest.fixture
def trunk() -> Trunk:
    return Trunk()


@pytest.fixture
def cached(trunk: Trunk, tmp_path: Path) -> TrunkEngine:
    return TrunkEngine([trunk], [Step()], "program", TrunkCache(tmp_path / "cache", 1 << 20))


def test_it_is_the_program_that_was_cut(cached: TrunkEngine) -> None:
    assert cached.contract == WHOLE


def test_answers_are_those_without_a_cache(trunk: Trunk, cached: TrunkEngine) -> None:
    plain = TrunkEngine([trunk], [Step()], "program")
    for rows in ((1, 2, 3), (3, 4, 1), (1, 1, 5)):
        expected = plain.forward(tokens(*rows))["logprobs"]
        assert np.array_equal(cached.forward(tokens(*rows))["logprobs"], expected)


def test_a_row_is_computed_once(trunk: Trunk, cached: TrunkEngine) -> None:
    cached.forward(tokens(1, 2, 3))
    cached.forward(tokens(3, 2, 1))
    assert trunk.calls == [[1, 2, 3]]
    cached.forward(tokens(4, 2, 5))
    # Slots that aren't needed repeat a row that is.
    assert trunk.calls[1:] == [[4, 5, 4]]
    assert (cached.computed, cached.reused) == (5, 4)


def test_equal_rows_of_a_call_are_computed_once(trunk: Trunk, cached: TrunkEngine) -> None:
    cached.forward(tokens(7, 7, 7))
    assert (cached.computed, cached.reused) == (1, 2)


def test_a_cache_outlives_its_engine(trunk: Trunk, cached: TrunkEngine, tmp_path: Path) -> None:
    cached.forward(tokens(1, 2, 3))
    again = TrunkEngine([trunk], [Step()], "program", TrunkCache(tmp_path / "cache", 1 << 20))
    again.forward(tokens(1, 2, 3))
    assert (again.computed, again.reused) == (0, 3)
    other = TrunkEngine([trunk], [Step()], "another program", TrunkCache(tmp_path / "cache", 1 << 20))
    other.forward(tokens(1, 2, 3))
    assert other.computed == 3


def test_values_are_rounded_before_they_are_kept_too(trunk: Trunk, tmp_path: Path) -> None:
    """So that a run that was resumed, with or without its cache, sees the same bits."""
    half = TrunkEngine([trunk], [Step()], "program", TrunkCache(tmp_path / "half", 1 << 20, "float16"))
    first = half.forward(tokens(45, 46, 47))["logprobs"]
    assert np.array_equal(half.forward(tokens(45, 46, 47))["logprobs"], first)
    none = TrunkEngine([trunk], [Step()], "program", TrunkCache(tmp_path / "none", 0, "float16"))
    assert np.array_equal(none.forward(tokens(45, 46, 47))["logprobs"], first)


def test_a_missing_input_is_told_by_the_engine(cached: TrunkEngine) -> None:
    inputs = tokens(1, 2, 3)
    del inputs["tokens"]
    with pytest.raises(EngineError, match="the input tokens is missing"):
        cached.forward(inputs)


def test_trunk_and_step_stay_in_memory_together_and_scoring_takes_their_place() -> None:
    score = make_contract(copies=1, batch_size=8)
    bundle = Bundle(Path(), STEP, {}, score, TRUNK)
    loaded: list[str] = []

    class Scoring:
        contract: Contract = score

        def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
            return {}

    def load(method: str) -> Trunk | Step | Scoring:
        loaded.append(method)
        return {"trunk": Trunk, "step": Step, "score": Scoring}[method]()  # type: ignore[return-value]

    programs = Programs(bundle, load)  # type: ignore[arg-type]
    assert programs.step.contract == WHOLE
    for _ in range(2):
        programs.step.forward(tokens(1, 2, 3))
    assert loaded == ["trunk", "step"]
    programs.score.forward({})
    programs.score.forward({})
    programs.step.forward(tokens(1, 2, 3))
    assert loaded == ["trunk", "step", "score", "trunk", "step"]
