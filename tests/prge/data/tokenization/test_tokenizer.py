"""Token ids of texts and pairs; windows; damaged tokenizers."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors

from prge.data.tokenization.tokenizer import LONGEST_WINDOW, WINDOW, Tokenizer, load_tokenizer
from prge.errors import BundleError, DataError
from tests.measured import measure_program
from tests.prge.data.tiny_tokenizers import byte_fallback_backend, byte_level_backend
from tests.refusals import raises


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
    assert (tokenizer.begin, tokenizer.end) == ((1,), ())
    assert (encoder_tokenizer.begin, encoder_tokenizer.end) == ((1,), (2,))


def test_tokenizer_never_cuts_or_pads_by_itself(encoder_tokenizer: Tokenizer) -> None:
    # its tokenizer.json truncates and pads to 4 tokens
    assert len(encoder_tokenizer.encode("the film was bad and good")) == 6
    assert len(encoder_tokenizer.encode("a")) == 1


def test_bos_is_not_prepended_twice() -> None:
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert Tokenizer(backend, bos_id=1, prepend_bos=True).begin == (1,)


def test_control_tokens_in_texts_are_text_by_default(tokenizer: Tokenizer) -> None:
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
        assert tuple(pair.prompt) == (1, *each.encode("the film It was"))
        assert [*pair.prompt[1:], *pair.completion] == each.encode("the film It was great")
        assert len(pair.completion) == 1


def test_pair_whose_boundary_a_token_would_straddle(tokenizer: Tokenizer) -> None:
    pair = tokenizer.encode_pair("It was ", "great")
    assert pair.prompt.tolist() == [1, *tokenizer.encode("It was ")]
    assert pair.completion.tolist() == tokenizer.encode("great")
    assert not pair.exact
    assert tokenizer.decode([*pair.prompt, *pair.completion]) == "<s>It was great"


def test_continuation_has_no_space_of_its_own(prefixed_tokenizer: Tokenizer) -> None:
    # encoded separately, a SentencePiece-like tokenizer would prepend a space
    pair = prefixed_tokenizer.encode_pair("It was gre", "at")
    assert not pair.exact and prefixed_tokenizer.token_texts(pair.completion.tolist()) == ["at"]
    assert prefixed_tokenizer.encode("at") != pair.completion.tolist()


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_pair_always_decodes_to_the_joined_text(prompt: str, completion: str) -> None:
    pair = tiny().encode_pair(prompt, completion)
    assert tiny().decode([*pair.prompt[1:], *pair.completion]) == prompt + completion


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_one_text_per_token(text: str) -> None:
    tokens = tiny().encode(text)
    assert len(tiny().token_texts(tokens)) == len(tokens)


def test_load_from_a_folder(tmp_path: Path, tokenizer: Tokenizer) -> None:
    block = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "prepend_bos": True}
    loaded = load_tokenizer(save(tmp_path, template="{{ messages }}"), block)
    assert (loaded.begin, loaded.end) == ((1,), ())
    assert loaded.encode("the film") == tokenizer.encode("the film")
    assert (loaded.pad_id, loaded.chat_template) == (2, "{{ messages }}")
    assert loaded.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    folder = save(tmp_path)
    assert load_tokenizer(folder, {"eos_token_id": 2, "stop_token_ids": [4]}).stop_ids == {2, 4}
    assert load_tokenizer(folder, {"eos_token_id": 2}).stop_ids == {2}
    assert load_tokenizer(folder, {}).stop_ids == frozenset()


def test_control_tokens_have_ids_by_their_names(tokenizer: Tokenizer) -> None:
    assert tokenizer.control_id("<|im_end|>") == 4
    assert tokenizer.control_id("film") is None
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("content", "block", "code", "named"),
    [
        ("{", {}, "tokenizer-damaged", "tokenizer.json"),
        ("{}", {}, "tokenizer-damaged", "tokenizer.json"),
        (None, {"eos_token_id": 99999}, "token-unknown", "99999"),
        (None, {"bos_token_id": "<s>"}, "token-unknown", "'<s>'"),
        (None, {"pad_token_id": -1}, "token-unknown", "-1"),
        (None, {"stop_token_ids": [2, 99999]}, "token-unknown", "[2, 99999]"),
        (None, {"stop_token_ids": "</s>"}, "token-unknown", "'</s>'"),
        (None, {"stop_token_ids": [True]}, "token-unknown", "[True]"),
        (None, {"chat_template": True}, "bundle-file-missing", "chat_template.jinja"),
    ],
)
def test_a_damaged_folder_is_refused(
    tmp_path: Path, content: str | None, block: dict[str, Any], code: str, named: str
) -> None:
    with raises(BundleError, code, containing=named):
        load_tokenizer(save(tmp_path, content), block)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "pair": [],
                    "special_tokens": {},
                    "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
                }
            },
            "tokenizer-damaged",
        ),
        (
            {"model": {"type": "WordLevel", "unk_token": "u", "vocab": {"u": 2**32 - 1}}},
            "token-too-large",
        ),
    ],
    ids=["a missing special token", "an id of another size"],
)
def test_a_tokenizer_that_fails_in_the_library_is_refused(
    tmp_path: Path, change: dict[str, Any], code: str
) -> None:
    content = json.loads(byte_level_backend().to_str())
    with raises(BundleError, code):
        load_tokenizer(save(tmp_path, json.dumps({**content, **change})), {}).encode("a")


def test_truncated_and_missing_files_are_refused(tmp_path: Path) -> None:
    whole = byte_level_backend().to_str()
    json.loads(whole)
    with raises(BundleError, "tokenizer-damaged"):
        load_tokenizer(save(tmp_path, whole[: len(whole) // 2]), {})
    with raises(BundleError, "bundle-file-missing"):
        load_tokenizer(tmp_path / "nowhere", {})


MODELS = Path(__file__).parents[5] / "shared/models"
TOKENIZERS = {
    "demo": Path(__file__).parents[4] / "server_export/demo_data/model/tokenizer.json",
    "babyllama": MODELS / "babyllama/tokenizer.json",
    "stories260K": MODELS / "stories260K/tokenizer.json",
}
# Difficult texts: long words, unusual white space, characters of several tokens, emoji, tags.
DIFFICULT_TEXTS = st.sampled_from(
    [
        *(
            "The quick brown fox jumps over it. ",
            "don't",
            "antidisestablishmentarianism",
            "https://a.b/c?d=e&f ",
        ),
        *("\n\n\n", " " * 40, "\t\r\n", "=" * 60, "a" * 50, "0123456789" * 4, "\u00a0\u3000", "<s></s>"),
        *(
            "Gr\u00fc\u00dfe ",
            "\u4f60\u597d\u4e16\u754c",
            "\u0928\u092e\u0938\u094d\u0924\u0947 ",
            "e\u0301" * 9,
        ),
        *("\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f7e7" * 9, "\ufffd", "\x00\x7f"),
    ]
)


@cache
def real(name: str, copy: int = 0) -> Tokenizer:
    if not TOKENIZERS[name].is_file():
        pytest.skip(f"there is no {TOKENIZERS[name]}")
    return load_tokenizer(TOKENIZERS[name].parent, {})


@cache
def library(name: str) -> Backend:
    """Load the library's tokenizer from a file."""
    return Backend.from_file(str(TOKENIZERS[name]))


