"""Directions that keep to the axes of a guide: against products of matrices, and in journal and bundle."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prge.contract import AdaptedModule
from prge.errors import BundleError, RunError
from prge.files.bundle import open_bundle
from prge.files.journal import Journal
from prge.learning.estimators.differences import Antithetic, Differences
from prge.learning.estimators.directions import GuidedDirections, RankOneDirections, on_grid, rademacher
from prge.learning.estimators.guide import GUIDE, Guide, add_guide, guide_of
from prge.learning.estimators.tangents import Tangents
from tests.bundles import MODULES as OF_BUNDLE
from tests.bundles import make_bundle

MODULES = (AdaptedModule("q", rank=2, in_features=4, out_features=7), AdaptedModule("v", 1, 4, 5))
AXES = (3, 2)


def make_guide(modules: tuple[AdaptedModule, ...] = MODULES, axes: tuple[int, ...] = AXES) -> Guide:
    random = np.random.default_rng(0)
    return Guide(
        {
            module.name: random.normal(size=(count, module.out_features)).astype(np.float32)
            for module, count in zip(modules, axes, strict=True)
        }
    )


def whole(guide: Guide) -> np.ndarray:
    """Random numbers of a direction times this are the direction, [numbers, size of the adapter]."""
    blocks = [np.kron(np.eye(module.rank), guide.axes[module.name]) for module in MODULES]
    rows, columns = (sum(block.shape[axis] for block in blocks) for axis in (0, 1))
    matrix, row, column = np.zeros((rows, columns)), 0, 0
    for block in blocks:
        matrix[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return matrix


def test_a_direction_is_a_sign_for_each_rank_and_axis_times_the_axes() -> None:
    guide = make_guide()
    found = GuidedDirections(5, 6, MODULES, guide)(2)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, rademacher(5, 6, 2, 2 * 3 + 2) @ whole(guide), rtol=1e-5, atol=1e-6)


def test_rank_one_directions_have_a_sign_for_each_axis() -> None:
    guide = make_guide()
    directions = RankOneDirections(5, 6, 2, 3, MODULES, guide=guide)
    shapes = [(u.shape[-1], v.shape[-1]) for _, u, v in directions.factors()]
    assert shapes == [(2, 3), (1, 2)]
    products = [np.outer(u[1, 2], v[1, 2] @ guide.axes[m.of]).ravel() for m, u, v in directions.factors()]
    np.testing.assert_allclose(directions(1, 2), np.concatenate(products), rtol=1e-5, atol=1e-6)


def test_calls_are_given_what_the_gradient_is_made_of() -> None:
    directions = RankOneDirections(5, 6, 2, 3, MODULES, guide=make_guide())
    inputs = {
        f"{kind}.{module.name}": np.full((2, 4, width), 9, np.float32)
        for module in MODULES
        for kind, width in (("u", module.rank), ("v", module.out_features))
    }
    directions.fill(inputs, np.array([2, 0, 1, -1]))
    filled = [
        np.einsum("qnr,qno->qnro", inputs[f"u.{m.name}"], inputs[f"v.{m.name}"]).reshape(2, 4, -1)
        for m in MODULES
    ]
    together = np.concatenate(filled, -1)
    for query in range(2):
        for row, example in enumerate((2, 0, 1)):
            np.testing.assert_array_equal(together[query, row], directions(query, example))
    assert not together[:, 3].any()


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 5))
def test_the_gradient_is_the_mean_of_scalar_times_direction(seed: int, queries: int, examples: int) -> None:
    guide = make_guide()
    scalars = np.random.default_rng(seed).normal(size=(queries, examples))
    directions = RankOneDirections(seed, 3, queries, examples, MODULES, guide=guide)
    expected = np.mean(
        [scalars[q, e] * directions(q, e).astype(float) for q in range(queries) for e in range(examples)], 0
    )
    found = Tangents(guide=guide).gradient({"scalars": scalars.tolist()}, seed, 3, MODULES)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    of_copies = Differences(Antithetic(queries, 0.1), guide=guide)
    copies = GuidedDirections(seed, 3, MODULES, guide)
    expected = np.mean([scalars[q, 0] * copies(q).astype(float) for q in range(queries)], 0)
    found = of_copies.gradient({"scalars": scalars[:, 0].tolist()}, seed, 3, MODULES)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_axes_are_added_up_in_their_order() -> None:
    """A change here breaks the replay of every journal with a guide."""
    guide = make_guide()
    exact = on_grid(np.random.default_rng(1).normal(size=(4, 3)))
    directions = RankOneDirections(1, 2, 4, 3, MODULES, guide=guide)
    expected = np.zeros(0, np.float32)
    for matrix, u, v in directions.factors():
        total = np.einsum("qe,qer,qea->ra", exact, u.astype(float), v.astype(float)) / exact.size
        outputs = np.zeros((matrix.rank, matrix.width))
        for axis, values in enumerate(guide.axes[matrix.of].astype(float)):
            outputs = outputs + total[:, axis : axis + 1] * values
        expected = np.append(expected, outputs.astype(np.float32))
    assert directions.gradient(exact).tobytes() == expected.tobytes()


def test_a_journal_keeps_every_bit_of_it(tmp_path: Path) -> None:
    guide = make_guide()
    with Journal(tmp_path / "journal.jsonl") as journal:
        assert Guide.from_journal(journal) is None
        journal.append(guide.to_record())
    with Journal(tmp_path / "journal.jsonl", writable=False) as journal:
        found = Guide.from_journal(journal)
        assert found is not None
        assert {name: axes.tobytes() for name, axes in found.axes.items()} == {
            name: axes.tobytes() for name, axes in guide.axes.items()
        }
    (tmp_path / "journal.jsonl").unlink()
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append({"kind": "guide", "layers": {"q": {"axes": 2, "values": "AAAA"}}})
        with pytest.raises(RunError, match="the record 'guide' can't be used"):
            Guide.from_journal(journal)


def test_a_bundle_has_the_guide_that_was_added_last(tmp_path: Path) -> None:
    bundle = open_bundle(make_bundle(tmp_path))
    assert guide_of(bundle) is None
    for axes in ((3, 2), (2, 2)):
        guide = make_guide(OF_BUNDLE, axes)
        add_guide(bundle, guide)
        with_guide = open_bundle(tmp_path)
        found = guide_of(with_guide)
        assert found is not None and with_guide.sha256 != bundle.sha256
        for name, expected in guide.axes.items():
            np.testing.assert_array_equal(found.axes[name], expected)
    content = (tmp_path / GUIDE).read_bytes()
    assert with_guide.hash_of(GUIDE) == hashlib.sha256(content).hexdigest()
    (tmp_path / GUIDE).write_bytes(content[:-1] + b"x")
    with pytest.raises(BundleError, match=GUIDE):
        open_bundle(tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"layers.0.q_proj": None}, "layers.0.q_proj: it has no axes"),
        ({"layers.0.q_proj": np.zeros((2, 9), np.float32)}, r"axes are float32 \(2, 9\), must be"),
        ({"layers.0.q_proj": np.zeros((2, 8))}, "axes are float64"),
        ({"layers.0.q_proj": np.zeros((0, 8), np.float32)}, "must be float32"),
        ({"layers.0.q_proj": np.full((1, 8), np.nan, np.float32)}, "axes are not finite"),
        ({"other": np.zeros((1, 8), np.float32)}, "layers that the bundle doesn't adapt"),
    ],
)
def test_a_guide_of_other_layers_is_refused(
    tmp_path: Path, change: dict[str, np.ndarray | None], problem: str
) -> None:
    axes = {**make_guide(OF_BUNDLE).axes, **change}
    bundle = open_bundle(make_bundle(tmp_path))
    add_guide(bundle, Guide({name: array for name, array in axes.items() if array is not None}))
    with pytest.raises(BundleError, match=problem):
        guide_of(open_bundle(tmp_path))
