"""Keeping what libraries say to their own developers out of the user's terminal."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

# torchao tells of kernels for other machines, torch of renamed functions inside torchao.
_LOGGERS = ("torchao", "torch.utils._pytree")


def quiet_libraries() -> None:
    """Silence progress bars and developers' warnings; call it before torchao is imported."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


@contextmanager
def quiet_engine() -> Iterator[None]:
    """Hold back what the engine writes to the error stream; shown only if the block fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(kept, 2)
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
