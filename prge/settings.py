"""Settings of a verb: one frozen dataclass gives its flags, its YAML keys, their types and their help.

    @dataclass(frozen=True)
    class RunSettings:
        bundle: Path
        '''Folder that `prge export` wrote.'''
        learning_rate: float = 1e-3
        '''Step size of the optimizer.'''

    settings = parse_settings(RunSettings, argv, "prge run")

gives `--bundle`, `--learning-rate`, `--config FILE` (a YAML mapping with the keys bundle and learning_rate;
flags win over it), `--print-config` and `--help`. The string under a field is its help; a field without a
default is required; a bool field is set by its bare flag and cleared by `--no-<flag>`; a list or tuple field
takes several values. Checks across fields go into `__post_init__` and raise ConfigError.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from prge.bounds import bound_problems, flag
from prge.documents import DocumentError, read_yaml
from prge.errors import ConfigError, shortened, shown

Settings = TypeVar("Settings")

_OWN_FLAGS = ("config", "print_config", "help")


def parse_settings(
    settings_type: type[Settings],
    argv: Sequence[str],
    prog: str,
    positional: Sequence[str] = (),
    description: str = "",
) -> Settings:
    """Read settings from a command line and the YAML files that it names.

    Args:
        settings_type: a dataclass as in the module's docstring.
        argv: the words after the verb.
        prog: what the user typed before them, such as `prge run`.
        positional: fields that may be given without their flag, in this order; a list field takes the rest.
        description: one sentence for `--help`.

    Raises:
        ConfigError: names every unknown key or flag, wrong value and missing setting at once.
        SystemExit: code 0, after `--help` or `--print-config`.
    """
    kinds = _kinds(settings_type)
    words = _read_words(argv, kinds, positional)
    if words.help:
        print(_help(settings_type, kinds, prog, positional, description), end="")
        raise SystemExit(0)
    given = [entry for path in words.config for entry in _read_file(Path(path), kinds, words.problems)]
    settings = _build(settings_type, [*given, *words.given], words.problems, prog)
    if words.print_config:
        print(settings_to_yaml(settings, comments=True), end="")
        raise SystemExit(0)
    return settings


def read_settings(settings_type: type[Settings], path: Path, prog: str) -> Settings:
    """Read settings from a YAML file alone, such as a run's `config.yaml`; raises ConfigError as above."""
    problems: list[str] = []
    given = _read_file(path, _kinds(settings_type), problems)
    return _build(settings_type, given, problems, prog)


def settings_to_yaml(settings: Any, comments: bool = False) -> str:
    """All settings as YAML that `--config` reads back as equal; `comments` adds each field's help."""
    import yaml

    helps = field_help(type(settings)) if comments else {}
    blocks = []
    for item in dataclasses.fields(settings):
        block = yaml.safe_dump(
            {item.name: _plain(getattr(settings, item.name))},
            default_flow_style=False,
            sort_keys=False,
            width=110,
        )
        help_lines = "".join(f"# {line}\n" for line in helps.get(item.name, "").splitlines())
        blocks.append(help_lines + block)
    return "".join(blocks)


def field_help(settings_type: type[Any]) -> dict[str, str]:
    """The string under each field of a dataclass, bases included; raises nothing where there is none."""
    import docstring_parser

    helps: dict[str, str] = {}
    for base in reversed(settings_type.__mro__[:-1]):
        if dataclasses.is_dataclass(base):
            parsed = docstring_parser.parse_from_object(base)
            helps.update({param.arg_name: param.description or "" for param in parsed.params})
    return helps


@dataclass
class _Given:
    """One setting as somebody wrote it: `where` is what a message calls it."""

    where: str
    key: str
    value: Any


@dataclass
class _Words:
    """A command line taken apart."""

    given: list[_Given] = field(default_factory=list)
    config: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    print_config: bool = False
    help: bool = False


def _kinds(settings_type: type[Any]) -> dict[str, Any]:
    """Type of each field, in order."""
    hints = get_type_hints(settings_type)
    return {item.name: hints[item.name] for item in dataclasses.fields(settings_type)}


