"""The functions of `import prge` with numpy's numbers, with invalid paths, and from threads."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prge
from device_runner import chat
from device_runner import evaluate as evaluate_verb
from device_runner import run as run_verb
from device_runner.session import generation as session
from prge.formats.peft import read_peft
from tests.device_runner.numpy_device import Device, write_films
from tests.device_runner.numpy_model import NumpyModel
from tests.refusals import raises


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    device = Device()
    device.replaces(monkeypatch, run_verb)
    device.replaces(monkeypatch, evaluate_verb)
    write_films(tmp_path)
    return {
        "bundle": device.write_bundle(tmp_path / "bundle"),
        "train": tmp_path / "train.jsonl",
        "out": tmp_path / "run",
        "steps": 4,
        "learning_rate": 0.02,
        "seed": 3,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "quiet": True,
    }


def adapter_of(run: prge.Run) -> bytes:
    modules = prge.open_bundle(run.folder.parent / "bundle").chain.modules
    return read_peft(run.adapter, modules).values.tobytes()


def test_numpy_numbers_are_accepted(given: dict[str, Any], tmp_path: Path) -> None:
    """NumPy's numbers give the same bits as Python's numbers."""
    expected = prge.run(**given)
    of_numpy = {
        "steps": np.int64(4),
        "learning_rate": np.float64(0.02),
        "seed": np.uint8(3),
        "lr_scheduler_type": np.str_("constant"),
        "warmup_steps": np.array(0),
        "quiet": np.True_,
        "train": np.array([str(given["train"])]),
        "out": tmp_path / "other",
    }
    result = prge.run(**{**given, **of_numpy})
    assert result.step == expected.step == 4 and adapter_of(result) == adapter_of(expected)
    scores = prge.evaluate(
        bundle=given["bundle"], adapter=result.folder, data=given["train"], limit=np.int32(5)
    )
    assert scores == prge.evaluate(
        bundle=given["bundle"], adapter=result.folder, data=given["train"], limit=5
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": np.float64(4.0)},
        {"steps": np.True_},
        {"steps": np.array([4])},
        {"steps": np.int64(-1)},
        {"learning_rate": np.float32("nan")},
        {"learning_rate": np.complex64(1)},
        {"quiet": np.int8(1)},
        {"out": np.int64(3)},
        {"train": np.array([1, 2])},
        {"train": np.datetime64("2026-11-27")},
    ],
)
def test_other_values_of_numpy_are_refused(given: dict[str, Any], wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with raises(prge.PrgeError, "settings-unusable", containing=name.split("_")[0]):
        prge.run(**{**given, **wrong})
    assert not Path(given["out"]).exists()


def test_paths_with_nul_are_refused(given: dict[str, Any], tmp_path: Path) -> None:
    nul = "a\0b"
    for path in (nul, Path(nul), 3, None, b"bundle", ""):
        with raises(prge.PrgeError, "settings-unusable"):
            prge.open_bundle(path)  # type: ignore[arg-type]
        with raises(prge.PrgeError, "settings-unusable"):
            prge.load(path)  # type: ignore[arg-type]
    with raises(prge.PrgeError, "settings-unusable"):
        prge.load(given["bundle"], nul)
    for name in ("bundle", "train", "dev", "out", "resume", "task", "adapter"):
        for value in (nul, Path(nul)):
            with pytest.raises(prge.PrgeError):
                prge.run(**{**given, name: value})
    for call, wrong in (
        (prge.evaluate, {"data": nul}),
        (prge.evaluate, {"data": given["train"], "adapter": nul}),
        (prge.evaluate, {"data": given["train"], "task": nul}),
    ):
        with pytest.raises(prge.PrgeError):
            call(bundle=given["bundle"], **wrong)  # type: ignore[operator]
    assert not (given["out"] / "journal.jsonl").exists()


def test_calls_work_from_threads(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls give the same bits as in the main thread, and don't change signal handlers."""
    expected = prge.run(**given)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with ThreadPoolExecutor(2) as pool:
        outs = [tmp_path / name for name in ("one", "two")]
        runs = [pool.submit(prge.run, **{**given, "out": out}) for out in outs]
        for each in runs:
            assert adapter_of(each.result()) == adapter_of(expected)
        scores = pool.submit(prge.evaluate, bundle=given["bundle"], adapter=outs[0], data=given["train"])
        assert scores.result()["loss"] > 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    numpy_model = NumpyModel(tmp_path / "generation")
    numpy_model.replaces(monkeypatch, chat, session)
    with ThreadPoolExecutor(1) as pool:
        model = pool.submit(prge.load, numpy_model.folder).result()
        answer = pool.submit(model.generate, "the film", max_tokens=4).result()
    assert answer.text == numpy_model.answers("the film", max_tokens=4).text
