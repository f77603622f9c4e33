"""Benchmark configurations match what other projects published."""

from __future__ import annotations

from prge.training.trials import TRIALS
from server_export.checkpoint.random_models import CONFIGURATIONS, random_model_config


def test_every_shape_has_random_weights_and_a_small_variant() -> None:
    for trial in TRIALS.values():
        assert trial.shape in CONFIGURATIONS
        small = random_model_config(f"{trial.shape}:tiny", None)
        assert (small.num_hidden_layers, small.hidden_size) == (2, 64)


def test_configurations_are_those_that_were_published() -> None:
    """The figures are batch size, tokens and rank."""
    sizes = {name: (trial.batch, trial.tokens, trial.rank) for name, trial in TRIALS.items()}
    assert {sizes["smollm2-360m"][::2], sizes["qwen2-0.5b"][::2]} == {(4, 8)}
    assert sizes["qwen3-1.7b"][:2] == (1, 128) and TRIALS["qwen3-1.7b"].layers == "all-linear"
    for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"):
        assert sizes[name] == (1, 256, 16) and TRIALS[name].is_least
