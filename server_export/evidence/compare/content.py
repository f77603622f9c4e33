"""What a report says, in which order: where backpropagation wins comes first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from prge.pages.document import Block, Bullets, Code, Heading, Paragraph, Picture, Table
from server_export.evidence.compare.analysis import Interval, Spread, paired_gap, paired_ratio
from server_export.evidence.compare.outcome import (
    MEGABYTE,
    REFERENCE,
    Duel,
    Figure,
    Outcome,
    Result,
    compared,
    has_quality,
)

NONE = "–"
CAPTIONS = {
    "quality-seconds": "Quality on development rows against seconds of training: mean and range over seeds. "
    "Solid: gradients from forward passes; dashed, with dots: from backward passes.",
    "quality-rows": "The same against the rows computed.",
    "memory": "Memory. Blue: gradients from forward passes; orange: from backward passes.",
    "time-to-target": "Seconds of training to the target: mean and range over the seeds that got there.",
}
# What the first sentences are about: figures of which the first that is known counts, and what is told.
_QUESTIONS = (
    (("seconds_to_target",), "get", "to the target sooner", "get to the target in about the same time"),
    (("test_accuracy", "test_loss"), "end", "better on test rows", "end about as good on test rows"),
    (("peak_mb",), "take", "less memory", "take about as much memory"),
)


def compose(result: Result, outcome: Outcome, pictures: Mapping[str, str]) -> tuple[Block, ...]:
    """The blocks of a report.

    Args:
        result: of a comparison.
        outcome: its judgement.
        pictures: SVG by name.
    """
    return tuple(_blocks(result, outcome, pictures))


def _blocks(result: Result, outcome: Outcome, pictures: Mapping[str, str]) -> Iterator[Block]:
    yield Heading(f"Training methods on {result['model_name']}", 1)
    yield Paragraph(_bottom_line(outcome))
    yield from _verdict(result, outcome)
    failed = [
        f"{name}: {failure}" for name, method in result["methods"].items() for failure in method["failures"]
    ]
    if failed:
        yield Heading("What failed")
        yield Bullets(tuple(failed))
    yield Heading("The methods")
    yield _methods_table(result)
    yield Heading("To equal quality" if has_quality(result) else "Figures")
    yield Paragraph(_target_text(outcome))
    yield _summary_table(result, outcome)
    yield Paragraph(
        f"Means over {_count(len(result['settings']['seeds']), 'seed')}, with the range in brackets. Peak "
        f"memory is over that of an idle runner, {_mb(result['idle_bytes'])}, the same for all methods: what "
        "PyTorch itself takes counts, as a device needs it too. “not reached” counts the seeds that did not "
        "get to the target. Tokens of training rows count once, however many copies of a row a step computes."
    )
    for name, svg in pictures.items():
        yield Picture(svg, CAPTIONS[name], name)
    yield from _against_reference(result, outcome)
    yield from _searches(result)
    yield from _how(result)


def _bottom_line(outcome: Outcome) -> str:
    """The comparison in three sentences: time to equal quality, quality, memory."""
    told = []
    duels = {duel.figure.key: duel for duel in outcome.duels if duel.winner is not None}
    for keys, verb, better, tie in _QUESTIONS:
        duel = next((duels[key] for key in keys if key in duels), None)
        if duel is not None:
            begin = {
                "forward": f"Forward passes alone {verb} {better}",
                "backward": f"Backpropagation {verb}s {better}",
            }.get(duel.winner or "", f"Both {tie}")
            told.append(f"{begin}: {_without_brackets(_sides_text(duel, outcome))}.")
    return " ".join(told) or "Methods of one kind alone: the table below compares them with each other."


def _methods_table(result: Result) -> Table:
    rows = [
        (
            name,
            method["title"],
            "the engine" if method["family"] == "engine" else "PyTorch",
            "forward passes" if method["forward_only"] else "backward passes",
        )
        for name, method in result["methods"].items()
    ]
    return Table(("method", "what it is", "runs on", "gradients from"), tuple(rows), labels=4)


def _verdict(result: Result, outcome: Outcome) -> Iterator[Block]:
    sides = {method["forward_only"] for method in result["methods"].values() if method["runs"]}
    if len(sides) < 2:
        yield Heading("Where backpropagation wins")
        missing = "backward" if True in sides else "forward" if sides else "any"
        yield Paragraph(f"Not known: no method with gradients from {missing} passes has a finished run here.")
        return
    for winner, title in (
        ("backward", "Where backpropagation wins"),
        ("forward", "Where forward passes win"),
        ("tie", "Within noise"),
    ):
        told = [
            f"{duel.figure.title}: {_sides_text(duel, outcome)}."
            for duel in outcome.duels
            if duel.winner == winner
        ]
        if told or winner != "tie":
            yield Heading(title)
            yield Bullets(tuple(told)) if told else Paragraph("In none of the figures measured here.")


def _sides_text(duel: Duel, outcome: Outcome) -> str:
    """The best of both sides in a figure, the better one first, and how many times apart they are."""
    names = [name for name in (duel.backward, duel.forward) if name is not None]
    if duel.winner == "forward":
        names.reverse()
    told = [f"{name} {_value(duel.figure, outcome.figures[name][duel.figure.key])}" for name in names]
    if len(told) < 2:
        return f"{told[0]}; of the others none got there with every seed" if told else "none"
    text = f"{told[0]}, against {told[1]}"
    if duel.ratio is None:
        return text
    # The larger over the smaller reads best.
    ratio = duel.ratio
    if ratio.value < 1:
        ratio = Interval(1 / ratio.value, 1 / ratio.high, 1 / ratio.low)
    return f"{text}: {_times(ratio)} times"


def _target_text(outcome: Outcome) -> str:
    target = outcome.target
    if target.value is None:
        return f"There is no target: {target.origin}."
    return (
        f"The target is a {target.quality} of {target.value:.4g} on development rows ({target.origin}). Time "
        "and rows to it are where a run's curve first reaches it, interpolated linearly between the two "
        "evaluations around that point. “<” is an upper bound: the first evaluation on the way had passed it."
    )


def _summary_table(result: Result, outcome: Outcome) -> Table:
    header = ["method"]
    for figure in compared(result):
        has_unit = figure.unit and figure.unit != "rows"
        header.append(f"{figure.title}, {figure.unit}" if has_unit else figure.title)
    rows = [
        (name, *(_value(figure, outcome.figures[name][figure.key], False) for figure in compared(result)))
        for name in result["methods"]
    ]
    return Table(tuple(header), tuple(rows))


def _against_reference(result: Result, outcome: Outcome) -> Iterator[Block]:
    others = [name for name, method in result["methods"].items() if name != REFERENCE and method["runs"]]
    if not others or not result["methods"].get(REFERENCE, {}).get("runs"):
        return
    yield Heading(f"Against {REFERENCE}")
    header = ["method"]
    for figure in compared(result):
        difference = "difference in points" if figure.unit == "%" else "difference"
        header.append(f"{figure.title}, {'times' if figure.as_ratio else difference}")
    reference = outcome.figures[REFERENCE]
    rows = [
        (
            name,
            *(
                _against(figure, outcome.figures[name][figure.key], reference[figure.key])
                for figure in compared(result)
            ),
        )
        for name in others
    ]
    yield Table(tuple(header), tuple(rows))
    yield Paragraph(
        "Ratios are geometric means over the seeds at which both have the figure, differences are means; in "
        "brackets 95 % bootstrap intervals, paired by seed. With so few seeds they are too narrow: take them "
        "for the least noise there is."
    )


def _against(figure: Figure, own: Spread, other: Spread) -> str:
    """A ratio or a difference of two spreads, with its interval."""
    if not figure.as_ratio:
        gap = paired_gap(own.resolved, other.resolved)
        return NONE if gap is None else _with_ends(gap, "+.2f" if figure.unit == "%" else "+.3f")
    ratio = paired_ratio(own.resolved, other.resolved)
    censored = f", {own.censored} not reached" if own.censored else ""
    return NONE if ratio is None else _times(ratio) + censored


def _searches(result: Result) -> Iterator[Block]:
    settings = result["settings"]
    quality = settings["quality"]
    yield Heading("Learning rates")
    if settings["search_trials"] == 1:
        yield Paragraph("No search: each method has its default rate.")
        return
    yield Paragraph(
        f"Each method had {settings['search_trials']} rates tried on development rows, with seed "
        f"{settings['search_seed']}, which is none of the reported ones, and "
        f"{settings['search_share']:.0%} of a run's budget each; one more where the best was at the edge. "
        f"The best {quality} of a trial decided."
    )
    rows = []
    for name, method in result["methods"].items():
        rate, rates = method["learning_rate"], [trial["learning_rate"] for trial in method["search"]]
        tried = [f"{trial['learning_rate']:g}: {_number(trial[quality])}" for trial in method["search"]]
        # A better one may lie beyond.
        edge = ", at the edge" if rates and rate in (min(rates), max(rates)) else ""
        rows.append((name, NONE if rate is None else f"{rate:g}{edge}", ", ".join(tried) or NONE))
    yield Table(("method", "chosen", f"{quality} by rate tried"), tuple(rows), labels=3)


def _how(result: Result) -> Iterator[Block]:
    settings, meta, counts = result["settings"], result["meta"], result["row_counts"]
    methods = result["methods"].items()
    own = [f" ({name}: {method['optimizer']} alone)" for name, method in methods if method.get("optimizer")]
    steps = [
        f"{name} {runs[0]['steps']:,} ({runs[0]['rows']:,} rows)"
        for name, method in methods
        if (runs := method["runs"])
    ]
    yield Heading("How it was run")
    yield Bullets(
        (
            f"Budget of a run: {settings['budget_value']:,.6g} {settings['budget']}; a backward counts as "
            "two forwards. Evaluations on development rows are left out of rows and seconds. They come after "
            f"the same rows for all methods, each time {settings['evaluation_growth']:g} times as many.",
            f"Rows: {counts['train']:,} to train on, {counts['dev']:,} for development, {counts['test']:,} "
            "to test, the same files for all methods; a seed orders them the same way for all. Test rows are "
            "read once, at a run's best step on development rows.",
            f"Frozen weights: {settings['quantize']}, the same values for all methods. Optimizer: "
            f"{settings['optimizer']}{''.join(own)}, {settings['schedule']}; "
            f"{_count(settings['threads'], 'thread')}. A step of a method with several queries has that part "
            f"of the {settings['batch_size']} examples: queries x examples is the same.",
            f"Steps: {'; '.join(steps)}. The schedule spans a run's whole budget: what a curve reaches on "
            "the way, a shorter run may reach sooner.",
            "A run is a process of its own; its peak is max(VmHWM, VmRSS + VmSwap). Memory over the loaded "
            "model is of a run of a few steps without evaluations: its peak less what was there before the "
            "first step, without pages of files; it isn't known where loading took more.",
        )
    )
    yield Heading("Where, and with what")
    yield Code(result["command"])
    versions = ", ".join(f"{name} {version}" for name, version in meta["versions"].items())
    yield Bullets(
        (
            f"prge {meta['prge']}, Python {meta['python']}, {versions}",
            f"{meta['cpu']['model']}, {_count(meta['cpu']['count'] or 0, 'core')}, "
            f"{_mb(meta['memory_bytes'])}; {meta['platform']}",
        )
    )
    hashes = [(f"{split} rows", digest) for split, digest in result["hashes"]["rows"].items()]
    hashes += [(f"bundle {name}", digest) for name, digest in result["hashes"]["bundles"].items()]
    yield Table(("what", "SHA-256"), tuple(hashes), labels=2)


def _value(figure: Figure, spread: Spread, with_unit: bool = True) -> str:
    """A figure over seeds: mean and range."""
    low, high, total = spread.lowest, spread.highest, spread.censored + len(spread.values)
    if low is None or high is None:
        reached = figure.key.endswith("_to_target") and spread.censored
        return f"not reached: {total} of {total}" if reached else NONE
    unit = f" {figure.unit}" if with_unit and figure.unit and figure.unit != "rows" else ""
    if spread.bounded and spread.mean is not None:
        return f"< {_number(high)}{unit}"
    same = _number(low) == _number(high)
    ends = ("< " if spread.bounded else "") + (_number(low) if same else f"[{_number(low)}, {_number(high)}]")
    if spread.mean is None:
        return f"{ends}{unit}, not reached: {spread.censored} of {total}"
    return f"{_number(spread.mean)}{unit}" + ("" if same else f" {ends}")


def _without_brackets(text: str) -> str:
    return re.sub(r" \[[^\]]*\]", "", text)


def _times(ratio: Interval) -> str:
    return _with_ends(ratio, ".2f" if ratio.value < 100 else ".0f")


def _with_ends(interval: Interval, form: str) -> str:
    if math.isnan(interval.low):
        return f"{interval.value:{form}}"
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def _number(value: float | None) -> str:
    if value is None:
        return NONE
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1 else f"{value:.3g}"


def _mb(count: int | None) -> str:
    return NONE if count is None else f"{count / MEGABYTE:,.0f} MB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
