"""Every error that a user can meet has a code, and tests identify it by the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["prge", "device_runner", "server_export"]
# Folders, and files directly in tests/, whose tests identify errors by code.
TESTS = ["tests", *(f"tests/{room}" for room in (*PACKAGES, "end_to_end", "scripts"))]
# Exceptions that a caller converts to a PrgeError with the same code.
SIGNALS = {"prge.data.columns.RowError", "prge.formats.documents.DocumentError"}
PRGE_ERROR, REFUSAL = "prge.errors.PrgeError", "prge.errors.Refusal"
CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_error_is_created_with_a_code(package: str) -> None:
    lacking = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for call in calls(path)
        if (name := full_name(call.func, path)) in error_classes() and not has_code(call, name)
    ]
    assert not lacking


@pytest.mark.parametrize("folder", TESTS)
def test_no_test_knows_an_error_by_its_words(folder: str) -> None:
    files = (ROOT / folder).glob("*.py") if folder == "tests" else (ROOT / folder).rglob("*.py")
    by_words = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sorted(files)
        for call in calls(path)
        if full_name(call.func, path) == "pytest.raises" and full_name(call.args[0], path) in error_classes()
        if any(keyword.arg == "match" and is_prose(keyword.value) for keyword in call.keywords)
    ]
    assert not by_words


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("'line 1 of 5 is damaged'", True),
        ("f'{path} is damaged'", True),
        ("'--queries'", False),
        ("f'{path}'", False),
        (r"r'\[2\]'", False),
    ],
)
def test_words_are_prose_and_a_value_is_not(pattern: str, expected: bool) -> None:
    assert is_prose(ast.parse(pattern, mode="eval").body) is expected


@cache
def error_classes() -> frozenset[str]:
    """Return the full names of PrgeError, its subclasses, and exceptions that become one."""
    bases = {
        full_name(node, path): {full_name(base, path) for base in node.bases}
        for package in ("prge", "server_export", "device_runner")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    }
    result = {PRGE_ERROR}
    while derived := {name for name in bases.keys() - result if bases[name] & result}:
        result |= derived
    return frozenset(result | SIGNALS)


def has_code(call: ast.Call, name: str) -> bool:
    """Return whether a call passes a code: a Refusal as first argument, other errors by keyword."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
    if name == REFUSAL:
        given += call.args[:1]
    return any(not isinstance(each, ast.Constant) or CODE.fullmatch(str(each.value)) for each in given)


def is_prose(pattern: ast.expr) -> bool:
    """Return whether a pattern's expression contains a text of several words."""
    texts = [node.value for node in ast.walk(pattern) if isinstance(node, ast.Constant)]
    return len(re.findall(r"[^\W\d_]{2,}", " ".join(str(text) for text in texts))) > 1


def calls(path: Path) -> Iterator[ast.Call]:
    """Return the calls in a file."""
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call))


def full_name(node: ast.AST, path: Path) -> str:
    """Return module and name of a class or function that a file defines or imports, or an empty text."""
    if isinstance(node, ast.Attribute):
        return f"{full_name(node.value, path)}.{node.attr}".replace("prge.PrgeError", PRGE_ERROR)
    name = node.name if isinstance(node, ast.ClassDef) else node.id if isinstance(node, ast.Name) else ""
    return origins(path).get(name, "")


@cache
def origins(path: Path) -> dict[str, str]:
    """Return the full names of a file's imports and classes."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    result: dict[str, str] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            result |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            result |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.ClassDef):
            result[node.name] = f"{module}.{node.name}"
    return result


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))
