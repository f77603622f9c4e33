"""Benchmark configurations: models, batches and adapters for which other projects published figures.

`prge android bench` measures them on a phone, scripts/bench/peers.py next to other trainers on one machine;
docs/phones.md lists the published figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prge.formats.signatures import BACKWARD, DECODE, FORWARD, PREFILL

QUERY_AND_VALUE = ("q_proj", "v_proj")
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Trial:
    """A benchmark of exact training steps, or of text generation."""

    shape: str
    """Name of the architecture, as in `prge export --model random:NAME`."""
    batch: int
    """Rows of a step."""
    tokens: int
    """Tokens of each row, all of which are trained on."""
    rank: int = 8
    layers: tuple[str, ...] | str = QUERY_AND_VALUE
    is_least: bool = False
    """Whether only the weights of one block are loaded at a time."""
    roles: tuple[str, ...] = (FORWARD, BACKWARD)
    written: int = 0
    """Number of tokens of the prompt, and of the generated text; 0: the benchmark measures training steps."""

    def text(self) -> str:
        """Describe the benchmark for a table."""
        if self.written:
            return f"{self.shape}, {self.written} tokens after {self.written}"
        layers = "all linear" if self.layers == ALL_LINEAR else "query and value"
        return f"{self.shape}, {self.batch} x {self.tokens}, rank {self.rank}, {layers}"


_WITH_GENERATION = (FORWARD, BACKWARD, PREFILL, DECODE)
TRIALS: Mapping[str, Trial] = {
    "smollm2-135m": Trial("smollm2-135m", 4, 64, roles=_WITH_GENERATION),
    "texts": Trial("smollm2-135m", 4, 64, roles=_WITH_GENERATION, written=128),
    # MobileTransformers, which publishes neither the layers nor the number of tokens.
    "smollm2-360m": Trial("smollm2-360m", 4, 128),
    "qwen2-0.5b": Trial("qwen2-0.5b", 4, 128),
    # MeBP and MeSP.
    "qwen2.5-0.5b": Trial("qwen2.5-0.5b", 1, 256, 16, is_least=True),
    "qwen2.5-1.5b": Trial("qwen2.5-1.5b", 1, 256, 16, is_least=True),
    "qwen2.5-3b": Trial("qwen2.5-3b", 1, 256, 16, is_least=True),
    # QVAC Fabric.
    "qwen3-1.7b": Trial("qwen3-1.7b", 1, 128, layers=ALL_LINEAR),
}
