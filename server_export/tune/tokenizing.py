"""What rows ask of a tokenizer: a chat template, and a token at the beginning of every text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prge.data.tokenization.tokenizer import Tokenizer
from prge.objectives.examples import Example
from prge.system.memory import memory_info
from prge.system.progress import Progress
from server_export.settings import PrependBos
from server_export.tune import decisions
from server_export.tune.decisions import Decision

if TYPE_CHECKING:
    from server_export.check.estimation import Estimate

# Rows that the frozen model reads, and tokens of each.
ROWS, _TOKENS = 32, 128
# Bytes that a loaded model takes for each of its parameters.
_BYTES = 6


@dataclass(frozen=True)
class ScoredRow:
    """Tokens of a row, and those of them that are learnt: where each is read, and its id."""

    tokens: tuple[int, ...]
    targets: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, example: Example) -> ScoredRow:
        """Of an example, what is right."""
        right = example.label or 0
        rows = [
            cls(
                sequence.tokens,
                tuple((each.position, each.token) for each in sequence.targets if each.candidate == right),
            )
            for sequence in example.sequences
        ]
        return max(rows, key=lambda row: len(row.targets))

    def window(self, most: int) -> ScoredRow:
        """So many tokens before the last target, or before those that lie so far behind the first one."""
        first, last = self.targets[0][0], self.targets[-1][0]
        end = min(last + 1, max(first + 1 + most // 2, most))
        start = max(end - most, 0)
        targets = tuple((place - start, token) for place, token in self.targets if start <= place < end)
        return ScoredRow(self.tokens[start:end], targets)

    def after(self, begin: Sequence[int]) -> ScoredRow:
        """The same after other tokens."""
        count = len(begin)
        return ScoredRow(
            (*begin, *self.tokens), tuple((place + count, token) for place, token in self.targets)
        )


@dataclass(frozen=True)
class Tokenizing:
    """The tokenizer of a model as its device has it.

    Args:
        model: folder or hub id.
        estimated: what is known of the model.
    """

    model: str
    estimated: Estimate

    def device_tokenizer(self, template: str | None, prepend_bos: PrependBos | None) -> Tokenizer:
        """With a chat template and settings of an export; None: its own. Raises PrgeError as an export."""
        from server_export.checkpoint.chat_templates import set_chat_template
        from server_export.checkpoint.tokenization import device_tokenizer

        tokenizer, begins = self._load(), prepend_bos or "auto"
        set_chat_template(tokenizer, template, begins)
        return device_tokenizer(tokenizer, begins, self.estimated.vocabulary_size)

    def has_template(self) -> bool:
        """Whether messages become text without further ado."""
        from server_export.checkpoint.tokenization import chat_template

        return chat_template(self._load()) is not None

    def decide_bos(
        self, template: str | None, examples: Callable[[Tokenizer], Sequence[Example]]
    ) -> Decision | None:
        """Whether every text begins with a token that the tokenizer has and doesn't put there.

        Args:
            template: that messages become text by.
            examples: some training rows with a tokenizer.

        Returns:
            None where there is nothing to decide.
        """
        from server_export.checkpoint.tokenization import adds_bos

        tokenizer = self._load()
        if self.estimated.readout == "pooled" or tokenizer.bos_token_id is None or adds_bos(tokenizer):
            return None
        without, begun = (
            [ScoredRow.of(each) for each in examples(self.device_tokenizer(template, begins))]
            for begins in ("auto", "always")
        )
        if without == begun:
            return None  # a chat template of its own says how texts begin
        available = memory_info().get("MemAvailable", math.inf)
        if _BYTES * self.estimated.outline.parameters > available:
            return Decision("prepend_bos", "auto", "the model is too large for this machine to measure it")
        name = tokenizer.bos_token
        print(
            f"reading {len(begun)} rows with the frozen model, with the token {name} before them and without",
            flush=True,
        )
        most = min(_TOKENS, (self.estimated.positions or _TOKENS + 1) - 1)
        rows = [row.window(most) for row in without if row.targets]
        return decisions.prepend_bos(name, *frozen_losses(self.model, rows, tokenizer.bos_token_id))

    def _load(self) -> Any:
        from server_export.checkpoint.tokenization import load_tokenizer

        return load_tokenizer(self.model)


def frozen_losses(model: str, rows: Sequence[ScoredRow], bos: int) -> tuple[float, float]:
    """Mean losses of the targets of rows by a model without adapter, and of the same after a token.

    Args:
        model: folder or hub id.
        rows: as they are.
        bos: the token.

    Raises:
        PrgeError: the model can't be loaded.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from server_export.checkpoint.loading import load_model
    from server_export.memory import release_freed_memory

    net: Any = load_model(model, pooled=False).model
    sums, count = [0.0, 0.0], 0
    with torch.inference_mode(), Progress(len(rows), unit="row", only_if_long=True) as progress:
        for number, row in enumerate(rows, 1):
            count += len(row.targets)
            for which, read in enumerate((row, row.after([bos]))):
                places, targets = torch.tensor(read.targets).T
                logits = net(input_ids=torch.tensor([read.tokens])).logits[0, places]
                sums[which] += float(cross_entropy(logits, targets, reduction="sum"))
            progress.update(number)
    del net
    release_freed_memory()
    return sums[0] / max(count, 1), sums[1] / max(count, 1)
