"""A base model is recorded so that no other model is loaded instead."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from server_export.checkpoint.base_model import (
    BaseModel,
    base_from_manifest,
    base_from_peft,
    base_of,
    model_problems,
)
from server_export.checkpoint.loading import load_model, parameter_count
from tests.refusals import refusal
from tests.tiny_models import save_model

COMMIT = "0123456789" * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "llama", "llama")


def test_a_folder_is_recorded_by_content_not_by_path(folder: Path) -> None:
    loaded = load_model(str(folder))
    base = base_of(loaded)
    assert base.label == "llama"
    assert base.to_peft() == {"base_model_name_or_path": f"llama@sha256:{loaded.sha256}"}
    assert base.to_manifest() == {"name_or_path": "llama", "revision": None, "sha256": loaded.sha256}
    assert base_from_peft(base.to_peft()) == BaseModel("llama", None, loaded.sha256)
    assert base.load(pooled=False).sha256 == loaded.sha256


def test_a_hub_model_is_recorded_by_its_commit() -> None:
    base = BaseModel("some/model", COMMIT)
    assert base.to_peft() == {"base_model_name_or_path": "some/model", "revision": COMMIT}
    assert base_from_peft(base.to_peft()) == base_from_manifest(base.to_manifest()) == base


def test_the_hub_is_not_contacted_for_a_recorded_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the Hub was contacted")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    monkeypatch.chdir(tmp_path)
    recorded: list[dict[str, Any]] = [
        {"base_model_name_or_path": "gpt2"},
        {"base_model_name_or_path": "some/model", "revision": None},
        {"base_model_name_or_path": f"llama@sha256:{'0' * 64}"},
    ]
    for config in recorded:
        base = base_from_peft(config)
        assert base is not None
        with refusal("base-missing"):
            base.load(pooled=False)


def test_another_folder_of_the_same_name_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = base_of(load_model(str(folder)))
    recorded = base_from_peft(base.to_peft())
    assert recorded is not None
    save_model(tmp_path / "llama", "llama", seed=7)
    monkeypatch.chdir(tmp_path)
    with refusal("base-changed"):
        recorded.load(pooled=False)
    shutil.rmtree(tmp_path / "llama")
    shutil.copytree(folder, tmp_path / "llama")
    assert recorded.load(pooled=False).sha256 == base.sha256


def test_a_folder_without_a_recorded_hash_is_not_loaded(folder: Path) -> None:
    """A foreign record names a path without knowing its content, which must not be published."""
    name = str(folder)
    with_revision = {"base_model_name_or_path": name, "revision": "main"}
    for base in (
        base_from_peft({"base_model_name_or_path": name}),
        base_from_peft(with_revision),
        base_from_manifest({"name_or_path": name}),
        base_from_manifest({"name_or_path": name, "revision": "main", "sha256": None}),
    ):
        assert base is not None
        with refusal("base-without-hash"):
            base.load(pooled=False)
        assert base.to_peft(with_path=True)["base_model_name_or_path"] == name
    plain = base_from_peft({"base_model_name_or_path": name})
    assert plain is not None and plain.to_peft() == {"base_model_name_or_path": folder.name}


def test_a_record_without_a_name_is_none() -> None:
    assert (
        base_from_peft({}) is base_from_peft({"base_model_name_or_path": 3}) is base_from_manifest({}) is None
    )


def test_architecture_and_size_are_compared(folder: Path) -> None:
    loaded = load_model(str(folder))
    block = {"architecture": "LlamaForCausalLM", "parameters": parameter_count(loaded.model)}
    assert model_problems(loaded, block) == []
    assert model_problems(loaded, {**block, "model_type": "opt", "parameters": 3}) == [
        "its model_type is llama, the bundle's opt",
        f"its parameters is {block['parameters']}, the bundle's 3",
    ]
