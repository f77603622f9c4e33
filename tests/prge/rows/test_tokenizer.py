"""Token ids of texts, pairs and whole texts; damaged tokenizers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from prge.errors import BundleError
from prge.rows.tokenizer import Pair, Tokenizer, load_tokenizer
from tests.prge.rows.tiny_tokenizers import byte_level_backend


@cache
def tiny() -> Tokenizer:
    return Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, pad_id=0, prepend_bos=True)


def save(folder: Path, content: str | None = None, template: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(byte_level_backend().to_str() if content is None else content)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def test_whole_text_has_begin_and_end(tokenizer: Tokenizer, encoder_tokenizer: Tokenizer) -> None:
    bare = tokenizer.encode("the film")
    assert tokenizer.encode("the film", special=True) == [1, *bare]
    assert encoder_tokenizer.encode("the film", special=True) == [1, *bare, 2]


def test_tokenizer_never_cuts_or_pads_by_itself(encoder_tokenizer: Tokenizer) -> None:
    # its tokenizer.json asks for 4 tokens, cut or padded
    assert len(encoder_tokenizer.encode("the film was bad and good")) == 6
    assert len(encoder_tokenizer.encode("a")) == 1


def test_bos_is_not_prepended_twice() -> None:
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert Tokenizer(backend, bos_id=1, prepend_bos=True).begin == (1,)


def test_control_tokens_in_texts_are_text_unless_asked(tokenizer: Tokenizer) -> None:
    assert 2 not in tokenizer.encode("Hi</s>")
    assert tokenizer.encode("Hi</s>", control=True)[-1] == 2
    assert tokenizer.decode(tokenizer.encode("Hi</s>")) == "Hi</s>"
    assert tokenizer.decode([*tokenizer.encode("Hi"), 2], special=False) == "Hi"


def test_padding_token_falls_back_to_eos_and_zero() -> None:
    assert Tokenizer(byte_level_backend(), pad_id=3, eos_id=2).pad_id == 3
    assert Tokenizer(byte_level_backend(), eos_id=2).pad_id == 2
    assert Tokenizer(byte_level_backend()).pad_id == 0


def test_pair_with_exact_boundary(tokenizer: Tokenizer, prefixed_tokenizer: Tokenizer) -> None:
    for each in (tokenizer, prefixed_tokenizer):
        pair = each.encode_pair("the film It was", " great")
        assert pair.exact
        assert pair.prompt == (1, *each.encode("the film It was"))
        assert [*pair.prompt[1:], *pair.completion] == each.encode("the film It was great")
        assert len(pair.completion) == 1


def test_pair_whose_boundary_a_token_would_straddle(tokenizer: Tokenizer) -> None:
    pair = tokenizer.encode_pair("It was ", "great")
    assert pair == Pair((1, *tokenizer.encode("It was ")), tuple(tokenizer.encode("great")), False)
    assert tokenizer.decode([*pair.prompt, *pair.completion]) == "<s>It was great"


def test_continuation_has_no_space_of_its_own(prefixed_tokenizer: Tokenizer) -> None:
    # alone, a SentencePiece-like tokenizer would put a second space before the word
    assert prefixed_tokenizer.pieces(prefixed_tokenizer.encode_continuation(" great")) == ["great"]
    assert len(prefixed_tokenizer.encode(" great")) == 2


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_pair_always_decodes_to_the_joined_text(prompt: str, completion: str) -> None:
    pair = tiny().encode_pair(prompt, completion)
    assert tiny().decode([*pair.prompt[1:], *pair.completion]) == prompt + completion


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_pieces_are_as_many_as_tokens(text: str) -> None:
    tokens = tiny().encode(text)
    assert len(tiny().pieces(tokens)) == len(tokens)


def test_load_from_a_folder(tmp_path: Path, tokenizer: Tokenizer) -> None:
    block = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "prepend_bos": True}
    loaded = load_tokenizer(save(tmp_path, template="{{ messages }}"), block)
    assert loaded.encode("the film", special=True) == tokenizer.encode("the film", special=True)
    assert (loaded.pad_id, loaded.chat_template) == (2, "{{ messages }}")
    assert loaded.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("content", "block", "message"),
    [
        ("{", {}, "tokenizer.json is damaged"),
        ("{}", {}, "tokenizer.json is damaged"),
        (None, {"eos_token_id": 99999}, "eos_token_id is 99999, which"),
        (None, {"bos_token_id": "<s>"}, "bos_token_id is '<s>', which"),
        (None, {"pad_token_id": -1}, "pad_token_id is -1, which"),
        (None, {"chat_template": True}, "has no .*chat_template.jinja, its manifest says that it has"),
    ],
)
def test_damaged_folder(tmp_path: Path, content: str | None, block: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        load_tokenizer(save(tmp_path, content), block)


def test_truncated_file_and_missing_file(tmp_path: Path) -> None:
    whole = byte_level_backend().to_str()
    json.loads(whole)
    with pytest.raises(BundleError, match="damaged"):
        load_tokenizer(save(tmp_path, whole[: len(whole) // 2]), {})
    with pytest.raises(BundleError, match="has no"):
        load_tokenizer(tmp_path / "nowhere", {})
