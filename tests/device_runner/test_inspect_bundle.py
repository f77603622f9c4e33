"""`prge inspect`: the manifest, facts about its chain, and a check of every file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from device_runner.inspect_bundle import inspect, main
from prge.errors import BundleError
from prge.formats.bundle import ADAPTER, open_bundle
from prge.formats.chain import Chain
from prge.formats.format3 import chain_of_format_3
from prge.training.costs import LayerShape, ModelSizes
from prge.training.estimators.table import ESTIMATORS
from tests.bundles import make_bundle, make_small_chain, read_manifest, write_manifest
from tests.refusals import raises


def test_text_shows_all_of_the_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_bundle(tmp_path / "bundle", provenance={"made_by": "a test"})
    assert main([str(folder)]) == 0
    text = capsys.readouterr().out
    for part in (
        "model_type    llama",
        "3 of 3 types, the lowest adapted block is 1",
        "forward, jvp, backward",
        "512 B  programs/block.pte  1 block: forward, jvp, backward",
        "512 B  programs/embedding.pte  1 block: forward",
        "3.0 KiB  in all",
        "1.5 KiB  weights/head.ptd, the largest block and the minimum to load at once",
        "copies     8",
        "states     128",
        "causal, window 7: 1 block",
        "rotary: 1 block",
        "adapter: LoRA-FA, 56 parameters in 2 modules",
        "1 x q_proj           rank 4, 8 -> 8",
        "scheme       8da8w",
        "tolerance                0.01",
        "executorch  1.5.1",
        "made_by: a test",
        "weights/000.ptd  ok",
    ):
        assert part in text, part
    assert text.count("  ok") == len(inspect(folder)["files"])


OUTLINE = ModelSizes(
    width=8,
    blocks=1,
    blocks_below=0,
    heads=2,
    head_width=4,
    key_width=8,
    gelu=False,
    layers=(LayerShape(8, 8, 4), LayerShape(8, 32, 2), LayerShape(32, 8, 1)),
    head=LayerShape(8, 64, 1),
    modules=(),
    table_numbers=512,
    other_numbers=24,
    parameters=2000,
    longest=16,
)


def test_memory_of_runs_is_reported_by_estimator_and_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_bundle(tmp_path / "bundle", outline=OUTLINE.to_json())
    rows = inspect(folder)["memory"]
    assert [(row["estimator"], row["loaded_bytes"]) for row in rows] == [
        (name, bound) for name in ESTIMATORS for bound in (None, 1536)
    ]
    assert main([str(folder)]) == 0
    text = capsys.readouterr().out
    for part in (
        "4 rows of 16 tokens, native engine",
        "exact       everything",
        "exact       one block",
        "--memory",
    ):
        assert part in text, part
    assert "\nother" not in text and "\noutline" not in text


def test_a_bundle_without_an_outline_has_no_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_bundle(tmp_path / "bundle")
    assert inspect(folder)["memory"] is None
    assert main([str(folder)]) == 0
    assert "memory of a run is unknown" in capsys.readouterr().out
    with raises(BundleError, "outline-unreadable"):
        inspect(make_bundle(tmp_path / "other", outline={"width": 8}))


def test_json_has_the_manifest_and_facts_that_follow_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_bundle(tmp_path / "bundle")
    assert main(["--json", "--bundle", str(folder)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["chain"] == json.loads(json.dumps(make_small_chain().to_json()))
    assert content["roles"] == ["forward", "jvp", "backward"]
    assert [program["blocks"] for program in content["programs"]] == [[0], [1], [2]]
    assert content["weights"] == {"bytes": 3072, "largest": "weights/head.ptd", "largest_bytes": 1536}
    assert content["adapter_parameters"] == 4 * 8 + 4 * 6
    assert {entry["problem"] for entry in content["files"].values()} == {None}
    assert content["unlisted_files"] == []


def test_every_damaged_file_is_shown_and_the_code_is_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_bundle(tmp_path / "bundle")
    (folder / "programs/block.pte").write_bytes(b"short")
    (folder / ADAPTER / "adapter_config.json").unlink()
    (folder / "stranger.bin").write_bytes(b"?")
    with raises(BundleError, "bundle-damaged"):
        main([str(folder)])
    text = capsys.readouterr().out
    assert "has 5 bytes, the manifest says 512" in text
    assert "lacks its file adapter/adapter_config.json" in text
    assert "stranger.bin  not in the manifest" in text
    assert "tokenizer/tokenizer.json  ok" in text


@pytest.mark.parametrize("name", ["programs/block.pte", "weights/000.ptd"])
def test_other_content_is_reported_in_the_json_too(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_bundle(tmp_path / "bundle")
    path = folder / name
    path.write_bytes(bytes(path.stat().st_size))
    with raises(BundleError, "bundle-damaged"):
        main([str(folder), "--json"])
    assert "SHA-256 differs" in json.loads(capsys.readouterr().out)["files"][name]["problem"]


def test_an_encoders_chain_has_a_pooling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_bundle(tmp_path / "bundle", make_small_chain(readout="pooled", pooling="first"))
    assert main([str(folder)]) == 0
    assert "pooling          first" in capsys.readouterr().out
    assert open_bundle(folder).pooling == "first"


def test_a_bundle_of_format_3_is_shown_with_the_current_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = json.loads((Path(__file__).parents[1] / "prge/formats/chain_of_format_3.json").read_text("utf-8"))
    folder = make_bundle(tmp_path / "bundle", Chain.from_json(chain_of_format_3(old)))
    manifest = {**read_manifest(folder), "format": 3, "chain": old}
    manifest.pop("manifest_sha256")
    write_manifest(folder, manifest)
    assert main([str(folder)]) == 0
    assert "forward, jvp, backward" in capsys.readouterr().out
