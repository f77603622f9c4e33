"""Tests of learning while serving, with a numpy model: which adapter follows from which feedback."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_runner import run as run_verb
from device_runner.serving import learning as module
from device_runner.serving import rounds
from device_runner.serving.feedback_index import IndexEntry
from device_runner.serving.history import FEEDBACK, HISTORY, read_date
from device_runner.serving.learning import plan_rounds
from device_runner.serving.protocol import RequestError
from device_runner.serving.rounds import read_retained_examples, split_held_out
from device_runner.serving.settings import LearnFlags
from device_runner.session.sensors import SensorReading, Sensors
from device_runner.session.settings import EngineFlags, RunSettings
from prge.cli.settings import settings_to_yaml
from prge.data.readers.feedback import AnswerRecord, append_feedback, feedback_key, read_feedback, remove_rows
from prge.data.tokenization import chat
from prge.data.tokenization.tokenizer import load_bundle_tokenizer
from prge.errors import AdapterError, ConfigError, RunError
from prge.formats.bundle import open_bundle
from prge.formats.journal import Journal
from prge.formats.peft import read_lora, read_peft, write_lora
from prge.formats.stored_settings import write_settings
from tests.device_runner.numpy_device import Device, Killed
from tests.device_runner.serving.learning_workspace import (
    EVERY,
    WORDS,
    Workspace,
    feedback,
    take_round,
    without_seconds,
)
from tests.hostile_feedback import HOSTILE_FEEDBACK, HOSTILE_TEMPLATE, UNUSUAL_FEEDBACK, chat_feedback
from tests.refusals import raises
from tests.templates import random_adapter
from tests.workshop import write_rows


class LaterClock:
    """A clock that is past every timeout."""

    process_time = staticmethod(time.process_time)

    @staticmethod
    def monotonic() -> float:
        """Return seconds."""
        return time.monotonic() + 2 * module.SECONDS_TO_RETRY


def test_a_better_adapter_is_served_round_after_round(workspace: Workspace) -> None:
    feedback(workspace.learn / FEEDBACK, 3 * EVERY + 2)
    start, *rounds = workspace.learnt()
    assert start["status"] == "start" and not start["current"]
    assert [(each["version"], each["status"], each["parent"]) for each in rounds] == [
        (1, "served", 0), (2, "served", 1), (3, "served", 2)
    ]  # fmt: skip
    assert [each["current"] for each in rounds] == [False, False, True]
    for each in rounds:
        assert each["held_back"]["rows"] and each["held_back"]["after"] < each["held_back"]["before"]
    assert len(workspace.served) == 3 and workspace.messages[0].startswith(
        "adapter 1 from 4 rows: served, loss"
    )
    learning = workspace.open()
    assert learning.adapter.values.tobytes() == workspace.served[-1].values.tobytes()
    while learning.work():
        pass
    assert len(learning.history()) == 4  # two rows are too few


def test_a_bundle_without_backpropagation_learns_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    device.replaces(monkeypatch, rounds)
    device.write_bundle(tmp_path / "bundle")
    flags = LearnFlags(learn=tmp_path / "learn", learn_every=EVERY, learning_rate=0.02, learn_epochs=20)
    workspace = Workspace(tmp_path, device, flags)
    workspace.learn.mkdir()
    feedback(workspace.learn / FEEDBACK, EVERY)
    assert [each["status"] for each in workspace.learnt()] == ["start", "served"]


def test_a_foreign_run_cannot_name_local_rows(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workspace.device.replaces(monkeypatch, run_verb)
    begun = {"bundle": tmp_path / "bundle", "train": tmp_path / "kept.jsonl"}
    run_verb.run(RunSettings(**begun, out=tmp_path / "run", steps=2, quiet=True))
    config = tmp_path / "run/config.yaml"
    config.write_text(f"# changed\n{config.read_text()}")
    start = read_peft(tmp_path / "run/final", open_bundle(tmp_path / "bundle").chain.modules)
    with raises(ConfigError, "path-outside") as caught:
        workspace.open(start, tmp_path / "run")
    assert caught.value.problems == [f"train: '{tmp_path / 'kept.jsonl'}'"]
    assert "--kept" in caught.value.remedy
    workspace.open(start, tmp_path / "run", kept=tmp_path / "kept.jsonl").close()


def test_learning_continues_a_run_with_its_rows_and_learning_rate(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workspace.device.replaces(monkeypatch, run_verb)
    begun = {"bundle": tmp_path / "bundle", "train": tmp_path / "kept.jsonl", "dev": tmp_path / "kept.jsonl"}
    run_verb.run(RunSettings(**begun, out=tmp_path / "run", steps=8, learning_rate=0.07, quiet=True))
    start = read_peft(tmp_path / "run/final", open_bundle(tmp_path / "bundle").chain.modules)
    feedback(workspace.learn / FEEDBACK, EVERY)
    learning = workspace.open(start, tmp_path / "run", learning_rate=None, may_lose=9.0)
    take_round(learning)
    _, result = learning.history()
    assert result["status"] == "served" and result["kept"]["rows"] == 16
    with Journal(workspace.learn / "rounds/0001/journal.jsonl", writable=False) as journal:
        begun = journal.records[0]["settings"]
        assert begun["learning_rate"] == 0.07 and begun["batch_size"] == 4 and begun["train_limit"] is None


def test_learning_continues_a_run_that_learned_from_a_reward_without_its_prompts(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The prompts of the run have no answers to retain."""
    workspace.device.replaces(monkeypatch, run_verb)
    begun = {"bundle": tmp_path / "bundle", "train": tmp_path / "kept.jsonl", "out": tmp_path / "run"}
    run_verb.run(RunSettings(**begun, steps=2, quiet=True))
    rewarded = RunSettings(
        **begun, reward="reward.yaml", num_generations=4, temperature=0.7, learning_rate=0.07
    )
    write_settings(tmp_path / "run/config.yaml", settings_to_yaml(rewarded))
    bundle = open_bundle(tmp_path / "bundle")
    flags = replace(workspace.flags, learning_rate=None)
    tokenizer = load_bundle_tokenizer(bundle)
    plan, has_retained = plan_rounds(flags, EngineFlags(), tmp_path / "run", bundle, tokenizer)
    assert not has_retained and plan.settings.reward is None
    assert (plan.settings.objective, plan.settings.learning_rate) == ("completion", 0.07)


