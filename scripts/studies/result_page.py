"""The page of results.py: tables, charts and sentences, all computed from the study's figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from result_rows import STYLE, TASKS, TEXTS

from prge.report.charts import Line, LineStyle, arrange_charts, line_chart, standalone_svg
from prge.report.document import Block, Bullets, Code, Heading, Paragraph, Picture, Table
from prge.report.rendering import to_markdown
from prge.system.atomic import write_file

# Methods by the names of `prge compare`, in the order of tables.
METHODS = {
    "p-rge-q1": "MeZO's estimate, 1 query",
    "p-rge": "P-RGE, 4 queries",
    "p-rge-q16": "P-RGE, 16 queries",
    "fzoo": "FZOO",
    "tangent": "tangents, 4 queries",
    "exact": "exact gradients",
    "backprop-lora-fa": "PyTorch, LoRA-FA",
    "backprop-lora-fa-bf16": "PyTorch, LoRA-FA, bfloat16",
    "backprop-lora": "PyTorch, LoRA",
    "mezo": "PyTorch, MeZO on all weights",
    "backprop-full": "PyTorch, all weights",
}
BEGIN, END = "<!-- Written by scripts/studies/results.py -->", "<!-- End of the written part -->"
COMMAND = "python scripts/studies/results.py --data DATA --json docs/results.json --page docs/results.md"
PROTOCOL = """
The model is SmolLM2-135M-Instruct from weights of four bits, the protocol is MeZO's: at most 1,000 training
rows; development rows choose learning rate and step; each run scores the test rows once. All methods get the
same rows and forward passes, of which a backward pass counts as two. A step has 16 examples, or 16 divided by
the number of queries. MeZO's estimate is P-RGE's with one query, on LoRA-FA. A figure with a range [lowest,
highest] is the mean over the seeds of its line. The target is 80 % of the way from the first to the lowest
development loss of PyTorch's LoRA-FA. Rates were chosen on the development rows of SST-2 with int4
weights, unless a line below a table says otherwise. Memory is that of steps over the loaded model. PyTorch
computes with the bundle's weights, in float32 unless a line names bfloat16.
"""
NONE, MAIN = "–", "sst2-int4-query-value"
VERDICTS = ("holds", "holds in part", "does not hold", "was not measured")
SPEEDUPS = {
    "inner_speedup": "the two perturbations of a query in one call (inner loop) are faster",
    "outer_speedup": "all queries in one call (outer loop) are faster",
    "parallel_speedup": "both loops in one call are faster, on a phone's NPU up to 4.3 times",
}
ANSWERS = {"style": "in the style, %", "right": "exactly right, %"}
AXES = {"forward_passes": "forward passes", "seconds": "seconds of training", "memory": "MB of steps"}
# A smaller ratio of seconds is no speed-up.
LEAST_SPEEDUP = 1.05

Comparison = Mapping[str, Any]
Claim = tuple[str, str, str]  # of the P-RGE paper (arXiv 2409.15520), what was measured, the verdict


def write_page(results: Mapping[str, Any], page: Path) -> None:
    """Write the generated part of a page, and its charts into the folder `figures` next to the page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{page} has no lines {BEGIN!r} and {END!r} around the part to write")
    blocks = [*compose(results)]
    (page.parent / "figures").mkdir(exist_ok=True)
    for block in blocks:
        if isinstance(block, Picture) and block.drawing:
            write_file(page.parent / "figures" / f"{block.name}.svg", standalone_svg(block.drawing).encode())
    write_file(page, f"{before}{BEGIN}\n\n{to_markdown(blocks, 'figures')}\n{END}{after}".encode())


def compose(results: Mapping[str, Any]) -> Iterator[Block]:
    """Yield the blocks of the written part, the answer first."""
    comparisons, speed, judged = results["comparisons"], results["speed"], claims(results)
    yield Paragraph(" ".join(answer(comparisons.get(MAIN), judged)))
    yield from (Paragraph(PROTOCOL), Code(COMMAND))
    compared = [each for each in comparisons.values() if not each["is_memory"]]
    for task, is_memory in ((task, is_memory) for task in TASKS for is_memory in (False, True)):
        both = (task, is_memory)
        if chosen := [each for each in comparisons.values() if (each["task"], each["is_memory"]) == both]:
            yield Heading(TASKS[task].title + (": memory of a few steps" if is_memory else ""))
            yield from task_blocks(task, chosen)
    main = [each for each in compared if (each["base"], each["layers"]) == ("int4", "query-value")]
    for axis, text in AXES.items():
        drawing = arrange_charts([chart(each, axis, text) for each in main], 2)
        yield Picture(drawing, f"Over {text}, int4 weights; mean and range of seeds", f"results-{axis}")
    yield Heading("The paper's claims")
    yield Table(("claim", "measured", "verdict"), tuple(judged), labels=3)
    if speed:
        yield Heading("Perturbations in parallel")
        titles = ("rows x tokens", "weights", "inner loop", "outer loop", "both", "seconds")
        names = (*SPEEDUPS, "engine_seconds")
        lines = [(at, base, each) for at, bases in speed.items() for base, each in bases.items()]
        rows = tuple((at, base, *(number(each[name]) for name in names)) for at, base, each in lines)
        yield Table(titles, rows, labels=2)
        yield Paragraph(
            "Times as fast as one call for each perturbation; 4 queries, random weights, step.py."
        )
    if results["not_run"]:
        yield Heading("What was not run")
        yield Bullets(tuple(results["not_run"]))


