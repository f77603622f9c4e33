"""Bounds of numeric settings: one table for all verbs, by the setting's name.

The bounds are far beyond any practical use. Values outside would overflow, run out of memory, or never end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prge.errors import format_value


@dataclass(frozen=True)
class Range:
    """A range of numbers from `minimum` to `maximum`; ends listed in `open` are excluded."""

    minimum: float
    maximum: float
    open: tuple[float, ...] = ()

    def problem(self, value: float) -> str:
        """Return the requirement that a number violates, such as `must be at least 1`; empty if none."""
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        if value < self.minimum or (value == self.minimum and self.minimum in self.open):
            return f"must be {'more than' if self.minimum in self.open else 'at least'} {self.minimum}"
        if value > self.maximum or (value == self.maximum and self.maximum in self.open):
            return f"must be {'less than' if self.maximum in self.open else 'at most'} {self.maximum}"
        return ""


_LARGEST_FLOAT32 = 3.4e38
_SEED = Range(0, 2**64 - 1)
_COUNT = Range(1, 10**9)
_COUNT_OR_NONE = Range(0, 10**9)
_PASSES = Range(1, 10_000)
_SIZE = Range(1, 1 << 20)
_BYTES = Range(0, 2**63 - 1)
_POSITIVE = Range(0, _LARGEST_FLOAT32, open=(0,))
_POSITIVE_OR_NONE = Range(0, _LARGEST_FLOAT32)
_SHARE = Range(0, 1, open=(0,))
_DECAY = Range(0, 1, open=(1,))

BOUNDS: Mapping[str, Range] = {
    **dict.fromkeys(("seed", "seeds", "shuffle_seed"), _SEED),
    **dict.fromkeys(("epochs", "minutes"), Range(0, 1e6, open=(0,))),
    **dict.fromkeys(
        ("steps", "limit", "train_limit", "dev_limit", "test_limit", "head_limit", "most_rows", "row"), _COUNT
    ),
    **dict.fromkeys(("step", "start", "train_start", "dev_start", "test_start"), _COUNT_OR_NONE),
    **dict.fromkeys(
        ("warmup_steps", "eval_steps", "eval_at", "save_steps", "sample_every", "patience"),
        _COUNT_OR_NONE,
    ),
    "weight_decay": Range(0, 1000),
    **dict.fromkeys(("batches", "search_trials", "threads"), _PASSES),
    **dict.fromkeys(("head_folds", "lines", "sample_rows"), Range(0, 10_000)),
    **dict.fromkeys(("rank", "queries", "tokens"), _SIZE),
    **dict.fromkeys(("batch_size", "sequence_length", "context", "init_tokens", "calibration_tokens"), _SIZE),
    **dict.fromkeys(("trunk_cache_bytes", "memory", "feedback_limit"), _BYTES),
    **dict.fromkeys(("lengths", "ranks", "samples", "guesses", "matching_steps"), _SIZE),
    "weight_bits": Range(4, 8),
    "top_share": _SHARE,
    "max_dropped": Range(0, 1),
    "replay": Range(0, 1, open=(1,)),
    "learn_every": Range(3, 10**6),
    "learn_epochs": Range(0, 1e6, open=(0,)),
    "may_lose": _POSITIVE_OR_NONE,
    **dict.fromkeys(("max_tokens", "queue", "slots"), _SIZE),
    **dict.fromkeys(("max_completion_length", "num_iterations"), _SIZE),
    "num_generations": Range(2, 1 << 20),
    "clip_range": Range(0, 1, open=(0, 1)),
    "temperature": Range(0, 100),
    "top_k": _COUNT_OR_NONE,
    "top_p": _SHARE,
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0.001, 1000),
    **dict.fromkeys(("learning_rate", "learning_rates", "loraplus_lr_ratio"), _POSITIVE),
    **dict.fromkeys(("epsilon", "lora_alpha", "divergence_ratio"), _POSITIVE),
    **dict.fromkeys(("head_learning_rate", "max_grad_norm", "max_example_grad_norm"), _POSITIVE_OR_NONE),
    **dict.fromkeys(("momentum", "adam_beta2"), _DECAY),
    "beta": Range(0, 1e4, open=(0,)),
    "gamma": Range(0, 1e4),
    "label_smoothing": Range(0, 0.5, open=(0.5,)),
    **dict.fromkeys(("retention", "memory_share", "target_share"), _SHARE),
    "budget_value": Range(0, 1e15, open=(0,)),
    "evaluation_growth": Range(1.01, 1e6),
    "target": Range(-_LARGEST_FLOAT32, _LARGEST_FLOAT32),
    **dict.fromkeys(("pause_above_celsius", "start_below_celsius"), Range(-273, 1000)),
    "cool_minutes": Range(0, 1e6),
    "pause_below_battery": Range(0, 100),
    "seconds": Range(0, 1e6),
    **dict.fromkeys(("rounds", "local_steps", "examples", "devices", "per_round"), Range(1, 1_000_000)),
    **dict.fromkeys(("noise", "most_privacy_epsilon"), _POSITIVE_OR_NONE),
    **dict.fromkeys(("delta", "most_delta"), Range(0, 1, open=(0, 1))),
    "outlier": Range(1, _LARGEST_FLOAT32),
    **dict.fromkeys(("port", "computer_port"), Range(0, 65535)),
}


def bound_problems(settings: Any) -> list[str]:
    """Return a line for every number of a settings object that is out of bounds."""
    return [
        f"{flag(item.name)} is {format_value(value)}, {problem}"
        for item in dataclasses.fields(settings)
        for value in _numbers(getattr(settings, item.name))
        if (problem := BOUNDS[item.name].problem(value) if item.name in BOUNDS else "")
    ]


def flag(name: str) -> str:
    """Return a setting's flag on the command line."""
    return f"--{name.replace('_', '-')}"


def _numbers(value: Any) -> Iterable[float]:
    values = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, (Mapping, list, tuple)):
        values = (value,)
    return [each for each in values if isinstance(each, (int, float)) and not isinstance(each, bool)]
