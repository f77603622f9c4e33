"""The chain of a manifest is read completely, or refused with a message before anything is loaded."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prge.errors import BundleError
from prge.formats.bundle import open_bundle
from prge.formats.chain import Bounds, Chain
from prge.formats.signatures import (
    BACKWARD,
    BACKWARD_SAVED,
    FORWARD,
    FORWARD_SAVE,
    JVP,
    RESIDUAL_ROLES,
    STEP_ROLES,
)
from prge.model_spec import LARGEST_SIZE
from tests.bundles import make_bundle, make_chain
from tests.refusals import raises

Json = Any
Change = Callable[[Json], object]


def block_of(**changes: Any) -> Json:
    """Return the `chain` block of a manifest; one of its methods has specs."""
    block = json.loads(json.dumps(make_chain(**changes).to_json()))
    method = block["programs"][0]["methods"][FORWARD]
    method["input_specs"] = ["int64 [8, 4, 16]"]
    method["output_specs"] = ["float32 [32, 16, 8]"]
    return block


def test_a_chain_is_read_as_it_was_written() -> None:
    for readout in ("logprobs", "pooled"):
        chain = make_chain(readout=readout)
        assert Chain.from_json(json.loads(json.dumps(chain.to_json()))) == chain


def test_a_bundle_with_label_words_is_refused_with_a_remedy() -> None:
    with raises(BundleError, "bundle-of-label-words", containing="--label-words"):
        Chain.from_json({**block_of(), "readout": "verbalizer", "label_tokens": [3, 5]})


def positions(value: Json, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to all values of a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from positions(inner, (*path, key))


def at(value: Json, path: tuple[Any, ...]) -> Json:
    for key in path:
        value = value[key]
    return value


PATHS = [*positions(block_of())]
MAY_BE_NULL = "window"
# Rows of earlier bundles are whole, their blocks share no values, none is an expert; methods have no specs.
MAY_LACK = ("chunk", "shared", "shared_in", "past", "experts", "input_specs", "output_specs")


def test_every_input_and_output_of_a_method_has_a_spec_or_none_has() -> None:
    method = Chain.from_json(block_of()).programs[0].methods[FORWARD]
    assert method.has_specs and method.sizes("tokens") == (8, 4, 16) and method.sizes("hidden_states") == ()
    assert method.sizes("hidden_states", is_output=True) == (32, 16, 8)
    old = Chain.from_json(json.loads(json.dumps(make_chain().to_json()))).programs[0].methods[FORWARD]
    assert not old.has_specs and old.sizes("tokens") == ()
    for lacking in ("input_specs", "output_specs"):
        block = block_of()
        del block["programs"][0]["methods"][FORWARD][lacking]
        with raises(BundleError, "chain-not-runnable", containing=f"{lacking[:-6]}s of block 0"):
            Chain.from_json(block)


@pytest.mark.parametrize(
    "spec", ["", "float32", "float32 [8, 4", "float32 [-1]", "float32 [1.5]", "[8]", "float32 [1234567890]"]
)
def test_an_invalid_spec_is_refused(spec: str) -> None:
    block = block_of()
    block["programs"][0]["methods"][FORWARD]["input_specs"] = [spec]
    with raises(BundleError, "chain-unreadable", containing="input_specs"):
        Chain.from_json(block)


@pytest.mark.parametrize("sizes", [[0], [LARGEST_SIZE + 1], [1] * 9])
def test_a_spec_with_sizes_out_of_bounds_is_refused(sizes: list[int]) -> None:
    block = block_of()
    block["programs"][0]["methods"][FORWARD]["input_specs"] = [f"int64 {sizes}"]
    with raises(BundleError, "chain-not-runnable", containing="block 0"):
        Chain.from_json(block)


def test_a_bundle_without_chunks_has_whole_rows() -> None:
    block = block_of()
    del block["bounds"]["chunk"]
    bounds = Chain.from_json(block).bounds
    assert bounds.chunk == bounds.tokens and not bounds.has_chunks


@given(st.integers(2, 3000), st.sampled_from([0, 8, 32]))
def test_chunks_follow_each_other_and_none_has_one_token_alone(length: int, heads: int) -> None:
    bounds = Bounds(tokens=4096, chunk=256)
    cuts = [*bounds.chunks(length, heads)]
    assert [cut.start for cut in cuts] == [0, *(cut.stop for cut in cuts[:-1])] and cuts[-1].stop == length
    sizes = [cut.stop - cut.start for cut in cuts]
    assert all(2 <= size <= 256 for size in sizes)
    # Scores of all heads take 8 MB at most, except where chunks would have too few tokens.
    assert all(
        heads * size * cut.stop <= 1 << 21 or size <= 64 for cut, size in zip(cuts, sizes, strict=True)
    )


@pytest.mark.parametrize(
    "path", [p for p in PATHS if isinstance(p[-1], str) and p[-1] not in MAY_LACK], ids=str
)
def test_a_field_that_is_missing_is_named(path: tuple[Any, ...]) -> None:
    block = block_of()
    del at(block, path[:-1])[path[-1]]
    if path[-1] in (MAY_BE_NULL, "trains_a", JVP, BACKWARD, BACKWARD_SAVED):
        Chain.from_json(block)  # as bundles of an earlier version, or with a role less
        return
    # Without the forward pass that saves residuals, the backward pass that reads them is refused.
    named = BACKWARD_SAVED if path[-1] == FORWARD_SAVE else path[-1]
    with raises(BundleError, "chain-unreadable", "chain-not-runnable", containing=named):
        Chain.from_json(block)


OTHERS = [None, True, 1.5, -1, 10**5000, math.inf, math.nan, "", "x" * 10**6, [], [[]], {}, {"a": [1]}]


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_a_value_of_another_type_is_refused(path: tuple[Any, ...]) -> None:
    before = at(block_of(), path)
    for value in OTHERS:
        if type(value) is type(before) or (path[-1] == MAY_BE_NULL and type(value) in (int, type(None))):
            continue
        block = block_of()
        at(block, path[:-1])[path[-1]] = value
        with raises(BundleError, "chain-unreadable", "chain-not-runnable") as refused:
            Chain.from_json(block)
        assert len(str(refused.value)) < 3000 and refused.value.remedy


@pytest.mark.parametrize("path", [path for path in PATHS if type(at(block_of(), path)) is int], ids=str)
def test_sizes_out_of_bounds_are_refused_without_allocating_memory(path: tuple[Any, ...]) -> None:
    for value in (-1, -(10**30), 10**30, 10**5000):
        block = block_of()
        at(block, path[:-1])[path[-1]] = value
        if path[-1] == MAY_BE_NULL and value > 0:
            Chain.from_json(block)  # a window longer than any row
            continue
        with raises(BundleError, "chain-not-runnable"):
            Chain.from_json(block)


@pytest.mark.parametrize("value", [None, [], [1], "chain", 7, {}, {"blocks": []}])
def test_values_that_are_not_a_chain_are_refused(value: Json) -> None:
    with raises(BundleError, "chain-unreadable"):
        Chain.from_json(value)


@settings(deadline=2000, max_examples=300)
@given(st.data())
def test_a_mutated_chain_is_read_or_refused_with_a_bundle_error(data: st.DataObject) -> None:
    block = block_of()
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([*positions(block)]))
        value = data.draw(st.sampled_from([*OTHERS, "hidden_states", "lora_b.0", *range(20)]))
        change = data.draw(st.sampled_from(["replace", "remove", "repeat"]))
        holder = at(block, path[:-1])
        if change == "replace":
            holder[path[-1]] = copy.deepcopy(value)
        elif change == "remove":
            del holder[path[-1]]
        elif isinstance(holder, list):
            holder.append(holder[path[-1]])
        if not [*positions(block)]:
            break
    try:
        chain = Chain.from_json(block)
    except BundleError as error:
        assert str(error).startswith("The manifest")
        return
    # A chain that can be read can be run: nothing below may fail.
    assert FORWARD in chain.roles and 1 <= chain.lowest_adapted < len(chain.blocks)
    for role in chain.roles:
        chain.check_role(role)
        if role in STEP_ROLES:
            assert 2 <= chain.longest(role) <= chain.bounds.tokens
    assert chain.model.modules == chain.modules


def _adapt_instead(block: Json, number: int) -> None:
    """Move the adapted modules of the first adapted block to another block."""
    block["blocks"][number]["modules"], block["blocks"][1]["modules"] = [0, 1], []


def _adapt_nothing(block: Json) -> None:
    for one in (block, *block["blocks"]):
        one["modules"] = []


def _of(program: int, role: str) -> Callable[[Json], Json]:
    return lambda block: block["programs"][program]["methods"][role]


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (lambda b: b["blocks"].__delitem__(slice(1, None)), "16384"),
        (lambda b: b["blocks"].extend(b["blocks"] * 5000), "20004"),
        (lambda b: b.update(pooling="last"), "'last'"),
        (lambda b: b.update(readout="logits"), "'logits'"),
        (lambda b: b.update(width=0), "width"),
        (lambda b: b["bounds"].update(batch=0), "batch"),
        (lambda b: b["bounds"].update(tokens=1), "tokens"),
        (lambda b: b["bounds"].update(chunk=4, context=8), "16"),
        (lambda b: b["bounds"].update(states=LARGEST_SIZE + 1), "16777217"),
        (lambda b: b["tables"][0].update(type="alibi"), "alibi"),
        (lambda b: b["tables"][0].update(window=0), "window=0"),
        (lambda b: b["tables"][0].update(first=-1), "first=-1"),
        (lambda b: b["blocks"][1].update(program=3), "block 1"),
        (lambda b: b["programs"].append(b["programs"][0]), "program 3"),
        (lambda b: b["blocks"][1].update(tables=[2]), "(2,)"),
        (lambda b: b["blocks"][2].update(modules=[0, 1]), "[0, 0, 1, 1]"),
        (lambda b: b["blocks"][1].update(modules=[0, 0, 1]), "[0, 0, 1, 2, 3]"),
        (lambda b: b["modules"].pop(), "[0, 1, 2, 3]"),
        (lambda b: b["modules"].__setitem__(1, b["modules"][0]), "10000"),
        (lambda b: b["modules"][0].update(rank=0), "rank 0"),
        (lambda b: b["programs"][1]["methods"].pop("forward"), "role forward"),
        (
            lambda b: b["programs"][1]["methods"].update(see=_of(1, FORWARD)(b)),
            "'see'",
        ),
        (lambda b: _of(1, FORWARD)(b).update(inputs=["tokens"]), "('tokens',)"),
        (
            lambda b: _of(0, FORWARD)(b).update(inputs=["hidden_states"]),
            "('hidden_states',)",
        ),
        (lambda b: _of(1, FORWARD)(b)["inputs"].append("lora_b.2"), "role forward"),
        (lambda b: _of(1, FORWARD)(b)["inputs"].append("u.0"), "role forward"),
        (lambda b: _of(1, FORWARD)(b)["inputs"].append("padding_mask"), "role forward"),
        (lambda b: _of(1, JVP)(b)["inputs"].append("hidden_states"), "role jvp"),
        (lambda b: _of(1, JVP)(b)["inputs"].remove("tangent_hidden_states"), "role jvp"),
        (lambda b: _of(1, BACKWARD)(b)["outputs"].remove("grad_lora_b.1"), "role backward"),
        (lambda b: _of(1, BACKWARD)(b)["outputs"].append("grad_hidden_states"), "role backward"),
        (lambda b: b["programs"][1]["methods"].pop(FORWARD_SAVE), "role backward_saved"),
        (lambda b: _of(1, FORWARD_SAVE)(b)["outputs"].append("residual.3"), "role forward_save"),
        (
            lambda b: _of(1, FORWARD_SAVE)(b)["outputs"].append("residual.2"),
            "role backward_saved",
        ),
        (
            lambda b: _of(2, FORWARD_SAVE)(b)["outputs"].extend(f"residual.{n}" for n in range(1, 10**5)),
            "100001",
        ),
        (lambda b: _of(2, FORWARD)(b)["inputs"].append("ones"), "'ones'"),
        (
            lambda b: _of(2, BACKWARD)(b).update(outputs=["parts"]),
            "('parts',)",
        ),
        (lambda b: b.update(readout="pooled"), "'targets'"),
        (lambda b: _adapt_instead(b, 0), "block 0"),
        (lambda b: _adapt_instead(b, 3), "block 3"),
        (lambda b: b.update(shared=[4]), "(4,)"),
        (lambda b: b.update(shared=[1] * 5000), "5000"),
        (lambda b: b.update(shared=[3]), "block 3"),
        (lambda b: b.update(shared=[1]), "('hidden_states',)"),
        (lambda b: b["blocks"][1].update(shared_in=[0]), "(0,)"),
        (lambda b: b["blocks"][2].update(past=[0, 1]), "(0, 1)"),
        (_adapt_nothing, ""),
        (lambda b: b["programs"][1].update(experts=True), "block 1"),
        (lambda b: b["programs"][0].update(experts=True), "block 0"),
    ],
)
def test_a_chain_that_no_engine_can_run_is_refused(change: Change, value: str) -> None:
    block = block_of()
    change(block)
    with raises(BundleError, "chain-not-runnable", containing=value):
        Chain.from_json(block)


# Roles and the model


def test_a_role_is_there_if_all_blocks_from_the_lowest_adapted_one_have_it() -> None:
    chain = make_chain()
    assert chain.roles == (FORWARD, JVP, BACKWARD) and chain.lowest_adapted == 1
    upper = make_chain(lowest=2)
    assert upper.lowest_adapted == 2 and upper.roles == (FORWARD, JVP, BACKWARD)
    block = block_of()
    del block["programs"][2]["methods"][BACKWARD]
    without = Chain.from_json(block)
    assert without.roles == (FORWARD, JVP)
    without.check_role(JVP)
    with raises(BundleError, "role-missing", containing=BACKWARD):
        without.check_role(BACKWARD)


def test_a_block_saves_the_residuals_that_its_backward_pass_reads() -> None:
    chain = make_chain()
    assert [len(chain.residuals(number)) for number in range(4)] == [0, 2, 2, 1]
    block = block_of()
    for program in block["programs"][1:]:
        for role in RESIDUAL_ROLES:
            del program["methods"][role]
    # As bundles of an earlier version.
    before = Chain.from_json(block)
    assert before.roles == chain.roles and not any(map(before.residuals, range(4)))


def test_a_chain_describes_its_model() -> None:
    chain = make_chain()
    model = chain.model
    assert (model.readout, model.is_encoder) == ("logprobs", False)
    assert (model.sequence_length, model.vocabulary_size, model.modules) == (16, 64, chain.modules)


def test_an_encoders_model_has_states() -> None:
    chain = make_chain(readout="pooled")
    assert chain.is_encoder and not chain.is_head(3) and make_chain().is_head(3)
    assert (chain.model.readout, chain.model.is_encoder, chain.model.width) == ("pooled", True, 8)


# Bundles


def test_a_bundle_has_the_chain_that_was_written(tmp_path: Path) -> None:
    bundle = open_bundle(make_bundle(tmp_path / "bundle", make_chain()))
    assert bundle.chain == make_chain()
