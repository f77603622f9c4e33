"""Settings of a verb: one frozen dataclass gives its flags, its YAML keys, their types and their help.

    @dataclass(frozen=True)
    class RunSettings(EngineFlags):
        '''Fine-tune the adapter of a bundle.'''

        bundle: Path
        '''Folder that `prge export` wrote.'''
        learning_rate: float = 1e-3
        '''Step size of the optimizer.'''

    settings = parse_settings(RunSettings, argv, "prge run")

gives `--bundle`, `--learning-rate`, `--config FILE` (a YAML mapping with the keys bundle and learning_rate;
flags win over it), `--print-config` and `--help`. The string under a field is its help; a field without a
default is required; a bool field is set by its bare flag and cleared by `--no-<flag>`; a list or tuple field
takes several values, after one flag or several. A word that no setting takes is an error. Of a flag that
takes one value and is given again the last one counts, which is said. Settings that verbs share are in a base
of their own, which help shows as a group. What else a class may have:

ONE_OF    of the names in each entry one must be given
STORED    file of the folder that `resume` names: its settings come first, and the folder is `out`
KEPT      file of the folder that `folder` names: where there is one, its settings come first; paths in both
          are followed as prge/files/own_settings.py says
PRESETS   folder of YAML files: `preset` names one, whose settings come first
current   of what a file has: settings that an earlier version wrote down, as this one has them

The type of a path says whether the verb reads it, as InputFile does (prge/verbs/inputs.py), or writes it, as
OutputFile does (prge/verbs/outputs.py): places to write are checked before the verb begins.

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
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, get_type_hints

from prge.errors import LONGEST_VALUE, ConfigError, RunError, shortened, shown
from prge.files.documents import MOST_YAML_BYTES, DocumentError, parse_yaml, read_document
from prge.files.own_settings import check_links, is_own, leads_out
from prge.host.terminal import best_effort
from prge.verbs.bounds import bound_problems, flag
from prge.verbs.habits import nearest, setting_meant
from prge.verbs.helping import field_help, is_required, show_settings
from prge.verbs.kinds import MISFITS, converted, described, is_list, plain_value, takes_paths
from prge.verbs.outputs import check_outputs, outputs_of

Settings = TypeVar("Settings")

_OWN_KINDS = {"config": Path, "print_config": bool, "help": bool}
_SWITCH = {"true": True, "false": False}
_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_HUB_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?([\w.-]+/[\w.-]+)")
# What may be the name of a model or data set of the hub.
_OF_HUB = ("model", "data", "train", "dev", "test", "push")
# Texts that may name a file or folder.
PLACES = ("model", "task", "adapter", "chat_template", "push", "phone_folder")
# The value of a setting that is known by a name of others alone, which is a problem of its own.
_MISNAMED = object()


def parse_settings(
    settings_type: type[Settings], argv: Sequence[str], prog: str, positional: Sequence[str] = ()
) -> Settings:
    """Read settings from a command line and the YAML files that it names.

    Args:
        settings_type: a dataclass as in the module's docstring.
        argv: the words after the verb.
        prog: what the user typed before them, such as `prge run`.
        positional: fields that may be given without their flag, in this order; a list field takes the rest.

    Raises:
        ConfigError: names every unknown key or flag, wrong value and missing setting at once.
        RunError: `--resume` names a folder that has no settings, or a place can't be written.
        SystemExit: code 0, after `--help` or `--print-config`.
    """
    kinds = _kinds(settings_type)
    problems: list[str] = []
    words = _read_words(argv, {**kinds, **_OWN_KINDS}, positional, problems)
    own = {entry.key for entry in words}
    if "help" in own:
        show_settings(settings_type, kinds, prog, positional)
        raise SystemExit(0)
    with best_effort(sys.stderr):
        for line in _given_again(words, kinds):
            print(f"{prog}: {line}", file=sys.stderr)
    files = [Path(entry.value) for entry in words if entry.key == "config"]
    given = [entry for path in files for entry in _read_file(path, settings_type, problems)]
    given += [entry for entry in words if entry.key in kinds]
    settings = _build(settings_type, _with_stored(settings_type, given, problems), problems, prog)
    if "print_config" in own:
        print(settings_to_yaml(settings, comments=True), end="")
        raise SystemExit(0)
    check_outputs(settings)
    return settings


def read_settings(settings_type: type[Settings], path: Path, prog: str) -> Settings:
    """Read settings from a YAML file alone, such as a run's `config.yaml`; raises ConfigError as above."""
    problems: list[str] = []
    given = _read_file(path, settings_type, problems)
    return _build(settings_type, given, problems, prog)


