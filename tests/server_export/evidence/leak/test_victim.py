"""An adversary computes the same gradients as a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from device_runner.engines.opening import open_engine
from prge.engine import Target, TokenSequence
from prge.formats.bundle import open_bundle
from prge.formats.peft import read_peft
from prge.objectives.examples import Example
from prge.training.estimators.exact import Exact
from prge.training.estimators.protocol import Step
from server_export.evidence.leak.rows import KnownForm, Rows
from server_export.evidence.leak.settings import LeakSettings
from server_export.evidence.leak.target import open_target
from server_export.evidence.leak.victim import Victim
from tests.server_export.evidence.leak.victims import make_rows, make_victim, task_form, text_form


def example_of(form: KnownForm, rows: Rows) -> Example:
    """Return the first row as an example of a device."""
    tokens = (*form.prefix, *rows.tokens[0].tolist(), *form.suffix)
    if form.classes:
        targets = [Target(len(tokens) - 1, token, 1.0, index) for index, token in enumerate(form.classes)]
        return Example(1, (TokenSequence(tokens, tuple(targets)),), len(targets), int(rows.labels[0]))
    first = max(len(form.prefix), 1)
    targets = [Target(at - 1, tokens[at], 1 / (len(tokens) - first), 0) for at in range(first, len(tokens))]
    return Example(1, (TokenSequence(tokens, tuple(targets)),), 1, None)


def test_gradients_equal_those_of_the_engine(workshop: Path, tmp_path: Path) -> None:
    bundle = open_bundle(workshop / "bundle")
    engine = open_engine(bundle, "backward").engine
    adapter = read_peft(bundle.adapter, bundle.chain.modules)
    (tmp_path / "rows.jsonl").write_text('{"text": "a few words"}\n', encoding="utf-8")
    attacked = LeakSettings(model=str(workshop / "model"), bundle=bundle.folder, rows=tmp_path / "rows.jsonl")
    victim = open_target(attacked).victim(rank=2, seed=0)
    for form in (text_form(6), text_form(6, before=()), task_form(5)):
        rows = make_rows(form, 1)
        step = Step(adapter, [example_of(form, rows)], seed=0, number=0)
        expected = Exact().measure(engine, step).gradient
        result = victim.gradients(form, rows)[0][0].numpy()
        assert expected is not None
        np.testing.assert_allclose(result, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "opt"])
def test_every_row_has_the_gradient_that_it_has_alone(architecture: str) -> None:
    victim, form = make_victim(4, architecture), task_form(5)
    rows = make_rows(form, 3)
    gradients, _ = victim.gradients(form, rows)
    alone = torch.cat([victim.gradients(form, rows[torch.tensor([row])])[0] for row in range(3)])
    torch.testing.assert_close(gradients, alone, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("form", [text_form(5), task_form(4)])
def test_tokens_are_a_case_of_rows_that_are_none(form: KnownForm) -> None:
    victim = make_victim(4)
    rows = make_rows(form, 2)
    targets = torch.nn.functional.one_hot(rows.tokens, victim.vocabulary).float()
    soft = victim.soft_gradient(form, victim.embeddings[rows.tokens], targets, rows)
    torch.testing.assert_close(soft.detach(), victim.gradients(form, rows)[0])


def test_likelihood_is_the_product_of_predictions() -> None:
    victim = make_victim(4)
    for form in (text_form(5), text_form(5, before=()), task_form(5)):
        rows = make_rows(form, 1)
        each = victim.predictions(form, rows.tokens[0]).gather(1, rows.tokens[0][:, None])
        torch.testing.assert_close(victim.gradients(form, rows)[1][0], each.sum())


def inputs_of(victim: Victim, form: KnownForm, rows: Rows) -> torch.Tensor:
    """Return the first layer's inputs for a row's tokens, times lora_a^T: [tokens, rank]."""
    prefixes = [rows.tokens[:1, :count] for count in range(form.length)]
    name = victim.modules[0].name
    return torch.cat([victim.reduced_inputs(form, prefix)[name] for prefix in prefixes])


def test_a_gradient_lies_in_the_span_of_its_tokens_inputs() -> None:
    victim, form = make_victim(8), text_form(4)
    rows = make_rows(form, 1)
    module = victim.modules[0]
    gradient = victim.gradients(form, rows)[0][0, : module.rank * module.out_features]
    columns = gradient.reshape(module.rank, -1).double().numpy()
    basis = inputs_of(victim, form, rows).double().numpy().T
    inside = basis @ np.linalg.lstsq(basis, columns, rcond=None)[0]
    assert np.linalg.norm(columns - inside) < 1e-4 * np.linalg.norm(columns)
