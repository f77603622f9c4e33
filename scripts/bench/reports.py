"""What the benchmarks are asked, and how they end: JSON on the standard output, and in a file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from prge.files.run_folder import environment


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, help="makes models shallower")
    parser.add_argument("--json", type=Path, help="file to write the figures to as well")
    return parser


def circumstances(arguments: argparse.Namespace) -> dict[str, Any]:
    """Settings and machine of a benchmark."""
    return {"settings": vars(arguments), "machine": environment()}


def report(figures: dict[str, Any], file: Path | None) -> None:
    """Print figures as JSON; write them to `file` too."""
    text = json.dumps(figures, indent=2, default=str)
    if file:
        file.write_text(text + "\n", encoding="utf-8")
    print(text)
