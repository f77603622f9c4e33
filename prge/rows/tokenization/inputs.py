"""Checks of texts, JSON values and token ids from outside; what the model can't take is a DataError.

texts    standard input by `read_text_of` or `decoded_text`; every text by `check_text` before it is
         tokenized (tokenizer.py)
values   of messages and of what a chat template is given besides, by `checked_json`
ids      every prompt's by `checked_ids` before a model reads them (prge/text/loop.py)
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Sequence
from typing import Any, TextIO

from prge.errors import DataError, shown
from prge.files.documents import DocumentError, parse_json
from prge.verbs.kinds import plain_value

_SURROGATE = re.compile(r"[\ud800-\udfff]")


def decoded_text(content: bytes, source: str) -> str:
    """The text of UTF-8 bytes.

    Args:
        content: the bytes.
        source: names them in errors.

    Raises:
        DataError: they are no UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not UTF-8",
            [f"byte {error.start} is 0x{content[error.start]:02x}"],
            remedy="give it in UTF-8",
            code="not-utf8",
        ) from None


def read_text_of(stream: TextIO) -> str:
    """All text of standard input but the line break at its end; raises DataError as `decoded_text`."""
    binary = getattr(stream, "buffer", None)
    text = stream.read() if binary is None else decoded_text(binary.read(), "standard input")
    return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")


def is_text(text: str) -> bool:
    """Whether a text can be written in UTF-8: it has no half of a surrogate pair."""
    return text.isascii() or _SURROGATE.search(text) is None


def check_text(text: str) -> None:
    """Raise DataError where a text has half of a surrogate pair, as bytes have that were no UTF-8."""
    if not text.isascii() and (half := _SURROGATE.search(text)) is not None:
        raise DataError(
            "the text can't be tokenized",
            [
                f"character {half.start() + 1} is U+{ord(half[0]):04X}, half of a surrogate pair: the text "
                "was not UTF-8"
            ],
            remedy="give it in UTF-8",
            code="half-character",
        )


def checked_json(value: object, name: str) -> Any:
    """A value as JSON has it, with lists for tuples and Python's numbers for numpy's.

    Args:
        value: to check.
        name: names it in errors.

    Raises:
        DataError: it can't be written as JSON, or is no text, or goes too deep.
    """
    try:
        return parse_json(json.dumps(value, default=_default, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        problem = "it has half of a surrogate pair: the text was not UTF-8"
        raise DataError(
            f"{name} can't be used", [problem], remedy="give it in UTF-8", code="half-character"
        ) from None
    except (DocumentError, TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{name} can't be used",
            [str(error)],
            remedy="give texts, numbers, lists and mappings",
            code="not-json",
        ) from None


def _default(value: object) -> Any:
    plain = plain_value(value)
    if plain is value:
        raise TypeError(f"it has {shown(value)}, which JSON has no type for")
    return plain


def checked_ids(ids: Sequence[object], vocabulary_size: int) -> tuple[int, ...]:
    """Token ids as Python's integers.

    Args:
        ids: whole numbers, Python's or numpy's.
        vocabulary_size: tokens that the model knows.

    Raises:
        DataError: one of them is no whole number, or no token of the model.
    """
    found = []
    for place, each in enumerate(ids, 1):
        try:
            if isinstance(each, bool):
                raise TypeError
            number = operator.index(each)  # type: ignore[arg-type]
        except TypeError:
            number = -1
        if not 0 <= number < vocabulary_size:
            raise DataError(
                "the prompt can't be used",
                [
                    f"token {place} is {shown(each)}, must be a whole number from 0 to "
                    f"{vocabulary_size - 1}: no other tokens are this bundle's"
                ],
                code="token-unknown",
            )
        found.append(number)
    return tuple(found)
