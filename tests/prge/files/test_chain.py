"""What a manifest says of a chain: read whole, or refused in words before anything is loaded."""

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
from prge.files.bundle import open_bundle
from prge.files.chain import Bounds, Chain
from prge.files.signatures import BACK, BACK_SAVED, OF_BACK, SAVE, STACK, STEP_ROLES, TANGENT
from prge.model_spec import LARGEST_SIZE
from tests.bundles import make_bundle, make_chain
from tests.refusals import raises

Json = Any
Change = Callable[[Json], object]


def block_of(**changes: Any) -> Json:
    """A manifest's block as JSON has it; one of its methods has specs."""
    block = json.loads(json.dumps(make_chain(**changes).to_json()))
    method = block["kinds"][0]["methods"][STACK]
    method["input_specs"] = ["int64 [8, 4, 16]"]
    method["output_specs"] = ["float32 [32, 16, 8]"]
    return block


def test_a_chain_is_read_as_it_was_written() -> None:
    for readout in ("logprobs", "pooled"):
        chain = make_chain(readout=readout)
        assert Chain.from_json(json.loads(json.dumps(chain.to_json()))) == chain


def test_a_bundle_that_answers_among_label_words_says_how_to_export_it_again() -> None:
    with raises(BundleError, "bundle-of-label-words", saying="--label-words"):
        Chain.from_json({**block_of(), "readout": "verbalizer", "label_tokens": [3, 5]})


