"""Names of the previous version are accepted with a warning: flags, YAML keys, Python's keywords, roles."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from device_runner.fleet.agreement import Agreement, Plan
from device_runner.session.settings import RunSettings
from prge.cli.hints import current_name
from prge.cli.settings import parse_settings, read_settings, read_stored, settings_from_mapping
from prge.errors import ConfigError
from prge.formats.signatures import ROLES
from prge.formats.stored_settings import write_settings
from server_export.evidence.compare.settings import CompareSettings
from server_export.settings import EstimateConfig, ExportConfig
from server_export.tune.settings import TuneSettings
from tests.refusals import raises

STILL = "; this version still accepts the old name"
REQUIRED = {"bundle": "b", "train": "t.jsonl", "out": "o"}
REQUIRED_ARGUMENTS = "--bundle b --train t.jsonl --out o".split()
RUN = RunSettings(Path("b"), Path("t.jsonl"), Path("o"))


def parse_run(*arguments: str) -> RunSettings:
    return parse_settings(RunSettings, [*REQUIRED_ARGUMENTS, *arguments], "prge run")


@pytest.mark.parametrize(
    ("arguments", "new_flag", "changes"),
    [
        (["--clip", "0.5"], "--max-grad-norm", {"max_grad_norm": 0.5}),
        (["--clip_examples=0.5"], "--max-example-grad-norm", {"max_example_grad_norm": 0.5}),
        (["--warmup", "3"], "--warmup-steps", {"warmup_steps": 3}),
        (["--evaluate-every", "3"], "--eval-steps", {"eval_steps": 3}),
        (["--evaluate-at", "3", "4"], "--eval-at", {"eval_at": [3, 4]}),
        (["--checkpoint-every=3"], "--save-steps", {"save_steps": 3}),
        (["--schedule", "linear"], "--lr-scheduler-type", {"lr_scheduler_type": "linear"}),
        (["--beta2", "0.9"], "--adam-beta2", {"adam_beta2": 0.9}),
        (["--lora-plus", "4"], "--loraplus-lr-ratio", {"loraplus_lr_ratio": 4.0}),
    ],
)
def test_an_old_flag_sets_the_new_one_with_a_warning(
    arguments: list[str], new_flag: str, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse_run(*arguments) == replace(RUN, **changes)
    flag = arguments[0].partition("=")[0]
    assert capsys.readouterr().err == f"prge run: {flag} is now {new_flag}{STILL}\n"


def test_current_names_have_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_run("--max-grad-norm", "0.5") == replace(RUN, max_grad_norm=0.5)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("word", "value"), [("--rs-lora", True), ("--no-rs-lora", False)])
def test_an_old_switch_sets_the_new_setting(
    word: str, value: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "m", "--out", "o", word, "--alpha", "4"]
    settings = parse_settings(ExportConfig, arguments, "prge export")
    assert (settings.use_rslora, settings.lora_alpha) == (value, 4.0)
    new_word = word.replace("rs-lora", "use-rslora")
    assert capsys.readouterr().err.splitlines() == [
        f"prge export: {word} is now {new_word}{STILL}",
        f"prge export: --alpha is now --lora-alpha{STILL}",
    ]


def test_both_names_are_refused() -> None:
    with raises(
        ConfigError, "settings-unusable", containing="--clip is now --max-grad-norm: give one of them"
    ):
        parse_run("--clip", "1", "--max-grad-norm", "1")
    with raises(ConfigError, "settings-unusable", containing="clip is now max_grad_norm: give one of them"):
        settings_from_mapping(RunSettings, {**REQUIRED, "clip": 1.0, "max_grad_norm": 1.0}, "run()")


def test_a_flag_overrides_a_file_with_the_old_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("clip: 0.5\nwarmup: 3\n", encoding="utf-8")
    settings = parse_run("--config", str(path), "--max-grad-norm", "2")
    assert settings == replace(RUN, max_grad_norm=2.0, warmup_steps=3)
    assert capsys.readouterr().err.splitlines() == [
        f"prge run: {path}: clip is now max_grad_norm{STILL}",
        f"prge run: {path}: warmup is now warmup_steps{STILL}",
    ]
    path.write_text("clip: 0.5\nmax_grad_norm: 0.5\n", encoding="utf-8")
    with raises(ConfigError, "settings-unusable", containing=f"{path}: clip is now max_grad_norm"):
        parse_run("--config", str(path))


def test_old_keywords_are_accepted_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_from_mapping(RunSettings, {**REQUIRED, "clip": 0.5}, "run()", "prge run")
    assert settings == replace(RUN, max_grad_norm=0.5)
    assert capsys.readouterr().err == f"prge run: run(): clip is now max_grad_norm{STILL}\n"


@pytest.mark.parametrize("settings_type", [ExportConfig, EstimateConfig, TuneSettings])
def test_old_roles_are_accepted(settings_type: type[Any], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "m", "--out", "o"] + (["--data", "d"] if settings_type is TuneSettings else [])
    arguments += ["--roles", "stack", "prefill", "--roles", "decode", "tangent", "back"]
    settings = parse_settings(settings_type, arguments, "prge export")
    assert settings.roles == ["forward", "prefill", "decode", "jvp", "backward"]
    assert set(settings.roles) == set(ROLES)
    assert capsys.readouterr().err.splitlines() == [
        f"prge export: --roles {old} is now {new}{STILL}"
        for old, new in {"stack": "forward", "tangent": "jvp", "back": "backward"}.items()
    ]
    of_call = {"model": "m", "out": "o", "data": "d", "roles": ("forward", "back")}
    of_call = {name: value for name, value in of_call.items() if name in settings_type.__dataclass_fields__}
    assert settings_from_mapping(settings_type, of_call, "export()").roles == ["forward", "backward"]
    assert "export(): roles back is now backward" in capsys.readouterr().err


@dataclass(frozen=True)
class Resumable:
    """Settings that are stored in a folder."""

    STORED: ClassVar = "config.yaml"

    out: Path
    resume: Path | None = None
    max_grad_norm: float = 0.0
    roles: list[str] = field(default_factory=list)


def test_stored_settings_are_read_without_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    write_settings(path, "out: o\nclip: 0.5\nroles: [stack]\n")
    expected = Resumable(Path("o"), max_grad_norm=0.5, roles=["forward"])
    assert read_settings(Resumable, path, "prge") == expected
    assert read_stored(Resumable, path, "prge") == expected
    arguments = ["--resume", str(tmp_path)]
    assert parse_settings(Resumable, arguments, "prge") == replace(expected, out=tmp_path, resume=tmp_path)
    assert capsys.readouterr().err == ""
    settings = parse_settings(Resumable, [*arguments, "--clip", "2"], "prge")
    assert settings.max_grad_norm == 2.0
    assert "--clip is now --max-grad-norm" in capsys.readouterr().err


def test_a_fleet_has_only_current_names() -> None:
    """An agreement is identified by its bytes, which old names would change."""
    content = Agreement("fleet", Plan(max_grad_norm=0.5), "a" * 64).content
    assert Agreement.parse(content).plan.max_grad_norm == 0.5
    with raises(ConfigError, "settings-of-other-version", containing="clip"):
        Agreement.parse(content.replace(b"max_grad_norm", b"clip"))


def test_another_class_may_have_a_setting_of_the_old_name() -> None:
    assert current_name("alpha", ["alpha", "lora_alpha"]) == "alpha"
    assert current_name("alpha", ["rank"]) == "alpha"
    assert current_name("alpha", ["rank", "lora_alpha"]) == "lora_alpha"


def test_an_old_value_of_a_setting_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    settings = parse_settings(
        CompareSettings, ["--preset", "demo", "--out", "o", "--budget", "rows"], "prge compare"
    )
    assert settings.budget == "forward_passes"
    assert capsys.readouterr().err == f"prge compare: --budget rows is now forward_passes{STILL}\n"
