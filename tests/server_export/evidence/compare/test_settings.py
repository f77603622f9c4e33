"""Presets and settings of a comparison, and messages about mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from prge.cli.main import main
from prge.cli.settings import parse_settings, read_settings, settings_to_yaml
from prge.errors import ConfigError
from server_export.evidence.compare.methods import chosen_methods
from server_export.evidence.compare.settings import CompareSettings
from tests.comparisons import settings_for
from tests.refusals import raises

NAMES = sorted(path.stem for path in CompareSettings.PRESETS.glob("*.yaml"))


def test_the_presets_exist() -> None:
    assert NAMES == ["demo", "minilm-sst2", "smollm2-135m", "stories-wikitext"]


@pytest.mark.parametrize("name", NAMES)
def test_presets_parse(name: str, tmp_path: Path) -> None:
    for file in ("train.tsv", "dev.tsv", "test-labeled.tsv", "wikitext_1000.json"):
        (tmp_path / file).touch()
    arguments = ["--preset", name, "--out", str(tmp_path / "out")]
    if name in ("minilm-sst2", "stories-wikitext"):
        arguments += ["--model", "some/model", "--data", str(tmp_path)]
    settings = parse_settings(CompareSettings, arguments, "prge compare")
    assert settings.preset == name
    assert chosen_methods(settings.methods, settings.batch_size)[0].name == "backprop-lora-fa"
    path = tmp_path / "again.yaml"
    path.write_text(settings_to_yaml(settings))
    assert read_settings(CompareSettings, path, "prge compare") == settings


def test_flags_win_over_a_preset(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "--budget", "seconds", "--budget-value", 5, "--methods", "tangent")
    assert (settings.budget, settings.budget_value, settings.methods) == ("seconds", 5.0, ["tangent"])
    assert settings.target_modules == ["o_proj", "down_proj"]
    assert Path(settings.task_path or "").is_absolute()
    assert settings.data_folder.joinpath("train.jsonl").is_file()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--preset", "demos"], "--preset is 'demos'; did you mean demo?"),
        (["--preset", "minilm-sst2"], "--model is missing"),
        (["--preset", "minilm-sst2", "--model", "x"], "--data is missing"),
        (["--preset", "demo", "--model", "/nowhere/model"], "there is no such folder"),
        (["--preset", "demo", "--data", "nowhere"], "--data is nowhere, and there is no such folder"),
        (["--preset", "demo", "--dev", "devel.jsonl"], "--dev is devel.jsonl"),
        (["--preset", "demo", "--seeds", "7", "8"], "--seeds has 7, which is the seed of the search"),
        (["--preset", "demo", "--seeds", "1", "1"], "a seed twice"),
        (
            ["--preset", "demo", "--evaluation-growth", "1"],
            "--evaluation-growth is 1.0, must be at least 1.01",
        ),
        (["--preset", "demo", "--rank", "0"], "rank is 0, must be at least 1"),
        (
            ["--preset", "demo", "--quantize", "int8wo"],
            "XNNPACK computes weight-only quantized layers",
        ),
        (["--preset", "demo", "--methods", "p-rgee"], "did you mean p-rge"),
        (["--preset", "demo", "--batch-size", "6"], "p-rge: its 4 queries share a batch"),
    ],
)
def test_wrong_arguments_end_with_code_2(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *arguments, "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert "Traceback" not in message
    assert not (tmp_path / "out").exists()


def test_unknown_methods_name_the_nearest() -> None:
    with raises(ConfigError, "no-such-method", containing="tangents") as raised:
        chosen_methods(["tangents", "backprop"], 16)
    assert len(raised.value.problems) == 2
    assert "p-rge-q16" in raised.value.remedy
