"""Tests of rounds that learn from ratings while serving: good answers are liked, bad ones disliked."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_runner import run as run_verb
from device_runner.serving.history import FEEDBACK
from device_runner.serving.learning import plan_rounds
from device_runner.serving.rounds import read_retained_examples
from device_runner.serving.settings import LearnObjective
from device_runner.session.settings import EngineFlags, RunSettings
from prge.cli.settings import settings_to_yaml
from prge.data.feedback_examples import FeedbackExamples
from prge.data.readers.feedback import AnswerRecord, Fields, append_feedback
from prge.data.tokenization.tokenizer import load_bundle_tokenizer
from prge.errors import ConfigError
from prge.formats.adapter import Adapter
from prge.formats.bundle import open_bundle
from prge.formats.journal import Journal
from prge.formats.stored_settings import write_settings
from prge.objectives.examples import Example
from prge.objectives.preferences import describe_objective, make_objective
from prge.objectives.scoring import score
from tests.device_runner.numpy_device import Killed, write_films
from tests.device_runner.serving.learning_workspace import (
    EVERY,
    WORDS,
    Workspace,
    feedback,
    without_seconds,
)
from tests.refusals import raises
from tests.tiers import second_tier

OBJECTIVES: tuple[LearnObjective, ...] = ("kto", "grpo")
# The two answers have no token in common but the end-of-sequence token.
GOOD, BAD = "film", " No"
# Enough to move the small model's log-probabilities of answers to other questions.
THOROUGH: dict[str, Any] = {"learning_rate": 0.2, "learn_epochs": 8.0}


def rated(number: int, rating: str, answer: str = "") -> Fields:
    """Return a row of feedback with a rating."""
    answer = answer or (GOOD if rating == "good" else BAD)
    record = AnswerRecord(f"cmpl-{number}", "bundle", "", {"prompt": WORDS[number]}, answer, {})
    return record.to_feedback(rating)


def give(workspace: Workspace, rows: Sequence[Fields]) -> None:
    append_feedback(workspace.learn / FEEDBACK, rows)


def log_probabilities(workspace: Workspace, adapter: Adapter, rows: Sequence[Fields]) -> list[float]:
    """Return the mean log-probability per token of each row's answer."""
    bundle = open_bundle(workspace.folder / "bundle")
    examples = FeedbackExamples(load_bundle_tokenizer(bundle), bundle.chain.model)
    answers = [example for row in rows for example in examples.build(row)]
    engine = workspace.device.open_engine(bundle).engine
    return [float(each[0]) for each in score(engine, adapter, answers).scores]


def changes(workspace: Workspace, rows: Sequence[Fields]) -> list[float]:
    """Return by how much the served adapter changed the log-probability of each row's answer."""
    (served,) = workspace.served
    start = log_probabilities(workspace, Adapter.zeros(served.modules), rows)
    now = log_probabilities(workspace, served, rows)
    return [after - before for before, after in zip(start, now, strict=True)]


def test_bad_ratings_make_their_answers_less_likely(workspace: Workspace) -> None:
    rows = [rated(number, "bad") for number in range(EVERY)]
    give(workspace, rows)
    _, result = workspace.learnt(learn_objective="kto")
    assert (result["status"], result["learnt"]) == ("served", 3)
    assert result["held_back"]["rows"] == 1
    assert result["held_back"]["after"] < result["held_back"]["before"]
    assert max(changes(workspace, rows)) < 0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_good_answers_become_more_likely_and_bad_ones_less(
    workspace: Workspace, objective: LearnObjective
) -> None:
    ratings = "good", "bad", "good", "good"
    rows = [rated(number, rating) for number, rating in enumerate(ratings)]
    give(workspace, rows)
    _, result = workspace.learnt(learn_objective=objective, **THOROUGH)
    assert result["status"] == "served"
    assert np.sign(changes(workspace, rows)).tolist() == [1, -1, 1, 1]


