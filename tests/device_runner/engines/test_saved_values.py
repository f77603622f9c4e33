"""What forward passes save spares the way back work, takes no more than its budget, and changes no bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from device_runner.engines import blocks as blocks_module
from device_runner.engines.kept_states import KeptStates
from device_runner.engines.opening import OpenEngine
from device_runner.engines.saved_values import SavedValues
from prge.engine import Call, Target, TokenSequence
from prge.files.bundle import Bundle, open_bundle
from prge.files.signatures import BACK, BACK_SAVED, OF_BACK, SAVE, STACK
from tests.bundles import read_json, write_manifest
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import TOKENS, bits, call_of, computed, export_chain, opened
from tests.tiers import rest
from tests.workshop import Made

pytestmark = needs_compiler

ENOUGH = 1 << 40


@pytest.fixture(
    scope="module",
    params=["llama", *rest("llama lora", "llama 8da4w", "gpt2 8da8w", "bert", "bert lora", "gemma4")],
)
def bundle(request: pytest.FixtureRequest, make_chain: Callable[[str], Path], made_once: Made) -> Bundle:
    name, _, kind = request.param.partition(" ")
    if not kind.startswith("8"):
        return open_bundle(make_chain(request.param) / "bundle")
    settings: dict[str, Any] = {"quantize": kind, "roles": [BACK]}
    return open_bundle(
        made_once(f"saved {request.param}", lambda folder: export_chain(folder, name, **settings)) / "bundle"
    )


def gradient(programs: OpenEngine, call: Call, most: int) -> tuple[list[bytes], SavedValues]:
    """Outputs and gradient of the second of two steps with so much room."""
    engine: Any = programs.engine
    engine._saved = saved = SavedValues(programs.blocks, most)
    for _ in range(2):
        found = computed(engine, BACK, call)
    return bits(found), saved


def sizes(saved: SavedValues) -> dict[int, int]:
    """Bytes of the arrays of each block that saves."""
    return {
        number: sum(place.values.nbytes for places in calls for place in places.values())
        for number, calls in saved._places.items()
    }


@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_whatever_is_saved_the_gradient_has_the_same_bits(bundle: Bundle, rows: int, engine: str) -> None:
    """None, then one block more at a time, from the last one down."""
    call = call_of(bundle.chain.model, rows)
    programs = opened(bundle, BACK, engine)
    expected, saved = gradient(opened(bundle, BACK), call, 0)
    assert sizes(saved) == {}
    taken = sizes(gradient(programs, call, ENOUGH)[1])
    chain = bundle.chain
    assert [*taken] == [*reversed(range(chain.lowest_adapted, len(chain.blocks)))]
    for count in range(len(taken) + 1):
        most = sum([*taken.values()][:count])
        found, saved = gradient(programs, call, most)
        assert found == expected
        assert sizes(saved) == dict([*taken.items()][:count])


def test_what_was_saved_is_not_computed_again(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    call, programs = call_of(bundle.chain.model, 2), opened(bundle, BACK)
    run, roles = programs.blocks.run, list[tuple[int, str]]()

    def noted(number: int, role: str, *arguments: Any) -> Any:
        roles.append((number, role))
        return run(number, role, *arguments)

    monkeypatch.setattr(programs.blocks, "run", noted)
    gradient(programs, call, 0)
    assert {role for _, role in roles} == {STACK, BACK}
    roles.clear()
    _, saved = gradient(programs, call, ENOUGH)
    first = bundle.chain.lowest_adapted
    assert {role for number, role in roles if number >= first} == {SAVE, BACK_SAVED}
    last = max(sizes(saved))
    roles.clear()
    gradient(programs, call, sizes(saved)[last])
    assert {role for number, role in roles if number == last} == {SAVE, BACK_SAVED}
    assert {role for number, role in roles if first <= number < last} == {STACK, BACK}


def test_calls_of_other_sizes_follow_each_other(bundle: Bundle) -> None:
    """Room that a longer call has written to holds a shorter one, whose answers are smaller than the room."""
    model, programs = bundle.chain.model, opened(bundle, BACK)
    calls = call_of(model, 5), call_of(model, 5, lengths=[2])
    expected = [gradient(programs, call, 0)[0] for call in calls]
    engine: Any = programs.engine
    engine._saved = saved = SavedValues(programs.blocks, ENOUGH)
    room = None
    for _ in range(2):
        for call, want in zip(calls, expected, strict=True):
            assert bits(computed(engine, BACK, call)) == want
            assert room is None or saved._room is room
            room = saved._room


def test_a_budget_is_what_is_left_beside_all_weights(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = bundle.chain.loaded_bytes(lambda name: bundle.file(name).stat().st_size)
    for memory, left in ((max(loaded), 0), (sum(loaded), 0), (sum(loaded) + 12_345, 12_345)):
        programs = opened(bundle, BACK, loaded=memory)
        assert programs.saved is not None and programs.saved.most == left
    monkeypatch.setattr(blocks_module, "available_memory", lambda: sum(loaded) + 4_000)
    programs = opened(bundle, BACK)
    assert programs.saved is not None and programs.saved.most == 1_000
    told = programs.saved.told(2 * TOKENS, 10)
    assert "activations: 0 of " in told and "(0 of 0 MB)" in told
    # The torch engine holds room for the largest answers of each method.
    on_torch = opened(bundle, BACK, "torch", loaded=1 << 30)
    assert on_torch.saved is not None and on_torch.saved.most == 0


def test_states_that_are_rounded_are_gone_through_again(bundle: Bundle) -> None:
    """The values of a forward pass aren't those of what is kept."""
    assert opened(bundle, BACK, kept=KeptStates("float16")).saved is None
    assert opened(bundle, BACK, kept=KeptStates("float32")).saved is not None
    assert opened(bundle, STACK).saved is None


def test_a_bundle_of_an_earlier_version_computes_all_again(bundle: Bundle, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle.folder, tmp_path / "bundle"))
    manifest = read_json(folder)
    for kind in manifest["chain"]["kinds"]:
        for role in OF_BACK:
            kind["methods"].pop(role, None)
    write_manifest(folder, manifest)
    call = call_of(bundle.chain.model, 3)
    found, saved = gradient(opened(open_bundle(folder), BACK), call, ENOUGH)
    assert sizes(saved) == {} and found == gradient(opened(bundle, BACK), call, ENOUGH)[0]


def test_one_question_takes_the_room_of_two(bundle: Bundle) -> None:
    """What lies behind it is written later, or is nobody's."""
    call, programs = call_of(bundle.chain.model, 1), opened(bundle, BACK)
    sequence = TokenSequence(call.sequences[0].tokens, (Target(3, 1, 1.0, 0),))
    call = replace(call, sequences=(sequence,))
    assert gradient(programs, call, ENOUGH)[0] == gradient(programs, call, 0)[0]


def test_blocks_that_save_nothing_as_experts_do_are_passed_over(bundle: Bundle) -> None:
    saved = SavedValues(opened(bundle, BACK).blocks, ENOUGH)
    numbers = [*saved.fitting(2 * TOKENS, 10)]
    saved._widths[numbers[1]] = {}
    assert [*saved.fitting(2 * TOKENS, 10)] == [numbers[0], *numbers[2:]]
