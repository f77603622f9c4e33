"""Untrusted documents: plain values within bounds, and a DocumentError for everything else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from prge.formats.documents import (
    DEEPEST,
    MAX_JSON_BYTES,
    MAX_YAML_BYTES,
    DocumentError,
    parse_json,
    parse_json_values,
    parse_yaml,
    read_json,
    read_yaml,
)
from tests.measured import measure_program
from tests.refusals import raises

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**50), 10**50)
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    LEAVES | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_json_reads_back_equal(value: object) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@given(VALUES)
def test_yaml_reads_back_equal(value: object) -> None:
    assert parse_yaml(yaml.safe_dump(value).encode()) == value


@pytest.mark.parametrize(
    ("content", "code", "value"),
    [
        (b"", "json-malformed", "character 1"),
        (b'{"a": 1', "json-malformed", "character 8"),
        (b"\xff{}", "not-utf8", "0xff"),
        (b"NaN", "number-not-finite", "NaN"),
        (b"[-Infinity]", "number-not-finite", "-Infinity"),
        (b"[1e999]", "number-not-finite", "'1e999'"),
        (b"9" * 5000, "number-too-long", "5000"),
        (b'"\\ud800"', "half-character", ""),
        (b"[" * 40 + b"]" * 40, "document-too-deep", str(DEEPEST)),
        (b"[" * 100_000, "document-too-deep", str(DEEPEST)),
        (b'{"a":' * 100_000, "document-too-deep", str(DEEPEST)),
    ],
)
def test_invalid_json_is_refused(content: bytes, code: str, value: str) -> None:
    with raises(DocumentError, code, containing=value):
        parse_json(content)


@pytest.mark.parametrize(
    ("content", "code", "value"),
    [
        (b"a: [1\n", "yaml-malformed", "line 2"),
        (b"\xff\xff", "not-utf8", "0xff"),
        (b"a: .inf\n", "number-not-finite", "inf"),
        (b"a: .nan\n", "number-not-finite", "nan"),
        (b"a: " + b"9" * 5000, "number-unreadable", ""),
        (b"a: !!int x\n", "number-unreadable", ""),
        (b"a: 0x" + b"f" * 5000, "number-too-long", ""),
        (b"a: &x [*x]\n", "yaml-alias", "*x"),
        (BOMB.encode(), "yaml-alias", "*a"),
        (b"[" * 60_000, "document-too-deep", str(DEEPEST)),
        (b"- " * 30_000, "document-too-deep", str(DEEPEST)),
        (b"a: !!python/object/apply:os.getcwd []\n", "yaml-malformed", ""),
        (b"a: !!timestamp 2020-99-99\n", "yaml-malformed", ""),
        (b"? [a]\n: b\n", "key-not-scalar", ""),
        (b"a: 1\na: 2\n", "key-twice", "'a'"),
        (b'a: 1\n"a": 2\n', "key-twice", "'a'"),
        (b"a: [{b: {1: 2, 0x1: 3}}]\n", "key-twice", "key 1 "),
        (b"a: 1\n---\nb: 2\n", "yaml-malformed", ""),
    ],
)
def test_invalid_yaml_is_refused(content: bytes, code: str, value: str) -> None:
    with raises(DocumentError, code, containing=value):
        parse_yaml(content)


def test_an_unpaired_surrogate_is_refused() -> None:
    with raises(DocumentError, "yaml-malformed", "half-character"):
        parse_yaml(b'a: "\\ud800"\n')


def test_yaml_dates_are_strings() -> None:
    assert parse_yaml("2020-01-01: 2020-99-99\n") == {"2020-01-01": "2020-99-99"}


def test_documents_are_read_up_to_a_depth() -> None:
    nested: object = []
    for _ in range(DEEPEST - 1):
        nested = [nested]
    assert parse_json(json.dumps(nested)) == parse_yaml(json.dumps(nested)) == nested
    with pytest.raises(DocumentError):
        parse_json(json.dumps([nested]))
    with pytest.raises(DocumentError):
        parse_yaml(json.dumps([nested]))


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b" " * MAX_JSON_BYTES + b"1")
    with raises(DocumentError, "document-too-large", containing=str(MAX_JSON_BYTES + 1)):
        read_json(path)
    with raises(DocumentError, "document-too-large", containing=str(MAX_YAML_BYTES)):
        read_yaml(path)


@pytest.mark.parametrize("file_type", ["pipe", "device", "folder"])
def test_reading_does_not_block_on_special_files(tmp_path: Path, file_type: str) -> None:
    path = {"pipe": tmp_path / "pipe", "device": Path("/dev/zero"), "folder": tmp_path}[file_type]
    if file_type == "pipe":
        os.mkfifo(path)
    with pytest.raises(OSError, match=file_type):
        read_json(path)


WORST = {
    "json lists": "[" + "[]," * ((MAX_JSON_BYTES - 8) // 3) + "[]]",
    "json mappings": "[" + "{}," * ((MAX_JSON_BYTES - 8) // 3) + "{}]",
    "json numbers": "[" + "1e9," * ((MAX_JSON_BYTES - 8) // 4) + "1]",
    "json keys": "{" + ",".join(f'"{n:x}":0' for n in range(180_000)) + "}",
    "yaml lists": "[" + "[]," * ((MAX_YAML_BYTES - 8) // 3) + "[]]",
    "yaml keys": "".join(f"{n:x}: 1\n" for n in range(7_000)),
    "yaml bomb": BOMB,
}


@pytest.mark.parametrize("name", WORST)
def test_every_document_is_read_within_time_and_memory_limits(tmp_path: Path, name: str) -> None:
    path = tmp_path / "document"
    path.write_text(WORST[name])
    reader = "read_yaml" if name.startswith("yaml") else "read_json"
    result = measure_program(
        f"import contextlib, pathlib\nfrom prge.formats.documents import DocumentError, {reader}",
        f"with contextlib.suppress(DocumentError):\n    {reader}(pathlib.Path({str(path)!r}))",
    )
    assert result.seconds < 1
    assert result.peak_bytes < 200e6


@pytest.mark.parametrize("content", ['{"a": 1, "a": 2}', '[{"b": {"a": 1, "c": 2, "a": 1}}]'])
def test_a_key_that_json_has_twice_is_refused(content: str) -> None:
    with raises(DocumentError, "key-twice", containing="'a'"):
        parse_json(content)
    with raises(DocumentError, "key-twice", containing="'a'"):
        parse_json_values('{"a": 1} ' + content)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1:30", "1:30"), ("1:30.5", "1:30.5"), ("010", "010"), ("-07", "-07"), ("0", 0), ("-0", 0)),
        *(("10", 10), ("1_000", 1000), ("0x10", 16), ("0.5", 0.5), (".5", 0.5), ("1.0e-3", 0.001)),
    ],
)
def test_yaml_numbers_are_decimal(text: str, value: object) -> None:
    assert parse_yaml(f"a: {text}") == {"a": value}
