"""Completions in a given format, by constrained decoding with llguidance, the only module that imports it.

A grammar comes from a client and is untrusted: its size, the time to compile it, and the time and memory of a
token are limited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from prge.data.tokenization.tokenizer import Tokenizer
from prge.engine import BoolArray
from prge.errors import BundleError, DataError, EngineError, first_line, format_value, shortened
from prge.generation.constraints import BeginConstraint
from prge.system.packages import install, requirement

PACKAGE = "llguidance"
# Characters of the schemas of a request, and of a grammar. The time to convert a grammar of llama.cpp grows
# with the square of its length.
MAX_SCHEMA, MAX_GRAMMAR = 64 << 10, 8 << 10
# The library repeats the items of a list before it compares the size of a grammar with its limit.
MAX_ITEMS = 10_000
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
# Limits of the library: symbols of a compiled grammar, states of its lexer (1 to 2 kB each).
_LIMITS = {"max_grammar_size": 100_000, "max_lexer_states": 20_000, "verbose_errors": False}
# JSON as Python's `json.dumps` and chat templates write it. Optional white space would be endless in a weak
# model.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LONGEST_PROBLEM = 300
# The name of a token that stands for the end of a completion, and the flags of an added token.
_END = "\ufdd1end"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True)
class ControlToken:
    """A control token; the characters of its name if the tokenizer has no such token."""

    name: str


@dataclass(frozen=True)
class JsonOf:
    """JSON of a schema, in one line."""

    schema: object


@dataclass(frozen=True)
class TextUntil:
    """Any text up to the first `end`, and `end`."""

    end: str


@dataclass(frozen=True)
class OneOf:
    """One of several sequences of parts, of which one may be empty."""

    options: Iterable[Sequence[Part]]


# A part of a completion; a string is this text.
Part = str | ControlToken | JsonOf | TextUntil | OneOf


class Grammars:
    """Compiles JSON schemas and grammars to constraints on the tokens of one tokenizer.

    Args:
        tokenizer: used by this object only while a method runs.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def sequence(self, parts: Sequence[Part]) -> BeginConstraint:
        """Return the constraint to parts of a completion, one after the other.

        Raises:
            DataError: llguidance isn't installed, or it refuses a schema.
            BundleError: it doesn't support the tokenizer.
        """
        rules = _Rules(self._tokenizer)
        start = rules.expressions(parts)
        return self._compile("\n".join([f"start: {start}", *rules.rules]), MAX_SCHEMA)

    def grammar(self, text: str) -> BeginConstraint:
        """Return the constraint to a grammar in the syntax of Lark or of llama.cpp (GBNF).

        Raises:
            DataError: llguidance isn't installed, or it refuses the grammar.
            BundleError: it doesn't support the tokenizer.
        """
        library = _library()
        _check_size(len(text), MAX_GRAMMAR)
        if "%json" in text:
            raise _refused_error("it contains %json: give a JSON schema instead")
        try:
            converted = library.grammar_from("grammar", text)
        except (ValueError, RecursionError, IndexError) as error:
            raise _refused_error(first_line(error)) from None
        return self._compile(converted, 4 * MAX_GRAMMAR)

    def _compile(self, grammar: str, longest: int) -> BeginConstraint:
        library, tokens = _library(), self._tokens
        _check_size(len(grammar), longest)
        matcher = library.LLMatcher(tokens, grammar, log_level=0, limits=library.LLParserLimits(**_LIMITS))
        begun = matcher.deep_copy()
        begun.compute_bitmask()  # fails if the format has no text
        if problem := matcher.get_error() or begun.get_error():
            raise _refused_error(first_line(ValueError(problem)))
        return lambda: _GrammarConstraint(matcher.deep_copy(), tokens.eos_token)

    @cached_property
    def _tokens(self) -> Any:
        """The library's tokenizer, with one more token, which stands for the end of a completion."""
        library, content = _library(), self._tokenizer.to_json()
        end = {"id": self._tokenizer.vocabulary_size, "content": _END, "special": True}
        content["added_tokens"].append({**dict.fromkeys(_FLAGS, False), **end})
        try:
            return library.LLTokenizer(json.dumps(content), eos_token=end["id"])
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise BundleError(
                f"Constrained decoding doesn't support the bundle's tokenizer: {first_line(error)}",
                remedy="Request a completion without a format.",
                code="tokenizer-unsupported",
            ) from None


