"""Subcommands of a verb, such as `prge android push`, and their list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prge.cli.help import print_verbs_help
from prge.cli.hints import verb_error


@dataclass(frozen=True)
class Action:
    """A subcommand: its help, the function that runs it, and the heading of its group in the list or ""."""

    help: str
    main: Callable[[list[str]], int]
    group: str = ""


def run_action(
    argv: Sequence[str],
    actions: Mapping[str, Action],
    prog: str,
    about: str,
    check: Callable[[str], None] = lambda name: None,
) -> int:
    """Run the subcommand that the first word names and return its exit code; list all if there is none.

    Args:
        argv: The words after `prog`.
        actions: Subcommands by name.
        prog: The words before them, such as `prge android`.
        about: A text above the list.
        check: Called with the name before the subcommand runs; may raise.

    Raises:
        PrgeError: There is no such subcommand.
    """
    words = list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        helps = {name: action.help for name, action in actions.items()}
        print_verbs_help(prog, helps, about, {name: action.group for name, action in actions.items()})
        return 0
    if words[0] not in actions:
        raise verb_error(words[0], actions, prog)
    check(words[0])
    return actions[words[0]].main(words[1:])