def whole(backend: Backend, text: str, control: bool = False) -> list[tuple[int, int, int]]:
    """Return ids and character ranges of the whole text from the library."""
    backend.encode_special_tokens = not control
    encoding = backend.encode(text, add_special_tokens=False)
    return [(token, *span) for token, span in zip(encoding.ids, encoding.offsets, strict=True)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    st.lists(DIFFICULT_TEXTS | st.text(max_size=20), min_size=30, max_size=60),
    st.booleans(),
    st.integers(0, 40),
)
def test_a_text_in_windows_has_the_tokens_of_the_whole(
    name: str, texts: list[str], control: bool, cut: int
) -> None:
    """Windows have 300 characters instead of 32,768, so that every text has many seams."""
    text, tokenizer = "".join(texts), real(name)
    prompt, completion = text[: len(text) - cut], text[len(text) - cut :]
    with small_windows():
        result = [tuple(row) for part in tokenizer.parts(text, control=control) for row in part.tolist()]
        pair = tokenizer.encode_pair(prompt, completion)
    assert result == whole(library(name), text, control)
    some = [at for at in tokenizer.control_at(text) if text.startswith("</s>", at)]
    with small_windows():
        in_windows = tokenizer.ids(text, control=some)
    assert in_windows.tolist() == real(name, 1).ids(text, control=some).tolist()
    plain = real(name, 1).encode_pair(prompt, completion)
    assert [*map(list, (pair.prompt, pair.completion))] == [*map(list, (plain.prompt, plain.completion))]
    assert pair.exact == plain.exact


