"""A GGUF file as the base model of every verb: export, training, publishing, comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from prge.errors import BundleError
from prge.formats.bundle import file_sha256, open_bundle
from prge.formats.peft import read_lora
from server_export.checkpoint.loading import load_model
from server_export.publish import publish
from server_export.publishing.settings import PublishConfig
from tests.bundles import read_manifest
from tests.gguf_files import write_gguf
from tests.refusals import raises
from tests.server_export.adapters import RANK, trained_folder
from tests.tiny_models import LENGTH, make_model, make_tokenizer
from tests.verbs import prge
from tests.workshop import FolderBuilder

torch.set_num_threads(1)
FILE = "tiny.Q8_0.gguf"


def fill(folder: Path) -> None:
    """Write `FILE`, its bundle, the bundle of a folder with the same weights, and an adapter."""
    from server_export.checkpoint.tokenization import load_tokenizer
    from server_export.export import ExportConfig, export

    write_gguf(folder / FILE, make_model("llama"), make_tokenizer(), "Q8_0", template="{{ messages }}")
    load_model(str(folder / FILE)).model.save_pretrained(folder / "model")
    load_tokenizer(str(folder / FILE)).save_pretrained(folder / "model")
    settings: dict[str, Any] = {"roles": ["forward"], "rank": RANK, "sequence_length": LENGTH}
    for name, out in ((FILE, "bundle"), ("model", "bundle-of-folder")):
        export(ExportConfig(model=str(folder / name), out=folder / out, quantize="8da8w", **settings))
    bundle = open_bundle(folder / "bundle")
    trained_folder(folder / "trained", bundle.chain.modules, bundle.adapter)


@pytest.fixture(scope="session")
def base_folder(made_once: FolderBuilder) -> Path:
    """Return the folder that `fill` writes."""
    return made_once("gguf base", fill)


def test_a_bundle_records_its_file(base_folder: Path) -> None:
    model = read_manifest(base_folder / "bundle")["model"]
    assert model["sha256"] == file_sha256(base_folder / FILE)
    assert model["source"] == {
        "format": "gguf",
        "file": FILE,
        "description": "Q8_0",
        "file_type": "Q8_0",
        "types": {"F32": 5, "Q8_0": 15},
    }
    assert "Q8_0" in prge("inspect", base_folder / "bundle").stdout


def test_weights_and_programs_equal_those_of_a_folder_with_the_same_weights(base_folder: Path) -> None:
    files, others = (
        {name: each["sha256"] for name, each in read_manifest(base_folder / bundle)["files"].items()}
        for bundle in ("bundle", "bundle-of-folder")
    )
    assert "source" not in read_manifest(base_folder / "bundle-of-folder")["model"]
    # The adapter's configuration differs, as it names the base model.
    del files["adapter/adapter_config.json"], others["adapter/adapter_config.json"]
    assert files == others


def test_a_published_adapter_names_the_file(base_folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = publish(PublishConfig(base_folder / "trained", tmp_path / "peft", bundle=base_folder / "bundle"))
    named = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert FILE in named
    card = (folder / "README.md").read_text()
    assert f'from_pretrained("<folder of the GGUF file>", gguf_file="{FILE}", dtype=torch.float32)' in card
    assert f"GGUF file {FILE} stands for: its weights, in Q8_0, were dequantized" in " ".join(card.split())
    assert "| base model weights | GGUF, Q8_0 |" in card
    # These are the commands of the model card.
    base = AutoModelForCausalLM.from_pretrained(base_folder, gguf_file=FILE, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(folder)).eval()
    torch.testing.assert_close(logits_of(model), merged_logits(base_folder), atol=1e-4, rtol=0)


def test_a_merged_model_is_an_ordinary_folder(base_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = [
        "--bundle",
        base_folder / "bundle",
        "--model",
        base_folder / FILE,
        "--format",
        "merged",
        "--weights",
        "original",
    ]
    prge("publish", base_folder / "trained", *arguments, "--out", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert merged.dtype is torch.float32
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    torch.testing.assert_close(logits_of(merged), merged_logits(base_folder), atol=1e-4, rtol=0)
    assert json.loads((tmp_path / "merged/generation_config.json").read_text())["eos_token_id"] == [2]
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == "{{ messages }}"
    assert "The weights here are what the GGUF file" in (tmp_path / "merged/README.md").read_text()


def test_an_adapter_for_llama_cpp_fits_the_file(base_folder: Path, tmp_path: Path) -> None:
    """The file's weights plus the adapter, in the layout of the file, equal the merged weights."""
    import gguf

    arguments = ["--bundle", base_folder / "bundle", "--model", base_folder / FILE, "--format", "gguf"]
    prge("publish", base_folder / "trained", *arguments, "--out", tmp_path / "gguf")
    assert f'-m "{FILE}" --lora adapter.gguf' in (tmp_path / "gguf/README.md").read_text()
    adapter = {each.name: each.data for each in gguf.GGUFReader(tmp_path / "gguf/adapter.gguf").tensors}
    base = {each.name: each for each in gguf.GGUFReader(base_folder / FILE).tensors}
    stems = {name.rpartition(".")[0] for name in adapter}
    assert stems and stems <= base.keys()
    merged = {
        name: gguf.dequantize(base[name].data, base[name].tensor_type)
        + 16 / RANK * adapter[f"{name}.lora_b"] @ adapter[f"{name}.lora_a"]
        for name in stems
    }
    model = load_model(str(base_folder / FILE)).model
    written = write_gguf(tmp_path / "merged.gguf", model, make_tokenizer(), tensors=merged)
    torch.testing.assert_close(
        logits_of(load_model(str(written)).model), merged_logits(base_folder), atol=1e-4, rtol=0
    )


def merged_logits(base_folder: Path) -> Any:
    """Return the logits of the model with weights W + alpha / rank * lora_b @ lora_a."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base_folder / "model").eval()
    adapter = read_lora(base_folder / "trained")
    with torch.no_grad():
        for name, lora_b in adapter.lora_b.items():
            model.get_submodule(name).weight += torch.from_numpy(16 / RANK * lora_b @ adapter.lora_a[name])
    return logits_of(model)


def logits_of(model: Any) -> Any:
    tokens = torch.randint(3, 100, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=tokens).logits


def test_another_file_is_not_the_bundles_model(base_folder: Path, tmp_path: Path) -> None:
    from server_export.oracle import load_base_model

    bundle = open_bundle(base_folder / "bundle")
    assert load_base_model(bundle, str(base_folder / FILE)).sha256 == file_sha256(base_folder / FILE)
    other = write_gguf(tmp_path / FILE, make_model("llama"), make_tokenizer(), "Q4_1")
    with raises(BundleError, "model-differs"):
        load_base_model(bundle, str(other))


def test_a_file_is_estimated_like_a_folder(base_folder: Path) -> None:
    estimated, expected = (
        json.loads(prge("estimate", "--model", base_folder / name, "--json").stdout)
        for name in (FILE, "model")
    )
    assert estimated["model"].pop("name_or_path") == str(base_folder / FILE)
    del expected["model"]["name_or_path"]
    assert estimated == expected


def test_a_damaged_file_is_refused_with_exit_code_2(base_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes((base_folder / FILE).read_bytes()[:-1])
    ended = prge("export", "--model", path, "--out", tmp_path / "out", check=False)
    assert ended.returncode == 2
    assert "would end at byte" in ended.stderr
    assert not (tmp_path / "out").exists()
