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
from device_runner.android.bringing import send_bundle, send_settings
from device_runner.android.device import Phone
from device_runner.android.jobs import wait_for
from prge.errors import DeviceError
from prge.files.bundle import Bundle, open_bundle
from prge.files.documents import parse_json
from prge.files.run_folder import METRICS
from prge.files.signatures import BACK
from prge.learning.costs import bytes_text, least_memory
from prge.running.trials import Trial

_ROUNDS = 3
_KILLED = 137
_RESERVE = 256 << 20
# What a run holds on the phone before it loads the engine, and by how much that grows while it reads rows.
_HELD = """
from pathlib import Path
import device_runner.run
from prge.files.bundle import open_bundle
from prge.host.memory import resident_bytes
from prge.rows.tokenization.tokenizer import bundle_tokenizer
tokenizer = bundle_tokenizer(open_bundle(Path({bundle!r})))
print(resident_bytes() or "")
"""
_GROWTH = 8 << 20
_LETTERS_OF_A_TOKEN = 8
_MEASURING, _MEASURED = "device_runner.session.measuring", "measured.json"


@dataclass(frozen=True)
class Taking:
    """A trial of a bundle on a phone; `name` begins those of its jobs there.

    A `tiny` one is not to be measured: it has one round, and packs its weights in that. `cool` are degrees
    Celsius that a job may begin at, and minutes to wait for them.
    """

    phone: Phone
    name: str
    trial: Trial
    folder: Path
    tiny: bool
    cool: tuple[float, float]

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
        writes = self.trial.written > 0
        asked = {"bundle": self.remote, "threads": threads, **(self._text() if writes else self._rows())}
        # What isn't counted packs the weights.
        first = [] if self.tiny else [f"{self.name}-first"]
        counted = [f"{self.name}-{number}" for number in range(_ROUNDS if writes and not self.tiny else 1)]
        measured = {}
        for each in (*first, *counted):
            if not writes:
                asked |= {"out": self.phone.path("runs", each), "steps": 1 if each in first else steps}
            measured = self._measured(each, "generate" if writes else "run", asked)
        found = self._rates(counted) if writes else self._seconds(counted[0])
        for each in (*first, *counted):
            self.phone.remove(self.phone.path("runs", each), self.phone.path("jobs", each))
        return {**found, **_figures(measured)}

    def leave(self) -> None:
        """Remove the bundle and its packed weights from the phone; raises DeviceError."""
        self.phone.remove(self.remote, f"{self.remote}.tree", self.place)

    def _rows(self) -> dict[str, Any]:
        """What a run is asked, with rows that are there: letters, enough for any tokenizer."""
        with tempfile.TemporaryDirectory(prefix="prge-bench-") as place:
            rows = Path(place, "rows.jsonl")
            count, length = 4 * self.trial.batch, self.trial.tokens * _LETTERS_OF_A_TOKEN
            texts = (letters(length, seed) for seed in range(count))
            rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
            train = self.phone.send_file(rows)
        return {
            **{"train": train, "estimator": "exact", "batch_size": self.trial.batch, "quiet": True},
            **{"overflow": "truncate", "max_dropped": 1.0},
            **({"memory": self._least_memory()} if self.trial.is_least else {}),
        }

    def _least_memory(self) -> int:
        """The least bound that a run on the phone keeps."""
        held = self.phone.python(_HELD.format(bundle=self.remote)).split()
        known = int(held[-1]) + _GROWTH if held else None
        return least_memory(self.bundle, BACK, self.trial.batch, self.trial.tokens, held=known)

    def _text(self) -> dict[str, Any]:
        """What `prge generate` is asked."""
        written = self.trial.written
        how = {"max_tokens": written, "temperature": 0.0, "draft": "off", "json": True}
        return {"prompt": [letters(written)], **how}

    def _seconds(self, name: str) -> dict[str, Any]:
        """Of the steps of a run but the first."""
        metrics = quote([self.phone.path("runs", name, METRICS)])
        lines = self.phone.adb.check(f"cat {metrics}", "reading metrics").splitlines()
        records = [record for record in map(parse_json, lines) if record["event"] == "step"]
        seconds = [record["engine_seconds"] + record["host_seconds"] for record in records][1:]
        run = self.phone.job(name).summary.get("run", {})
        found = {"seconds_a_step": statistics.median(seconds), "step_seconds": seconds}
        return {**found, "threads": run.get("threads")}

    def _rates(self, names: Sequence[str]) -> dict[str, Any]:
        """Of texts, medians."""
        lines = (line for each in names for line in self._console(each))
        answers = [parse_json(line) for line in lines if line.startswith('{"row"')]
        told = {"tokens_a_second": "tokens_per_second", "prompt_tokens_a_second": "prefill_tokens_per_second"}
        rates = {name: [each[key] for each in answers if each[key]] for name, key in told.items()}
        if not all(rates.values()):
            raise DeviceError("generate: the model ends its text at once", code="text-not-written")
        return {
            **{name: statistics.median(found) for name, found in rates.items()},
            "prompt_tokens": answers[0]["prompt_tokens"],
            "tokens": [len(each["tokens"]) for each in answers],
        }

    def _measured(self, name: str, verb: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What a verb took, begun now unless it was begun before; None leaves a setting out."""
        phone, job = self.phone, self.phone.job(name)
        if job.state != "running" and not (job.state == "ended" and job.code == 0):
            phone.remove(phone.path("runs", name), phone.path("jobs", name), f"{self.place}/{name}")
            given = {key: value for key, value in settings.items() if value is not None}
            words = send_settings(phone, given, f"{self.place}/{name}")
            watched = [_MEASURING, self.place, f"{self.place}/{name}/{_MEASURED}", *map(str, self.cool)]
            phone.start(name, ["-m", *watched, verb, *words])
        job = wait_for(phone, name)
        if job.code != 0:
            raise DeviceError(f"{verb}: {self._why(name, job.code)}", code="verb-failed")
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
        errors = [number for number, line in enumerate(lines) if "error:" in line]
        return " ".join(lines[errors[-1] :]) if errors else f"it ended with code {code}"

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
                f"no room: it takes {bytes_text(wanted)}, the phone has {bytes_text(free)} free",
                code="storage-full",
            )


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


def letters(count: int, seed: int = 0) -> str:
    """A text of so many random letters, about as many tokens."""
    return "".join(random.Random(seed).choices(string.ascii_letters, k=count))
