"""Try every text model type of transformers: made tiny, exported, trained, generated with and published.

    python scripts/studies/architectures.py --json docs/architectures.json [--types llama bert]
        [--quantize 8da4w] [--roles forward backward] [--markdown docs/architectures.md]

Types and classes come from transformers' own tables; tests/tiny_types.py makes the models. A child process
with a time limit tries each:

    exported        `prge export` wrote a bundle
    gradient_error  error of the engine's exact gradient against autograd on the whole model in double
                    precision, relative to its largest entry; of whole rows and, for a decoder, rows in chunks
    tangent_error   the same for jvp
    generates       eight tokens equal transformers' greedy generation
    published       PEFT computes the same with the published adapter
    code, why_not   of the refusal: a short name, and its sentence
    defect          of an exception that is no refusal: type, message and line
    only_graphs     the graphs of all roles were compared with autograd and the model, and no engine ran
    commit          that it was tried with

With --quantize the errors measure rounding. Types that the file already has aren't tried again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
FIGURES = (
    *("exported", "gradient_error", "tangent_error", "generates", "published", "code", "why_not", "defect"),
    *("only_graphs", "seconds", "commit"),
)
OUTCOMES = ("works", "only graphs", "wrong", "refused", "defect", "not made")
# The code of a type for which tests/tiny_types.py makes no tiny model.
NOT_MADE, TOO_SLOW = "not-made-tiny", "too-slow"
TOLERANCE = 1e-4
_LENGTH, _CHUNK, _WRITTEN = 24, 8, 8
_LONGEST_SENTENCE = 300
_PAGE = """\
# Architectures

Written by `python scripts/studies/architectures.py --json docs/architectures.json --markdown
docs/architectures.md`: for every text model type of transformers {version}, a tiny model with random
weights was tried in float32. A type works if it is exported with all roles, exact gradients and
tangents of whole rows and of rows in chunks differ from autograd's by less than 1e-4 of the largest
value, eight generated tokens equal those of transformers' greedy generation, and PEFT computes the same
with the published adapter.

A refusal has a code and a message for the user. A defect is any other exception, which is a bug of
prge. For a type with only graphs, the graphs of all roles were compared with autograd and with the
model, to 1e-5 of the largest value, but no engine has run them yet. A recurrent decoder keeps a state
whose size doesn't depend on how many tokens it has read. `docs/architectures.json` has the commit with
which each type was last tried: after a change of one architecture, only that type is tried again.
"""


def main() -> None:
    """Try all types that the file lacks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file of the results, which is continued")
    parser.add_argument("--types", nargs="+", help="model types; all by default")
    parser.add_argument("--roles", nargs="+", help="roles to export; all by default")
    parser.add_argument("--quantize", default="fp32", help="scheme of the frozen weights")
    parser.add_argument("--again", action="store_true", help="try the types in the file again")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a type")
    parser.add_argument("--markdown", type=Path, help="write the table there too")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    sweep(arguments)


def sweep(arguments: argparse.Namespace) -> None:
    """Try the types one after the other, each in a process, and write the file after each."""
    from transformers import __version__

    from tests.tiny_types import text_types

    results = json.loads(arguments.json.read_text())["types"] if arguments.json.exists() else {}
    import_libraries()
    types = arguments.types or [*text_types()]
    todo = [name for name in types if arguments.again or name not in results]
    for number, name in enumerate(todo, 1):
        results[name] = try_in_child(name, arguments)
        print(f"{number}/{len(todo)} {name}: {format_figures(results[name])}", file=sys.stderr, flush=True)
        write(arguments.json, __version__, results)
    write(arguments.json, __version__, results)
    print(json.dumps(totals(results), indent=2))
    if arguments.markdown:
        arguments.markdown.write_text(markdown(__version__, results), encoding="utf-8")


def try_in_child(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Try a type in a child process and return its figures."""
    start = time.monotonic()
    figures: dict[str, Any] = {"family": "", **dict.fromkeys(FIGURES)}
    with TemporaryDirectory() as folder:
        result, output = Path(folder, "result.json"), Path(folder, "output")
        # A fork shares the imported libraries; importing them takes longer than some types do.
        child = get_context("fork").Process(
            target=try_alone, args=(name, arguments.quantize, arguments.roles, result, output)
        )
        child.start()
        child.join(arguments.limit)
        if child.is_alive():
            child.kill()
            child.join()
            figures |= {"code": TOO_SLOW, "why_not": f"took more than {arguments.limit:.0f} seconds"}
        elif result.exists():
            figures |= json.loads(result.read_text())
        else:
            last = (output.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            figures["defect"] = f"the process ended with {child.exitcode}: {last}"
    return {**figures, "seconds": round(time.monotonic() - start, 1), "commit": commit()}


def try_alone(name: str, scheme: str, roles: Sequence[str] | None, result: Path, output: Path) -> None:
    """Write the figures of a type to `result`, and the output of libraries to `output`."""
    tempfile.tempdir = str(result.parent)
    with output.open("w") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    result.write_text(json.dumps(try_type(name, scheme, roles)))


def import_libraries() -> None:
    """Import the libraries that every child needs."""
    for module in (
        *("torch", "transformers", "peft", "torchao.quantization", "executorch.exir"),
        *("server_export.export", "tests.device_runner.engines.chains", "tests.tiny_types"),
    ):
        importlib.import_module(module)


def commit() -> str:
    """Return the commit of this checkout, with `-dirty` if files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def try_type(name: str, scheme: str, roles: Sequence[str] | None) -> dict[str, Any]:
    """Return all figures of a type, up to a refusal."""
    from prge.errors import PrgeError, Refusal
    from tests.tiny_models import make_tokenizer
    from tests.tiny_types import family, make_tiny

    figures: dict[str, Any] = {"exported": False}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            model = make_tiny(name)
        except ValueError as error:
            return {"code": NOT_MADE, "why_not": str(error)}
        figures["family"] = family(name, model)
        model.save_pretrained(folder / "model")
        make_tokenizer().save_pretrained(folder / "model")
        try:
            check_bundle(folder, figures, scheme, roles)
        except PrgeError as error:
            lines = (line.strip().removeprefix("- ") for line in str(error).splitlines())
            figures["why_not"] = "; ".join(lines).replace(f"{folder}/", "")[:_LONGEST_SENTENCE]
            figures["code"] = error.code if isinstance(error, Refusal) else type(error).__name__
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            # The last line in this project, whatever library raised the exception.
            last = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT)][-1]
            text = " ".join(str(error).split())[:_LONGEST_SENTENCE]
            file = Path(last.filename).name
            figures["defect"] = f"{type(error).__name__}: {text} ({file}:{last.lineno})"
    return figures


