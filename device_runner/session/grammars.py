"""Completions in a given format, by constrained decoding with llguidance, the only module that imports it.

A grammar comes from a client and is untrusted: its size, the time to compile it, and the time and memory of a
token are limited.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
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


class Grammars:
    """Compiles JSON schemas and grammars to constraints on the tokens of one tokenizer.

    Args:
        tokenizer: used by this object only while a method runs.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def json(self, alternatives: Sequence[tuple[str, object, str]]) -> BeginConstraint:
        """Return the constraint to JSON of one of several schemas.

        Args:
            alternatives: of each schema, the text before the JSON, the schema, and the text after it.

        Raises:
            DataError: llguidance isn't installed, or it refuses a schema.
            BundleError: it doesn't support the tokenizer.
        """
        rules = [f"start: {' | '.join(f'a{number}' for number in range(len(alternatives)))}"]
        for number, (before, schema, after) in enumerate(alternatives):
            if not isinstance(schema, Mapping):
                raise _refused_error(f"the schema is {format_value(schema)}, must be an object")
            if _items(schema) > MAX_ITEMS:
                raise _refused_error(f"its {', '.join(_COUNTS)} are more than {MAX_ITEMS} together")
            parts = [json.dumps(before)] * bool(before) + [f"j{number}"] + [json.dumps(after)] * bool(after)
            rules.append(f"a{number}: {' '.join(parts)}")
            rules.append(f"j{number}: %json {json.dumps({**schema, 'x-guidance': _LAYOUT})}")
        return self._compile("\n".join(rules), MAX_SCHEMA)

    def grammar(self, text: str) -> BeginConstraint:
        """Return the constraint to a grammar in the syntax of Lark or of llama.cpp (GBNF).

        Raises:
            DataError: llguidance isn't installed, or it refuses the grammar.
            BundleError: it doesn't support the tokenizer.
        """
        library = _library()
        _check_size(text, MAX_GRAMMAR)
        if "%json" in text:
            raise _refused_error("it contains %json: give a JSON schema instead")
        try:
            converted = library.grammar_from("grammar", text)
        except (ValueError, RecursionError, IndexError) as error:
            raise _refused_error(first_line(error)) from None
        return self._compile(converted, 4 * MAX_GRAMMAR)

    def _compile(self, grammar: str, longest: int) -> BeginConstraint:
        library, tokens = _library(), self._tokens
        _check_size(grammar, longest)
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
        named = sum(count for count in counts if isinstance(count, int | float))
        return named + sum(map(_items, schema.values()))
    return sum(map(_items, schema)) if isinstance(schema, list) else 0


def _check_size(text: str, longest: int) -> None:
    if len(text) > longest:
        raise _refused_error(f"it has {len(text)} characters, at most {longest} are allowed")


def _refused_error(problem: str) -> DataError:
    return DataError(
        "The format can't be used:", [shortened(problem, _LONGEST_PROBLEM)], code="grammar-refused"
    )
