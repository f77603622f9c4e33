"""What a report says of runs, in which order: the result first, then how it came about, then what is next."""

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
from prge.training.evaluation import displacement
from prge.training.monitor import describe_changes

NONE = "–"
SMOOTHING = 0.9
MOST_SAMPLES = 20
LONGEST_VALUE = 2000
AXES = {"step": "steps", "rows": "rows computed", "seconds": "seconds"}
_STATUS = {
    "completed": "It took all of its steps",
    "stopped early": "It stopped early: development rows got no better",
    "running": "It is running",
    "killed": "It was killed, or its machine went off: nothing is lost, it can go on",
    "interrupted": "It was interrupted: it can go on",
    "diverged": "It diverged, which ended it: start a new run with a lower learning rate",
    "failed": "It failed; its log says why",
}


def compose(runs: Sequence[RunFacts]) -> list[Block]:
    """The blocks of a report."""
    names = labels([run.folder for run in runs])
    if len(runs) == 1:
        return [Heading(f"Run {names[0]}", 1), *_run(runs[0], 2)]
    blocks: list[Block] = [Heading(f"{len(runs)} runs", 1), _overview(runs, names), *_together(runs, names)]
    for run, name in zip(runs, names, strict=True):
        blocks += [Heading(f"Run {name}"), *_run(run, 3)]
    return blocks


def _run(run: RunFacts, level: int) -> Iterator[Block]:
    """Everything about one run."""
    yield Paragraph(_bottom_line(run))
    if run.problems:
        yield Bullets(tuple(run.problems))
    yield from curves(run)
    for title, section in _SECTIONS.items():
        if blocks := list(section(run)):
            yield Heading(title, level)
            yield from blocks


def _overview(runs: Sequence[RunFacts], names: Sequence[str]) -> Table:
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
    """All runs over each other, against each axis: training loss, and every metric that some of them have."""
    named = [(hue, *pair) for hue, pair in enumerate(zip(runs, names, strict=True))]
    for axis, label in AXES.items():
        loss = [Line(name, _smoothed(run, axis), hue) for hue, run, name in named]
        yield Picture(line_chart(loss, label, "training loss"), "Loss of training rows, smoothed.")
        for score in sorted({run.score for run in runs if run.evaluations}):
            lines = [
                Line(name, _points(run, "evaluation", [score], axis), hue, "marked")
                for hue, run, name in named
            ]
            drawing = line_chart(lines, label, _title(score))
            yield Picture(drawing, f"{_title(score).capitalize()} on development rows.")


def _bottom_line(run: RunFacts) -> str:
    """How it ended and what it brought, in two sentences."""
    planned = run.config.get("steps")
    of = f" of {planned:,}" if isinstance(planned, int) else ""
    told = _STATUS.get(run.status, f"Its status is {shortened(run.status, 40)}")
    taken = f"{run.steps:,}{of} steps in {format_duration(_seconds(run) or 0)}"
    lines = [f"{told}. {taken}."]
    before, best, final = run.before, run.best, run.final_step
    if best is not None:
        start = f"{_score(run, before)} before, " if before is not None else ""
        place = ", which is in final/" if final == best["step"] else ""
        lines.append(
            f"{_title(run.score).capitalize()} on development rows: {start}{_score(run, best)} at best, "
            f"after step {best['step']:,}{place}."
        )
        if best["step"] == 0 and run.steps:
            lines.append("No step was better than the start.")
        for record in (best, run.evaluations[-1]):
            if fallen := displacement(record):
                lines.append(f"At step {record['step']:,} {fallen}.")
                break
        if cut := best.get("cut_examples"):
            lines.append(f"{cut} of these rows are not whole: they were too long.")
    return " ".join(lines)


def curves(run: RunFacts, word: Callable[[str], str] = str) -> Iterator[Picture]:
    """The pictures of one run; `word` says words of it in another language."""
    loss = [
        Line("", _points(run, "step", ["loss"]), 0, "faint"),
        Line(word("training rows, smoothed"), _smoothed(run), 0),
        Line(word("development rows"), _points(run, "evaluation", ["loss"]), 1, "marked"),
    ]
    drawing = line_chart(loss, word("steps"), word("loss"))
    yield Picture(drawing, word("Loss. Faint: of each step's rows."))
    if run.score != "loss":
        title = word(_title(run.score))
        points = [Line("", _points(run, "evaluation", [run.score]), 1, "marked")]
        better = word("Lower is better." if run.score == "perplexity" else "Higher is better.")
        caption = f"{title[:1].upper()}{title[1:]} {word('on development rows.')} {better}"
        yield Picture(line_chart(points, word("steps"), title), caption)


