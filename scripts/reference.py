"""Generate the flags of all verbs as Markdown from their settings classes.

    python scripts/reference.py

prints them. MkDocs loads this file as a hook (docs/mkdocs.yml), which inserts them into
docs/reference/verbs.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from html import escape
from typing import Any
from unittest.mock import patch

from prge.cli.bounds import flag
from prge.cli.field_types import metavar
from prge.cli.help import field_help, is_required
from prge.cli.main import main

PAGE, MARK = "reference/verbs.md", "<!-- flags -->"


@dataclass(frozen=True)
class VerbHelp:
    """The content of `prge VERB --help`.

    Attributes:
        prog: the command before its flags, such as `prge fleet join`.
        settings: its settings class.
        types: type of each field, by name.
        positional: fields that may be given without their flag.
    """

    prog: str
    settings: type[Any]
    types: Mapping[str, Any]
    positional: Sequence[str]

    @property
    def flags(self) -> set[str]:
        """All flags, including negated ones."""
        names = {flag(name) for name in self.types}
        return names | {flag(f"no_{name}") for name, field_type in self.types.items() if field_type is bool}


def verb_helps(verbs: Sequence[str] = ()) -> Iterator[VerbHelp]:
    """Yield the help of every verb and subverb in the order of `prge --help`."""
    helps: list[VerbHelp] = []
    names: list[str] = []

    def show_settings(
        settings: type[Any], types: Mapping[str, Any], prog: str, positional: Sequence[str]
    ) -> None:
        helps.append(VerbHelp(prog, settings, types, positional))

    def show_verbs(prog: str, verbs: Mapping[str, str], about: str, groups: Mapping[str, str]) -> None:
        names.extend(verbs)

    with (
        patch("prge.cli.settings.print_settings_help", show_settings),
        patch("prge.cli.subcommands.print_verbs_help", show_verbs),
    ):
        code = main([*verbs, "--help"])
    if code:
        raise RuntimeError(f"prge {' '.join(verbs)} --help ended with {code}")
    yield from helps
    for name in names:
        yield from verb_helps([*verbs, name])


def flags_page() -> str:
    """Return the flags of all verbs as Markdown: a heading for each verb, a definition for each flag."""
    helps = list(verb_helps())
    documented = {each.settings: each.prog for each in helps}
    return "\n\n".join("\n\n".join(_verb(each, documented)) for each in helps)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert the flags into their page; MkDocs calls this hook with the text of every page."""
    return markdown.replace(MARK, flags_page()) if page.file.src_uri == PAGE else markdown


def _verb(help_of: VerbHelp, documented: Mapping[type[Any], str]) -> Iterator[str]:
    """Yield the paragraphs about one verb."""
    verbs = [name.upper() for name in help_of.positional]
    yield f"### {help_of.prog}"
    yield f"`{' '.join([help_of.prog, *verbs, '[flags]'])}`"
    yield _text(_first_paragraph(help_of.settings))
    yield f"Example: `{f'{help_of.prog} {help_of.settings.EXAMPLE}'.rstrip()}`"
    # Flags of a verb that runs another verb elsewhere are documented with the latter.
    others = [part for part in getattr(help_of.settings, "PARTS", ()) if part in documented]
    shared = {item.name for part in others for item in fields(part)}
    texts = field_help(help_of.settings)
    for section, items in _sections(help_of.settings, shared):
        if section:
            yield f"**{_text(section)}**"
        for item in items:
            text = " ".join(filter(None, [_text(" ".join(texts.get(item.name, "").split())), _note(item)]))
            yield f"`{_form(item, help_of.types[item.name])}`\n:   {text or 'See above.'}"
    for part in others:
        prog = documented[part]
        anchor = prog.replace(" ", "-")
        yield f"And the flags of [`{prog}`](#{anchor}), without those that the device decides."


def _sections(settings: type[Any], without: Collection[str]) -> list[tuple[str, list[Field[Any]]]]:
    """Group fields by the base class that defines them, under its first paragraph; required ones first."""
    headings: dict[str, str] = {}
    for part in getattr(settings, "PARTS", (settings,)):
        for base in reversed(part.__mro__[:-1]):
            heading = "" if base is settings else _first_paragraph(base).rstrip(".")
            headings = dict.fromkeys(inspect.get_annotations(base), heading) | headings
    sections: dict[str, list[Field[Any]]] = {}
    for item in fields(settings):
        if item.name not in without:
            sections.setdefault(headings.get(item.name, ""), []).append(item)
    return sorted(sections.items(), key=lambda section: not any(map(is_required, section[1])))


def _first_paragraph(settings: type[Any]) -> str:
    return " ".join(inspect.cleandoc(settings.__doc__ or "").partition("\n\n")[0].split())


def _form(item: Field[Any], field_type: Any) -> str:
    """Return a flag with a placeholder for its value, such as `--rank N`."""
    if field_type is bool:
        return f"{flag(item.name)}, {flag(f'no_{item.name}')}" if item.default else flag(item.name)
    return f"{flag(item.name)} {metavar(field_type)}"


def _note(item: Field[Any]) -> str:
    """Return a note that a flag is required, or its default value."""
    if is_required(item):
        return "*Required.*"
    default = item.default if item.default_factory is MISSING else item.default_factory()
    if isinstance(default, list | tuple):
        default = " ".join(map(str, default))
    if default in ("", {}) or default is None or default is False:
        return ""
    return f"Default: `{'true' if default is True else default}`."


def _text(text: str) -> str:
    """Escape help text for Markdown: only text in backticks is code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_\[\]])", r"\\\1", escape(part, quote=False))
        for part in parts
    )


if __name__ == "__main__":
    print(flags_page())
