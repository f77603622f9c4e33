"""Shared tokenizers and fixtures of the tests of prge.data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from prge.data.tokenization.tokenizer import Tokenizer
from tests.prge.data.tiny_tokenizers import byte_level_backend, encoder_backend, prefixed_backend


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, pad_id=0, prepend_bos=True)


@pytest.fixture(scope="session")
def bare_tokenizer() -> Tokenizer:
    """Return a tokenizer without special tokens."""
    return Tokenizer(byte_level_backend())


@pytest.fixture(scope="session")
def prefixed_tokenizer() -> Tokenizer:
    return Tokenizer(prefixed_backend(), bos_id=1, eos_id=2, prepend_bos=True)


@pytest.fixture(scope="session")
def encoder_tokenizer() -> Tokenizer:
    return Tokenizer(encoder_backend(), pad_id=0)


@pytest.fixture()
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    def make(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make
