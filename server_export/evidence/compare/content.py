"""Compose the content of a report; it begins with the figures in which backpropagation wins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from prge.report.document import Block, Bullets, Code, Heading, Paragraph, Picture, Table
from server_export.evidence.compare.analysis import Interval, Spread, paired_gap, paired_ratio
from server_export.evidence.compare.outcome import (
    MEGABYTE,
    REFERENCE,
    Duel,
    Figure,
    Outcome,
    Result,
    has_quality,
    reported_figures,
)

NONE = "–"
CAPTIONS = {
    "loss-seconds": "Loss on development rows against seconds of training: mean and range over seeds. Solid: "
    "gradients from forward passes; dashed, with dots: from backward passes.",
    "loss-forward_passes": "The same against forward passes.",
}
_VERDICTS = {
    "backward": "Where backpropagation wins",
    "forward": "Where forward passes win",
    "tie": "Within noise",
}


def compose(result: Result, outcome: Outcome, pictures: Mapping[str, str]) -> Iterator[Block]:
    """Yield the blocks of a report.

    Args:
        result: result of a comparison.
        outcome: figures and winners of the result.
        pictures: SVG by name.
    """
    methods = result["methods"]
    yield Heading(f"Training methods on {result['model_name']}", 1)
    yield from _verdict(result, outcome)
    failed = [f"{name}: {failure}" for name, method in methods.items() for failure in method["failures"]]
    if failed:
        yield Heading("What failed")
        yield Bullets(tuple(failed))
    yield Heading("The methods")
    yield _methods_table(result)
    yield Heading("To equal loss" if has_quality(result) else "Figures")
    yield Paragraph(_target_text(outcome))
    yield _summary_table(result, outcome)
    yield Paragraph(
        f"Means over {_count(len(result['settings']['seeds']), 'seed')}, with the range in brackets. Peak "
        f"memory is above that of an idle runner, {_mb(result['idle_bytes'])}, the same for all methods: the "
        "memory of PyTorch itself counts, since a device needs it too. “not reached” counts the seeds that "
        "did not reach the target. A token of a training row counts once, however many copies of its row a "
        "step computes."
    )
    for name, svg in pictures.items():
        yield Picture(svg, CAPTIONS[name], name)
    yield from _against_reference(result, outcome)
    yield from _searches(result)
    yield from _how(result)


def _verdict(result: Result, outcome: Outcome) -> Iterator[Block]:
    sides = {method["forward_only"] for method in result["methods"].values() if method["runs"]}
    if len(sides) < 2:
        yield Heading(_VERDICTS["backward"])
        missing = "backward" if True in sides else "forward" if sides else "any"
        yield Paragraph(f"Unknown: no method with gradients from {missing} passes has a finished run.")
        return
    for winner, title in _VERDICTS.items():
        duels = [duel for duel in outcome.duels if duel.winner == winner]
        if duels or winner != "tie":
            sentences = tuple(f"{duel.figure.title}: {_sides_text(duel, outcome)}." for duel in duels)
            yield Heading(title)
            yield Bullets(sentences) if sentences else Paragraph("In none of the figures measured here.")


def _sides_text(duel: Duel, outcome: Outcome) -> str:
    """Return a sentence about the best method of each side in a figure, the better one first."""
    names = [name for name in (duel.backward, duel.forward) if name is not None]
    if duel.winner == "forward":
        names.reverse()
    sides = [f"{name} {_value(duel.figure, outcome.figures[name][duel.figure.key])}" for name in names]
    if len(sides) < 2:
        return f"{sides[0]}; no other method reached the target with every seed"
    text = f"{sides[0]}, against {sides[1]}"
    if duel.ratio is None:
        return text
    # The larger over the smaller is easier to read.
    ratio = duel.ratio
    if ratio.value < 1:
        ratio = Interval(1 / ratio.value, 1 / ratio.high, 1 / ratio.low)
    return f"{text}: {_times(ratio)} times"


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


def _target_text(outcome: Outcome) -> str:
    target = outcome.target
    if target.value is None:
        return f"There is no target: {target.origin}."
    return (
        f"The target is a loss of {target.value:.4g} on development rows ({target.origin}). Time and forward "
        "passes to the target are measured where a run's curve first reaches it, interpolated linearly "
        "between the two evaluations around that point. “<” is an upper bound: the first evaluation was "
        "already below the target."
    )


def _summary_table(result: Result, outcome: Outcome) -> Table:
    figures = reported_figures(result)
    header = [f"{figure.title}, {unit}" if (unit := _unit(figure)) else figure.title for figure in figures]
    rows = [
        (name, *(_value(figure, outcome.figures[name][figure.key], "") for figure in figures))
        for name in result["methods"]
    ]
    return Table(("method", *header), tuple(rows))


def _against_reference(result: Result, outcome: Outcome) -> Iterator[Block]:
    figures, methods = reported_figures(result), result["methods"]
    others = [name for name, method in methods.items() if name != REFERENCE and method["runs"]]
    if not others or not methods.get(REFERENCE, {}).get("runs"):
        return
    yield Heading(f"Against {REFERENCE}")
    header = ["method"]
    for figure in figures:
        difference = "difference in points" if figure.unit == "%" else "difference"
        header.append(f"{figure.title}, {'times' if figure.as_ratio else difference}")
    reference = outcome.figures[REFERENCE]
    rows = [
        (
            name,
            *(
                _against(figure, outcome.figures[name][figure.key], reference[figure.key])
                for figure in figures
            ),
        )
        for name in others
    ]
    yield Table(tuple(header), tuple(rows))
    yield Paragraph(
        "Ratios are geometric means over the seeds for which both methods have the figure; differences are "
        "means. Brackets hold 95 % bootstrap intervals, paired by seed. With so few seeds they are too "
        "narrow: the real noise is larger."
    )


def _against(figure: Figure, own: Spread, other: Spread) -> str:
    """Return the ratio or the difference of two spreads with its interval, as text."""
    if not figure.as_ratio:
        gap = paired_gap(own.resolved, other.resolved)
        return NONE if gap is None else _with_ends(gap, "+.2f" if figure.unit == "%" else "+.3f")
    ratio = paired_ratio(own.resolved, other.resolved)
    censored = f", {own.censored} not reached" if own.censored else ""
    return NONE if ratio is None else _times(ratio) + censored


def _searches(result: Result) -> Iterator[Block]:
    trials = result["settings"]["search_trials"]
    yield Heading("Learning rates")
    if trials == 1:
        yield Paragraph("There was no search: each method uses its default rate.")
        return
    yield Paragraph(
        f"{trials} rates were tried for each method on development rows, with half a run's budget each and a "
        "seed that isn't reported; one more rate was tried if the best was at the edge. The rate of the "
        "trial with the best loss was chosen."
    )
    rows = []
    for name, method in result["methods"].items():
        rate, rates = method["learning_rate"], [trial["learning_rate"] for trial in method["search"]]
        tried = [f"{trial['learning_rate']:g}: {_number(trial['loss'])}" for trial in method["search"]]
        # A better rate may lie beyond the tried ones.
        edge = ", at the edge" if rates and rate in (min(rates), max(rates)) else ""
        rows.append((name, NONE if rate is None else f"{rate:g}{edge}", ", ".join(tried) or NONE))
    yield Table(("method", "chosen", "loss by rate tried"), tuple(rows), labels=3)


def _how(result: Result) -> Iterator[Block]:
    settings, meta, counts = result["settings"], result["meta"], result["row_counts"]
    methods = result["methods"].items()
    own = [f" ({name}: {method['optimizer']} alone)" for name, method in methods if method.get("optimizer")]
    steps = [
        f"{name} {runs[0]['steps']:,} ({runs[0]['forward_passes']:,} forward passes)"
        for name, method in methods
        if (runs := method["runs"])
    ]
    yield Heading("How it was run")
    yield Bullets(
        (
            f"Budget of a run: {settings['budget_value']:,.6g} {settings['budget'].replace('_', ' ')}; a "
            "backward pass counts as two forward passes. Evaluations on development rows don't count. They "
            "come after the same numbers of forward passes for all methods, by factors of "
            f"{settings['evaluation_growth']:g}.",
            f"Rows: {counts['train']:,} for training, {counts['dev']:,} for development, {counts['test']:,} "
            "for tests. All methods read the same files in the same order for a seed. Test rows are "
            "read once, at a run's best step on development rows.",
            f"Frozen weights: {settings['quantize']}, with the same values for all methods. Optimizer: "
            f"{settings['optimizer']}{''.join(own)}, {settings['lr_scheduler_type']}; "
            f"{_count(settings['threads'], 'thread')}. A step of a method with several queries has fewer "
            f"examples: queries x examples is always {settings['batch_size']}.",
            f"Steps: {'; '.join(steps)}. The schedule spans a run's whole budget: a shorter run may reach a "
            "loss of the curve sooner.",
            "A run is a process of its own; its peak is max(VmHWM, VmRSS + VmSwap). Memory over the loaded "
            "model is measured in a run of a few steps without evaluations: the peak minus the memory before "
            "the first step, without pages of files; it is unknown if loading took more.",
        )
    )
    yield Heading("Environment")
    yield Code(result["command"])
    versions = ", ".join(f"{name} {version}" for name, version in meta["versions"].items())
    yield Bullets(
        (
            f"prge {meta['prge']}, Python {meta['python']}, {versions}",
            f"{meta['cpu']['model']}, {_count(meta['cpu']['count'] or 0, 'core')}, "
            f"{_mb(meta['memory_bytes'])}; {meta['platform']}",
        )
    )
    yield Table(("what", "SHA-256"), tuple(result["hashes"].items()), labels=2)


def _unit(figure: Figure) -> str:
    """Return a figure's unit, or an empty text if its title has the unit."""
    return "" if figure.unit == "forward_passes" else figure.unit


def _value(figure: Figure, spread: Spread, unit: str | None = None) -> str:
    """Return the mean and range of a figure over seeds as text, with its own unit or another."""
    total = spread.censored + len(spread.values)
    if spread.ends is None:
        reached = figure.key.endswith("_to_target") and spread.censored
        return f"not reached: {total} of {total}" if reached else NONE
    unit = _unit(figure) if unit is None else unit
    low, high = map(_number, spread.ends)
    after = f" {unit}" if unit else ""
    if spread.bounded and spread.mean is not None:
        return f"< {high}{after}"
    ends = ("< " if spread.bounded else "") + (low if low == high else f"[{low}, {high}]")
    if spread.mean is None:
        return f"{ends}{after}, not reached: {spread.censored} of {total}"
    return f"{_number(spread.mean)}{after}" + ("" if low == high else f" {ends}")


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