def answer(main: Comparison | None, judged: Sequence[Claim]) -> Iterator[str]:
    """Yield the sentences of the first paragraph: accuracies on SST-2, and verdicts on the claims."""
    means = {name: mean for name in METHODS if main and (mean := mean_of(main, name, "test_accuracy"))}
    if main and means:
        ranked = sorted(means, key=means.__getitem__, reverse=True)
        texts = [f"{METHODS[name]} {cell(main['methods'][name]['test_accuracy'], 100)} %" for name in ranked]
        counts = sorted({len(main["methods"][name]["seeds"]) for name in means})
        seeds = " or ".join(map(str, counts)) + (" seed" if counts == [1] else " seeds")
        yield f"Accuracies on {main['rows']['test']:,} test rows of SST-2, int4 weights, {seeds} and"
        yield f"{main['budget_value']:,.0f} forward passes a run: {'; '.join(texts)}."
        for _, (p_rge, exact) in pairs([main], "p-rge", "exact", of="forward_passes_to_target"):
            yield f"P-RGE computes {p_rge / exact:.0f} times as many passes as exact gradients to the target."
    for verdict in VERDICTS:
        if texts := [claim_text for claim_text, _, its_verdict in judged if its_verdict == verdict]:
            yield f"Of the paper's claims, what {verdict}: {'; '.join(texts)}."


def mean_of(comparison: Comparison, method: str, figure: str) -> float | None:
    """Return the mean of a method's figure over seeds, or None if it is unknown."""
    mean: float | None = (comparison["methods"].get(method, {}).get(figure) or {"mean": None})["mean"]
    return mean


def cell(values: Mapping[str, Any] | None, scale: float = 1.0, missing: str = NONE) -> str:
    """Return the mean and range of a figure as text."""
    if not values or values["lowest"] is None:
        return missing
    low, high = number(scale * values["lowest"]), number(scale * values["highest"])
    ends = "" if low == high else f" [{low}, {high}]"
    if values["mean"] is None:
        return f"{ends.strip() or low}, {values['censored']} seeds not"
    # The first evaluation after the start may already be below the target.
    return f"{'< ' if values.get('bounded') else ''}{number(scale * values['mean'])}{ends}"


