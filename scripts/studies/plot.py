"""Draw the curves of a study: mean and range over seeds of a development figure, against rows forwarded.

    python scripts/studies/plot.py "P-RGE=results/forward-only-*.jsonl" \\
        "backpropagation=results/backprop-*.jsonl" --value loss accuracy --out figure.png

Each curve is a label and a pattern of files with evaluation records, one file a seed.
"""

from __future__ import annotations

import argparse
import glob
import json
import statistics
from pathlib import Path

COLOURS = ("#0072b2", "#009e73", "#d55e00", "#cc79a7", "#e69f00")


def read_curve(pattern: str, value: str) -> dict[float, list[float]]:
    """Values of all seeds by rows forwarded."""
    points: dict[float, list[float]] = {}
    for path in sorted(glob.glob(pattern)):
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["event"] == "evaluation":
                points.setdefault(record["rows"] / 1000, []).append(record[value])
    if not points:
        raise SystemExit(f"no evaluations in {pattern}")
    return points


def main() -> None:
    """Read the flags and draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("curves", nargs="+", metavar="LABEL=PATTERN")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--title", default="")
    parser.add_argument("--value", nargs="+", default=["loss"])
    arguments = parser.parse_args()
    width = 5.5 * len(arguments.value)
    figure, axes = pyplot.subplots(1, len(arguments.value), figsize=(width, 4), squeeze=False)
    for axis, value in zip(axes[0], arguments.value, strict=True):
        for colour, word in zip(COLOURS, arguments.curves, strict=False):
            label, _, pattern = word.partition("=")
            points = sorted(read_curve(pattern, value).items())
            rows = [row for row, _ in points]
            axis.plot(rows, [statistics.mean(v) for _, v in points], "o-", color=colour, label=label, ms=4)
            low, high = ([pick(v) for _, v in points] for pick in (min, max))
            axis.fill_between(rows, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set_xlabel("rows forwarded, in thousands")
        axis.set_ylabel(f"{value} on development rows")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False)
    figure.suptitle(arguments.title)
    figure.tight_layout()
    figure.savefig(arguments.out, dpi=90)


if __name__ == "__main__":
    main()
