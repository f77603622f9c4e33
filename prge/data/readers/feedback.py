"""Files of feedback on answers, with one JSON object per line, which only their owner may read.

    {"id": "cmpl-1f", "time": "...", "model": "first", "adapter": "9c1f...", "settings": {...},
     "prompt": "The soup was cold. It was", "answer": " great", "correction": " terrible"}

For an answer in a conversation, a row has `messages` instead of `prompt`; `rating`, good or bad, may replace
`correction`. Writers hold the file's lock. An incomplete last line, left by a killed process, is dropped.
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

from prge.errors import DataError, format_value
from prge.formats.adapter import Adapter
from prge.formats.documents import DocumentError, parse_json
from prge.system.atomic import check_file, storage_error, write_file
from prge.system.regular_files import open_regular, read_regular

# Column with the arguments of the chat template besides the messages, in feedback and in rows for training.
TEMPLATE_KWARGS = "chat_template_kwargs"
GOOD, BAD = RATINGS = ("good", "bad")
_OWNER_ONLY = 0o600
# How a row of `AnswerRecord.to_feedback` begins.
_ROW_START = b'{"id": "'
# Far above the size of a row, so that a long first line of another file is not read whole.
_LONGEST_LINE = 64 << 20
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class AnswerRecord:
    """An answer of a model, on which feedback can be given.

    Attributes:
        id: identifier of the answer.
        model: name of the model.
        adapter: digest of the adapter.
        prompt_fields: `prompt` or `messages`.
        answer: text of the answer.
        settings: settings of the sampling.
    """

    id: str
    model: str
    adapter: str
    prompt_fields: Fields
    answer: str
    settings: Fields

    def to_feedback(self, rating: str | None = None, correction: str | None = None) -> Fields:
        """Return the row of feedback with a rating or a correction.

        Raises:
            ValueError: both or neither is given, or the feedback is empty.
        """
        if (rating is None) == (correction is None):
            raise ValueError("give either a rating or a correction")
        if rating is not None and rating not in RATINGS:
            raise ValueError(f"rating is {format_value(rating)}, must be {' or '.join(RATINGS)}")
        if correction is not None and not correction.strip():
            raise ValueError("the correction is empty")
        if correction is not None and correction.strip() == self.answer.strip():
            raise ValueError("the correction equals the answer: rate it good instead")
        judgement = {"rating": rating} if correction is None else {"correction": correction}
        time = datetime.now(timezone.utc).isoformat(timespec="seconds")
        head = {"id": self.id, "time": time, "model": self.model, "adapter": self.adapter}
        return {**head, "settings": self.settings, **self.prompt_fields, "answer": self.answer, **judgement}


def adapter_digest(adapter: Adapter) -> str:
    """Return a digest that identifies an adapter in feedback."""
    digest = hashlib.sha256(adapter.values.tobytes())
    for name, matrix in sorted((adapter.lora_a or {}).items()):
        digest.update(name.encode() + matrix.tobytes())
    return digest.hexdigest()[:16]


def conversation_fields(messages: Sequence[Fields], variables: Fields) -> Fields:
    """Return the prompt fields of a conversation: messages and arguments of the chat template."""
    template_arguments = {TEMPLATE_KWARGS: dict(variables)} if variables else {}
    return {"messages": [*messages], **template_arguments}


def with_leading_space(correction: str, answer: str) -> str:
    """Prepend the leading space of an answer that continues its prompt to the correction."""
    space = answer[: len(answer) - len(answer.lstrip())]
    return correction if correction[:1].isspace() else space + correction


def is_feedback(fields: Fields) -> bool:
    """Return whether a row has the columns of feedback."""
    has_prompt = "prompt" in fields or "messages" in fields
    return has_prompt and "answer" in fields and ("rating" in fields or "correction" in fields)


def check_feedback(path: Path) -> None:
    """Check that feedback can be appended to a file, which may not exist yet; changes nothing.

    Raises:
        RunError: the file can't be written.
        DataError: the file holds other content than feedback.
    """
    check_file(path)
    try:
        if not os.path.lexists(path):
            os.stat(path.parent)  # raises if the folder is missing
            return
        with open_regular(path, "rb") as stream:
            for number, line in enumerate(iter(partial(stream.readline, _LONGEST_LINE), b""), 1):
                if line.strip() and not _starts_with_feedback(line):
                    what = f"{path} has other content than feedback in row {number}."
                    raise DataError(what, [], remedy="Give another file.", code="feedback-foreign")
                if line.strip():
                    return
    except OSError as error:
        raise storage_error(path, error) from None


def find_feedback_problem(row: Fields) -> str:
    """Return the problem of an untrusted row of feedback; empty if it is valid."""
    if not isinstance(row["answer"], str):
        return f"its answer is {format_value(row['answer'])}, must be a text"
    if "correction" in row and not (isinstance(row["correction"], str) and row["correction"].strip()):
        return f"its correction is {format_value(row['correction'])}, must be a text"
    if "correction" not in row and row["rating"] not in RATINGS:
        return f"its rating is {format_value(row['rating'])}, must be {' or '.join(RATINGS)}"
    messages = row.get("messages", [])
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        return "its messages must be a list, each with role and content"
    if not messages and not isinstance(row.get("prompt"), str):
        return f"its prompt is {format_value(row.get('prompt'))}, must be a text"
    return ""


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def append_feedback(
    path: Path, rows: Sequence[Fields], while_locked: Callable[[], object] | None = None
) -> None:
    """Append all rows or none, and remove an incomplete last line that a killed process left.

    Args:
        path: the file.
        rows: rows to append.
        while_locked: called repeatedly while another process holds the file's lock; it sleeps, or raises to
            end the wait. By default the call waits without a limit.

    Raises:
        RunError: the file can't be written; it is left unchanged.
    """
    try:
        with _locked(path, while_locked=while_locked) as stream:
            length = os.fstat(stream.fileno()).st_size
            lines = b"".join(map(_line, rows))
            if length and os.pread(stream.fileno(), 1, length - 1) != b"\n":
                content = os.pread(stream.fileno(), length, 0)
                complete = 0 if _is_incomplete_first(content) else len(whole_lines(content))
                if complete < length:
                    length = complete
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


def row_bytes(row: Fields) -> int:
    """Return the size of a row in a file, in bytes."""
    return len(_line(row))


def remove_rows(path: Path, is_removed: Callable[[int, Fields | None, str], bool]) -> int:
    """Remove rows from a file of lines, which is replaced atomically; return how many were removed.

    Only rows that are appended meanwhile are checked while the file is locked.

    Args:
        path: the file, which keeps its mode.
        is_removed: decides from a row's number, its fields (None if the line isn't a JSON object) and its
            line whether to remove it.

    Raises:
        RunError: the file can't be read or written.
    """
    try:
        rights = stat.S_IMODE(os.stat(path).st_mode)
        content, remaining = b"", list[bytes]()
        while True:
            # Only complete lines; the part after the last line break is checked below.
            complete = read_regular(path)
            complete = complete[: complete.rfind(b"\n") + 1]
            if not complete.startswith(content):
                content, remaining = b"", []
            remaining += _remaining_lines(
                complete[len(content) :].split(b"\n")[:-1], content.count(b"\n"), is_removed
            )
            content = complete
            with _locked(path, rights):
                now = whole_lines(read_regular(path))
                if not now.startswith(content):
                    continue
                count = content.count(b"\n")
                remaining += _remaining_lines(now[len(content) :].split(b"\n"), count, is_removed)
                removed = now.count(b"\n") + 1 - len(remaining)
                if removed:
                    write_file(path, b"\n".join(remaining), rights)
                return removed
    except OSError as error:
        raise storage_error(path, error) from None


def _remaining_lines(
    lines: Sequence[bytes], before: int, is_removed: Callable[[int, Fields | None, str], bool]
) -> list[bytes]:
    """Return the lines that are not removed; `before` lines precede them."""
    return [
        line
        for number, line in enumerate(lines, before + 1)
        if not line.strip() or not is_removed(number, _parse_object(line), line.decode(errors="replace"))
    ]


def read_lines(path: Path) -> Iterator[tuple[int, Fields | None, str]]:
    """Yield number, fields and line of each row of a file, as for `remove_rows`; raises OSError."""
    for number, line in enumerate(whole_lines(read_regular(path)).split(b"\n"), 1):
        if line.strip():
            yield number, _parse_object(line), line.decode(errors="replace")


def read_feedback(path: Path) -> list[Fields]:
    """Return the valid feedback of a file; empty if the file doesn't exist; raises OSError."""
    if not path.exists():
        return []
    rows = [fields for _, fields, _ in read_lines(path) if fields is not None and is_feedback(fields)]
    return [row for row in rows if not find_feedback_problem(row)]


