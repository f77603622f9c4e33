"""Every row of gpu_training.py takes the steps that numpy takes in double precision."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_kernels import PARTS, NoOpenCLError, OpenCL, OpenCLTrainer, plan_step
from gpu_training import (
    BATCH,
    COPYING,
    NETWORKS,
    RATE,
    TOLERANCE,
    MnnTrainer,
    NumpyTrainer,
    TorchTrainer,
    compare,
    main,
    measure,
)

# Neither width is a multiple of a tile.
ODD = (37, 21, 5)
SOFTWARE = {"device_type": "cpu", "timed": False}


@pytest.fixture(scope="module")
def opencl() -> OpenCL:
    """A device of OpenCL; skips without pyopencl, or a device such as Debian's pocl-opencl-icd."""
    try:
        return OpenCL(RATE)
    except NoOpenCLError as error:
        pytest.skip(str(error))


def batch_of(widths: Sequence[int]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Rows, their labels, and parameters in double precision."""
    random = np.random.default_rng(1)
    shapes = [shape for n, m in pairwise(widths) for shape in ((m, n), (m,))]
    parameters = [random.standard_normal(shape) * 0.3 for shape in shapes]
    return random.standard_normal((BATCH, widths[0])), random.integers(0, widths[-1], BATCH), parameters


def test_numpys_updates_are_finite_differences_of_its_loss() -> None:
    x, labels, parameters = batch_of(ODD)
    trainer = NumpyTrainer(ODD, parameters)
    trainer.step(x, labels)
    for index, (before, after) in enumerate(zip(parameters, trainer.parameters(), strict=True)):
        position = (0,) * before.ndim
        losses = []
        for change in (1e-6, -1e-6):
            moved = [values.copy() for values in parameters]
            moved[index][position] += change
            losses.append(NumpyTrainer(ODD, moved).step(x, labels))
        gradient = (losses[0] - losses[1]) / 2e-6
        assert (before - after)[position] / RATE == pytest.approx(gradient, rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("copying", COPYING)
@pytest.mark.parametrize("matmul", ["naive", "tiled"])
@pytest.mark.parametrize("widths", [*NETWORKS, ODD], ids=str)
def test_kernels_take_numpys_steps(
    opencl: OpenCL, widths: tuple[int, ...], matmul: str, copying: str
) -> None:
    make = partial(OpenCLTrainer, opencl=opencl, batch_size=BATCH, matmul=matmul, copying=copying)
    assert measure(SOFTWARE, make, widths, 1)["correct"]


@pytest.mark.parametrize("copying", COPYING)
def test_weights_come_from_the_host_unless_they_are_resident(opencl: OpenCL, copying: str) -> None:
    x, labels, parameters = batch_of(ODD)
    host = [values.astype(np.float32) for values in parameters]
    trainer = OpenCLTrainer(ODD, host, opencl, BATCH, "tiled", copying)
    trainer.step(x, labels)
    for name, values in trainer._weights.items():
        opencl.cl.enqueue_copy(opencl.queue, trainer._buffers[name], np.zeros_like(values))
    loss = trainer.step(x, labels)
    expected = NumpyTrainer(ODD, parameters)
    expected.step(x, labels)
    if copying == "resident":
        assert loss == pytest.approx(np.log(ODD[-1]), rel=1e-6)
    else:
        assert loss == pytest.approx(expected.step(x, labels), rel=1e-5)


def test_opencl_reports_seconds_of_copies_and_kernels(opencl: OpenCL) -> None:
    x, labels, parameters = batch_of(ODD)
    host = [values.astype(np.float32) for values in parameters]
    trainer = OpenCLTrainer(ODD, host, opencl, BATCH, "naive", "step")
    trainer.step(x, labels)
    seconds = trainer.pop_seconds()
    assert [*seconds] == [*PARTS] and all(seconds.values())
    assert not any(trainer.pop_seconds().values())


def test_mnn_takes_numpys_steps() -> None:
    pytest.importorskip("MNN", reason="the package MNN is not installed")
    for widths in (*NETWORKS, ODD):
        assert measure(SOFTWARE, MnnTrainer, widths, 1)["correct"]


@pytest.mark.parametrize("copying", COPYING[:2])
def test_torch_takes_numpys_steps(copying: str) -> None:
    for widths in (*NETWORKS, ODD):
        assert measure(SOFTWARE, partial(TorchTrainer, device="cpu", copying=copying), widths, 1)["correct"]


def test_torchs_events_divide_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Event:
        """Records the time of the processor, in place of CUDA's."""

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = time.perf_counter()

        def elapsed_time(self, end: Event) -> float:
            return (end.time - self.time) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    make = partial(TorchTrainer, device="cpu", copying="step")

    def make_measured(*arguments: Any) -> TorchTrainer:
        trainer = make(*arguments)
        trainer._is_gpu = True
        return trainer

    seconds = measure({"timed": True}, make_measured, ODD, 3)["seconds"]
    assert [*seconds] == ["step", *PARTS]
    assert all(seconds.values())


def test_a_wrong_row_is_detected_and_has_no_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_wrong(widths: Sequence[int], parameters: Sequence[np.ndarray]) -> NumpyTrainer:
        trainer = NumpyTrainer(widths, parameters)
        step = trainer.step

        def step_without_last_bias(x: np.ndarray, labels: np.ndarray) -> float:
            bias = trainer.parameters()[-1].copy()
            loss = step(x, labels)
            trainer.parameters()[-1][:] += 0.01 * (bias - trainer.parameters()[-1])
            return loss

        monkeypatch.setattr(trainer, "step", step_without_last_bias)
        return trainer

    row = measure({"timed": True}, make_wrong, ODD, 1)
    assert not row["correct"] and row["error"] > TOLERANCE and "seconds" not in row


def test_a_plan_reads_weights_before_it_updates_them() -> None:
    calls = plan_step((784, 256, 128, 16), BATCH, "tiled")
    updated: set[str] = set()
    for call in calls:
        assert not updated & {*call.buffers} - {*call.outputs}
        updated |= {name for name in call.outputs if name[0] in "wb"}
    assert updated == {f"{letter}{i}" for letter in "wb" for i in range(3)}
    assert {name for call in calls for name in call.outputs} >= {"losses", "g3", "g2", "g1"}


def test_only_gpus_are_compared() -> None:
    def row(name: str, copying: str, device_type: str, **seconds: float) -> dict[str, Any]:
        figures = {"row": name, "copying": copying, "device_type": device_type, "network": "16-16"}
        return {**figures, "seconds": seconds} if seconds else figures

    rows = [
        row("numpy", "none", "cpu", step=4.0),
        row("mnn", "none", "cpu", step=2.0),
        row("opencl-naive", "resident", "gpu", step=1.0, copy_in=0.1, compute=0.5, copy_out=0.1),
        row("opencl-naive", "step", "gpu", step=5.0, copy_in=2.0, compute=0.5, copy_out=2.0),
        row("opencl-tiled", "resident", "cpu"),
    ]
    compare(rows)
    ratios = ("step_over_processor", "step_over_resident", "copy_share")
    assert [rows[2][name] for name in ratios] == [0.5, 1.0, pytest.approx(0.2)]
    assert [rows[3][name] for name in ratios] == [2.5, 5.0, pytest.approx(0.8)]
    assert not any(name in each for each in (rows[0], rows[1], rows[4]) for name in ratios)


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for package in ("MNN", "torch", "pyopencl"):
        monkeypatch.setitem(sys.modules, package, None)
    file = tmp_path / "gpu.json"
    monkeypatch.setattr("sys.argv", ["gpu_training.py", "--json", str(file), "--repeats", "1"])
    assert main() == 0
    content = json.loads(file.read_text())
    assert {each["row"] for each in content["rows"]} == {"numpy"}
    assert len(content["rows"]) == len(NETWORKS) and all(each["correct"] for each in content["rows"])
    assert [sentence.split()[-1] for sentence in content["missing"]] == ["MNN.", "torch.", "pyopencl."]
    assert "PCIe" in capsys.readouterr().out