def test_the_better_adapter_lowers_the_loss_of_good_answers_minus_that_of_bad_ones(
    workspace: Workspace,
) -> None:
    """The third question is held out, here with an answer of each rating."""
    held_out = [rated(2, "good"), rated(2, "bad")]
    give(workspace, [rated(0, "good"), rated(1, "bad"), *held_out])
    _, result = workspace.learnt(learn_objective="kto", **THOROUGH)
    assert result["status"] == "served"
    good, bad = log_probabilities(workspace, Adapter.zeros(workspace.served[0].modules), held_out)
    assert result["held_back"]["before"] == pytest.approx(bad - good)
    good, bad = log_probabilities(workspace, workspace.served[0], held_out)
    assert result["held_back"]["after"] == pytest.approx(bad - good)


def test_an_adapter_that_harms_good_answers_is_not_served(workspace: Workspace) -> None:
    """Bad answers became less likely, and so did a good one that resembles them."""
    held_out = [rated(2, "good", " Non film film"), rated(2, "bad")]
    give(workspace, [rated(0, "bad"), rated(1, "bad"), *held_out])
    _, result = workspace.learnt(learn_objective="kto")
    assert result["held_back"]["after"] < result["held_back"]["before"]
    assert (result["status"], result["why"]) == (
        "refused", "good answers of the held-out feedback became less likely",
    )  # fmt: skip


@pytest.mark.parametrize("rating", ["good", "bad"])
def test_equal_ratings_teach_grpo_nothing(workspace: Workspace, rating: str) -> None:
    give(workspace, [rated(number, rating) for number in range(EVERY)])
    _, result = workspace.learnt(learn_objective="grpo")
    assert (result["status"], result["learnt"]) == ("refused", 0)
    assert result["why"] == f"all answers are {rating}: grpo learns only from differences between ratings"
    assert not (workspace.learn / "rounds/0001").exists()
    # The next round learns these rows, too.
    other = "good" if rating == "bad" else "bad"
    give(workspace, [rated(number, other) for number in range(4, 4 + EVERY)])
    assert workspace.learnt(learn_objective="grpo")[-1]["learnt"] == 4 + 3


def test_retained_rows_are_liked_answers(workspace: Workspace, tmp_path: Path) -> None:
    """So grpo learns from bad ratings alone."""
    rows = [rated(number, "bad", "film") for number in range(EVERY)]
    give(workspace, rows)
    kept: dict[str, Any] = {"kept": tmp_path / "kept.jsonl", "may_lose": 9.0}
    _, result = workspace.learnt(learn_objective="grpo", **kept, **THOROUGH)
    assert (result["status"], result["kept"]["metric"]) == ("served", "-loss")
    assert max(changes(workspace, rows)) < 0


def test_rows_of_a_task_with_candidates_only_judge(workspace: Workspace, tmp_path: Path) -> None:
    write_films(tmp_path)
    bundle = open_bundle(workspace.folder / "bundle")
    settings = RunSettings(bundle.folder, tmp_path / "train.jsonl", tmp_path, dev=tmp_path / "dev.jsonl")
    tokenizer = load_bundle_tokenizer(bundle)

    def retained(**changed: Any) -> tuple[list[Example], list[Example]]:
        examples = read_retained_examples(replace(settings, **changed), tokenizer, bundle)
        return examples.replayed, examples.judged

    task = str(tmp_path / "task.yaml")
    for objective in OBJECTIVES:
        replayed, judged = retained(task=task, objective=objective)
        assert not replayed and len(judged) == 20
        replayed, judged = retained(train=tmp_path / "kept.jsonl", dev=None, objective=objective)
        assert replayed and all(each.liked for each in replayed)
        assert judged and all(each.liked is None for each in judged)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_earlier_feedback_is_replayed_with_its_ratings(
    workspace: Workspace, objective: LearnObjective
) -> None:
    feedback(workspace.learn / FEEDBACK, 3 * EVERY)
    _, *results = workspace.learnt(learn_objective=objective)
    assert [each["status"] for each in results[:2]] == ["served", "served"]
    # A correction is two answers, a bad rating one. A row in five waits for the next round.
    assert [each["learnt"] for each in results] == [6, 8, 7]
    with Journal(workspace.learn / "rounds/0002/journal.jsonl", writable=False) as journal:
        start = journal.records[0]
        assert start["settings"]["objective"] == objective
        settings = RunSettings(Path(), Path(), Path(), objective=objective)
        assert start["objective"] == describe_objective(make_objective(objective, settings))


