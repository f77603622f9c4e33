"""Every text model type that transformers has: made tiny, exported, trained, spoken with and published.

    python scripts/studies/architectures.py --json docs/architectures.json [--types llama bert]
        [--quantize 8da4w] [--roles stack back] [--markdown docs/architectures.md]

Types and classes are those of transformers' own tables; tests/tiny_types.py makes the models. A child process
with a time limit tries each:

    exported        `prge export` wrote a bundle
    gradient_error  of the engine's exact gradient, from autograd's of the whole model in double precision, as
                    a part of its largest entry; of whole rows and, of a decoder, rows in pieces
    tangent_error   the same of tangents
    spoke           eight tokens are those of transformers' greedy generation
    published       PEFT computes what was trained, with the published adapter
    code, why_not   of the refusal: a short name, and its sentence
    defect          of an exception that is no refusal: type, message and line
    only_graphs     the graphs of all roles were compared with autograd and the model, and no engine ran
    commit          that it was tried with

With --quantize the errors say how far rounding goes. What the file has already isn't tried again.
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
    *("exported", "gradient_error", "tangent_error", "spoke", "published", "code", "why_not", "defect"),
    *("only_graphs", "seconds", "commit"),
)
OUTCOMES = ("works", "only graphs", "wrong", "refused", "defect", "not made")
# The code of a type of which the rules of tests/tiny_types.py make no tiny model.
NOT_MADE, TOO_SLOW = "not-made-tiny", "too-slow"
TOLERANCE = 1e-4
_LENGTH, _PIECE, _WRITTEN = 24, 8, 8
_LONGEST_SENTENCE = 300
_PAGE = """\
# Architectures

Written by `python scripts/studies/architectures.py --json docs/architectures.json --markdown
docs/architectures.md`, which says of every text model type of transformers {version} what became of a tiny
model with random weights, in float32. A type works if it is exported with all roles, exact gradients and
tangents of whole rows and of rows in pieces differ from autograd's by less than 1e-4 of the largest, eight
tokens are those of transformers' greedy generation, and PEFT computes the same with the published adapter.

A refusal has a code and a sentence, which a user meets. A defect is an exception that is no refusal: it is
ours to mend. Of a type with only graphs, the graphs of all roles were compared with autograd and with the
model, to 1e-5 of the largest, and no engine ran them yet. A recurrent decoder keeps a state whose size
doesn't depend on how many tokens it has read. `docs/architectures.json` has the commit that each type was
last tried with: a change of one architecture tries that one again.
"""


def main() -> None:
    """Try all types that the file lacks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file of the results; it is gone on with")
    parser.add_argument("--types", nargs="+", help="model types; all by default")
    parser.add_argument("--roles", nargs="+", help="roles to export; all by default")
    parser.add_argument("--quantize", default="fp32", help="scheme of the frozen weights")
    parser.add_argument("--again", action="store_true", help="try what the file has once more")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a type")
    parser.add_argument("--markdown", type=Path, help="write the table there too")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    sweep(arguments)


def sweep(arguments: argparse.Namespace) -> None:
    """Try the types one after the other, each in a process, and write the file after each."""
    from transformers import __version__

    from tests.tiny_types import text_types

    known = json.loads(arguments.json.read_text())["types"] if arguments.json.exists() else {}
    import_libraries()
    asked = arguments.types or [*text_types()]
    todo = [name for name in asked if arguments.again or name not in known]
    for number, name in enumerate(todo, 1):
        known[name] = in_child(name, arguments)
        print(f"{number}/{len(todo)} {name}: {told(known[name])}", file=sys.stderr, flush=True)
        write(arguments.json, __version__, known)
    write(arguments.json, __version__, known)
    print(json.dumps(totals(known), indent=2))
    if arguments.markdown:
        arguments.markdown.write_text(markdown(__version__, known), encoding="utf-8")


