"""`prge estimate`: numbers from a configuration, held against an export of the same model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from prge.bundle import PROGRAM
from prge.contract import Contract
from prge.errors import BundleError, ConfigError
from server_export.check.calibration import Calibration
from server_export.check.estimation import announce, estimate, estimate_of
from server_export.estimate import main
from server_export.export import export
from server_export.model.loading import load_model
from server_export.settings import EstimateConfig
from tests.server_export.programs import make_export_config
from tests.tiny_models import save_model


@pytest.fixture
def outline_folder(tmp_path: Path) -> Path:
    """A folder with a configuration and nothing else."""
    model = save_model(tmp_path / "model", "llama")
    folder = tmp_path / "outline"
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    return folder


def test_a_configuration_is_enough(outline_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(outline_folder), "--no-calibrate", "--sequence-length", "8"]) == 0
    text = capsys.readouterr().out
    for words in ("parameters in", "20 rows of 8 tokens", "memory of a run", "while loading", "--calibrate"):
        assert words in text, words


def test_a_chain_is_not_estimated_as_one_program(outline_folder: Path) -> None:
    with pytest.raises(ConfigError, match="--roles is given"):
        main(["--model", str(outline_folder), "--no-calibrate", "--roles", "stack"])


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert", "gemma3"])
@pytest.mark.parametrize("estimator", ["tangent", "antithetic"])
def test_weights_make_no_difference(architecture: str, estimator: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", architecture)
    config = make_export_config(str(folder), tmp_path / "bundle", estimator=estimator)
    outline = estimate(config)
    assert outline == estimate_of(config, load_model(str(folder)))
    assert outline.outline.parameters > 0


@pytest.mark.export
@pytest.mark.parametrize("lengths", [None, [4, 8]])
def test_size_contract_and_memory_are_those_of_the_export(tmp_path: Path, lengths: list[int] | None) -> None:
    # Wide enough for the weights to be most of it.
    model = save_model(
        tmp_path / "model", "llama", num_hidden_layers=2, hidden_size=256, intermediate_size=768, head_dim=64
    )
    config = make_export_config(str(model), tmp_path / "bundle", quantize="8da4w", queries=2, lengths=lengths)
    found = estimate(config)
    folder = export(config)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert found.contract == Contract.from_json(manifest["contract"])
    assert found.weights.stored == pytest.approx(manifest["lowering"]["constant_bytes"], rel=0.05)
    assert found.program_bytes == pytest.approx((folder / PROGRAM).stat().st_size, rel=0.05)
    workspace = max(manifest["verification"]["workspace_bytes"].values())
    memory = found.memory("native")
    assert memory.workspace is not None
    assert abs(memory.workspace - workspace) < 1 << 20


@pytest.mark.export
def test_calibration_gives_seconds(outline_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quantize", "8da4w", "--sequence-length", "8", "--estimator", "antithetic", "--copies", "4"]
    assert main(["--model", str(outline_folder), "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["step"]["calls"] == 2
    assert report["step"]["rows"] == 2 * 4 * 4
    assert all(rate > 0 for rate in report["rates"].values())
    assert 0 < report["step"]["seconds"] < 1


def test_a_backward_counts_as_two_forwards(outline_folder: Path) -> None:
    config = EstimateConfig(model=str(outline_folder), estimator="exact", batch_size=4)
    assert estimate(config).to_json(None)["step"]["rows"] == 3 * 4


def test_a_trunk_cache_makes_steps_cheaper(outline_folder: Path) -> None:
    config = EstimateConfig(model=str(outline_folder), adapt_layers="top:1", trunk_cache=True)
    step = estimate(config).to_json(None)["step"]
    assert step["cached_operations"] < step["operations"]


def test_what_an_export_refuses_is_refused(outline_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="there is no folder"):
        main(["--model", str(tmp_path / "none")])
    with pytest.raises(ConfigError, match="must be one of fp32"):
        main(["--model", str(outline_folder), "--quantize", "int3"])
    with pytest.raises(ConfigError, match="positions"):
        main(["--model", str(outline_folder), "--sequence-length", "100000"])


def test_an_export_is_announced(outline_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    announce(EstimateConfig(model=str(outline_folder)))
    assert "of memory at the peak of the export" in capsys.readouterr().out
    # What can't be estimated is no reason not to try.
    announce(EstimateConfig(model=str(outline_folder / "none")))
    assert capsys.readouterr().out == ""


def test_every_length_is_a_method_with_a_cost_of_its_own(outline_folder: Path) -> None:
    alone = EstimateConfig(model=str(outline_folder), sequence_length=32)
    several = replace(alone, lengths=[8, 16])
    one, three = (estimate(config) for config in (alone, several))
    assert [contract.sequence_length for contract in three.steps] == [8, 16, 32]
    assert len(three.methods) == 3 * len(one.methods)
    assert one.program_bytes < three.program_bytes < 1.5 * one.program_bytes
    assert one.export_seconds < three.export_seconds
    # Small tables of positions are counted with every method.
    assert three.memory("torch").weights == pytest.approx(3 * (one.memory("torch").weights or 0), rel=0.02)
    step = three.to_json(None)["step"]
    operations = [cost["operations"] for cost in (*step["lengths"], step)]
    assert [cost["sequence_length"] for cost in step["lengths"]] == [8, 16]
    assert operations == sorted(operations) and operations[0] < operations[2] / 3
    assert one.to_json(None)["step"]["operations"] == step["operations"]


def test_an_epoch_of_rows_is_told_by_the_lengths_that_they_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "model", "llama")
    rows = [{"prompt": "a" * count, "completion": "b"} for count in (2, 3, 10, 3, 30, 2)]
    train = tmp_path / "rows.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", str(model), "--no-calibrate", "--train", str(train), "--batch-size", "1"]
    words += ["--sequence-length", "32", "--lengths", "8", "16"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    data, step = report["data"], report["step"]
    assert (data["rows"], data["steps"]) == (6, 6)
    assert data["steps_of_length"] == {"8": 4, "16": 1, "32": 1}
    costs = [cost["operations"] for cost in (*step["lengths"], step)]
    assert data["operations"] == 4 * costs[0] + costs[1] + costs[2]
    assert main(words) == 0
    assert "6 rows in 6 steps: 4 of 8 tokens, 1 of 16 tokens, 1 of 32 tokens" in capsys.readouterr().out


@pytest.mark.export
def test_calls_of_a_small_model_are_measured_and_not_what_any_call_takes(outline_folder: Path) -> None:
    found = estimate(EstimateConfig(model=str(outline_folder), sequence_length=8))
    calibration = Calibration(found.outline, "fp32", found.contract.computed_rows, 8)
    for _ in range(20):
        calibration.sample()
    rates = calibration.rates()
    # A call takes tens of microseconds, in which a processor does a hundred thousand multiplications.
    assert rates.layers > 1e9 and rates.products > 1e8 and rates.passes > 1e8 and rates.answers > 1e7
