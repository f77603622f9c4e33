"""Feedback on answers: a file with a JSON object a line, which its owner alone may read.

    {"id": "cmpl-1f", "time": "...", "model": "first", "adapter": "9c1f...", "settings": {...},
     "prompt": "The soup was cold. It was", "answer": " great", "correction": " terrible"}

`messages` stand for `prompt` where a conversation was answered, and `rating`, good or bad, for `correction`.
Who writes holds the file's lock. A line is whole or it never was: a torn last one is dropped.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from prge.errors import DataError, shown
from prge.files.adapter import Adapter
from prge.files.documents import DocumentError, parse_json
from prge.host.atomic import check_file, storage_error, write_file
from prge.host.regular_files import open_regular, read_regular

# What the chat template was given beside messages; rows to learn from have it too.
TEMPLATE_KWARGS = "chat_template_kwargs"
GOOD, BAD = RATINGS = ("good", "bad")
_OWNERS = 0o600
# How a row begins that `Answered.judged` made.
_FIRST = b'{"id": "'
# Far above what a row may have, so that the first line of another file is never read whole.
_LONGEST_LINE = 64 << 20
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Answered:
    """An answer that feedback may be given on.

    `asked` has `prompt` or `messages`; `adapter` is the digest of the one that answered, `settings` are how
    tokens were drawn.
    """

    id: str
    model: str
    adapter: str
    asked: Fields
    answer: str
    settings: Fields

    def judged(self, rating: str | None = None, correction: str | None = None) -> Fields:
        """The row of what somebody says of it: a rating, or what should have been answered.

        Raises:
            ValueError: both or neither is given, or it says nothing.
        """
        if (rating is None) == (correction is None):
            raise ValueError("give a rating or a correction, one of them")
        if rating is not None and rating not in RATINGS:
            raise ValueError(f"rating is {shown(rating)}, must be {' or '.join(RATINGS)}")
        if correction is not None and not correction.strip():
            raise ValueError("the correction is empty: nothing can be learnt from it")
        if correction is not None and correction.strip() == self.answer.strip():
            raise ValueError("the correction is what was answered: rate it good instead")
        given = {"rating": rating} if correction is None else {"correction": correction}
        time = datetime.now(timezone.utc).isoformat(timespec="seconds")
        head = {"id": self.id, "time": time, "model": self.model, "adapter": self.adapter}
        return {**head, "settings": self.settings, **self.asked, "answer": self.answer, **given}


def adapter_digest(adapter: Adapter) -> str:
    """What tells adapters of one bundle apart in feedback."""
    digest = hashlib.sha256(adapter.values.tobytes())
    for name, matrix in sorted((adapter.lora_a or {}).items()):
        digest.update(name.encode() + matrix.tobytes())
    return digest.hexdigest()[:16]


def asked_messages(messages: Sequence[Fields], variables: Fields) -> Fields:
    """What was asked by messages, with what the chat template was given beside them."""
    given = {TEMPLATE_KWARGS: dict(variables)} if variables else {}
    return {"messages": [*messages], **given}


def spaced(correction: str, answer: str) -> str:
    """A correction of an answer that goes on in its prompt's text, with the space that the answer had."""
    space = answer[: len(answer) - len(answer.lstrip())]
    return correction if correction[:1].isspace() else space + correction


def is_feedback(fields: Fields) -> bool:
    """Whether a row of a file is feedback."""
    asked = "prompt" in fields or "messages" in fields
    return asked and "answer" in fields and ("rating" in fields or "correction" in fields)


def check_feedback(path: Path) -> None:
    """See that feedback can be appended to a file, which may not be there yet. Nothing changes.

    Raises:
        RunError: it can't be written.
        DataError: it holds something else.
    """
    check_file(path)
    try:
        if not os.path.lexists(path):
            os.stat(path.parent)  # which isn't made
            return
        with open_regular(path, "rb") as stream:
            for number, line in enumerate(iter(partial(stream.readline, _LONGEST_LINE), b""), 1):
                if line.strip() and not _begins_feedback(line):
                    what = f"{path} holds something else than feedback: row {number}"
                    raise DataError(what, [], remedy="give another file", code="feedback-foreign")
                if line.strip():
                    return
    except OSError as error:
        raise storage_error(path, error) from None


def problem_of(row: Fields) -> str:
    """What is wrong with a row of feedback, which anybody may have written; empty if nothing is."""
    if not isinstance(row["answer"], str):
        return f"its answer is {shown(row['answer'])}, must be a text"
    if "correction" in row and not (isinstance(row["correction"], str) and row["correction"].strip()):
        return f"its correction is {shown(row['correction'])}, must be a text"
    if "correction" not in row and row["rating"] not in RATINGS:
        return f"its rating is {shown(row['rating'])}, must be {' or '.join(RATINGS)}"
    messages = row.get("messages", [])
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        return "its messages must be a list, each with role and content"
    if not messages and not isinstance(row.get("prompt"), str):
        return f"its prompt is {shown(row.get('prompt'))}, must be a text"
    return ""


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def append_feedback(
    path: Path, rows: Sequence[Fields], while_locked: Callable[[], object] | None = None
) -> None:
    """Append rows, all or none; what a killed process left of its last row goes.

    Args:
        path: of the file.
        rows: to append.
        while_locked: called again and again while another process holds the file's lock; it sleeps, or raises
            what ends the wait. By default the call waits as long as it takes.

    Raises:
        RunError: the file can't be written; it stays as it was.
    """
    try:
        with _locked(path, while_locked=while_locked) as stream:
            length = os.fstat(stream.fileno()).st_size
            lines = b"".join(map(_line, rows))
            if length and os.pread(stream.fileno(), 1, length - 1) != b"\n":
                content = os.pread(stream.fileno(), length, 0)
                whole = 0 if _is_torn_first(content) else len(whole_lines(content))
                if whole < length:
                    length = whole
                    stream.truncate(length)
                else:
                    lines = b"\n" + lines
            try:
                rest = memoryview(lines)
                while rest:
                    rest = rest[stream.write(rest) :]
            except OSError:
                stream.truncate(length)
                raise
    except OSError as error:
        raise storage_error(path, error) from None