def places(value: Json, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values of a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def at(value: Json, path: tuple[Any, ...]) -> Json:
    for key in path:
        value = value[key]
    return value


PLACES = [*places(block_of())]
MAY_BE_NULL = "window"
# Rows of earlier bundles are whole, their blocks share no values, none is an expert; methods have no specs.
MAY_LACK = ("piece", "shared", "takes", "past", "experts", "input_specs", "output_specs")


def test_every_input_and_output_of_a_method_has_a_spec_or_none_has() -> None:
    method = Chain.from_json(block_of()).kinds[0].methods[STACK]
    assert method.has_specs and method.sizes("tokens") == (8, 4, 16) and method.sizes("state") == ()
    assert method.sizes("state", is_output=True) == (32, 16, 8)
    old = Chain.from_json(json.loads(json.dumps(make_chain().to_json()))).kinds[0].methods[STACK]
    assert not old.has_specs and old.sizes("tokens") == ()
    for lacking in ("input_specs", "output_specs"):
        block = block_of()
        del block["kinds"][0]["methods"][STACK][lacking]
        with raises(BundleError, "chain-not-runnable", saying=f"{lacking[:-6]}s of block 0"):
            Chain.from_json(block)


@pytest.mark.parametrize(
    "spec", ["", "float32", "float32 [8, 4", "float32 [-1]", "float32 [1.5]", "[8]", "float32 [1234567890]"]
)
def test_what_is_no_spec_is_refused(spec: str) -> None:
    block = block_of()
    block["kinds"][0]["methods"][STACK]["input_specs"] = [spec]
    with raises(BundleError, "chain-unreadable", saying="input_specs"):
        Chain.from_json(block)


@pytest.mark.parametrize("sizes", [[0], [LARGEST_SIZE + 1], [1] * 9])
def test_a_spec_of_sizes_that_no_model_has_is_refused(sizes: list[int]) -> None:
    block = block_of()
    block["kinds"][0]["methods"][STACK]["input_specs"] = [f"int64 {sizes}"]
    with raises(BundleError, "chain-not-runnable", saying="block 0"):
        Chain.from_json(block)


def test_a_bundle_that_knows_no_pieces_has_whole_rows() -> None:
    block = block_of()
    del block["bounds"]["piece"]
    bounds = Chain.from_json(block).bounds
    assert bounds.piece == bounds.tokens and not bounds.has_pieces


@given(st.integers(2, 3000), st.sampled_from([0, 8, 32]))
def test_pieces_follow_each_other_and_none_has_one_token_alone(length: int, heads: int) -> None:
    bounds = Bounds(tokens=4096, piece=256)
    cuts = [*bounds.pieces(length, heads)]
    assert [cut.start for cut in cuts] == [0, *(cut.stop for cut in cuts[:-1])] and cuts[-1].stop == length
    sizes = [cut.stop - cut.start for cut in cuts]
    assert all(2 <= size <= 256 for size in sizes)
    # Scores of all heads take 8 MB at most, but where layers would have too few tokens.
    assert all(
        heads * size * cut.stop <= 1 << 21 or size <= 64 for cut, size in zip(cuts, sizes, strict=True)
    )


@pytest.mark.parametrize(
    "path", [p for p in PLACES if isinstance(p[-1], str) and p[-1] not in MAY_LACK], ids=str
)
def test_a_field_that_is_missing_is_named(path: tuple[Any, ...]) -> None:
    block = block_of()
    del at(block, path[:-1])[path[-1]]
    if path[-1] in (MAY_BE_NULL, "trains_a", TANGENT, BACK, BACK_SAVED):
        Chain.from_json(block)  # as bundles of an earlier version, or with a role less
        return
    with raises(BundleError, "chain-unreadable", "chain-not-runnable", saying=path[-1]):
        Chain.from_json(block)


OTHERS = [None, True, 1.5, -1, 10**5000, math.inf, math.nan, "", "x" * 10**6, [], [[]], {}, {"a": [1]}]


@pytest.mark.parametrize("path", PLACES, ids=str)
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


@pytest.mark.parametrize("path", [path for path in PLACES if type(at(block_of(), path)) is int], ids=str)
def test_numbers_that_no_model_has_are_refused_without_making_anything(path: tuple[Any, ...]) -> None:
    for value in (-1, -(10**30), 10**30, 10**5000):
        block = block_of()
        at(block, path[:-1])[path[-1]] = value
        if path[-1] == MAY_BE_NULL and value > 0:
            Chain.from_json(block)  # as far as any row goes
            continue
        with raises(BundleError, "chain-not-runnable"):
            Chain.from_json(block)


@pytest.mark.parametrize("value", [None, [], [1], "chain", 7, {}, {"blocks": []}])
def test_what_is_no_chain_at_all(value: Json) -> None:
    with raises(BundleError, "chain-unreadable"):
        Chain.from_json(value)


@settings(deadline=2000, max_examples=300)
@given(st.data())
def test_a_mutated_chain_is_read_or_refused_in_our_words(data: st.DataObject) -> None:
    block = block_of()
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([*places(block)]))
        value = data.draw(st.sampled_from([*OTHERS, "state", "lora_b.0", *range(20)]))
        change = data.draw(st.sampled_from(["replace", "remove", "repeat"]))
        holder = at(block, path[:-1])
        if change == "replace":
            holder[path[-1]] = copy.deepcopy(value)
        elif change == "remove":
            del holder[path[-1]]
        elif isinstance(holder, list):
            holder.append(holder[path[-1]])
        if not [*places(block)]:
            break
    try:
        chain = Chain.from_json(block)
    except BundleError as error:
        assert str(error).startswith("the manifest")
        return
    # What was read can be run: nothing below may fail.
    assert STACK in chain.roles and 1 <= chain.lowest_adapted < len(chain.blocks)
    for role in chain.roles:
        chain.check_role(role)
        if role in STEP_ROLES:
            assert 2 <= chain.longest(role) <= chain.bounds.tokens
    assert chain.model.modules == chain.modules


def _adapt_instead(block: Json, number: int) -> None:
    """Another block has the adapted modules of the first that has any."""
    block["blocks"][number]["modules"], block["blocks"][1]["modules"] = [0, 1], []


def _adapt_nothing(block: Json) -> None:
    for one in (block, *block["blocks"]):
        one["modules"] = []


