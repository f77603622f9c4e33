"""Settings of a verb that runs another verb: the fields of both on one command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from prge.errors import ConfigError
from prge.verbs.combining import combined, values_of
from prge.verbs.outputs import Output, OutputFile, outputs_of
from prge.verbs.settings import parse_settings
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


BOTH = combined("Do it there.", _Flags, _Verb, without=["port"])


def parsed(*words: str) -> Any:
    return parse_settings(BOTH, words, "prge there")


def test_fields_of_both_are_given_together() -> None:
    given = parsed("--bundle", "b", "--prompt", "x", "--wait", "--stop", "a", "c")
    assert values_of(_Flags, given) == {"folder": "/there", "wait": True}
    own = values_of(_Verb, given)
    assert own.pop("folder") == "/there"
    assert _Verb(**own) == _Verb(Path("b"), prompt="x", stop=["a", "c"])


def test_what_types_and_classes_say_of_fields_still_holds() -> None:
    assert outputs_of(BOTH) == {"json": Output.FILE}
    with pytest.raises(ConfigError) as caught:
        parsed("--port", "2")
    told = str(caught.value)
    assert "--port is no flag of this verb" in told and "--bundle is missing: a path" in told
    with raises(ConfigError, "settings-unusable", saying="--prompt"):
        parsed("--bundle", "b")


def test_help_shows_the_fields_in_the_groups_of_their_classes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    told = capsys.readouterr().out
    assert told.startswith("usage: prge there [flags]\n\nDo it there.\n\nDo it here:\n  --bundle PATH")
    assert "\nThere:\n  --folder TEXT               The folder there. (default: /there)\n  --wait" in told
    assert "A folder here" not in told and "--port" not in told
