"""Combined settings of a verb that runs another verb."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from prge.cli.combined_settings import combine_settings, shared_values
from prge.cli.outputs import Output, OutputFile, output_settings
from prge.cli.settings import parse_settings
from prge.errors import ConfigError
from tests.refusals import raises


@dataclass(frozen=True)
class _Verb:
    """Do it here."""

    ONE_OF: ClassVar = (("prompt", "data"),)
    STORED: ClassVar = "config.yaml"

    bundle: Path
    """A bundle."""
    prompt: str | None = None
    """A text."""
    data: Path | None = None
    """Rows."""
    stop: list[str] = field(default_factory=list)
    """Words."""
    folder: Path | None = None
    """A folder here."""
    json: OutputFile | None = None
    """A file."""
    port: int = 1
    """A port."""

    def __post_init__(self) -> None:
        assert self.folder is None


@dataclass(frozen=True, kw_only=True)
class _Flags:
    """There."""

    folder: str = "/there"
    """The folder there."""
    wait: bool = False
    """Wait."""


BOTH = combine_settings("Do it there.", _Flags, _Verb, without=["port"])


def parsed(*arguments: str) -> Any:
    return parse_settings(BOTH, arguments, "prge there")


def test_fields_of_both_parts_share_a_command_line() -> None:
    settings = parsed("--bundle", "b", "--prompt", "x", "--wait", "--stop", "a", "c")
    assert shared_values(_Flags, settings) == {"folder": "/there", "wait": True}
    own = shared_values(_Verb, settings)
    assert own.pop("folder") == "/there"
    assert _Verb(**own) == _Verb(Path("b"), prompt="x", stop=["a", "c"])


def test_types_and_checks_of_the_parts_apply() -> None:
    assert output_settings(BOTH) == {"json": Output.FILE}
    with pytest.raises(ConfigError) as caught:
        parsed("--port", "2")
    message = str(caught.value)
    assert "--port is not a flag of this verb" in message and "--bundle is missing: a path" in message
    with raises(ConfigError, "settings-unusable", containing="--prompt"):
        parsed("--bundle", "b")


def test_help_shows_the_fields_in_the_groups_of_their_classes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    message = capsys.readouterr().out
    assert message.startswith("usage: prge there [flags]\n\nDo it there.\n\nDo it here:\n  --bundle PATH")
    assert "\nThere:\n  --folder TEXT               The folder there. (default: /there)\n  --wait" in message
    assert "A folder here" not in message and "--port" not in message
