"""Every export asks the engine itself: what answers otherwise than its module becomes no bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from prge.errors import BundleError  # noqa: E402
from server_export.check.verification import (  # noqa: E402
    FP32_TOLERANCE,
    lengthened,
    loaded_method,
    run_program,
    verify,
)
from server_export.lower.lowering import lower  # noqa: E402
from server_export.lower.method_graphs import export_programs  # noqa: E402
from server_export.model.program import STEP_METHOD, BuiltProgram, example_inputs  # noqa: E402
from tests.server_export.programs import build  # noqa: E402
from tests.tiny_models import LENGTH, SHALLOW  # noqa: E402

torch.set_num_threads(1)
pytestmark = pytest.mark.export


@dataclass(frozen=True)
class Lowered:
    """A program in a file, what it was made from, and its graphs."""

    path: Path
    built: BuiltProgram
    programs: dict[str, Any]


def lowered(folder: Path, built: BuiltProgram) -> Lowered:
    programs = export_programs(built)
    lower(programs).write(folder / "program.pte")
    return Lowered(folder / "program.pte", built, programs)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    """Three copies of two rows."""
    return lowered(tmp_path_factory.mktemp("stack"), build("llama", model=SHALLOW["llama"]))


def test_a_program_that_answers_as_its_module_is_verified(stack: Lowered) -> None:
    found = verify(stack.path, stack.built, stack.programs)
    assert found.max_absolute_difference < found.tolerance == FP32_TOLERANCE
    assert found.rows == 3 * 2
    assert found.tangent_difference is found.tangent_tolerance is None
    assert found.to_json()["workspace_bytes"] == found.workspace_bytes
    assert found.workspace_bytes.keys() <= {STEP_METHOD}


def test_a_program_of_other_weights_is_refused(stack: Lowered) -> None:
    other = build("llama", model={**SHALLOW["llama"], "seed": 5})
    with pytest.raises(BundleError, match=r"differs from the model by .* fp32 allows 0\.0001"):
        verify(stack.path, other, stack.programs)


def test_a_program_whose_adapter_does_nothing_is_refused(tmp_path: Path) -> None:
    built = build("llama", model=SHALLOW["llama"])
    with torch.no_grad():
        for name, buffer in built.module.named_buffers():
            if name.endswith("lora_a"):
                buffer.zero_()
    dead = lowered(tmp_path, built)
    with pytest.raises(BundleError, match=r"the copies \[1, 2\] .* return what copy 0 returns"):
        verify(dead.path, dead.built, dead.programs)


def test_answers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    built = build("llama", model=SHALLOW["llama"])
    with torch.no_grad():
        built.module.model.model.norm.weight.fill_(float("nan"))
    broken = lowered(tmp_path, built)
    with pytest.raises(BundleError, match="numbers that aren't finite"):
        verify(broken.path, broken.built, broken.programs)


def test_a_quantized_program_may_differ_by_what_quantization_changes(tmp_path: Path) -> None:
    built, wrong = (build("llama", model=SHALLOW["llama"], quantize="8da8w") for _ in range(2))
    quantized = lowered(tmp_path, built)
    found = verify(quantized.path, quantized.built, quantized.programs)
    assert FP32_TOLERANCE < found.tolerance < 0.2
    assert found.max_absolute_difference < found.tolerance
    with torch.no_grad():
        wrong.module.model.model.norm.weight.mul_(1.5)
    with pytest.raises(BundleError, match="8da8w allows"):
        verify(lowered(tmp_path, wrong).path, built, quantized.programs)


@pytest.mark.parametrize("content", [b"", b"no program", bytes(5000)])
def test_a_file_that_is_no_program_is_refused(tmp_path: Path, content: bytes, stack: Lowered) -> None:
    path = tmp_path / "program.pte"
    path.write_bytes(content)
    with pytest.raises(BundleError, match="the engine refuses"):
        loaded_method(path, STEP_METHOD, example_inputs(stack.built.contract))


def test_inputs_of_another_shape_are_refused(stack: Lowered) -> None:
    tokens, *rest = example_inputs(stack.built.contract)
    with pytest.raises(BundleError, match="the engine refuses"):
        run_program(stack.path, [tokens[:, :-1], *rest])


def test_shorter_rows_are_padded_to_the_longest() -> None:
    longest = build("bert", model=SHALLOW["bert"]).contract
    shorter = build("bert", model=SHALLOW["bert"], sequence_length=LENGTH - 5).contract
    inputs = example_inputs(shorter)
    padded = lengthened(inputs, shorter, longest)
    assert [tuple(value.shape) for value in padded] == [spec.shape for spec in longest.inputs]
    assert torch.equal(padded[0][:, : LENGTH - 5], inputs[0]) and not padded[0][:, LENGTH - 5 :].any()
