"""Settings of a verb: one frozen dataclass defines the flags, the YAML keys, their types and their help.

    @dataclass(frozen=True)
    class RunSettings(EngineFlags):
        '''Fine-tune the adapter of a bundle.'''

        bundle: Path
        '''Folder that `prge export` wrote.'''
        learning_rate: float = 1e-3
        '''Step size of the optimizer.'''

    settings = parse_settings(RunSettings, argv, "prge run")

gives `--bundle`, `--learning-rate`, `--config FILE` (a YAML mapping with the keys bundle and learning_rate;
flags override it), `--print-config` and `--help`. The string below a field is its help. A field without a
default is required. A bool field is set by its bare flag and cleared by `--no-<flag>`. A list or tuple field
takes several values, after one flag or several. A word that belongs to no setting is an error. If a flag with
one value is repeated, the last value counts and a line is printed. Settings that verbs share are in a base
class, which help shows as a group. A class may also have:

ONE_OF    tuples of names; exactly one setting of each tuple must be given
STORED    file in the folder that `resume` names, whose settings are the defaults; the folder becomes `out`
KEPT      file in the folder that `folder` names, whose settings are the defaults if it exists; for the paths
          in both files see prge/formats/stored_settings.py
PRESETS   folder of YAML files, one of which `preset` names; its settings are the defaults
current   converts the settings of a file that an earlier version wrote
EXAMPLE   words after the verb in the example command at the top of the help

A setting's name in the previous version is accepted too, with a warning (section `renamed` of hints.yaml).
Stored settings are read with old names without a warning.

The type of a path says whether the verb reads it, as InputFile does (prge/cli/inputs.py), or writes it, as
OutputFile does (prge/cli/outputs.py). Outputs are checked before the verb begins.

Other checks across fields go into `__post_init__` and raise ConfigError.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, get_type_hints

from prge.cli.bounds import bound_problems, flag
from prge.cli.field_types import (
    CONVERSION_ERRORS,
    contains_path_type,
    convert_value,
    describe_type,
    is_list_type,
    to_python_value,
)
from prge.cli.help import field_help, is_required, print_settings_help
from prge.cli.hints import closest_match, current_name, suggest_setting
from prge.cli.inputs import Input, input_settings, join_reward, split_reward
from prge.cli.outputs import check_outputs, output_settings
from prge.errors import LONGEST_VALUE, ConfigError, RunError, format_value, shortened
from prge.formats.documents import MAX_YAML_BYTES, DocumentError, parse_yaml, read_document
from prge.formats.format3 import ROLES
from prge.formats.stored_settings import check_links, has_own_signature, is_outside
from prge.system.terminal import best_effort

Settings = TypeVar("Settings")

_COMMON_FLAGS = {"config": Path, "print_config": bool, "help": bool}
_SWITCH = {"true": True, "false": False}
_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_HUB_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?([\w.-]+/[\w.-]+)")
# Settings that may name a model or data set of the hub.
_OF_HUB = ("model", "data", "train", "dev", "test", "push")
# Settings of type str that may name a file or folder.
PATH_LIKE_SETTINGS = ("model", "task", "adapter", "chat_template", "push", "phone_folder")
# What settings of another person's folder may not name.
_UNTRUSTED = "code, or paths outside of its folder,"
# Current values of settings by the values of the previous version, which are accepted with a warning.
RENAMED_VALUES = {
    "roles": {old: new for old, new in ROLES.items() if old != new},
    "budget": {"rows": "forward_passes"},
}
# Value of a setting that was given under another tool's name, which is reported as its own problem.
_MISNAMED = object()


def parse_settings(
    settings_type: type[Settings], argv: Sequence[str], prog: str, positional: Sequence[str] = ()
) -> Settings:
    """Read settings from a command line and from the YAML files that it names.

    Args:
        settings_type: A dataclass as described in the module's docstring.
        argv: The words after the verb.
        prog: The words before them, such as `prge run`.
        positional: Fields that may be given without their flag, in this order; a list field takes the rest.

    Raises:
        ConfigError: Lists all unknown keys and flags, wrong values and missing settings.
        RunError: `--resume` names a folder that has no settings, or an output can't be written.
        SystemExit: With code 0, after `--help` or `--print-config`.
    """
    field_types = _field_types(settings_type)
    problems: list[str] = []
    words = _read_words(argv, {**field_types, **_COMMON_FLAGS}, positional, problems)
    own_keys = {entry.key for entry in words}
    if "help" in own_keys:
        print_settings_help(settings_type, field_types, prog, positional)
        raise SystemExit(0)
    with best_effort(sys.stderr):
        for line in _describe_repeated(words, field_types):
            print(f"{prog}: {line}", file=sys.stderr)
    files = [Path(entry.value) for entry in words if entry.key == "config"]
    entries = [entry for path in files for entry in _read_file(path, settings_type, problems)]
    entries += [entry for entry in words if entry.key in field_types]
    settings = _build(settings_type, _with_stored(settings_type, entries, problems), problems, prog)
    if "print_config" in own_keys:
        print(settings_to_yaml(settings, comments=True), end="")
        raise SystemExit(0)
    check_outputs(settings)
    return settings


def read_settings(settings_type: type[Settings], path: Path, prog: str) -> Settings:
    """Read settings from a YAML file without flags, such as a run's `config.yaml`; raises ConfigError."""
    problems: list[str] = []
    entries = _without_warnings(_read_file(path, settings_type, problems))
    return _build(settings_type, entries, problems, prog)