def parse_feedback_line(line: bytes) -> Fields | None:
    """Parse a line of feedback; return None if it is invalid or something else."""
    fields = _parse_object(line)
    return (
        fields if fields is not None and is_feedback(fields) and not find_feedback_problem(fields) else None
    )


def feedback_key(row: Fields) -> str:
    """Return the key of a row of feedback: a hash of 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:32]


def whole_lines(content: bytes) -> bytes:
    """Remove an incomplete last line from the content of a file of feedback; other content is unchanged."""
    end = content.rfind(b"\n") + 1
    first = _parse_object(content.partition(b"\n")[0])
    if end == len(content) or first is None or not is_feedback(first):
        return content
    return content if _parse_object(content[end:]) is not None else content[:end]


def iter_texts(value: object) -> Iterator[str]:
    """Yield all texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from iter_texts(each)


@contextmanager
def _locked(
    path: Path, rights: int = _OWNER_ONLY, while_locked: Callable[[], object] | None = None
) -> Iterator[BinaryIO]:
    """Open a file for appending and lock it; a file that was replaced meanwhile is opened again."""
    while True:
        with open_regular(path, "a+b", buffering=0, rights=rights) as stream:
            _lock(stream, while_locked)
            status = os.stat(path, follow_symlinks=False) if path.exists() else None
            if status is not None and os.path.samestat(status, os.fstat(stream.fileno())):
                os.fchmod(stream.fileno(), rights)
                yield stream
                return


def _starts_with_feedback(line: bytes) -> bool:
    """Return whether the first line of a file is a row of feedback, or an incomplete first row."""
    fields = _parse_object(line)
    return _is_incomplete_first(line) if fields is None else is_feedback(fields)


def _is_incomplete_first(content: bytes) -> bool:
    """Return whether a file holds only the beginning of its first row of feedback."""
    begins = content[: len(_ROW_START)] == _ROW_START[: len(content)]
    return begins and b"\n" not in content and _parse_object(content) is None


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


def _parse_object(line: bytes) -> Fields | None:
    try:
        fields = parse_json(line)
    except (DocumentError, UnicodeDecodeError):
        return None
    return fields if isinstance(fields, dict) else None
