"""`prge android bench`: figures of a phone for the shapes whose figures others publish.

Bundles are made here by `prge export`, of models with random weights unless others are named. What was
measured is in a file after every trial: the same command goes on where a bench was ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from device_runner.android.adb import quote
from device_runner.android.bundles import Model, make_bundles
from device_runner.android.device import Phone, PhoneFlags
from device_runner.android.packages import digest
from device_runner.android.taking import Taking
from prge import __version__
from prge.errors import ConfigError, PrgeError
from prge.files.documents import DocumentError, read_json
from prge.files.run_folder import write_json
from prge.running.trials import TRIALS, Trial
from prge.verbs.outputs import OutputFile, OutputFolder

MEASURED, FAILED = "measured", "failed"


@dataclass(frozen=True)
class BenchSettings(PhoneFlags):
    """Measure on a phone what others publish: seconds, memory, heat and energy of steps, and texts."""

    only: tuple[str, ...] = ()
    """Trials; default: all. docs/phones.md has their names."""
    json: OutputFile = Path("phone.json")
    """File for what is measured. A bench that was ended goes on with its file."""
    models: list[str] = field(default_factory=list)
    """Real weights in the place of random ones: qwen2-0.5b=Qwen/Qwen2-0.5B, a hub id or a folder."""
    steps: int = 10
    """Steps of a trial; the first isn't counted."""
    threads: int | None = None
    """Threads that compute; default: performance cores."""
    start_below_celsius: float = 40.0
    """A trial waits until the phone is as cool as this."""
    cool_minutes: float = 20.0
    """Longest wait for that; a phone that stays hotter is not measured."""
    cache: OutputFolder | None = None
    """Folder for bundles, which may be removed at any time; default: ~/.cache/prge/bench."""
    tiny: bool = False
    """Try everything out on shapes of no size, whose figures mean nothing; the file says so."""

    def __post_init__(self) -> None:
        known = ", ".join(TRIALS)
        problems = [
            f"there is no trial {name}, there are {known}" for name in self.only if name not in TRIALS
        ]
        if self.steps < 2:
            problems.append(f"--steps is {self.steps}, must be at least 2: the first one isn't counted")
        shapes = sorted({trial.shape for trial in TRIALS.values()})
        problems += [
            f"--models has {word}, must be SHAPE=MODEL with a SHAPE of {', '.join(shapes)}"
            for word in self.models
            if word.partition("=")[0] not in shapes or not word.partition("=")[2]
        ]
        if problems:
            raise ConfigError("this can't be measured:", problems, code="settings-unusable")

    def chosen(self) -> dict[str, Model]:
        """What is measured, by the names of the trials."""
        real = dict(word.split("=", 1) for word in self.models)
        trials = {name: TRIALS[name] for name in dict.fromkeys(self.only or TRIALS)}
        if self.tiny:
            trials = {name: _cut_down(trial) for name, trial in trials.items()}
        return {name: Model(trial, real.get(trial.shape), self.tiny) for name, trial in trials.items()}

    def key(self, model: Model) -> str:
        """What the figures of a trial depend on, as a few letters."""
        text = json.dumps([asdict(model.trial), model.name, self.steps, self.threads])
        return digest(text)[:8]


def bench(phone: Phone, settings: BenchSettings) -> int:
    """Take all trials that the file lacks; 0 if it has all that are asked for then, else 1.

    Raises:
        PrgeError: the phone lacks something, the file is of another phone, or this machine has no room.
    """
    phone.need_this_driver()
    record = _Record.of(settings.json, {**_facts(phone), "tiny": settings.tiny})
    chosen = settings.chosen()
    keys = {name: settings.key(model) for name, model in chosen.items()}
    lacking = {name: model for name, model in chosen.items() if not record.has(name, keys[name])}
    bundles = make_bundles([*lacking.values()], settings.cache)
    cool = settings.start_below_celsius, settings.cool_minutes
    for number, (name, model) in enumerate(lacking.items()):
        print(f"{name}: {model.trial.text()}", flush=True)
        taking = None
        try:
            if isinstance(bundle := bundles[model], PrgeError):
                raise bundle
            taking = Taking(phone, f"bench-{name}-{keys[name]}", model.trial, bundle, settings.tiny, cool)
            found = {"status": MEASURED, **taking.take(settings.steps, settings.threads)}
        except PrgeError as error:
            # No serial number, and no folder of this user's: others read the file.
            reason = error.what.replace(phone.adb.serial, "the phone").replace(str(Path.home()), "~")
            found = {"status": FAILED, "reason": reason}
            print(f"  not measured: {reason}", flush=True)
        record.keep(name, {**found, "key": keys[name], "model": model.label, "trial": asdict(model.trial)})
        if taking is not None and model not in [*lacking.values()][number + 1 :]:
            with suppress(PrgeError):  # a phone that is lost is told of next
                taking.leave()
    print("\n".join(record.lines(chosen)))
    print(f"{settings.json} has the figures, and nothing that tells whose phone it is; see docs/phones.md")
    return 0 if all(record.has(name, key) for name, key in keys.items()) else 1


