"""Every pattern changes the model that is its example, none a plain Llama; a new one is one object."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from prge.errors import Refusal
from server_export.check.model import compare_with_model
from server_export.trace import patterns as registry
from server_export.trace.passes import Changes
from server_export.trace.patterns import REGISTRY, patterns, register
from tests.refusals import refusal
from tests.server_export.trace.graphs import chain_in
from tests.test_extending import code_with
from tests.tiny_models import save_model
from tests.tiny_types import make_classifier, make_tiny, text_types

# What only refuses models changes nothing of others.
REFUSING = {
    "chunked attention": "attention-chunk",
    "unknown recurrences": "unknown-recurrence",
}
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


@pytest.mark.parametrize(("name", "code"), REFUSING.items())
def test_a_pattern_refuses_the_model_that_is_its_example(name: str, code: str, tmp_path: Path) -> None:
    make_tiny(REGISTRY[name].example).save_pretrained(tmp_path)
    with refusal(code):
        # Of texts longer than any chunk.
        chain_in(tmp_path, longest=1_000_000)


def test_no_pattern_changes_a_plain_llama(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    assert not {*changes_of(tmp_path).names}.intersection(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_pattern_names_model_types_that_transformers_has(name: str) -> None:
    pattern = REGISTRY[name]
    assert pattern.example in pattern.model_types and {*pattern.model_types} <= {*text_types()}
    assert pattern.serves


class LogAddExp(modeling_llama.LlamaMLP):
    """An inner layer whose activation is log(exp(x) + exp(0)), a softplus in other words."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(torch.logaddexp(gate, torch.zeros_like(gate)) * self.up_proj(x))


def refuse_longer(model: Any, longest: int) -> None:
    if longest > model.config.max_position_embeddings:
        raise Refusal("too-long", "the model has fewer positions", remedy="give a shorter --context")


def test_a_new_pattern_is_one_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of docs/how-to/extend.md, as it stands there."""
    monkeypatch.setattr(modeling_llama, "LlamaMLP", LogAddExp)
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
    # What a test registers is gone behind it.
    monkeypatch.setattr(registry, "REGISTRY", dict(REGISTRY))
    exec(code_with("write_softplus"), {})
    pattern = register(replace(registry.REGISTRY["softplus"], check=refuse_longer))
    assert pattern in patterns()
    changes = Changes()
    chain = chain_in(tmp_path, changes=changes)
    first = next(iter(changes))
    assert (first.name, first.removed, first.added) == (
        "softplus",
        {"logaddexp": 2, "full": 2},
        {"softplus": 2},
    )
    assert [*first.modules] == ["model.layers.*.mlp"]
    assert compare_with_model(chain, str(tmp_path), None).difference < 1e-5
    with refusal("too-long"):
        chain_in(tmp_path, longest=33)
