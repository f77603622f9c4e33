"""Principal directions of states that come in pieces, and ranks by what they explain."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.incremental_pca import IncrementalPCA

from server_export.model.principal import Directions, Principal, spread_ranks


def states(count: int, width: int, seed: int = 0, mean: float = 2.0) -> torch.Tensor:
    """States whose mean square falls from direction to direction, as a layer's inputs do."""
    generator = torch.Generator().manual_seed(seed)
    scales = 0.8 ** torch.arange(width) * 3
    turn, _ = torch.linalg.qr(torch.randn(width, width, generator=generator))
    return (torch.randn(count, width, generator=generator) * scales) @ turn + mean


def directions_of(given: torch.Tensor, count: int, piece: int) -> Directions:
    principal = Principal(given.shape[1], count)
    for part in given.split(piece):
        principal.add(part)
    return principal.directions()


@pytest.mark.parametrize(("count", "width", "piece"), [(50, 24, 7), (3000, 24, 100), (3000, 300, 999)])
def test_they_are_the_singular_vectors_of_all_states(count: int, width: int, piece: int) -> None:
    given = states(count, width)
    found = directions_of(given, 4, piece)
    _, values, vectors = np.linalg.svd(given.double().numpy(), full_matrices=False)
    squares = values**2
    np.testing.assert_allclose(found.shares, squares[:4] / squares.sum(), rtol=1e-5)
    cosines = np.abs((found.rows.double().numpy() * vectors[:4]).sum(1))
    np.testing.assert_allclose(cosines, 1, atol=1e-5)
    assert torch.allclose(found.rows @ found.rows.T, torch.eye(4), atol=1e-5)


def test_they_are_pefts_of_states_without_a_mean() -> None:
    """PEFT's EVA centres; states and their opposites have no mean."""
    pca = IncrementalPCA(4)
    given = states(1000, 24)
    for part in given.split(100):
        pca.partial_fit(torch.cat([part, -part]))
    found = directions_of(given, 4, 100)
    cosines = (found.rows * pca.components_.float()).sum(1).abs()
    assert torch.allclose(cosines, torch.ones(4), atol=1e-3)
    assert torch.allclose(found.shares.float(), pca.explained_variance_ratio_.float(), rtol=1e-2)


def test_pieces_dont_matter() -> None:
    given = states(2000, 40)
    one, many = directions_of(given, 4, 2000), directions_of(given, 4, 13)
    assert torch.allclose(one.rows, many.rows, atol=1e-4)


def test_memory_doesnt_grow_with_the_states() -> None:
    principal, most = Principal(1000, 4), 0
    for seed in range(20):
        principal.add(torch.randn(300, 1000, generator=torch.Generator().manual_seed(seed)))
        most = max(most, len(principal.rows))
    assert most <= 4 * 4 + 128 + 2 * 256


def test_states_of_few_directions_have_no_more() -> None:
    given = torch.randn(100, 3) @ torch.randn(3, 20)
    found = directions_of(given, 8, 10)
    assert len(found.rows) == len(found.shares) == 3
    assert float(found.shares.sum()) == pytest.approx(1)


def test_states_of_zeros_have_none() -> None:
    assert len(directions_of(torch.zeros(10, 4), 2, 5).rows) == 0


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_each_row_gives_what_a_random_row_gives_on_average(rank: int) -> None:
    """The mean square of a row's product with the states, over many rows as PEFT draws them."""
    given = states(2000, 32)
    ours = (given @ directions_of(given, 8, 500).lora_a(rank).T).square().mean(0)
    bound = 32**-0.5
    drawn = (torch.rand(4000, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1) * bound
    expected = float((given @ drawn.T).square().mean())
    assert ours.tolist() == pytest.approx([expected] * rank, rel=0.05)


LAYERS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(
        st.lists(st.floats(0, 1), min_size=8, max_size=8).map(lambda x: sorted(x, reverse=True)),
        st.integers(1, 64),
    ),
    min_size=1,
)


@given(layers=LAYERS, rank=st.integers(1, 4))
def test_ranks_stay_within_their_bounds_and_the_budget(
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
    # Nothing is left that a layer could still take.
    assert not any(outputs[name] <= budget - used and each < 2 * rank for name, each in ranks.items())


def test_a_layer_of_one_direction_leaves_its_ranks_to_others() -> None:
    shares = {"narrow": [0.9, 0.01, 0.01, 0.01], "wide": [0.3, 0.25, 0.2, 0.15]}
    assert spread_ranks(shares, {"narrow": 8, "wide": 8}, 2) == {"narrow": 1, "wide": 3}


def test_a_direction_that_costs_less_comes_first() -> None:
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
