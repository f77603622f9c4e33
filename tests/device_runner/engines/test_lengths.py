"""Several lengths are used if the memory asked for holds the programs of all, else the longest alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from device_runner.engines.lengths import chosen_lengths, group_bytes, groups
from prge.bundle import Bundle
from prge.contract import TensorSpec
from prge.errors import ConfigError
from tests.bundles import make_contract

WEIGHTS = 1000
STEP = make_contract(kind="tangent", copies=1, queries=3)
SCORE = make_contract(copies=1, batch_size=8)


def report(planned: int) -> dict[str, Any]:
    return {"planned_memory_bytes": planned, "constant_bytes": WEIGHTS}


MANIFEST = {
    "lowering": report(40),
    "score_lowering": report(50),
    "lengths": [
        {"sequence_length": 4, "lowering": {"forward_4": report(10), "score_4": report(15)}},
        {"sequence_length": 8, "lowering": {"forward_8": report(20), "score_8": report(25)}},
    ],
}
BUNDLE = Bundle(Path(), STEP, MANIFEST, SCORE, shorter={4: (), 8: ()})
APART, SHARED = 3 * WEIGHTS + 50 + 25 + 15, WEIGHTS + 50 + 25 + 15


def shared(methods: Sequence[str]) -> bool:
    """An engine that can share weights."""
    assert methods in (["forward_4", "forward_8", "forward"], ["score_4", "score_8", "score"])
    return True


def apart(methods: Sequence[str]) -> bool:
    """One that can't."""
    return False


def test_methods_of_steps_and_of_scoring_are_in_memory_by_turns() -> None:
    steps, scoring = groups(BUNDLE, (4, 8, 16))
    assert (steps, scoring) == (["forward_4", "forward_8", "forward"], ["score_4", "score_8", "score"])
    assert groups(BUNDLE, (16,), keep=True) == [["forward", "score"]]
    assert groups(BUNDLE, (8, 16), only_scoring=True) == [["score_8", "score"]]
    stack = Bundle(Path(), make_contract(), {}, shorter={4: ()})
    assert groups(stack, (4, 16)) == [["forward_4", "forward"]]


def test_bytes_are_the_weights_for_every_copy_and_what_is_planned() -> None:
    assert group_bytes(BUNDLE, ["score_4", "score_8", "score"], shared=False) == APART
    assert group_bytes(BUNDLE, ["score_4", "score_8", "score"], shared=True) == SHARED
    assert group_bytes(Bundle(Path(), STEP, {}, SCORE), ["forward"], shared=False) is None


def test_trunk_and_step_have_one_copy_between_them() -> None:
    cut = tuple(TensorSpec("trunk.0", "float32", (2, length, 3)) for length in (4, 16))
    trunk, step = STEP.divided(cut[1:])
    manifest = {
        "lowering": report(1),
        "trunk_lowering": report(2),
        "lengths": [{"sequence_length": 4, "lowering": {"step_4": report(3), "trunk_4": report(4)}}],
    }
    bundle = Bundle(Path(), step, manifest, SCORE, trunk, {4: cut[:1]})
    (steps, _) = groups(bundle, (4, 16))
    assert steps == ["trunk_4", "trunk", "step_4", "step"]
    assert group_bytes(bundle, steps, shared=False) == 2 * WEIGHTS + 10


@pytest.mark.parametrize(
    ("can_share", "limit", "lengths"),
    [
        (apart, APART, (4, 8, 16)),
        (apart, APART - 1, (16,)),
        (shared, SHARED, (4, 8, 16)),
        (shared, SHARED - 1, (16,)),
    ],
)
def test_all_lengths_or_the_longest(
    can_share: Callable[[Sequence[str]], bool], limit: int, lengths: tuple[int, ...]
) -> None:
    found, said = chosen_lengths(BUNDLE, None, limit, can_share)
    assert found == lengths
    assert (f"programs of all lengths need {APART} bytes, --program-bytes is {limit}" in said) == (
        lengths == (16,)
    )


def test_what_was_asked_for_is_used_with_the_longest() -> None:
    assert chosen_lengths(BUNDLE, [8], 0, apart) == ((8, 16), "")
    with pytest.raises(ConfigError, match="--lengths has 5, the bundle's are 4, 8, 16"):
        chosen_lengths(BUNDLE, [5], 0, apart)


def test_a_bundle_of_one_length_has_nothing_to_choose() -> None:
    bundle = Bundle(Path(), STEP, {}, SCORE)
    assert chosen_lengths(bundle, None, 0, apart) == ((16,), "")
