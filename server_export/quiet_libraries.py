"""Keep messages that libraries address to developers out of the user's terminal."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

# torchao logs about kernels for other machines, torch about renamed functions that torchao uses.
_LOGGERS = ("torchao", "torch.utils._pytree")


def quiet_libraries() -> None:
    """Silence progress bars and developer warnings; must be called before torchao is imported."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


@contextmanager
def quiet_engine() -> Iterator[None]:
    """Capture what the engine writes to the standard error; show it only if the context raises."""
    sys.stderr.flush()
    original_stderr = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(original_stderr, 2)
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(original_stderr, 2)
            os.close(original_stderr)
