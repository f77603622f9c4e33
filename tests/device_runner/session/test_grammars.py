"""Constrained decoding with llguidance: any model writes JSON of the schema, or text of the grammar."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_runner.session.grammars import (
    MAX_GRAMMAR,
    MAX_ITEMS,
    MAX_SCHEMA,
    ControlToken,
    Grammars,
    JsonOf,
    OneOf,
    TextUntil,
)
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import BundleError, DataError, PrgeError
from tests.constrained import TOKENIZER, completions
from tests.prge.data.tiny_tokenizers import byte_fallback_backend, byte_level_backend, prefixed_backend
from tests.refusals import raises

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Paris"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "note": {"type": "string", "maxLength": 5},
    },
    "required": ["city", "days", "units", "note"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def llguidance() -> Any:
    return pytest.importorskip("llguidance", reason="the package llguidance is not installed")


@pytest.mark.parametrize("make_backend", [byte_level_backend, byte_fallback_backend])
def test_every_model_writes_json_of_the_schema(make_backend: Callable[[], Any]) -> None:
    tokenizer = Tokenizer(make_backend(), bos_id=1, eos_id=2)
    # The tokens that the tokenizer adds for its own use are not the library's.
    tokenizer.encode("a</s>", control=[1])
    texts = set()
    for answer in completions(Grammars(tokenizer).sequence([JsonOf(WEATHER)]), tokenizer):
        assert answer.reason == "stop"
        value = json.loads(answer.text)
        assert list(value) == WEATHER["required"]
        assert value["city"] in ("Rome", "Paris") and 1 <= value["days"] <= 14
        assert 1 <= len(value["units"]) <= 3 and {True, False}.issuperset(value["units"])
        assert len(value["note"]) <= 5
        texts.add(answer.text)
    assert len(texts) > 1


def test_json_has_the_layout_of_chat_templates() -> None:
    for answer in completions(Grammars(TOKENIZER).sequence([JsonOf(WEATHER)])):
        value = json.loads(answer.text)
        assert answer.text.isascii() is False or answer.text == json.dumps({**value}) or value["note"]
        assert answer.text.startswith('{"city": "') and ', "days": ' in answer.text


def test_parts_follow_each_other() -> None:
    end = ("/;\n",)
    parts = ['"a=', JsonOf({"type": "boolean"}), OneOf([(), ("b", JsonOf({"const": 'x"y'})), ("é",)]), *end]
    texts = {answer.text for answer in completions(Grammars(TOKENIZER).sequence(parts), count=12)}
    endings = ("", 'b"x\\"y"', "é")
    assert texts <= {f'"a={value}{ending}/;\n' for value in ("true", "false") for ending in endings}


def test_free_text_ends_with_its_end() -> None:
    parts = ["<a>", TextUntil("b"), "</a>"]
    for answer in completions(Grammars(TOKENIZER).sequence(parts), max_tokens=300):
        if answer.reason == "stop":
            assert answer.text.startswith("<a>") and answer.text.endswith("b</a>")
            assert answer.text.count("b") == 1


def test_a_control_token_is_one_if_the_tokenizer_has_it() -> None:
    (answer,) = completions(Grammars(TOKENIZER).sequence([ControlToken("<s>"), "a"]), count=1)
    assert answer.tokens[:1] == (TOKENIZER.control_id("<s>"),) and answer.text == "a"
    (answer,) = completions(Grammars(TOKENIZER).sequence([ControlToken("[ARGS]")]), count=1)
    assert answer.text == "[ARGS]"


def test_references_are_resolved_in_their_own_schema() -> None:
    schema = {"$defs": {"yes": {"const": True}}, "properties": {"a": {"$ref": "#/$defs/yes"}}}
    schema |= {"type": "object", "required": ["a"], "additionalProperties": False}
    (answer,) = completions(Grammars(TOKENIZER).sequence(["f: ", JsonOf(schema)]), count=1)
    assert answer.text == 'f: {"a": true}'


@pytest.mark.parametrize(
    "grammar", ['start: "yes" | "no" " "? /[0-9]{2}/', 'root ::= "yes" | "no" " "? [0-9] [0-9]\n']
)
def test_grammars_of_lark_and_of_llama_cpp(grammar: str) -> None:
    for answer in completions(Grammars(TOKENIZER).grammar(grammar), count=8):
        assert answer.text == "yes" or answer.text.removeprefix("no").strip().isdecimal()


def test_a_grammar_that_may_end_early_ends_with_an_end_token() -> None:
    answers = completions(Grammars(TOKENIZER).grammar('start: "a" /b*/'), count=8)
    assert {answer.text.rstrip("b") for answer in answers} == {"a"}
    assert {answer.reason for answer in answers} == {"stop"} and len({answer.text for answer in answers}) > 1


def test_max_tokens_cuts_json() -> None:
    (answer,) = completions(Grammars(TOKENIZER).sequence([JsonOf(WEATHER)]), count=1, max_tokens=3)
    assert answer.reason == "length" and len(answer.tokens) == 3


@pytest.mark.parametrize(
    "schema",
    [
        None,
        "object",
        [],
        True,
        {"type": "thing"},
        {"type": 3},
        {"properties": []},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/nowhere"},
        {"enum": []},
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"enum": ["x" * MAX_SCHEMA]},
        {"$ref": "#"},
        {"type": "array", "maxItems": MAX_ITEMS + 1},
        {"prefixItems": [{"type": "array", "minItems": 1000.0}] * 11},
    ],
)
def test_what_is_no_schema_is_refused(schema: object) -> None:
    with raises(DataError, "grammar-refused"):
        Grammars(TOKENIZER).sequence([JsonOf(schema)])


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        " ",
        "start: a",
        "start: (",
        "root ::= a",
        "{",
        "[" * 5000,
        'start: a\na: %json {"minItems": 9}',
        "x" * (MAX_GRAMMAR + 1),
    ],
)
def test_what_is_no_grammar_is_refused(grammar: str) -> None:
    with raises(DataError, "grammar-refused"):
        Grammars(TOKENIZER).grammar(grammar)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"anyOf": [schema, {"type": "object", "properties": {"a": schema}}]}
    return schema


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels // 2):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


GRAMMARS = Grammars(TOKENIZER)
HOSTILE: dict[str, Any] = {
    "long string": {"type": "string", "minLength": 10**6, "maxLength": 10**9},
    "long list": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
    "pattern": {"type": "string", "pattern": "((a{1,100}){1,100}){1,100}b"},
    "alternatives": {"type": "string", "pattern": "(" + "|".join(f"x{n}.*y{n}" for n in range(2000)) + ")"},
    "ambiguous": {"type": "string", "pattern": "(.*a.{20}|.*b.{20})" * 20},
    "nested": nested(10),
    "multiple": {"type": "integer", "multipleOf": 99991, "minimum": 1, "maximum": 10**15},
    "properties": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1500)}},
    "enum": {"enum": [f"v{n}" for n in range(5000)]},
    "list of lists": {"$defs": {"a": {"type": "array", "minItems": 99, "items": {"$ref": "#/$defs/a"}}}}
    | {"$ref": "#/$defs/a"},
    "negative counts": {"minItems": -(10**9), "items": {"type": "array", "minItems": 10**9}},
    "tree": {"$ref": "#", "type": "object", "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}},
    "references": {"$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 9} for n in range(99)}}
    | {"$ref": "#/$defs/d0"},
    "remote reference": {"properties": {"a": {"$ref": "http://127.0.0.1:9/schema.json"}}},
    "file reference": {"$ref": "file:///etc/passwd"},
    "alternatives of objects": {
        "anyOf": [{"type": "object", "properties": {f"p{n}": {"type": "integer"}}} for n in range(900)]
    },
    "alternatives of all": {"allOf": [{"anyOf": [{"minimum": n}, {"maximum": n}]} for n in range(30)]},
    "required properties": {"type": "object", "required": [f"p{n}" for n in range(5000)]},
    "patterns": {"patternProperties": {f"^(a|b)*{n}$": {"type": "string"} for n in range(200)}},
    "catastrophic": {"type": "string", "pattern": "^(a+)+$(a|aa)+(.*)*b{1,999}$"},
    "deep": deep(30),
    "most items": {"type": "array", "maxItems": MAX_ITEMS, "items": {"type": "integer"}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_takes_bounded_time(name: str) -> None:
    start = time.process_time()
    try:
        completions(Grammars(TOKENIZER).sequence([JsonOf(HOSTILE[name])]), count=1, max_tokens=20)
    except Exception as error:
        assert getattr(error, "code", "") in ("grammar-refused", "grammar-without-token"), error
    assert time.process_time() - start < 10


KEYS = "type properties items required enum anyOf allOf $ref $defs a minItems maxLength pattern".split()
VALUES = [
    "object",
    "array",
    "string",
    "integer",
    "#",
    "#/$defs/a",
    "a",
    "(",
    "^(a|a)*$",
    0,
    -1,
    1e18,
    True,
    None,
]
SCHEMAS = st.recursive(
    st.sampled_from(VALUES),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.sampled_from(KEYS), each, max_size=4),
    max_leaves=15,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), SCHEMAS, max_size=5))
def test_any_schema_is_refused_or_followed_in_bounded_time(schema: Any) -> None:
    start = time.process_time()
    try:
        completions(GRAMMARS.sequence([JsonOf(schema)]), count=1, max_tokens=5)
    except PrgeError as error:
        assert error.code in ("grammar-refused", "grammar-without-token"), error
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "grammar",
    [
        'start: start "a" | "a"',
        "start: start",
        "start: a\na: b\nb: a",
        'start: a a a\na: a a | "x" | ""',
        "root ::= root root | [a-z]*\n",
        "root ::= " + "(" * 900 + '"a"' + ")" * 900 + "\n",
        "\n".join(["start: a0", *(f"a{n}: a{n + 1} a{n + 1}" for n in range(300)), 'a300: "x"']),
        "start: /((a{1,300}){1,300}){1,300}/",
        'start: "a"~1..1000000',
        'root ::= "a"{1,1000000}\n',
        "start: " + " | ".join(f'"{n}"' for n in range(900)),
        'start: %lark { start: "a" }',
        "start: @other\n",
        "%import common.NUMBER\nstart: NUMBER",
        "start: /(?=a)b/ | /\\1/",
        "start: <[99999999]>",
    ],
)
def test_a_hostile_grammar_takes_bounded_time(grammar: str) -> None:
    start = time.process_time()
    try:
        completions(Grammars(TOKENIZER).grammar(grammar), count=1, max_tokens=20)
    except PrgeError as error:
        assert error.code in ("grammar-refused", "grammar-without-token"), error
    assert time.process_time() - start < 10


def test_a_tokenizer_without_bytes_is_refused() -> None:
    with raises(BundleError, "tokenizer-unsupported"):
        Grammars(Tokenizer(prefixed_backend(), bos_id=1, eos_id=2)).sequence([JsonOf(WEATHER)])


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for request in (
        lambda: Grammars(TOKENIZER).sequence([JsonOf(WEATHER)]),
        lambda: Grammars(TOKENIZER).grammar('start: "a"'),
    ):
        with raises(DataError, "package-missing", containing="llguidance"):
            request()
