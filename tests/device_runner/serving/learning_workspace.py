"""Learning while serving with a numpy model, in the process of a test."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from device_runner.serving.learning import OnlineLearner, plan_rounds
from device_runner.serving.round_process import RoundProcess
from device_runner.serving.rounds import Round, round_outcome
from device_runner.serving.settings import LearnFlags
from device_runner.session.settings import EngineFlags
from prge.data.readers.feedback import AnswerRecord, append_feedback
from prge.data.tokenization.tokenizer import load_bundle_tokenizer
from prge.formats.adapter import Adapter
from prge.formats.bundle import open_bundle
from tests.device_runner.numpy_device import Device

WORDS = ["good", "bad", "great", "terrible", "film", "dog", "cat", "town"]
EVERY = 4


def feedback(path: Path, count: int, correction: str = " Yes", start: int = 0) -> None:
    """Append rows of feedback with corrections and some ratings."""
    rows = []
    for number in range(start, start + count):
        prompt_fields = {"prompt": f"{WORDS[number % 8]} {WORDS[number // 8 % 8]}"}
        answer = AnswerRecord(f"cmpl-{number}", "bundle", "", prompt_fields, " No", {})
        is_rating = number % 7 == 6
        rows.append(answer.to_feedback("bad") if is_rating else answer.to_feedback(correction=correction))
    append_feedback(path, rows)


class RoundInThisProcess(RoundProcess):
    """Stands in for the process of a round: runs the round in this process when polled."""

    cpu_seconds: Any = 0.0
    peak_bytes: Any = 0

    def __init__(self, round: Round, log: Callable[[str], object]) -> None:
        self.round, self.log = round, log
        self.is_paused = self.has_ended = False

    def poll(self) -> dict[str, Any] | None:
        assert not self.has_ended
        return None if self.is_paused else json.loads(json.dumps(round_outcome(self.round, self.log)))

    def pause(self, is_paused: bool) -> None:
        self.is_paused = is_paused

    def end(self) -> None:
        self.has_ended = True


@dataclass
class Workspace:
    """A bundle, a device, and folders to learn into."""

    folder: Path
    device: Device
    flags: LearnFlags
    served: list[Adapter] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    processes: list[RoundInThisProcess] = field(default_factory=list)

    @property
    def learn(self) -> Path:
        assert self.flags.learn is not None
        return self.flags.learn

    def open(self, start: Adapter | None = None, source: Path | None = None, **flags: Any) -> OnlineLearner:
        """Open a learner, as a new process does."""
        bundle = open_bundle(self.folder / "bundle")
        self.learn.mkdir(exist_ok=True)
        flags_of_learner, tokenizer = replace(self.flags, **flags), load_bundle_tokenizer(bundle)
        return OnlineLearner(
            flags_of_learner,
            *plan_rounds(flags_of_learner, EngineFlags(), source, bundle, tokenizer),
            bundle,
            start or Adapter.zeros(bundle.chain.modules),
            tokenizer,
            serve=self.served.append,
            log=self.messages.append,
            begin=self.begin,
            storage=ThreadPoolExecutor(1),
        )

    def begin(self, round: Round) -> RoundInThisProcess:
        self.processes.append(RoundInThisProcess(round, self.messages.append))
        return self.processes[-1]

    def learnt(self, **flags: Any) -> list[dict[str, Any]]:
        """Return the history after everything was learned."""
        learning = self.open(**flags)
        while learning.work():
            pass
        learning.close()
        return learning.history()

    def bits(self) -> dict[str, bytes]:
        """Return the adapters of all rounds, as bytes."""
        paths = self.learn.glob("rounds/*/final/adapter_model.safetensors")
        return {path.parts[-3]: path.read_bytes() for path in paths}


def take_round(learning: OnlineLearner) -> None:
    """Call `work` until a round is judged."""
    judged = sum(each["status"] not in ("start", "learning") for each in learning.history())
    while sum(each["status"] not in ("start", "learning") for each in learning.history()) == judged:
        assert learning.work()


def without_seconds(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in each.items() if name != "seconds"} for each in history]
