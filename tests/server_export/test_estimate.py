"""`prge estimate`: costs from a configuration, without weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from prge.errors import ConfigError
from prge.training.estimators.protocol import BACKPROPAGATION_PASSES
from server_export.check.estimation import estimate, print_estimate
from server_export.estimate import main
from server_export.ir.operators import TABLE
from server_export.settings import EstimateConfig
from tests.refusals import raises, refusal
from tests.tiny_models import save_model


@pytest.fixture
def config_folder(tmp_path: Path) -> Path:
    """Return a folder with only a configuration."""
    model = save_model(tmp_path / "model", "llama")
    folder = tmp_path / "outline"
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    return folder


def report_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Return the output of `prge estimate --json`."""
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_a_configuration_is_enough(config_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(config_folder), "--tokens", "8"]) == 0
    text = capsys.readouterr().out
    for part in ("parameters in", "4 rows of 8 tokens", "memory of a run", "anonymous"):
        assert part in text, part
    one = ["--model", str(config_folder), "--tokens", "8", "--estimator", "tangent"]
    assert main(one) == 0
    text = capsys.readouterr().out
    for part in ("20 forward passes of 8 tokens", "memory of a run", "workspace", "anonymous"):
        assert part in text, part


def test_all_estimators_are_compared_with_all_and_the_fewest_weights_loaded(
    config_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", config_folder, "--tokens", 8)
    runs = report_of(capsys, *arguments)["runs"]
    assert [run["estimator"] for run in runs[::2]] == ["exact", "tangent", "antithetic", "fzoo"]
    for whole, bounded in zip(runs[::2], runs[1::2], strict=True):
        assert whole["loaded_bytes"] is None and bounded["loaded_bytes"] > 0
        assert bounded["resident_bytes"] < whole["resident_bytes"]
        alone = report_of(capsys, *arguments, "--estimator", whole["estimator"])
        assert alone["run_memory"]["native"]["total_bytes"] == whole["resident_bytes"]
        assert alone["run_memory"]["native"]["anonymous_bytes"] == whole["anonymous_bytes"]
    assert [run["estimator"] for run in report_of(capsys, *arguments, "--roles", "tangent")["runs"]] == [
        *2 * ["tangent"],
        *2 * ["antithetic"],
        *2 * ["fzoo"],
    ]
    # With only a memory bound, one run is estimated, of the estimator that `prge run` would choose.
    bounded = report_of(capsys, *arguments, "--memory", "400MB")
    assert bounded["estimator"] == "exact"
    assert bounded["run_memory"]["native"]["total_bytes"] <= 400_000_000
    with raises(ConfigError, "memory-too-little", containing="--memory 1 MB") as caught:
        main([*map(str, arguments), "--memory", "1MB"])
    assert re.search(r"\d+ MB", caught.value.problems[0])


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert", "gemma3"])
def test_estimates_do_not_depend_on_weights(architecture: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", architecture)
    whole = estimate(EstimateConfig(model=str(folder)))
    (folder / "model.safetensors").unlink()
    assert estimate(EstimateConfig(model=str(folder))) == whole
    assert whole.outline.parameters > 0 and whole.weights.layers > 0


@pytest.mark.parametrize(
    ("estimator", "rows"),
    [("tangent", 4 * 5), ("antithetic", 4 * 8), ("exact", 4 * BACKPROPAGATION_PASSES)],
)
def test_a_run_chooses_its_estimator(
    estimator: str, rows: int, config_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(capsys, "--model", config_folder, "--estimator", estimator, "--tokens", 8)
    assert report["step"]["forward_passes"] == rows
    larger = report_of(capsys, "--model", config_folder, "--estimator", estimator, "--tokens", 16)
    assert larger["run_memory"]["native"]["total_bytes"] > report["run_memory"]["native"]["total_bytes"]
    # The cost of the export does not depend on the length of rows.
    assert [larger[name] for name in ("weights_bytes", "export")] == [
        report[name] for name in ("weights_bytes", "export")
    ]


def test_roles_have_costs_and_are_required(config_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", config_folder, "--estimator", "antithetic")
    whole, forward_only = report_of(capsys, *arguments), report_of(capsys, *arguments, "--roles", "forward")
    for name in ("programs_bytes", "weights_bytes", "packed_bytes"):
        assert forward_only[name] < whole[name], name
    with raises(ConfigError, "role-missing", containing="tangent"):
        main(
            [
                *("--model", str(config_folder)),
                *("--roles", "forward", "--estimator", "tangent"),
            ]
        )


def test_settings_that_an_export_refuses_are_refused(config_folder: Path, tmp_path: Path) -> None:
    with refusal("no-such-model"):
        main(["--model", str(tmp_path / "none")])
    with raises(ConfigError, "settings-unusable", containing="int3"):
        main(["--model", str(config_folder), "--quantize", "int3"])
    with raises(ConfigError, "positions-too-few", containing="100000"):
        main(["--model", str(config_folder), "--sequence-length", "100000"])
    with raises(ConfigError, "row-too-long", containing="tokens is 9"):
        main(["--model", str(config_folder), "--sequence-length", "8", "--tokens", "9"])


def test_all_token_tables_are_counted(tmp_path: Path) -> None:
    """Gemma has another table for the inputs of each layer, which is larger than the embedding."""
    folder = save_model(tmp_path / "model", "gemma4")
    config = json.loads((folder / "config.json").read_text())
    width = config["hidden_size"] + config["num_hidden_layers"] * config["hidden_size_per_layer_input"]
    assert config["vocab_size"] == config["vocab_size_per_layer_input"]
    outline = estimate(EstimateConfig(str(folder))).outline
    assert outline.table_numbers == config["vocab_size"] * width


def test_an_export_prints_its_estimate(config_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_estimate(estimate(EstimateConfig(model=str(config_folder))))
    assert "of memory at the peak of the export" in capsys.readouterr().out


def test_an_epoch_and_the_memory_of_its_longest_step_are_estimated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "model", "llama")

    def epoch(*counts: int) -> dict[str, Any]:
        train = tmp_path / "rows.jsonl"
        rows = [{"prompt": "a" * count, "completion": "b"} for count in counts]
        train.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return report_of(capsys, "--model", model, "--train", train, "--batch-size", 1)

    short, long, both = epoch(2), epoch(9), epoch(2, 9, 2)
    assert (both["epoch"]["rows"], both["epoch"]["steps"]) == (3, 3)
    assert short["step"]["tokens"] < long["step"]["tokens"]
    # The report is about the longest step.
    assert both["step"] == long["step"] and both["run_memory"] == long["run_memory"]


def test_an_operator_without_a_derivative_is_refused_before_an_export(
    config_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(TABLE, "aten.rsqrt.default")
    arguments = ["--model", str(config_folder), "--tokens", "8"]
    with refusal("operator-without-derivative") as caught:
        main(arguments)
    assert caught.value.operator == "aten.rsqrt.default" and caught.value.module.endswith("layernorm")
    assert main([*arguments, "--roles", "forward", "backward"]) == 0
