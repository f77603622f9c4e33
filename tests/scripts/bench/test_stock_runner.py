"""The stock runner is measured on generations of exactly the requested tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from stock_runner import make_program, stock_runner

from tests.server_export.adapters import trained_adapter
from tests.tiny_models import SHALLOW, save_model


@pytest.mark.whole
def test_a_program_with_an_adapter_answers_one_round_at_a_time(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama", **SHALLOW["llama"])
    adapter = trained_adapter(model, tmp_path / "trained")
    make_program(model, tmp_path, 32, scheme="8da4w", adapter=adapter)
    with stock_runner(tmp_path, prompt=20, new=10, threads=1) as runner:
        rounds = [runner.measure() for _ in range(2)]
        assert all(one.prefill > 0 < one.decode for one in rounds)
        assert 0 < runner.idle.anonymous_mb < runner.memory().anonymous_mb
