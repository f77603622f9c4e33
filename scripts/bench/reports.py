"""Shared parts of benchmarks: flags, measurements in turns, and reports as JSON."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from timing import random_model

from prge.formats.run_folder import environment

Value = TypeVar("Value")


def make_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with the common flags and one for each default; a list accepts several values."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, help="number of layers, to make models shallower")
    parser.add_argument("--json", type=Path, help="file to write the figures to as well")
    for name, default in defaults.items():
        is_list = isinstance(default, list)
        value_type = type(default[0] if is_list else default)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=value_type, nargs="+" if is_list else None, default=default)
    return parser


def parse_shape(text: str) -> tuple[int, int]:
    """Parse rows and tokens, such as `2x64`."""
    rows, tokens = text.split("x")
    return int(rows), int(tokens)


def measure_in_turns(steps: Mapping[Any, Callable[[], Value]], repeats: int) -> list[dict[Any, Value]]:
    """Measure all steps in turns, every other round in reverse; a first round warms up caches."""
    orders = [list(steps), list(steps)[::-1]]
    rounds = [{name: steps[name]() for name in orders[number % 2]} for number in range(repeats + 1)]
    return rounds[1:]


def median(rounds: Sequence[Mapping[Any, float]], name: Any, over: Any = None) -> float:
    """Return the median of a figure over rounds, or of its ratio to another."""
    return statistics.median(each[name] / (1 if over is None else each[over]) for each in rounds)


def report(figures: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print figures with settings and machine as JSON, and write them to `--json`."""
    content = {**figures, "settings": vars(arguments), "machine": environment()}
    text = json.dumps(content, indent=2, default=str)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)


Bench = Callable[[argparse.Namespace, str, Path], dict[str, Any]]


def report_models(
    arguments: argparse.Namespace,
    bench: Bench,
    open_model: Callable[[str, int | None], AbstractContextManager[Path]] = random_model,
) -> None:
    """Measure each of `--models` in a folder of its own, and report the figures by name."""
    figures = {}
    for model in arguments.models:
        with open_model(model, arguments.layers) as folder:
            figures[model] = bench(arguments, model, folder)
        print(model, figures[model], file=sys.stderr)
    report(figures, arguments)