def check_bundle(folder: Path, figures: dict[str, Any], scheme: str, roles: Sequence[str] | None) -> None:
    """Export the model in a folder and check the bundle; adds to `figures`."""
    from prge.formats import chain
    from prge.formats.bundle import open_bundle
    from server_export.export import ExportConfig, export
    from tests.device_runner.engines.chains import (
        gradient_error,
        published_error,
        spoken_and_expected,
        tangent_error,
    )

    # Longer rows are processed in chunks.
    with patch.multiple(chain, MAX_WHOLE_TOKENS=2 * _CHUNK, _CHUNK=_CHUNK, _MIN_CHUNK=2):
        settings: dict[str, Any] = {"rank": 2, "sequence_length": _LENGTH, "context": 2 * _LENGTH}
        settings |= {"quantize": scheme} | ({"roles": [*roles]} if roles else {})
        export(ExportConfig(str(folder / "model"), folder / "bundle", **settings))
        figures["exported"] = True
        bundle = open_bundle(folder / "bundle")
        lengths = [_LENGTH] if bundle.chain.is_encoder else [_CHUNK, _LENGTH]
        if "backward" in bundle.chain.roles:
            figures["gradient_error"] = max(gradient_error(folder, bundle, length) for length in lengths)
        if "jvp" in bundle.chain.roles:
            figures["tangent_error"] = max(tangent_error(folder, bundle, length) for length in lengths)
        if "decode" in bundle.chain.roles:
            tokens, expected = spoken_and_expected(folder, bundle, _WRITTEN)
            figures["generates"] = tokens == expected
        figures["published"] = published_error(folder, bundle) < TOLERANCE


def format_figures(figures: Mapping[str, Any]) -> str:
    """Format a type's figures as one line."""
    if figures["defect"]:
        return str(figures["defect"])
    if figures["why_not"]:
        return str(figures["why_not"])
    errors = (f"{name} {figures[name]:.1g}" for name in FIGURES[1:3] if figures[name] is not None)
    checks = (name if figures[name] else f"not {name}" for name in FIGURES[3:5] if figures[name] is not None)
    return ", ".join([*errors, *checks, f"{figures['seconds']} s"])


def outcome(figures: Mapping[str, Any]) -> str:
    """Return one of OUTCOMES."""
    if figures["defect"]:
        return "defect"
    if figures["code"] == NOT_MADE:
        return "not made"
    if figures["why_not"]:
        return "refused"
    if figures["only_graphs"]:
        return "only graphs"
    errors = [figures[name] for name in FIGURES[1:3] if figures[name] is not None]
    checks = [figures[name] for name in FIGURES[3:5] if figures[name] is not None]
    is_right = all(checks) and max(errors, default=0) < TOLERANCE
    return "works" if figures["exported"] and is_right else "wrong"


def totals(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Count the types of each family by outcome."""
    families: dict[str, Counter[str]] = {}
    for figures in results.values():
        families.setdefault(figures["family"] or "not made", Counter())[outcome(figures)] += 1
    return {family: dict(counts) for family, counts in sorted(families.items())}


def write(path: Path, version: str, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the file of results."""
    types = dict(sorted(results.items()))
    text = ",\n".join(f"  {json.dumps(name)}: {json.dumps(figures)}" for name, figures in types.items())
    head = json.dumps({"transformers": version, "totals": totals(results)})
    path.write_text(f'{head[:-1]}, "types": {{\n{text}\n}}}}\n', encoding="utf-8")


def markdown(version: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the results as a page."""
    rows = sorted(results.items())
    counts = totals(results)
    names = [name for name in OUTCOMES if any(name in each for each in counts.values())]
    lines = [
        _PAGE.format(version=version),
        f"| family | {' | '.join(names)} |",
        f"| --- |{' --- |' * len(names)}",
        *(
            f"| {family} | {' | '.join(str(each.get(name, 0)) for name in names)} |"
            for family, each in counts.items()
        ),
    ]
    for heading in ("works", "only graphs"):
        if heading in names:
            lines += ["", f"## {heading.capitalize()}", ""]
        for family in counts:
            types = [
                name
                for name, each in rows
                if (each["family"] or "not made") == family and outcome(each) == heading
            ]
            if types:
                lines.append(f"- **{family}**: {', '.join(types)}")
    for heading in ("wrong", "refused", "defect", "not made"):
        if heading not in names:
            continue
        lines += ["", f"## {heading.capitalize()}", ""]
        lines += ["| type | family | code | why |", "| --- | --- | --- | --- |"]
        for name, figures in rows:
            if outcome(figures) == heading:
                why = format_figures(figures).replace("|", "\\|").replace("](", "] (")
                lines.append(f"| {name} | {figures['family'] or '-'} | {figures['code'] or '-'} | {why} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
