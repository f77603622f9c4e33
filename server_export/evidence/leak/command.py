"""`prge leak`: try to reconstruct training rows from the reports that a device sends.

The adversary knows everything but the rows.

rows -> gradients -> report -> attack -> guess -> score, compared with the score of a guess without the report
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from prge.cli.settings import parse_settings, settings_to_yaml
from prge.formats.run_folder import environment, write_json
from prge.system.atomic import write_output
from server_export.evidence.leak.settings import LeakSettings

_WARNING = (
    "A row that these attacks do not find is not safe: --guesses limits them, and others may do better."
)


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge leak --help`."""
    settings = parse_settings(LeakSettings, argv, "prge leak")
    result = leak(settings, lambda line: print(line, flush=True))
    result = {"command": f"prge leak {shlex.join(argv)}", **result}
    if settings.json is not None:
        write_json(settings.json, result)
    if settings.out is not None:
        from server_export.evidence.leak.figure import draw

        write_output(settings.out, draw(result).encode())
        print(settings.out)
    print(_WARNING)
    return 0


def leak(settings: LeakSettings, log: Callable[[str], None]) -> dict[str, Any]:
    """Run all attacks of the settings and return the content of `--json` without the command.

    Raises:
        PrgeError: model, bundle, rows or settings can't be used.
    """
    from server_export.evidence.leak.study import run_study
    from server_export.evidence.leak.target import open_target
    from server_export.quiet_libraries import quiet_libraries

    quiet_libraries()
    result = run_study(open_target(settings), log)
    return {**result, "settings": yaml.safe_load(settings_to_yaml(settings)), "meta": environment()}
