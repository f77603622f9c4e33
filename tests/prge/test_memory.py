"""Memory that ran out is recognised in what Python and the libraries say of it."""

from __future__ import annotations

import errno
import os

import pytest

from prge.memory import tells_no_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        ImportError("libgomp.so.1: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        "XNN Runtime creation failed with code: xnn_status_out_of_memory",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_memory_that_ran_out_is_recognised(error: BaseException | str) -> None:
    assert tells_no_memory(error)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("damaged"), ""]
)
def test_other_errors_are_not_taken_for_it(error: BaseException | str) -> None:
    assert not tells_no_memory(error)