def _read_words(argv: Sequence[str], kinds: Mapping[str, Any], positional: Sequence[str]) -> _Words:
    words = _Words()
    loose: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--":
            loose += rest
            break
        if word == "-h":
            words.help = True
            continue
        if not _is_flag(word):
            loose.append(word)
            continue
        name, equals, value = word.partition("=")
        key = name.lstrip("-").replace("-", "_")
        if key == "help":
            words.help = True
        elif key == "print_config":
            words.print_config = True
        elif key == "config" and "config" not in kinds:
            if not equals and not rest:
                words.problems.append("--config needs a YAML file")
            else:
                words.config.append(value if equals else rest.pop(0))
        elif key in kinds:
            _read_values(words, name, key, [value] if equals else None, rest, kinds[key])
        elif key.startswith("no_") and kinds.get(key[3:]) is bool and not equals:
            words.given.append(_Given(name, key[3:], False))
        else:
            nearest = _nearest(key, [*kinds, *_OWN_FLAGS], flag)
            words.problems.append(f"{shortened(name, 100)} is no flag of this verb{nearest}")
            # Its value is not a second problem.
            if not equals and rest and not _is_flag(rest[0]) and not positional:
                rest.pop(0)
    _place(words, loose, kinds, positional)
    return words


def _read_values(
    words: _Words, name: str, key: str, values: list[str] | None, rest: list[str], kind: Any
) -> None:
    """Take the value or values of a flag off the words that follow it."""
    value: Any
    if kind is bool:
        bare = values is None and not (rest and rest[0].lower() in ("true", "false"))
        value = True if bare else (values or [rest.pop(0)])[0].lower()
    elif _is_list(kind):
        value = list(values or [])
        while values is None and rest and not _is_flag(rest[0]):
            value.append(rest.pop(0))
    elif values is None and (not rest or _is_flag(rest[0])):
        words.problems.append(f"{name} needs a value: {_describe(kind)}")
        return
    else:
        value = values[0] if values else rest.pop(0)
    words.given.append(_Given(name, key, value))


def _place(words: _Words, loose: list[str], kinds: Mapping[str, Any], positional: Sequence[str]) -> None:
    """Give the words without a flag to the positional fields."""
    for key in positional:
        if loose and _is_list(kinds[key]):
            words.given.append(_Given(key.upper(), key, loose[:]))
            loose.clear()
        elif loose:
            words.given.append(_Given(key.upper(), key, loose.pop(0)))
    words.problems += [f"{shown(word)} stands alone: which flag does it belong to?" for word in loose]


def _read_file(path: Path, kinds: Mapping[str, Any], problems: list[str]) -> list[_Given]:
    try:
        content = read_yaml(path)
    except OSError as error:
        problems.append(f"{path} can't be read: {error.strerror or error}")
        return []
    except DocumentError as error:
        problems.append(f"{path} can't be read: {error}")
        return []
    if content is None:
        return []
    if not isinstance(content, dict):
        problems.append(f"{path} holds a {type(content).__name__}, not a mapping of settings")
        return []
    given = []
    for key, value in content.items():
        if key in kinds:
            given.append(_Given(f"{path}: {key}", key, value))
        else:
            problems.append(
                f"{path}: {shown(key)} is no setting of this verb{_nearest(str(key), kinds, str)}"
            )
    return given


