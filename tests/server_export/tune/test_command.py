"""The lines that a tuning prints at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server_export.tune.command import result_lines

RESULT: dict[str, Any] = {
    "score_before": {"loss": 2.0, "perplexity": 8.0, "examples": 4},
    "score_after": {"loss": 1.0, "perplexity": 3.0, "examples": 4},
    "scored_rows": "dev",
    "final_step": 3,
    "samples": None,
    "quantization": None,
    "peak_mb": None,
    "seconds": 5.0,
    "run_on_phone": None,
    "next": "prge chat tuned",
}


def printed(**changes: Any) -> str:
    return "\n".join(result_lines(Path("tuned"), RESULT | changes))


def test_the_end_shows_whether_sampled_completions_changed() -> None:
    def samples(*after: str) -> dict[str, Any]:
        prompts = ["one", "two"]
        return {
            "before": [{"prompt": prompt, "text": "a"} for prompt in prompts],
            "after": [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, after, strict=True)],
        }

    assert "training changed none of the 2 sampled answers" in printed(samples=samples("a", "a"))
    assert "1 of 2 sampled answers changed" in printed(samples=samples("a", "b"))
    assert "sampled answers" not in printed()


def test_the_end_shows_which_weights_the_adapter_was_trained_with() -> None:
    text = printed(quantization="8da4w")
    assert "trained and scored against weights in 8da4w" in text
    assert "prge publish tuned --format merged" in text
    assert "merged" not in printed()
