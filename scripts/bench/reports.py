"""What the benchmarks are asked, measurements in turns, and how they end: JSON, printed and in a file."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from timing import random_model

from prge.formats.run_folder import environment

Measured = TypeVar("Measured")


def parser_of(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the flags that all benchmarks have, and one for each default; a list takes several."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, help="makes models shallower")
    parser.add_argument("--json", type=Path, help="file to write the figures to as well")
    for name, default in defaults.items():
        several = isinstance(default, list)
        kind = type(default[0] if several else default)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, nargs="+" if several else None, default=default)
    return parser


def shape_of(text: str) -> tuple[int, int]:
    """Rows and tokens of `2x64`."""
    rows, tokens = text.split("x")
    return int(rows), int(tokens)


def in_turns(steps: Mapping[Any, Callable[[], Measured]], repeats: int) -> list[dict[Any, Measured]]:
    """What all measured in rounds of turns, every other one backwards; a first round warms caches up."""
    orders = [list(steps), list(steps)[::-1]]
    rounds = [{name: steps[name]() for name in orders[number % 2]} for number in range(repeats + 1)]
    return rounds[1:]


def median(rounds: Sequence[Mapping[Any, float]], name: Any, over: Any = None) -> float:
    """Of a figure over rounds, or of its ratio to another."""
    return statistics.median(each[name] / (1 if over is None else each[over]) for each in rounds)


def report(figures: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print figures with settings and machine as JSON; write them to `--json` too."""
    told = {**figures, "settings": vars(arguments), "machine": environment()}
    text = json.dumps(told, indent=2, default=str)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)


Bench = Callable[[argparse.Namespace, str, Path], dict[str, Any]]


def report_models(arguments: argparse.Namespace, bench: Bench) -> None:
    """Measure each of `--models`, by its name and in a folder of its own, and report the figures."""
    figures = {}
    for model in arguments.models:
        with random_model(model, arguments.layers) as folder:
            figures[model] = bench(arguments, model, folder)
        print(model, figures[model], file=sys.stderr)
    report(figures, arguments)
