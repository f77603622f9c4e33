"""Verdicts on cases, and a report with the command to repeat each failure."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from child import ProcessResult

from prge.errors import INTERRUPTED


class Verdict(str, Enum):
    """The outcome of a case."""

    REFUSED = "refused"
    """One error message and the matching exit code."""
    ACCEPTED = "accepted"
    """The result equals that of the undamaged input."""
    OTHER = "other"
    """Another result, of an input whose content nothing determines."""
    CRASHED = "crashed"
    """The process ended by a signal that nobody sent."""
    HUNG = "hung"
    """The process had to be killed."""
    TRACEBACK = "tracebacks"
    """An unexpected error."""
    SILENT = "accepted_silently"
    """Exit code 0 and another result, although the input is determined or impossible."""
    UNEXPLAINED = "unexplained"
    """An exit code without its message, or a refusal of a valid input."""
    DIFFERENT = "different_bits"
    """A killed run whose result differs from that of an uninterrupted one."""
    FOLLOWED = "followed"
    """A link was followed, or a foreign file was touched."""
    GREEDY = "greedy"
    """More time or memory than allowed."""
    UNTRIED = "untried"
    """A part of the attack without any case."""

    @property
    def is_failure(self) -> bool:
        """Whether the verdict is a failure."""
        return self not in (Verdict.REFUSED, Verdict.ACCEPTED, Verdict.OTHER)


@dataclass(frozen=True)
class Case:
    """A case: its part and number, name, command, output and verdict."""

    name: str
    verdict: Verdict
    command: str = ""
    tail: str = ""
    part: str = ""
    number: int = 0
    memory: int = 0
    """Peak memory in bytes beyond the parent's, or beyond that after the first responses."""

    @classmethod
    def of(cls, name: str, verdict: Verdict, result: ProcessResult, more: str = "") -> Case:
        """Return the case of one call; `more` is appended to the output."""
        command = shlex.join(["prge", *result.arguments])
        tail = f"{result.tail}\n{more}" if more else result.tail
        return cls(name, verdict, command, tail, memory=result.memory)

    @property
    def label(self) -> str:
        """The argument of `--repeat`."""
        return f"{self.part}:{self.number}"


# Cases of an attack, and other counts.
Findings = tuple[list[Case], Counter[str]]


def judge(result: ProcessResult) -> Verdict | None:
    """Return the verdict on a result, or None if `prge` accepted its input."""
    if result.hung:
        return Verdict.HUNG
    if result.has_traceback:
        return Verdict.TRACEBACK
    if result.code < 0:
        return Verdict.CRASHED
    if result.code == 0:
        return None
    prefix = f"prge {result.arguments[0]}: "
    messages = [line for line in result.output.splitlines() if line.startswith(prefix)]
    # Notes, such as on a repeated flag, may precede the error.
    errors = [line for line in messages if line.startswith(prefix + "error: ")]
    is_refused = result.code in (1, 2) and len(errors) == 1
    is_ended = result.code == INTERRUPTED and messages[-1:] == [prefix + "interrupted"]
    is_compared = (
        result.code == 1 and result.arguments[0] == "replay" and result.output.endswith(": DIFFERENT\n")
    )
    return Verdict.REFUSED if is_refused or is_ended or is_compared else Verdict.UNEXPLAINED


def judge_success(*calls: ProcessResult) -> Verdict:
    """Return the verdict on calls that must work: that of the first failure."""
    verdict = next(filter(None, map(judge, calls)), Verdict.ACCEPTED)
    return Verdict.UNEXPLAINED if verdict is Verdict.REFUSED else verdict


@dataclass
class Report:
    """Counts of all cases, and all failures."""

    seed: int
    minutes: float
    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)
    case_names: Counter[tuple[str, str]] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Case] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    memory: Counter[str] = field(default_factory=Counter)
    """Peak memory of the processes of each part."""

    def add(self, cases: Iterable[Case], counts: Counter[str]) -> None:
        """Add cases and counts."""
        self.counts += counts
        for case in cases:
            self.verdicts[case.part, case.verdict.value] += 1
            self.case_names[case.part, case.name] += 1
            self.memory[case.part] = max(self.memory[case.part], case.memory)
            if case.verdict.is_failure:
                self.failures.append(case)

    def need_cases(self, parts: Iterable[str]) -> None:
        """Add a failure for each part without cases: it proves nothing."""
        tried = {part for part, _ in self.verdicts}
        untried = [
            Case("no case was tried", Verdict.UNTRIED, part=part) for part in parts if part not in tried
        ]
        self.add(untried, Counter())

    def to_json(self) -> dict[str, Any]:
        """Return the content of `--json`: totals first, then the details."""
        failed = sorted(verdict.value for verdict in Verdict if verdict.is_failure)

        def cases(pattern: str) -> int:
            return sum(n for (part, _), n in self.verdicts.items() if re.fullmatch(pattern, part))

        def of(part: str, table: Counter[tuple[str, str]]) -> dict[str, int]:
            return {name: n for (each, name), n in sorted(table.items()) if each == part}

        return {
            "seed": self.seed,
            "minutes": self.minutes,
            "kills": self.counts["kills"],
            "files": cases(".*files"),
            "inputs": cases("inputs"),
            "network": cases("network_.*"),
            **{name: sum(n for (_, each), n in self.verdicts.items() if each == name) for name in failed},
            "left_out": self.left_out,
            "parts": {
                part: {
                    "verdicts": of(part, self.verdicts),
                    "cases": of(part, self.case_names),
                    "max_memory_mb": round(self.memory[part] / 1e6),
                }
                for part in sorted({part for part, _ in self.verdicts})
            },
            "counts": dict(sorted(self.counts.items())),
            "failures": [{"repeat": case.label, **asdict(case)} for case in self.failures],
        }

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