def _build(
    settings_type: type[Settings], given: Iterable[_Given], problems: list[str], prog: str
) -> Settings:
    """Check every value against its field's type, tell all problems, make the object."""
    import jsonargparse

    kinds = _kinds(settings_type)
    checker = jsonargparse.ArgumentParser(exit_on_error=False)
    for key, kind in kinds.items():
        checker.add_argument(f"--{key}", type=kind)
    values: dict[str, Any] = {}
    for entry in given:
        try:
            if entry.value is None and type(None) not in _members(kinds[entry.key]):
                raise TypeError  # jsonargparse takes it for a value that is not set
            # One at a time: jsonargparse stops at the first problem.
            checked = checker.parse_object({entry.key: entry.value}, defaults=False)
        except (argparse.ArgumentError, TypeError, ValueError):
            problems.append(f"{entry.where} must be {_describe(kinds[entry.key])}, not {shown(entry.value)}")
            values.setdefault(entry.key, None)
        else:
            values[entry.key] = getattr(checked, entry.key)
    problems += [
        f"{flag(item.name)} is missing: {_describe(kinds[item.name])}"
        for item in dataclasses.fields(settings_type)  # type: ignore[arg-type]
        if _is_required(item) and item.name not in values
    ]
    if not problems:
        settings = settings_type(**values)
        problems = bound_problems(settings)
        if not problems:
            return settings
    count = "a setting" if len(problems) == 1 else f"{len(problems)} settings"
    raise ConfigError(f"{count} can't be used:", problems, remedy=f"`{prog} --help` lists all settings")


def _help(
    settings_type: type[Any],
    kinds: Mapping[str, Any],
    prog: str,
    positional: Sequence[str],
    description: str,
) -> str:
    helps = field_help(settings_type)
    shown = [f"{key.upper()}..." if _is_list(kinds[key]) else key.upper() for key in positional]
    parser = argparse.ArgumentParser(
        prog,
        usage=" ".join([prog, *shown, "[flags]"]),
        description=description or None,
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=110),
    )
    group = parser.add_argument_group("settings")
    for item in dataclasses.fields(settings_type):
        kind = kinds[item.name]
        if _is_required(item):
            note = "(required)"
        else:
            default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
            note = f"(default: {_shown(default)})" if _shown(default) else ""
        text = f"{helps.get(item.name, '')} {note}".strip().replace("%", "%%")
        if kind is bool:
            group.add_argument(flag(item.name), action="store_true", help=text)
        else:
            group.add_argument(
                flag(item.name), metavar=_metavar(kind), nargs="+" if _is_list(kind) else None, help=text
            )
    own = parser.add_argument_group("where settings come from")
    own.add_argument("--config", metavar="FILE", help="YAML file with settings; flags win over it")
    own.add_argument("--print-config", action="store_true", help="print all settings as YAML and stop")
    own.add_argument("-h", "--help", action="store_true", help="show this and stop")
    return parser.format_help()


def _is_flag(word: str) -> bool:
    """Whether a word is a flag rather than a value: negative numbers and a lone dash are values."""
    return word.startswith("-") and len(word) > 1 and not (word[1].isdigit() or word[1] == ".")


def _is_required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _nearest(key: str, known: Iterable[str], show: Any) -> str:
    found = difflib.get_close_matches(key.replace("-", "_"), list(known), n=1, cutoff=0.6)
    return f"; did you mean {show(found[0])}?" if found else ""


def _members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _is_list(kind: Any) -> bool:
    return any(get_origin(member) in (list, tuple) for member in _members(kind))


def _describe(kind: Any) -> str:
    """A type in words."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    parts = []
    for member in _members(kind):
        origin, arguments = get_origin(member), get_args(member)
        if member is type(None):
            parts.append("null")
        elif origin is Literal:
            parts.append("one of " + ", ".join(map(str, arguments)))
        elif origin in (list, tuple):
            parts.append("a list of " + _describe(arguments[0]).removeprefix("a ") + "s")
        elif origin is dict:
            parts.append("a mapping")
        else:
            parts.append(names.get(member, getattr(member, "__name__", str(member))))
    return " or ".join(parts)


def _metavar(kind: Any) -> str:
    names = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
    for member in _members(kind):
        if get_origin(member) is Literal:
            return "{" + ",".join(map(str, get_args(member))) + "}"
        if get_origin(member) in (list, tuple):
            return _metavar(get_args(member)[0])
        if member in names:
            return names[member]
    return "VALUE"


def _shown(value: Any) -> str:
    """A default in help; empty for what is simply absent."""
    if value is None or value is False or value in ((), [], {}, ""):
        return ""
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    """A value as YAML's own types."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return value
