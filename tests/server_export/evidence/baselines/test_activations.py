"""What autograd keeps for a backward, counted in bytes."""

from __future__ import annotations

import torch
from torch import nn

from server_export.evidence.baselines.activations import SavedActivations


def test_a_network_counted_by_hand() -> None:
    """x [5, 3] -> linear 4 -> ReLU -> linear 2 -> sum: x, and the output of ReLU once."""
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    rows = torch.randn(5, 3)
    with SavedActivations(network.parameters()) as saved:
        loss = network(rows).sum()
        # ReLU keeps what it gives, and the layer above what it takes: one tensor.
        assert saved.peak_bytes == 4 * (5 * 3 + 5 * 4)
        loss.backward()
    assert saved.peak_bytes == 4 * (5 * 3 + 5 * 4)


def test_a_frozen_layer_keeps_no_input() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    network[0].requires_grad_(False)
    with SavedActivations(network.parameters()) as saved:
        network(torch.randn(5, 3)).sum().backward()
    assert saved.peak_bytes == 4 * 5 * 4


def test_steps_one_after_the_other_count_once() -> None:
    layer = nn.Linear(3, 4)
    with SavedActivations(layer.parameters()) as saved:
        for rows in (2, 5, 3):
            layer(torch.randn(rows, 3)).sum().backward()
    assert saved.peak_bytes == 4 * 5 * 3


def test_views_count_as_their_storage_and_forwards_alone_as_nothing() -> None:
    layer = nn.Linear(3, 4)
    rows = torch.randn(10, 3)
    with SavedActivations(layer.parameters()) as saved, torch.no_grad():
        layer(rows)
    assert saved.peak_bytes == 0
    with SavedActivations(layer.parameters()) as saved:
        (layer(rows[:2]).sum() + layer(rows[2:4]).sum()).backward()
    assert saved.peak_bytes == 4 * 10 * 3
