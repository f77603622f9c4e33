"""The runtime's Python module gives the native bits for blocks, without packed files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from device_runner.engines import torch_runtime
from device_runner.engines.child_check import check_in_child
from device_runner.engines.native import runtime as native_runtime
from prge.errors import BundleError
from tests.compilers import needs_compiler
from tests.device_runner.engines.blocks import METHODS, Kind, answers, example, room
from tests.refusals import raises


@pytest.fixture(scope="module", params=["fp32", "8da4w"])
def kind(request: pytest.FixtureRequest, make_kind: Callable[[str, bool], Kind]) -> Kind:
    """One of each scheme, with dynamic shapes."""
    return make_kind(request.param, True)


def loaded(kind: Kind, runtime: Any) -> list[dict[str, Any]]:
    """The methods of both blocks."""
    program = runtime.Program(kind.program)
    files = [runtime.WeightsFile(path) for path in kind.weights]
    return [{name: program.load(name, weights=weights) for name in METHODS} for weights in files]


@needs_compiler
def test_both_blocks_are_right_and_equal_to_the_native_engine(kind: Kind) -> None:
    native = loaded(kind, native_runtime)
    assert answers(kind, loaded(kind, torch_runtime)) == answers(kind, native)


def test_read_only_inputs_are_taken(kind: Kind) -> None:
    program = torch_runtime.Program(kind.program)
    method = program.load("score", weights=torch_runtime.WeightsFile(kind.weights[0]))
    inputs, outputs = example("score", 2, 3), room("score", 2, 3)
    inputs[0].flags.writeable = False
    method.run(inputs, outputs)
    kind.assert_right(0, "score", inputs, outputs)


def test_weights_that_are_damaged_foreign_or_missing_give_an_error(
    kind: Kind, make_kind: Callable[[str, bool], Kind], tmp_path: Path
) -> None:
    content = kind.weights[0].read_bytes()
    other = make_kind("8da4w" if kind.scheme == "fp32" else "fp32", True).weights[0].read_bytes()
    path = tmp_path / "damaged.ptd"

    def attempt() -> None:
        method = torch_runtime.Program(kind.program).load("score", weights=torch_runtime.WeightsFile(path))
        method.run(example("score"), room("score"))

    for changed in (b"", content[:100], content[: len(content) // 2], other, bytes(len(content)), None):
        path.unlink(missing_ok=True)
        if changed is not None:
            path.write_bytes(changed)
        with raises(BundleError, "program-refused", "program-of-other-version", saying=str(path)):
            check_in_child(path, attempt)
