"""The blocks of a report of training runs: the result first, then how it was reached, then the next steps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from device_runner.reporting.next_steps import next_steps
from device_runner.reporting.run_reader import RunFacts
from device_runner.session.settings import RunSettings
from prge.errors import shortened
from prge.formats.curves import labels, series, smooth
from prge.formats.documents import mapping
from prge.formats.run_folder import CHECKPOINTS, FINAL, FINISHED, LOG, Record
from prge.formats.signatures import DECODE, PREFILL
from prge.report.charts import Line, line_chart
from prge.report.document import Block, Bullets, Code, Heading, Paragraph, Picture, Quote, Table
from prge.system.progress import format_duration
from prge.training.estimators.table import ESTIMATORS
from prge.training.evaluation import displacement_warning
from prge.training.monitor import describe_changes

NONE = "–"
SMOOTHING = 0.9
MAX_SAMPLES = 20
LONGEST_VALUE = 2000
# Values of runs that learn from a reward, with the captions of their charts.
_REWARD_CURVES = {
    "reward": "Mean reward. The faint line shows the reward of each step.",
    "solved": "Share of completions that solve their prompts.",
    "completion_length": "Mean length of completions.",
    "kl": "Divergence from the adapter at the start.",
}
_TITLES = {
    "solved": "share solved",
    "completion_length": "tokens per completion",
    "kl": "nats per token",
}
AXES = {"step": "steps", "forward_passes": "forward passes", "seconds": "seconds"}
_COUNTED = {"tokens": "training tokens", "completion_tokens": "tokens of completions"}
_STATUS = {
    "completed": "It took all of its steps",
    "stopped early": "It stopped early because scores of development rows no longer improved",
    "running": "It is running",
    "killed": "It was killed, or its machine lost power. Nothing is lost, and you can resume it",
    "interrupted": "It was interrupted, and you can resume it",
    "diverged": "It diverged and ended. Start a new run with a lower learning rate",
    "failed": "It failed; its log shows the reason",
}


def compose(runs: Sequence[RunFacts]) -> list[Block]:
    """Return the blocks of a report of one or several runs."""
    names = labels([run.folder for run in runs])
    if len(runs) == 1:
        return [Heading(f"Run {names[0]}", 1), *_run(runs[0], 2)]
    blocks: list[Block] = [Heading(f"{len(runs)} runs", 1), _overview(runs, names), *_together(runs, names)]
    for run, name in zip(runs, names, strict=True):
        blocks += [Heading(f"Run {name}"), *_run(run, 3)]
    return blocks


def _run(run: RunFacts, level: int) -> Iterator[Block]:
    """Yield the blocks about one run, with section headings of this level."""
    yield Paragraph(_bottom_line(run))
    if run.problems:
        yield Bullets(tuple(run.problems))
    yield from curves(run)
    for title, section in _SECTIONS.items():
        if blocks := list(section(run)):
            yield Heading(title, level)
            yield from blocks


def _overview(runs: Sequence[RunFacts], names: Sequence[str]) -> Table:
    """Return a table with one line for each run."""
    header = ("run", "estimator", "status", "steps", "before", "best", "seconds", "peak memory, MB")
    rows = []
    for run, name in zip(runs, names, strict=True):
        before, best = ("" if each is None else _score(run, each) for each in (run.before, run.best))
        rows.append(
            (
                name,
                str(run.config.get("estimator") or run.run.get("method") or NONE),
                run.status,
                f"{run.steps:,}",
                before or NONE,
                best or NONE,
                _number(_seconds(run)),
                _number(_megabytes(_memory(run).get("peak_bytes"))),
            )
        )
    return Table(header, tuple(rows), labels=3)


def _together(runs: Sequence[RunFacts], names: Sequence[str]) -> Iterator[Block]:
    """Yield charts that compare all runs: training loss and every metric, against each axis."""
    named = [(hue, *pair) for hue, pair in enumerate(zip(runs, names, strict=True))]
    for axis, label in AXES.items():
        loss = [
            Line(name, _smoothed(run, axis), hue) for hue, run, name in named if not run.learns_from_reward
        ]
        rewards = [
            Line(name, _smoothed(run, axis, "reward"), hue)
            for hue, run, name in named
            if run.learns_from_reward
        ]
        yield Picture(line_chart(loss, label, "training loss"), "Loss of training rows, smoothed.")
        yield Picture(line_chart(rewards, label, "training reward"), "Reward of training steps, smoothed.")
        for score in sorted({run.score for run in runs if run.evaluations}):
            lines = [
                Line(name, _points(run, "evaluation", [score], axis), hue, "marked")
                for hue, run, name in named
            ]
            drawing = line_chart(lines, label, _title(score))
            yield Picture(drawing, f"{_title(score).capitalize()} on development rows.")


def _bottom_line(run: RunFacts) -> str:
    """Return a summary of how the run ended and of its best score."""
    planned = run.config.get("steps")
    of = f" of {planned:,}" if isinstance(planned, int) else ""
    status = _STATUS.get(run.status, f"Its status is {shortened(run.status, 40)}")
    progress = f"{run.steps:,}{of} steps in {format_duration(_seconds(run) or 0)}"
    lines = [f"{status}. {progress}."]
    before, best, final = run.before, run.best, run.final_step
    if best is not None:
        start = f"{_score(run, before)} before, " if before is not None else ""
        in_final = ", which is in final/" if final == best["step"] else ""
        lines.append(
            f"{_title(run.score).capitalize()} on development rows: {start}{_score(run, best)} at best, "
            f"after step {best['step']:,}{in_final}."
        )
        if best["step"] == 0 and run.steps:
            lines.append("No step scored better than the adapter at the start.")
        for record in (best, run.evaluations[-1]):
            if fallen := displacement_warning(record):
                lines.append(f"At step {record['step']:,} {fallen}.")
                break
        if cut := best.get("cut_examples"):
            lines.append(f"{cut} of these rows were truncated because they were too long.")
    return " ".join(lines)


def curves(run: RunFacts, word: Callable[[str], str] = str) -> Iterator[Picture]:
    """Yield the charts of one run.

    Args:
        run: the run.
        word: translates the texts in the charts; by default they are in English.
    """
    if run.learns_from_reward:
        for name, caption in _REWARD_CURVES.items():
            drawing = line_chart(_curve(run, name, word), word("steps"), word(_title(name)))
            yield Picture(drawing, word(caption))
        return
    drawing = line_chart(_curve(run, "loss", word), word("steps"), word("loss"))
    yield Picture(drawing, word("Loss. The faint line shows the loss of each step."))
    if run.score != "loss":
        title = word(_title(run.score))
        points = [Line("", _points(run, "evaluation", [run.score]), 1, "marked")]
        better = word("Lower is better." if run.score == "perplexity" else "Higher is better.")
        caption = f"{title[:1].upper()}{title[1:]} {word('on development rows.')} {better}"
        yield Picture(line_chart(points, word("steps"), title), caption)


def _curve(run: RunFacts, name: str, word: Callable[[str], str]) -> list[Line]:
    """Return the lines of a value: of each step, smoothed, and of development rows."""
    return [
        Line("", _points(run, "step", [name]), 0, "faint"),
        Line(word("training rows, smoothed"), _smoothed(run, name=name), 0),
        Line(word("development rows"), _points(run, "evaluation", [name]), 1, "marked"),
    ]


def _result(run: RunFacts) -> Iterator[Block]:
    """Yield a table of the first, the best and the last evaluation."""
    last = run.evaluations[-1] if run.evaluations else None
    rows: dict[int, tuple[str, ...]] = {}
    shown = ("reward", "solved") if run.score == "reward" else tuple(dict.fromkeys(("loss", run.score)))
    for label, record in (("before", run.before), ("best", run.best), ("last", last)):
        if record is not None and record["step"] not in rows:
            cells = [f"{record['step']:,}", *(_number(record.get(name)) for name in shown)]
            mark = "yes" if record["step"] == run.final_step else ""
            rows[record["step"]] = (label, mark or NONE, *cells)
    if rows:
        header = ("development rows", "in final/", "step", *map(_title, shown))
        yield Table(header, tuple(rows.values()), labels=2)


def _samples(run: RunFacts) -> Iterator[Block]:
    """Yield prompts with the completions sampled before the first step and at the final step.

    Where a prompt has no sample of the final step, its last one is shown.
    """
    if not run.samples:
        return
    after = run.final_step if run.final_step is not None else max(sample["step"] for sample in run.samples)
    by_prompt: dict[str, dict[int, Record]] = {}
    for sample in run.samples:
        by_prompt.setdefault(json.dumps(sample["prompt"]), {})[sample["step"]] = sample
    pairs = [
        (by_step[0]["text"], by_step[after if after in by_step else max(by_step)]["text"])
        for by_step in by_prompt.values()
        if 0 in by_step and max(by_step) > 0
    ]
    if changes := describe_changes([first for first, _ in pairs], [last for _, last in pairs]):
        yield Paragraph(f"{changes.removeprefix('note: ').capitalize()}.")
    for by_step in list(by_prompt.values())[:MAX_SAMPLES]:
        yield Paragraph("Prompt:")
        yield Quote(prompt_text(next(iter(by_step.values()))["prompt"]))
        for step in sorted({0, after if after in by_step else max(by_step)} & by_step.keys()):
            yield Paragraph(f"{'Before' if step == 0 else f'After step {step:,}'}:")
            yield Quote(shortened(by_step[step]["text"], LONGEST_VALUE))
        if "right" in (first := next(iter(by_step.values()))):
            yield Paragraph("Reference:")
            yield Quote(shortened(first["right"], LONGEST_VALUE))
    if len(by_prompt) > MAX_SAMPLES:
        yield Paragraph(f"{len(by_prompt) - MAX_SAMPLES} more prompts are in samples.jsonl.")


def prompt_text(prompt: Any) -> str:
    """Return a prompt as plain text; messages have one line each, with their role."""
    if isinstance(prompt, list) and all(isinstance(each, Mapping) for each in prompt):
        text = "\n".join(f"{each.get('role')}: {each.get('content')}" for each in prompt)
    else:
        text = str(prompt)
    return shortened(text, LONGEST_VALUE)


def _decisions(run: RunFacts) -> Iterator[Block]:
    """Yield a table of the settings that `prge tune` chose."""
    if run.decisions:
        rows = tuple((each.name, each.value, each.why) for each in run.decisions)
        yield Table(("decision", "value", "why"), rows, labels=3)


def _method(run: RunFacts) -> Iterator[Block]:
    """Yield a description of the estimators, and a table of model, weights and optimizer."""
    estimators = [name for name in _estimators(run) if name in ESTIMATORS]
    for name in dict.fromkeys(estimators):
        yield Paragraph(ESTIMATORS[name].meaning)
    if not estimators and isinstance(run.run.get("method"), str):
        yield Paragraph(f"Trained in PyTorch by `prge baseline --method {run.run['method']}`.")
    model, quantization = mapping(run.run.get("model")), mapping(run.run.get("quantization"))
    yield _facts(
        {
            "estimator": ", then ".join(estimators),
            "model": model.get("name_or_path"),
            "model content": model.get("revision") or model.get("sha256"),
            "weights in the model's file": mapping(model.get("source")).get("description"),
            "frozen weights": quantization.get("scheme") or ("fp32" if run.run else None),
            "trainable parameters": _count(run.train.get("trained_values")),
            "forward passes": _count(run.train.get("forward_passes")),
            "learning rate": _number(run.config.get("learning_rate")),
            "optimizer": run.config.get("optimizer"),
        }
    )


def _estimators(run: RunFacts) -> list[str]:
    """Return the estimators of the steps, in order; `--change-estimator` allows several."""
    periods = run.run.get("estimators")
    names = [str(mapping(period).get("estimator")) for period in periods] if isinstance(periods, list) else []
    return names or [str(run.config.get("estimator"))]


def _costs(run: RunFacts) -> Iterator[Block]:
    """Yield a table of memory, time and speed."""
    memory, steps = _memory(run), [each for each in run.metrics if each["event"] == "step"]
    training = (_seconds(run) or 0.0) - (_float(run.train.get("evaluation_seconds")) or 0.0)
    counted = "completion_tokens" if run.learns_from_reward else "tokens"
    tokens = sum(_float(each.get(counted)) or 0.0 for each in steps)
    engine = sum(_float(each.get("engine_seconds")) or 0.0 for each in steps)
    speed = tokens / training if training > 0 and tokens else None
    facts = {
        "peak memory of the process": _bytes(memory.get("peak_bytes")),
        "of this, in addition to the loaded weights": _bytes(memory.get("beyond_loaded_bytes")),
        "time of steps": format_duration(training) if steps else None,
        "time of evaluations": _duration(run.train.get("evaluation_seconds")),
        "pauses": _duration(run.train.get("paused_seconds")),
        "speed": f"{_number(speed)} {_COUNTED[counted]} per second" if speed else None,
        "share of the time in the engine": f"{min(1.0, engine / training):.0%}"
        if engine and training > 0
        else None,
        "engine": run.run.get("engine"),
        "threads": run.run.get("threads"),
    }
    yield _facts(facts)


def _data(run: RunFacts) -> Iterator[Block]:
    """Yield a table of the training and development rows, and notes about them."""
    data = mapping(run.train.get("data"))
    parts = {name: mapping(data.get(name)) for name in ("train", "dev") if mapping(data.get(name))}
    if not parts:
        yield _facts(
            {
                "training rows": _count(run.train.get("training_rows")),
                "tokens of training rows": _count(run.train.get("training_tokens")),
                "development rows": _count(run.train.get("development_rows")),
            }
        )
        return
    columns = ("rows", "examples", "tokens", "target_tokens", "longest", "dropped_target_tokens")
    names = ("rows", "examples", "tokens", "target tokens", "longest, tokens", "target tokens left out")
    titles = {"train": "training", "dev": "development"}
    rows = tuple(
        (
            titles[name],
            str(run.config.get(name) or NONE),
            *(_count(part.get(each)) or NONE for each in columns),
        )
        for name, part in parts.items()
    )
    yield Table(("part", "file", *names), rows, labels=2)
    notes = [
        f"{titles[name]} rows: {event}: {_count(count)}"
        for name, part in parts.items()
        for event, count in mapping(part.get("notes")).items()
    ]
    notes += [
        f"{titles[name]} rows: unknown target tokens of the tokenizer: {_count(unknown)}"
        for name, part in parts.items()
        if (unknown := part.get("unknown_target_tokens"))
    ]
    if notes:
        yield Bullets(tuple(notes))


def _settings(run: RunFacts) -> Iterator[Block]:
    """Yield a table of the settings that differ from their defaults, and one of all others."""
    if not run.config:
        return
    defaults = _defaults()
    shown = {name: _value(value) for name, value in run.config.items()}
    changed = {name: value for name, value in shown.items() if value != defaults.get(name)}
    rows = tuple((name, value, defaults.get(name, NONE)) for name, value in changed.items())
    yield Table(("setting", "value", "default"), rows, labels=3)
    others = tuple((name, value) for name, value in shown.items() if name not in changed)
    if others:
        yield Paragraph("All other settings have their defaults:")
        yield Table(("setting", "default"), others, labels=2)


def _defaults() -> dict[str, str]:
    """Return the defaults of `prge run` as config.yaml spells them."""
    return {
        item.name: _value(json.loads(json.dumps(default, default=str)))
        for item in dataclasses.fields(RunSettings)
        for default in [item.default_factory() if callable(item.default_factory) else item.default]
        if default is not dataclasses.MISSING
    }


def _value(value: Any) -> str:
    """Return a setting as readable text."""
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else shortened(str(value), LONGEST_VALUE)


def _paths(run: RunFacts) -> Iterator[Block]:
    """Yield a table of the paths of adapter, checkpoints and log."""
    names = {"adapter": FINAL, "checkpoints": CHECKPOINTS, "log": LOG}
    paths = {title: run.folder / name for title, name in names.items()}
    yield _facts({title: path for title, path in paths.items() if path.exists()})


def _next(run: RunFacts) -> Iterator[Block]:
    """Yield commands to continue with; none while the run is running."""
    if run.status == "running":
        return
    finished = run.status in FINISHED and (run.folder / FINAL).is_dir()
    roles = run.run.get("roles")
    can_generate = isinstance(roles, list) and {PREFILL, DECODE} <= set(map(str, roles))
    steps = next_steps(run.folder, run.config, finished, can_generate)
    yield Code("\n".join(f"# {step.purpose}\n{step.command}" for step in steps))


def _machine(run: RunFacts) -> Iterator[Block]:
    """Yield a table of the machine and of software versions."""
    cpu, versions = mapping(run.meta.get("cpu")), mapping(run.meta.get("versions"))
    facts = {
        "prge": run.meta.get("prge"),
        "Python": run.meta.get("python"),
        "processor": cpu.get("model"),
        "cores": cpu.get("count"),
        "memory": _bytes(run.meta.get("memory_bytes")),
        "platform": run.meta.get("platform"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "bundle": run.run.get("bundle"),
        "written": run.meta.get("written"),
    }
    yield _facts(facts)


_SECTIONS: Mapping[str, Callable[[RunFacts], Iterator[Block]]] = {
    "Result": _result,
    "Completions before and after training": _samples,
    "What was chosen, and why": _decisions,
    "Training method": _method,
    "Memory and speed": _costs,
    "Data": _data,
    "Settings": _settings,
    "Files": _paths,
    "Next steps": _next,
    "Machine": _machine,
}


def _facts(facts: Mapping[str, Any]) -> Block:
    """Return a table of the facts that have a value."""
    rows = tuple(
        (name, shortened(str(value), LONGEST_VALUE))
        for name, value in facts.items()
        if value not in (None, "")
    )
    return (
        Table(("fact", "value"), rows, labels=2)
        if rows
        else Paragraph("The run recorded nothing about this.")
    )


def _points(run: RunFacts, event: str, names: Sequence[str], axis: str = "step") -> list[tuple[float, float]]:
    """Return the points (axis, value) of a metric."""
    return list(zip(*series(run.metrics, event, axis, names), strict=True))


def _smoothed(run: RunFacts, axis: str = "step", name: str = "loss") -> list[tuple[float, float]]:
    """Return the points (axis, value) of a smoothed value of the steps."""
    x, values = series(run.metrics, "step", axis, [name])
    return list(zip(x, smooth(values, SMOOTHING), strict=True))


def _score(run: RunFacts, record: Record) -> str:
    return _number(record.get(run.score))


def _title(score: str) -> str:
    return _TITLES.get(score) or score.replace("_", " ")


def _memory(run: RunFacts) -> Mapping[str, Any]:
    return mapping(run.train.get("memory"))


def _seconds(run: RunFacts) -> float | None:
    """Return the duration of the run: that of run.json, or of the last metric where it is longer."""
    # A killed run could not update run.json.
    durations = [_float(record.get("seconds")) for record in (run.train, *run.metrics[-1:])]
    return max((seconds for seconds in durations if seconds is not None), default=None)


def _float(value: Any) -> float | None:
    """Return a number as float; None for anything else, booleans included."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _number(value: Any) -> str:
    number = _float(value)
    if number is None:
        return NONE
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def _count(value: Any) -> str | None:
    number = _float(value)
    return None if number is None else f"{number:,.0f}"


def _megabytes(value: Any) -> float | None:
    number = _float(value)
    return None if number is None else number / 1e6


def _bytes(value: Any) -> str | None:
    megabytes = _megabytes(value)
    return None if megabytes is None else f"{megabytes:,.0f} MB"


def _duration(value: Any) -> str | None:
    number = _float(value)
    return format_duration(number) if number else None
