"""Encoders with a classification head of their own answer what transformers' model answers, by graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from device_runner.engines.chain_engine import ChainEngine
from prge.engine import Array
from prge.files.chain import Bounds
from server_export.adapter.layers import default_target_modules, match_target_modules
from server_export.checkpoint.loading import load_model, outline_model
from server_export.oracle import TorchEngine
from tests.device_runner.engines.chains import call_of, directions_of, slope_of
from tests.device_runner.engines.graph_blocks import GraphBlocks
from tests.tiers import rest
from tests.tiny_types import make_classifier

torch.set_num_threads(1)

TOKENS = 12
CLASSES = 3
TYPES = ("bert", "roberta", "distilbert", "deberta-v2", "electra", "modernbert", "albert")


class Case:
    """Blocks of a model, and what PyTorch computes of the whole one, with its head, in double precision."""

    def __init__(self, folder: Path) -> None:
        outline = outline_model(str(folder))
        model = outline.model
        generator = torch.Generator().manual_seed(0)
        lora_a = {
            name: 0.3 * torch.randn(2, model.get_submodule(name).in_features, generator=generator)
            for name in match_target_modules(model, default_target_modules(model))
        }
        self.blocks = GraphBlocks(folder, lora_a, Bounds(tokens=TOKENS, context=TOKENS, piece=TOKENS))
        loaded = load_model(str(folder))
        assert loaded.classifier is not None
        self.head = loaded.classifier.linear.double()
        network: Any = loaded.model
        network.set_submodule(loaded.classifier.layer, self.head)
        spec = replace(self.blocks.chain.model, width=CLASSES)
        self.oracle = TorchEngine(network, spec, lora_a, pooling="first").to(torch.float64)

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
    np.testing.assert_allclose(found, case.oracle.forward(call), atol=1e-5)


def test_the_gradient_is_autograds(case: Case) -> None:
    call = call_of(case.blocks.chain.model, 3)
    _, expected = case.oracle.vjp(call, slope_of)
    weight = case.head.weight.detach().numpy()
    _, found = ChainEngine(case.blocks, 1).vjp(call, lambda pooled: slope_of(case.scores(pooled)) @ weight)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_tangents_are_the_models_derivatives(case: Case) -> None:
    model = case.blocks.chain.model
    call, directions = call_of(model, 2), directions_of(model, 2, 2)
    _, found = ChainEngine(case.blocks, 1).jvp(call, directions)
    _, exact = case.oracle.jvp(call, directions)
    for query, number in ((0, 0), (1, 1)):
        slopes, expected = found[query, number] @ case.head.weight.detach().numpy().T, exact[query, number]
        np.testing.assert_allclose(slopes, expected, atol=1e-5 * float(np.abs(expected).max()))
