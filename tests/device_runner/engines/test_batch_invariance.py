"""Outputs and gradients of a sequence have the same bits, whatever is computed with it.

It is computed alone, with longer and shorter ones, in another order, in one call or several, and with more
copies of the adapter; the reference is the same sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from device_runner.engines.activations import ActivationStore
from device_runner.engines.chain_engine import ChainEngine
from device_runner.engines.opening import OpenEngine
from device_runner.engines.planning import padded_length
from device_runner.engines.trunk_cache import TrunkCache
from prge.engine import Array, Call, Directions, Engine, FloatArray, Target, TokenSequence
from prge.formats.adapter import Adapter
from prge.formats.bundle import Bundle, open_bundle
from prge.formats.signatures import BACKWARD, FORWARD, JVP
from prge.model_spec import ModelSpec, matrices
from prge.objectives.classification_head import Head
from prge.objectives.examples import Example
from prge.objectives.scoring import score
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import export_chain, opened, split
from tests.rows import choice, classification, completion, long_choice
from tests.templates import random_adapter
from tests.tiers import second_tier
from tests.workshop import FolderBuilder

pytestmark = needs_compiler

# Kernels sum in another order above lengths of a few of their registers.
TOKENS, QUERIES, COPIES, TARGETS = 64, 3, 3, 4
# Lengths of rows in the examples of a test; some are equal.
LENGTHS = (64, 33, 5, 20, 21, 41, 2, 50, 20, 64, 12)
ROWS = st.lists(st.integers(0, len(LENGTHS) - 1), min_size=2, max_size=9)
FEW = settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Roles and copies.
CALLS = [(FORWARD, 1), (FORWARD, COPIES), (JVP, 1), (BACKWARD, 1)]
CALL_NAMES = ["one adapter", "copies", "tangents", "gradient"]


@dataclass
class Scene:
    """The blocks of a bundle, opened once, and sequences for calls."""

    bundle: Bundle
    lengths: Sequence[int] = LENGTHS

    @cached_property
    def opened(self) -> OpenEngine:
        return opened(self.bundle, BACKWARD, threads=1)

    @property
    def model(self) -> ModelSpec:
        return self.bundle.chain.model

    @cached_property
    def sequences(self) -> list[TokenSequence]:
        """Sequences whose last tokens have targets, so that each is computed in full length.

        Every third one has branches, if the model takes them.
        """
        random, longest = np.random.default_rng(0), self.model.max_branched
        tokens = [random.integers(3, self.model.vocabulary_size, length).tolist() for length in self.lengths]
        return [
            TokenSequence(
                tuple(each),
                tuple(
                    Target(position, position % 3, 1.0, 0)
                    for position in range(max(0, len(each) - TARGETS), len(each))
                ),
                (len(each) // 2, len(each) - 2) if row % 3 == 0 and 6 < len(each) <= longest else (),
            )
            for row, each in enumerate(tokens)
        ]

    @cached_property
    def adapter(self) -> Adapter:
        return random_adapter(self.model.modules, 1, 0.1)

    @cached_property
    def directions(self) -> Directions:
        """Return the directions of each sequence."""
        random = np.random.default_rng(2)
        return {
            name: random.choice(np.array([-1, 1], np.float32), (QUERIES, len(self.lengths), width))
            for matrix in matrices(self.model.modules)
            for name, width in ((matrix.u, matrix.rank), (matrix.v, matrix.width))
        }

    def call(self, rows: Sequence[int], copies: int = 1) -> Call:
        """Return a call of some sequences; each copy of the adapter has other values."""
        values = np.stack([self.adapter.values * np.float32(1 + copy) for copy in range(copies)])
        return Call(tuple(self.sequences[row] for row in rows), values)

    def outputs(
        self, role: str, rows: Sequence[int], copies: int = 1, engine: Engine | None = None
    ) -> tuple[list[FloatArray], FloatArray]:
        """Return the outputs of each row, [copies or 1 + queries, ...], and the gradient."""
        engine, call = engine or self.opened.engine, self.call(rows, copies)
        gradient = np.zeros(0, np.float32)
        if role == FORWARD:
            outputs = engine.forward(call)
        elif role == JVP:
            selected = {name: factors[:, list(rows)] for name, factors in self.directions.items()}
            first, tangents = engine.jvp(call, selected)
            outputs = np.concatenate([first[None], tangents])
        else:
            result, gradient = engine.vjp(call, gradient_by_outputs)
            outputs = result[None]
        return split(self.model, call, outputs), gradient

    def alone(self, role: str, row: int, copies: int = 1) -> tuple[FloatArray, FloatArray]:
        """Return a row's outputs and gradient when it is computed alone."""
        key = role, row, copies
        if key not in self._known:
            (answer,), gradient = self.outputs(role, [row], copies)
            self._known[key] = answer, gradient
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[str, int, int], tuple[FloatArray, FloatArray]]:
        return {}

    def added(self, rows: Sequence[int]) -> FloatArray:
        """Return the sum of gradients of rows alone, in the order of docs/explanation/chain.md."""
        bounds = self.bundle.chain.bounds
        rows = sorted(
            rows,
            key=lambda row: (padded_length(self.lengths[row], bounds), self.sequences[row].branches),
        )
        total = np.zeros(self.adapter.size, np.float32)
        for row in rows:
            total += self.alone(BACKWARD, row)[1]
        return total


