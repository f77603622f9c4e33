"""Encoders with a classification head of their own answer what transformers' model answers, by graphs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call

from device_runner.engines.chain_engine import ChainEngine
from prge.engine import Array, TokenSequence
from prge.files.chain import Bounds
from server_export.adapter.layers import default_target_modules, match_target_modules
from server_export.checkpoint.loading import load_model, outline_model
from tests.device_runner.engines.chains import (
    call_of,
    direction_of,
    directions_of,
    loss_of,
    matrices_of,
    slope_of,
)
from tests.device_runner.engines.graph_blocks import GraphBlocks
from tests.tiers import rest
from tests.tiny_types import make_classifier

torch.set_num_threads(1)

TOKENS = 12
CLASSES = 3
TYPES = ("bert", "roberta", "distilbert", "deberta-v2", "electra", "modernbert", "albert")


class Case:
    """Blocks of a model, and the whole one in double precision."""

    def __init__(self, folder: Path) -> None:
        outline = outline_model(str(folder))
        model = outline.model
        generator = torch.Generator().manual_seed(0)
        lora_a = {
            name: 0.3 * torch.randn(2, model.get_submodule(name).in_features, generator=generator)
            for name in match_target_modules(model, default_target_modules(model))
        }
        self.blocks = GraphBlocks(folder, lora_a, Bounds(tokens=TOKENS, context=TOKENS, piece=TOKENS))
        self.lora_a = {name: each.double() for name, each in lora_a.items()}
        loaded = load_model(str(folder))
        assert loaded.classifier is not None
        self.head = loaded.classifier.linear.double()
        self.model: Any = loaded.model.double()
        self.model.set_submodule(loaded.classifier.layer, self.head)

    def logits(self, sequences: Iterable[TokenSequence], values: torch.Tensor) -> torch.Tensor:
        """What transformers answers sequences with one adapter, [sequences, classes]."""
        parameters: dict[str, Any] = dict(self.model.named_parameters(remove_duplicate=False))
        adapter = matrices_of(self.blocks.chain.modules, values)
        for name, frozen in self.lora_a.items():
            key = f"{name}.weight"
            parameters[key] = parameters[key] + adapter[f"lora_b.{name}"].T @ frozen
        # One by one: some models answer no number where there is padding.
        words = ({"input_ids": torch.tensor([sequence.tokens])} for sequence in sequences)
        found = [functional_call(self.model, parameters, (), each, tie_weights=False) for each in words]
        return torch.cat([each.logits for each in found])

    def scores(self, pooled: Array) -> Array:
        """Scores of classes by what the blocks answer."""
        found: Array = self.head(torch.from_numpy(np.asarray(pooled, np.float64))).detach().numpy()
        return found


@pytest.fixture(scope="module", params=["bert", *rest(*TYPES[1:], "modernbert-mean")])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("classifier")
    name, *_ = request.param.partition("-mean")
    changes = {"classifier_pooling": "mean"} if request.param != name else {}
    make_classifier(name, CLASSES, **changes).save_pretrained(folder)
    return Case(folder)


def test_scores_of_all_copies_are_the_models(case: Case) -> None:
    call = call_of(case.blocks.chain.model, 3, copies=2)
    found = case.scores(ChainEngine(case.blocks, 1).forward(call))
    for copy in range(2):
        expected = case.logits(call.sequences, torch.from_numpy(call.adapters[copy]).double())
        np.testing.assert_allclose(found[copy], expected.detach().numpy(), atol=1e-5)


def test_the_gradient_is_autograds(case: Case) -> None:
    call = call_of(case.blocks.chain.model, 3)
    values = torch.from_numpy(call.adapters[0]).double().requires_grad_()
    loss_of(case.logits(call.sequences, values)).backward()
    weight = case.head.weight.detach().numpy()
    _, found = ChainEngine(case.blocks, 1).vjp(call, lambda pooled: slope_of(case.scores(pooled)) @ weight)
    assert values.grad is not None
    expected = values.grad.numpy()
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_tangents_are_the_models_derivatives(case: Case) -> None:
    model = case.blocks.chain.model
    call, directions = call_of(model, 2), directions_of(model, 2, 2)
    _, found = ChainEngine(case.blocks, 1).jvp(call, directions)
    values = torch.from_numpy(call.adapters[0]).double()
    for query, number in ((0, 0), (1, 1)):
        along = direction_of(model.modules, directions, query, number).double()
        one = call.sequences[number : number + 1]
        _, changes = torch.func.jvp(lambda given, one=one: case.logits(one, given), (values,), (along,))
        slopes, expected = found[query, number] @ case.head.weight.detach().numpy().T, changes[0].detach()
        np.testing.assert_allclose(slopes, expected, atol=1e-5 * float(expected.abs().max()))
