"""Principal directions of states that are added in chunks, and ranks by what the directions explain."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.incremental_pca import IncrementalPCA

from server_export.model.principal import IncrementalSVD, PrincipalDirections, spread_ranks


def states(count: int, width: int, seed: int = 0, mean: float = 2.0) -> torch.Tensor:
    """Return states whose mean square falls from direction to direction, like a layer's inputs."""
    generator = torch.Generator().manual_seed(seed)
    scales = 0.8 ** torch.arange(width) * 3
    rotation, _ = torch.linalg.qr(torch.randn(width, width, generator=generator))
    return (torch.randn(count, width, generator=generator) * scales) @ rotation + mean


def directions_of(inputs: torch.Tensor, count: int, chunk: int) -> PrincipalDirections:
    svd = IncrementalSVD(inputs.shape[1], count)
    for part in inputs.split(chunk):
        svd.add(part)
    return svd.directions()


@pytest.mark.parametrize(("count", "width", "chunk"), [(50, 24, 7), (3000, 24, 100), (3000, 300, 999)])
def test_directions_are_the_singular_vectors_of_all_states(count: int, width: int, chunk: int) -> None:
    inputs = states(count, width)
    leading = directions_of(inputs, 4, chunk)
    _, values, vectors = np.linalg.svd(inputs.double().numpy(), full_matrices=False)
    squares = values**2
    np.testing.assert_allclose(leading.shares, squares[:4] / squares.sum(), rtol=1e-5)
    cosines = np.abs((leading.rows.double().numpy() * vectors[:4]).sum(1))
    np.testing.assert_allclose(cosines, 1, atol=1e-5)
    assert torch.allclose(leading.rows @ leading.rows.T, torch.eye(4), atol=1e-5)


def test_directions_equal_pefts_for_states_without_a_mean() -> None:
    """PEFT's EVA centers the states; states together with their opposites have no mean."""
    pca = IncrementalPCA(4)
    inputs = states(1000, 24)
    for part in inputs.split(100):
        pca.partial_fit(torch.cat([part, -part]))
    leading = directions_of(inputs, 4, 100)
    cosines = (leading.rows * pca.components_.float()).sum(1).abs()
    assert torch.allclose(cosines, torch.ones(4), atol=1e-3)
    assert torch.allclose(leading.shares.float(), pca.explained_variance_ratio_.float(), rtol=1e-2)


def test_the_size_of_chunks_does_not_matter() -> None:
    inputs = states(2000, 40)
    one, many = directions_of(inputs, 4, 2000), directions_of(inputs, 4, 13)
    assert torch.allclose(one.rows, many.rows, atol=1e-4)


def test_memory_does_not_grow_with_the_number_of_states() -> None:
    svd, largest = IncrementalSVD(1000, 4), 0
    for seed in range(20):
        svd.add(torch.randn(300, 1000, generator=torch.Generator().manual_seed(seed)))
        largest = max(largest, len(svd.rows))
    assert largest <= 4 * 4 + 128 + 2 * 256


def test_states_in_a_subspace_have_only_its_directions() -> None:
    inputs = torch.randn(100, 3) @ torch.randn(3, 20)
    leading = directions_of(inputs, 8, 10)
    assert len(leading.rows) == len(leading.shares) == 3
    assert float(leading.shares.sum()) == pytest.approx(1)


def test_zero_states_have_no_directions() -> None:
    assert len(directions_of(torch.zeros(10, 4), 2, 5).rows) == 0


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_outputs_of_a_row_are_as_large_as_those_of_a_random_row(rank: int) -> None:
    """The reference is the mean square of the outputs of many rows that are initialized as in PEFT."""
    inputs = states(2000, 32)
    mean_squares = (inputs @ directions_of(inputs, 8, 500).lora_a(rank).T).square().mean(0)
    bound = 32**-0.5
    random_rows = (torch.rand(4000, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1) * bound
    expected = float((inputs @ random_rows.T).square().mean())
    assert mean_squares.tolist() == pytest.approx([expected] * rank, rel=0.05)


LAYERS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(
        st.lists(st.floats(0, 1), min_size=8, max_size=8).map(lambda x: sorted(x, reverse=True)),
        st.integers(1, 64),
    ),
    min_size=1,
)


@given(layers=LAYERS, rank=st.integers(1, 4))
def test_ranks_are_within_their_bounds_and_use_the_budget(
    layers: dict[str, tuple[list[float], int]], rank: int
) -> None:
    shares = {name: share for name, (share, _) in layers.items()}
    outputs = {name: out for name, (_, out) in layers.items()}
    ranks = spread_ranks(shares, outputs, rank)
    assert list(ranks) == list(shares)
    assert all(1 <= each <= 2 * rank for each in ranks.values())
    budget, used = (
        sum(outputs[name] * each for name, each in of.items()) for of in (dict.fromkeys(shares, rank), ranks)
    )
    assert used <= budget
    # No layer can use the rest of the budget.
    assert not any(outputs[name] <= budget - used and each < 2 * rank for name, each in ranks.items())


def test_a_layer_with_one_strong_direction_leaves_ranks_to_others() -> None:
    shares = {"narrow": [0.9, 0.01, 0.01, 0.01], "wide": [0.3, 0.25, 0.2, 0.15]}
    assert spread_ranks(shares, {"narrow": 8, "wide": 8}, 2) == {"narrow": 1, "wide": 3}


def test_cheaper_directions_come_first() -> None:
    shares = {"large": [0.5, 0.3], "small": [0.5, 0.2]}
    assert spread_ranks(shares, {"large": 100, "small": 10}, 1) == {"large": 1, "small": 1}
    assert spread_ranks(
        {name: [*share, 0.1, 0.1] for name, share in shares.items()}, {"large": 20, "small": 10}, 2
    ) == {"large": 2, "small": 2}


def test_a_layer_has_no_more_ranks_than_directions() -> None:
    assert spread_ranks({"few": [0.9], "many": [0.4, 0.3, 0.2, 0.1]}, {"few": 4, "many": 4}, 2) == {
        "few": 1,
        "many": 3,
    }