def gradient_by_outputs(outputs: FloatArray) -> Array:
    """Return the gradient of a loss in which each output is independent."""
    return np.cos(3 * outputs) / 8


def export_bundle(name: str, made_once: FolderBuilder) -> Path:
    """Return the folder of a bundle by `architecture scheme ...`, with the settings that follow."""
    architecture, scheme, *more = name.split()
    roles = [FORWARD, JVP, BACKWARD]
    changes: dict[str, Any] = {"sequence_length": TOKENS, "quantize": scheme, "roles": roles}
    changes |= dict(each.split("=") for each in more)
    return made_once(f"invariant {name}", lambda folder: export_chain(folder, architecture, **changes))


@pytest.fixture(
    scope="module",
    params=[
        "llama fp32",
        "llama 8da4w",
        *second_tier("llama 8da4w adapter=lora", "bert 8da4w", "qwen3_moe 8da4w", "lfm2 8da4w"),
    ],
)
def scene(request: pytest.FixtureRequest, made_once: FolderBuilder) -> Scene:
    return Scene(open_bundle(export_bundle(request.param, made_once) / "bundle"))


def check(scene: Scene, role: str, rows: Sequence[int], copies: int) -> None:
    """Check that each row's outputs and the sum of gradients equal those of rows alone."""
    result, gradient = scene.outputs(role, rows, copies)
    for index, row in enumerate(rows):
        assert result[index].tobytes() == scene.alone(role, row, copies)[0].tobytes(), (role, rows, index)
    if role == BACKWARD:
        assert gradient.tobytes() == scene.added(rows).tobytes()


@pytest.mark.parametrize(("role", "copies"), CALLS, ids=CALL_NAMES)
def test_a_row_among_all_others_has_the_bits_of_the_row_alone(scene: Scene, role: str, copies: int) -> None:
    for rows in ([*range(len(LENGTHS))], [*reversed(range(len(LENGTHS)))]):
        check(scene, role, rows, copies)


@pytest.mark.parametrize(("role", "copies"), CALLS, ids=CALL_NAMES)
@FEW
@given(rows=ROWS)
def test_a_row_among_any_others_has_the_bits_of_the_row_alone(
    scene: Scene, role: str, copies: int, rows: list[int]
) -> None:
    check(scene, role, rows, copies)


def test_every_role_has_the_same_outputs(scene: Scene) -> None:
    """A run therefore starts with exactly its reference scores."""
    for row in range(len(LENGTHS)):
        expected = scene.alone(FORWARD, row)[0][0].tobytes()
        for role, copies in CALLS[1:]:
            assert scene.alone(role, row, copies)[0][0].tobytes() == expected, (role, row)


@pytest.mark.parametrize("copies", [1, 2, 8])
def test_a_copy_of_the_adapter_has_the_same_outputs_with_any_number_of_others(
    scene: Scene, copies: int
) -> None:
    rows = [3, 0, 5]
    few, _ = scene.outputs(FORWARD, rows, copies)
    many, _ = scene.outputs(FORWARD, rows, copies=9)
    for one, other in zip(few, many, strict=True):
        assert one.tobytes() == other[:copies].tobytes()


def test_a_gradient_is_the_same_with_and_without_residuals(scene: Scene) -> None:
    assert scene.opened.store.residual_bytes
    call = scene.call(range(len(LENGTHS)))
    (outputs, saved), (again, computed) = (
        engine.vjp(call, gradient_by_outputs)
        for engine in (scene.opened.engine, ChainEngine(scene.opened.blocks, 1))
    )
    assert outputs.tobytes() == again.tobytes()
    assert saved.tobytes() == computed.tobytes()


