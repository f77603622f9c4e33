"""One trial of a bench on a phone: `prge run` or `prge generate` there, and what it took.

The verb runs as a job under device_runner.session.measuring, which goes on without this machine. Packed
weights lie beside what was measured, in bench/ of prge's folder, until no trial needs the bundle any more.
"""

from __future__ import annotations

import json
import random
import statistics
import string
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from device_runner.android.adb import quote
from device_runner.android.device import Phone, send_settings
from device_runner.android.jobs import send_bundle, waited
from prge.errors import DeviceError
from prge.files.bundle import Bundle, open_bundle
from prge.files.documents import parse_json
from prge.files.run_folder import METRICS
from prge.learning.costs import bytes_text
from prge.running.trials import Trial

_ROUNDS = 3
_KILLED = 137
_RESERVE = 256 << 20
_LETTERS_OF_A_TOKEN = 8
_MEASURING, _MEASURED = "device_runner.session.measuring", "measured.json"


@dataclass(frozen=True)
class Limits:
    """Degrees Celsius that a trial may begin at, and minutes to wait for them."""

    celsius: float
    minutes: float


@dataclass(frozen=True)
class Taking:
    """A trial of a bundle on a phone; `name` begins those of its jobs there.

    A `tiny` one is not to be measured: it has one round, and packs its weights in that.
    """

    phone: Phone
    name: str
    trial: Trial
    folder: Path
    tiny: bool
    limits: Limits

    @cached_property
    def bundle(self) -> Bundle:
        """The bundle here."""
        return open_bundle(self.folder)

    @property
    def remote(self) -> str:
        """Where the bundle lies on the phone."""
        return self.phone.path("bundles", self.bundle.sha256[:12])

    @property
    def place(self) -> str:
        """The phone's folder of packed weights and of what was measured."""
        return self.phone.path("bench", self.bundle.sha256[:12])

    def take(self, steps: int, threads: int | None) -> dict[str, Any]:
        """Its figures; a job that a bench before this one has begun is met again.

        Raises:
            DeviceError: there is no room, the phone is too hot, a job failed, or the phone was lost.
        """
        self._need_room()
        send_bundle(self.phone, self.folder)
        how = {"bundle": self.remote, "threads": threads}
        first = [] if self.tiny else [f"{self.name}-first"]
        rounds = _ROUNDS if self.trial.written and not self.tiny else 1
        names = [f"{self.name}-{number}" for number in range(rounds)]
        found = (self._texts if self.trial.written else self._steps)(first, names, how, steps)
        self.phone.remove(
            *(self.phone.path(place, each) for each in (*first, *names) for place in ("runs", "jobs"))
        )
        return found

    def leave(self) -> None:
        """Remove the bundle and its packed weights from the phone; raises DeviceError."""
        self.phone.remove(self.remote, f"{self.remote}.tree", self.place)

    def _steps(
        self, first: Sequence[str], names: Sequence[str], how: Mapping[str, Any], steps: int
    ) -> dict[str, Any]:
        """Seconds of steps; a run before has packed the weights."""
        with tempfile.TemporaryDirectory(prefix="prge-bench-") as place:
            rows = Path(place, "rows.jsonl")
            rows.write_text(_rows(4 * self.trial.batch, self.trial.tokens), encoding="utf-8")
            train = self.phone.send_file(rows)
        asked = {
            **how,
            **{"train": train, "estimator": "exact", "batch_size": self.trial.batch, "quiet": True},
            **{"overflow": "truncate", "max_dropped": 1.0},
            **({"memory": self._least()} if self.trial.is_least else {}),
        }
        measured = {}
        for each in (*first, *names):
            out = self.phone.path("runs", each)
            measured = self._measured(
                each, "run", {**asked, "out": out, "steps": 1 if each in first else steps}
            )
        lines = self.phone.adb.check(f"cat {quote([f'{out}/{METRICS}'])}", "reading metrics").splitlines()
        records = [record for record in map(parse_json, lines) if record["event"] == "step"]
        seconds = [record["engine_seconds"] + record["host_seconds"] for record in records][1:]
        run = self.phone.job(names[-1]).summary.get("run", {})
        return {
            "seconds_a_step": statistics.median(seconds),
            "step_seconds": seconds,
            "threads": run.get("threads"),
            **_figures(measured),
        }

    def _texts(
        self, first: Sequence[str], names: Sequence[str], how: Mapping[str, Any], steps: int
    ) -> dict[str, Any]:
        """Rates of texts, one after another."""
        prompt = "".join(random.Random(0).choices(string.ascii_letters, k=self.trial.written))
        asked = {**how, "prompt": [prompt], "max_tokens": self.trial.written, "json": True}
        asked |= {"temperature": 0.0, "draft": "off"}
        answers: list[dict[str, Any]] = []
        measured = {}
        for each in (*first, *names):
            measured = self._measured(each, "generate", asked)
            answers += [parse_json(line) for line in self._console(each) if line.startswith('{"row"')]
        answers = answers[len(first) :]
        rates = {
            name: [each[told] for each in answers if each[told]]
            for name, told in (
                ("tokens_a_second", "tokens_per_second"),
                ("prompt_tokens_a_second", "prefill_tokens_per_second"),
            )
        }
        if not all(rates.values()):
            raise DeviceError("generate: the model ends its text at once")
        return {
            **{name: statistics.median(found) for name, found in rates.items()},
            "prompt_tokens": answers[0]["prompt_tokens"],
            "tokens": [len(each["tokens"]) for each in answers],
            **_figures(measured),
        }

    def _measured(self, name: str, verb: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What a verb took, begun now unless it was begun before; None leaves a setting out."""
        phone, job = self.phone, self.phone.job(name)
        if job.state != "running" and not (job.state == "ended" and job.code == 0):
            phone.remove(phone.path("runs", name), phone.path("jobs", name), f"{self.place}/{name}")
            given = {key: value for key, value in settings.items() if value is not None}
            words = send_settings(phone, given, f"{self.place}/{name}")
            limits = self.limits.celsius, self.limits.minutes
            watched = [_MEASURING, self.place, f"{self.place}/{name}/{_MEASURED}", *map(str, limits)]
            phone.start(name, ["-m", *watched, verb, *words])
        job = waited(phone, name)
        if job.code != 0:
            raise DeviceError(f"{verb}: {self._why(name, job.code)}")
        told = phone.adb.check(
            f"cat {quote([f'{self.place}/{name}/{_MEASURED}'])}", "reading what was measured"
        )
        measured: dict[str, Any] = parse_json(told)
        return measured

    def _why(self, name: str, code: int | None) -> str:
        """Why a verb failed there."""
        if code in (None, _KILLED):
            return "it was killed, as the system does where memory runs out"
        lines = [line.strip() for line in self._console(name) if line.strip()]
        return next((line for line in lines[::-1] if "error:" in line), f"it ended with code {code}")

    def _console(self, name: str) -> list[str]:
        console = quote([self.phone.path("jobs", name, "console.txt")])
        return self.phone.adb.check(f"cat {console}", "reading what was printed").splitlines()

    def _need_room(self) -> None:
        """Raises DeviceError unless the phone has room for the bundle and its packed weights."""
        size = sum(int(file["bytes"]) for file in self.bundle.manifest["files"].values())
        wanted = size * (1 if self.phone.exists(f"{self.remote}.tree") else 2) + _RESERVE
        free = self.phone.free_bytes()
        if free is not None and free < wanted:
            raise DeviceError(
                f"no room: it takes {bytes_text(wanted)}, the phone has {bytes_text(free)} free"
            )

    def _least(self) -> int:
        """Bytes of the weights of the largest block."""
        files = self.bundle.manifest["files"]
        return max(self.bundle.chain.loaded_bytes(lambda name: int(files[name]["bytes"])))


def _figures(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Memory, temperature and energy of a verb, from its start to its end."""
    sensors, joules = measured["sensors"], measured["joules"]
    given = next((each["value"] for each in joules.values() if each["value"] is not None), None)
    return {
        "anonymous_mb": measured["anonymous_mb"],
        "peak_rss_mb": measured["peak_rss_mb"],
        "celsius": {end: sensors[end]["temperature_celsius"]["value"] for end in ("start", "end")},
        "watts": None if given is None else given / measured["seconds"],
        "joules": joules,
        "seconds": measured["seconds"],
        "sensors": sensors,
    }


def _rows(count: int, tokens: int) -> str:
    """Rows of random letters, enough for so many tokens of any tokenizer."""
    letters, length = random.Random(0), tokens * _LETTERS_OF_A_TOKEN
    texts = ("".join(letters.choices(string.ascii_letters, k=length)) for _ in range(count))
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)
