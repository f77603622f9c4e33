"""Matching of embeddings to reports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server_export.evidence.leak.matching import difference, match
from server_export.evidence.leak.reports import ReportView, make_report
from server_export.evidence.leak.rows import Rows
from server_export.evidence.leak.settings import LeakSettings, MatchingObjective
from server_export.evidence.leak.target import AttackTarget, open_target
from tests.server_export.evidence.leak.victims import make_rows, make_victim, text_form

OBJECTIVES: list[MatchingObjective] = ["dlg", "cosine"]


@pytest.fixture(scope="module")
def trained() -> AttackTarget:
    """Return the demo's trained model, since random embeddings carry no meaning."""
    return open_target(LeakSettings(model="demo", rows=Path("demo"), target_modules=["o_proj", "down_proj"]))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_wrong_token_becomes_the_right_one(trained: AttackTarget, objective: MatchingObjective) -> None:
    victim = trained.victim(rank=8, seed=0)
    form = text_form(8)
    right, wrong = (
        trained.tokenizer.encode(f"On Wednesday {name} visited the restaurant in Windmere")
        for name in ("Max", "Emma")
    )
    rows, guess = (Rows(torch.tensor([tokens]), torch.tensor([0])) for tokens in (right, wrong))
    report = make_report(ReportView(), victim.gradients(form, rows)[0])
    assert match(victim, form, report, guess, objective, 100).tokens.tolist() == [right]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_right_report_differs_by_nothing(objective: MatchingObjective) -> None:
    numbers = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert float(difference(objective, numbers, numbers)) == pytest.approx(0, abs=1e-6)
    assert float(difference(objective, -numbers, numbers)) > 1


def test_only_the_cosine_forgets_the_size() -> None:
    numbers = torch.randn(50, generator=torch.Generator().manual_seed(0))
    result = {objective: float(difference(objective, 2 * numbers, numbers)) for objective in OBJECTIVES}
    assert result["cosine"] == pytest.approx(0, abs=1e-6)
    assert result["dlg"] == pytest.approx(1)


def test_zero_steps_change_nothing() -> None:
    victim, form = make_victim(4), text_form(4)
    rows = make_rows(form, 2)
    report = make_report(ReportView(), victim.gradients(form, rows)[0])
    assert torch.equal(match(victim, form, report, rows, "cosine", 0).tokens, rows.tokens)
