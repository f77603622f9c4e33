"""Input settings: the type of a setting determines what the verb reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prge.cli.inputs import (
    AdapterInput,
    BundleInput,
    DevRows,
    Input,
    InputFile,
    NamedAdapter,
    NamedOrFile,
    TextInput,
    TrainRows,
    input_settings,
)
from prge.cli.outputs import OutputFolder
from prge.cli.settings import parse_settings


@dataclass(frozen=True)
class _Settings:
    """Read something."""

    bundle: BundleInput
    """A bundle."""
    train: TrainRows
    """Rows."""
    out: OutputFolder
    """A folder."""
    dev: DevRows | None = None
    """More rows."""
    adapter: AdapterInput | None = None
    """An adapter."""
    adapters: tuple[NamedAdapter, ...] = ()
    """Some more."""
    task: NamedOrFile | None = None
    """A task."""
    policy: InputFile | None = None
    """A file."""
    prompt: tuple[TextInput, ...] = ()
    """Texts."""
    steps: int = 3
    """A number."""


def test_a_type_names_its_input() -> None:
    assert input_settings(_Settings) == {
        "bundle": Input.BUNDLE,
        "train": Input.TRAIN_ROWS,
        "dev": Input.DEV_ROWS,
        "adapter": Input.ADAPTER,
        "adapters": Input.ADAPTER,
        "task": Input.FILE,
        "policy": Input.FILE,
        "prompt": Input.TEXT,
    }


def test_an_input_is_given_as_a_path_or_a_text_is(tmp_path: Path) -> None:
    arguments = "--bundle b --train a.jsonl c.jsonl --dev d --adapter run --adapters n=p --task t"
    arguments += f" --out {tmp_path / 'x'}"
    settings = parse_settings(
        _Settings, [*arguments.split(), "--policy", "p.yaml", "--prompt", "-"], "prge test"
    )
    assert settings.train == (Path("a.jsonl"), Path("c.jsonl")) and settings.dev == Path("d")
    assert (settings.adapters, settings.task, settings.prompt) == (("n=p",), "t", ("-",))
