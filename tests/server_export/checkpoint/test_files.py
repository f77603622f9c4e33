"""A model's files are checked before a library reads them: names, numbers, sizes, and files that run code."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from prge.data.tokenization.tokenizer import MAX_TOKENIZER_BYTES
from prge.errors import Refusal
from server_export.checkpoint.files import (
    eos_token_ids,
    fetch_weights,
    find_files,
    is_hub_reachable,
    read_config,
    shard_names,
    stored_numel,
    stored_pooling,
)
from tests.refusals import raises, refusal
from tests.server_export.publishing.hub_server import give_environment


def write_model(folder: Path, config: object = None, **arrays: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    save_file(arrays or {"weight": np.zeros((3, 4), np.float32)}, folder / "model.safetensors")
    return folder


def write_index(folder: Path, *names: str) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {f"weight.{i}": name for i, name in enumerate(names)}}))
    return path


def test_a_folder_has_a_configuration_weights_and_a_hash(tmp_path: Path) -> None:
    files = find_files(str(write_model(tmp_path / "model")))
    assert files.revision is None
    assert files.weights == [tmp_path / "model/model.safetensors"]
    assert stored_numel(files) == 12
    before = files.sha256()
    (tmp_path / "model/README.md").write_text("anything")
    assert files.sha256() == before
    write_model(tmp_path / "model", weight=np.ones((3, 4), np.float32))
    changed = files.sha256()
    write_model(tmp_path / "model", {"model_type": "gpt2"}, weight=np.ones((3, 4), np.float32))
    assert len({before, changed, files.sha256()}) == 3


def test_the_shards_of_an_index_are_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    save_file({"other": np.zeros(5, np.float16)}, folder / "a.safetensors")
    write_index(folder, "b.safetensors", "a.safetensors", "b.safetensors")
    files = find_files(str(folder))
    assert [path.name for path in files.weights] == ["a.safetensors", "b.safetensors"]
    assert stored_numel(files) == 17
    (folder / "a.safetensors").unlink()
    with refusal("weights-missing"):
        stored_numel(files)


@pytest.mark.parametrize(
    "name",
    ["../other/model.safetensors", "/etc/model.safetensors", "sub/x.safetensors", "model.bin", "", ".."],
)
def test_an_index_never_leaves_its_folder(tmp_path: Path, name: str) -> None:
    with refusal("index-leaves-folder"):
        shard_names(write_index(tmp_path, "model.safetensors", name))


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "[" * 9999]
)
def test_a_damaged_index_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content)
    with refusal("file-damaged"):
        shard_names(path)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with raises(Refusal, "no-weights", containing="pytorch_model.bin"):
        stored_numel(find_files(str(folder)))


def test_eos_ids_come_from_both_configurations(tmp_path: Path) -> None:
    files = find_files(str(write_model(tmp_path, {"eos_token_id": 7})))
    assert eos_token_ids(files) == [7]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7, 2]}')
    assert eos_token_ids(files) == [7, 9, 2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert eos_token_ids(files) == [7]
    for inner, tokens in (({"eos_token_id": 0}, [0]), ("nothing", [])):
        write_model(tmp_path, {"text_config": inner})
        assert eos_token_ids(files) == tokens


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ('{"eos_token_id": "</s>"}', "is '</s>' but"),
        ('{"eos_token_id": [2, true]}', "is [2, True] but"),
        ("{", "generation_config.json"),
    ],
)
def test_a_damaged_generation_configuration_is_refused(tmp_path: Path, content: str, value: str) -> None:
    files = find_files(str(write_model(tmp_path)))
    (tmp_path / "generation_config.json").write_text(content)
    with raises(Refusal, "file-damaged", containing=value):
        eos_token_ids(files)


@pytest.mark.parametrize("damage", ["empty", "half", "random"])
def test_damaged_weights_are_refused(tmp_path: Path, damage: str) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "half": content[:-20], "random": os.urandom(200)}[damage])
    with refusal("weights-damaged"):
        stored_numel(find_files(str(tmp_path)))


def test_integer_weights_are_refused_except_masks_and_tables(tmp_path: Path) -> None:
    masks = {"h.0.attn.bias": np.zeros((2, 2), np.uint8), "expert_of_token": np.zeros(4, np.int64)}
    files = find_files(str(write_model(tmp_path, weight=np.zeros(3, np.float32), **masks)))
    assert stored_numel(files) == 11
    write_model(tmp_path, weight=np.zeros(3, np.int64))
    with refusal("quantized-already"):
        stored_numel(files)
    write_model(tmp_path, weight=np.zeros(3, np.int8))
    with refusal("quantized-already"):
        stored_numel(files)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": 64.5}, "hidden_size is 64.5"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_hidden_layers": None, "n_layer": -3}, "n_layer is -3"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"unheard_of": 1 << 63}, "unheard_of is 9223372036854775808 but must fit into 64 bits"),
        ({"architectures": 7}, "architectures is 7 but must be a list of names"),
        ({"text_config": {"architectures": [{}]}}, "architectures is [{}] but must be a list of names"),
        ({"inner": {"rope": [{"factor": 10**50}]}}, "factor is 1000"),
        ({"hidden_size": 10**200}, "a number of 201 digits"),
        ({"eps": float("nan")}, "NaN"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
    ],
)
def test_numbers_out_of_bounds_are_named(tmp_path: Path, change: dict[str, object], problem: str) -> None:
    files = find_files(str(write_model(tmp_path, {"model_type": "llama", **change})))
    with refusal("config-out-of-bounds", "file-damaged") as caught:
        read_config(files)
    assert "config.json" in str(caught.value) and problem in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b'{"a":' * 5000 + b"1" + b"}" * 5000])
def test_a_damaged_configuration_is_refused_at_once(tmp_path: Path, content: bytes) -> None:
    files = find_files(str(write_model(tmp_path)))
    (tmp_path / "config.json").write_bytes(content)
    start = time.monotonic()
    with refusal("file-damaged"):
        read_config(files)
    assert time.monotonic() - start < 1


def test_usual_numbers_are_accepted(tmp_path: Path) -> None:
    config = {
        "hidden_size": 8192,
        "vocab_size": 262_144,
        "num_hidden_layers": 126,
        "max_position_embeddings": 10_485_760,
        "rope_theta": 10**11,
        "pad_token_id": -1,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 126,
        "use_cache": True,
        "n_inner": None,
        "vocab_size_per_layer_input": 262_144,
        "max_pixels": 1 << 28,
        "unheard_of": -(10**10),
        "architectures": None,
        "time_step_limit": [0.0, float("inf")],
    }
    assert read_config(find_files(str(write_model(tmp_path, config)))) == config


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    with refusal("not-a-transformers-model"):
        find_files(str(tmp_path))
    (write_model(tmp_path) / "adapter_config.json").write_text("{}")
    with raises(Refusal, "not-a-transformers-model", containing="adapter_config.json"):
        find_files(str(tmp_path))
    with refusal("no-such-model"):
        find_files(str(tmp_path / "none"))
    with refusal("no-such-model"):
        find_files(str(tmp_path), revision="main")


def test_a_hub_model_is_the_commit_of_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached files are used without a network, and a folder of the same name is not used instead."""
    give_environment(monkeypatch, HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    commit, other = "a" * 40, "b" * 40
    repository = tmp_path / "hub/models--some--model"
    for name in (commit, other):
        write_model(repository / "snapshots" / name)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    write_model(tmp_path / "some/model")

    def revision_of(*arguments: str) -> str | None:
        files = find_files(*arguments)
        fetch_weights(files)
        assert [path.name for path in files.weights] == ["model.safetensors"]
        return files.revision

    monkeypatch.chdir(tmp_path / "hub")
    assert (revision_of("some/model"), revision_of("some/model", other)) == (commit, other)
    with refusal("no-such-model", "hub-unreachable"):
        revision_of("some/other")
    monkeypatch.chdir(tmp_path)
    assert (revision_of("some/model"), revision_of("some/model", "main")) == (None, commit)


def write_sentences(folder: Path, inner: str = "", **pooling: object) -> Path:
    """Write a folder like sentence-transformers."""
    write_model(folder / inner)
    folders = {"Transformer": inner, "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"type": f"sentence_transformers.models.{name}", "path": path} for name, path in folders.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize("inner", ["", "0_Transformer"])
@pytest.mark.parametrize(
    ("stored", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        (
            {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True, "include_prompt": True},
            "first",
        ),
        ({"pooling_mode": "cls"}, "first"),
    ],
)
def test_the_pooling_of_sentence_transformers_is_read(
    tmp_path: Path, inner: str, stored: dict[str, object], pooling: str
) -> None:
    files = find_files(str(write_sentences(tmp_path, inner, **stored)))
    assert files.folder == tmp_path / inner
    assert stored_pooling(files) == pooling


def test_other_poolings_are_refused(tmp_path: Path) -> None:
    assert stored_pooling(find_files(str(write_model(tmp_path / "plain")))) is None
    modes = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    files = find_files(str(write_sentences(tmp_path / "model", **modes)))
    with refusal("pooling-not-supported"):
        stored_pooling(files)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "vocab.txt", "chat_template.jinja"])
def test_files_that_are_too_large_to_be_read_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "model")
    with (folder / name).open("wb") as stream:
        stream.truncate(MAX_TOKENIZER_BYTES)
    find_files(str(folder))
    with (folder / name).open("ab") as stream:
        stream.write(b" ")
    with refusal("file-too-large"):
        find_files(str(folder))


def test_an_unreachable_hub_is_contacted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exceptions of the Hub's client differ between versions of its library."""
    requests: list[str] = []

    class Client:
        def head(self, address: str, timeout: float) -> None:
            requests.append(address)
            raise LookupError("no name service")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils.get_session", Client)
    is_hub_reachable.cache_clear()
    try:
        assert not is_hub_reachable() and not is_hub_reachable()
    finally:
        is_hub_reachable.cache_clear()
    assert len(requests) == 1
