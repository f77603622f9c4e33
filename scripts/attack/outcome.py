"""What an attack has found: each case's verdict, and a report that says how to do it again."""

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

from child import Ended

from prge.errors import INTERRUPTED


class Verdict(str, Enum):
    """What became of a case."""

    REFUSED = "refused"
    """Its one error message, and the exit code that belongs to it."""
    ACCEPTED = "accepted"
    """The result is that of what was attacked, undamaged."""
    OTHER = "other"
    """Another result, of what is another input by its own right: nothing says what it must be."""
    CRASHED = "crashed"
    """A signal that nobody sent."""
    HUNG = "hung"
    """It had to be ended."""
    TRACEBACK = "tracebacks"
    """An error that `prge` didn't expect."""
    SILENT = "accepted_silently"
    """Exit code 0 and another result, where something says what the file must be or that it can't be so."""
    UNEXPLAINED = "unexplained"
    """An exit code without its message, or a refusal of what must be taken."""
    DIFFERENT = "different_bits"
    """A killed run that ended otherwise than one that never was."""
    FOLLOWED = "followed"
    """A link that was followed, or a foreign file that was touched."""
    GREEDY = "greedy"
    """More seconds or memory than an error may take."""
    UNTRIED = "untried"
    """A part of the attack that had no case."""

    @property
    def is_failure(self) -> bool:
        """Whether it must never be."""
        return self not in (Verdict.REFUSED, Verdict.ACCEPTED, Verdict.OTHER)


@dataclass(frozen=True)
class Case:
    """One case: where it comes from, what it was, what became of it."""

    name: str
    verdict: Verdict
    command: str = ""
    tail: str = ""
    part: str = ""
    number: int = 0
    memory: int = 0
    """Bytes that the process took at most, beyond its parent's or those of its first answers."""

    @classmethod
    def of(cls, name: str, verdict: Verdict, ended: Ended, more: str = "") -> Case:
        """A case of one call; `more` is told besides what it printed."""
        command = shlex.join(["prge", *ended.words])
        tail = f"{ended.tail}\n{more}" if more else ended.tail
        return cls(name, verdict, command, tail, memory=ended.memory)

    @property
    def label(self) -> str:
        """What `--repeat` takes."""
        return f"{self.part}:{self.number}"


# What an attack comes to: its cases, and what else was counted.
Found = tuple[list[Case], Counter[str]]


def judged(ended: Ended) -> Verdict | None:
    """The verdict on how a process ended; None if it took what it was given."""
    if ended.hung:
        return Verdict.HUNG
    if ended.has_traceback:
        return Verdict.TRACEBACK
    if ended.code < 0:
        return Verdict.CRASHED
    if ended.code == 0:
        return None
    told = f"prge {ended.words[0]}: "
    messages = [line for line in ended.output.splitlines() if line.startswith(told)]
    # Notes, such as of a flag that is given twice, may come before the one error.
    errors = [line for line in messages if line.startswith(told + "error: ")]
    is_refused = ended.code in (1, 2) and len(errors) == 1
    is_ended = ended.code == INTERRUPTED and messages[-1:] == [told + "interrupted"]
    is_compared = ended.code == 1 and ended.words[0] == "replay" and ended.output.endswith(": DIFFERENT\n")
    return Verdict.REFUSED if is_refused or is_ended or is_compared else Verdict.UNEXPLAINED


def worked(*calls: Ended) -> Verdict:
    """The verdict on calls that must work: that of the first that didn't."""
    verdict = next(filter(None, map(judged, calls)), Verdict.ACCEPTED)
    return Verdict.UNEXPLAINED if verdict is Verdict.REFUSED else verdict


@dataclass
class Report:
    """Counts of all cases, and each failure."""

    seed: int
    minutes: float
    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Case] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    memory: Counter[str] = field(default_factory=Counter)
    """The most that a process of a part took."""

    def add(self, cases: Iterable[Case], counts: Counter[str]) -> None:
        """Take in what was found."""
        self.counts += counts
        for case in cases:
            self.verdicts[case.part, case.verdict.value] += 1
            self.kinds[case.part, case.name] += 1
            self.memory[case.part] = max(self.memory[case.part], case.memory)
            if case.verdict.is_failure:
                self.failures.append(case)

    def need_cases(self, parts: Iterable[str]) -> None:
        """A part of which no case was tried shows nothing: that is a failure."""
        tried = {part for part, _ in self.verdicts}
        untried = [
            Case("no case was tried", Verdict.UNTRIED, part=part) for part in parts if part not in tried
        ]
        self.add(untried, Counter())

    def to_json(self) -> dict[str, Any]:
        """As `--json` writes it: first what must hold, then the details."""
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
                    "cases": of(part, self.kinds),
                    "most_memory_mb": round(self.memory[part] / 1e6),
                }
                for part in sorted({part for part, _ in self.verdicts})
            },
            "counts": dict(sorted(self.counts.items())),
            "failures": [{"repeat": case.label, **asdict(case)} for case in self.failures],
        }

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
