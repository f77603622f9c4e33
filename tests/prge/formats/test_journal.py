"""A journal survives a kill at any byte and never hides damage."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prge.errors import RunError
from prge.formats.journal import Journal, decode_array, encode_array
from prge.system.regular_files import open_regular
from tests.refusals import raises

RECORDS = [
    {"type": "start", "seed": 1},
    {"type": "evaluation", "step": 0, "value": 0.1 + 0.2},
    {"type": "step", "step": 0, "projected_gradients": [1 / 3, -1e-30], "loss": 0.7},
    {"type": "step", "step": 1, "projected_gradients": [5e300, 2.5], "loss": 0.6},
]


def _write(path: Path) -> bytes:
    journal = Journal(path)
    for record in RECORDS:
        journal.append(record)
    journal.close()
    return path.read_bytes()


def test_a_journal_reads_back_exactly(tmp_path: Path) -> None:
    _write(tmp_path / "journal.jsonl")
    journal = Journal(tmp_path / "journal.jsonl")
    assert journal.records == RECORDS
    assert journal.step(1) == RECORDS[3]
    assert journal.evaluation(0) == RECORDS[1]
    assert journal.step(2) is None
    assert journal.first("start") == RECORDS[0]


def test_a_journal_that_was_cut_at_any_byte_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = _write(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        journal = Journal(path)
        kept = len(journal.records)
        assert journal.records == RECORDS[:kept]
        assert kept >= whole[:length].count(b"\n")
        for record in RECORDS[kept:]:
            journal.append(record)
        journal.close()
        assert path.read_bytes() == whole


def test_damage_before_the_last_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = _write(path)
    end_of_third = [i for i, byte in enumerate(whole) if byte == ord("\n")][2]
    for position in range(0, end_of_third, 7):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with raises(RunError, "journal-damaged", containing=str(path)):
            Journal(path)


def _signed(content: str) -> bytes:
    """Return a line with a valid checksum, whatever its content is."""
    return f'{{"crc32":"{zlib.crc32(content.encode()):08x}","record":{content}}}\n'.encode()


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"type":"step","step":' + "9" * 5000 + "}",
        '{"type":"step","step":"0"}',
        '{"type":"step","step":true}',
        '{"type":["step"],"step":0}',
        '{"step":0}',
        '{"type":"step","step":0,"loss":NaN}',
        "3",
    ],
)
@pytest.mark.timeout(5)
def test_a_line_with_a_valid_checksum_that_is_no_record_is_damage(tmp_path: Path, content: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(_signed(content) + _write(tmp_path / "other.jsonl"))
    with raises(RunError, "journal-damaged", containing="line 1 of 5"):
        Journal(path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: Path(path).symlink_to(path.with_name("target"))])
def test_neither_a_pipe_nor_a_link_is_a_journal(tmp_path: Path, make: Callable[[Path], object]) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"kept")
    make(tmp_path / "journal.jsonl")
    for writable in (False, True):
        with raises(RunError, "write-failed", containing="journal.jsonl"):
            Journal(tmp_path / "journal.jsonl", writable)
    assert target.read_bytes() == b"kept"


def test_after_a_full_disk_a_journal_ends_with_its_last_complete_line(tmp_path: Path) -> None:
    """A limit on the file size accepts a part of a line; an earlier incomplete line is removed."""
    path = tmp_path / "journal.jsonl"
    whole = _write(path)
    path.write_bytes(whole[:-5])
    kept = whole[: whole[:-1].rindex(b"\n") + 1]
    code = (
        "import resource, signal, sys; from pathlib import Path; from prge.formats.journal import Journal\n"
        "from prge.errors import RunError\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "limit = int(sys.argv[2])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))\n"
        "try: journal.append({'type': 'step', 'step': 1, 'text': 'x' * 100})\n"
        "except RunError as error: print(error)\n"
        "journal.close()"
    )
    command = [sys.executable, "-c", code, str(path), str(len(kept) + 20)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "can't be written" in done.stdout
    assert path.read_bytes() == kept


def test_an_incomplete_line_that_cannot_be_removed_at_once_is_removed_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    _write(path)

    class Full:
        """A file that takes some bytes, and gives none of them back at first."""

        def __init__(self, stream: Any) -> None:
            self._stream, self.is_full, self.refuses = stream, False, False

        def write(self, content: memoryview) -> int:
            if self.is_full and len(content) <= 50:
                raise OSError(28, "No space left on device")
            return int(self._stream.write(content[:-50] if self.is_full else content))

        def truncate(self, length: int) -> None:
            if self.refuses:
                self.refuses = False
                raise OSError(5, "Input/output error")
            self._stream.truncate(length)

        def close(self) -> None:
            self._stream.close()

    streams: list[Full] = []

    def opened(*given: Any, **named: Any) -> Any:
        streams.append(Full(open_regular(*given, **named)))
        return streams[-1]

    monkeypatch.setattr("prge.formats.journal.open_regular", opened)
    with Journal(path) as journal:
        stream = streams[-1]
        stream.is_full = stream.refuses = True
        before = journal.records[:]
        with raises(RunError, "storage-full"):
            journal.append({"type": "step", "step": 7, "text": "x" * 100})
        stream.is_full = False
        journal.append({"type": "step", "step": 8})
    with Journal(path, writable=False) as journal:
        assert journal.records == [*before, {"type": "step", "step": 8}]


def test_reading_ignores_a_line_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = _write(path)
    path.write_bytes(whole[:-5])
    journal = Journal(path, writable=False)
    assert journal.records == RECORDS[:3]
    with pytest.raises(ValueError, match=re.escape(str(path))):
        journal.append(RECORDS[3])
    assert path.read_bytes() == whole[:-5]


def test_infinite_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        Journal(tmp_path / "journal.jsonl").append({"type": "step", "step": 0, "loss": float("nan")})


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_arrays_survive_exactly(values: list[float]) -> None:
    array = np.array(values, np.float32)
    assert decode_array(encode_array(array)).tobytes() == array.tobytes()


def test_gradients_are_removed_and_the_journal_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    gradient = encode_array(np.linspace(-1, 1, 1000, dtype=np.float32))
    journal = Journal(path)
    for step in range(3):
        journal.append({"type": "step", "step": step, "loss": 0.5, "gradient": gradient})
    length = path.stat().st_size
    journal.forget_gradients(2)
    assert path.stat().st_size < length / 2
    journal.forget_gradients(3)
    assert path.stat().st_size < length / 20
    journal.append({"type": "step", "step": 3, "loss": 0.5, "gradient": gradient})
    journal.close()
    records = Journal(path).records
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert ["gradient" in record for record in records] == [False, False, False, True]


def test_if_gradients_cannot_be_removed_the_journal_stays_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append({"type": "step", "step": 0, "gradient": "AAAA"})
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, raises(RunError, "storage-full"):
        patch.setattr(os, "replace", full)
        journal.forget_gradients(1)
    assert path.read_bytes() == before


def test_a_journal_that_got_no_record_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path):
        assert path.exists()
    assert not path.exists()
    path.write_bytes(b"")
    with Journal(path):
        pass
    assert path.read_bytes() == b""  # an empty file that existed before
    with Journal(tmp_path / "other.jsonl") as journal:
        journal.append({"type": "start"})
    assert (tmp_path / "other.jsonl").stat().st_size > 0
