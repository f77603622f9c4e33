"""The observer of a run and the summary that it writes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prge.formats.documents import read_json
from prge.formats.run_folder import LOG, SUMMARY
from prge.training.estimators.protocol import Measurement
from prge.training.monitor import RunMonitor, describe_changes, describe_prompt, graceful_stop
from prge.training.settings import TrainingFlags


def test_the_summary_has_the_reasons_and_durations_of_pauses(tmp_path: Path) -> None:
    def message() -> tuple[Any, Any, Any]:
        summary: Any = read_json(tmp_path / SUMMARY)
        return summary["run"]["status"], summary["run"]["waits_for"], summary["train"]["paused_seconds"]

    settings = TrainingFlags(bundle=tmp_path, train=tmp_path, out=tmp_path, steps=10, quiet=True)
    with RunMonitor(settings, 0, lambda step: step, lambda: ({}, {})) as monitor:
        assert message() == ("running", None, 0)
        monitor.on_wait("too hot: 40.0 degrees Celsius, the limit is 39")
        assert message() == ("running", "too hot: 40.0 degrees Celsius, the limit is 39", 0)
        monitor.on_wait("not charging: it waits for a charger")
        assert message()[1] == "not charging: it waits for a charger"
        monitor.on_pause(2.5)
        assert message() == ("running", None, 2.5)
        monitor.on_wait("not charging: it waits for a charger")
    assert message() == ("stopped early", None, 2.5)


def test_the_best_step_is_shown_with_the_figure_that_selected_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A perplexity must not be confused with a loss; among equal values, the lower loss is the best."""
    result: dict[str, Any] = {}
    for select, shown in (("metric", ("best dev perplexity", 4.5)), ("loss", ("best dev loss", 1.25))):
        out = tmp_path / select
        settings = TrainingFlags(bundle=out, train=out, out=out, steps=10, quiet=True, select=select)  # type: ignore[arg-type]
        with RunMonitor(settings, 0, lambda step: step, lambda: ({}, {})) as monitor:
            for step, loss in ((0, 2.0), (2, 1.5), (4, 1.25), (6, 1.75)):
                value = -4.5 if select == "metric" else -loss
                record = {"step": step, "loss": loss, "perplexity": 4.5, "value": value}
                monitor.on_evaluation(record, True)
            monkeypatch.setattr(
                monitor.progress, "update", lambda done, tokens, **given: result.update(given)
            )
            step_record = {"step": 6, "loss": 3.0, "tokens": 8, "rows": [1]}
            monitor.on_step(step_record, Measurement(3.0, np.zeros(1), None, 0.0))
            assert result["loss"] == 3.0 and shown in result.items()
        assert read_json(out / SUMMARY)["train"]["best"]["step"] == 4


def test_steps_from_which_nothing_can_be_learned_are_reported_once_and_counted(tmp_path: Path) -> None:
    def log() -> list[str]:
        return [line.partition(" ")[2] for line in (tmp_path / LOG).read_text().splitlines()]

    settings = TrainingFlags(bundle=tmp_path, train=tmp_path, out=tmp_path, steps=10, quiet=True)
    facts = {"reward": 0.5, "reward_std": 0.0, "solved": 0.0, "completion_tokens": 8, "completion_length": 4}
    equal = {"loss": -0.5, "tokens": 8, "rows": [1], **facts, "equal_rewards": True}
    measurement = Measurement(-0.5, np.zeros(1), None, 0.0)
    with RunMonitor(settings, 0, lambda step: step, lambda: ({}, {})) as monitor:
        monitor.on_step({**equal, "step": 0, "reward_std": 0.5, "equal_rewards": False}, measurement)
        monitor.on_step({**equal, "step": 1}, measurement)
        monitor.on_step({**equal, "step": 2}, measurement)
    (reported,) = (line for line in log() if "nothing to learn" in line)
    assert reported == "step 2: all completions have the reward 0.5: there is nothing to learn from this step"
    # A resumed run counts the steps of earlier processes.
    with RunMonitor(settings, 3, lambda step: step, lambda: ({}, {})) as monitor:
        monitor.on_step({**equal, "step": 3}, measurement)
        monitor.report_final(4, {})
    assert sum("nothing to learn" in line for line in log()) == 1
    assert "3 of 4 steps learned nothing, because their completions had equal rewards" in log()