def read_stored(
    settings_type: type[Settings], path: Path, prog: str, unread: Collection[str] = (), remedy: str = ""
) -> Settings:
    """Read settings that are stored in a folder, which may come from another person.

    Args:
        settings_type: Settings class of the verb that wrote them.
        path: The YAML file in the folder.
        prog: The command that wrote them, such as `prge run`.
        unread: Names of settings that the caller replaces.
        remedy: What the user can do if a path is refused.

    Raises:
        ConfigError: The settings are invalid; or the user's prge didn't write them, and one of them names a
            path outside the folder.
    """
    problems: list[str] = []
    entries = _stored_settings(path, settings_type, unread, problems, remedy)
    return _build(settings_type, entries, problems, prog)


def is_config_of(settings_type: type[Any], path: Path) -> bool:
    """Return whether a file holds valid settings of this class."""
    try:
        read_settings(settings_type, path, "prge")
    except ConfigError:
        return False
    return True


def parse_path(value: object, where: str) -> Path:
    """Convert an argument of a Python call to a path; raises ConfigError for any other value."""
    try:
        return Path(convert_value(value, Path))
    except CONVERSION_ERRORS:
        raise ConfigError(
            "A setting can't be used:",
            [f"{where} must be a path, not {format_value(value)}"],
            code="settings-unusable",
        ) from None


def settings_from_mapping(
    settings_type: type[Settings],
    fields: Mapping[str, Any],
    where: str,
    prog: str = "prge",
) -> Settings:
    """Create settings from a mapping, such as arguments of a Python call; see `parse_settings` for errors.

    Args:
        settings_type: A dataclass as described in the module's docstring.
        fields: Values by the settings' names.
        where: What messages call the mapping, such as `run()`.
        prog: The command with the same settings.
    """
    problems: list[str] = []
    entries = _parse_mapping(fields, where, _field_types(settings_type), problems)
    settings = _build(settings_type, _with_stored(settings_type, entries, problems), problems, prog)
    check_outputs(settings)
    return settings


def select_settings(settings_type: type[Settings], settings: Any) -> Settings:
    """Create settings of a class from other settings that have all of its fields."""
    values = {item.name: getattr(settings, item.name) for item in dataclasses.fields(settings_type)}  # type: ignore[arg-type]
    return settings_type(**values)


def with_absolute_paths(
    settings: Settings,
    keep: Iterable[str] = (),
    file_texts: Iterable[str] = ("task",),
    path_texts: Iterable[str] = (),
) -> Settings:
    """Return the settings with absolute paths, so that they can be read from another working folder.

    Args:
        settings: Settings of any verb.
        keep: Names of paths to leave unchanged.
        file_texts: Names of texts that are paths if such a file exists.
        path_texts: Names of texts that are paths if such a file or folder exists.
    """
    paths: dict[str, Any] = {}
    for item in dataclasses.fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, item.name)
        if isinstance(value, Path) and item.name not in keep:
            paths[item.name] = value.resolve()
        elif isinstance(value, tuple) and value and all(isinstance(each, Path) for each in value):
            paths[item.name] = tuple(each.resolve() for each in value)
    for name in (*file_texts, *path_texts):
        path = Path(getattr(settings, name, None) or "")
        if path.is_file() or (name in path_texts and path.name and path.exists()):
            paths[name] = str(path.resolve())
    for name, source in input_settings(type(settings)).items():
        if source is Input.REWARD and (word := getattr(settings, name)):
            path, function = split_reward(word)
            paths[name] = join_reward(path.resolve(), function)
    return dataclasses.replace(settings, **paths)  # type: ignore[type-var]


