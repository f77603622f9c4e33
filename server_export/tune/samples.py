"""Format sampled completions of a run as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prge.errors import format_value
from prge.training.monitor import describe_changes, describe_prompt


def sample_lines(samples: Mapping[str, Any]) -> Iterator[str]:
    """Yield prompts with completions before and after training, and references if they are known.

    Args:
        samples: samples of a run's summary; empty if there are none.
    """
    for before, after in zip(samples.get("before", ()), samples.get("after", ()), strict=False):
        yield f"prompt  {describe_prompt(after['prompt'])}"
        yield f"  before  {format_value(before['text'])}"
        yield f"  after   {format_value(after['text'])}"
        if "right" in after:
            yield f"  right   {format_value(after['right'])}"
    texts = [[each["text"] for each in samples.get(time, ())] for time in ("before", "after")]
    if changes := describe_changes(*texts):
        yield changes