def number(value: float) -> str:
    """Return a number with three digits, or without a fraction if it has more."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def task_blocks(task: str, comparisons: Sequence[Comparison]) -> Iterator[Block]:
    """Yield the table of a task, and its numbers of rows."""
    quality = {TEXTS: ("perplexity", 1, "perplexity", NONE), STYLE: ("test_loss", 1, "loss", NONE)}
    figures = [
        quality.get(task, ("test_accuracy", 100, "accuracy, %", NONE)),
        ("forward_passes_to_target", 1, "passes to the target", "not reached"),
        ("seconds_to_target", 1, "seconds to the target", "not reached"),
        ("step_seconds", 1, "seconds a step", NONE),
        ("activation_mb", 1, "memory, MB", NONE),
        *[(name, 100, title, NONE) for name, title in ANSWERS.items() if task == STYLE],
    ]
    figures = figures[3:5] if comparisons[0]["is_memory"] else figures
    rows = []
    for each in comparisons:
        for name in (name for name in METHODS if each["methods"].get(name, {}).get("seeds")):
            method = {**each["methods"][name], **each["answers"].get(name, {})}
            cells = [cell(method.get(figure), scale, missing) for figure, scale, _, missing in figures]
            chosen = (str(len(method["seeds"])), f"{method['learning_rate']:g}")
            rows.append((each["base"], each["layers"], METHODS[name], *chosen, *cells))
    titles = ("weights", "layers", "method", "seeds", "rate", *(title for _, _, title, _ in figures))
    yield Table(titles, tuple(rows), labels=3)
    for each in (each for each in comparisons if not each["is_memory"]):
        counts, trials = each["rows"], each["search_trials"]
        rates = f", best of {trials} rates" if trials > 1 else ""
        curve: Sequence[Any] = next((method["curve"] for method in each["methods"].values()), [])
        before = [
            f"{name} {cell(curve[0][name])}" for name in ("accuracy", "loss") if curve and curve[0][name]
        ]
        before += [f"{ANSWERS[name]} {cell(at, 100)}" for name, at in each["answers"].get("base", {}).items()]
        yield Paragraph(
            f"{each['base']}, {each['layers']}: {counts['train']:,} rows for training, {counts['dev']:,} for "
            f"development, {counts['test']:,} for tests; {each['budget_value']:,.0f} passes a run{rates}. "
            f"Before training: {', '.join(before)}."
        )


def chart(comparison: Comparison, axis: str, text: str) -> str:
    """Return a line chart of accuracy or loss over forward passes, seconds or memory."""
    lines, figure = [], "loss" if comparison["task"] in (STYLE, TEXTS) else "accuracy"
    for hue, (name, method) in enumerate((name, comparison["methods"].get(name)) for name in METHODS):
        curve = [(point.get(axis), point[figure]) for point in method["curve"]] if method else []
        if method and axis == "memory":
            curve = [(mean_of(comparison, name, "activation_mb"), method[f"test_{figure}"])]
        known = [(x, y) for x, y in curve if x is not None and y and y["mean"] is not None]
        band = [(x, y["lowest"], y["highest"]) for x, y in known]
        style: LineStyle = "line" if method and method["forward_only"] else "marked"
        lines.append(Line(METHODS[name], [(x, y["mean"]) for x, y in known], hue, style, band))
    label = f"{figure} on {'test' if axis == 'memory' else 'development'} rows"
    return line_chart(lines, f"{TASKS[comparison['task']].title}: {text}", label, log=True)


def claims(results: Mapping[str, Any]) -> list[Claim]:
    """Return the paper's claims with what was measured, and whether it is so in all, some or no cases."""
    judged, comparisons = list[Claim](), [*results["comparisons"].values()]
    compared = [each for each in comparisons if not each["is_memory"]]
    for figure, text in SPEEDUPS.items():
        ratios = [float(each[figure]) for bases in results["speed"].values() for each in bases.values()]
        judged.append(claim(text, [(ratio, ratio >= LEAST_SPEEDUP) for ratio in ratios], "{:.2f}", "times"))
    for name, queries in (("p-rge", 4), ("p-rge-q16", 16)):
        text = f"{queries} queries are more accurate than MeZO at equal passes (by two standard errors)"
        cases = [
            (100 * (new - mezo), new - mezo > 2 * standard_error(each["rows"]["test"], new, mezo))
            for each, (new, mezo) in pairs(compared, name, "p-rge-q1", of="test_accuracy")
        ]
        judged.append(claim(text, cases, "{:+.1f}", "points"))
    for name, what in (("backprop-lora", "LoRA"), ("backprop-full", "all weights")):
        text = f"steps with 4 queries need less memory than backpropagation of {what}"
        sizes = [means for _, means in pairs(comparisons, "p-rge", name, of="activation_mb")]
        judged.append(claim(text, [(size / other, size < other) for size, other in sizes], "{:.2f}", "of it"))
    return judged


def standard_error(rows: int, *accuracies: float) -> float:
    """Return the standard error of the difference of two accuracies on this number of rows each."""
    return math.sqrt(sum(accuracy * (1 - accuracy) for accuracy in accuracies) / rows)


def claim(text: str, cases: Sequence[tuple[float, bool]], form: str, unit: str) -> Claim:
    """Return a claim with its verdict, from measured values and whether the claim is true of each."""
    true = sum(is_true for _, is_true in cases)
    if not cases:
        return text, NONE, VERDICTS[3]
    ends = dict.fromkeys(form.format(end(cases)[0]) for end in (min, max))
    measured = f"{' to '.join(ends)} {unit}; so in {true} of {len(cases)} cases"
    return text, measured, VERDICTS[0 if true == len(cases) else 1 if true else 2]


def pairs(comparisons: Iterable[Comparison], *names: str, of: str) -> list[tuple[Comparison, list[Any]]]:
    """Return a figure of methods for the comparisons in which all are known and not 0."""
    values = [(each, [mean_of(each, name, of) for name in names]) for each in comparisons]
    return [(each, means) for each, means in values if all(means)]
