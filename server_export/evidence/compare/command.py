"""`prge compare`: compare training methods on one model, one frozen base and the same rows."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from prge.cli.settings import parse_settings, settings_to_yaml
from prge.formats.run_folder import environment, run_lock, write_json
from prge.system.atomic import write_file
from server_export.evidence.compare.children import idle_memory, run_verb
from server_export.evidence.compare.comparison import Comparison, Verb
from server_export.evidence.compare.settings import CompareSettings

RESULT, MARKDOWN, PAGE, FIGURES = "result.json", "report.md", "report.html", "figures"
FAILED = 1


def main(argv: Sequence[str]) -> int:
    """Run the verb and return 1 if a method failed. See `prge compare --help`."""
    settings = parse_settings(CompareSettings, argv, "prge compare")
    result = compare(settings, f"prge compare {shlex.join(argv)}")
    write_report(result, settings.out, settings.json)
    failed = [name for name, method in result["methods"].items() if method["failures"]]
    print(settings.out / PAGE)
    if failed:
        print(f"Some or all runs failed: {', '.join(failed)}. The report lists the errors.")
    return FAILED if failed else 0


def compare(settings: CompareSettings, command: str, verb: Verb = run_verb) -> dict[str, Any]:
    """Do the work that isn't done yet, write result.json, and return its content.

    Raises:
        PrgeError: settings, data or folder can't be used. A method's failure is recorded and not raised.
    """
    comparison = Comparison(settings, verb)
    settings = comparison.settings
    settings.out.mkdir(parents=True, exist_ok=True)
    with run_lock(settings.out):
        comparison.prepare()
        idle = idle_memory()
        methods = comparison.measure()
        result = {
            "command": command,
            "model_name": settings.preset or Path(settings.model or "").name or str(settings.model),
            "settings": yaml.safe_load(settings_to_yaml(settings)),
            "idle_bytes": idle,
            "row_counts": {split: path.read_bytes().count(b"\n") for split, path in comparison.rows.items()},
            "methods": methods,
            "hashes": comparison.hashes(),
            "meta": environment(),
        }
        write_file(settings.out / RESULT, (json.dumps(result, indent=1) + "\n").encode())
    return result


def write_report(result: Mapping[str, Any], out: Path, json_file: Path | None = None) -> None:
    """Write report.md, report.html and the charts of a result, and its figures as JSON if requested."""
    from prge.report.charts import standalone_svg
    from prge.report.rendering import to_html, to_markdown
    from server_export.evidence.compare.content import compose
    from server_export.evidence.compare.figures import draw_all
    from server_export.evidence.compare.outcome import judge, to_json

    outcome = judge(result)
    pictures = draw_all(result, outcome)
    blocks = tuple(compose(result, outcome, pictures))
    (out / FIGURES).mkdir(parents=True, exist_ok=True)
    for name, svg in pictures.items():
        write_file(out / FIGURES / f"{name}.svg", standalone_svg(svg).encode())
    write_file(out / MARKDOWN, to_markdown(blocks, FIGURES).encode())
    write_file(out / PAGE, to_html(blocks).encode())
    if json_file is not None:
        write_json(json_file, to_json(result, outcome))