def read_stored(
    settings_type: type[Settings], path: Path, prog: str, unread: Collection[str] = (), remedy: str = ""
) -> Settings:
    """Read settings that a folder holds, which may be somebody else's.

    Args:
        settings_type: of the verb that wrote them.
        path: of the YAML file in its folder.
        prog: what a user typed to have them written.
        unread: names of settings that the caller puts others in the place of.
        remedy: what a user can do where a path in them is refused.

    Raises:
        ConfigError: as above; or they are not the user's own, and one names a place outside of the folder.
    """
    problems: list[str] = []
    given = _stored(path, settings_type, unread, problems, remedy)
    return _build(settings_type, given, problems, prog)


def is_config_of(settings_type: type[Any], path: Path) -> bool:
    """Whether a file holds settings of this class, as a verb that began there wrote them."""
    try:
        read_settings(settings_type, path, "prge")
    except ConfigError:
        return False
    return True


def path_of(value: object, where: str) -> Path:
    """A path that a program gives; raises ConfigError where it is none."""
    try:
        return Path(converted(value, Path))
    except MISFITS:
        raise ConfigError(
            "a setting can't be used:",
            [f"{where} must be a path, not {shown(value)}"],
            code="settings-unusable",
        ) from None


def settings_of(
    settings_type: type[Settings], fields: Mapping[str, Any], where: str, prog: str = "prge"
) -> Settings:
    """Settings from a mapping that came from elsewhere, such as a message; raises as `parse_settings`."""
    problems: list[str] = []
    given = _given_by(fields, where, _kinds(settings_type), problems)
    settings = _build(settings_type, _with_stored(settings_type, given, problems), problems, prog)
    check_outputs(settings)
    return settings


def part_of(kind: type[Settings], settings: Any) -> Settings:
    """Settings of a class whose fields are all among those of other settings."""
    own = {item.name: getattr(settings, item.name) for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**own)


def with_whole_paths(
    settings: Settings,
    leave: Iterable[str] = (),
    texts: Iterable[str] = ("task",),
    places: Iterable[str] = (),
) -> Settings:
    """The same settings with absolute paths, for whoever reads them in another folder.

    Args:
        settings: of any verb.
        leave: names of paths that stay as they are.
        texts: names of texts that are paths where there is such a file.
        places: names of texts that are paths where there is such a file or folder.
    """
    paths: dict[str, Any] = {}
    for item in dataclasses.fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, item.name)
        if isinstance(value, Path) and item.name not in leave:
            paths[item.name] = value.resolve()
        elif isinstance(value, tuple) and value and all(isinstance(each, Path) for each in value):
            paths[item.name] = tuple(each.resolve() for each in value)
    for name in (*texts, *places):
        path = Path(getattr(settings, name, None) or "")
        if path.is_file() or (name in places and path.name and path.exists()):
            paths[name] = str(path.resolve())
    return dataclasses.replace(settings, **paths)  # type: ignore[type-var]


def settings_to_yaml(settings: Any, comments: bool = False) -> str:
    """All settings as YAML that `--config` reads back as equal; `comments` adds each field's help."""
    values = {item.name: getattr(settings, item.name) for item in dataclasses.fields(settings)}
    return yaml_of(values, field_help(type(settings)) if comments else {})


def yaml_of(values: Mapping[str, Any], comments: Mapping[str, str] = MappingProxyType({})) -> str:
    """Settings by their names as YAML, each below its comment."""
    import yaml

    text = ""
    for name, value in values.items():
        # By way of JSON, so that paths become texts and tuples lists.
        plain = json.loads(json.dumps(value, default=str))
        text += "".join(f"# {line}\n" for line in comments.get(name, "").splitlines())
        text += yaml.safe_dump({name: plain}, default_flow_style=False, sort_keys=False, width=110)
    return text