@pytest.mark.parametrize("last", ["", "{{ '!' if loop.last and message.role == 'assistant' }}"])
def test_texts_and_conversations_are_learnt_together(workspace: Workspace, last: str) -> None:
    """This holds also if the template renders an answer differently once other messages follow."""
    shutil.rmtree(workspace.folder / "bundle")
    template = "{% for message in messages %}{{ message.content }}" + last + " {% endfor %}"
    workspace.device.write_bundle(workspace.folder / "bundle", chat_template=template)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    rows = [AnswerRecord("c", "m", "", {"messages": messages[number:]}, "b", {}) for number in (0, 2)]
    append_feedback(workspace.learn / FEEDBACK, [row.to_feedback(correction="d") for row in rows])
    feedback(workspace.learn / FEEDBACK, EVERY - 2)
    _, result = workspace.learnt()
    assert (result["status"], result["learnt"], result["held_back"]["rows"]) == ("served", 3, 1)


def test_template_errors_are_reported(workspace: Workspace) -> None:
    shutil.rmtree(workspace.folder / "bundle")
    template = (
        "{% for m in messages %}{% if m.content == 'e' %}{{ raise_exception('no e') }}{% endif %}"
        "{{ m.content }} {% endfor %}"
    )
    workspace.device.write_bundle(workspace.folder / "bundle", chat_template=template)
    prompt_fields = {"messages": [{"role": "user", "content": "c"}]}
    row = AnswerRecord("refused", "m", "", prompt_fields, "b", {}).to_feedback(correction="e")
    append_feedback(workspace.learn / FEEDBACK, [row])
    row = AnswerRecord("learnt", "m", "", prompt_fields, "b", {}).to_feedback(correction="d")
    append_feedback(workspace.learn / FEEDBACK, [row])
    feedback(workspace.learn / FEEDBACK, EVERY - 1)
    _, result = workspace.learnt()
    assert result["status"] == "served"
    [line] = (line for line in workspace.messages if "refused" in line)
    assert line.startswith("feedback refused is not usable: the chat template refuses the messages: no e")


def with_template(workspace: Workspace) -> list[str]:
    """Write a bundle whose template refuses some messages, and return valid rows of feedback."""
    shutil.rmtree(workspace.folder / "bundle")
    workspace.device.write_bundle(workspace.folder / "bundle", chat_template=HOSTILE_TEMPLATE)
    messages = [[{"role": "user", "content": word}] for word in WORDS[:3]]
    chats = [AnswerRecord(each[0]["content"], "m", "", {"messages": each}, "b", {}) for each in messages]
    path = workspace.folder / "honest.jsonl"
    append_feedback(path, [each.to_feedback(correction="d") for each in chats])
    feedback(path, 2 * EVERY - len(chats))
    return path.read_text().splitlines()


