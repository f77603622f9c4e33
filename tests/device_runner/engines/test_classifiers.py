"""Encoders with a classification head of their own answer what transformers' model answers, by graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prge.contract import Contract
from torch.func import functional_call

from device_runner.engines.chain_engine import ChainEngine
from prge.engine import Array
from prge.files.chain import Bounds
from prge.model_spec import matrices
from server_export.model.adapted import default_target_modules, match_target_modules
from server_export.model.loading import load_model, outline_model
from tests.device_runner.engines.chains import Inputs, inputs_of, loss_of, slope_of
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

    def logits(self, given: Inputs, adapter: dict[str, torch.Tensor]) -> torch.Tensor:
        """What transformers answers rows, [rows, classes]."""
        parameters: dict[str, Any] = dict(self.model.named_parameters(remove_duplicate=False))
        for name, frozen in self.lora_a.items():
            key = f"{name}.weight"
            parameters[key] = parameters[key] + adapter[f"lora_b.{name}"].T @ frozen
        # Row by row: some models answer no number where there is padding.
        rows = zip(given["tokens"], given["attention_mask"].sum(1).tolist(), strict=True)
        words = ({"input_ids": torch.from_numpy(row[None, :length])} for row, length in rows)
        found = [functional_call(self.model, parameters, (), each, tie_weights=False) for each in words]
        return torch.cat([each.logits for each in found])

    def scores(self, pooled: Array) -> Array:
        """Scores of classes by what the blocks answer."""
        found: Array = self.head(torch.from_numpy(np.asarray(pooled, np.float64))).detach().numpy()
        return found


def adapter_of(contract: Contract, given: Inputs, *copy: int) -> dict[str, torch.Tensor]:
    return {
        each.name: torch.from_numpy(given[each.name][copy]).double().requires_grad_()
        for each in matrices(contract.modules)
    }


@pytest.fixture(scope="module", params=["bert", *rest(*TYPES[1:], "modernbert-mean")])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("classifier")
    name, *_ = request.param.partition("-mean")
    changes = {"classifier_pooling": "mean"} if request.param != name else {}
    make_classifier(name, CLASSES, **changes).save_pretrained(folder)
    return Case(folder)


def test_scores_of_all_copies_are_the_models(case: Case) -> None:
    contract = case.blocks.chain.contract("stack", 3, copies=2)
    given = inputs_of(contract)
    found = case.scores(ChainEngine(contract, case.blocks, 1).forward(given)["pooled"])
    for copy in range(2):
        rows = slice(copy * 3, (copy + 1) * 3)
        own = {name: given[name][rows] for name in ("tokens", "attention_mask")}
        expected = case.logits(own, adapter_of(contract, given, copy)).detach().numpy()
        np.testing.assert_allclose(found[rows], expected, atol=1e-5)


def test_the_gradient_is_autograds(case: Case) -> None:
    contract = case.blocks.chain.contract("back", 3)
    given = inputs_of(contract)
    adapter = adapter_of(contract, given)
    loss_of(case.logits(given, adapter)).backward()
    weight = case.head.weight.detach().numpy()
    _, found = ChainEngine(contract, case.blocks, 1).gradient(
        given, lambda pooled: np.asarray(slope_of(case.scores(pooled)) @ weight, np.float32)
    )
    largest = max(float(each.grad.abs().max()) for each in adapter.values() if each.grad is not None)
    for name, each in adapter.items():
        assert each.grad is not None
        assert np.abs(found[name] - each.grad.numpy()).max() < 1e-5 * largest


def test_tangents_are_the_models_derivatives(case: Case) -> None:
    contract = case.blocks.chain.contract("tangent", 2, queries=2)
    given = inputs_of(contract)
    found = ChainEngine(contract, case.blocks, 1).forward(given)["dpooled"]
    for query, row in ((0, 0), (1, 1)):
        along = {
            each.name: torch.from_numpy(
                np.outer(given[each.u][query, row], given[each.v][query, row])
            ).double()
            for each in matrices(contract.modules)
        }
        one = {name: given[name][row : row + 1] for name in ("tokens", "attention_mask")}
        adapter = {name: each.detach() for name, each in adapter_of(contract, given).items()}
        _, expected = torch.func.jvp(lambda values, one=one: case.logits(one, values), (adapter,), (along,))
        slopes, expected = found[query, row] @ case.head.weight.detach().numpy().T, expected[0].detach()
        np.testing.assert_allclose(slopes, expected, atol=1e-5 * float(expected.abs().max()))