class _Given(NamedTuple):
    """One setting as somebody wrote it: `where` is what a message calls it."""

    where: str
    key: str
    value: Any


class _Loose(NamedTuple):
    """A word of a command line that no flag takes.

    `quoted` is the flag before it with all words up to the next flag as one, where that flag takes one.
    """

    word: str
    quoted: str = ""

    def problem(self) -> str:
        """What is wrong with it where no setting is left that is given without a flag."""
        hint = f" Quote a value with spaces: {shortened(self.quoted, LONGEST_VALUE)}" if self.quoted else ""
        return f"{shown(self.word)} stands alone: which flag does it belong to?{hint}"


def _kinds(settings_type: type[Any]) -> dict[str, Any]:
    """Type of each field, in order."""
    hints = get_type_hints(settings_type)
    return {item.name: hints[item.name] for item in dataclasses.fields(settings_type)}


def _read_words(
    argv: Sequence[str], kinds: Mapping[str, Any], positional: Sequence[str], problems: list[str]
) -> list[_Given]:
    """Take a command line apart."""
    given: list[_Given] = []
    loose: list[_Loose] = []
    words, before = list(argv), None
    while words:
        word = words.pop(0)
        if word == "--":
            loose += [_Loose(each) for each in words]
            break
        if not _is_flag(word):
            following = itertools.takewhile(lambda word: not _is_flag(word), words)
            loose.append(_Loose(word, _quoted(before, [word, *following], kinds)))
            before = None
            continue
        before = None
        name, equals, value = ("--help" if word == "-h" else word).partition("=")
        key = name.lstrip("-").replace("-", "_")
        is_negated = key not in kinds and kinds.get(key.removeprefix("no_")) is bool
        key = key.removeprefix("no_") if is_negated else key
        meant = key
        if key not in kinds:
            meant, hint = setting_meant(key, kinds, flag)
            problems.append(f"{shortened(name, 100)} is no flag of this verb{hint}")
        kind = kinds.get(meant)
        values = [value] if equals else list(itertools.takewhile(lambda word: not _is_flag(word), words))
        if kind is None:
            used = int(not positional)  # its value is not a second problem
        elif kind is bool:
            used = int(not is_negated and (equals == "=" or "".join(values[:1]).lower() in _SWITCH))
        else:
            used = len(values) if is_list(kind) else 1
        if not equals:
            del words[: min(used, len(values))]
        if key not in kinds:
            given += [_Given(name, meant, _MISNAMED)] if meant and meant not in _OWN_KINDS else []
        elif kind is bool:
            given.append(
                _Given(name, key, _SWITCH.get(values[0].lower(), values[0]) if used else not is_negated)
            )
        elif is_list(kind):
            earlier = [entry.value for entry in given if entry.key == key and isinstance(entry.value, list)]
            given.append(_Given(name, key, [*(earlier[-1] if earlier else ()), *values]))
            if not values:
                problems.append(f"{name} needs a value: {described(kind)}")
        elif values:
            given.append(before := _Given(name, key, values[0]))
        else:
            problems.append(f"{name} needs a value: {described(kind)}")
    by_flag = {entry.key for entry in given}
    for key in positional:
        if loose and key not in by_flag:
            taken = loose[:] if is_list(kinds[key]) else loose[:1]
            texts = [each.word for each in taken]
            given.append(_Given(key.upper(), key, texts if is_list(kinds[key]) else texts[0]))
            del loose[: len(taken)]
    problems += [each.problem() for each in loose]
    return given


def _quoted(before: _Given | None, words: Sequence[str], kinds: Mapping[str, Any]) -> str:
    """A flag with its value and the words after it as one value; empty where its type has no such values."""
    if before is None:
        return ""
    value = " ".join([before.value, *words])
    with suppress(*MISFITS):
        converted(value, kinds[before.key])
        return shlex.join([before.where, value])
    return ""


