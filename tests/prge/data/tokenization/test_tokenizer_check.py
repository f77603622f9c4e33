"""A malicious `tokenizer.json` is refused, without ending this process or taking its memory."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prge.data.tokenization import tokenizer_check
from prge.data.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from prge.errors import BundleError, DataError, PrgeError
from tests.prge.data.tiny_tokenizers import (
    byte_fallback_backend,
    byte_level_backend,
    encoder_backend,
    prefixed_backend,
)
from tests.refusals import raises

TEXTS = ("Hi! the film was bad", "caf\u00e9 \u65e5\u672c </s>", " \n\t", "a" * 3000)
MAX_KILOBYTES = 300 << 10
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def within_bounds() -> Iterator[None]:
    """Check that no test takes much memory in this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_KILOBYTES


def load(folder: Path, content: Json | bytes) -> Tokenizer:
    (folder / TOKENIZER_FILE).write_bytes(
        content if isinstance(content, bytes) else json.dumps(content).encode()
    )
    return load_tokenizer(folder, {})


def used(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text, control=True)
        tokenizer.decode(ids)
        tokenizer.token_texts(ids[:20])
        tokenizer.encode_pair("the film", text)


def base() -> Json:
    content: Json = json.loads(byte_level_backend().to_str())
    return content


def charsmap(content: bytes) -> Json:
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}}


def doubling(times: int) -> list[Json]:
    return [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * times


def added(count: int) -> list[Json]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    return [
        {"id": 1000 + each, "content": f"<q{each}>" * 50, "special": True, **flags} for each in range(count)
    ]


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 100_000
    + [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1] * 1000, "tokens": ["<s>"] * 1000}},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (charsmap(b""), "Cannot parse precompiled_charsmap"),
        (charsmap(b"\xff" * 64), "trying it ends its process"),
        (charsmap(b"\x04\0\0\0" + b"\xff" * 4 + b"x" * 20), "index out of bounds"),
        ({"normalizer": {"type": "Sequence", "normalizers": doubling(30)}}, "trying it"),
        pytest.param(
            {"decoder": {"type": "Sequence", "decoders": doubling(30)}}, "trying it", marks=pytest.mark.whole
        ),
        (
            {"decoder": {"type": "Strip", "content": "a", "start": 2**63, "stop": 2**63}},
            "index out of bounds",
        ),
        ({"post_processor": TEMPLATE}, "trying it"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size must be non-zero"),
        ({"model": {"type": "BPE", "vocab": {"a": 2**32}, "merges": []}}, "4294967296"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["y", "z"]]}}, "out of vocabulary"),
        ({"model": {**base()["model"], "continuing_subword_prefix": "\u00e9" * 1000}}, "out of range"),
        ({"model": {"type": "Unigram", "unk_id": 2**62, "vocab": [["a", 0.0]]}}, "UnkIdNotInVocabulary"),
        (
            {"normalizer": json.loads('{"type":"Sequence","normalizers":[' * 90 + "]}" * 90)},
            "recursion limit",
        ),
        pytest.param({"added_tokens": added(60_000)}, "trying it", marks=pytest.mark.whole),
    ],
)
def test_hostile_files_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], change: Json, message: str
) -> None:
    with raises(BundleError, "tokenizer-damaged", containing=message) as caught:
        load(tmp_path, {**base(), **change})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {
            "truncation": {
                "direction": "Right",
                "max_length": 2**60,
                "strategy": "LongestFirst",
                "stride": 2**61,
            }
        },
        {
            "padding": {
                "strategy": {"Fixed": 2**40},
                "direction": "Right",
                "pad_to_multiple_of": 2**40,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<pad>",
            }
        },
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "(a+)+$"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(?:a{1000}){1000}"}, "content": "b"}},
    ],
)
def test_harmless_lengths_and_patterns_are_accepted(tmp_path: Path, change: Json) -> None:
    used(load(tmp_path, {**base(), **change}))


@pytest.mark.parametrize(
    "model",
    [
        {
            "type": "WordPiece",
            "unk_token": "[U]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 9,
        },
        {"type": "WordLevel", "unk_token": "[U]"},
    ],
)
def test_a_text_that_the_library_refuses_is_refused_on_encoding(tmp_path: Path, model: Json) -> None:
    content = {**base(), "pre_tokenizer": None, "model": {**model, "vocab": {"a": 0}}, "added_tokens": []}
    tokenizer = load(tmp_path, content)
    assert tokenizer.encode("a") == [0]
    with raises(DataError, "text-not-encodable", containing="[UNK]"):
        tokenizer.encode("bad")


def test_a_file_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(tmp_path, {**base(), "version": "1.0", "truncation": None})
    monkeypatch.setattr(tokenizer_check, "BoundedChild", None)
    used(load_tokenizer(tmp_path, {}))


NUMBERS = [0, -1, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64, 1e308, None, "", True, [], {}]


def paths_in(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    keys = value if isinstance(value, dict) else range(min(len(value), 20)) if isinstance(value, list) else ()
    for key in keys:
        yield from paths_in(value[key], (*path, key))  # type: ignore[index]


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@pytest.mark.parametrize("seed", range(4))
def test_changed_files_are_used_or_refused(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    backends = (byte_level_backend, prefixed_backend, byte_fallback_backend, encoder_backend)
    original: Json = json.loads(backends[seed]().to_str())
    outside = [path for path in paths_in(original) if path and (path[0] != "model" or len(path) < 3)]
    for _ in range(25):
        if chosen.random() < 0.4:
            changed = bytearray(json.dumps(original, ensure_ascii=False).encode())
            for _ in range(chosen.randint(1, 6)):
                changed[chosen.randrange(len(changed))] = chosen.randrange(256)
            content: Json | bytes = bytes(changed)
        else:
            content = copy.deepcopy(original)
            for _ in range(chosen.randint(1, 3)):
                path, other = chosen.choice(outside), chosen.choice(outside)
                value = chosen.choice(NUMBERS) if chosen.random() < 0.6 else at(original, other)
                with contextlib.suppress(KeyError, IndexError, TypeError):  # removed by an earlier change
                    at(content, path[:-1])[path[-1]] = copy.deepcopy(value)
        with contextlib.suppress(PrgeError):
            used(load(tmp_path, content))
