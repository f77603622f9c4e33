"""Attacks on whole reports: they find rows where the report has them; with noise the prior is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from server_export.evidence.leak import prior, reports
from server_export.evidence.leak.attack import Attack, attack
from server_export.evidence.leak.reports import Report
from server_export.evidence.leak.rows import Form, Rows
from server_export.evidence.leak.settings import LeakSettings
from server_export.evidence.leak.victim import Victim
from tests.server_export.evidence.leak.victims import make_rows, make_victim, task_form, text_form


def attacked(victim: Victim, form: Form, report: Report, **changes: Any) -> Attack:
    fields: dict[str, Any] = {"preset": "demo", "samples": 64, "guesses": 3000, **changes}
    generator = torch.Generator().manual_seed(0)
    written = prior.sample(victim, form, fields["samples"], generator)
    return attack(victim, form, report, written, LeakSettings(**fields), generator)


def same(guess: Rows, rows: Rows) -> bool:
    return torch.equal(guess.tokens, rows.tokens) and torch.equal(guess.labels, rows.labels)


@pytest.mark.parametrize("seed", range(3))
def test_finds_a_row_of_four_tokens_at_rank_eight_from_its_gradient(seed: int) -> None:
    victim, form = make_victim(8, seed=seed), text_form(4)
    rows = make_rows(form, 1, seed)
    found = attacked(victim, form, reports.exact(victim.gradients(form, rows)[0]))
    assert found.spanned
    assert same(found.guess, rows)


def test_finds_a_row_and_its_label_in_a_task() -> None:
    victim, form = make_victim(16), task_form(3)
    rows = make_rows(form, 1)
    assert same(attacked(victim, form, reports.exact(victim.gradients(form, rows)[0])).guess, rows)


def test_finds_a_row_from_few_scalars() -> None:
    victim, form = make_victim(2), text_form(3)
    rows = make_rows(form, 1)
    made = reports.directions_of(victim.modules, 0, 10, 4)
    report = reports.scalars(victim.gradients(form, rows)[0], made, queries=4)
    found = attacked(victim, form, report)
    assert not found.spanned
    assert same(found.guess, rows)


def test_as_many_scalars_as_values_are_the_gradient() -> None:
    victim, form = make_victim(4, num_hidden_layers=1), text_form(3)
    rows = make_rows(form, 1)
    made = reports.directions_of(victim.modules, 0, -(-victim.size // 16) + 20, 16)
    report = reports.scalars(victim.gradients(form, rows)[0], made, queries=16)
    found = attacked(victim, form, report, samples=2)
    assert found.spanned
    assert same(found.guess, rows)


def test_a_search_stays_within_its_gradients() -> None:
    victim, form = make_victim(4), text_form(6)
    report = reports.exact(victim.gradients(form, make_rows(form, 1))[0])
    found = attacked(victim, form, report, samples=32, guesses=300, span=False)
    # What is tried at once isn't cut short.
    assert found.tried <= 300 + 4 * victim.vocabulary


def test_noise_leaves_the_guess_of_the_prior() -> None:
    victim, form = make_victim(4), text_form(4)
    draw = torch.Generator().manual_seed(3)
    written, shares = prior.sample(victim, form, 256, draw)
    blind = prior.consensus(written, shares).tokens
    recovered = {"report": 0.0, "prior": 0.0}
    for seed in range(6):
        rows = make_rows(form, 1, seed)
        own = victim.gradients(form, rows)[0]
        report = reports.noised(reports.exact(own), own, 1e4, draw)
        settings = LeakSettings(preset="demo", guesses=600, beam=1, matching_steps=5)
        guess = attack(victim, form, report, (written, shares), settings, draw).guess
        recovered["report"] += float((guess.tokens == rows.tokens).float().mean()) / 6
        recovered["prior"] += float((blind == rows.tokens).float().mean()) / 6
    assert abs(recovered["report"] - recovered["prior"]) < 0.15


def test_the_prior_answers_what_its_texts_agree_on() -> None:
    tokens = torch.tensor([[1, 2, 3], [1, 2, 4], [5, 2, 3], [6, 7, 8]])
    rows = Rows(tokens, torch.zeros(4, dtype=torch.long))
    assert prior.consensus(rows, torch.zeros(4)).tokens.tolist() == [[1, 2, 3]]
    # Unless one of them is far likelier than the others.
    assert prior.consensus(rows, torch.tensor([0.0, 0, 0, 9])).tokens.tolist() == [[6, 7, 8]]