def _given_again(given: Sequence[_Given], kinds: Mapping[str, Any]) -> list[str]:
    """A line for every setting of a command line that takes one value and is given different ones."""
    values: dict[str, list[Any]] = {}
    for entry in given:
        if entry.key in kinds and entry.value is not _MISNAMED and not is_list(kinds[entry.key]):
            values.setdefault(entry.key, []).append(entry.value)
    return [
        f"{flag(key)} is given {len(each)} times, the last one counts: {', '.join(map(shown, each))}"
        for key, each in values.items()
        if any(other != each[0] for other in each)
    ]


def _read_file(path: Path, settings_type: type[Any], problems: list[str]) -> list[_Given]:
    content = _read_bytes(path, problems)
    return [] if content is None else _given_in(content, path, settings_type, problems)


def _read_bytes(path: Path, problems: list[str]) -> bytes | None:
    try:
        return read_document(path, MOST_YAML_BYTES)
    except (OSError, DocumentError) as error:
        problems.append(f"{path} can't be read: {getattr(error, 'strerror', None) or error}")
        return None


def _stored(
    path: Path, settings_type: type[Any], named_again: Collection[str], problems: list[str], remedy: str = ""
) -> list[_Given]:
    """Settings of a file in a folder that may be somebody else's; see `prge.files.own_settings`.

    Args:
        path: of the file.
        settings_type: of the settings.
        named_again: settings that the user gives too, or that nobody reads.
        problems: of the file, which this adds to.
        remedy: instead of the flags to give again.

    Raises:
        ConfigError: they are not the user's own, and others name places outside of the folder.
        RunError: the folder holds a link that leads out of it.
    """
    check_links(path.parent)
    content = _read_bytes(path, problems)
    given = [] if content is None else _given_in(content, path, settings_type, problems)
    if content is None or is_own(content, path.name):
        return given
    kinds, outputs = _kinds(settings_type), outputs_of(settings_type)
    refused = {
        entry.key: texts
        for entry in given
        if entry.key not in named_again and (takes_paths(kinds[entry.key]) or entry.key in PLACES)
        if (texts := [each for each in _words_of(entry.value) if isinstance(each, str) and each != "null"])
        and any(leads_out(path.parent, each, entry.key in outputs) for each in texts)
    }
    if refused:
        again = shlex.join(word for key, texts in refused.items() for word in (flag(key), *texts))
        raise ConfigError(
            f"{path} names places outside of its folder, and isn't as your prge wrote it:",
            [f"{key}: {', '.join(map(shown, texts))}" for key, texts in refused.items()],
            remedy=remedy or f"where that is what you want, give them again: {again}",
            code="path-outside",
        )
    return given


