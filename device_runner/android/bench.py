"""`prge android bench`: benchmarks of a phone, for model shapes that other projects publish figures of.

`prge export` makes the bundles on this computer, of models with random weights unless you name others. The
bench writes each trial's result to a file at once: the same command continues an interrupted bench.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from device_runner.android.adb import quote
from device_runner.android.bundles import BenchModel, make_bundles
from device_runner.android.device import Phone, PhoneFlags
from device_runner.android.packages import digest
from device_runner.android.trial import TrialRunner
from prge import __version__
from prge.cli.outputs import OutputFile, OutputFolder
from prge.errors import ConfigError, PrgeError
from prge.formats.documents import DocumentError, read_json
from prge.formats.run_folder import write_json
from prge.training.trials import TRIALS, Trial

MEASURED, FAILED = "measured", "failed"


@dataclass(frozen=True)
class BenchSettings(PhoneFlags):
    """Benchmark a phone: seconds, memory, temperature and energy of training steps and of generation."""

    EXAMPLE: ClassVar = "smollm2-135m --json phone.json"

    only: tuple[str, ...] = ()
    """Trials to run; default: all. docs/phones.md lists their names."""
    json: OutputFile = Path("phone.json")
    """File for the results. An interrupted bench continues with its file."""
    models: list[str] = field(default_factory=list)
    """Real weights instead of random ones, as SHAPE=MODEL, such as qwen2-0.5b=Qwen/Qwen2-0.5B; MODEL is a
    hub id or a folder."""
    steps: int = 10
    """Steps of a trial; the first one isn't counted."""
    threads: int | None = None
    """Number of compute threads; default: one for each performance core."""
    start_below_celsius: float = 40.0
    """Wait before each trial until the phone is at most this warm, in degrees Celsius."""
    cool_minutes: float = 20.0
    """Longest wait for the phone to cool down; a phone that stays hotter is not measured."""
    cache: OutputFolder | None = None
    """Folder for bundles, which you may remove at any time; default: ~/.cache/prge/bench."""
    tiny: bool = False
    """Test the bench with tiny models, whose figures mean nothing; the file says so."""

    def __post_init__(self) -> None:
        known = ", ".join(TRIALS)
        problems = [
            f"there is no trial {name}; the trials are {known}" for name in self.only if name not in TRIALS
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
            raise ConfigError("Cannot run this bench:", problems, code="settings-unusable")

    def chosen(self) -> dict[str, BenchModel]:
        """Return the models to measure by the names of the trials."""
        real = dict(word.split("=", 1) for word in self.models)
        trials = {name: TRIALS[name] for name in dict.fromkeys(self.only or TRIALS)}
        if self.tiny:
            trials = {name: _cut_down(trial) for name, trial in trials.items()}
        return {name: BenchModel(trial, real.get(trial.shape), self.tiny) for name, trial in trials.items()}

    def key(self, model: BenchModel) -> str:
        """Return a short hash of everything that a trial's figures depend on."""
        text = json.dumps([asdict(model.trial), model.name, self.steps, self.threads])
        return digest(text)[:8]


def bench(phone: Phone, settings: BenchSettings) -> int:
    """Run all chosen trials that the file lacks.

    Returns:
        The exit code: 0 if the file has all chosen trials afterwards, else 1.

    Raises:
        PrgeError: the phone lacks something, the file is of another phone, or this machine's storage is full.
    """
    phone.require_this_driver()
    record = _Record.of(settings.json, {**_facts(phone), "tiny": settings.tiny})
    chosen = settings.chosen()
    keys = {name: settings.key(model) for name, model in chosen.items()}
    lacking = {name: model for name, model in chosen.items() if not record.has(name, keys[name])}
    bundles = make_bundles([*lacking.values()], settings.cache)
    cool = settings.start_below_celsius, settings.cool_minutes
    for number, (name, model) in enumerate(lacking.items()):
        print(f"{name}: {model.trial.text()}", flush=True)
        runner = None
        try:
            if isinstance(bundle := bundles[model], PrgeError):
                raise bundle
            runner = TrialRunner(
                phone, f"bench-{name}-{keys[name]}", model.trial, bundle, settings.tiny, cool
            )
            result = {"status": MEASURED, **runner.measure(settings.steps, settings.threads)}
        except PrgeError as error:
            # Other people read the file: it must show neither the serial number nor the user's folders.
            reason = error.what.replace(phone.adb.serial, "the phone").replace(str(Path.home()), "~")
            result = {"status": FAILED, "reason": reason}
            print(f"  not measured: {reason}", flush=True)
        record.add(name, {**result, "key": keys[name], "model": model.label, "trial": asdict(model.trial)})
        if runner is not None and model not in [*lacking.values()][number + 1 :]:
            with suppress(PrgeError):  # the next call reports a lost phone
                runner.remove_bundle()
    print("\n".join(record.lines(chosen)))
    print(
        f"{settings.json} has the figures, and nothing that identifies the phone's owner; see docs/phones.md"
    )
    return 0 if all(record.has(name, key) for name, key in keys.items()) else 1


@dataclass(frozen=True)
class _Record:
    """The results of a bench and their file."""

    path: Path
    content: dict[str, Any]

    @staticmethod
    def of(path: Path, head: Mapping[str, Any]) -> _Record:
        """Open the file, or begin a new one; raises ConfigError if it is unusable or another phone's."""
        if not path.exists():
            return _Record(path, {**head, "trials": {}})
        try:
            content = read_json(path)
        except (OSError, DocumentError) as error:
            raise ConfigError(
                "Cannot read the results of the bench:", [f"{path}: {error}"], code="bench-unreadable"
            ) from None
        record = content if isinstance(content, dict) and isinstance(content.get("trials"), dict) else {}
        if differing := [name for name in head if record.get(name, ...) != head[name]]:
            raise ConfigError(
                "The file is of another phone, runtime or version of prge:",
                [f"{path}: {name} is {record.get(name)}, here {head[name]}" for name in differing],
                remedy="Give another file with --json.",
                code="bench-of-other-device",
            )
        return _Record(path, record)

    def has(self, name: str, key: str) -> bool:
        """Return whether a trial was measured with the same settings."""
        trial = self.content["trials"].get(name, {})
        return trial.get("status") == MEASURED and trial.get("key") == key

    def add(self, name: str, result: Mapping[str, Any]) -> None:
        """Write the result of a trial to the file."""
        self.content["trials"][name] = result
        write_json(self.path, self.content)

    def lines(self, names: Mapping[str, Any]) -> Iterator[str]:
        """Yield the trials as lines of the table in docs/phones.md."""
        phone = self.content["phone"]
        device = f"{phone['model'] or '?'} ({phone['soc'] or '?'}, Android {phone['android'] or '?'})"
        for name in names:
            cells = [name, device, *_cells(self.content["trials"][name]), self.content["prge"]]
            yield f"| {' | '.join(cells)} |"


def _cells(result: Mapping[str, Any]) -> list[str]:
    """Return the cells of a result: speed, anonymous and peak memory, temperature and power."""
    if result["status"] == FAILED:
        return [f"not measured: {result['reason']}", "", "", "", ""]
    rate = f"{result['seconds_a_step']:.3g} s" if "seconds_a_step" in result else ""
    if not rate:
        rate = f"{result['tokens_a_second']:.3g}, prompts {result['prompt_tokens_a_second']:.3g} tokens/s"
    heat = " to ".join("?" if value is None else f"{value:.0f}" for value in result["celsius"].values())
    watts = "" if result["watts"] is None else f"{result['watts']:.1f}"
    return [rate, f"{result['anonymous_mb']:,.0f}", f"{result['peak_rss_mb']:,.0f}", heat, watts]


def _facts(phone: Phone) -> dict[str, Any]:
    """Return the facts of the phone and its runtime for the file; none of them identifies this one phone."""

    def properties_of(*properties: str) -> str | None:
        lines = (phone.adb.shell(f"getprop {name}").output.strip() for name in properties)
        return " ".join(filter(None, lines)) or None

    tree = phone.adb.check(f"cat {quote([phone.path('runtime.tree')])}", "reading the runtime")
    memory = phone.adb.shell("grep MemTotal /proc/meminfo").output.split()
    return {
        "prge": __version__,
        "runtime": tree.strip(),
        "phone": {
            "model": properties_of("ro.product.manufacturer", "ro.product.model"),
            "soc": properties_of("ro.soc.manufacturer", "ro.soc.model") or properties_of("ro.board.platform"),
            "android": properties_of("ro.build.version.release"),
            "memory_kb": int(memory[1]) if len(memory) > 1 and memory[1].isdigit() else None,
        },
    }


def _cut_down(trial: Trial) -> Trial:
    """Return a trial that is as small as possible."""
    return replace(trial, batch=2, tokens=16, rank=2, written=8 if trial.written else 0)
