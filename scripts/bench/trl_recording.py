"""Losses and seconds of the steps of TRL's trainers, for trl_steps.py and trl_grpo_steps.py."""

from __future__ import annotations

import time
from typing import Any


def recording_trainer(trainer_class: type, losses: list[float]) -> type[Any]:
    """Return a class of trainers that append exact losses to `losses`; their log rounds them."""

    class RecordingTrainer(trainer_class):  # type: ignore[misc]
        """A trainer that records its losses."""

        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            """See transformers.Trainer."""
            loss = super().compute_loss(*arguments, **keywords)
            losses.append(float(loss.detach()))
            return loss

    return RecordingTrainer


def clock(times: list[float]) -> Any:
    """Return a callback of trainers that appends the seconds of each step to `times`."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Measures steps."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            """See transformers.TrainerCallback."""
            times.append(-time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """See transformers.TrainerCallback."""
            times[-1] += time.perf_counter()

    return Clock()
