"""Help of verbs, and tab completion with argcomplete, which completes what the help lists.

For a completion, the shell starts prge with the command line in the environment; `register-python-argcomplete
prge` prints the code that makes the shell do so.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from prge.cli.bounds import flag
from prge.cli.field_types import is_list_type, list_choices, metavar

_COMPLETING = "_ARGCOMPLETE"
_WIDTH, _INDENT = 110, 30
_SOURCES = (
    ("--config FILE", "YAML file with settings; flags override it"),
    ("--print-config", "print all settings as YAML and exit"),
    ("-h, --help", "show this message and exit"),
)


def completion_argv(argv: Sequence[str]) -> list[str]:
    """Return the command line's words; while a shell completes a line, that line's words and `--help`."""
    if _COMPLETING not in os.environ:
        return list(argv)
    from argcomplete.lexers import split_line

    line = os.environ["COMP_LINE"]
    *_, words, _ = split_line(line, int(os.environ["COMP_POINT"]))
    return [*(word for word in words[1:] if word != "--"), "--help"]


def print_settings_help(
    settings_type: type[Any], field_types: Mapping[str, Any], prog: str, positional: Sequence[str]
) -> None:
    """Print the help of a verb: an example, its own settings, and each group that it shares with others.

    Args:
        settings_type: The verb's dataclass; each base class is a group, whose docstring is the heading.
        field_types: Type of each field.
        prog: The command, such as `prge run`.
        positional: Fields that may be given without their flag.
    """
    flags: dict[str, tuple[list[str], str | None]] = {}
    for name, field_type in field_types.items():
        flags[flag(name)] = (
            list_choices(field_type),
            "+" if is_list_type(field_type) else "0" if field_type is bool else None,
        )
        if field_type is bool and getattr(settings_type, name, False):
            flags[f"--no-{flag(name)[2:]}"] = ([], "0")
    flags |= {"--config": ([], None), "--print-config": ([], "0"), "--help": ([], "0")}
    _complete(prog, flags)
    words = [f"{name.upper()}..." if is_list_type(field_types[name]) else name.upper() for name in positional]
    example = getattr(settings_type, "EXAMPLE", None)
    if example is not None:
        print(f"example: {prog} {example}".rstrip())
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
    # Groups with a required setting come first.
    for names in sorted(
        filter(None, groups), key=lambda names: not any(is_required(fields[n]) for n in names)
    ):
        base = introduced[names[0]]
        print("\nsettings:" if base is settings_type else f"\n{_paragraph(base).rstrip('.')}:")
        for name in names:
            _entry(
                _flag_text(name, field_types[name], fields[name]),
                f"{helps.get(name, '')} {_default_note(fields[name])}",
            )
    print("\nwhere settings come from:")
    for form, text in _SOURCES:
        _entry(form, text)


def print_verbs_help(
    prog: str, helps: Mapping[str, str], about: str, groups: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Print the list of verbs with their help.

    Args:
        prog: The words before the verbs, such as `prge android`.
        helps: What each verb does.
        about: A text above the list.
        groups: Heading of each verb's group; verbs of a group follow one another. Without it, the list has no
            headings.
    """
    _complete(prog, {"verb": (list(helps), None)})
    width = max(map(len, helps))
    print(f"usage: {prog} <verb> [flags]\n\n{about}")
    for heading, names in itertools.groupby(helps, lambda name: groups.get(name, "")):
        print(f"\n{heading}:" if heading else "")
        for name in names:
            print(f"  {name:<{width}}  {helps[name]}")
    print(f"\n`{prog} <verb> --help` shows a verb's flags.")


def field_help(settings_type: type[Any]) -> dict[str, str]:
    """Return the help of each field of a dataclass: the string below the field, bases included."""
    helps: dict[str, str] = {}
    bases = [base for part in _parts(settings_type) for base in part.__mro__[:-1]]
    for base in reversed(bases):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for statement, next_statement in itertools.pairwise(ast.iter_child_nodes(definition)):
            match statement, next_statement:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    helps[name] = inspect.cleandoc(text)
    return helps


def is_required(item: dataclasses.Field[Any]) -> bool:
    """Return whether a field has no default."""
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _parts(settings_type: type[Any]) -> tuple[type[Any], ...]:
    """Return the classes that define the fields: the parts of a combined class, or the class alone."""
    parts: tuple[type[Any], ...] = getattr(settings_type, "PARTS", (settings_type,))
    return parts


def _complete(prog: str, flags: Mapping[str, tuple[Iterable[str], str | None]]) -> None:
    """If the shell asks for completions, print them and exit.

    Args:
        prog: The words before those to complete.
        flags: Flags with their choices and number of values (argparse's `nargs`; "0" for none).
    """
    if _COMPLETING not in os.environ:
        return
    import argparse

    import argcomplete

    parser = argparse.ArgumentParser(prog, add_help=False)
    for name, (values, count) in flags.items():
        if count == "0":
            parser.add_argument(name, action="store_true")
        else:
            parser.add_argument(name, choices=list(values) or None, nargs=count)
    # Number of words before those that the parser handles.
    os.environ[_COMPLETING] = str(len(prog.split()))
    argcomplete.autocomplete(parser, always_complete_options=False)


def _paragraph(settings_type: type[Any]) -> str:
    return " ".join(inspect.cleandoc(settings_type.__doc__ or "").partition("\n\n")[0].split())


def _entry(form: str, text: str) -> None:
    """Print a flag and its help in two columns."""
    lines = textwrap.wrap(text, _WIDTH - _INDENT) or [""]
    first = f"  {form:<{_INDENT - 2}}"
    print(f"{first}{lines.pop(0)}".rstrip() if len(form) <= _INDENT - 4 else first.rstrip())
    for line in lines:
        print(f"{'':<{_INDENT}}{line}")


def _flag_text(name: str, field_type: Any, item: dataclasses.Field[Any]) -> str:
    """Return a flag with the placeholder of its value."""
    if field_type is bool:
        return f"{flag(name)}, --no-{flag(name)[2:]}" if item.default else flag(name)
    return f"{flag(name)} {metavar(field_type)}"


def _default_note(item: dataclasses.Field[Any]) -> str:
    """Return the note after a field's help: that the field is required, or its default unless it is empty."""
    if is_required(item):
        return "(required)"
    default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    if isinstance(default, (list, tuple)):
        default = " ".join(map(str, default))
    if default in ("", {}) or default is None or default is False:
        return ""
    return f"(default: {'true' if default is True else default})"