@pytest.mark.whole
def test_hostile_rows_do_not_change_the_adapter(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.2)
    honest = with_template(workspace)

    def learnt(lines: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
        shutil.rmtree(workspace.learn)
        workspace.learn.mkdir()
        (workspace.learn / FEEDBACK).write_text("".join(line + "\n" for line in lines))
        return without_seconds(workspace.learnt()), workspace.bits()

    expected = learnt(honest)
    assert [each["status"] for each in expected[0]] == ["start", "served", "served"] and len(expected[1]) == 2
    for number, (name, row) in enumerate(HOSTILE_FEEDBACK.items()):
        at = number % (len(honest) + 1)
        assert learnt([*honest[:at], json.dumps(row), *honest[at:]]) == expected, name
    hostile = [json.dumps(row) for row in HOSTILE_FEEDBACK.values()]
    every = [*hostile[:9], *honest[:2], *hostile[9:20], *honest[2:], *hostile[20:]]
    assert learnt(every) == expected


@pytest.mark.parametrize("name", UNUSUAL_FEEDBACK)
def test_unusual_rows_fail_no_round(workspace: Workspace, name: str) -> None:
    honest = with_template(workspace)
    lines = [json.dumps(UNUSUAL_FEEDBACK[name]), *honest[:-1]]
    (workspace.learn / FEEDBACK).write_text("".join(line + "\n" for line in lines))
    _, *rounds = workspace.learnt()
    assert [each["feedback"] for each in rounds] == [EVERY, EVERY]
    assert all(each["status"] in ("served", "refused") for each in rounds), rounds


def test_a_model_without_a_template_learns_only_the_texts(workspace: Workspace) -> None:
    (workspace.learn / FEEDBACK).write_text(json.dumps(chat_feedback("a")) + "\n")
    feedback(workspace.learn / FEEDBACK, EVERY)
    result = workspace.learnt()[-1]
    assert (result["status"], result["feedback"]) == ("served", EVERY)


def test_a_folder_keeps_its_first_date(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat templates write the date into rows, which are read again whenever the server starts."""
    workspace.open().close()

    class LaterDate(date):
        @classmethod
        def today(cls) -> LaterDate:
            return cls.fromisoformat("2027-01-02")

    monkeypatch.setattr("prge.training.settings.date", LaterDate)
    feedback(workspace.learn / FEEDBACK, EVERY)
    workspace.learnt()
    learnt = workspace.processes[0].round.settings.date
    assert learnt == read_date(workspace.learn) == date.today().isoformat() != "2027-01-02"


def test_learning_killed_at_any_time_resumes_with_the_same_bits(workspace: Workspace, tmp_path: Path) -> None:
    feedback(workspace.learn / FEEDBACK, 3 * EVERY)
    kept = {"kept": tmp_path / "kept.jsonl", "may_lose": 0.5}
    history, bits = without_seconds(workspace.learnt(**kept)), workspace.bits()
    content = (workspace.learn / FEEDBACK).read_bytes()
    shutil.rmtree(workspace.learn)
    workspace.learn.mkdir()
    # The same rows arrive one by one, and the process is killed repeatedly.
    lines, lives, kills = content.splitlines(keepends=True), 0, 0
    while lines or without_seconds(workspace.open(**kept).history()) != history:
        if lines:
            with (workspace.learn / FEEDBACK).open("ab") as stream:
                stream.write(lines.pop(0))
        workspace.device.calls_left = (1, 1, 2, 1, 3, 2, 16)[lives % 7]
        lives += 1
        learning = workspace.open(**kept)
        try:
            while learning.work():
                pass
        except Killed:
            kills += 1
        workspace.device.calls_left = None
        assert lives < 100
    assert kills > 6
    assert workspace.bits() == bits and len(bits) == 3


def test_an_adapter_that_harms_retained_rows_is_not_served(workspace: Workspace, tmp_path: Path) -> None:
    feedback(workspace.learn / FEEDBACK, 2 * EVERY)
    _, *rounds = workspace.learnt(kept=tmp_path / "kept.jsonl", may_lose=0.0, replay=0.0)
    assert [each["status"] for each in rounds] == ["refused", "refused"]
    assert {each["why"] for each in rounds} == {"worse on the retained rows"}
    # The second round learns its own rows without the held-out ones, and all four rows of the first round.
    assert [each["learnt"] for each in rounds] == [3, 6]
    assert rounds[0]["kept"]["metric"] == "-loss" and not workspace.served
    assert not any((workspace.learn / "rounds").iterdir())


def test_an_adapter_that_is_no_better_is_not_served(workspace: Workspace) -> None:
    feedback(workspace.learn / FEEDBACK, 2)
    # The held-out rows ask for the opposite.
    feedback(workspace.learn / FEEDBACK, 1, "\x00\x01", start=2)
    feedback(workspace.learn / FEEDBACK, 1, start=3)
    _, result = workspace.learnt(learning_rate=0.5)
    assert result["status"] == "refused" and result["why"].startswith("no better")


def test_bad_ratings_alone_teach_nothing(workspace: Workspace) -> None:
    rows = [
        AnswerRecord(str(n), "m", "", {"prompt": str(n)}, " a", {}).to_feedback("bad") for n in range(EVERY)
    ]
    append_feedback(workspace.learn / FEEDBACK, rows)
    _, result = workspace.learnt()
    assert (result["status"], result["learnt"]) == ("refused", 0) and "no good ratings" in result["why"]


def test_the_last_adapter_can_be_reverted(workspace: Workspace) -> None:
    feedback(workspace.learn / FEEDBACK, 2 * EVERY)
    learning = workspace.open()
    with pytest.raises(RequestError) as caught:
        learning.revert(0)
    assert caught.value.status == 409
    while learning.work():
        pass
    first = workspace.served[0]
    assert learning.revert(2) == 1
    assert workspace.served[-1].values.tobytes() == first.values.tobytes()
    learning.close()
    learning = workspace.open()
    assert [each["status"] for each in learning.history()] == ["start", "served", "taken back"]
    assert learning.adapter.values.tobytes() == first.values.tobytes()
    assert learning.revert(1) == 0 and not workspace.served[-1].values.any()
    # The rows of the reverted adapters are not learned again.
    feedback(workspace.learn / FEEDBACK, EVERY, start=20)
    learning.close()
    result = workspace.learnt()[-1]
    assert (result["parent"], result["learnt"], result["status"]) == (0, 2, "served")


def test_reverting_the_start_of_a_round_abandons_the_round(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    feedback(workspace.learn / FEEDBACK, EVERY)
    learning = workspace.open()
    take_round(learning)
    feedback(workspace.learn / FEEDBACK, EVERY, start=EVERY)
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Killed

    monkeypatch.setattr(workspace.device, "count", count)
    with pytest.raises(Killed):
        take_round(learning)
    monkeypatch.undo()
    workspace.device.replaces(monkeypatch, rounds)
    assert learning.revert(1) == 0
    assert [each["status"] for each in learning.history()] == ["start", "taken back", "abandoned"]
    assert workspace.processes[-1].has_ended and not any((workspace.learn / "rounds").iterdir())
    take_round(learning)
    last = learning.history()[-1]
    assert (last["parent"], last["feedback"], last["status"]) == (0, EVERY, "served")


def test_the_process_of_a_round_is_paused_during_generation(workspace: Workspace) -> None:
    feedback(workspace.learn / FEEDBACK, EVERY)
    learning = workspace.open()
    learning.pause(True)
    assert learning.work() and [each.is_paused for each in workspace.processes] == [
        True
    ]  # a new process starts paused
    assert learning.work() and learning.history()[-1]["status"] == "learning"
    learning.pause(True)
    learning.pause(False)
    assert [each.is_paused for each in workspace.processes] == [
        True
    ]  # another completion is still in progress
    learning.pause(False)
    assert [each.is_paused for each in workspace.processes] == [False]
    take_round(learning)
    assert learning.history()[-1]["status"] == "served"
    # A process that has ended is not signalled.
    learning.pause(True)
    assert [each.is_paused for each in workspace.processes] == [False]


def test_deleting_a_row_ends_the_process_that_learns_it(workspace: Workspace) -> None:
    feedback(workspace.learn / FEEDBACK, EVERY)
    learning = workspace.open()
    learning.pause(True)
    assert learning.work()
    remove_rows(workspace.learn / FEEDBACK, lambda number, fields, line: number == 1)
    assert learning.work() and workspace.processes[0].has_ended
    learning.pause(False)
    take_round(learning)
    first, second = (each.round.learnt for each in workspace.processes)
    assert (len(first), len(second)) == (3, 2) and learning.history()[-1]["learnt"] == 2


def test_deleting_a_row_during_a_round_restarts_the_round(workspace: Workspace) -> None:
    feedback(workspace.learn / FEEDBACK, EVERY)
    workspace.device.calls_left = 3
    with pytest.raises(Killed):
        take_round(workspace.open())
    workspace.device.calls_left = None
    remove_rows(workspace.learn / FEEDBACK, lambda number, fields, line: number == 1)
    result = workspace.learnt()[-1]
    assert (result["status"], result["learnt"], result["feedback"]) == ("served", 2, EVERY)
    with Journal(workspace.learn / "rounds/0001/journal.jsonl", writable=False) as journal:
        assert {row for step in journal.records[1:] for row in step["rows"]} <= {1, 2}
    texts = b"".join(path.read_bytes() for path in workspace.learn.rglob("*") if path.is_file())
    assert b"good good" not in texts


@pytest.mark.parametrize("at", ["first step", "last step", "judgement"])
def test_an_adapter_with_a_deleted_row_is_not_served(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The adapter has the same bits as one that never saw the row."""

    def forget() -> None:
        remove_rows(workspace.learn / FEEDBACK, lambda number, fields, line: number == 1)

    feedback(workspace.learn / FEEDBACK, EVERY)
    content = (workspace.learn / FEEDBACK).read_bytes()
    workspace.device.calls_left = 0
    with pytest.raises(Killed):
        take_round(workspace.open())
    workspace.device.calls_left = None
    forget()
    workspace.learnt()
    expected = workspace.bits()
    shutil.rmtree(workspace.learn)
    workspace.learn.mkdir()
    (workspace.learn / FEEDBACK).write_bytes(content)
    workspace.served.clear()
    count, (last, calls) = 0, (0, 0)
    if at != "first step":
        monkeypatch.setattr(workspace.device, "count", lambda: None)
        # Count the calls of the steps and of the whole round.
        probe = replace(workspace, served=[], messages=[])
        total = 0

        def counted() -> None:
            nonlocal total
            total += 1

        monkeypatch.setattr(workspace.device, "count", counted)
        probe.learnt()
        last, calls = total - 2, total
        shutil.rmtree(workspace.learn)
        workspace.learn.mkdir()
        (workspace.learn / FEEDBACK).write_bytes(content)
    goal = {"first step": 1, "last step": last, "judgement": calls}[at]

    def hook() -> None:
        nonlocal count
        count += 1
        if count == goal:
            forget()

    monkeypatch.setattr(workspace.device, "count", hook)
    result = workspace.learnt()[-1]
    assert (result["status"], result["learnt"]) == ("served", 2) and len(workspace.served) == 1
    assert workspace.bits() == expected
    texts = b"".join(path.read_bytes() for path in workspace.learn.rglob("*") if path.is_file())
    assert b"good good" not in texts


def test_of_two_simultaneous_reverts_one_succeeds(workspace: Workspace) -> None:
    feedback(workspace.learn / FEEDBACK, 2 * EVERY)
    learning = workspace.open()
    while learning.work():
        pass
    first, second = [learning.storage.submit(learning.revert, 2) for _ in range(2)]
    assert first.result() == 1
    with pytest.raises(RequestError) as caught:
        second.result()
    assert caught.value.code == "version_not_served"
    assert [each["current"] for each in learning.history()] == [False, True, False]


def test_a_folder_continues_only_with_its_bundle_and_adapter(workspace: Workspace) -> None:
    workspace.open().close()
    other = random_adapter(open_bundle(workspace.folder / "bundle").chain.modules, 1)
    with raises(ConfigError, "learning-differs", containing="adapter"):
        workspace.open(other)


@pytest.mark.parametrize("at", ["round", "step", "judged"])
def test_a_full_disk_is_retried(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: str
) -> None:
    feedback(workspace.learn / FEEDBACK, EVERY)
    workspace.learnt()
    expected = workspace.bits()
    content = (workspace.learn / FEEDBACK).read_bytes()
    shutil.rmtree(workspace.learn)
    workspace.learn.mkdir()
    (workspace.learn / FEEDBACK).write_bytes(content)
    workspace.messages.clear()
    learning, append = workspace.open(), Journal.append

    def refuse(self: Journal, record: dict[str, Any]) -> dict[str, Any]:
        if record["type"] == at:
            raise RunError("no space left")
        return append(self, record)

    monkeypatch.setattr(Journal, "append", refuse)
    monkeypatch.setattr(module, "SECONDS_TO_RETRY", 0.0)
    for _ in range(4):
        learning.work()
    assert learning.problem == "no space left"
    assert [line for line in workspace.messages if "no space" in line] == [
        "learning failed, trying again every 0 seconds: no space left"
    ]
    monkeypatch.setattr(Journal, "append", append)
    take_round(learning)
    assert not learning.problem
    assert workspace.messages[-1] == "learning continues" and learning.history()[-1]["status"] == "served"
    assert workspace.bits() == expected


def test_an_unreadable_file_only_stops_learning(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning = workspace.open()
    (workspace.learn / FEEDBACK).mkdir()
    assert not learning.work() and not learning.work()
    (output,) = workspace.messages
    assert output.startswith("learning failed, trying again every 30 seconds: ") and "a folder" in output
    (workspace.learn / FEEDBACK).rmdir()
    feedback(workspace.learn / FEEDBACK, EVERY)
    assert not learning.work()  # not yet
    monkeypatch.setattr(module, "time", LaterClock)
    take_round(learning)
    assert learning.history()[-1]["status"] == "served"


def test_learning_waits_for_a_charger(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(ConfigError, "condition-not-measurable", containing="--when charging"):
        workspace.open(when="charging")
    feedback(workspace.learn / FEEDBACK, EVERY)
    states = iter([True, False, False, True, *[True] * 100])
    monkeypatch.setattr(Sensors, "charging", lambda self: SensorReading(next(states), "test"))
    monkeypatch.setattr(module, "SECONDS_TO_LOOK", 0.0)
    learning = workspace.open(when="charging")
    assert not learning.work() and not learning.work()
    assert workspace.messages == ["learning: paused, not charging: it waits for a charger"]
    take_round(learning)
    assert learning.history()[-1]["status"] == "served"
    assert workspace.messages[1].startswith("learning: resuming after a pause of ")


def test_the_process_of_a_round_does_not_count_as_other_use(workspace: Workspace) -> None:
    """`--when idle` pauses while other programs use the machine."""
    workspace.open(when="idle").close()
    feedback(workspace.learn / FEEDBACK, EVERY)
    learning = workspace.open()
    learning.pause(True)
    while not workspace.processes:
        learning.work()
    before = learning.cpu_seconds()
    workspace.processes[0].cpu_seconds = 100.0
    assert 100 <= learning.cpu_seconds() - before < 110


def test_bad_ratings_are_not_retained(workspace: Workspace, tmp_path: Path) -> None:
    rows = [{"prompt": word, "completion": " No", "label": number % 2} for number, word in enumerate(WORDS)]
    write_rows(tmp_path / "rated.jsonl", [*rows, {"prompt": "a", "completion": "b", "label": "maybe"}])
    settings = RunSettings(Path(), tmp_path / "rated.jsonl", tmp_path, dev=tmp_path / "kept.jsonl")
    bundle = open_bundle(workspace.folder / "bundle")
    kept = read_retained_examples(settings, load_bundle_tokenizer(bundle), bundle)
    assert (len(kept.replayed), len(kept.judged)) == (4, 16)


def test_feedback_on_one_question_is_not_split() -> None:
    rows = [{"prompt": str(number // 2), "answer": "", "rating": "good"} for number in range(24)]
    learnt, held = split_held_out([IndexEntry.of(row) for row in rows])
    assert len(learnt) + len(held) == 24
    assert {row.key for row in held} == {feedback_key(rows[number]) for number in (4, 5, 14, 15)}
    assert not {row.question for row in held} & {row.question for row in learnt}


def test_the_history_has_a_line_for_each_record(workspace: Workspace) -> None:
    feedback(workspace.learn / FEEDBACK, EVERY)
    workspace.learnt()
    record_types = [
        json.loads(line)["record"]["type"] for line in (workspace.learn / HISTORY).read_text().splitlines()
    ]
    assert record_types == ["start", "round", "judged"]
    assert np.isfinite(workspace.served[0].values).all()
    assert len(read_feedback(workspace.learn / FEEDBACK)) == EVERY


def test_an_incompatible_adapter_is_refused(workspace: Workspace) -> None:
    """Steps would use another lora_A than the one that is served."""
    bundle = open_bundle(workspace.folder / "bundle")
    adapter = read_lora(bundle.adapter)
    others = {name: matrix + 1 for name, matrix in adapter.lora_a.items()}
    write_lora(workspace.folder / "theirs", replace(adapter, lora_a=others))
    with raises(AdapterError, "adapter-does-not-fit"):
        workspace.open(source=workspace.folder / "theirs")
