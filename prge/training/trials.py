"""What is measured beside others: shapes, batches and adapters of figures that were published.

`prge android bench` takes them on a phone, scripts/bench/peers.py beside other trainers on one machine;
docs/phones.md says who published what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prge.formats.signatures import BACKWARD, DECODE, FORWARD, PREFILL

QUERY_AND_VALUE = ("q_proj", "v_proj")
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Trial:
    """Exact steps of a model, or texts by it."""

    shape: str
    """The architecture's name, as `prge export --model random:NAME` has it."""
    batch: int
    tokens: int
    """Of each training row, all of them learnt."""
    rank: int = 8
    layers: tuple[str, ...] | str = QUERY_AND_VALUE
    is_least: bool = False
    """The weights of one block alone are loaded at a time."""
    roles: tuple[str, ...] = (FORWARD, BACKWARD)
    written: int = 0
    """Tokens of a text after a prompt of as many; 0: it takes steps."""

    def text(self) -> str:
        """In words of a table."""
        if self.written:
            return f"{self.shape}, {self.written} tokens after {self.written}"
        layers = "all linear" if self.layers == ALL_LINEAR else "query and value"
        return f"{self.shape}, {self.batch} x {self.tokens}, rank {self.rank}, {layers}"


_WRITES = (FORWARD, BACKWARD, PREFILL, DECODE)
TRIALS: Mapping[str, Trial] = {
    "smollm2-135m": Trial("smollm2-135m", 4, 64, roles=_WRITES),
    "texts": Trial("smollm2-135m", 4, 64, roles=_WRITES, written=128),
    # MobileTransformers, which tells neither layers nor tokens.
    "smollm2-360m": Trial("smollm2-360m", 4, 128),
    "qwen2-0.5b": Trial("qwen2-0.5b", 4, 128),
    # MeBP and MeSP.
    "qwen2.5-0.5b": Trial("qwen2.5-0.5b", 1, 256, 16, is_least=True),
    "qwen2.5-1.5b": Trial("qwen2.5-1.5b", 1, 256, 16, is_least=True),
    "qwen2.5-3b": Trial("qwen2.5-3b", 1, 256, 16, is_least=True),
    # QVAC Fabric.
    "qwen3-1.7b": Trial("qwen3-1.7b", 1, 128, layers=ALL_LINEAR),
}
