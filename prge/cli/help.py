"""Help of verbs, and tab completion, which is help of another form: argcomplete asks for what is listed.

A shell that has evaluated what `register-python-argcomplete prge` prints starts prge with its line in the
environment.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prge.cli.bounds import flag
from prge.cli.field_types import choices, is_list_type, metavar

_ASKED = "_ARGCOMPLETE"
_WIDTH, _INDENT = 110, 30
_SOURCES = (
    ("--config FILE", "YAML file with settings; flags win over it"),
    ("--print-config", "print all settings as YAML and stop"),
    ("-h, --help", "show this and stop"),
)


def completion_argv(argv: Sequence[str]) -> list[str]:
    """The words of a command line; where a shell asks for completion, those of its line, and `--help`."""
    if _ASKED not in os.environ:
        return list(argv)
    from argcomplete.lexers import split_line

    line = os.environ["COMP_LINE"]
    *_, words, _ = split_line(line, int(os.environ["COMP_POINT"]))
    return [*(word for word in words[1:] if word != "--"), "--help"]


def print_settings_help(
    settings_type: type[Any], kinds: Mapping[str, Any], prog: str, shown: Sequence[str]
) -> None:
    """Print the help of a verb: its own settings first, then each group that it shares with others.

    Args:
        settings_type: its dataclass; a group is a base, whose docstring is its heading.
        kinds: type of each field.
        prog: what the user types before its words.
        shown: fields that may be given without their flag.
    """
    flags: dict[str, tuple[list[str], str | None]] = {}
    for name, kind in kinds.items():
        flags[flag(name)] = (choices(kind), "+" if is_list_type(kind) else "0" if kind is bool else None)
        if kind is bool and getattr(settings_type, name, False):
            flags[f"--no-{flag(name)[2:]}"] = ([], "0")
    flags |= {"--config": ([], None), "--print-config": ([], "0"), "--help": ([], "0")}
    _complete(prog, flags)
    words = [f"{name.upper()}..." if is_list_type(kinds[name]) else name.upper() for name in shown]
    print(" ".join(["usage:", prog, *words, "[flags]"]))
    print(f"\n{_paragraph(settings_type)}")
    helps = field_help(settings_type)
    fields = {item.name: item for item in dataclasses.fields(settings_type)}
    introduced: dict[str, type[Any]] = {}
    bases = [base for part in _parts(settings_type) for base in part.__mro__[:-1]]
    for part in _parts(settings_type):
        for base in reversed(part.__mro__[:-1]):
            introduced = dict.fromkeys(inspect.get_annotations(base), base) | introduced
    groups = [[name for name in fields if introduced[name] is base] for base in dict.fromkeys(bases)]
    # Those with something that must be given come first.
    for names in sorted(
        filter(None, groups), key=lambda names: not any(is_required(fields[n]) for n in names)
    ):
        base = introduced[names[0]]
        print("\nsettings:" if base is settings_type else f"\n{_paragraph(base).rstrip('.')}:")
        for name in names:
            _entry(_form(name, kinds[name], fields[name]), f"{helps.get(name, '')} {_note(fields[name])}")
    print("\nwhere settings come from:")
    for form, text in _SOURCES:
        _entry(form, text)


def print_verbs_help(prog: str, helps: Mapping[str, str], about: str) -> None:
    """Print the help of verbs, each with its own; `about` is a sentence for the list."""
    _complete(prog, {"verb": (list(helps), None)})
    width = max(map(len, helps))
    print(f"usage: {prog} <verb> [flags]\n\n{about}\n")
    for name, text in helps.items():
        print(f"  {name:<{width}}  {text}")
    print(f"\n`{prog} <verb> --help` shows a verb's flags.")


def field_help(settings_type: type[Any]) -> dict[str, str]:
    """The string under each field of a dataclass, bases included."""
    helps: dict[str, str] = {}
    bases = [base for part in _parts(settings_type) for base in part.__mro__[:-1]]
    for base in reversed(bases):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for statement, below in itertools.pairwise(ast.iter_child_nodes(definition)):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    helps[name] = inspect.cleandoc(text)
    return helps


def is_required(item: dataclasses.Field[Any]) -> bool:
    """Whether a field has no default."""
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _parts(settings_type: type[Any]) -> tuple[type[Any], ...]:
    """The classes that define a class's fields: those it is combined of, or it alone."""
    parts: tuple[type[Any], ...] = getattr(settings_type, "PARTS", (settings_type,))
    return parts


def _complete(prog: str, flags: Mapping[str, tuple[Iterable[str], str | None]]) -> None:
    """Where a shell asks, complete the word and exit.

    Args:
        prog: what comes before the words.
        flags: their choices and how many values they take, as argparse counts; 0: none.
    """
    if _ASKED not in os.environ:
        return
    import argparse

    import argcomplete

    parser = argparse.ArgumentParser(prog, add_help=False)
    for name, (values, count) in flags.items():
        if count == "0":
            parser.add_argument(name, action="store_true")
        else:
            parser.add_argument(name, choices=list(values) or None, nargs=count)
    # Words of the line that come before the parser's.
    os.environ[_ASKED] = str(len(prog.split()))
    argcomplete.autocomplete(parser, always_complete_options=False)


def _paragraph(settings_type: type[Any]) -> str:
    return " ".join(inspect.cleandoc(settings_type.__doc__ or "").partition("\n\n")[0].split())


def _entry(form: str, text: str) -> None:
    """A flag and its help, in two columns."""
    lines = textwrap.wrap(text, _WIDTH - _INDENT) or [""]
    first = f"  {form:<{_INDENT - 2}}"
    print(f"{first}{lines.pop(0)}".rstrip() if len(form) <= _INDENT - 4 else first.rstrip())
    for line in lines:
        print(f"{'':<{_INDENT}}{line}")


def _form(name: str, kind: Any, item: dataclasses.Field[Any]) -> str:
    """How a flag is written."""
    if kind is bool:
        return f"{flag(name)}, --no-{flag(name)[2:]}" if item.default else flag(name)
    return f"{flag(name)} {metavar(kind)}"


def _note(item: dataclasses.Field[Any]) -> str:
    """What help says of a field beside its text: that it is required, or its default if that is something."""
    if is_required(item):
        return "(required)"
    default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    if isinstance(default, (list, tuple)):
        default = " ".join(map(str, default))
    if default in ("", {}) or default is None or default is False:
        return ""
    return f"(default: {'true' if default is True else default})"