def size_of(row: Fields) -> int:
    """Bytes that a row takes in a file."""
    return len(_line(row))


def forget_rows(path: Path, is_meant: Callable[[int, Fields | None, str], bool]) -> int:
    """Take rows out of a file of lines, which is rewritten at once or not at all; how many they were.

    Rows are looked at before the file is locked, but for those that are appended meanwhile.

    Args:
        path: of the file, whose rights stay.
        is_meant: of a row's number, its fields (None where the line is no JSON object) and its line.

    Raises:
        RunError: the file can't be read or written.
    """
    try:
        rights = stat.S_IMODE(os.stat(path).st_mode)
        content, kept = b"", list[bytes]()
        while True:
            # All lines that are there and whole; the last part is empty, and stands for the rest.
            seen = read_regular(path)
            seen = seen[: seen.rfind(b"\n") + 1]
            if not seen.startswith(content):
                content, kept = b"", []
            kept += _kept(seen[len(content) :].split(b"\n")[:-1], content.count(b"\n"), is_meant)
            content = seen
            with _locked(path, rights):
                now = whole_lines(read_regular(path))
                if not now.startswith(content):
                    continue
                count = content.count(b"\n")
                kept += _kept(now[len(content) :].split(b"\n"), count, is_meant)
                removed = now.count(b"\n") + 1 - len(kept)
                if removed:
                    write_file(path, b"\n".join(kept), rights)
                return removed
    except OSError as error:
        raise storage_error(path, error) from None


def _kept(
    lines: Sequence[bytes], before: int, is_meant: Callable[[int, Fields | None, str], bool]
) -> list[bytes]:
    """Lines that aren't meant, after so many others."""
    return [
        line
        for number, line in enumerate(lines, before + 1)
        if not line.strip() or not is_meant(number, _parsed(line), line.decode(errors="replace"))
    ]


def read_lines(path: Path) -> Iterator[tuple[int, Fields | None, str]]:
    """Rows of a file of lines, as `forget_rows` tells of them; raises OSError."""
    for number, line in enumerate(whole_lines(read_regular(path)).split(b"\n"), 1):
        if line.strip():
            yield number, _parsed(line), line.decode(errors="replace")


def read_feedback(path: Path) -> list[Fields]:
    """All sound feedback of a file, none where there is no file; raises OSError."""
    if not path.exists():
        return []
    rows = [fields for _, fields, _ in read_lines(path) if fields is not None and is_feedback(fields)]
    return [row for row in rows if not problem_of(row)]


def row_of_line(line: bytes) -> Fields | None:
    """The feedback of a line; None where it is something else, or unsound."""
    fields = _parsed(line)
    return fields if fields is not None and is_feedback(fields) and not problem_of(fields) else None


def key_of(row: Fields) -> str:
    """The key of a feedback row: a hash of 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:32]


def whole_lines(content: bytes) -> bytes:
    """A file of feedback without a last line that was torn; any other file as it is."""
    end = content.rfind(b"\n") + 1
    first = _parsed(content.partition(b"\n")[0])
    if end == len(content) or first is None or not is_feedback(first):
        return content
    return content if _parsed(content[end:]) is not None else content[:end]


def texts_of(value: object) -> Iterator[str]:
    """All texts of a row."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from texts_of(each)


@contextmanager
def _locked(
    path: Path, rights: int = _OWNERS, while_locked: Callable[[], object] | None = None
) -> Iterator[BinaryIO]:
    """A file, open for appending and held alone; one that was replaced meanwhile is opened again."""
    while True:
        with open_regular(path, "a+b", buffering=0, rights=rights) as stream:
            _lock(stream, while_locked)
            there = os.stat(path, follow_symlinks=False) if path.exists() else None
            if there is not None and os.path.samestat(there, os.fstat(stream.fileno())):
                os.fchmod(stream.fileno(), rights)
                yield stream
                return


def _begins_feedback(line: bytes) -> bool:
    """Whether the first line of a file is a row of feedback, or what a killed process wrote of its first."""
    fields = _parsed(line)
    return _is_torn_first(line) if fields is None else is_feedback(fields)


def _is_torn_first(content: bytes) -> bool:
    """Whether a file holds no more than the beginning of its first row of feedback."""
    begins = content[: len(_FIRST)] == _FIRST[: len(content)]
    return begins and b"\n" not in content and _parsed(content) is None


def _line(row: Fields) -> bytes:
    return (json.dumps(dict(row), ensure_ascii=False) + "\n").encode()


def _lock(stream: BinaryIO, while_locked: Callable[[], object] | None) -> None:
    if while_locked is None:
        fcntl.flock(stream, fcntl.LOCK_EX)
        return
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            while_locked()


def _parsed(line: bytes) -> Fields | None:
    try:
        fields = parse_json(line)
    except (DocumentError, UnicodeDecodeError):
        return None
    return fields if isinstance(fields, dict) else None
