"""Attacks on whole reports: they recover rows that a report contains; with noise, the prior is left."""

from __future__ import annotations

import pytest
import torch

from server_export.evidence.leak import prior
from server_export.evidence.leak.reports import Report, ReportView, make_report, projections
from server_export.evidence.leak.rows import KnownForm, Rows
from server_export.evidence.leak.search import Search, attack, span_rows
from server_export.evidence.leak.settings import LeakSettings
from server_export.evidence.leak.victim import Victim
from tests.server_export.evidence.leak.victims import make_rows, make_victim, task_form, text_form

EXACT = ReportView()


def attacked(victim: Victim, form: KnownForm, report: Report, samples: int = 64, guesses: int = 3000) -> Rows:
    generator = torch.Generator().manual_seed(0)
    written = prior.sample(victim, form, samples, generator)
    return attack(victim, form, report, written, LeakSettings(preset="demo", guesses=guesses), generator)


def same(guess: Rows, rows: Rows) -> bool:
    return torch.equal(guess.tokens, rows.tokens) and torch.equal(guess.labels, rows.labels)


@pytest.mark.parametrize("seed", range(3))
def test_an_attack_finds_a_row_of_four_tokens_at_rank_eight_from_its_gradient(seed: int) -> None:
    victim, form = make_victim(8, seed=seed), text_form(4)
    rows = make_rows(form, 1, seed)
    report = make_report(EXACT, victim.gradients(form, rows)[0])
    assert span_rows(victim, form, report, rows) is not None
    assert same(attacked(victim, form, report), rows)


def test_an_attack_finds_a_row_and_its_label_in_a_task() -> None:
    victim, form = make_victim(16), task_form(3)
    rows = make_rows(form, 1)
    assert same(attacked(victim, form, make_report(EXACT, victim.gradients(form, rows)[0])), rows)


def test_an_attack_finds_a_row_from_few_projected_gradients() -> None:
    victim, form = make_victim(2), text_form(3)
    rows = make_rows(form, 1)
    report = make_report(projections(victim.modules, 0, 10, 4), victim.gradients(form, rows)[0])
    assert span_rows(victim, form, report, rows) is None
    assert same(attacked(victim, form, report), rows)


def test_as_many_projections_as_values_are_the_gradient() -> None:
    victim, form = make_victim(4, num_hidden_layers=1), text_form(3)
    rows = make_rows(form, 1)
    view = projections(victim.modules, 0, -(-victim.size // 16) + 20, 16)
    report = make_report(view, victim.gradients(form, rows)[0])
    assert span_rows(victim, form, report, rows) is not None
    assert same(attacked(victim, form, report, samples=2), rows)


def test_a_search_stays_within_its_gradients() -> None:
    victim, form = make_victim(4), text_form(6)
    report = make_report(EXACT, victim.gradients(form, make_rows(form, 1))[0])
    draw = torch.Generator().manual_seed(0)
    search = Search(victim, form, report, draw, LeakSettings(preset="demo", guesses=300, objectives=[]))
    search.run(*prior.sample(victim, form, 32, draw))
    # A batch of trials isn't cut short.
    assert search.gradient_count <= 300 + 4 * victim.vocabulary


def test_noise_leaves_the_guess_of_the_prior() -> None:
    victim, form = make_victim(4), text_form(4)
    draw = torch.Generator().manual_seed(3)
    written, shares = prior.sample(victim, form, 256, draw)
    blind = prior.consensus(written, shares).tokens
    recovered = {"report": 0.0, "prior": 0.0}
    for seed in range(6):
        rows = make_rows(form, 1, seed)
        own = victim.gradients(form, rows)[0]
        report = make_report(EXACT, own, 1e4, draw)
        settings = LeakSettings(preset="demo", guesses=600, matching_steps=5)
        guess = attack(victim, form, report, (written, shares), settings, draw)
        recovered["report"] += float((guess.tokens == rows.tokens).float().mean()) / 6
        recovered["prior"] += float((blind == rows.tokens).float().mean()) / 6
    assert abs(recovered["report"] - recovered["prior"]) < 0.15


def test_the_prior_returns_the_consensus_of_its_texts() -> None:
    tokens = torch.tensor([[1, 2, 3], [1, 2, 4], [5, 2, 3], [6, 7, 8]])
    rows = Rows(tokens, torch.zeros(4, dtype=torch.long))
    assert prior.consensus(rows, torch.zeros(4)).tokens.tolist() == [[1, 2, 3]]
    # A text that is far more likely than the others wins against the consensus.
    assert prior.consensus(rows, torch.tensor([0.0, 0, 0, 9])).tokens.tolist() == [[6, 7, 8]]
