"""The span check recovers rows that are shorter than the rank, and makes no claim about others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prge.model_spec import AdaptedModule
from server_export.evidence.leak.span import compute_spans, read_prefixes, residuals
from tests.server_export.evidence.leak.victims import make_rows, make_victim, task_form, text_form


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma2"])
@pytest.mark.parametrize("seed", range(3))
def test_the_span_check_finds_rows_of_four_tokens_at_rank_eight(architecture: str, seed: int) -> None:
    victim = make_victim(8, architecture, seed)
    form = text_form(4)
    rows = make_rows(form, 1, seed)
    spans = compute_spans(victim.modules, victim.gradients(form, rows)[0][0])
    result = read_prefixes(victim, form, spans, count=1, beam=8)
    # The last token of a text is only a target.
    assert result[0].tolist() == rows.tokens[0, :3].tolist()


def test_the_span_check_finds_all_tokens_of_a_task() -> None:
    victim, form = make_victim(16), task_form(4)
    rows = make_rows(form, 1)
    spans = compute_spans(victim.modules, victim.gradients(form, rows)[0][0])
    assert read_prefixes(victim, form, spans, count=1, beam=8)[0].tolist() == rows.tokens[0].tolist()


def test_the_span_check_finds_both_rows_of_a_batch() -> None:
    victim, form = make_victim(16), text_form(4)
    rows = make_rows(form, 2)
    spans = compute_spans(victim.modules, victim.gradients(form, rows)[0].mean(0))
    result = read_prefixes(victim, form, spans, count=2, beam=16)
    assert sorted(result.tolist()) == sorted(rows.tokens[:, :3].tolist())


def test_as_many_tokens_as_the_rank_show_nothing() -> None:
    victim, form = make_victim(4), text_form(8)
    gradient = victim.gradients(form, make_rows(form, 1))[0][0]
    assert not compute_spans(victim.modules, gradient)


def test_residuals_are_those_of_least_squares() -> None:
    draw = np.random.default_rng(0)
    gradient = draw.normal(size=(6, 2)) @ draw.normal(size=(2, 9))
    spans = compute_spans((AdaptedModule("layer", 6, 5, 9),), torch.from_numpy(gradient.ravel()))
    inputs = draw.normal(size=(7, 6))
    inside = gradient @ np.linalg.lstsq(gradient, inputs.T, rcond=None)[0]
    expected = np.log(np.linalg.norm(inputs.T - inside, axis=0) / np.linalg.norm(inputs, axis=1))
    result = residuals(spans, {"layer": torch.from_numpy(inputs)})
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6)


def test_residuals_are_means_over_layers() -> None:
    basis = torch.eye(3, dtype=torch.float64)[:, :1]
    spans = {"one": basis, "two": basis}
    inside, outside = torch.tensor([[1.0, 0, 0]]), torch.tensor([[0, 1.0, 0]])
    mixed = residuals(spans, {"one": inside, "two": outside})
    twice = residuals(spans, {"one": inside, "two": inside})
    assert float(mixed) == pytest.approx(float(twice) / 2)
