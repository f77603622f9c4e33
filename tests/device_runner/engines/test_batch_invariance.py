"""A sequence has the same outputs and the same gradient, to the bit, whatever is computed with it.

Alone, with longer and shorter ones, in another order, in one call or in several, with more copies of the
adapter: the oracle is the same sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prge.contract import Contract

from device_runner.engines.chain_engine import ChainEngine
from device_runner.engines.opening import Engines, open_engines
from device_runner.engines.planning import padded_length
from device_runner.engines.trunk_cache import TrunkCache
from prge.engine import Array, FloatArray
from prge.files.bundle import Bundle, open_bundle
from prge.files.signatures import BACK, STACK, TANGENT
from prge.learning.evaluation import score
from prge.learning.examples import Example
from prge.learning.head import Head
from prge.model_spec import matrices
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import Inputs, export_chain
from tests.rows import choice, classified, completion, long_choice
from tests.templates import random_adapter
from tests.tiers import rest
from tests.workshop import Made

pytestmark = needs_compiler

# Kernels add up in another order from lengths on that are more than a few of their registers.
TOKENS, QUERIES, COPIES, POSITIONS = 64, 3, 3, 4
# Of rows that the examples of a test choose from; some are equally long.
LENGTHS = (64, 33, 5, 20, 21, 41, 2, 50, 20, 64, 12)
ROWS = st.lists(st.integers(0, len(LENGTHS) - 1), min_size=2, max_size=9)
FEW = settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
CALLS: list[tuple[str, dict[str, int]]] = [
    (STACK, {}),
    (STACK, {"copies": COPIES}),
    (TANGENT, {"queries": QUERIES}),
    (BACK, {}),
]
CALL_NAMES = ["one adapter", "copies", "tangents", "gradient"]


@dataclass
class Scene:
    """The blocks of a bundle, opened once, and rows to make calls of."""

    bundle: Bundle
    lengths: Sequence[int] = LENGTHS
    more: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def engines(self) -> Engines:
        return open_engines(
            self.bundle, self.bundle.chain.contract(BACK, 1), threads=1, engine="native", **self.more
        )

    @cached_property
    def tokens(self) -> list[Array]:
        random = np.random.default_rng(0)
        most = self.bundle.chain.vocabulary_size
        return [random.integers(3, most, length) for length in self.lengths]

    @cached_property
    def matrices(self) -> Inputs:
        """An adapter, and directions of each row."""
        random, found = np.random.default_rng(1), Inputs()
        for matrix in matrices(self.bundle.chain.modules):
            found[matrix.name] = 0.1 * random.standard_normal((matrix.rank, matrix.width), np.float32)
            for name, width in ((matrix.u, matrix.rank), (matrix.v, matrix.width)):
                found[name] = random.choice(
                    np.array([-1, 1], np.float32), (QUERIES, len(self.lengths), width)
                )
        return found

    def contract(self, role: str, rows: int, **sizes: int) -> Contract:
        found = self.bundle.chain.contract(role, rows, **sizes)
        positions = 0 if found.is_encoder else POSITIONS
        return replace(found, positions=positions, sequence_length=max(self.lengths))

    def inputs(self, contract: Contract, rows: Sequence[int]) -> Inputs:
        shape = contract.batch_size, contract.sequence_length
        tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        positions = np.zeros((contract.batch_size, contract.positions), np.int64)
        for place, row in enumerate(rows):
            length = self.lengths[row]
            tokens[place, :length], mask[place, :length] = self.tokens[row], 1
            # The last tokens are read, so that a row is as long as it is said to be.
            last = np.arange(max(0, length - contract.positions), length)
            positions[place, : min(len(last), contract.positions)] = last[: contract.positions]
        targets = positions % 3
        of_rows = {"tokens": tokens, "attention_mask": mask, "positions": positions, "targets": targets}
        found: Inputs = {}
        for spec in contract.inputs:
            if spec.name in of_rows:
                found[spec.name] = np.tile(of_rows[spec.name], (contract.copies, 1))
            elif spec.name.startswith("lora_"):
                adapter = self.matrices[spec.name]
                copies = [adapter * np.float32(1 + copy) for copy in range(contract.copies)]
                found[spec.name] = np.stack(copies) if contract.role == STACK else adapter
            else:
                found[spec.name] = np.ascontiguousarray(self.matrices[spec.name][:, list(rows)])
        return found

    def engine(self, contract: Contract, cache: TrunkCache | None = None, saves: bool = True) -> ChainEngine:
        engines = self.engines
        return ChainEngine(contract, engines.blocks, 1, cache, saved=engines.saved if saves else None)

    def outputs(
        self, role: str, rows: Sequence[int], cache: TrunkCache | None = None, **sizes: int
    ) -> tuple[list[FloatArray], dict[str, FloatArray]]:
        """Outputs of each row, [copies or 1 + queries, ...] of all that a call has for it; the gradient."""
        contract = self.contract(role, len(rows), **sizes)
        engine, inputs = self.engine(contract, cache), self.inputs(contract, rows)
        gradients: dict[str, FloatArray] = {}
        if contract.is_exact:
            found, gradients = engine.gradient(inputs, gradient_by_outputs)
            answers = found[None]
        else:
            first, *tangents = engine.forward(inputs).values()
            answers = first.reshape(contract.copies, len(rows), -1)
            answers = np.concatenate([answers, *tangents])
        return [answers[:, place] for place in range(len(rows))], gradients

    def alone(self, role: str, row: int, **sizes: int) -> tuple[FloatArray, dict[str, FloatArray]]:
        """What a row is answered alone, and its gradient."""
        key = role, row, *sizes.items()
        if key not in self._known:
            (answer,), gradient = self.outputs(role, [row], **sizes)
            self._known[key] = answer, gradient
        return self._known[key]

    @cached_property
    def _known(self) -> dict[Any, tuple[FloatArray, dict[str, FloatArray]]]:
        return {}

    def added(self, rows: Sequence[int]) -> dict[str, FloatArray]:
        """Gradients of rows alone, added up in the order that docs/chain.md names."""
        bounds = self.bundle.chain.bounds
        rows = sorted(rows, key=lambda row: padded_length(self.lengths[row], bounds))
        total = {name: np.zeros_like(array) for name, array in self.alone(BACK, rows[0])[1].items()}
        for row in rows:
            for name, array in self.alone(BACK, row)[1].items():
                total[name] += array
        return total


def gradient_by_outputs(outputs: FloatArray) -> Array:
    """Of some loss that has no curve in common with the model's: of each output by itself."""
    return np.cos(3 * outputs) / 8