@contextlib.contextmanager
def small_windows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for attribute, value in (("WINDOW", 300), ("OVERLAP", 200), ("LONGEST_WINDOW", 100_000)):
            patch.setattr(f"prge.data.tokenization.tokenizer.{attribute}", value)
        yield


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_text_has_the_tokens_of_the_whole(name: str) -> None:
    random = np.random.default_rng(0)
    words = [
        *(f"word{n}" for n in range(50)),
        "\n",
        "  ",
        "Gr\u00fc\u00dfe",
        "\U0001f600",
        "don't,",
        "12345",
        "</s>",
    ]
    text = " ".join(random.choice(words, 60_000))
    tokenizer = real(name)
    assert len(text) > 8 * WINDOW
    assert tokenizer.encode(text) == [token for token, *_ in whole(library(name), text)]


def threes() -> Backend:
    """Return a tokenizer with tokens of one to three a's: windows agree only at equal offsets."""
    vocabulary = {"a": 0, "b": 1, "aa": 2, "aaa": 3}
    return Backend(models.BPE(vocabulary, [("a", "a"), ("aa", "a")]))


def test_a_window_grows_until_it_can_be_joined() -> None:
    text = "ab" * 400 + "a" * 1500 + "ba" * 900
    with small_windows():
        result = [tuple(row) for part in Tokenizer(threes()).parts(text) for row in part.tolist()]
    assert result == whole(threes(), text)


def test_an_endless_word_is_refused() -> None:
    with raises(DataError, "text-not-divisible", containing="262144"):
        Tokenizer(threes()).encode("b" + "a" * (3 * LONGEST_WINDOW))


@pytest.mark.whole
@pytest.mark.parametrize("name", TOKENIZERS)
def test_ten_megabytes_take_little_memory(name: str) -> None:
    real(name)
    preparation = (
        "from prge.data.tokenization.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer({str(TOKENIZERS[name].parent)!r}, {{}})\n"
        "text = 'The quick brown fox jumps over 12 lazy dogs; it slept.\\n' * 178_571\n"
        "tokenizer.ids(text[:100])\n"
        # After freeing a large array, glibc allocates other large arrays on the heap.
        "freed = bytes(16_000_000)\n"
        "del freed"
    )
    result = measure_program(preparation, "ids = tokenizer.ids(text)")
    assert result.above_bytes < 50e6


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_time_of_a_long_text_is_linear(name: str) -> None:
    def seconds(characters: int) -> float:
        text = "The quick brown fox jumps over 12 lazy dogs. " * (characters // 45)
        start = time.process_time()
        real(name).ids(text)
        return time.process_time() - start

    seconds(1 << 16)
    assert seconds(1 << 20) < 2 * 8 * seconds(1 << 17)


@pytest.mark.parametrize(
    ("model", "unknown"),
    [
        (models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>"), 1),
        (models.BPE({"a": 0}, []), None),
        (models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"), 1),
        (models.Unigram([("a", -1.0), ("<unk>", 0.0)], unk_id=1), 1),
        (
            models.Unigram([("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))], 0, True),
            None,
        ),
    ],
)
def test_an_unknown_id_is_refused(model: Any, unknown: int | None) -> None:
    assert Tokenizer(Backend(model)).unknown_id == unknown


def test_the_text_of_one_token_is_that_inside_a_text(
    tokenizer: Tokenizer, prefixed_tokenizer: Tokenizer
) -> None:
    for each in (tokenizer, prefixed_tokenizer):
        tokens = each.encode("a dog was good")
        assert "".join(each.token_text(token) or "" for token in tokens).strip() == "a dog was good"
        assert each.token_text(tokens[-1]) not in (None, each.token(tokens[-1]).strip("Ġ▁"))
    assert tokenizer.token_text(tokenizer.eos_id or 0) == "</s>"
    halves = tokenizer.encode("é")
    assert len(halves) == 2 and [tokenizer.token_text(half) for half in halves] == [None, None]


@pytest.mark.parametrize("make_backend", [byte_level_backend, byte_fallback_backend])
def test_the_bytes_of_tokens_are_those_of_the_text_also_in_parts_of_characters(make_backend: Any) -> None:
    tokenizer = Tokenizer(make_backend(), bos_id=1, eos_id=2)
    for text in ("a b", "é", "a😀b", "€\n", "\ufffd"):
        parts = [tokenizer.token_bytes(token) for token in tokenizer.encode(text)]
        assert b"".join(parts).decode().strip(" ") == text
    assert [*map(tokenizer.token_bytes, tokenizer.encode("é"))][-2:] == [b"\xc3", b"\xa9"]
    assert tokenizer.token_bytes(2) == b"</s>" and tokenizer.token_bytes(10**6) == b""


def test_the_content_of_a_tokenizer_is_what_it_was_loaded_with() -> None:
    backend = byte_level_backend()
    before = json.loads(backend.to_str())
    tokenizer = Tokenizer(backend, bos_id=1, eos_id=2)
    tokenizer.encode("a</s> b", control=[1])
    assert tokenizer.to_json() == before
