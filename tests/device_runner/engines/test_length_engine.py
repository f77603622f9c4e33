"""The shortest method that holds what the answers depend on; everything else as with the longest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from device_runner.engines.length_engine import LengthEngine, row_lengths
from device_runner.engines.programs import Programs
from device_runner.engines.trunk_cache import TrunkCache
from device_runner.engines.trunk_engine import TrunkEngine
from prge.bundle import Bundle
from prge.contract import Contract, TensorSpec
from prge.engine import Array
from prge.errors import EngineError
from tests.bundles import make_contract

LENGTHS = (4, 8, 16)
DECODER = make_contract(copies=1)
ENCODER = make_contract(copies=1, readout="pooled", positions=0, width=3)


class Noting:
    """Answers its length, and remembers what it was given."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.given: list[dict[str, Array]] = []

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        for spec in self.contract.inputs:
            if spec.name not in inputs:
                raise EngineError(f"the input {spec.name} is missing")
            if inputs[spec.name].shape != spec.shape:
                raise EngineError(f"{spec.name} is {list(inputs[spec.name].shape)}, not {list(spec.shape)}")
        self.given.append(dict(inputs))
        (answer, *_) = self.contract.outputs
        return {answer.name: np.full(answer.shape, self.contract.sequence_length, answer.dtype)}


def engines(contract: Contract) -> list[Noting]:
    return [Noting(contract.shortened(length)) for length in LENGTHS]


def zeros(contract: Contract) -> dict[str, Array]:
    return {spec.name: np.zeros(spec.shape, spec.dtype) for spec in contract.inputs}


@pytest.mark.parametrize(("last", "length"), [(0, 4), (3, 4), (4, 8), (7, 8), (8, 16), (15, 16)])
def test_a_decoder_needs_the_tokens_up_to_the_last_one_that_is_read(last: int, length: int) -> None:
    """Of all rows of a call; what stands behind it is not looked at."""
    made = engines(DECODER)
    inputs = zeros(DECODER)
    inputs["tokens"][:] = np.arange(16)
    inputs["positions"][1, 2] = last
    assert LengthEngine(made).forward(inputs)["logprobs"][0, 0] == length
    (given,) = made[LENGTHS.index(length)].given
    assert given["tokens"].tolist() == [list(range(length))] * 2
    assert given["positions"] is inputs["positions"]


@pytest.mark.parametrize(("tokens", "length"), [(1, 4), (4, 4), (5, 8), (16, 16)])
def test_an_encoder_needs_the_tokens_that_its_mask_shows(tokens: int, length: int) -> None:
    made = engines(ENCODER)
    inputs = zeros(ENCODER)
    inputs["attention_mask"][0, :tokens] = 1
    inputs["attention_mask"][1, 0] = 1
    assert LengthEngine(made).forward(inputs)["pooled"][0, 0] == length
    (given,) = made[LENGTHS.index(length)].given
    assert given["attention_mask"].sum() == tokens + 1


def test_a_row_without_a_mask_counts_whole() -> None:
    assert row_lengths(zeros(ENCODER), ENCODER).tolist() == [16, 16]


def test_it_is_the_longest_to_whoever_calls_it() -> None:
    made = engines(DECODER)
    assert LengthEngine(made).contract == DECODER
    wrong = zeros(DECODER)
    del wrong["targets"]
    with pytest.raises(EngineError, match="targets is missing"):
        LengthEngine(made).forward(wrong)


def test_inputs_of_another_shape_go_to_the_longest_which_refuses_them() -> None:
    made = engines(DECODER)
    inputs = zeros(DECODER)
    inputs["tokens"] = np.zeros((2, 20), np.int64)
    with pytest.raises(EngineError, match=r"\[2, 20\]"):
        LengthEngine(made).forward(inputs)
    del inputs["tokens"]
    with pytest.raises(EngineError, match="tokens is missing"):
        LengthEngine(made).forward(inputs)


class States(Noting):
    """A trunk whose states are its tokens."""

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.given.append(dict(inputs))
        return {"trunk.0": inputs["tokens"][..., None].astype(np.float32)}


def cut_engines() -> tuple[list[States], list[Noting]]:
    made = [
        DECODER.shortened(length).divided((TensorSpec("trunk.0", "float32", (2, length, 1)),))
        for length in LENGTHS
    ]
    return [States(trunk) for trunk, _ in made], [Noting(step) for _, step in made]


@pytest.mark.parametrize("cached", [False, True])
def test_a_trunk_takes_a_row_at_its_own_length_and_the_step_at_that_of_the_call(
    cached: bool, tmp_path: Path
) -> None:
    trunks, steps = cut_engines()
    cache = TrunkCache(tmp_path / "cache", 1 << 20) if cached else None
    engine = TrunkEngine(trunks, steps, "program", cache)
    inputs = zeros(DECODER)
    inputs["tokens"][:] = np.arange(1, 17)
    inputs["positions"][1, 0] = 7
    assert engine.forward(inputs)["logprobs"][0, 0] == 8
    assert [len(trunk.given) for trunk in trunks] == [1, 1, 0]
    (given,) = steps[1].given
    assert given["trunk.0"][..., 0].tolist() == [[1, 2, 3, 4, 0, 0, 0, 0], [*range(1, 9)]]


def test_what_is_kept_of_a_row_does_not_depend_on_its_company(tmp_path: Path) -> None:
    kept = []
    for name, last in (("short", 0), ("long", 15)):
        trunks, steps = cut_engines()
        engine = TrunkEngine(trunks, steps, "program", TrunkCache(tmp_path / name, 1 << 20))
        inputs = zeros(DECODER)
        inputs["tokens"][:] = np.arange(1, 17)
        inputs["tokens"][1] = 3
        inputs["positions"][1, 0] = last
        engine.forward(inputs)
        kept.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert len(kept[0].keys() & kept[1].keys()) == 1
    assert all(kept[0][name] == kept[1][name] for name in kept[0].keys() & kept[1].keys())


def test_programs_load_the_lengths_that_are_used_and_keep_those_of_a_kind_together() -> None:
    score = make_contract(copies=1, batch_size=8)
    step = make_contract(kind="tangent", copies=1, queries=3)
    bundle = Bundle(Path(), step, {}, score, shorter={4: (), 8: ()})
    loaded: list[str] = []

    def load(method: str) -> Noting:
        loaded.append(method)
        return Noting(bundle.methods[method])

    programs = Programs(bundle, load, lengths=(4, 16))
    inputs = zeros(step)
    for last in (0, 5, 0, 5):
        inputs["positions"][0, 0] = last
        programs.step.forward(inputs)
    assert loaded == ["forward_4", "forward"]
    programs.score.forward(zeros(score))
    programs.step.forward(inputs)
    assert loaded == ["forward_4", "forward", "score_4", "forward"]
    assert Programs(bundle, load).lengths == (16,)