def settings_to_yaml(settings: Any, comments: bool = False) -> str:
    """Format all settings as YAML that `--config` reads back as equal; `comments` adds each field's help."""
    values = {item.name: getattr(settings, item.name) for item in dataclasses.fields(settings)}
    return format_yaml(values, field_help(type(settings)) if comments else {})


def format_yaml(values: Mapping[str, Any], comments: Mapping[str, str] = MappingProxyType({})) -> str:
    """Format settings as YAML, each below its comment."""
    import yaml

    text = ""
    for name, value in values.items():
        # JSON turns paths into texts and tuples into lists.
        plain = json.loads(json.dumps(value, default=str))
        text += "".join(f"# {line}\n" for line in comments.get(name, "").splitlines())
        text += yaml.safe_dump({name: plain}, default_flow_style=False, sort_keys=False, width=110)
    return text


class _SettingValue(NamedTuple):
    """One setting as the user wrote it.

    Attributes:
        where: What messages call it, such as its flag.
        key: Name of the setting.
        value: Its value, before conversion to the field's type.
        new_name: How the setting is written now, if the user wrote the name of the previous version.
        old_values: Values of the previous version that were replaced by the current ones.
    """

    where: str
    key: str
    value: Any
    new_name: str = ""
    old_values: tuple[str, ...] = ()

    @classmethod
    def of(cls, where: str, key: str, value: Any, new_name: str = "") -> _SettingValue:
        """Return a setting with the current names of its values."""
        renamed = RENAMED_VALUES.get(key, {})
        is_list = isinstance(value, (list, tuple))
        values = value if is_list else [value]
        old_values = tuple(each for each in values if isinstance(each, str) and each in renamed)
        if not old_values:
            return cls(where, key, value, new_name)
        current = [renamed.get(each, each) if isinstance(each, str) else each for each in values]
        return cls(where, key, current if is_list else current[0], new_name, old_values)

    def warnings(self) -> Iterator[str]:
        """Yield a line for each name of the previous version."""
        still = "this version still accepts the old name"
        if self.new_name:
            yield f"{self.where} is now {self.new_name}; {still}"
        for value in self.old_values:
            yield f"{self.where} {value} is now {RENAMED_VALUES[self.key][value]}; {still}"


class _StrayWord(NamedTuple):
    """A word of a command line that belongs to no flag.

    `quoted` is the preceding flag with all words up to the next flag quoted as its value, if it takes one.
    """

    word: str
    quoted: str = ""

    def problem(self) -> str:
        """Return the message for a word that no positional setting takes."""
        hint = f" Quote values with spaces: {shortened(self.quoted, LONGEST_VALUE)}" if self.quoted else ""
        return f"{format_value(self.word)} stands alone: which flag does it belong to?{hint}"


def _field_types(settings_type: type[Any]) -> dict[str, Any]:
    """Return the type of each field, in order."""
    hints = get_type_hints(settings_type)
    return {item.name: hints[item.name] for item in dataclasses.fields(settings_type)}


