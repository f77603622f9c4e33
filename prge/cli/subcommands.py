"""Verbs of a verb, such as `prge android push`: which one is meant, and the list of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prge.cli.help import print_verbs_help
from prge.cli.hints import verb_error


@dataclass(frozen=True)
class Action:
    """What a verb does, and what does it."""

    help: str
    main: Callable[[list[str]], int]


def run_action(
    argv: Sequence[str],
    actions: Mapping[str, Action],
    prog: str,
    about: str,
    check: Callable[[str], None] = lambda name: None,
) -> int:
    """Run the action that the first word names; without a word, or with --help, print them all.

    Args:
        argv: the words after `prog`.
        actions: by name.
        prog: what the user typed before them, such as `prge android`.
        about: a sentence for the list.
        check: refuses an action before it runs.

    Raises:
        PrgeError: there is no such action.
    """
    words = list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print_verbs_help(prog, {name: action.help for name, action in actions.items()}, about)
        return 0
    if words[0] not in actions:
        raise verb_error(words[0], actions, prog)
    check(words[0])
    return actions[words[0]].main(words[1:])