def in_child(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a child process finds out about a type."""
    begun = time.monotonic()
    found: dict[str, Any] = {"family": "", **dict.fromkeys(FIGURES)}
    with TemporaryDirectory() as folder:
        result, output = Path(folder, "result.json"), Path(folder, "output")
        # A fork has the libraries in memory, which take longer to import than some types take.
        child = get_context("fork").Process(
            target=try_alone, args=(name, arguments.quantize, arguments.roles, result, output)
        )
        child.start()
        child.join(arguments.limit)
        if child.is_alive():
            child.kill()
            child.join()
            found |= {"code": TOO_SLOW, "why_not": f"took more than {arguments.limit:.0f} seconds"}
        elif result.exists():
            found |= json.loads(result.read_text())
        else:
            last = (output.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            found["defect"] = f"the process ended with {child.exitcode}: {last}"
    return {**found, "seconds": round(time.monotonic() - begun, 1), "commit": commit()}


def try_alone(name: str, scheme: str, roles: Sequence[str] | None, result: Path, output: Path) -> None:
    """Write what is found out about a type to `result`, and what libraries print to `output`."""
    tempfile.tempdir = str(result.parent)
    with output.open("w") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    result.write_text(json.dumps(tried(name, scheme, roles)))


def import_libraries() -> None:
    """Import what every child needs."""
    for module in (
        *("torch", "transformers", "peft", "torchao.quantization", "executorch.exir"),
        *("server_export.export", "tests.device_runner.engines.chains", "tests.tiny_types"),
    ):
        importlib.import_module(module)


def commit() -> str:
    """The commit of this checkout; `-dirty` where files differ from it."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def tried(name: str, scheme: str, roles: Sequence[str] | None) -> dict[str, Any]:
    """All that is found out about a type, up to what refuses it."""
    from prge.errors import PrgeError, Refusal
    from tests.tiny_models import make_tokenizer
    from tests.tiny_types import family, make_tiny

    found: dict[str, Any] = {"exported": False}
    with TemporaryDirectory() as place:
        folder = Path(place)
        try:
            model = make_tiny(name)
        except ValueError as error:
            return {"code": NOT_MADE, "why_not": str(error)}
        found["family"] = family(name, model)
        model.save_pretrained(folder / "model")
        make_tokenizer().save_pretrained(folder / "model")
        try:
            checked(folder, found, scheme, roles)
        except PrgeError as error:
            lines = (line.strip().removeprefix("- ") for line in str(error).splitlines())
            found["why_not"] = "; ".join(lines).replace(f"{folder}/", "")[:_LONGEST_SENTENCE]
            found["code"] = error.code if isinstance(error, Refusal) else type(error).__name__
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            # The line of this project that it comes from, whatever library raised it there.
            last = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT)][-1]
            text = " ".join(str(error).split())[:_LONGEST_SENTENCE]
            file = Path(last.filename).name
            found["defect"] = f"{type(error).__name__}: {text} ({file}:{last.lineno})"
    return found


def checked(folder: Path, found: dict[str, Any], scheme: str, roles: Sequence[str] | None) -> None:
    """Export the model in a folder and hold the bundle against it; fills `found` on the way."""
    from prge.files import chain
    from prge.files.bundle import open_bundle
    from server_export.export import ExportConfig, export
    from tests.device_runner.engines.chains import (
        gradient_error,
        published_error,
        spoken_and_expected,
        tangent_error,
    )

    # Longer rows go in pieces.
    with patch.multiple(chain, MOST_WHOLE_TOKENS=2 * _PIECE, _SHORT=_PIECE, _SHORTEST_PIECE=2):
        settings: dict[str, Any] = {"rank": 2, "sequence_length": _LENGTH, "context": 2 * _LENGTH}
        settings |= {"quantize": scheme} | ({"roles": [*roles]} if roles else {})
        export(ExportConfig(str(folder / "model"), folder / "bundle", **settings))
        found["exported"] = True
        bundle = open_bundle(folder / "bundle")
        lengths = [_LENGTH] if bundle.chain.is_encoder else [_PIECE, _LENGTH]
        if "back" in bundle.chain.roles:
            found["gradient_error"] = max(gradient_error(folder, bundle, length) for length in lengths)
        if "tangent" in bundle.chain.roles:
            found["tangent_error"] = max(tangent_error(folder, bundle, length) for length in lengths)
        if "decode" in bundle.chain.roles:
            ours, theirs = spoken_and_expected(folder, bundle, _WRITTEN)
            found["spoke"] = ours == theirs
        found["published"] = published_error(folder, bundle) < TOLERANCE


def told(figures: Mapping[str, Any]) -> str:
    """A type's figures in a line."""
    if figures["defect"]:
        return str(figures["defect"])
    if figures["why_not"]:
        return str(figures["why_not"])
    errors = (f"{name} {figures[name]:.1g}" for name in FIGURES[1:3] if figures[name] is not None)
    said = (name if figures[name] else f"not {name}" for name in FIGURES[3:5] if figures[name] is not None)
    return ", ".join([*errors, *said, f"{figures['seconds']} s"])


def outcome(figures: Mapping[str, Any]) -> str:
    """One of OUTCOMES."""
    if figures["defect"]:
        return "defect"
    if figures["code"] == NOT_MADE:
        return "not made"
    if figures["why_not"]:
        return "refused"
    if figures["only_graphs"]:
        return "only graphs"
    errors = [figures[name] for name in FIGURES[1:3] if figures[name] is not None]
    said = [figures[name] for name in FIGURES[3:5] if figures[name] is not None]
    is_right = all(said) and max(errors, default=0) < TOLERANCE
    return "works" if figures["exported"] and is_right else "wrong"


def totals(known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How many types of each family have which outcome."""
    families: dict[str, Counter[str]] = {}
    for figures in known.values():
        families.setdefault(figures["family"] or "not made", Counter())[outcome(figures)] += 1
    return {family: dict(counts) for family, counts in sorted(families.items())}


def write(path: Path, version: str, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the file of results."""
    types = dict(sorted(known.items()))
    text = ",\n".join(f"  {json.dumps(name)}: {json.dumps(figures)}" for name, figures in types.items())
    head = json.dumps({"transformers": version, "totals": totals(known)})
    path.write_text(f'{head[:-1]}, "types": {{\n{text}\n}}}}\n', encoding="utf-8")


def markdown(version: str, known: Mapping[str, Mapping[str, Any]]) -> str:
    """The results as a page."""
    rows = sorted(known.items())
    counts = totals(known)
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
                why = told(figures).replace("|", "\\|").replace("](", "] (")
                lines.append(f"| {name} | {figures['family'] or '-'} | {figures['code'] or '-'} | {why} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