def _read_words(
    argv: Sequence[str], field_types: Mapping[str, Any], positional: Sequence[str], problems: list[str]
) -> list[_SettingValue]:
    """Parse a command line."""
    entries: list[_SettingValue] = []
    stray_words: list[_StrayWord] = []
    words, last_given = list(argv), None
    while words:
        word = words.pop(0)
        if word == "--":
            stray_words += [_StrayWord(each) for each in words]
            break
        if not _is_flag(word):
            following = itertools.takewhile(lambda word: not _is_flag(word), words)
            stray_words.append(_StrayWord(word, _quoted(last_given, [word, *following], field_types)))
            last_given = None
            continue
        last_given = None
        name, equals, value = ("--help" if word == "-h" else word).partition("=")
        given_key = name.lstrip("-").replace("-", "_")
        key = current_name(given_key, field_types)
        positive = current_name(given_key.removeprefix("no_"), field_types)
        is_negated = key not in field_types and field_types.get(positive) is bool
        new_key = f"no_{positive}" if is_negated else key
        new_name = "" if new_key == given_key else flag(new_key)
        key = positive if is_negated else key
        match = key
        if key not in field_types:
            match, hint = suggest_setting(key, field_types, flag)
            problems.append(f"{shortened(name, 100)} is not a flag of this verb{hint}")
        field_type = field_types.get(match)
        values = [value] if equals else list(itertools.takewhile(lambda word: not _is_flag(word), words))
        if field_type is None:
            count = int(not positional)  # don't report the value as a second problem
        elif field_type is bool:
            count = int(not is_negated and (equals == "=" or "".join(values[:1]).lower() in _SWITCH))
        else:
            count = len(values) if is_list_type(field_type) else 1
        if not equals:
            del words[: min(count, len(values))]
        if key not in field_types:
            entries += [_SettingValue(name, match, _MISNAMED)] if match and match not in _COMMON_FLAGS else []
        elif field_type is bool:
            switched = _SWITCH.get(values[0].lower(), values[0]) if count else not is_negated
            entries.append(_SettingValue(name, key, switched, new_name))
        elif is_list_type(field_type):
            earlier = [entry.value for entry in entries if entry.key == key and isinstance(entry.value, list)]
            listed = [*(earlier[-1] if earlier else ()), *values]
            entries.append(_SettingValue.of(name, key, listed, new_name))
            if not values:
                problems.append(f"{name} needs a value: {describe_type(field_type)}")
        elif values:
            entries.append(last_given := _SettingValue.of(name, key, values[0], new_name))
        else:
            problems.append(f"{name} needs a value: {describe_type(field_type)}")
    by_flag = {entry.key for entry in entries}
    for key in positional:
        if stray_words and key not in by_flag:
            taken_words = stray_words[:] if is_list_type(field_types[key]) else stray_words[:1]
            texts = [each.word for each in taken_words]
            entries.append(
                _SettingValue(key.upper(), key, texts if is_list_type(field_types[key]) else texts[0])
            )
            del stray_words[: len(taken_words)]
    problems += [*_given_twice(entries), *(each.problem() for each in stray_words)]
    return entries


def _quoted(last_given: _SettingValue | None, words: Sequence[str], field_types: Mapping[str, Any]) -> str:
    """Return a flag with its value and the words after it quoted as one value; empty if that is invalid."""
    if last_given is None:
        return ""
    value = " ".join([last_given.value, *words])
    with suppress(*CONVERSION_ERRORS):
        convert_value(value, field_types[last_given.key])
        return shlex.join([last_given.where, value])
    return ""


def _given_twice(entries: Sequence[_SettingValue]) -> list[str]:
    """Return a problem for every setting that is given by its old and by its current name in one place."""
    current = {entry.key for entry in entries if not entry.new_name and entry.value is not _MISNAMED}
    return [
        f"{entry.where} is now {entry.new_name}: give one of them"
        for entry in entries
        if entry.new_name and entry.key in current
    ]


def _without_warnings(entries: Iterable[_SettingValue]) -> list[_SettingValue]:
    """Return stored settings without warnings about old names, which the user can't change."""
    return [entry._replace(new_name="", old_values=()) for entry in entries]


def _describe_repeated(entries: Sequence[_SettingValue], field_types: Mapping[str, Any]) -> list[str]:
    """Return a line for every flag that takes one value and is given different ones."""
    values: dict[str, list[Any]] = {}
    for entry in entries:
        if (
            entry.key in field_types
            and entry.value is not _MISNAMED
            and not is_list_type(field_types[entry.key])
        ):
            values.setdefault(entry.key, []).append(entry.value)
    return [
        f"{flag(key)} is given {len(each)} times, the last one counts: {', '.join(map(format_value, each))}"
        for key, each in values.items()
        if any(other != each[0] for other in each)
    ]


def _read_file(path: Path, settings_type: type[Any], problems: list[str]) -> list[_SettingValue]:
    content = _read_bytes(path, problems)
    return [] if content is None else _parse_document(content, path, settings_type, problems)