def _result(run: RunFacts) -> Iterator[Block]:
    last = run.evaluations[-1] if run.evaluations else None
    found: dict[int, tuple[str, ...]] = {}
    score = run.score
    for called, record in (("before", run.before), ("best", run.best), ("last", last)):
        if record is not None and record["step"] not in found:
            cells = [f"{record['step']:,}", _number(record["loss"])]
            cells += [_number(record.get(score))] if score != "loss" else []
            mark = "yes" if record["step"] == run.final_step else ""
            found[record["step"]] = (called, mark or NONE, *cells)
    if found:
        header = (
            "development rows",
            "in final/",
            "step",
            "loss",
            *([_title(score)] if score != "loss" else []),
        )
        yield Table(header, tuple(found.values()), labels=2)


def _samples(run: RunFacts) -> Iterator[Block]:
    """What the model wrote before the first step and after the last one that it was asked at."""
    if not run.samples:
        return
    after = run.final_step if run.final_step is not None else max(each["step"] for each in run.samples)
    by_prompt: dict[str, dict[int, Record]] = {}
    for each in run.samples:
        by_prompt.setdefault(json.dumps(each["prompt"]), {})[each["step"]] = each
    pairs = [
        (answers[0]["text"], answers[after if after in answers else max(answers)]["text"])
        for answers in by_prompt.values()
        if 0 in answers and max(answers) > 0
    ]
    if changes := describe_changes([first for first, _ in pairs], [last for _, last in pairs]):
        yield Paragraph(f"{changes.removeprefix('note: ').capitalize()}.")
    for answers in list(by_prompt.values())[:MOST_SAMPLES]:
        yield Paragraph("Prompt:")
        yield Quote(prompt_text(next(iter(answers.values()))["prompt"]))
        for step in sorted({0, after if after in answers else max(answers)} & answers.keys()):
            yield Paragraph(f"{'Before' if step == 0 else f'After step {step:,}'}:")
            yield Quote(shortened(answers[step]["text"], LONGEST_VALUE))
        if "right" in (first := next(iter(answers.values()))):
            yield Paragraph("Right:")
            yield Quote(shortened(first["right"], LONGEST_VALUE))
    if len(by_prompt) > MOST_SAMPLES:
        yield Paragraph(f"{len(by_prompt) - MOST_SAMPLES} more prompts are in samples.jsonl.")


def prompt_text(prompt: Any) -> str:
    """A prompt as its file had it: a text, or messages."""
    if isinstance(prompt, list) and all(isinstance(each, Mapping) for each in prompt):
        text = "\n".join(f"{each.get('role')}: {each.get('content')}" for each in prompt)
    else:
        text = str(prompt)
    return shortened(text, LONGEST_VALUE)


def _decisions(run: RunFacts) -> Iterator[Block]:
    if run.decisions:
        rows = tuple((each.name, each.value, each.why) for each in run.decisions)
        yield Table(("decision", "value", "why"), rows, labels=3)


def _method(run: RunFacts) -> Iterator[Block]:
    estimators = [name for name in _estimators(run) if name in ESTIMATORS]
    for name in dict.fromkeys(estimators):
        yield Paragraph(ESTIMATORS[name].meaning)
    if not estimators and isinstance(run.run.get("method"), str):
        yield Paragraph(f"In PyTorch, by `prge baseline --method {run.run['method']}`.")
    model, quantization = mapping(run.run.get("model")), mapping(run.run.get("quantization"))
    yield _facts(
        {
            "estimator": ", then ".join(estimators),
            "model": model.get("name_or_path"),
            "model content": model.get("revision") or model.get("sha256"),
            "weights of the model's file": mapping(model.get("source")).get("description"),
            "frozen weights": quantization.get("scheme") or ("fp32" if run.run else None),
            "trained numbers": _count(run.train.get("trained_values")),
            "rows computed": _count(run.train.get("rows")),
            "learning rate": _number(run.config.get("learning_rate")),
            "optimizer": run.config.get("optimizer"),
        }
    )


def _estimators(run: RunFacts) -> list[str]:
    """What steps were taken with, in order: `--change-estimator` lets there be several."""
    told = run.run.get("estimators")
    names = [str(mapping(each).get("estimator")) for each in told] if isinstance(told, list) else []
    return names or [str(run.config.get("estimator"))]


def _costs(run: RunFacts) -> Iterator[Block]:
    memory, steps = _memory(run), [each for each in run.metrics if each["event"] == "step"]
    training = (_seconds(run) or 0.0) - (_float(run.train.get("evaluation_seconds")) or 0.0)
    tokens = sum(_float(each.get("tokens")) or 0.0 for each in steps)
    engine = sum(_float(each.get("engine_seconds")) or 0.0 for each in steps)
    speed = tokens / training if training > 0 and tokens else None
    facts = {
        "peak memory of the process": _bytes(memory.get("peak_bytes")),
        "of it beyond what was loaded": _bytes(memory.get("beyond_loaded_bytes")),
        "time of steps": format_duration(training) if steps else None,
        "time of evaluations": _duration(run.train.get("evaluation_seconds")),
        "pauses": _duration(run.train.get("paused_seconds")),
        "speed": f"{_number(speed)} tokens of rows a second" if speed else None,
        "of it in the engine": f"{min(1.0, engine / training):.0%}" if engine and training > 0 else None,
        "engine": run.run.get("engine"),
        "threads": run.run.get("threads"),
    }
    yield _facts(facts)


