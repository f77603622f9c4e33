"""What forward passes save spares the way back work, takes no more than its budget, and changes no bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from device_runner.engines import blocks as blocks_module
from device_runner.engines.kept_states import KeptStates
from device_runner.engines.opening import Engines
from device_runner.engines.saved_values import SavedValues
from prge.contract import Contract
from prge.files.bundle import Bundle, open_bundle
from prge.files.signatures import BACK, BACK_SAVED, OF_BACK, SAVE, STACK
from tests.bundles import read_json, write_manifest
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import TOKENS, Inputs, computed, export_chain, inputs_of, opened
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


def call_of(bundle: Bundle, rows: int) -> tuple[Contract, Inputs]:
    contract = bundle.chain.contract(BACK, rows)
    return contract, inputs_of(contract)


def gradient(engines: Engines, given: Inputs, most: int) -> tuple[dict[str, bytes], SavedValues]:
    """Answers and gradient of the second of two steps with so much room."""
    saved = engines.step._saved = SavedValues(engines.blocks, most)  # type: ignore[attr-defined]
    for _ in range(2):
        found = computed(engines.step, given)
    return {name: array.tobytes() for name, array in found.items()}, saved


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
    contract, given = call_of(bundle, rows)
    engines = opened(bundle, contract, engine)
    expected, saved = gradient(opened(bundle, contract), given, 0)
    assert sizes(saved) == {}
    taken = sizes(gradient(engines, given, ENOUGH)[1])
    chain = bundle.chain
    assert [*taken] == [*reversed(range(chain.lowest_adapted, len(chain.blocks)))]
    for count in range(len(taken) + 1):
        most = sum([*taken.values()][:count])
        found, saved = gradient(engines, given, most)
        assert found == expected
        assert sizes(saved) == dict([*taken.items()][:count])


def test_what_was_saved_is_not_computed_again(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    contract, given = call_of(bundle, 2)
    engines = opened(bundle, contract)
    run, roles = engines.blocks.run, list[tuple[int, str]]()

    def noted(number: int, role: str, *arguments: Any) -> Any:
        roles.append((number, role))
        return run(number, role, *arguments)

    monkeypatch.setattr(engines.blocks, "run", noted)
    gradient(engines, given, 0)
    assert {role for _, role in roles} == {STACK, BACK}
    roles.clear()
    _, saved = gradient(engines, given, ENOUGH)
    first = bundle.chain.lowest_adapted
    assert {role for number, role in roles if number >= first} == {SAVE, BACK_SAVED}
    last = max(sizes(saved))
    roles.clear()
    gradient(engines, given, sizes(saved)[last])
    assert {role for number, role in roles if number == last} == {SAVE, BACK_SAVED}
    assert {role for number, role in roles if first <= number < last} == {STACK, BACK}


def test_calls_of_other_sizes_follow_each_other(bundle: Bundle) -> None:
    """Room that a longer call has written to holds a shorter one, whose answers are smaller than the room."""
    contract, long = call_of(bundle, 5)
    short = {name: array.copy() for name, array in long.items()}
    if contract.is_encoder:
        short["attention_mask"][:, 5:] = 0
    else:
        short["positions"] %= 2
        short["targets"][:] = short["positions"][:] = 1
    engines = opened(bundle, contract)
    expected = [gradient(engines, given, 0)[0] for given in (long, short)]
    engines.step._saved = saved = SavedValues(engines.blocks, ENOUGH)  # type: ignore[attr-defined]
    room = None
    for _ in range(2):
        for given, want in zip((long, short), expected, strict=True):
            found = computed(engines.step, given)
            assert {name: array.tobytes() for name, array in found.items()} == want
            assert room is None or saved._room is room
            room = saved._room


def test_a_budget_is_what_is_left_beside_all_weights(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    contract, _ = call_of(bundle, 2)
    loaded = bundle.chain.loaded_bytes(lambda name: bundle.file(name).stat().st_size)
    for memory, left in ((max(loaded), 0), (sum(loaded), 0), (sum(loaded) + 12_345, 12_345)):
        engines = opened(bundle, contract, loaded=memory)
        assert engines.saved is not None and engines.saved.most == left
    monkeypatch.setattr(blocks_module, "available_memory", lambda: sum(loaded) + 4_000)
    engines = opened(bundle, contract)
    assert engines.saved is not None and engines.saved.most == 1_000
    told = engines.saved.told(2 * TOKENS, 10)
    assert "activations: 0 of " in told and "(0 of 0 MB)" in told
    # The torch engine holds room for the largest answers of each method.
    on_torch = opened(bundle, contract, "torch", loaded=1 << 30)
    assert on_torch.saved is not None and on_torch.saved.most == 0


def test_states_that_are_rounded_are_gone_through_again(bundle: Bundle) -> None:
    """The values of a forward pass aren't those of what is kept."""
    contract, _ = call_of(bundle, 2)
    assert opened(bundle, contract, kept=KeptStates("float16")).saved is None
    assert opened(bundle, contract, kept=KeptStates("float32")).saved is not None
    assert opened(bundle, bundle.chain.scoring).saved is None


def test_a_bundle_of_an_earlier_version_computes_all_again(bundle: Bundle, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle.folder, tmp_path / "bundle"))
    manifest = read_json(folder)
    for kind in manifest["chain"]["kinds"]:
        for role in OF_BACK:
            kind["methods"].pop(role, None)
    write_manifest(folder, manifest)
    contract, given = call_of(bundle, 3)
    before = open_bundle(folder)
    found, saved = gradient(opened(before, contract), given, ENOUGH)
    assert sizes(saved) == {} and found == gradient(opened(bundle, contract), given, ENOUGH)[0]


def test_one_question_takes_the_room_of_two(bundle: Bundle) -> None:
    """What lies behind it is written later, or is nobody's."""
    contract, given = call_of(bundle, 1)
    if not contract.is_encoder:
        given["positions"][:], given["targets"][:] = 3, 1
    engines = opened(bundle, contract)
    assert gradient(engines, given, ENOUGH)[0] == gradient(engines, given, 0)[0]


def test_blocks_that_save_nothing_as_experts_do_are_passed_over(bundle: Bundle) -> None:
    contract, _ = call_of(bundle, 2)
    saved = SavedValues(opened(bundle, contract).blocks, ENOUGH)
    numbers = [*saved.fitting(2 * TOKENS, 10)]
    saved._widths[numbers[1]] = {}
    assert [*saved.fitting(2 * TOKENS, 10)] == [numbers[0], *numbers[2:]]
