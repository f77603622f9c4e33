"""A configuration is refused by its cost and not by the names of its keys."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from server_export.checkpoint import config_bounds
from server_export.checkpoint.config_bounds import check_cost, config_problems
from server_export.checkpoint.loading import load_meta_model, load_model
from tests.refusals import refusal
from tests.tiny_models import make_config, save_model

# Maximum CPU time for a hostile configuration.
SECONDS = 30.0


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 10**11},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10**9}},
        {"max_position_embeddings": 10_485_760},
        {"bos_token_id": 1 << 25},
        {"image_token_index": 1 << 40},
        {"max_window_layers": 1 << 30},
        {"unheard_of": [{"seed": (1 << 63) - 1}]},
    ],
    ids=str,
)
def test_large_numbers_without_a_cost_are_accepted(change: dict[str, Any], tmp_path: Path) -> None:
    folder = save_model(tmp_path, "llama")
    content = {**json.loads((folder / "config.json").read_bytes()), **change}
    (folder / "config.json").write_text(json.dumps(content))
    assert config_problems(content) == []
    assert load_model(str(folder)).is_decoder


@pytest.mark.parametrize(
    "change",
    [
        {"num_labels": 1 << 20},
        {"num_labels": 10**8},
        {"num_hidden_layers": 10**9, "model_type": "qwen2"},
        {"model_type": "no-such-type", "anything": 10**9},
        {"model_type": None, "anything": 10**9},
    ],
    ids=str,
)
def test_costly_configurations_are_refused_with_their_largest_numbers(
    change: dict[str, Any],
) -> None:
    content = {**make_config("llama").to_dict(), **change}
    start = time.process_time()
    with refusal("config-out-of-bounds") as caught:
        check_cost(content, "config.json")
    assert time.process_time() - start < SECONDS
    (number,) = (f"{name} = {value}" for name, value in change.items() if isinstance(value, int))
    assert number in str(caught.value)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 1 << 19}, {"num_hidden_layers": 1 << 24}], ids=str)
def test_an_endless_number_of_modules_is_refused(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_bounds, "MAX_MODULES", 500)
    (tmp_path / "config.json").write_text(json.dumps({**make_config("llama").to_dict(), **change}))
    start = time.process_time()
    with refusal("config-out-of-bounds") as caught:
        load_meta_model(str(tmp_path))
    assert time.process_time() - start < SECONDS
    assert "more than 500 modules" in str(caught.value) or "num_hidden_layers" in str(caught.value)


def test_a_deep_model_is_accepted(tmp_path: Path) -> None:
    make_config("llama", num_hidden_layers=600).save_pretrained(tmp_path)
    assert load_meta_model(str(tmp_path)).config.num_hidden_layers == 600


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        ({"hidden_size": 1 << 40}, ("model-not-made", "weights-of-another-model")),
        ({"vocab_size": 1 << 40}, ("model-not-made", "weights-of-another-model")),
        ({"intermediate_size": 1 << 62}, ("model-not-made",)),
    ],
    ids=str,
)
def test_sizes_without_weights_are_refused_without_allocating_memory(
    change: dict[str, Any], codes: tuple[str, ...], tmp_path: Path
) -> None:
    folder = save_model(tmp_path, "llama")
    content = {**json.loads((folder / "config.json").read_bytes()), **change}
    (folder / "config.json").write_text(json.dumps(content))
    with refusal(*codes):
        load_model(str(folder))