def _words_of(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _given_in(document: bytes, path: Path, settings_type: type[Any], problems: list[str]) -> list[_Given]:
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
    return _given_by(current(content), str(path), _kinds(settings_type), problems)


def _given_by(
    content: Mapping[Any, Any], where: str, kinds: Mapping[str, Any], problems: list[str]
) -> list[_Given]:
    given = []
    for key, value in content.items():
        if key in kinds:
            given.append(_Given(f"{where}: {key}", key, plain_value(value)))
        else:
            meant, hint = setting_meant(str(key).replace("-", "_"), kinds, str)
            problems.append(f"{where}: {shown(key)} is no setting of this verb{hint}")
            given += [_Given(where, meant, _MISNAMED)] if meant else []
    return given


def _with_stored(settings_type: type[Any], given: Sequence[_Given], problems: list[str]) -> Sequence[_Given]:
    """What is given, after the settings of the preset and the resumed folder that it names."""
    named = {entry.key: str(entry.value) for entry in given if isinstance(entry.value, (str, Path))}
    if hasattr(settings_type, "PRESETS") and "preset" in named:
        known = {path.stem: path for path in sorted(settings_type.PRESETS.glob("*.yaml"))}
        if named["preset"] in known:
            given = [*_read_file(known[named["preset"]], settings_type, problems), *given]
        else:
            near = nearest(named["preset"], known, 0.6)
            hint = f"; did you mean {near}?" if near else f", must be one of {', '.join(known)}"
            problems.append(f"--preset is {shown(named['preset'])}{hint}")
    if hasattr(settings_type, "KEPT") and "folder" in named:
        kept = Path(named["folder"]) / settings_type.KEPT
        again = {entry.key for entry in given}
        given = [*(_stored(kept, settings_type, again, problems) if kept.is_file() else ()), *given]
    if hasattr(settings_type, "STORED") and "resume" in named:
        folder = Path(named["resume"])
        if not (folder / settings_type.STORED).is_file():
            raise RunError(
                f"{folder} is no run: it has no {settings_type.STORED}",
                remedy="give the folder of `--out`",
                code="not-a-run",
            )
        again = {"out", "resume", *(entry.key for entry in given)}
        stored = _stored(folder / settings_type.STORED, settings_type, again, problems)
        given = [*stored, *given, _Given("--resume", "out", str(folder))]
    return given


def _build(
    settings_type: type[Settings], given: Collection[_Given], problems: list[str], prog: str
) -> Settings:
    """Check every value against its field's type, tell all problems, make the object."""
    kinds = _kinds(settings_type)
    values: dict[str, Any] = {}
    for entry in given:
        values.setdefault(entry.key, None)
        if entry.value is _MISNAMED:
            continue
        if url := _url_in(entry, kinds[entry.key]):
            problems.append(f"{entry.where} is a URL, {shown(url)}: {_instead_of(url, entry.key)}")
            continue
        try:
            values[entry.key] = converted(entry.value, kinds[entry.key])
        except MISFITS:
            problems.append(f"{entry.where} must be {described(kinds[entry.key])}, not {shown(entry.value)}")
    # A list takes all words up to the next flag, one too that was meant for a setting without a flag.
    taken = "".join(
        f"; {entry.where} took {shown(entry.value[-1])}, too"
        for entry in given
        if entry.where == flag(entry.key) and isinstance(entry.value, list) and len(entry.value) > 1
        if os.path.exists(str(entry.value[-1]))  # of a word that no file can be called it is false
    )
    problems += [
        f"{flag(item.name)} is missing: {described(kinds[item.name])}{taken}"
        for item in dataclasses.fields(settings_type)  # type: ignore[arg-type]
        if is_required(item) and item.name not in values
    ]
    chosen = {entry.key for entry in given if entry.value not in (None, "null", [])}
    for names in getattr(settings_type, "ONE_OF", ()):
        given_of = [flag(name) for name in names if name in chosen]
        if not given_of:
            problems.append(f"{' or '.join(map(flag, names))} is missing")
        elif len(given_of) > 1:
            problems.append(f"{' and '.join(given_of)}: give one of them")
    if not problems:
        settings = settings_type(**values)
        problems = bound_problems(settings)
        if not problems:
            return settings
    count = "a setting" if len(problems) == 1 else f"{len(problems)} settings"
    raise ConfigError(
        f"{count} can't be used:",
        problems,
        remedy=f"`{prog} --help` lists all settings",
        code="settings-unusable",
    )


def _url_in(entry: _Given, kind: Any) -> str:
    """The URL that stands where a path or a name of the hub is wanted; empty where there is none."""
    words = entry.value if isinstance(entry.value, list) else [entry.value]
    urls = [word for word in words if isinstance(word, str) and _URL.match(word)]
    return urls[0] if urls and (entry.key in PLACES or takes_paths(kind)) else ""


def _instead_of(url: str, key: str) -> str:
    """What to give in the place of a URL."""
    if key in _OF_HUB and (page := _HUB_PAGE.match(url)):
        return f"give the hub's name, {page[1]}"
    if url.lower().startswith("file://"):
        return f"give the path, {url[7:]}"
    return "nothing is read from one; download it, for example with curl -LO, and give the file"


def _is_flag(word: str) -> bool:
    """Whether a word is a flag rather than a value: negative numbers and a lone dash are values."""
    return word.startswith("-") and len(word) > 1 and not (word[1].isdigit() or word[1] == ".")