@dataclass(frozen=True)
class _Record:
    """The file of what was measured."""

    path: Path
    content: dict[str, Any]

    @staticmethod
    def of(path: Path, head: Mapping[str, Any]) -> _Record:
        """The file that is there, or a new one; raises ConfigError if it is none, or another phone's."""
        if not path.exists():
            return _Record(path, {**head, "trials": {}})
        try:
            content = read_json(path)
        except (OSError, DocumentError) as error:
            raise ConfigError(
                "the file of a bench can't be read:", [f"{path}: {error}"], code="bench-unreadable"
            ) from None
        found = content if isinstance(content, dict) and isinstance(content.get("trials"), dict) else {}
        if differing := [name for name in head if found.get(name, ...) != head[name]]:
            raise ConfigError(
                "the file is of another phone, runtime or prge:",
                [f"{path}: {name} is {found.get(name)}, here {head[name]}" for name in differing],
                remedy="give another file with --json",
                code="bench-of-other-device",
            )
        return _Record(path, found)

    def has(self, name: str, key: str) -> bool:
        """Whether a trial was measured, with the same settings."""
        trial = self.content["trials"].get(name, {})
        return trial.get("status") == MEASURED and trial.get("key") == key

    def keep(self, name: str, found: Mapping[str, Any]) -> None:
        """Write one trial down."""
        self.content["trials"][name] = found
        write_json(self.path, self.content)

    def lines(self, names: Mapping[str, Any]) -> Iterator[str]:
        """Trials as lines of the table in docs/phones.md."""
        phone = self.content["phone"]
        device = f"{phone['model'] or '?'} ({phone['soc'] or '?'}, Android {phone['android'] or '?'})"
        for name in names:
            cells = [name, device, *_cells(self.content["trials"][name]), self.content["prge"]]
            yield f"| {' | '.join(cells)} |"


def _cells(found: Mapping[str, Any]) -> list[str]:
    """Rate, anonymous and peak memory, heat and power."""
    if found["status"] == FAILED:
        return [f"not measured: {found['reason']}", "", "", "", ""]
    rate = f"{found['seconds_a_step']:.3g} s" if "seconds_a_step" in found else ""
    if not rate:
        rate = f"{found['tokens_a_second']:.3g}, prompts {found['prompt_tokens_a_second']:.3g} tokens/s"
    heat = " to ".join("?" if value is None else f"{value:.0f}" for value in found["celsius"].values())
    watts = "" if found["watts"] is None else f"{found['watts']:.1f}"
    return [rate, f"{found['anonymous_mb']:,.0f}", f"{found['peak_rss_mb']:,.0f}", heat, watts]


def _facts(phone: Phone) -> dict[str, Any]:
    """What the file says of the phone and of what runs there; nothing that only this one has."""

    def told(*properties: str) -> str | None:
        lines = (phone.adb.shell(f"getprop {name}").output.strip() for name in properties)
        return " ".join(filter(None, lines)) or None

    tree = phone.adb.check(f"cat {quote([phone.path('runtime.tree')])}", "reading the runtime")
    memory = phone.adb.shell("grep MemTotal /proc/meminfo").output.split()
    return {
        "prge": __version__,
        "runtime": tree.strip(),
        "phone": {
            "model": told("ro.product.manufacturer", "ro.product.model"),
            "soc": told("ro.soc.manufacturer", "ro.soc.model") or told("ro.board.platform"),
            "android": told("ro.build.version.release"),
            "memory_kb": int(memory[1]) if len(memory) > 1 and memory[1].isdigit() else None,
        },
    }


def _cut_down(trial: Trial) -> Trial:
    return replace(trial, batch=2, tokens=16, rank=2, written=8 if trial.written else 0)
