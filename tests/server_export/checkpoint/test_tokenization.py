"""The tokenizer that a bundle carries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from prge.data.example_building import build_examples
from prge.data.readers.files import Row
from prge.data.tokenization.tokenizer import load_tokenizer as read_tokenizer
from server_export.checkpoint.files import eos_token_ids, find_files
from server_export.checkpoint.tokenization import (
    check_tokenizer,
    load_tokenizer,
    tokenizer_manifest,
    write_tokenizer,
)
from tests.bundles import make_spec
from tests.refusals import refusal
from tests.tiny_models import VOCABULARY, make_tokenizer


def test_written_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "model")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=32)
    write_tokenizer(make_tokenizer(), tmp_path / "out")
    written = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert written.truncation is None
    assert written.padding is None
    text = "is this so? yes or no"
    assert written.encode(text).ids == make_tokenizer().encode(text)
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_chat_template_is_written(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    write_tokenizer(tokenizer, tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert tokenizer_manifest(tokenizer, "auto", VOCABULARY)["chat_template"] is True


def test_a_tokenizer_with_other_ids_is_refused(tmp_path: Path) -> None:
    write_tokenizer(make_tokenizer(), tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))
    with refusal("tokenizer-not-preserved"):
        check_tokenizer(make_tokenizer(), path)


def test_a_vocabulary_larger_than_the_model_is_refused() -> None:
    size = len(make_tokenizer())
    assert tokenizer_manifest(make_tokenizer(), "auto", size)["vocabulary_size"] == size
    with refusal("tokenizer-larger-than-model"):
        tokenizer_manifest(make_tokenizer(), "auto", size - 1)


def test_unknown_eos_ids_are_left_out() -> None:
    assert tokenizer_manifest(make_tokenizer(), "auto", VOCABULARY)["stop_token_ids"] == [2]
    manifest = tokenizer_manifest(make_tokenizer(), "auto", VOCABULARY, [3, VOCABULARY, -1, 10**12])
    assert manifest["stop_token_ids"] == [2, 3]


def test_control_tokens_after_an_answer_in_the_chat_template_end_it() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<s>\n{% endfor %}"
    manifest = tokenizer_manifest(tokenizer, "auto", VOCABULARY)
    assert (manifest["eos_token_id"], manifest["stop_token_ids"]) == (2, [1, 2])
    for source in ("{{ raise_exception('no') }}", "{% for %}", "{{ messages[-1].content }}"):
        tokenizer.chat_template = source
        assert tokenizer_manifest(tokenizer, "auto", VOCABULARY)["stop_token_ids"] == [2]


@pytest.mark.parametrize(
    ("config", "generation", "eos", "stops"),
    [
        ({"eos_token_id": 2}, None, 2, [2]),
        ({"eos_token_id": [2, 1]}, None, 2, [1, 2]),
        ({}, {"eos_token_id": [1, 2]}, 1, [1, 2]),
        ({"eos_token_id": None}, {"eos_token_id": 2}, 2, [2]),
        ({"eos_token_id": [VOCABULARY + 9, 2]}, {"eos_token_id": 1}, 2, [1, 2]),
        ({}, None, None, []),
    ],
)
def test_a_tokenizer_without_an_eos_token_gets_that_of_the_configuration(
    tmp_path: Path, config: Any, generation: Any, eos: int | None, stops: list[int]
) -> None:
    """Training, the device and transformers' generation agree on the end of a text."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    loaded, ends = load_tokenizer(str(tmp_path)), eos_token_ids(find_files(str(tmp_path)))
    manifest = tokenizer_manifest(loaded, "auto", VOCABULARY, ends)
    assert (manifest["eos_token_id"], manifest["stop_token_ids"]) == (eos, stops)
    write_tokenizer(loaded, tmp_path / "out")
    device = read_tokenizer(tmp_path / "out", manifest)
    assert (device.eos_id, device.stop_ids) == (eos, frozenset(stops))
    [example], _ = build_examples(
        [Row(1, {"text": "a b"})],
        device,
        make_spec(sequence_length=16, vocabulary_size=VOCABULARY),
    )
    expected = [*make_tokenizer().encode("a b"), *([] if eos is None else [eos])]
    assert [*example.sequences[0].tokens] == expected


def test_a_tokenizer_with_an_eos_token_keeps_it(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    loaded = load_tokenizer(str(tmp_path))
    manifest = tokenizer_manifest(loaded, "auto", VOCABULARY, eos_token_ids(find_files(str(tmp_path))))
    assert (manifest["eos_token_id"], manifest["stop_token_ids"]) == (2, [1, 2])


def test_bos_is_left_to_the_tokenizer_by_default() -> None:
    assert tokenizer_manifest(make_tokenizer(), "auto", VOCABULARY)["prepend_bos"] is False
    assert tokenizer_manifest(make_tokenizer(), "never", VOCABULARY)["prepend_bos"] is False
    assert tokenizer_manifest(make_tokenizer(), "always", VOCABULARY)["prepend_bos"] is True


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with refusal("no-tokenizer"):
        load_tokenizer(str(tmp_path))
