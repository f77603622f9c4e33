"""Checks of untrusted texts, JSON values and token ids, which raise DataError.

texts    `read_input_text` and `decode_utf8` read standard input; `check_text` is called before a text is
         tokenized (tokenizer.py)
values   `to_json_value` converts messages and other arguments of a chat template
ids      `check_token_ids` is called before a model reads a prompt (prge/generation/loop.py)
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Sequence
from typing import Any, TextIO

from prge.cli.field_types import to_python_value
from prge.errors import DataError, format_value
from prge.formats.documents import DocumentError, parse_json

_SURROGATE = re.compile(r"[\ud800-\udfff]")


def decode_utf8(content: bytes, source: str) -> str:
    """Decode UTF-8.

    Args:
        content: the bytes.
        source: name of the bytes in errors.

    Raises:
        DataError: the bytes are not UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not UTF-8:",
            [f"byte {error.start} is 0x{content[error.start]:02x}"],
            remedy="Give it in UTF-8.",
            code="not-utf8",
        ) from None


def read_input_text(stream: TextIO) -> str:
    """Read standard input without the line break at its end; raises DataError as `decode_utf8`."""
    binary = getattr(stream, "buffer", None)
    text = stream.read() if binary is None else decode_utf8(binary.read(), "standard input")
    return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")


def is_valid_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8: it has no unpaired surrogate."""
    return text.isascii() or _SURROGATE.search(text) is None


def check_text(text: str) -> None:
    """Raise DataError if a text has an unpaired surrogate, which invalid UTF-8 may have become."""
    if not text.isascii() and (half := _SURROGATE.search(text)) is not None:
        raise DataError(
            "The text can't be tokenized:",
            [
                f"character {half.start() + 1} is U+{ord(half[0]):04X}, half of a surrogate pair: the text "
                "was not UTF-8"
            ],
            remedy="Give it in UTF-8.",
            code="half-character",
        )


def to_json_value(value: object, name: str) -> Any:
    """Convert a value to JSON's types: tuples become lists, and numpy's numbers become Python's.

    Args:
        value: the value.
        name: name of the value in errors.

    Raises:
        DataError: the value can't be represented in JSON, has an unpaired surrogate, or is nested too deeply.
    """
    try:
        return parse_json(json.dumps(value, default=_default, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        problem = "it has half of a surrogate pair: the text was not UTF-8"
        raise DataError(
            f"{name} can't be used:", [problem], remedy="Give it in UTF-8.", code="half-character"
        ) from None
    except (DocumentError, TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{name} can't be used:",
            [str(error)],
            remedy="Give texts, numbers, lists and mappings.",
            code="not-json",
        ) from None


def _default(value: object) -> Any:
    plain = to_python_value(value)
    if plain is value:
        raise TypeError(f"it has {format_value(value)}, which JSON has no type for")
    return plain


def check_token_ids(ids: Sequence[object], vocabulary_size: int) -> tuple[int, ...]:
    """Check token ids and return them as Python's integers.

    Args:
        ids: integers of Python or numpy.
        vocabulary_size: number of tokens of the model.

    Raises:
        DataError: an id is not an integer, or not in the vocabulary.
    """
    numbers = []
    for index, each in enumerate(ids, 1):
        try:
            if isinstance(each, bool):
                raise TypeError
            number = operator.index(each)  # type: ignore[arg-type]
        except TypeError:
            number = -1
        if not 0 <= number < vocabulary_size:
            raise DataError(
                "The prompt can't be used:",
                [
                    f"token {index} is {format_value(each)}, must be a whole number from 0 to "
                    f"{vocabulary_size - 1}: no other tokens are this bundle's"
                ],
                code="token-unknown",
            )
        numbers.append(number)
    return tuple(numbers)