def _data(run: RunFacts) -> Iterator[Block]:
    told = mapping(run.train.get("data"))
    parts = {name: mapping(told.get(name)) for name in ("train", "dev") if mapping(told.get(name))}
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
    called = {"train": "training", "dev": "development"}
    rows = tuple(
        (
            called[name],
            str(run.config.get(name) or NONE),
            *(_count(part.get(each)) or NONE for each in columns),
        )
        for name, part in parts.items()
    )
    yield Table(("part", "file", *names), rows, labels=2)
    notes = [
        f"{called[name]} rows: {event}: {_count(count)}"
        for name, part in parts.items()
        for event, count in mapping(part.get("notes")).items()
    ]
    notes += [
        f"{called[name]} rows: target tokens that the tokenizer can't spell: {_count(unknown)}"
        for name, part in parts.items()
        if (unknown := part.get("unknown_target_tokens"))
    ]
    if notes:
        yield Bullets(tuple(notes))


def _settings(run: RunFacts) -> Iterator[Block]:
    """Settings that differ from their defaults, then all others."""
    if not run.config:
        return
    defaults = _defaults()
    shown = {name: _value(value) for name, value in run.config.items()}
    changed = {name: value for name, value in shown.items() if value != defaults.get(name)}
    rows = tuple((name, value, defaults.get(name, NONE)) for name, value in changed.items())
    yield Table(("setting", "value", "default"), rows, labels=3)
    others = tuple((name, value) for name, value in shown.items() if name not in changed)
    if others:
        yield Paragraph("All others have their defaults:")
        yield Table(("setting", "default"), others, labels=2)


def _defaults() -> dict[str, str]:
    """Defaults of `prge run` as config.yaml has them."""
    return {
        item.name: _value(json.loads(json.dumps(default, default=str)))
        for item in dataclasses.fields(RunSettings)
        for default in [item.default_factory() if callable(item.default_factory) else item.default]
        if default is not dataclasses.MISSING
    }


def _value(value: Any) -> str:
    """A setting as a person reads it."""
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else shortened(str(value), LONGEST_VALUE)


def _places(run: RunFacts) -> Iterator[Block]:
    places = {"adapter": FINAL, "checkpoints": CHECKPOINTS, "log": LOG}
    there = {name: run.folder / place for name, place in places.items()}
    yield _facts({name: path for name, path in there.items() if path.exists()})


def _next(run: RunFacts) -> Iterator[Block]:
    if run.status == "running":
        return
    finished = run.status in FINISHED and (run.folder / FINAL).is_dir()
    roles = run.run.get("roles")
    writes = isinstance(roles, list) and {PREFILL, DECODE} <= set(map(str, roles))
    steps = next_steps(run.folder, run.config, finished, writes)
    yield Code("\n".join(f"# {step.purpose}\n{step.command}" for step in steps))


def _machine(run: RunFacts) -> Iterator[Block]:
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
    "What it answers, before and after": _samples,
    "What was chosen, and why": _decisions,
    "How it was trained": _method,
    "Memory and speed": _costs,
    "Data": _data,
    "Settings": _settings,
    "Where things are": _places,
    "What comes next": _next,
    "Where it ran": _machine,
}


def _facts(facts: Mapping[str, Any]) -> Block:
    """A table of those that are known."""
    rows = tuple(
        (name, shortened(str(value), LONGEST_VALUE))
        for name, value in facts.items()
        if value not in (None, "")
    )
    return Table(("fact", "value"), rows, labels=2) if rows else Paragraph("Nothing is known.")


def _points(run: RunFacts, event: str, names: Sequence[str], axis: str = "step") -> list[tuple[float, float]]:
    return list(zip(*series(run.metrics, event, axis, names), strict=True))


def _smoothed(run: RunFacts, axis: str = "step") -> list[tuple[float, float]]:
    """The training loss, smoothed."""
    x, loss = series(run.metrics, "step", axis, ["loss"])
    return list(zip(x, smooth(loss, SMOOTHING), strict=True))


def _score(run: RunFacts, record: Record) -> str:
    return _number(record.get(run.score))


def _title(score: str) -> str:
    return score.replace("_", " ")


def _memory(run: RunFacts) -> Mapping[str, Any]:
    return mapping(run.train.get("memory"))


def _seconds(run: RunFacts) -> float | None:
    """Of the summary, or of the metrics where a kill left it behind."""
    told = [_float(each.get("seconds")) for each in (run.train, *run.metrics[-1:])]
    return max((each for each in told if each is not None), default=None)


def _float(value: Any) -> float | None:
    """A number that is one."""
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
