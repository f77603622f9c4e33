"""Verdicts follow from what a process did, and a report counts them."""

from __future__ import annotations

import signal
from collections import Counter

import pytest
from child import ProcessResult
from outcome import Case, Report, Verdict, judge

REFUSAL = "prge run: error: the bundle is damaged\n  copy it again\n"


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (ProcessResult(("run",), 0, "run/final\n"), None),
        (ProcessResult(("run",), 2, REFUSAL), Verdict.REFUSED),
        (ProcessResult(("run",), 2, "prge run: --steps is given 2 times\n" + REFUSAL), Verdict.REFUSED),
        (ProcessResult(("run",), 130, "prge run: interrupted\n"), Verdict.REFUSED),
        (ProcessResult(("run",), 2, ""), Verdict.UNEXPLAINED),
        (ProcessResult(("run",), 2, REFUSAL + REFUSAL), Verdict.UNEXPLAINED),
        (ProcessResult(("run",), 3, REFUSAL), Verdict.UNEXPLAINED),
        (
            ProcessResult(("run",), 1, "Traceback (most recent call last):\n  ...\nKeyError: 'x'\n"),
            Verdict.TRACEBACK,
        ),
        (ProcessResult(("run",), 0, "Exception ignored in: <function f>\n"), Verdict.TRACEBACK),
        (ProcessResult(("run",), -signal.SIGSEGV, ""), Verdict.CRASHED),
        (ProcessResult(("run",), -signal.SIGKILL, "", hung=True), Verdict.HUNG),
    ],
)
def test_verdicts(result: ProcessResult, verdict: Verdict | None) -> None:
    assert judge(result) == verdict


def test_a_part_without_a_case_is_a_failure() -> None:
    report = Report(seed=0, minutes=1.0)
    report.add([Case("a", Verdict.REFUSED, part="files", memory=5_000_000)], Counter())
    report.need_cases(["files"])
    assert not report.failures and report.to_json()["parts"]["files"]["max_memory_mb"] == 5
    report.need_cases(["files", "inputs"])
    assert [(failure.part, failure.verdict) for failure in report.failures] == [("inputs", Verdict.UNTRIED)]
    assert report.to_json()["untried"] == 1


def test_a_report_counts_files_and_kills_and_names_what_failed() -> None:
    report = Report(seed=3, minutes=1.0)
    cases = [
        Case("eval: programs, cut", Verdict.REFUSED, part="files", number=4),
        Case("eval: programs, one bit", Verdict.SILENT, "prge eval", "loss 1", part="model_files", number=5),
        Case("run: encoder", Verdict.DIFFERENT, part="kills", number=6),
    ]
    report.add(cases, Counter(kills=12))
    actual = report.to_json()
    assert (actual["kills"], actual["files"], actual["different_bits"], actual["accepted_silently"]) == (
        12,
        2,
        1,
        1,
    )
    assert (actual["crashed"], actual["hung"], actual["tracebacks"]) == (0, 0, 0)
    assert [failure["repeat"] for failure in actual["failures"]] == ["model_files:5", "kills:6"]
