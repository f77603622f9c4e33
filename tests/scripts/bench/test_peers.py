"""Trainers run with the same sizes, and an unavailable one reports why."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers
import pytest
from peers import (
    EXECUTORCH,
    MLX,
    QVAC,
    TEXTS,
    command_of,
    cut_batches,
    make_batches,
    methods_of,
    qvac_command,
    ratios,
    read_text,
)
from processes import LackingError

from prge.system.user_cache import cache_path
from prge.training.trials import TRIALS
from server_export.checkpoint.random_models import CONFIGURATIONS, save_random_model

SMALL = replace(TRIALS["smollm2-135m"], batch=2, tokens=16)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a small model and a small trial of its shape."""
    monkeypatch.setattr(peers, "TRIALS", {"small": SMALL})
    monkeypatch.setitem(CONFIGURATIONS, SMALL.shape, {**CONFIGURATIONS[SMALL.shape], "vocab_size": 512})
    save_random_model(tmp_path / "model", f"{SMALL.shape}:tiny")
    return tmp_path


def arguments(*methods: str, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"methods": methods, "threads": 1, "repeats": 2, "limit": 60, "blas": None, "shape": None}
        | {"texts": TEXTS}
        | more
    )


def test_ratios_are_by_weights_and_by_trainer() -> None:
    seconds = {"prge-int4": 1.0, "peft-bf16": 2.0, "executorch": 4.0}
    result = {
        name: {"seconds": each, "anonymous_mb": 10 * each, "peak_rss_mb": 8.0}
        for name, each in seconds.items()
    }
    figures = ratios([seconds] * 3, {**result, "mlx-fp32": {"reason": "too slow"}})
    assert figures["prge_over_peft_seconds"] == {"int4": {"bf16": 0.5}}
    assert figures["prge_over_executorch_memory"] == {"int4": {"fp32": 0.25}}
    assert figures["prge_over_executorch_peak"] == {"int4": {"fp32": 1.0}}
    assert figures["prge_over_mlx_seconds"] == {"int4": {}}


def test_weights_of_qvac_have_its_names() -> None:
    seconds = {"prge-int4": 1.0, "qvac-q4_0": 10.0}
    result = {name: {"seconds": 1.0, "anonymous_mb": 2.0, "peak_rss_mb": 8.0} for name in seconds}
    figures = ratios([seconds], result)
    assert figures["prge_over_qvac_seconds"] == {"int4": {"q4_0": 0.1}}
    assert figures["prge_over_qvac_memory"] == {"int4": {"q4_0": 1.0}}


def test_a_peer_is_compared_with_prge_and_peft() -> None:
    expected = ["prge-int4", "prge-fp32", "peft-bf16", "peft-fp32", *QVAC]
    assert methods_of("qvac") == expected and peers.BLAS in methods_of("mlx")


def test_rows_follow_one_another_and_have_the_token_after_them() -> None:
    assert cut_batches(range(10), 2, 1, 4) == [[[0, 1, 2, 3, 4]], [[4, 5, 6, 7, 8]]]
    assert cut_batches(range(9), 1, 2, 4) == [[[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]]
    with pytest.raises(SystemExit, match="the texts have 8 tokens; 9 are needed"):
        cut_batches(range(8), 2, 1, 4)


def test_random_weights_have_one_batch_of_random_tokens(folder: Path) -> None:
    ((first, second),) = make_batches(SMALL, folder, TEXTS)
    assert len(first) == len(second) == SMALL.tokens + 1
    assert min(first) >= 0 and max(first) < 512


def test_messages_are_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words")
    assert read_text(tmp_path / "a.txt") == "some words"
    assert read_text(TEXTS).splitlines()[:2] == [
        "could you remind me next Monday to buy stamps?",
        '{"what": "buy stamps", "day": "Monday", "time": ""}',
    ]


def test_qvac_needs_a_gguf_file_and_whole_rows(folder: Path) -> None:
    with pytest.raises(LackingError, match="select --models smollm2"):
        qvac_command(QVAC[0], folder, SMALL)
    (folder / "model.gguf").touch()
    with pytest.raises(LackingError, match="a multiple of 256 tokens"):
        qvac_command(QVAC[0], folder, SMALL)


def test_an_unavailable_trainer_reports_why_and_the_others_continue(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> Path:
        raise LackingError("mlx can't be installed: no wheel")

    monkeypatch.setattr(peers, "mlx_python", none)
    result = peers.bench(arguments(*MLX, peers.BLAS, "peft-fp32"), "small", folder)
    assert {result["methods"][name]["reason"] for name in MLX} == {"mlx can't be installed: no wheel"}
    assert "apt install libopenblas0-pthread" in result["methods"][peers.BLAS]["reason"]
    assert result["methods"]["peft-fp32"]["seconds"] > 0 and result["trial"]["tokens"] == 16


def test_a_step_that_takes_too_long_is_left_out(folder: Path) -> None:
    result = peers.bench(arguments("peft-bf16", limit=0), "small", folder)
    assert "a step takes longer than 0 s" in result["methods"]["peft-bf16"]["reason"]


@pytest.mark.whole
def test_all_available_trainers_begin_with_the_same_loss(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All methods start with the loss of random weights, and learn."""
    if not (cache_path("mlx") / "bin/python").is_file():
        monkeypatch.setattr(peers, "METHODS", [name for name in peers.METHODS if name not in MLX])
    methods = [name for name in peers.METHODS if name not in (peers.BLAS, *QVAC)]
    result = peers.bench(arguments(*methods), "small", folder)
    output = json.dumps(result["methods"])
    assert not [name for name in methods if "reason" in result["methods"][name]], output
    for name in methods:
        first, *_, last = result["methods"][name]["losses"]
        assert abs(first - 6.30) < 0.05, (name, first)
        assert last < first, name
    both = result["prge_over_peft_seconds"], result[f"prge_over_{EXECUTORCH}_memory"]
    assert all(set(each) == {"int4", "fp32"} for each in both)


def test_all_trainers_train_both_matrices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(peers, "export", lambda *exported: calls.append(exported))
    command_of("prge-int4", folder, TRIALS["qwen3-1.7b"], arguments())
    exported = [str(word) for word in calls[0]]
    assert (
        exported[exported.index("--adapter") + 1] == "lora"
        and exported[exported.index("--quantize") + 1] == "8da4w"
    )
    assert exported[exported.index("--target-modules") + 1] == "all-linear"
