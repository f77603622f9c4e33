"""Flower's files within a folder of prge, and the environment that keeps Flower from contacting anyone else.

Flower is imported only for its logger, because it reads its environment on import.
"""

from __future__ import annotations

import logging
import os
from logging.handlers import RotatingFileHandler
from pathlib import Path

from prge.system.atomic import storage_error

NAME = "flower"
_MAX_LOG_BYTES = 4 << 20
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
# These make a SuperLink open more ports, or Flower use another account's permissions.
_UNWANTED = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API", "FLWR_OIDC_ENABLED")


def flower_home(folder: Path) -> Path:
    """Return Flower's folder within `folder`, accessible only to its owner; sets Flower's environment.

    Raises:
        RunError: the folder can't be created.
    """
    home = folder.absolute() / NAME
    private_folder(home)
    os.environ.update(_QUIET, FLWR_HOME=str(home))
    for name in _UNWANTED:
        os.environ.pop(name, None)
    return home


def private_folder(folder: Path) -> None:
    """Create a folder that only its owner may enter, if it does not exist; raises RunError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from None


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, replacing an older one; raises RunError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(content)
        os.replace(partial, path)
    except OSError as error:
        raise storage_error(path, error) from None


def log_to(path: Path) -> None:
    """Let Flower and its web server log to a file instead of the terminal."""
    from device_runner.fleet.network.flower import LOGGER

    handler = RotatingFileHandler(path, maxBytes=_MAX_LOG_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for logger in (LOGGER, logging.getLogger("uvicorn")):
        for old in logger.handlers[:]:
            logger.removeHandler(old)
            old.close()
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def last_lines(path: Path) -> list[str]:
    """Return the last lines of a log; empty if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-16:]
    except OSError:
        return []