def _read_bytes(path: Path, problems: list[str]) -> bytes | None:
    try:
        return read_document(path, MAX_YAML_BYTES)
    except (OSError, DocumentError) as error:
        problems.append(f"{path} can't be read: {getattr(error, 'strerror', None) or error}")
        return None


def _stored_settings(
    path: Path, settings_type: type[Any], overridden: Collection[str], problems: list[str], remedy: str = ""
) -> list[_SettingValue]:
    """Read settings from a file in a folder that may come from another person (formats/stored_settings.py).

    Args:
        path: The file.
        settings_type: Class of the settings.
        overridden: Settings that the user overrides, or that are not read.
        problems: Problems of the file are appended to this list.
        remedy: Replaces the default remedy, which lists the flags to give again.

    Raises:
        ConfigError: The user's prge didn't write the settings, and one of them names a path outside of the
            folder.
        RunError: The folder holds a link that leads out of it.
    """
    check_links(path.parent)
    content = _read_bytes(path, problems)
    entries = [] if content is None else _parse_document(content, path, settings_type, problems)
    entries = _without_warnings(entries)
    if content is None or has_own_signature(content, path.name):
        return entries
    field_types, outputs = _field_types(settings_type), output_settings(settings_type)
    code = {name for name, each in input_settings(settings_type).items() if each is Input.REWARD}
    refused = {
        entry.key: texts
        for entry in entries
        if entry.key not in overridden
        and (contains_path_type(field_types[entry.key]) or entry.key in {*PATH_LIKE_SETTINGS, *code})
        if (texts := [each for each in _as_list(entry.value) if isinstance(each, str) and each != "null"])
        and (entry.key in code or any(is_outside(path.parent, each, entry.key in outputs) for each in texts))
    }
    if refused:
        flags = shlex.join(word for key, texts in refused.items() for word in (flag(key), *texts))
        raise ConfigError(
            f"{path} names {_UNTRUSTED} and wasn't written by your prge:",
            [f"{key}: {', '.join(map(format_value, texts))}" for key, texts in refused.items()],
            remedy=remedy or f"if you trust them, give them again: {flags}",
            code="path-outside",
        )
    return entries


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _parse_document(
    document: bytes, path: Path, settings_type: type[Any], problems: list[str]
) -> list[_SettingValue]:
    try:
        content = parse_yaml(document)
    except DocumentError as error:
        problems.append(f"{path} can't be read: {error}")
        return []
    if content is None:
        return []
    if not isinstance(content, dict):
        problems.append(f"{path} holds a {type(content).__name__}, not a mapping of settings")
        return []
    current = getattr(settings_type, "current", dict)
    return _parse_mapping(current(content), str(path), _field_types(settings_type), problems)


def _parse_mapping(
    content: Mapping[Any, Any],
    where: str,
    field_types: Mapping[str, Any],
    problems: list[str],
) -> list[_SettingValue]:
    entries: list[_SettingValue] = []
    for key, value in content.items():
        name = current_name(key, field_types) if isinstance(key, str) else key
        if name in field_types:
            new_name = "" if name == key else name
            entries.append(_SettingValue.of(f"{where}: {key}", name, to_python_value(value), new_name))
        else:
            match, hint = suggest_setting(str(key).replace("-", "_"), field_types, str)
            problems.append(f"{where}: {format_value(key)} is not a setting of this verb{hint}")
            entries += [_SettingValue(where, match, _MISNAMED)] if match else []
    problems += _given_twice(entries)
    return entries


def _with_stored(
    settings_type: type[Any], entries: Sequence[_SettingValue], problems: list[str]
) -> Sequence[_SettingValue]:
    """Return the given settings after those of the preset and of the folder that they name."""
    named = {entry.key: str(entry.value) for entry in entries if isinstance(entry.value, (str, Path))}
    if hasattr(settings_type, "PRESETS") and "preset" in named:
        known = {path.stem: path for path in sorted(settings_type.PRESETS.glob("*.yaml"))}
        if named["preset"] in known:
            entries = [*_read_file(known[named["preset"]], settings_type, problems), *entries]
        else:
            similar = closest_match(named["preset"], known, 0.6)
            hint = f"; did you mean {similar}?" if similar else f", must be one of {', '.join(known)}"
            problems.append(f"--preset is {format_value(named['preset'])}{hint}")
    if hasattr(settings_type, "KEPT") and "folder" in named:
        kept = Path(named["folder"]) / settings_type.KEPT
        overridden = {entry.key for entry in entries}
        entries = [
            *(_stored_settings(kept, settings_type, overridden, problems) if kept.is_file() else ()),
            *entries,
        ]
    if hasattr(settings_type, "STORED") and "resume" in named:
        folder = Path(named["resume"])
        if not (folder / settings_type.STORED).is_file():
            raise RunError(
                f"{folder} is not a run: it has no {settings_type.STORED}.",
                remedy="Give the folder that `--out` named.",
                code="not-a-run",
            )
        overridden = {"out", "resume", *(entry.key for entry in entries)}
        stored = _stored_settings(folder / settings_type.STORED, settings_type, overridden, problems)
        entries = [*stored, *entries, _SettingValue("--resume", "out", str(folder))]
    return entries