class _Rules:
    """Rules in the syntax of Lark, to which the expressions of parts refer.

    Args:
        tokenizer: has the control tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.rules: list[str] = []
        self._tokenizer = tokenizer
        self._size = 0
        self._items = 0.0

    def expressions(self, parts: Iterable[Part]) -> str:
        """Return parts, one after the other, as an expression."""
        return " ".join(map(self._expression, parts)) or '""'

    def _expression(self, part: Part) -> str:
        if isinstance(part, OneOf):
            return f"({' | '.join(map(self.expressions, part.options))})"
        if isinstance(part, JsonOf):
            return self._rule(f": %json {self._schema(part.schema)}")
        if isinstance(part, TextUntil):
            end = re.escape(part.end).replace("\n", "n").replace("/", r"\/")
            return self._rule(f"[lazy]: /(?s:.*){end}/")
        token = self._tokenizer.control_id(part.name) if isinstance(part, ControlToken) else None
        text = part.name if isinstance(part, ControlToken) else part
        return self._limited(json.dumps(text) if token is None else f"<[{token}]>")

    def _rule(self, text: str) -> str:
        name = f"part{len(self.rules)}"
        self.rules.append(self._limited(name + text))
        return name

    def _limited(self, text: str) -> str:
        """Return a text of the grammar; refuses it at once if there is too much of it."""
        self._size += len(text)
        _check_size(self._size, MAX_SCHEMA)
        return text

    def _schema(self, schema: object) -> str:
        if not isinstance(schema, Mapping):
            raise _refused_error(f"the schema is {format_value(schema)}, must be an object")
        text = json.dumps({**schema, "x-guidance": _LAYOUT})
        _check_size(len(text), MAX_SCHEMA)
        self._items += _items(schema)
        if self._items > MAX_ITEMS:
            raise _refused_error(f"its {', '.join(_COUNTS)} are more than {MAX_ITEMS} together")
        return text


class _GrammarConstraint:
    """Implements prge.generation.constraints.TokenConstraint.

    Args:
        matcher: the library's state of one completion.
        end: the token that stands for the end of a completion, after all others.
    """

    def __init__(self, matcher: Any, end: int) -> None:
        self._matcher = matcher
        self._end = end

    def allowed(self, ends: Collection[int]) -> BoolArray:
        """See TokenConstraint."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=self._end + 1, bitorder="little").view(bool)
        allowed, may_end = mask[:-1], mask[-1]
        allowed[[token for token in ends if token < len(allowed)]] = may_end
        if self._matcher.is_error() or not allowed.any():
            problem = shortened(self._matcher.get_error(), _LONGEST_PROBLEM) or "no token of the model fits"
            raise EngineError(
                f"The completion can't continue in its format: {problem}",
                remedy="Simplify the schema or the grammar.",
                code="grammar-without-token",
            )
        return allowed

    def accept(self, token: int) -> None:
        """See TokenConstraint."""
        self._matcher.consume_token(token)

    @property
    def is_finished(self) -> bool:
        """See TokenConstraint."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise DataError(
            f"A completion in a given format needs the package {PACKAGE}.",
            [],
            remedy=install([requirement(PACKAGE)]),
            code="package-missing",
        ) from None
    return llguidance


def _items(schema: object) -> float:
    """Return the sum of the numbers of items and properties that a schema names."""
    if isinstance(schema, Mapping):
        counts = (schema.get(name) for name in _COUNTS)
        named = sum(max(count, 0) for count in counts if isinstance(count, int | float))
        return named + sum(map(_items, schema.values()))
    return sum(map(_items, schema)) if isinstance(schema, list) else 0


def _check_size(characters: int, longest: int) -> None:
    if characters > longest:
        raise _refused_error(f"it has {characters} characters, at most {longest} are allowed")


def _refused_error(problem: str) -> DataError:
    return DataError(
        "The format can't be used:", [shortened(problem, _LONGEST_PROBLEM)], code="grammar-refused"
    )
