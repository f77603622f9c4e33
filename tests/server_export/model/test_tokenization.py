"""The tokenizer that a bundle carries."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from prge.errors import BundleError
from server_export.model.tokenization import (
    check_tokenizer,
    load_tokenizer,
    tokenizer_block,
    write_tokenizer,
)
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
    assert tokenizer_block(tokenizer, "auto", VOCABULARY)["chat_template"] is True


def test_another_tokenizer_is_noticed(tmp_path: Path) -> None:
    write_tokenizer(make_tokenizer(), tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))
    with pytest.raises(BundleError, match="doesn't survive being written"):
        check_tokenizer(make_tokenizer(), path)


def test_vocabulary_larger_than_the_model() -> None:
    size = len(make_tokenizer())
    assert tokenizer_block(make_tokenizer(), "auto", size)["vocabulary_size"] == size
    with pytest.raises(BundleError, match=f"has {size} tokens, the model has embeddings for {size - 1}"):
        tokenizer_block(make_tokenizer(), "auto", size - 1)


def test_end_tokens_are_those_that_the_tokenizer_knows() -> None:
    assert tokenizer_block(make_tokenizer(), "auto", VOCABULARY)["stop_token_ids"] == []
    block = tokenizer_block(make_tokenizer(), "auto", VOCABULARY, [2, 3, VOCABULARY, -1, 10**12])
    assert block["stop_token_ids"] == [2, 3]


def test_prepending_is_left_to_the_tokenizer_unless_asked() -> None:
    assert tokenizer_block(make_tokenizer(), "auto", VOCABULARY)["prepend_bos"] is False
    assert tokenizer_block(make_tokenizer(), "never", VOCABULARY)["prepend_bos"] is False
    assert tokenizer_block(make_tokenizer(), "always", VOCABULARY)["prepend_bos"] is True


def test_model_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path))
