"""Programs load when they are called, and never two of a bundle at once unless asked."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from device_runner.engines.programs import Programs
from prge.bundle import Bundle
from prge.contract import Contract
from prge.engine import Array
from tests.bundles import make_contract

STEP = make_contract(kind="tangent", copies=1, queries=3)
SCORE = make_contract(copies=1, batch_size=8)


class Answering:
    """Answers zeros."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {spec.name: np.zeros(spec.shape, spec.dtype) for spec in self.contract.outputs}


class Loader:
    """Remembers what it loaded and what of it is still in memory."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.methods: list[str] = []
        self.most = 0
        self.alive: weakref.WeakSet[Answering] = weakref.WeakSet()

    def __call__(self, method: str) -> Answering:
        engine = Answering(self.bundle.methods[method])
        self.methods.append(method)
        self.alive.add(engine)
        self.most = max(self.most, len(self.alive))
        return engine


@pytest.fixture
def bundle() -> Bundle:
    return Bundle(Path(), STEP, {}, SCORE)


def test_contracts_are_known_before_anything_is_loaded(bundle: Bundle) -> None:
    load = Loader(bundle)
    programs = Programs(bundle, load)
    assert (programs.step.contract, programs.score.contract) == (STEP, SCORE)
    assert load.methods == []


def test_one_program_is_in_memory_at_a_time(bundle: Bundle) -> None:
    load = Loader(bundle)
    programs = Programs(bundle, load)
    for engine in (programs.step, programs.step, programs.score, programs.step):
        assert list(engine.forward({})) == [spec.name for spec in engine.contract.outputs]
    assert load.methods == ["forward", "score", "forward"]
    assert load.most == 1


def test_kept_programs_load_once(bundle: Bundle) -> None:
    load = Loader(bundle)
    programs = Programs(bundle, load, keep=True)
    for engine in (programs.step, programs.score, programs.step, programs.score):
        engine.forward({})
    assert load.methods == ["forward", "score"]
    assert load.most == 2


def test_a_stack_bundle_scores_with_the_program_of_its_steps() -> None:
    bundle = Bundle(Path(), replace(SCORE, copies=4), {})
    load = Loader(bundle)
    programs = Programs(bundle, load)
    programs.step.forward({})
    programs.score.forward({})
    assert load.methods == ["forward"]
    assert programs.score.contract == programs.step.contract
