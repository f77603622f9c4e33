"""A `tokenizer.json` from elsewhere is tried in a child process before this process uses it.

The library is strict about JSON, but a file may still make it panic, abort the process, or take memory and
time without end: a damaged table of normalization, rules that double a text again and again.
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
from prge.host.children import BoundedChild, LimitError

# Bounds of a trial; those of reading a file grow with it, see BoundedChild.
SECONDS = 10.0
MEMORY = 256 << 20
# Of each part of a tokenizer that is tried as a text, since it names what its rules act on.
_LONGEST_PART = 2000
_MOST_TOKENS = 4000
# What may abort the process while a file is read: a table of normalization, or an escape that may hide it;
# and so many added tokens that the library takes gigabytes for them.
_TABLE = re.compile(rb"Precompiled|\\u00[4-7]")
_ADDED, _MANY_ADDED = b"single_word", 10_000
_SAMPLES = (
    "a",
    " The film wasn't bad, it was\tgreat:\n\n 3.14 <s></s>",
    "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \u0441\u043b\u043e\u0432\u0430 \u0639\u0631\u0628\u064a "
    "\u0939\u093f \U0001f600\ufb01\u2581\x00",
    "a" * 1000,
)
_sound: set[bytes] = set()


def read_tokenizer(content: bytes, path: Path) -> Backend:
    """The tokenizer of a `tokenizer.json`; what was tried before in this process is not tried again.

    Args:
        content: of the file.
        path: names it in errors.

    Raises:
        BundleError: it can't be tried within the bounds.
        Exception: whatever the library raises of a file that it can't read; of a panic, a BaseException.
    """
    digest = hashlib.sha256(content).digest()
    if digest not in _sound and (_TABLE.search(content) or content.count(_ADDED) > _MANY_ADDED):
        _try(_read, content, path)
    backend = Backend.from_str(content.decode())
    if digest not in _sound:
        _try(lambda _: _used(backend), b"", path)
    _sound.add(digest)
    return backend


def _try(work: Callable[[bytes], object], request: bytes, path: Path) -> None:
    """Let a child do what may end its process; raises BundleError."""

    def tried(request: bytes) -> bytes:
        with suppress(OSError):
            os.close(2)  # where Rust writes why it panics
        try:
            work(request)
        except MemoryError:
            raise
        except BaseException as error:  # a panic of Rust's is no Exception
            return first_line(error).encode(errors="replace")
        return b""

    try:
        problem = BoundedChild(tried, SECONDS, MEMORY).ask(request).decode()
    except LimitError as error:
        problem = f"trying it {error}"
    if problem:
        raise BundleError(
            f"{path} is damaged: {problem}", remedy="copy or download it again", code="tokenizer-damaged"
        )


def _read(content: bytes) -> None:
    Backend.from_str(content.decode())


def _used(backend: Backend) -> None:
    """Encode and decode texts, some of which it may refuse."""
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
        backend.decode(list(range(0, size, 1 + size // _MOST_TOKENS)))
