"""Lowered block types and exported chains, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.workshop import FolderBuilder

if TYPE_CHECKING:
    from tests.device_runner.engines.blocks import LoweredBlocks


@pytest.fixture(scope="session")
def make_blocks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], LoweredBlocks]:
    """Return blocks by scheme and whether shapes are dynamic, lowered on first use."""

    @lru_cache
    def block_types(scheme: str) -> dict[bool, LoweredBlocks]:
        from tests.device_runner.engines.blocks import make_block_types

        return make_block_types(tmp_path_factory.mktemp(scheme), scheme)

    return lambda scheme, dynamic: block_types(scheme)[dynamic]


@pytest.fixture(scope="session")
def make_chain(made_once: FolderBuilder) -> Callable[[str], Path]:
    """Return the folder of an exported chain by architecture, exported on first use.

    The name is such as `llama`, or `llama lora` if both matrices are trained.
    """

    def make(name: str) -> Path:
        from tests.device_runner.engines.chains import POSITIONS, export_chain

        architecture, _, adapter = name.partition(" ")
        settings = {"adapter": adapter or "lora-fa", "positions": POSITIONS}
        return made_once(name, lambda folder: export_chain(folder, architecture, **settings))

    return make
