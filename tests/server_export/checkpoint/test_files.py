"""A model's files are bounded before a library reads them: names, numbers, sizes, and what runs code."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from prge.errors import Refusal
from prge.rows.tokenization.tokenizer import MOST_TOKENIZER_BYTES
from server_export.checkpoint.files import (
    end_tokens,
    fetch_weights,
    find_files,
    hub_answers,
    read_config,
    shard_names,
    stored_numbers,
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
    assert stored_numbers(files) == 12
    before = files.sha256()
    (tmp_path / "model/README.md").write_text("anything")
    assert files.sha256() == before
    write_model(tmp_path / "model", weight=np.ones((3, 4), np.float32))
    changed = files.sha256()
    write_model(tmp_path / "model", {"model_type": "gpt2"}, weight=np.ones((3, 4), np.float32))
    assert len({before, changed, files.sha256()}) == 3


def test_the_parts_of_an_index_are_read_beside_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    save_file({"other": np.zeros(5, np.float16)}, folder / "a.safetensors")
    write_index(folder, "b.safetensors", "a.safetensors", "b.safetensors")
    files = find_files(str(folder))
    assert [path.name for path in files.weights] == ["a.safetensors", "b.safetensors"]
    assert stored_numbers(files) == 17
    (folder / "a.safetensors").unlink()
    with refusal("weights-missing"):
        stored_numbers(files)


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
    with raises(Refusal, "no-weights", saying="pytorch_model.bin"):
        stored_numbers(find_files(str(folder)))


def test_tokens_that_end_a_text_are_those_of_both_configurations(tmp_path: Path) -> None:
    files = find_files(str(write_model(tmp_path, {"eos_token_id": 7})))
    assert end_tokens(files) == [7]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7, 2]}')
    assert end_tokens(files) == [7, 9, 2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert end_tokens(files) == [7]
    for inner, tokens in (({"eos_token_id": 0}, [0]), ("nothing", [])):
        write_model(tmp_path, {"text_config": inner})
        assert end_tokens(files) == tokens


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ('{"eos_token_id": "</s>"}', "eos_token_id '</s>'"),
        ('{"eos_token_id": [2, true]}', "eos_token_id [2, True]"),
        ("{", "generation_config.json"),
    ],
)
def test_a_damaged_generation_configuration_is_refused(tmp_path: Path, content: str, value: str) -> None:
    files = find_files(str(write_model(tmp_path)))
    (tmp_path / "generation_config.json").write_text(content)
    with raises(Refusal, "file-damaged", saying=value):
        end_tokens(files)


@pytest.mark.parametrize("damage", ["empty", "half", "random"])
def test_damaged_weights_are_refused(tmp_path: Path, damage: str) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "half": content[:-20], "random": os.urandom(200)}[damage])
    with refusal("weights-damaged"):
        stored_numbers(find_files(str(tmp_path)))


def test_integers_are_a_quantized_model_unless_they_are_old_masks_or_tables(tmp_path: Path) -> None:
    masks = {"h.0.attn.bias": np.zeros((2, 2), np.uint8), "expert_of_token": np.zeros(4, np.int64)}
    files = find_files(str(write_model(tmp_path, weight=np.zeros(3, np.float32), **masks)))
    assert stored_numbers(files) == 11
    write_model(tmp_path, weight=np.zeros(3, np.int64))
    with refusal("quantized-already"):
        stored_numbers(files)
    write_model(tmp_path, weight=np.zeros(3, np.int8))
    with refusal("quantized-already"):
        stored_numbers(files)


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
        ({"unheard_of": 1 << 63}, "unheard_of is 9223372036854775808, must have at most 64 bits"),
        ({"architectures": 7}, "architectures is 7, must be a list of names"),
        ({"text_config": {"architectures": [{}]}}, "architectures is [{}], must be a list of names"),
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


def test_usual_numbers_pass(tmp_path: Path) -> None:
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


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with refusal("not-a-transformers-model"):
        find_files(str(tmp_path))
    (write_model(tmp_path) / "adapter_config.json").write_text("{}")
    with raises(Refusal, "not-a-transformers-model", saying="adapter_config.json"):
        find_files(str(tmp_path))
    with refusal("no-such-model"):
        find_files(str(tmp_path / "none"))
    with refusal("no-such-model"):
        find_files(str(tmp_path), revision="main")


def test_a_hub_model_is_the_commit_of_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fetched before is found without a network; a folder of the name isn't taken for it."""
    give_environment(monkeypatch, HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    commit, other = "a" * 40, "b" * 40
    repository = tmp_path / "hub/models--some--model"
    for name in (commit, other):
        write_model(repository / "snapshots" / name)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    write_model(tmp_path / "some/model")

    def found(*words: str) -> str | None:
        files = find_files(*words)
        fetch_weights(files)
        assert [path.name for path in files.weights] == ["model.safetensors"]
        return files.revision

    monkeypatch.chdir(tmp_path / "hub")
    assert (found("some/model"), found("some/model", other)) == (commit, other)
    with refusal("no-such-model", "hub-unreachable"):
        found("some/other")
    monkeypatch.chdir(tmp_path)
    assert (found("some/model"), found("some/model", "main")) == (None, commit)


def write_sentences(folder: Path, inner: str = "", **pooling: object) -> Path:
    """A folder as sentence-transformers writes it."""
    write_model(folder / inner)
    kinds = {"Transformer": inner, "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize("inner", ["", "0_Transformer"])
@pytest.mark.parametrize(
    ("given", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        (
            {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True, "include_prompt": True},
            "first",
        ),
        ({"pooling_mode": "cls"}, "first"),
    ],
)
def test_a_folder_of_sentence_transformers_says_how_it_pools(
    tmp_path: Path, inner: str, given: dict[str, object], pooling: str
) -> None:
    files = find_files(str(write_sentences(tmp_path, inner, **given)))
    assert files.folder == tmp_path / inner
    assert stored_pooling(files) == pooling


def test_other_ways_to_pool_are_refused(tmp_path: Path) -> None:
    assert stored_pooling(find_files(str(write_model(tmp_path / "plain")))) is None
    modes = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    files = find_files(str(write_sentences(tmp_path / "model", **modes)))
    with refusal("pooling-not-supported"):
        stored_pooling(files)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "vocab.txt", "chat_template.jinja"])
def test_files_that_are_too_large_to_be_read_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "model")
    with (folder / name).open("wb") as stream:
        stream.truncate(MOST_TOKENIZER_BYTES)
    find_files(str(folder))
    with (folder / name).open("ab") as stream:
        stream.write(b" ")
    with refusal("file-too-large"):
        find_files(str(folder))


def test_a_hub_that_cant_be_asked_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the client of the hub's library raises: its classes changed with the library's version."""
    asked: list[str] = []

    class Client:
        def head(self, address: str, timeout: float) -> None:
            asked.append(address)
            raise LookupError("no name service")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils.get_session", Client)
    hub_answers.cache_clear()
    try:
        assert not hub_answers() and not hub_answers()
    finally:
        hub_answers.cache_clear()
    assert len(asked) == 1
