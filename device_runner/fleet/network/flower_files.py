"""Flower's files within a folder of ours, and what keeps Flower from talking to anyone but the fleet.

It imports Flower only to let it log: Flower reads its environment when it is imported.
"""

from __future__ import annotations

import logging
import os
from logging.handlers import RotatingFileHandler
from pathlib import Path

from prge.system.atomic import storage_error

NAME = "flower"
_MOST_LOG_BYTES = 4 << 20
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
# What makes a SuperLink open further ports, and Flower take another account's rights.
_UNWANTED = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API", "FLWR_OIDC_ENABLED")


def flower_home(folder: Path) -> Path:
    """The folder within `folder` that is Flower's, for its owner alone; sets the environment to it.

    Raises:
        RunError: it can't be made.
    """
    home = folder.absolute() / NAME
    private_folder(home)
    os.environ.update(_QUIET, FLWR_HOME=str(home))
    for name in _UNWANTED:
        os.environ.pop(name, None)
    return home


def private_folder(folder: Path) -> None:
    """Make a folder that its owner alone may enter, where there is none; raises RunError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from None


def write_private(path: Path, content: bytes) -> None:
    """Write a file that its owner alone may read, over an older one; raises RunError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(content)
        os.replace(partial, path)
    except OSError as error:
        raise storage_error(path, error) from None


def log_to(path: Path) -> None:
    """Let Flower and its web server write what they log to a file instead of the terminal."""
    from device_runner.fleet.network.flower import LOGGER

    handler = RotatingFileHandler(path, maxBytes=_MOST_LOG_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for logger in (LOGGER, logging.getLogger("uvicorn")):
        for old in logger.handlers[:]:
            logger.removeHandler(old)
            old.close()
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def last_lines(path: Path) -> list[str]:
    """The end of a log; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-16:]
    except OSError:
        return []
