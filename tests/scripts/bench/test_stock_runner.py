"""The stock runner is measured on generations of exactly the requested tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from stock_runner import make_program, stock_runner

from tests.tiny_models import SHALLOW, save_model


@pytest.mark.whole
def test_the_runner_answers_one_round_at_a_time(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama", **SHALLOW["llama"])
    make_program(model, tmp_path / "llm", "8da4w", length=32)
    with stock_runner(tmp_path, prompt=20, new=10, threads=1) as runner:
        rounds = [runner.measure() for _ in range(2)]
        assert all(one.prefill_tokens_per_second > 0 < one.decode_tokens_per_second for one in rounds)
        assert 0 < runner.idle.anonymous_mb < runner.memory().anonymous_mb