def _build(
    settings_type: type[Settings], entries: Collection[_SettingValue], problems: list[str], prog: str
) -> Settings:
    """Check all values against their fields' types and create the settings; report all problems at once."""
    with best_effort(sys.stderr):
        for line in dict.fromkeys(line for entry in entries for line in entry.warnings()):
            print(f"{prog}: {line}", file=sys.stderr)
    field_types = _field_types(settings_type)
    values: dict[str, Any] = {}
    for entry in entries:
        values.setdefault(entry.key, None)
        if entry.value is _MISNAMED:
            continue
        if url := _url_in(entry, field_types[entry.key]):
            problems.append(f"{entry.where} is a URL, {format_value(url)}: {_instead_of(url, entry.key)}")
            continue
        try:
            values[entry.key] = convert_value(entry.value, field_types[entry.key])
        except CONVERSION_ERRORS:
            problems.append(
                f"{entry.where} must be {describe_type(field_types[entry.key])}, not "
                f"{format_value(entry.value)}"
            )
    # A list takes all words up to the next flag, even a word that was meant for a positional setting.
    last_words = "".join(
        f"; {entry.where} took {format_value(entry.value[-1])} as well"
        for entry in entries
        if entry.where == flag(entry.key) and isinstance(entry.value, list) and len(entry.value) > 1
        if os.path.exists(str(entry.value[-1]))  # false for words that no file can be named
    )
    problems += [
        f"{flag(item.name)} is missing: {describe_type(field_types[item.name])}{last_words}"
        for item in dataclasses.fields(settings_type)  # type: ignore[arg-type]
        if is_required(item) and item.name not in values
    ]
    chosen = {entry.key for entry in entries if entry.value not in (None, "null", [])}
    for names in getattr(settings_type, "ONE_OF", ()):
        given_flags = [flag(name) for name in names if name in chosen]
        if not given_flags:
            problems.append(f"{' or '.join(map(flag, names))} is missing")
        elif len(given_flags) > 1:
            problems.append(f"{' and '.join(given_flags)}: give one of them")
    if not problems:
        settings = settings_type(**values)
        problems = bound_problems(settings)
        if not problems:
            return settings
    count = "A setting" if len(problems) == 1 else f"{len(problems)} settings"
    raise ConfigError(
        f"{count} can't be used:",
        problems,
        remedy=f"`{prog} --help` lists all settings.",
        code="settings-unusable",
    )


def _url_in(entry: _SettingValue, field_type: Any) -> str:
    """Return the URL that was given instead of a path or a name of the hub; empty if there is none."""
    words = entry.value if isinstance(entry.value, list) else [entry.value]
    urls = [word for word in words if isinstance(word, str) and _URL.match(word)]
    return urls[0] if urls and (entry.key in PATH_LIKE_SETTINGS or contains_path_type(field_type)) else ""


def _instead_of(url: str, key: str) -> str:
    """Return what to give instead of a URL."""
    if key in _OF_HUB and (page := _HUB_PAGE.match(url)):
        return f"give the hub's name, {page[1]}"
    if url.lower().startswith("file://"):
        return f"give the path, {url[7:]}"
    return "prge doesn't read from URLs; download it, for example with curl -LO, and give the file"


def _is_flag(word: str) -> bool:
    """Return whether a word is a flag rather than a value: negative numbers and a lone dash are values."""
    return word.startswith("-") and len(word) > 1 and not (word[1].isdigit() or word[1] == ".")
