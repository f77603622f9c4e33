"""One trial of a bench on a phone: `prge run` or `prge generate`, and its time, memory and energy.

The verb runs as a job under device_runner.session.measurement, which continues without this machine. Packed
weights and results are in bench/ of prge's folder until no other trial needs the bundle.
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
from device_runner.android.device import Phone
from device_runner.android.jobs import wait_for
from device_runner.android.push import send_bundle, send_settings
from prge.errors import DeviceError
from prge.formats.bundle import Bundle, open_bundle
from prge.formats.documents import parse_json
from prge.formats.run_folder import METRICS
from prge.formats.signatures import BACKWARD
from prge.training.costs import format_bytes, minimum_memory
from prge.training.trials import Trial

_ROUNDS = 3
_KILLED = 137
_RESERVE = 256 << 20
# Prints a run's memory on the phone before the engine is loaded; _GROWTH is for the rows that it reads.
_BASE_MEMORY = """
from pathlib import Path
import device_runner.run
from prge.formats.bundle import open_bundle
from prge.system.memory import resident_bytes
from prge.data.tokenization.tokenizer import load_bundle_tokenizer
tokenizer = load_bundle_tokenizer(open_bundle(Path({bundle!r})))
print(resident_bytes() or "")
"""
_GROWTH = 8 << 20
_LETTERS_OF_A_TOKEN = 8
_MEASURING, _MEASURED = "device_runner.session.measurement", "measured.json"


@dataclass(frozen=True)
class TrialRunner:
    """Runs a trial of a bundle on a phone.

    Attributes:
        phone: the device.
        name: prefix of the names of the trial's jobs.
        trial: the trial.
        folder: folder of the bundle on this computer.
        tiny: run one round without a warm-up, whose figures mean nothing.
        cool: highest temperature in degrees Celsius to start a job at, and longest wait for it in minutes.
    """

    phone: Phone
    name: str
    trial: Trial
    folder: Path
    tiny: bool
    cool: tuple[float, float]

    @cached_property
    def bundle(self) -> Bundle:
        """The bundle on this computer."""
        return open_bundle(self.folder)

    @property
    def remote(self) -> str:
        """Folder of the bundle on the phone."""
        return self.phone.path("bundles", self.bundle.sha256[:12])

    @property
    def results_folder(self) -> str:
        """Folder of packed weights and results on the phone."""
        return self.phone.path("bench", self.bundle.sha256[:12])

    def measure(self, steps: int, threads: int | None) -> dict[str, Any]:
        """Run the trial and return its results; jobs of an interrupted bench are continued.

        Raises:
            DeviceError: the storage is full, the phone is too hot, a job failed, or the phone was lost.
        """
        self._check_storage()
        send_bundle(self.phone, self.folder)
        generates = self.trial.written > 0
        settings = {
            "bundle": self.remote,
            "threads": threads,
            **(self._generation() if generates else self._training()),
        }
        # The first job packs the weights and isn't counted.
        first = [] if self.tiny else [f"{self.name}-first"]
        counted = [f"{self.name}-{number}" for number in range(_ROUNDS if generates and not self.tiny else 1)]
        measured = {}
        for job in (*first, *counted):
            if not generates:
                settings |= {"out": self.phone.path("runs", job), "steps": 1 if job in first else steps}
            measured = self._measured(job, "generate" if generates else "run", settings)
        results = self._rates(counted) if generates else self._seconds(counted[0])
        for job in (*first, *counted):
            self.phone.remove(self.phone.path("runs", job), self.phone.path("jobs", job))
        return {**results, **_figures(measured)}

    def remove_bundle(self) -> None:
        """Remove the bundle and its packed weights from the phone; raises DeviceError."""
        self.phone.remove(self.remote, f"{self.remote}.tree", self.results_folder)

    def _training(self) -> dict[str, Any]:
        """Send rows of random letters, long enough for any tokenizer, and return the settings of the run."""
        with tempfile.TemporaryDirectory(prefix="prge-bench-") as folder:
            rows = Path(folder, "rows.jsonl")
            count, length = 4 * self.trial.batch, self.trial.tokens * _LETTERS_OF_A_TOKEN
            texts = (letters(length, seed) for seed in range(count))
            rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
            train = self.phone.send_file(rows)
        return {
            **{"train": train, "estimator": "exact", "batch_size": self.trial.batch, "quiet": True},
            **{"overflow": "truncate", "max_dropped": 1.0},
            **({"memory": self._min_memory()} if self.trial.is_least else {}),
        }

    def _min_memory(self) -> int:
        """Return the smallest memory limit, in bytes, that a run on the phone can keep."""
        output = self.phone.python(_BASE_MEMORY.format(bundle=self.remote)).split()
        held = int(output[-1]) + _GROWTH if output else None
        return minimum_memory(self.bundle, BACKWARD, self.trial.batch, self.trial.tokens, held=held)

    def _generation(self) -> dict[str, Any]:
        """Return the settings of `prge generate`."""
        written = self.trial.written
        sampling = {"max_tokens": written, "temperature": 0.0, "draft": "off", "json": True}
        return {"prompt": [letters(written)], **sampling}

    def _seconds(self, name: str) -> dict[str, Any]:
        """Return the seconds of a run's steps, without the first one, and their median."""
        metrics = quote([self.phone.path("runs", name, METRICS)])
        lines = self.phone.adb.check(f"cat {metrics}", "reading metrics").splitlines()
        records = [record for record in map(parse_json, lines) if record["event"] == "step"]
        seconds = [record["engine_seconds"] + record["host_seconds"] for record in records][1:]
        run = self.phone.job(name).summary.get("run", {})
        results = {"seconds_a_step": statistics.median(seconds), "step_seconds": seconds}
        return {**results, "threads": run.get("threads")}

    def _rates(self, names: Sequence[str]) -> dict[str, Any]:
        """Return median speeds of jobs that generate text, in tokens per second, and numbers of tokens."""
        lines = (line for name in names for line in self._console(name))
        records = [parse_json(line) for line in lines if line.startswith('{"row"')]
        keys = {"tokens_a_second": "tokens_per_second", "prompt_tokens_a_second": "prefill_tokens_per_second"}
        rates = {name: [record[key] for record in records if record[key]] for name, key in keys.items()}
        if not all(rates.values()):
            raise DeviceError("generate: the model ends its text at once.", code="text-not-written")
        return {
            **{name: statistics.median(values) for name, values in rates.items()},
            "prompt_tokens": records[0]["prompt_tokens"],
            "tokens": [len(record["tokens"]) for record in records],
        }

    def _measured(self, name: str, verb: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the measurements of a verb's job, which is started unless an earlier bench has done so.

        Settings that are None are left out.
        """
        phone, job = self.phone, self.phone.job(name)
        if job.state != "running" and not (job.state == "ended" and job.code == 0):
            phone.remove(phone.path("runs", name), phone.path("jobs", name), f"{self.results_folder}/{name}")
            given = {key: value for key, value in settings.items() if value is not None}
            words = send_settings(phone, given, f"{self.results_folder}/{name}")
            folder = self.results_folder
            measuring = [_MEASURING, folder, f"{folder}/{name}/{_MEASURED}", *map(str, self.cool)]
            phone.start(name, ["-m", *measuring, verb, *words])
        job = wait_for(phone, name)
        if job.code != 0:
            raise DeviceError(f"{verb}: {self._reason(name, job.code)}", code="verb-failed")
        content = phone.adb.check(
            f"cat {quote([f'{self.results_folder}/{name}/{_MEASURED}'])}", "reading the measurements"
        )
        measured: dict[str, Any] = parse_json(content)
        return measured

    def _reason(self, name: str, code: int | None) -> str:
        """Return why a job failed, from its exit code and its output."""
        if code in (None, _KILLED):
            return "it was killed, probably because the phone ran out of memory"
        lines = [line.strip() for line in self._console(name) if line.strip()]
        errors = [number for number, line in enumerate(lines) if "error:" in line]
        return " ".join(lines[errors[-1] :]) if errors else f"it ended with code {code}"

    def _console(self, name: str) -> list[str]:
        """Return the lines that a job printed."""
        console = quote([self.phone.path("jobs", name, "console.txt")])
        return self.phone.adb.check(f"cat {console}", "reading the output").splitlines()

    def _check_storage(self) -> None:
        """Raise DeviceError unless the phone has storage for the bundle and its packed weights."""
        size = sum(int(file["bytes"]) for file in self.bundle.manifest["files"].values())
        needed = size * (1 if self.phone.exists(f"{self.remote}.tree") else 2) + _RESERVE
        free = self.phone.free_bytes()
        if free is not None and free < needed:
            raise DeviceError(
                f"The trial needs {format_bytes(needed)} of storage, {format_bytes(free)} are free.",
                code="storage-full",
            )


def _figures(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return memory, temperature and energy of a job, from its start to its end."""
    sensors, joules = measured["sensors"], measured["joules"]
    energy = next((each["value"] for each in joules.values() if each["value"] is not None), None)
    return {
        "anonymous_mb": measured["anonymous_mb"],
        "peak_rss_mb": measured["peak_rss_mb"],
        "celsius": {end: sensors[end]["temperature_celsius"]["value"] for end in ("start", "end")},
        "watts": None if energy is None else energy / measured["seconds"],
        "joules": joules,
        "seconds": measured["seconds"],
        "sensors": sensors,
    }


def letters(count: int, seed: int = 0) -> str:
    """Return `count` random letters, which are about as many tokens."""
    return "".join(random.Random(seed).choices(string.ascii_letters, k=count))
