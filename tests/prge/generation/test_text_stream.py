"""Incremental decoding: the text of all tokens, in whole characters, without stop words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from prge.data.tokenization.tokenizer import Tokenizer
from prge.generation.text_stream import MAX_HELD, REPLACEMENT, TextStream
from tests.prge.data.tiny_tokenizers import byte_fallback_backend, byte_level_backend, prefixed_backend

TEXTS = st.text(st.sampled_from("ab cé你😀\n the film was"), max_size=30)


@cache
def tokenizers() -> dict[str, Tokenizer]:
    """Return tokenizers by name: byte-level, and SentencePiece-like with and without byte fallback."""
    return {
        "byte-level": Tokenizer(byte_level_backend(), bos_id=1, eos_id=2),
        "byte fallback": Tokenizer(byte_fallback_backend(), bos_id=1, eos_id=2),
        "prefixed": Tokenizer(prefixed_backend(), bos_id=1, eos_id=2),
    }


def parts(stream: TextStream, tokens: Sequence[int]) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.finish()]


def byte_tokens(content: bytes) -> list[int]:
    """Return the tokens of bytes in the tokenizer with byte fallback."""
    return [3 + byte for byte in content]


@pytest.mark.parametrize("tokenizer_name", tokenizers())
@given(text=TEXTS)
@settings(max_examples=80)
def test_joined_chunks_are_the_text_of_all_tokens(tokenizer_name: str, text: str) -> None:
    tokenizer = tokenizers()[tokenizer_name]
    tokens = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    shown = parts(stream, tokens)
    assert "".join(shown) == stream.text == tokenizer.decode(tokens, special=False)
    assert REPLACEMENT not in stream.text or tokenizer_name == "prefixed"


@pytest.mark.parametrize("tokenizer_name", tokenizers())
@given(before=TEXTS, text=TEXTS)
@settings(max_examples=80)
def test_a_text_continues_its_prompt_with_the_prompts_spaces(
    tokenizer_name: str, before: str, text: str
) -> None:
    tokenizer = tokenizers()[tokenizer_name]
    prompt, tokens = tokenizer.encode(before), tokenizer.encode(text)
    shown = parts(TextStream(tokenizer, before=[1, *prompt]), tokens)
    whole = tokenizer.decode([*prompt, *tokens], special=False)
    assert tokenizer.decode(prompt, special=False) + "".join(shown) == whole


def test_a_sentencepiece_completion_has_its_first_space_only_after_a_prompt() -> None:
    tokenizer = tokenizers()["prefixed"]
    prompt, answer = tokenizer.encode("the film"), tokenizer.encode("was bad")
    assert parts(TextStream(tokenizer, before=prompt), answer)[0].startswith(" ")
    assert "".join(parts(TextStream(tokenizer), answer)) == "was bad"


def test_a_character_is_held_back_until_it_is_whole() -> None:
    stream = TextStream(tokenizers()["byte fallback"])
    shown = [stream.push(token) for token in byte_tokens("é你😀".encode())]
    assert shown == ["", "é", "", "", "你", "", "", "", "😀"]
    assert stream.finish() == ""


@pytest.mark.parametrize("tokenizer_name", ["byte-level", "byte fallback"])
def test_a_character_that_never_becomes_whole_ends_as_the_replacement_character(tokenizer_name: str) -> None:
    tokenizer = tokenizers()[tokenizer_name]
    tokens = tokenizer.encode("a你😀")[:-1]
    shown = parts(TextStream(tokenizer), tokens)
    assert "".join(shown) == "a你" + REPLACEMENT
    assert REPLACEMENT not in "".join(shown[:-1])


def test_bytes_that_are_no_text_are_shown_after_a_while() -> None:
    tokenizer = tokenizers()["byte fallback"]
    stream = TextStream(tokenizer)
    shown = [stream.push(token) for token in byte_tokens(b"\xff" * MAX_HELD)]
    assert shown == [*[""] * (MAX_HELD - 1), REPLACEMENT * MAX_HELD]
    assert "".join(stream.push(token) for token in byte_tokens("你".encode())) == "你"


def test_a_real_replacement_character_is_text() -> None:
    tokenizer = tokenizers()["byte-level"]
    assert "".join(parts(TextStream(tokenizer), tokenizer.encode("a\ufffdb"))) == "a\ufffdb"


def test_special_tokens_are_not_shown() -> None:
    tokenizer = tokenizers()["byte-level"]
    tokens = [1, *tokenizer.encode("the film"), 4, *tokenizer.encode(" was"), 2]
    assert "".join(parts(TextStream(tokenizer), tokens)) == "the film was"


def test_added_tokens_that_are_not_special_are_shown() -> None:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("<think>", special=False)])
    tokenizer = Tokenizer(backend)
    tokens = tokenizer.encode("<think>the")
    assert len(tokens) == 2
    assert "".join(parts(TextStream(tokenizer), tokens)) == "<think>the"


def test_a_stop_word_across_tokens_ends_the_text_before_it_and_never_shows() -> None:
    tokenizer = tokenizers()["byte-level"]
    stream = TextStream(tokenizer, ["Question:"])
    tokens = tokenizer.encode("a cat\nQuestion: more")
    assert len(tokenizer.encode("Question:")) > 1
    shown = [stream.push(token) for token in tokens]
    assert "".join(shown) == stream.text == "a cat\n"
    assert stream.stopped
    assert stream.finish() == ""


@pytest.mark.parametrize("tokenizer_name", tokenizers())
def test_a_text_without_a_prompt_begins_without_a_space(tokenizer_name: str) -> None:
    tokenizer = tokenizers()[tokenizer_name]
    stream = TextStream(tokenizer, ["\nUser:"], None)
    assert "".join(parts(stream, tokenizer.encode("  a cat "))) == "a cat "
    ended = TextStream(tokenizer, ["\nb:"], None)
    assert "".join(parts(ended, tokenizer.encode(" \nb: a"))) == "" and ended.stopped


def test_a_possible_beginning_of_a_stop_word_is_held_back_no_longer_than_needed() -> None:
    tokenizer = tokenizers()["byte fallback"]
    stream = TextStream(tokenizer, ["abc", "cc"])
    shown = [stream.push(token) for token in byte_tokens(b"xabxca")]
    assert shown == ["x", "", "", "abx", "", "c"]
    assert stream.finish() == "a"
    assert not stream.stopped


@given(
    text=st.text(st.sampled_from("ab你"), max_size=12),
    words=st.lists(st.text(st.sampled_from("ab你"), min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=100)
def test_where_a_text_stops_does_not_depend_on_its_tokens(text: str, words: list[str]) -> None:
    ends = [(end, start) for end in range(len(text) + 1) for start in range(end) if text[start:end] in words]
    expected = text[: min(ends)[1]] if ends else text
    fine, coarse = tokenizers()["byte fallback"], tokenizers()["byte-level"]
    for tokenizer, tokens in ((fine, byte_tokens(text.encode())), (coarse, coarse.encode(text))):
        stream = TextStream(tokenizer, words)
        assert "".join(parts(stream, tokens)) == stream.text == expected
        assert stream.stopped == bool(ends)


def test_a_token_costs_the_same_however_long_the_text_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizers()["byte fallback"]
    decoded: list[int] = []
    plain = tokenizer.decode

    def decode(tokens: Sequence[int], *, special: bool = True) -> str:
        decoded.append(len(tokens))
        return plain(tokens, special=special)

    monkeypatch.setattr(tokenizer, "decode", decode)
    stream = TextStream(tokenizer, ["never there"], before=byte_tokens(b"\xff" * 5000))
    for token in byte_tokens("ab 你 never\n".encode() * 100 + b"\xff" * 100):
        stream.push(token)
    assert max(decoded) <= 2 * MAX_HELD
    assert len(decoded) < 3 * 1600
