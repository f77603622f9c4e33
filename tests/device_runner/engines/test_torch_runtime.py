"""The runtime's Python module gives the same bits as the native engine, without packed files."""

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
from tests.device_runner.engines.blocks import (
    METHODS,
    LoweredBlocks,
    compute_outputs,
    make_inputs,
    make_outputs,
)
from tests.refusals import raises


@pytest.fixture(scope="module", params=["fp32", "8da4w"])
def lowered(
    request: pytest.FixtureRequest, make_blocks: Callable[[str, bool], LoweredBlocks]
) -> LoweredBlocks:
    """Return blocks of each scheme, with dynamic shapes."""
    return make_blocks(request.param, True)


def loaded(lowered: LoweredBlocks, runtime: Any) -> list[dict[str, Any]]:
    """Load the methods of both blocks."""
    program = runtime.Program(lowered.program)
    files = [runtime.WeightsFile(path) for path in lowered.weights]
    return [{name: program.load(name, weights=weights) for name in METHODS} for weights in files]


@needs_compiler
def test_both_blocks_compute_correctly_and_like_the_native_engine(lowered: LoweredBlocks) -> None:
    native = loaded(lowered, native_runtime)
    assert compute_outputs(lowered, loaded(lowered, torch_runtime)) == compute_outputs(lowered, native)


def test_read_only_inputs_are_accepted(lowered: LoweredBlocks) -> None:
    program = torch_runtime.Program(lowered.program)
    method = program.load("score", weights=torch_runtime.WeightsFile(lowered.weights[0]))
    inputs, outputs = make_inputs("score", 2, 3), make_outputs("score", 2, 3)
    inputs[0].flags.writeable = False
    method.run(inputs, outputs)
    lowered.assert_right(0, "score", inputs, outputs)


def test_weights_that_are_damaged_foreign_or_missing_give_an_error(
    lowered: LoweredBlocks, make_blocks: Callable[[str, bool], LoweredBlocks], tmp_path: Path
) -> None:
    content = lowered.weights[0].read_bytes()
    other = make_blocks("8da4w" if lowered.scheme == "fp32" else "fp32", True).weights[0].read_bytes()
    path = tmp_path / "damaged.ptd"

    def attempt() -> None:
        method = torch_runtime.Program(lowered.program).load("score", weights=torch_runtime.WeightsFile(path))
        method.run(make_inputs("score"), make_outputs("score"))

    for changed in (b"", content[:100], content[: len(content) // 2], other, bytes(len(content)), None):
        path.unlink(missing_ok=True)
        if changed is not None:
            path.write_bytes(changed)
        with raises(BundleError, "program-refused", "program-of-other-version", containing=str(path)):
            check_in_child(path, attempt)