def bits(arrays: dict[str, FloatArray]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


def made(name: str, made_once: Made) -> Path:
    """The folder of `architecture scheme ...`, with the settings that come behind."""
    architecture, scheme, *more = name.split()
    roles = [STACK, TANGENT, BACK]
    changes: dict[str, Any] = {"sequence_length": TOKENS, "quantize": scheme, "roles": roles}
    changes |= dict(each.split("=") for each in more)
    return made_once(f"invariant {name}", lambda folder: export_chain(folder, architecture, **changes))


@pytest.fixture(
    scope="module",
    params=[
        "llama fp32",
        "llama 8da4w",
        *rest("llama 8da4w adapter=lora", "bert 8da4w", "qwen3_moe 8da4w", "lfm2 8da4w"),
    ],
)
def scene(request: pytest.FixtureRequest, made_once: Made) -> Scene:
    return Scene(open_bundle(made(request.param, made_once) / "bundle"))


def check(scene: Scene, role: str, rows: Sequence[int], **sizes: int) -> None:
    """That every row is answered as it is alone, and the gradient is the sum of those of rows alone."""
    found, gradient = scene.outputs(role, rows, **sizes)
    for place, row in enumerate(rows):
        assert found[place].tobytes() == scene.alone(role, row, **sizes)[0].tobytes(), (role, rows, place)
    if role == BACK:
        assert bits(gradient) == bits(scene.added(rows))


@pytest.mark.parametrize(("role", "sizes"), CALLS, ids=CALL_NAMES)
def test_a_row_among_all_others_is_what_it_is_alone(scene: Scene, role: str, sizes: dict[str, int]) -> None:
    for rows in ([*range(len(LENGTHS))], [*reversed(range(len(LENGTHS)))]):
        check(scene, role, rows, **sizes)


@pytest.mark.parametrize(("role", "sizes"), CALLS, ids=CALL_NAMES)
@FEW
@given(rows=ROWS)
def test_a_row_among_any_others_is_what_it_is_alone(
    scene: Scene, role: str, sizes: dict[str, int], rows: list[int]
) -> None:
    check(scene, role, rows, **sizes)


def test_every_role_answers_the_same(scene: Scene) -> None:
    """So a run begins with just the scores that are its reference."""
    for row in range(len(LENGTHS)):
        expected = scene.alone(STACK, row)[0][0].tobytes()
        for role, sizes in CALLS[1:]:
            assert scene.alone(role, row, **sizes)[0][0].tobytes() == expected, (role, row)


@pytest.mark.parametrize("sizes", [1, 2, 8])
def test_a_copy_of_the_adapter_is_answered_alike_with_any_number_of_others(scene: Scene, sizes: int) -> None:
    rows = [3, 0, 5]
    few, _ = scene.outputs(STACK, rows, copies=sizes)
    many, _ = scene.outputs(STACK, rows, copies=9)
    for one, other in zip(few, many, strict=True):
        assert one.tobytes() == other[:sizes].tobytes()


def test_a_gradient_is_the_same_whether_values_are_saved_for_it_or_not(scene: Scene) -> None:
    contract = scene.contract(BACK, len(LENGTHS))
    inputs = scene.inputs(contract, range(len(LENGTHS)))
    (outputs, saved), (again, computed) = (
        scene.engine(contract, saves=saves).gradient(inputs, gradient_by_outputs) for saves in (True, False)
    )
    assert outputs.tobytes() == again.tobytes()
    assert bits(saved) == bits(computed)


def test_states_from_the_cache_change_no_bit(scene: Scene, tmp_path: Path) -> None:
    cache = TrunkCache(tmp_path / "cache", 1 << 24)
    rows = [7, 2, 0, 3]
    for _ in range(2):
        found, gradient = scene.outputs(BACK, rows, cache)
        for place, row in enumerate(rows):
            assert found[place].tobytes() == scene.alone(BACK, row)[0].tobytes()
        assert bits(gradient) == bits(scene.added(rows))
    assert cache.computed == len(rows) and cache.reused >= len(rows)


def examples_of(scene: Scene) -> list[Example]:
    """Examples of all kinds of candidates, some with more of them than others; or classified ones."""
    tokens = [array.tolist() for array in scene.tokens]
    if scene.bundle.chain.is_encoder:
        return [classified(row, each, 3, row % 3) for row, each in enumerate(tokens)]
    return [
        *(completion(row, each, len(each) // 2) for row, each in enumerate(tokens[:5])),
        choice(5, tokens[3], [7, 8], 1),
        choice(6, tokens[7], [*range(3, 14)], 4),
        long_choice(7, tokens[2], [tokens[6], tokens[4], tokens[2]], 0),
        long_choice(8, tokens[4], [[row] for row in range(3, 15)], 2),
    ]


def test_an_examples_scores_and_loss_are_its_own(scene: Scene) -> None:
    chain = scene.bundle.chain
    engine = scene.engine(chain.scoring)
    adapter = random_adapter(chain.modules, 2, 0.1)
    head = Head(3, chain.width) if chain.is_encoder else None
    if head is not None:
        head.values[:] = np.random.default_rng(3).standard_normal(head.size)
    examples = examples_of(scene)

    def scored(some: Sequence[Example]) -> dict[int, tuple[bytes, float]]:
        found = score(engine, adapter, some, head)
        values = zip(found.scores, found.losses.tolist(), strict=True)
        return {each.row: (s.tobytes(), loss) for each, (s, loss) in zip(some, values, strict=True)}

    expected = {row: value for each in examples for row, value in scored([each]).items()}
    assert len({*expected.values()}) == len(examples)
    assert scored(examples) == scored(examples[::-1]) == expected
    assert scored(examples[3:7]) == {each.row: expected[each.row] for each in examples[3:7]}
    losses = [score(engine, adapter, some, head).loss for some in (examples, examples[::-1])]
    assert losses[0] == losses[1]


@pytest.mark.whole
def test_rows_in_chunks_are_what_they_are_alone(long_rows: Path) -> None:
    scene = Scene(open_bundle(long_rows), (150, 20, 64, 65, 20, 97))
    for role, sizes in CALLS:
        check(scene, role, [*range(len(scene.lengths))], **sizes)
        check(scene, role, [4, 2, 0], **sizes)


@pytest.fixture
def long_rows(made_once: Made, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle for rows of up to 160 tokens; rows of more than 64 are computed in chunks."""
    from prge.files import chain

    monkeypatch.setattr(chain, "MOST_WHOLE_TOKENS", 128)
    monkeypatch.setattr(chain, "_SHORT", 64)
    sizes = {"positions": 192, "sequence_length": 160, "context": 160}

    def make(folder: Path) -> object:
        return export_chain(folder, "llama", quantize="8da4w", roles=[STACK, TANGENT, BACK], **sizes)

    return made_once("chunks", make) / "bundle"


@pytest.mark.whole
def test_rows_of_smollm2_in_int4_are_what_they_are_alone(made_once: Made, smollm2: Path) -> None:
    """Through 30 layers that round to int8 the last bit of a float comes to tenths of a nat."""

    def fill(folder: Path) -> None:
        from server_export.export import ExportConfig, export

        export(
            ExportConfig(
                model=str(smollm2),
                out=folder / "bundle",
                quantize="8da4w",
                rank=8,
                sequence_length=TOKENS,
                roles=[STACK, TANGENT, BACK],
            )
        )

    scene = Scene(open_bundle(made_once("invariant smollm2", fill) / "bundle"), (33, 20, 5, 33, 47))
    for role, sizes in CALLS:
        check(scene, role, [*range(len(scene.lengths))], **sizes)
        check(scene, role, [3, 1], **sizes)