def test_equal_rewards_of_every_prompt_are_reported(tmp_path: Path) -> None:
    settings = TrainingFlags(bundle=tmp_path, train=tmp_path, out=tmp_path, steps=10, quiet=True)
    record = {"step": 0, "loss": 0.0, "tokens": 8, "reward": 0.5, "reward_std": 0.5, "solved": 0.5}
    with RunMonitor(settings, 0, lambda step: step, lambda: ({}, {})) as monitor:
        monitor.on_step({**record, "equal_rewards": True}, Measurement(0.0, np.zeros(1), None, 0.0))
    text = (tmp_path / LOG).read_text()
    assert "step 1: completions that are compared with each other have equal rewards: there is" in text


def test_a_run_that_learns_from_a_reward_shows_rewards_instead_of_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = TrainingFlags(bundle=tmp_path, train=tmp_path, out=tmp_path, steps=10)
    with RunMonitor(settings, 0, lambda step: step, lambda: ({}, {})) as monitor:
        for step, reward in ((0, 0.25), (10, 0.75)):
            facts = {"solved": reward, "completion_tokens": 30, "completion_length": 7.5}
            figures = {"loss": -reward, "value": reward, "reward": reward, **facts}
            monitor.on_evaluation({"type": "evaluation", "step": step, **figures}, True)
        monitor.report_final(10, monitor.newest)
    printed = capsys.readouterr().err
    assert "development rows: reward 0.25  solved 0.25  completion length 7.5\n" in printed
    table = [line.split() for line in printed.splitlines()[-3:]]
    assert table == [
        ["development", "rows", "step", "reward", "solved"],
        ["before", "0", "0.25", "0.25"],
        ["best", "10", "0.75", "0.75", "in", "final/"],
    ]
    assert "loss" not in printed


@pytest.mark.parametrize(
    ("after", "text"),
    [
        (["a", "b"], "note: training changed none of the 2 sampled answers"),
        (["a", "c"], "1 of 2 sampled answers changed"),
        ([], ""),
    ],
)
def test_the_number_of_changed_answers_is_described(after: list[str], text: str) -> None:
    assert describe_changes(["a", "b"], after) == text


def test_of_a_conversation_the_last_message_is_shown() -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who is there?"}]
    assert describe_prompt(messages) == describe_prompt("Who is there?")
    assert "Who is there?" in describe_prompt(messages) and "Be short" not in describe_prompt(messages)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_after_its_step_and_a_second_one_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
    settings = TrainingFlags(bundle=tmp_path, train=tmp_path, out=tmp_path, steps=10, quiet=True)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.getsignal(each) for each in numbers}
    with RunMonitor(settings, 0, lambda step: step, lambda: ({}, {})) as monitor:
        try:
            with graceful_stop(monitor):
                os.kill(os.getpid(), number)
                assert monitor.stopped
                with pytest.raises(KeyboardInterrupt):
                    os.kill(os.getpid(), number)
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
    assert "stopping after this step" in (tmp_path / LOG).read_text()


def test_a_run_started_with_nohup_ignores_the_end_of_its_terminal(tmp_path: Path) -> None:
    settings = TrainingFlags(bundle=tmp_path, train=tmp_path, out=tmp_path, steps=10, quiet=True)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with RunMonitor(settings, 0, lambda step: step, lambda: ({}, {})) as monitor, graceful_stop(monitor):
            os.kill(os.getpid(), signal.SIGHUP)
            assert not monitor.stopped
    finally:
        signal.signal(signal.SIGHUP, before)


def test_control_characters_of_rows_are_escaped_on_the_terminal_and_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = TrainingFlags(bundle=tmp_path, train=tmp_path, out=tmp_path, steps=10)
    with RunMonitor(settings, 0, lambda step: step, lambda: ({}, {})) as monitor:
        monitor.note("row 1\n  a\x1b]0;title\x07 \x9b31m\tb\r\x85c")
    shown = "row 1\n  a\\x1b]0;title\\x07 \\x9b31m\tb\\r\\x85c\n"
    assert shown in capsys.readouterr().err
    log = (tmp_path / LOG).read_text(encoding="utf-8")
    assert [line.partition(" ")[2] for line in log.split("\n")] == shown.split("\n")
