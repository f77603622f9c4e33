"""How benchmarks end: JSON on the standard output, and in a file if one was named."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prge.run_folder import environment


def report(figures: dict[str, Any], file: Path | None) -> None:
    """Print figures as JSON; write them to `file` too."""
    text = json.dumps(figures, indent=2)
    if file:
        file.write_text(text + "\n", encoding="utf-8")
    print(text)


def report_schemes(
    arguments: argparse.Namespace, bench: Callable[[argparse.Namespace, str, Path], dict[str, Any]]
) -> None:
    """Run a benchmark for each of `arguments.quantize`, in a folder of its own, and report the figures.

    Those of the first scheme stand at the top, all under `schemes`, beside settings and machine.
    """
    schemes = {}
    for scheme in arguments.quantize:
        with tempfile.TemporaryDirectory() as folder:
            schemes[scheme] = bench(arguments, scheme, Path(folder))
    settings = {name: value for name, value in vars(arguments).items() if not isinstance(value, Path)}
    first = schemes[arguments.quantize[0]]
    report({**first, "schemes": schemes, "settings": settings, "machine": environment()}, arguments.json)
