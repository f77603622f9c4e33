"""What rows ask of a tokenizer: a chat template, and a token at the beginning of every text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prge.host.memory import memory_info
from prge.rows.tokenizer import Tokenizer
from server_export.settings import PrependBos
from server_export.tune import decisions
from server_export.tune.decisions import Decision

if TYPE_CHECKING:
    from server_export.check.estimation import Estimate

Sequences = Sequence[Sequence[int]]

# Rows that the frozen model reads, and tokens of each: at the beginning a token before it counts most.
ROWS, _TOKENS = 32, 128
# Bytes that a loaded model takes for each of its parameters.
_BYTES = 6


@dataclass(frozen=True)
class Tokenizing:
    """The tokenizer of a model as its device has it.

    Args:
        model: folder or hub id.
        estimated: what is known of the model.
    """

    model: str
    estimated: Estimate

    def on_device(self, template: str | None, prepend_bos: PrependBos | None) -> Tokenizer:
        """With a chat template and settings of an export; None: its own. Raises PrgeError as an export."""
        from server_export.model.chat_templates import give_template
        from server_export.model.tokenization import on_device

        tokenizer, begins = self._load(), prepend_bos or "auto"
        give_template(tokenizer, template, begins)
        return on_device(tokenizer, begins, self.estimated.vocabulary_size)

    def has_template(self) -> bool:
        """Whether messages become text without further ado."""
        from server_export.model.tokenization import chat_template

        return chat_template(self._load()) is not None

    def decide_bos(
        self, template: str | None, sequences: Callable[[Tokenizer], Sequences]
    ) -> Decision | None:
        """Whether every text begins with a token that the tokenizer has and doesn't put there.

        Args:
            template: that messages become text by.
            sequences: tokens of some training rows with a tokenizer.

        Returns:
            None where there is nothing to decide.
        """
        from server_export.model.tokenization import adds_bos

        tokenizer = self._load()
        if self.estimated.readout == "pooled" or tokenizer.bos_token_id is None or adds_bos(tokenizer):
            return None
        without, begun = (sequences(self.on_device(template, each)) for each in ("auto", "always"))
        if without == begun:
            return None  # a chat template of its own says how texts begin
        available = memory_info().get("MemAvailable", math.inf)
        if _BYTES * self.estimated.outline.parameters > available:
            return Decision("prepend_bos", "auto", "the model is too large for this machine to measure it")
        print(
            f"reading {len(begun)} rows with the frozen model, with a token before them and without",
            flush=True,
        )
        most = min(_TOKENS, (self.estimated.positions or _TOKENS + 1) - 1)
        return decisions.prepend_bos(*frozen_losses(self.model, without, begun, most))

    def _load(self) -> Any:
        from server_export.model.tokenization import load_tokenizer

        return load_tokenizer(self.model)


def frozen_losses(model: str, without: Sequences, begun: Sequences, most: int) -> tuple[float, float]:
    """Mean loss of a model without adapter on the same tokens of rows, the first one of each aside.

    Args:
        model: folder or hub id.
        without: rows.
        begun: the same rows, with a token more before each.
        most: tokens of a row.

    Returns:
        In the order of the arguments.

    Raises:
        PrgeError: the model can't be loaded.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from server_export.memory import give_back_freed
    from server_export.model.loading import load_model

    net: Any = load_model(model, pooled=False).model
    sums, count = [0.0, 0.0], 0
    with torch.inference_mode():
        for pair in zip(without, begun, strict=True):
            read = min(len(pair[0]), most)
            if read < 2:
                continue
            count += read - 1
            for which, row in enumerate(pair):
                tokens = torch.tensor([row[: len(row) - len(pair[0]) + read]])
                scores = net(input_ids=tokens).logits[0, -read:-1]
                sums[which] += float(cross_entropy(scores, tokens[0, 1 - read :], reduction="sum"))
    del net
    give_back_freed()
    return sums[0] / max(count, 1), sums[1] / max(count, 1)