@pytest.mark.parametrize("objective", ["kto", *second_tier("grpo")])
def test_rounds_killed_at_any_time_resume_with_the_same_bits(
    workspace: Workspace, objective: LearnObjective
) -> None:
    feedback(workspace.learn / FEEDBACK, 2 * EVERY)
    content = (workspace.learn / FEEDBACK).read_bytes()
    history, bits = without_seconds(workspace.learnt(learn_objective=objective)), workspace.bits()
    restart(workspace, content)
    lives = 0
    while without_seconds(workspace.open(learn_objective=objective).history()) != history:
        learn_until_killed(workspace, (1, 2, 1, 5, 9)[lives % 5], objective)
        lives += 1
        assert lives < 60
    assert lives > 6 and workspace.bits() == bits and len(bits) == 2


def test_a_round_that_began_with_another_objective_begins_again(workspace: Workspace) -> None:
    feedback(workspace.learn / FEEDBACK, EVERY)
    content = (workspace.learn / FEEDBACK).read_bytes()
    objectives: tuple[LearnObjective, ...] = *OBJECTIVES, "completion"
    for objective in objectives:
        learn_until_killed(workspace, 2, objective)
        with Journal(workspace.learn / "rounds/0001/journal.jsonl", writable=False) as journal:
            assert journal.records[0]["settings"]["objective"] == objective and journal.steps
    workspace.learnt(learn_objective="kto")
    mixed = workspace.bits()
    restart(workspace, content)
    workspace.learnt(learn_objective="kto")
    assert mixed == workspace.bits() and mixed


def restart(workspace: Workspace, content: bytes) -> None:
    """Empty the folder, except for the feedback."""
    shutil.rmtree(workspace.learn)
    workspace.learn.mkdir()
    (workspace.learn / FEEDBACK).write_bytes(content)


def learn_until_killed(workspace: Workspace, calls: int, objective: LearnObjective) -> None:
    """Learn in a process that ends itself after some calls of the engine, as if it were killed."""
    workspace.device.calls_left = calls
    learning = workspace.open(learn_objective=objective)
    try:
        while learning.work():
            pass
    except Killed:
        pass
    workspace.device.calls_left = None


def test_a_previous_run_gives_its_learning_rate_but_not_its_objective(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workspace.device.replaces(monkeypatch, run_verb)
    begun: dict[str, Any] = {"bundle": tmp_path / "bundle", "train": tmp_path / "kept.jsonl"}
    begun["out"] = tmp_path / "run"
    run_verb.run(RunSettings(**begun, steps=2, quiet=True))
    bundle = open_bundle(tmp_path / "bundle")

    def settings_after(**changed: Any) -> RunSettings:
        write_settings(tmp_path / "run/config.yaml", settings_to_yaml(RunSettings(**begun, **changed)))
        flags = replace(workspace.flags, learn_objective="grpo", learning_rate=None)
        tokenizer = load_bundle_tokenizer(bundle)
        return plan_rounds(flags, EngineFlags(), tmp_path / "run", bundle, tokenizer)[0].settings

    settings = settings_after(loss_normalisation="token", learning_rate=0.07)
    assert (settings.objective, settings.loss_normalisation) == ("grpo", "example")
    assert settings.learning_rate == 0.07
    assert settings_after(objective="kto", beta=0.5).beta is None
    with raises(ConfigError, "clipping-compared-examples", containing="grpo"):
        settings_after(max_example_grad_norm=1.0)


def test_the_memory_of_a_step_counts_the_other_answers_of_kto(workspace: Workspace) -> None:
    bundle = open_bundle(workspace.folder / "bundle")

    def sequences(objective: LearnObjective) -> int:
        flags = replace(workspace.flags, learn_objective=objective)
        plan, _ = plan_rounds(flags, EngineFlags(), None, bundle, load_bundle_tokenizer(bundle))
        return plan.shape.sequences

    assert [sequences(each) for each in ("completion", "grpo", "kto")] == [4, 4, 8]
