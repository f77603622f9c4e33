"""Every pattern changes the model that is its example, none a plain Llama; a new one is one object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from prge.errors import Refusal
from server_export.check.chain import difference_from_model
from server_export.trace.model_graph import ModelGraph
from server_export.trace.passes import Changes
from server_export.trace.patterns import REGISTRY, Pattern, Rewrite, patterns, register
from tests.server_export.trace.graphs import chain_in
from tests.tiny_models import save_model
from tests.tiny_types import make_classifier, make_tiny, text_types

aten = torch.ops.aten
# What only refuses models changes nothing of others.
REFUSING = {"chunked attention", "unknown recurrences"}
NAMES = [pattern.name for pattern in patterns()]


def changes_of(folder: Path) -> Changes:
    changes = Changes()
    chain_in(folder, changes=changes)
    return changes


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSING])
def test_a_pattern_changes_the_model_that_is_its_example(name: str, tmp_path: Path) -> None:
    example = REGISTRY[name].example
    model = make_classifier(example, 3) if name == "classification heads" else make_tiny(example)
    model.save_pretrained(tmp_path)
    assert name in changes_of(tmp_path).names


@pytest.mark.parametrize(("name", "code"), [("unknown recurrences", "unknown-recurrence")])
def test_a_pattern_refuses_the_model_that_is_its_example(name: str, code: str, tmp_path: Path) -> None:
    make_tiny(REGISTRY[name].example).save_pretrained(tmp_path)
    with pytest.raises(Refusal) as found:
        chain_in(tmp_path)
    assert found.value.code == code


def test_no_pattern_changes_a_plain_llama(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    assert not {*changes_of(tmp_path).names}.intersection(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_pattern_names_model_types_that_transformers_has(name: str) -> None:
    pattern = REGISTRY[name]
    assert pattern.example in pattern.model_types and {*pattern.model_types} <= {*text_types()}
    assert pattern.serves


def test_a_new_pattern_is_one_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that adds up its inner layer as a difference from what is negated, twice."""

    class Subtracting(modeling_llama.LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.rsub(-super().forward(x), torch.zeros((), device=x.device))

    def negate(graph: ModelGraph) -> None:
        for node in graph.graph_module.graph.find_nodes(op="call_function", target=aten.rsub.Tensor):
            (negated, _) = node.args
            assert negated.target is aten.neg.default
            node.replace_all_uses_with(negated.args[0])
        graph.graph_module.graph.eliminate_dead_code()

    def refuse(model: Any, longest: int) -> None:
        if longest > model.config.max_position_embeddings:
            raise Refusal("too-long", "the model has fewer positions", remedy="give a shorter --context")

    monkeypatch.setattr(modeling_llama, "LlamaMLP", Subtracting)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    name = "differences"
    monkeypatch.setitem(REGISTRY, name, Pattern(name, "", (), ""))
    register(
        Pattern(
            name,
            serves="models that write a sum as a difference from what is negated",
            model_types=("llama",),
            example="llama",
            check=refuse,
            rewrites=(Rewrite(negate, operators=(aten.rsub.Tensor,)),),
        )
    )
    changes = Changes()
    chain = chain_in(tmp_path, changes=changes)
    assert changes.names[0] == name
    (change, *_) = changes
    assert (change.removed["rsub"], change.removed["neg"]) == (2, 2)
    assert [*change.modules] == ["model.layers.*.mlp"]
    assert difference_from_model(chain, str(tmp_path), None) < 1e-5
    with pytest.raises(Refusal, match="fewer positions"):
        chain_in(tmp_path, longest=33)
