"""Training steps around a base setting, one axis at a time: models, lengths, queries, batch sizes, depths.

    python scripts/bench/grid.py --out grid --layers 4 --minutes 60
    python scripts/bench/grid.py --out grid --layers 4 --plot-only --markdown

Every cell is a call of scripts/bench/step.py with random weights, in a process of its own. Its JSON stays in
`--out` under a name of its setting; a cell whose file exists isn't run again, so that a grid which was
stopped goes on with the same command. The most useful cells come first: the base of every model, then the
axes of the first model, of the second. `grid.json` and a figure are written at the end from the cells that
there are. The figure shows the axes of the first of `--models`, and the base of all of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from server_export.model.random_models import CONFIGURATIONS

STEP_BENCH = Path(__file__).with_name("step.py")

# Of a cell's JSON, what a grid keeps; `tangent_over_stack` is computed from two of them.
FIGURES = (
    "stack_over_limit",
    "tangent_over_limit",
    "parallel_speedup",
    "parallel_speedup_possible",
    "host_share",
    "tangent_host_share",
    "peak_rss_over_weights",
    "engine_seconds",
    "tangent_engine_seconds",
    "repeats",
)

AXES = {
    "seq_len": "tokens per row",
    "queries": "queries",
    "batch_size": "rows per batch",
    "layers": "layers",
    "model": "model",
}

# Colour tells the scheme, line and marker the estimator.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
STACK: dict[str, Any] = {"linestyle": "-", "marker": "o", "ms": 4}
TANGENT: dict[str, Any] = {"linestyle": "--", "marker": "s", "ms": 4, "mfc": "white"}
BOUND: dict[str, Any] = {"linestyle": ":", "marker": "_", "ms": 7, "lw": 1.2}

# Rows of the figure: what it shows, and each line's key and look.
PANELS: tuple[tuple[str, tuple[tuple[str, dict[str, Any]], ...]], ...] = (
    ("time over its\nproducts' alone", (("stack_over_limit", STACK), ("tangent_over_limit", TANGENT))),
    (
        "speedup of one call\nwith all copies",
        (("parallel_speedup", STACK), ("parallel_speedup_possible", BOUND)),
    ),
    ("time of a tangent step\nover a stack step", (("tangent_over_stack", TANGENT),)),
    ("memory over weights", (("peak_rss_over_weights", STACK),)),
    ("share of the step\noutside the engine", (("host_share", STACK), ("tangent_host_share", TANGENT))),
)


@dataclass(frozen=True)
class Cell:
    """A setting of a benchmark."""

    model: str
    layers: int
    seq_len: int
    queries: int
    batch_size: int
    scheme: str

    @property
    def name(self) -> str:
        """A file's name without its suffix."""
        shape = f"layers{self.layers}-seq{self.seq_len}-queries{self.queries}-batch{self.batch_size}"
        return f"{self.model}-{shape}-{self.scheme}"

    def command(self, repeats: int, file: Path) -> list[str]:
        """The call that measures it."""
        flags = {
            "--model": self.model,
            "--layers": self.layers,
            "--seq-len": self.seq_len,
            "--queries": self.queries,
            "--batch-size": self.batch_size,
            "--quantize": self.scheme,
            "--repeats": repeats,
            "--json": file,
        }
        words = [str(word) for flag in flags.items() for word in flag]
        return [sys.executable, str(STEP_BENCH), *words]


def bases(arguments: argparse.Namespace) -> list[Cell]:
    """The base setting of every model with every scheme, the first model's first."""
    return [
        Cell(
            model,
            arguments.layers or CONFIGURATIONS[model]["num_hidden_layers"],
            arguments.base_seq_len,
            arguments.base_queries,
            arguments.base_batch_size,
            scheme,
        )
        for model in arguments.models
        for scheme in arguments.quantize
    ]


def along(base: Cell, axis: str, arguments: argparse.Namespace) -> list[Cell]:
    """The cells of an axis through a base, which is one of them, in the axis' order."""
    if axis == "model":
        return [other for other in bases(arguments) if other.scheme == base.scheme]
    values = {*(arguments.depths if axis == "layers" else getattr(arguments, axis)), getattr(base, axis)}
    return [replace(base, **{axis: value}) for value in sorted(values)]


