"""A tiny model and made-up rows as a `Problem`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from prge.contract import AdaptedModule
from prge.learning.examples import Example, Slot, TokenSequence
from server_export.evidence.baselines.settings import BaselineSettings
from server_export.model.lora_fa import convert_conv1d
from tests.tiny_models import DECODERS, LENGTH, VOCABULARY, WIDTH, make_model


def method_settings(method: str, **changes: Any) -> BaselineSettings:
    """Settings of a method, with the defaults of its own ones."""
    return BaselineSettings(
        method=method, model="model", bundle=Path("bundle"), train=Path("train"), out=Path("out"), **changes
    )


class TinyProblem:
    """Say which of two tokens comes last; an encoder reads it off its first state."""

    modules: tuple[AdaptedModule, ...] = ()

    def __init__(self, architecture: str, examples: int = 8, seed: int = 0, batch_size: int = 4) -> None:
        self.model = make_model(architecture, seed)
        convert_conv1d(self.model)
        self.lora_a: dict[str, torch.Tensor] = {}
        self.lora_b: dict[str, torch.Tensor] = {}
        self.scales: dict[str, float] = defaultdict(lambda: 1.0)
        self.seed = seed
        self.batch_size = batch_size
        draw = torch.Generator().manual_seed(seed)
        self.readout = torch.randn(2, WIDTH, generator=draw) * WIDTH**-0.5
        self.decodes = architecture in DECODERS
        rows = torch.randint(4, VOCABULARY, (examples, LENGTH), generator=draw).tolist()
        self.train: Sequence[Example] = [
            Example(index + 1, (TokenSequence(tuple(row), (Slot(LENGTH - 1, 5, 1.0, 0),)),), 2, row[-2] % 2)
            for index, row in enumerate(rows)
        ]

    def hidden(self, examples: Sequence[Example]) -> torch.Tensor:
        tokens = torch.tensor([example.sequences[0].tokens for example in examples])
        output = self.model(input_ids=tokens)
        return output.logits if self.decodes else output.last_hidden_state

    def loss(self, examples: Sequence[Example]) -> torch.Tensor:
        hidden = self.hidden(examples)
        scores = hidden[:, -1, 5:7] if self.decodes else hidden[:, 0] @ self.readout.T
        return F.cross_entropy(scores, torch.tensor([example.label for example in examples]))

    def rows(self, examples: Sequence[Example]) -> int:
        return len(examples)
