"""Adapters go where they contribute most within time and memory: costs, choices, and what is told of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prge.adapter import adapter_size
from prge.contract import Contract
from prge.costs import work_of
from prge.errors import ConfigError
from server_export.model.contributions import Contribution
from server_export.model.outline import outline_of
from server_export.model.places import CALL_ROWS, Limits, Places, every_place, find_places, make_question
from server_export.model.start import StartAdapter
from server_export.settings import ExportConfig
from tests.server_export.model.starts import start
from tests.tiny_models import LENGTH, VOCABULARY, WIDTH

RANK = 4
SHARES = tuple(0.5**place for place in range(1, 2 * RANK + 1))


@pytest.fixture(scope="module")
def usual() -> StartAdapter:
    """The adapter that an export has without a choice: queries and values of both blocks."""
    return start("llama", rank=RANK)


@pytest.fixture(scope="module")
def every(usual: StartAdapter) -> StartAdapter:
    config = ExportConfig(model="llama", out=Path("unused"), rank=RANK)
    return every_place(config, usual.loaded, False)


def call(adapter: StartAdapter) -> Contract:
    modules = outline_of(adapter, LENGTH).modules
    return Contract("exact", "logprobs", 1, CALL_ROWS, LENGTH, 1, WIDTH, VOCABULARY, (), modules)


def even(adapter: StartAdapter) -> dict[str, Contribution]:
    """The same contribution of every layer."""
    return {name: Contribution(1.0, SHARES) for name in adapter.lora_a}


def found(usual: StartAdapter, every: StartAdapter, gains: Any = None, **limits: Any) -> Places:
    everywhere = outline_of(usual, LENGTH)
    given = {"time": 1.0, "bytes": None, "numbers": adapter_size(everywhere.modules), **limits}
    return find_places(gains or even(every), every, everywhere, call(every), Limits(**given))


def test_all_linear_layers_of_the_blocks_may_be_chosen(every: StartAdapter) -> None:
    assert len(every.lora_a) == 14 and not any("lm_head" in name for name in every.lora_a)
    config = ExportConfig(model="opt", out=Path("unused"), rank=RANK)
    opt = every_place(config, start("opt", rank=RANK).loaded, False)
    # What OPT has before and after its blocks isn't adapted.
    assert not any("project_" in name for name in opt.lora_a)


def test_target_modules_bound_the_choice(usual: StartAdapter) -> None:
    config = ExportConfig(model="llama", out=Path("unused"), rank=RANK, target_modules=["down_proj"])
    chosen = every_place(config, usual.loaded, False)
    assert {name.rpartition(".")[2] for name in chosen.lora_a} == {"down_proj"}


@pytest.mark.parametrize("depth", [0, 1])
def test_costs_add_up_to_those_of_the_adapter_that_is_made(every: StartAdapter, depth: int) -> None:
    names = [name for name in every.lora_a if int(name.split(".")[2]) >= depth]
    limits, contract = Limits(1.0, None, 1), call(every)
    outlines = [outline_of(every, LENGTH), outline_of(every.only([n for n in names if ".1." in n]), LENGTH)]
    question = make_question(even(every), every, outlines, contract, limits, 1)
    taken = {
        number: next(place for place, option in enumerate(part.options) if option.level == RANK)
        for number, part in enumerate(question.parts)
        if part.name in names
    }
    time, size, numbers = question.costs(depth, taken)
    outline = outline_of(every.only(names), LENGTH)
    assert time == work_of(outline, contract).operations
    assert numbers == adapter_size(outline.modules)
    states = 4 * CALL_ROWS * LENGTH * WIDTH * (3 - depth)
    assert size == 16 * numbers + states


def test_numbers_go_where_they_contribute(usual: StartAdapter, every: StartAdapter) -> None:
    best = "model.layers.0.mlp.down_proj"
    gains = {name: Contribution(99.0 if name == best else 1.0, SHARES) for name in every.lora_a}
    places = found(usual, every, gains, time=1.5)
    assert places.ranks[best] == 2 * RANK == max(places.ranks.values())
    assert sum(rank == 2 * RANK for rank in places.ranks.values()) == 1
    assert places.numbers <= places.limits.numbers == adapter_size(outline_of(usual, LENGTH).modules)


def test_less_time_leaves_lower_blocks_out(usual: StartAdapter, every: StartAdapter) -> None:
    whole = found(usual, every)
    half = found(usual, every, time=0.75)
    assert whole.lowest == 0 and half.lowest == 1
    assert half.time <= 0.75 < whole.time <= 1.0
    assert all(".layers.1." in name for name in half.ranks)
    assert "from block 2 of 2 up" in half.why and "(limit 75%)" in half.why


def test_memory_bounds_states_and_numbers(usual: StartAdapter, every: StartAdapter) -> None:
    free = found(usual, every)
    bound = found(usual, every, bytes=free.bytes - 1)
    assert bound.bytes < free.bytes and bound.share < free.share


def test_a_layer_without_a_gradient_is_left_out(usual: StartAdapter, every: StartAdapter) -> None:
    gains = even(every)
    lost = next(iter(gains))
    places = found(usual, every, {**gains, lost: Contribution(0.0, SHARES)}, time=1.5, numbers=1 << 30)
    assert lost not in places.ranks and len(places.ranks) == len(gains) - 1


def test_ranks_are_half_to_twice_the_rank_and_no_more_than_the_directions(
    usual: StartAdapter, every: StartAdapter
) -> None:
    gains = {name: Contribution(1.0, SHARES[:RANK]) for name in every.lora_a}
    assert set(found(usual, every, gains, time=1.5, numbers=1 << 30).ranks.values()) == {RANK}
    assert set(found(usual, every, time=1.5, numbers=1 << 30).ranks.values()) == {2 * RANK}
    assert set(found(usual, every).ranks.values()) <= {RANK // 2, RANK, 2 * RANK}


def test_what_was_chosen_is_told_with_what_was_measured(usual: StartAdapter, every: StartAdapter) -> None:
    told = found(usual, every, time=0.75).to_json()
    assert told["limits"]["time"] == 0.75 and told["costs"]["time"] <= 0.75
    assert set(told["layers"]) == set(every.lora_a)
    chosen = {name: layer["rank"] for name, layer in told["layers"].items() if layer["rank"]}
    assert chosen and all(".layers.1." in name for name in chosen)


def test_too_little_time_or_memory_is_refused_with_the_least(
    usual: StartAdapter, every: StartAdapter
) -> None:
    with pytest.raises(ConfigError, match=r"the top block alone take \d+% of the time") as error:
        found(usual, every, time=0.1)
    assert "--adapt-time" in str(error.value)
    with pytest.raises(ConfigError, match="--adapt-memory 10 B"):
        found(usual, every, bytes=10)
    with pytest.raises(ConfigError, match="no layer gets a gradient"):
        found(usual, every, {name: Contribution(0.0, SHARES) for name in every.lora_a})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapt_layers": "auto"}, "init is random"),
        ({"init": "eva", "init_rows": Path("r"), "adapt_layers": "auto", "spread_ranks": True}, "chooses"),
        ({"adapt_time": 0.5}, "adapt_time is given, but adapt_layers is None"),
        ({"search": "evolutionary", "adapt_layers": "top:1"}, "search is given, but adapt_layers is top:1"),
        (
            {"init": "eva", "init_rows": Path("r"), "adapt_layers": "auto", "adapt_time": 1.5},
            "--adapt-time is 1.5",
        ),
    ],
)
def test_settings_that_contradict_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(ExportConfig(model="m", out=Path("o")), **changes)
