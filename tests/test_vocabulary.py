"""Retired words stay out of names and docstrings; see "Vocabulary" in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Folders and files that are checked.
ROOMS = ("prge", "device_runner", "server_export", "scripts", "tests")
# A word of a name, or a phrase of docstrings if it has a space: what to write instead.
RETIRED = {
    "asked": "a name that says what the value is: request, prompt, target",
    "behind": "after",
    "beside": "extra, next to",
    "carried": "recurrent state",
    "drawn": "sampled",
    "found": "a name that says what the value is: result, outputs, rows",
    "gates": "conditions; Android's constraints",
    "kind": "block type",
    "kinds": "block types",
    "ours": "a name that says what the value is: expected, outputs",
    "piece": "chunk; vocabulary shard",
    "pieces": "chunks; vocabulary shards",
    "place": "position, index, folder",
    "places": "positions, indices, folders",
    "said": "a name that says what the value is: output, message, reply",
    "say": "describe, format, encode, print, log",
    "saying": "containing",
    "scalar": "projected gradient",
    "scalars": "projected gradients",
    "slope": "gradient",
    "slopes": "gradients",
    "speak": "generate",
    "speaker": "generator",
    "speakers": "generators",
    "speaking": "generation",
    "speaks": "generates",
    "tell": "describe, format, encode, print, log",
    "telling": "describing, formatting, encoding, printing, logging",
    "tells": "describe, format, encode, print, log",
    "theirs": "a name that says what the value is: expected, reference",
    "told": "described, formatted, reported; a name that says what the value is",
    "way": "pattern, style, method",
    "ways": "patterns, styles, methods",
    "a slope": "a gradient",
    "the slope": "the gradient",
    "slopes of": "gradients of",
    "goes back": "runs the backward pass",
    "the way back": "the backward pass",
    "the engine answers": "the engine outputs",
    "answers of the engine": "outputs of the engine",
    "kept states": "residuals, activation checkpoints",
    "saved values": "residuals",
    "piece of a row": "chunk of a row",
    "pieces of a row": "chunks of a row",
    "piece of the vocabulary": "shard of the vocabulary",
    "pieces of the vocabulary": "shards of the vocabulary",
    "in pieces": "in chunks",
    "a speaker": "a generation engine",
    "the speaker": "the generation engine",
    "trained numbers": "trainable parameters",
    "is told": "gets, receives; or name who gets what",
    "tells of": "reports, describes",
    "says what": "describes",
    "what is told": "the report, the output",
    "what it says": "its content",
    "is said": "is reported; or name who reports what",
    "are said": "are reported; or name who reports what",
    "is waited for": "waits for",
    "are waited for": "wait for",
    "who finds": "users who find",
    "who asks": "users who ask, clients that request",
    "going on": "continuing, in progress",
    "comes out": "results",
    "takes along": "ends too, includes",
    "that is none": "that is invalid",
    "it says": "its content; or name what contains it",
    "gives back": "returns, releases",
    "given back": "returned, released",
    "is handed": "gets, receives",
    "turns out": "is",
}
# Words that are right in their place: a file or folder, and the word.
ALLOWED: set[tuple[str, str]] = {
    # The factors of ALiBi have this name in its paper.
    ("server_export/trace/patterns/alibi.py", "slope"),
    ("server_export/trace/patterns/alibi.py", "slopes"),
    # GGUF's types of single values.
    ("server_export/checkpoint/gguf/header.py", "scalar"),
}


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of every function, class, argument, variable and attribute that is defined."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, and of the strings under fields, which are help texts."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def words_of(name: str) -> set[str]:
    """Return the words of a snake-case or camel-case name in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def retired_words(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, name or docstring line, and word for each use of a retired word in a module's source."""
    tree = ast.parse(source)
    names = {word for word in RETIRED if " " not in word}
    for line, name in bound_names(tree):
        for word in sorted(words_of(name) & names):
            yield line, name, word
    for line, text in docstrings(tree):
        # A phrase may go on in the next line.
        prose = " ".join(text.lower().split())
        for phrase in RETIRED.keys() - names:
            if re.search(rf"\b{phrase}\b", prose):
                yield line, prose[:60], phrase


def python_files(rooms: tuple[str, ...]) -> list[Path]:
    """Return the Python files of rooms, which are folders or files."""
    paths = [ROOT / room for room in rooms]
    return sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))


def is_allowed(file: str, word: str) -> bool:
    """Return whether a word may stand in a file."""
    return any(each == word and (file == path or file.startswith(f"{path}/")) for path, each in ALLOWED)


@pytest.mark.parametrize("room", ROOMS)
def test_retired_words_stay_out(room: str) -> None:
    files = python_files((room,))
    assert files, f"there is no room {room}"
    problems = [
        f"{name}:{line}: {text!r} has {word!r}: write {RETIRED[word]}"
        for file in files
        for name in [file.relative_to(ROOT).as_posix()]
        for line, text, word in retired_words(file.read_text(encoding="utf-8"))
        if not is_allowed(name, word)
    ]
    assert not problems, "\n".join(problems)


def test_allowed_words_are_used() -> None:
    """Entries of ALLOWED that are no longer needed must be removed."""
    unused = []
    for path, word in sorted(ALLOWED):
        sources = (file.read_text(encoding="utf-8") for file in python_files((path,)))
        if not any(word == each for source in sources for _, _, each in retired_words(source)):
            unused.append((path, word))
    assert not unused


def test_names_and_docstrings_are_searched() -> None:
    source = '''
class Speaker:
    """An engine; the way
    back is another one's."""

    def tell_all(self, slope):
        self.found = [kind for kind in slope]
'''
    words = sorted({word for _, _, word in retired_words(source)})
    assert words == ["found", "kind", "slope", "speaker", "tell", "the way back"]
    assert not [*retired_words('def encode(outputs):\n    """Return outputs on the way."""\n')]
