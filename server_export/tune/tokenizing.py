"""Choose a tokenizer's chat template, and whether every text begins with the begin-of-sequence token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prge.data.tokenization.tokenizer import Tokenizer
from prge.objectives.examples import Example, without_branches
from prge.system.memory import memory_info
from prge.system.progress import Progress
from server_export.settings import PrependBos
from server_export.tune import decisions
from server_export.tune.decisions import Decision

if TYPE_CHECKING:
    from server_export.check.estimation import Estimate

# Number of rows that the frozen model reads, and maximum number of tokens of each.
ROWS, _TOKENS = 32, 128
# Bytes of memory for each parameter of a loaded model.
_BYTES = 6


@dataclass(frozen=True)
class ScoredRow:
    """The tokens of a row and its targets.

    Attributes:
        tokens: ids of the tokens.
        targets: position whose logits predict the target, and id of the target.
    """

    tokens: tuple[int, ...]
    targets: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, example: Example) -> ScoredRow:
        """Return the sequence of an example with the most targets of its correct candidate."""
        right = example.label or 0
        rows = [
            cls(
                sequence.tokens,
                tuple((each.position, each.token) for each in sequence.targets if each.candidate == right),
            )
            for sequence in without_branches(example).sequences
        ]
        return max(rows, key=lambda row: len(row.targets))

    def window(self, length: int) -> ScoredRow:
        """Return at most `length` tokens of the row, with context before its targets."""
        first, last = self.targets[0][0], self.targets[-1][0]
        end = min(last + 1, max(first + 1 + length // 2, length))
        start = max(end - length, 0)
        targets = tuple(
            (position - start, token) for position, token in self.targets if start <= position < end
        )
        return ScoredRow(self.tokens[start:end], targets)

    def after(self, begin: Sequence[int]) -> ScoredRow:
        """Return the row with additional tokens at its beginning."""
        count = len(begin)
        return ScoredRow(
            (*begin, *self.tokens), tuple((position + count, token) for position, token in self.targets)
        )


@dataclass(frozen=True)
class Tokenizing:
    """The tokenizer of a model, as a bundle would have it.

    Args:
        model: folder or hub id of the model.
        estimated: estimate of the model's bundle.
    """

    model: str
    estimated: Estimate

    def device_tokenizer(self, template: str | None, prepend_bos: PrependBos | None) -> Tokenizer:
        """Return the device's tokenizer for settings of an export; raises PrgeError like an export.

        Args:
            template: chat template; None: the tokenizer's own.
            prepend_bos: whether texts begin with the begin-of-sequence token; None: auto.
        """
        from server_export.checkpoint.chat_templates import set_chat_template
        from server_export.checkpoint.tokenization import device_tokenizer

        tokenizer, begins = self._load(), prepend_bos or "auto"
        set_chat_template(tokenizer, template, begins)
        return device_tokenizer(tokenizer, begins, self.estimated.vocabulary_size)

    def has_template(self) -> bool:
        """Return whether the tokenizer has a chat template of its own."""
        from server_export.checkpoint.tokenization import chat_template

        return chat_template(self._load()) is not None

    def decide_bos(
        self, template: str | None, examples: Callable[[Tokenizer], Sequence[Example]]
    ) -> Decision | None:
        """Decide whether every text begins with the begin-of-sequence token, if the tokenizer doesn't add it.

        Args:
            template: chat template.
            examples: returns examples of some training rows for a tokenizer.

        Returns:
            The decision; None if there is nothing to decide.
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
            return None  # the chat template determines how texts begin
        available = memory_info().get("MemAvailable", math.inf)
        if _BYTES * self.estimated.outline.parameters > available:
            return Decision("prepend_bos", "auto", "the model is too large for this machine to measure it")
        name = tokenizer.bos_token
        print(
            f"reading {len(begun)} rows with the frozen model, with the token {name} before them and without",
            flush=True,
        )
        length = min(_TOKENS, (self.estimated.positions or _TOKENS + 1) - 1)
        rows = [row.window(length) for row in without if row.targets]
        return decisions.prepend_bos(name, *frozen_losses(self.model, rows, tokenizer.bos_token_id))

    def _load(self) -> Any:
        from server_export.checkpoint.tokenization import load_tokenizer

        return load_tokenizer(self.model)


def frozen_losses(model: str, rows: Sequence[ScoredRow], bos: int) -> tuple[float, float]:
    """Return mean losses of target tokens by a model without adapter, without and with a begin token.

    Args:
        model: folder or hub id of the model.
        rows: the rows.
        bos: id of the token.

    Raises:
        PrgeError: the model can't be loaded.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from prge.system.memory import release_freed_memory
    from server_export.checkpoint.loading import load_model

    net: Any = load_model(model, pooled=False).model
    sums, count = [0.0, 0.0], 0
    with torch.inference_mode(), Progress(len(rows), unit="row", only_if_long=True) as progress:
        for number, row in enumerate(rows, 1):
            count += len(row.targets)
            for index, variant in enumerate((row, row.after([bos]))):
                positions, targets = torch.tensor(variant.targets).T
                logits = net(input_ids=torch.tensor([variant.tokens])).logits[0, positions]
                sums[index] += float(cross_entropy(logits, targets, reduction="sum"))
            progress.update(number)
    del net
    release_freed_memory()
    return sums[0] / max(count, 1), sums[1] / max(count, 1)