def plan(arguments: argparse.Namespace) -> list[Cell]:
    """All cells, the most useful first."""
    firsts = bases(arguments)

    def ordered() -> Iterator[Cell]:
        yield from firsts
        for model in arguments.models:
            for axis in AXES:
                lines = [along(base, axis, arguments) for base in firsts if base.model == model]
                for point in zip(*lines, strict=True):
                    yield from point

    return list(dict.fromkeys(ordered()))


def run_cells(cells: Sequence[Cell], folder: Path, repeats: int, minutes: float | None) -> int:
    """Measure the cells that have no file, until the time is over; the number of those that failed."""
    end = None if minutes is None else time.monotonic() + 60 * minutes
    failed = 0
    missing = [cell for cell in cells if not (folder / f"{cell.name}.json").exists()]
    for number, cell in enumerate(missing):
        if end is not None and time.monotonic() >= end:
            tell(f"the time is over: {len(missing) - number} cells are left")
            break
        # A file of a cell is whole or not there.
        unfinished = folder / f"{cell.name}.part"
        start = time.monotonic()
        child = subprocess.run(
            cell.command(repeats, unfinished),
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        if child.returncode or not unfinished.exists():
            failed += 1
            unfinished.unlink(missing_ok=True)
            last = (child.stderr.strip().splitlines() or ["it said nothing"])[-1]
            tell(f"{cell.name}: failed with status {child.returncode}: {last}")
            continue
        unfinished.replace(folder / f"{cell.name}.json")
        tell(f"{cell.name}: {time.monotonic() - start:.0f} s")
    return failed


def read_cells(cells: Sequence[Cell], folder: Path) -> dict[Cell, dict[str, Any]]:
    """Settings and figures of the cells that were measured."""
    found = {}
    for cell in cells:
        path = folder / f"{cell.name}.json"
        if path.exists():
            seen = json.loads(path.read_text(encoding="utf-8"))
            ratio = seen["tangent_engine_seconds"] / seen["engine_seconds"]
            figures = {key: seen[key] for key in FIGURES}
            found[cell] = {**asdict(cell), "tangent_over_stack": ratio, **figures}
    return found


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table of the cells."""
    settings = {
        "model": "model",
        "layers": "layers",
        "seq_len": "T",
        "queries": "q",
        "batch_size": "batch",
        "scheme": "scheme",
    }
    figures = {
        "stack_over_limit": "stack / limit",
        "tangent_over_limit": "tangent / limit",
        "parallel_speedup": "speedup",
        "parallel_speedup_possible": "possible",
        "tangent_over_stack": "tangent / stack",
        "peak_rss_over_weights": "memory / weights",
        "host_share": "host",
        "tangent_host_share": "host, tangent",
        "engine_seconds": "stack, s",
    }
    digits = {"host_share": 3, "tangent_host_share": 3, "engine_seconds": 3}
    lines = [[*settings.values(), *figures.values()], ["---"] * (len(settings) + len(figures))]
    for row in rows:
        words = [str(row[key]) for key in settings]
        lines.append(words + [f"{row[key]:.{digits.get(key, 2)}f}" for key in figures])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(found: dict[Cell, dict[str, Any]], arguments: argparse.Namespace, path: Path) -> None:
    """Small multiples: a row for what is measured, a column for what is varied."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    starts = [base for base in bases(arguments) if base.model == arguments.models[0]]
    columns = {}
    for axis in AXES:
        lines = [along(base, axis, arguments) for base in starts]
        # A column with one point compares nothing.
        if sum(any(cell in found for cell in point) for point in zip(*lines, strict=True)) > 1:
            columns[axis] = lines
    if not columns:
        tell("no axis has two cells: no figure")
        return
    pyplot.rcParams.update({"font.size": 9, "axes.linewidth": 0.6})
    figure, panels = pyplot.subplots(
        len(PANELS),
        len(columns),
        figsize=(max(6.5, 1.2 + 1.9 * len(columns)), 1.7 * len(PANELS) + 1),
        sharey="row",
        sharex="col",
        squeeze=False,
        layout="constrained",
    )
    for column, (axis, lines) in enumerate(columns.items()):
        for row, (title, keys) in enumerate(PANELS):
            panel = panels[row][column]
            for number, (colour, cells) in enumerate(zip(COLOURS, lines, strict=False)):
                # Points without lines stand side by side.
                shift = 0.2 * (number - (len(lines) - 1) / 2) if axis == "model" else 0
                for key, look in keys:
                    # A missing cell breaks its line.
                    values = [found[cell][key] if cell in found else float("nan") for cell in cells]
                    drawn = {**look, "linestyle": "none"} if axis == "model" else look
                    panel.plot([at + shift for at in range(len(cells))], values, color=colour, **drawn)
            if any(key == "tangent_over_stack" for key, _ in keys):
                ideal = [(1 + cell.queries) / (2 * cell.queries) for cell in lines[0]]
                panel.plot(range(len(ideal)), ideal, color="#555555", **BOUND)
            panel.set_xticks(range(len(lines[0])), [label(cell, axis) for cell in lines[0]])
            panel.tick_params(axis="x", labelsize=7.5 if axis == "model" else 9)
            panel.set_xlim(-0.35, len(lines[0]) - 0.65)
            panel.grid(axis="y", alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
            if column == 0:
                panel.set_ylabel(title)
            if row == len(PANELS) - 1:
                panel.set_xlabel(AXES[axis])
    handles = [
        *(
            Line2D([], [], color=colour, lw=3, label=scheme)
            for colour, scheme in zip(COLOURS, arguments.quantize, strict=False)
        ),
        Line2D([], [], color="#555555", **STACK, label="stack"),
        Line2D([], [], color="#555555", **TANGENT, label="tangent"),
        Line2D([], [], color="#555555", **BOUND, label="possible; (1+q)/(2q)"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.align_ylabels()
    figure.suptitle(
        f"{starts[0].model}, {starts[0].layers} layers; where not varied, {starts[0].seq_len} tokens, "
        f"{starts[0].queries} queries, batch {starts[0].batch_size}",
        fontsize=9,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def label(cell: Cell, axis: str) -> str:
    """A tick's label."""
    # A model's name and its size, one above the other.
    return str(getattr(cell, axis)).replace("-", "\n", 1)


def tell(text: str) -> None:
    """Say how it goes on; the standard output is the table's."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Read the flags, measure, write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(CONFIGURATIONS),
        default=list(CONFIGURATIONS),
        help="the figure shows the axes of the first",
    )
    parser.add_argument("--layers", type=int, help="make the models shallower")
    parser.add_argument("--quantize", nargs="+", default=["fp32", "8da4w"])
    parser.add_argument("--seq-lens", dest="seq_len", nargs="*", type=int, default=[16, 32, 64, 128])
    parser.add_argument("--queries", nargs="*", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--batch-sizes", dest="batch_size", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--depths", nargs="*", type=int, default=[2, 4, 8], help="layers, as an axis")
    parser.add_argument("--base-seq-len", type=int, default=64)
    parser.add_argument("--base-queries", type=int, default=4)
    parser.add_argument("--base-batch-size", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9, help="of cells that are still to be measured")
    parser.add_argument("--minutes", type=float, help="begin no cell after this time")
    parser.add_argument("--out", type=Path, required=True, help="folder for the cells and grid.json")
    parser.add_argument("--figure", type=Path, help="default: grid.png in that folder")
    parser.add_argument("--plot-only", action="store_true", help="measure nothing")
    parser.add_argument("--markdown", action="store_true", help="print a table of the cells")
    arguments = parser.parse_args()

    arguments.out.mkdir(parents=True, exist_ok=True)
    cells = plan(arguments)
    failed = 0
    if not arguments.plot_only:
        failed = run_cells(cells, arguments.out, arguments.repeats, arguments.minutes)
    found = read_cells(cells, arguments.out)
    rows = list(found.values())
    (arguments.out / "grid.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    draw(found, arguments, arguments.figure or arguments.out / "grid.png")
    if arguments.markdown:
        print(markdown(rows))
    if failed:
        raise SystemExit(f"{failed} cells failed; the same command tries them again")


if __name__ == "__main__":
    main()
