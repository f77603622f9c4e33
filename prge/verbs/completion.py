"""Tab completion, which is help of another form: argcomplete asks for the flags that would be listed.

A shell that has evaluated what `register-python-argcomplete prge` prints starts prge with its line in the
environment.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

_ASKED = "_ARGCOMPLETE"


def words_of_help(argv: Sequence[str]) -> list[str]:
    """The words of a command line; where a shell asks for completion, those of its line, and `--help`."""
    if _ASKED not in os.environ:
        return list(argv)
    from argcomplete.lexers import split_line

    line = os.environ["COMP_LINE"]
    *_, words, _ = split_line(line, int(os.environ["COMP_POINT"]))
    return [*(word for word in words[1:] if word != "--"), "--help"]


def show_help(parser: argparse.ArgumentParser, text: str = "") -> None:
    """Print help, the parser's own without a text; or complete a word by the parser, and exit."""
    if _ASKED in os.environ:
        import argcomplete

        # Words of the line that come before the parser's.
        os.environ[_ASKED] = str(len(parser.prog.split()))
        argcomplete.autocomplete(parser, always_complete_options=False)
    print(text or parser.format_help(), end="")


def show_verbs(prog: str, helps: Mapping[str, str], about: str) -> None:
    """The same for verbs, each with its help; `about` is a sentence for the list."""
    parser = argparse.ArgumentParser(prog, add_help=False)
    parser.add_argument("verb", choices=helps)
    width = max(map(len, helps))
    lines = [f"  {name:<{width}}  {text}\n" for name, text in helps.items()]
    end = f"\n`{prog} <verb> --help` shows a verb's flags.\n"
    show_help(parser, "".join([f"usage: {prog} <verb> [flags]\n\n{about}\n\n", *lines, end]))
