"""Tries an untrusted `tokenizer.json` in a child process before this process uses it.

The library is strict about JSON, but a file can still make it panic, abort the process, or take memory and
time without end, for example with a damaged normalization table, or with rules that double a text repeatedly.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tokenizers import Tokenizer as Backend

from prge.errors import BundleError, first_line
from prge.system.sandbox import BoundedChild, LimitError

# Limits of a trial; those of reading a file grow with its size, see BoundedChild.
SECONDS = 10.0
MEMORY = 256 << 20
# Length of each part of the tokenizer that is encoded as a trial, since it contains what its rules match.
_LONGEST_PART = 2000
_MAX_TOKENS = 4000
# Content that may abort the process while a file is read: a normalization table, or an escape that may hide
# one; and so many added tokens that the library needs gigabytes for them.
_TABLE = re.compile(rb"Precompiled|\\u00[4-7]")
_ADDED, _MANY_ADDED = b"single_word", 10_000
_SAMPLES = (
    "a",
    " The film wasn't bad, it was\tgreat:\n\n 3.14 <s></s>",
    "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \u0441\u043b\u043e\u0432\u0430 \u0639\u0631\u0628\u064a "
    "\u0939\u093f \U0001f600\ufb01\u2581\x00",
    "a" * 1000,
)
_passed: set[bytes] = set()


def read_tokenizer(content: bytes, path: Path) -> Backend:
    """Read the tokenizer of a `tokenizer.json`; each content is tried only once in a process.

    Args:
        content: content of the file.
        path: path of the file, for errors.

    Raises:
        BundleError: the trial exceeded its limits.
        Exception: any exception of the library for a file that it can't read; after a panic, a BaseException.
    """
    digest = hashlib.sha256(content).digest()
    if digest not in _passed and (_TABLE.search(content) or content.count(_ADDED) > _MANY_ADDED):
        _try(_read, content, path)
    backend = Backend.from_str(content.decode())
    if digest not in _passed:
        _try(lambda _: _use(backend), b"", path)
    _passed.add(digest)
    return backend


def _try(work: Callable[[bytes], object], request: bytes, path: Path) -> None:
    """Run work that may end its process in a child; raises BundleError."""

    def serve(request: bytes) -> bytes:
        with suppress(OSError):
            os.close(2)  # Rust writes the message of a panic there
        try:
            work(request)
        except MemoryError:
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            return first_line(error).encode(errors="replace")
        return b""

    try:
        problem = BoundedChild(serve, SECONDS, MEMORY).call(request).decode()
    except LimitError as error:
        problem = f"trying it {error}"
    if problem:
        raise BundleError(
            f"{path} is damaged: {problem}", remedy="Copy or download it again.", code="tokenizer-damaged"
        )


def _read(content: bytes) -> None:
    Backend.from_str(content.decode())


def _use(backend: Backend) -> None:
    """Encode and decode trial texts; exceptions for single texts are ignored."""
    backend.no_truncation()
    backend.no_padding()
    rules = [
        part.__getstate__()
        for part in (backend.normalizer, backend.pre_tokenizer, backend.decoder)
        if part is not None
    ]
    for text in [*_SAMPLES, *(rule[:_LONGEST_PART].decode(errors="ignore") for rule in rules)]:
        with suppress(Exception):
            backend.decode(backend.encode(text).ids, skip_special_tokens=False)
    size = backend.get_vocab_size()
    with suppress(Exception):
        backend.decode(list(range(0, size, 1 + size // _MAX_TOKENS)))
