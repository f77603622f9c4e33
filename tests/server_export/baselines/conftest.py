"""Bundles of tiny models with rows, made without lowering a program: baselines read all but that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from prge.bundle import ADAPTER, MANIFEST, TOKENIZER, file_sha256
from server_export.baselines.settings import BaselineSettings
from server_export.bundle import write_adapter
from server_export.model.loading import load_model
from server_export.model.program import build_program
from server_export.model.tokenization import load_tokenizer, tokenizer_block, write_tokenizer
from tests.bundles import make_bundle, read_json, write_manifest
from tests.server_export.programs import make_export_config
from tests.tiny_models import SHALLOW, save_model


def make_workplace(folder: Path, architecture: str, **changes: Any) -> Path:
    """A folder with `model`, `bundle`, `train.jsonl`, `dev.jsonl` and `task.yaml`."""
    save_model(folder / "model", architecture, **SHALLOW[architecture])
    config = make_export_config(str(folder / "model"), batch_size=4, **changes)
    built = build_program(config, load_model(config.model))
    bundle = make_bundle(folder / "bundle", contract=built.contract.to_json())
    for name in (ADAPTER, TOKENIZER):
        shutil.rmtree(bundle / name)
    write_adapter(bundle / ADAPTER, built)
    tokenizer = load_tokenizer(config.model, None)
    write_tokenizer(tokenizer, bundle / TOKENIZER)
    manifest = read_json(bundle)
    paths = [path for path in bundle.rglob("*") if path.is_file() and path.name != MANIFEST]
    manifest["files"] = {
        path.relative_to(bundle).as_posix(): {"sha256": file_sha256(path), "bytes": path.stat().st_size}
        for path in paths
    }
    manifest["model"] = {
        "name_or_path": str(folder / "model"),
        "architecture": type(built.loaded.model).__name__,
    }
    manifest["quantization"] = built.quantization.to_json()
    manifest["tokenizer"] = tokenizer_block(tokenizer, "auto", built.contract.vocabulary_size)
    write_manifest(bundle, manifest)
    words = ["aa", "bb", "cc", "dd"]
    rows = [{"text": f"{words[i % 4]} {words[i // 4 % 4]}", "label": i % 4 // 2} for i in range(40)]
    for name, chosen in (("train", rows[:24]), ("dev", rows[24:])):
        lines = [json.dumps(row) + "\n" for row in chosen]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "task.yaml").write_text(
        'name: letters\ntemplate: "{text} ?"\nlabel_words: {0: " no", 1: " yes"}\ncolumns: {label: label}\n'
        "metric: accuracy\n",
        encoding="utf-8",
    )
    return folder


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a decoder whose linear layers are all adapted."""
    return make_workplace(tmp_path_factory.mktemp("decoder"), "llama", target_modules="all-linear")


@pytest.fixture(scope="session")
def encoder_workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an encoder."""
    return make_workplace(tmp_path_factory.mktemp("encoder"), "bert")


@pytest.fixture
def make_settings(workplace: Path, tmp_path: Path) -> Callable[..., BaselineSettings]:
    """Settings of a short run on the workplace's rows into `tmp_path / "run"`."""

    def make(folder: Path = workplace, **changes: Any) -> BaselineSettings:
        fields: dict[str, Any] = {
            "method": "backprop-lora-fa",
            "bundle": folder / "bundle",
            "model": str(folder / "model"),
            "train": folder / "train.jsonl",
            "dev": folder / "dev.jsonl",
            "task": str(folder / "task.yaml"),
            "out": tmp_path / "run",
            "steps": 12,
            "evaluate_every": 4,
            "checkpoint_every": 5,
            "learning_rate": 0.01,
            "quiet": True,
        }
        return BaselineSettings(**{**fields, **changes})

    return make