def test_states_from_the_cache_change_no_bit(scene: Scene, tmp_path: Path) -> None:
    cache = TrunkCache(tmp_path / "cache", 1 << 24)
    engine = ChainEngine(scene.opened.blocks, 1, ActivationStore(scene.opened.blocks, trunk=cache))
    rows = [7, 2, 0, 3]
    for _ in range(2):
        result, gradient = scene.outputs(BACKWARD, rows, engine=engine)
        for index, row in enumerate(rows):
            assert result[index].tobytes() == scene.alone(BACKWARD, row)[0].tobytes()
        assert gradient.tobytes() == scene.added(rows).tobytes()
    assert cache.computed == len(rows) and cache.reused >= len(rows)


def examples_of(scene: Scene) -> list[Example]:
    """Return examples with all types of candidates, or classification examples."""
    tokens = [[*sequence.tokens] for sequence in scene.sequences]
    if scene.bundle.chain.is_encoder:
        return [classification(row, each, 3, row % 3) for row, each in enumerate(tokens)]
    return [
        *(completion(row, each, len(each) // 2) for row, each in enumerate(tokens[:5])),
        choice(5, tokens[3], [7, 8], 1),
        choice(6, tokens[7], [*range(3, 14)], 4),
        long_choice(7, tokens[2], [tokens[6], tokens[4], tokens[2]], 0),
        long_choice(8, tokens[4], [[row] for row in range(3, 15)], 2),
    ]


def test_an_examples_scores_and_loss_do_not_depend_on_other_examples(scene: Scene) -> None:
    chain, engine = scene.bundle.chain, scene.opened.engine
    adapter = random_adapter(chain.modules, 2, 0.1)
    head = Head(3, chain.width) if chain.is_encoder else None
    if head is not None:
        head.values[:] = np.random.default_rng(3).standard_normal(head.size)
    examples = examples_of(scene)

    def scored(some: Sequence[Example]) -> dict[int, tuple[bytes, float]]:
        result = score(engine, adapter, some, head)
        values = zip(result.scores, result.losses.tolist(), strict=True)
        return {each.row: (s.tobytes(), loss) for each, (s, loss) in zip(some, values, strict=True)}

    expected = {row: value for each in examples for row, value in scored([each]).items()}
    assert len({*expected.values()}) == len(examples)
    assert scored(examples) == scored(examples[::-1]) == expected
    assert scored(examples[3:7]) == {each.row: expected[each.row] for each in examples[3:7]}
    losses = [score(engine, adapter, some, head).loss for some in (examples, examples[::-1])]
    assert losses[0] == losses[1]


@pytest.mark.whole
def test_rows_in_chunks_have_the_bits_of_rows_alone(long_rows: Path) -> None:
    scene = Scene(open_bundle(long_rows), (150, 20, 64, 65, 20, 97))
    for role, copies in CALLS:
        check(scene, role, [*range(len(scene.lengths))], copies)
        check(scene, role, [4, 2, 0], copies)


@pytest.fixture
def long_rows(made_once: FolderBuilder, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a bundle for rows of up to 160 tokens; rows of more than 64 are computed in chunks."""
    from prge.formats import chain

    monkeypatch.setattr(chain, "MAX_WHOLE_TOKENS", 128)
    monkeypatch.setattr(chain, "_CHUNK", 64)
    sizes = {"positions": 192, "sequence_length": 160, "context": 160}

    def make(folder: Path) -> object:
        return export_chain(folder, "llama", quantize="8da4w", roles=[FORWARD, JVP, BACKWARD], **sizes)

    return made_once("chunks", make) / "bundle"


@pytest.mark.whole
def test_rows_of_smollm2_in_int4_have_the_bits_of_rows_alone(made_once: FolderBuilder, smollm2: Path) -> None:
    """Through 30 layers with int8 activations the last bit of a float grows to tenths of a nat."""

    def fill(folder: Path) -> None:
        from server_export.export import ExportConfig, export

        export(
            ExportConfig(
                model=str(smollm2),
                out=folder / "bundle",
                quantize="8da4w",
                rank=8,
                sequence_length=TOKENS,
                roles=[FORWARD, JVP, BACKWARD],
            )
        )

    scene = Scene(open_bundle(made_once("invariant smollm2", fill) / "bundle"), (33, 20, 5, 33, 47))
    for role, copies in CALLS:
        check(scene, role, [*range(len(scene.lengths))], copies)
        check(scene, role, [3, 1], copies)
