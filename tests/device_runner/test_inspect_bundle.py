"""`prge inspect`: everything of the manifest, a check of every file, and a memory estimate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from device_runner.inspect_bundle import inspect, main
from prge.bundle import ADAPTER, PROGRAM, open_bundle
from prge.bundle_memory import memory_estimate
from prge.contract import TensorSpec
from prge.costs import RUNTIME_BYTES
from prge.errors import BundleError
from tests.bundles import FILES, make_bundle, make_chain_bundle, make_contract, make_small_chain

# 4 copies of the adapter of tests/bundles.py: rank 4 into 8 and 6 features, float32.
STACK_BYTES = 4 * (4 * 8 + 4 * 6) * 4


def test_text_shows_all_of_the_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_bundle(tmp_path / "bundle", provenance={"made_by": "a test"})
    assert main([str(folder)]) == 0
    text = capsys.readouterr().out
    for words in (
        "model_type    llama",
        "8 = 4 copies x 2 examples",
        "in  tokens           int64    [8, 16]",
        "out logprobs         float32  [8, 3]",
        "adapter: 56 parameters in 2 modules",
        "1 x q_proj           rank 4, 8 -> 8",
        "scheme       8da8w",
        "aten.gather.out: 1",
        "constant_bytes        5.0 MiB (5242880)",
        "tolerance                0.01",
        "executorch  1.5.1",
        "made_by: a test",
        "    60.0 MiB   245.0 MiB  in all",
    ):
        assert words in text, words
    assert all(f"{name}  ok" in text for name in FILES)


def test_json_is_the_manifest_and_what_follows_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_bundle(tmp_path / "bundle")
    assert main(["--json", "--bundle", str(folder)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["contract"] == json.loads(json.dumps(make_contract().to_json()))
    assert (content["rows_per_call"], content["adapter_parameters"]) == (8, 56)
    assert {entry["problem"] for entry in content["files"].values()} == {None}
    assert content["unlisted_files"] == []
    assert content["memory"]["native"]["adapter_bytes"] == STACK_BYTES
    assert content["score_memory"] is None


def test_methods_for_shorter_rows_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lowering = {"forward_4": {"planned_memory_bytes": 2048}}
    block = {"sequence_length": 4, "cut": [], "lowering": lowering}
    assert main([str(make_bundle(tmp_path / "bundle", lengths=[block]))]) == 0
    text = capsys.readouterr().out
    assert "shorter lengths    4\n" in text
    assert "forward_4  4 tokens, planned arena 2.0 KiB" in text
    assert "\nother" not in text


def test_memory_estimate_adds_up() -> None:
    lowering = {"constant_bytes": 1000, "planned_memory_bytes": 100}
    memory = memory_estimate(make_contract(), lowering, 10)
    for engine, runtime in RUNTIME_BYTES.items():
        assert memory[engine]["total_bytes"] == runtime + 1000 + 100 + 10 + STACK_BYTES
    # The torch engine holds the file's weights until all are packed; the workspace comes with the first call.
    assert memory["torch"]["while_loading_bytes"] == memory["torch"]["total_bytes"] + 1000 - 10
    assert memory["native"]["while_loading_bytes"] == memory["native"]["total_bytes"] - 10


def test_memory_estimate_of_a_manifest_without_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = memory_estimate(make_contract(), {})
    assert memory["native"]["weights_bytes"] is None
    assert memory["native"]["total_bytes"] == RUNTIME_BYTES["native"] + STACK_BYTES
    assert main([str(make_bundle(tmp_path / "bundle", lowering=None, model="tiny"))]) == 0
    assert "unknown  packed weights" in capsys.readouterr().out


def test_every_damaged_file_is_shown_and_the_code_is_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_bundle(tmp_path / "bundle")
    (folder / PROGRAM).write_bytes(b"short")
    (folder / ADAPTER / "adapter_config.json").unlink()
    (folder / "stranger.bin").write_bytes(b"?")
    with pytest.raises(BundleError, match=r"has 5 bytes.*and 1 more files"):
        main([str(folder)])
    text = capsys.readouterr().out
    assert "has 5 bytes, the manifest says 512" in text
    assert "lacks its file adapter/adapter_config.json" in text
    assert "stranger.bin  not in the manifest" in text
    assert "tokenizer/tokenizer.json  ok" in text


def test_damage_is_in_the_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_bundle(tmp_path / "bundle")
    (folder / PROGRAM).write_bytes(bytes(512))
    with pytest.raises(BundleError):
        main([str(folder), "--json"])
    assert "SHA-256 differs" in json.loads(capsys.readouterr().out)["files"][PROGRAM]["problem"]


def test_folder_that_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not a bundle"):
        inspect(tmp_path)
    with pytest.raises(BundleError, match=r"lists no program\.pte"):
        inspect(make_bundle(tmp_path / "bundle", files={}))


def test_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contract = make_contract(readout="pooled", positions=0, width=12).to_json()
    assert main([str(make_bundle(tmp_path / "bundle", contract=contract))]) == 0
    text = capsys.readouterr().out
    assert "out pooled           float32  [8, 12]" in text
    assert "attention_mask" in text


def test_a_tangent_bundle_shows_both_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contract = make_contract(kind="tangent", copies=1, queries=3)
    folder = make_bundle(
        tmp_path / "bundle",
        contract=contract.to_json(),
        score=make_contract(copies=1, batch_size=7).to_json(),
        score_lowering={"planned_memory_bytes": 1 << 20, "constant_bytes": 5 << 20},
    )
    assert main([str(folder)]) == 0
    text = capsys.readouterr().out
    for words in (
        "2, and 3 derivatives of each: as much work as 8",
        "out dlogprobs        float32  [3, 2, 3]",
        "program for scoring",
        "rows a call  7, without derivatives",
        "out logprobs         float32  [7, 3]",
        "memory of scoring",
        "directions",
    ):
        assert words in text, words
    assert "u.layers.0" not in text
    report = inspect(folder)
    # 3 queries of 2 rows, ranks 4 and 4, 8 and 6 features: float32 inputs, and a byte for each sign.
    assert report["memory"]["native"]["directions_bytes"] == 3 * 2 * (4 + 8 + 4 + 6) * 5
    assert report["score_memory"]["native"]["directions_bytes"] == 0
    assert report["score_memory"]["native"]["arena_bytes"] == 1 << 20
    assert report["memory"]["native"]["adapter_bytes"] == STACK_BYTES // 4


def test_a_bundle_that_was_cut_shows_all_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = (TensorSpec("trunk.0", "float32", (2, 16, 12)),)
    trunk, step = make_contract(shared_rows=True).divided(cut)
    folder = make_bundle(
        tmp_path / "bundle",
        contract=step.to_json(),
        trunk=trunk.to_json(),
        trunk_lowering={"planned_memory_bytes": 1 << 20, "constant_bytes": 5 << 20},
        score=make_contract(copies=1, batch_size=7).to_json(),
    )
    assert main([str(folder)]) == 0
    text = capsys.readouterr().out
    for words in (
        "8 = 4 copies x 2 examples",
        "in  trunk.0          float32  [2, 16, 12]",
        "program below the adapter",
        "2, once for a row of the training data",
        "out trunk.0          float32  [2, 16, 12]",
        "trunk_lowering",
    ):
        assert words in text, words
    # Trunk and step are in memory together.
    assert inspect(folder)["memory"]["native"]["arena_bytes"] == 4 << 20


def test_a_chain_is_told_by_its_blocks_programs_and_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_chain_bundle(tmp_path / "bundle")
    assert main([str(folder)]) == 0
    text = capsys.readouterr().out
    for words in (
        "3 of 3 kinds, the lowest adapted one is 1",
        "stack, tangent, back",
        "512 B  programs/block.pte  1 block: stack, tangent, back",
        "512 B  programs/embedding.pte  1 block: stack",
        "3.0 KiB  in all",
        "1.5 KiB  weights/head.ptd, the largest block: --memory must be 1536 at least",
        "copies   8",
        "states   128",
        "causal, window 7: 1 block",
        "rotary: 1 block",
        "1 x q_proj",
        "scheme       8da8w",
        "weights/000.ptd  ok",
    ):
        assert words in text, words
    for words in ("positions", "lengths", "planned arena", "other"):
        assert f"\n{words}" not in text and f"  {words} " not in text, words
    report = inspect(folder)
    assert report["roles"] == ["stack", "tangent", "back"]
    assert [program["blocks"] for program in report["programs"]] == [[0], [1], [2]]
    assert report["weights"] == {"bytes": 3072, "largest": "weights/head.ptd", "largest_bytes": 1536}
    assert report["adapter_parameters"] == 4 * 8 + 4 * 6


def test_damaged_weights_of_a_chain_are_told(tmp_path: Path) -> None:
    folder = make_chain_bundle(tmp_path / "bundle")
    (folder / "weights/000.ptd").write_bytes(bytes(1024))
    assert "SHA-256 differs" in inspect(folder)["files"]["weights/000.ptd"]["problem"]


def test_a_chain_whose_program_is_not_listed(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"lists no 'programs/block\.pte'"):
        inspect(make_chain_bundle(tmp_path / "bundle", files={"programs/embedding.pte": {}}))


def test_an_encoders_chain_has_a_pooling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_chain_bundle(tmp_path / "bundle", make_small_chain(readout="pooled", pooling="first"))
    assert main([str(folder)]) == 0
    assert "pooling          first" in capsys.readouterr().out
    assert open_bundle(folder).pooling == "first"