def _of(kind: int, role: str) -> Callable[[Json], Json]:
    return lambda block: block["kinds"][kind]["methods"][role]


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
        (lambda b: b["bounds"].update(piece=4, context=8), "16"),
        (lambda b: b["bounds"].update(states=LARGEST_SIZE + 1), "16777217"),
        (lambda b: b["tables"][0].update(kind="alibi"), "alibi"),
        (lambda b: b["tables"][0].update(window=0), "window=0"),
        (lambda b: b["tables"][0].update(first=-1), "first=-1"),
        (lambda b: b["blocks"][1].update(kind=3), "block 1"),
        (lambda b: b["kinds"].append(b["kinds"][0]), "kind 3"),
        (lambda b: b["blocks"][1].update(tables=[2]), "(2,)"),
        (lambda b: b["blocks"][2].update(modules=[0, 1]), "[0, 0, 1, 1]"),
        (lambda b: b["blocks"][1].update(modules=[0, 0, 1]), "[0, 0, 1, 2, 3]"),
        (lambda b: b["modules"].pop(), "[0, 1, 2, 3]"),
        (lambda b: b["modules"].__setitem__(1, b["modules"][0]), "10000"),
        (lambda b: b["modules"][0].update(rank=0), "rank 0"),
        (lambda b: b["kinds"][1]["methods"].pop("stack"), "role stack"),
        (
            lambda b: b["kinds"][1]["methods"].update(see=_of(1, STACK)(b)),
            "'see'",
        ),
        (lambda b: _of(1, STACK)(b).update(inputs=["tokens"]), "('tokens',)"),
        (
            lambda b: _of(0, STACK)(b).update(inputs=["state"]),
            "('state',)",
        ),
        (lambda b: _of(1, STACK)(b)["inputs"].append("lora_b.2"), "role stack"),
        (lambda b: _of(1, STACK)(b)["inputs"].append("u.0"), "role stack"),
        (lambda b: _of(1, STACK)(b)["inputs"].append("padding"), "role stack"),
        (lambda b: _of(1, TANGENT)(b)["inputs"].append("state"), "role tangent"),
        (lambda b: _of(1, TANGENT)(b)["inputs"].remove("d_state"), "role tangent"),
        (lambda b: _of(1, BACK)(b)["outputs"].remove("gradient.1"), "role back"),
        (lambda b: _of(1, BACK)(b)["outputs"].append("slope"), "role back"),
        (lambda b: b["kinds"][1]["methods"].pop(SAVE), "role back_saved"),
        (lambda b: _of(1, SAVE)(b)["outputs"].append("saved.3"), "role save"),
        (
            lambda b: _of(1, SAVE)(b)["outputs"].append("saved.2"),
            "role back_saved",
        ),
        (
            lambda b: _of(2, SAVE)(b)["outputs"].extend(f"saved.{n}" for n in range(1, 10**5)),
            "100001",
        ),
        (lambda b: _of(2, STACK)(b)["inputs"].append("ones"), "'ones'"),
        (
            lambda b: _of(2, BACK)(b).update(outputs=["parts"]),
            "('parts',)",
        ),
        (lambda b: b.update(readout="pooled"), "'targets'"),
        (lambda b: _adapt_instead(b, 0), "block 0"),
        (lambda b: _adapt_instead(b, 3), "block 3"),
        (lambda b: b.update(shared=[4]), "(4,)"),
        (lambda b: b.update(shared=[1] * 5000), "5000"),
        (lambda b: b.update(shared=[3]), "block 3"),
        (lambda b: b.update(shared=[1]), "('state',)"),
        (lambda b: b["blocks"][1].update(takes=[0]), "(0,)"),
        (lambda b: b["blocks"][2].update(past=[0, 1]), "(0, 1)"),
        (_adapt_nothing, ""),
        (lambda b: b["kinds"][1].update(experts=True), "block 1"),
        (lambda b: b["kinds"][0].update(experts=True), "block 0"),
    ],
)
def test_a_chain_that_no_engine_can_run_is_refused(change: Change, value: str) -> None:
    block = block_of()
    change(block)
    with raises(BundleError, "chain-not-runnable", saying=value):
        Chain.from_json(block)


# Roles and the model


def test_a_role_is_there_if_all_blocks_from_the_lowest_adapted_one_have_it() -> None:
    chain = make_chain()
    assert chain.roles == (STACK, TANGENT, BACK) and chain.lowest_adapted == 1
    upper = make_chain(lowest=2)
    assert upper.lowest_adapted == 2 and upper.roles == (STACK, TANGENT, BACK)
    block = block_of()
    del block["kinds"][2]["methods"][BACK]
    without = Chain.from_json(block)
    assert without.roles == (STACK, TANGENT)
    without.check_role(TANGENT)
    with raises(BundleError, "role-missing", saying=BACK):
        without.check_role(BACK)


def test_a_block_saves_what_its_way_back_takes() -> None:
    chain = make_chain()
    assert [len(chain.saved(number)) for number in range(4)] == [0, 2, 2, 1]
    block = block_of()
    for kind in block["kinds"][1:]:
        for role in OF_BACK:
            del kind["methods"][role]
    # As bundles of an earlier version.
    before = Chain.from_json(block)
    assert before.roles == chain.roles and not any(map(before.saved, range(4)))


def test_a_chain_tells_callers_of_its_model() -> None:
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
