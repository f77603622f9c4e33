"""A published adapter computes what was trained, with PEFT, merged, and as an inference program."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prge.errors import BundleError, ConfigError, PrgeError, RunError
from prge.formats.bundle import Bundle, file_sha256, open_bundle
from prge.formats.peft import find_adapter, find_run, read_lora, read_peft, write_peft
from prge.formats.stored_settings import write_settings
from server_export.publish import publish
from server_export.publishing.settings import PublishConfig
from tests.bundles import read_manifest, write_manifest
from tests.refusals import raises
from tests.rows import completion
from tests.server_export.adapters import RANK, trained_adapter, trained_folder
from tests.server_export.publishing.hub_server import give_environment
from tests.tiny_models import DECODERS, LENGTH, make_model, save_model
from tests.verbs import prge
from tests.workshop import FolderBuilder

torch.set_num_threads(1)
HEAD = {
    "weight": np.random.default_rng(5).standard_normal((3, 64)).astype(np.float32),
    "bias": np.array([0.5, -1, 2], np.float32),
}


def fill(folder: Path) -> None:
    from server_export.export import ExportConfig, export

    for architecture in ("llama", "gpt2", "bert"):
        base = save_model(folder / architecture, architecture)
        trained_adapter(base, folder / f"{architecture}-trained", HEAD if architecture == "bert" else None)
    settings = {"roles": ["forward"], "rank": RANK, "sequence_length": LENGTH, "chat_template": "plain"}
    settings_of_export: dict[str, Any] = {
        **settings,
        "model": str(folder / "llama"),
        "out": folder / "bundle",
    }
    bundle = open_bundle(export(ExportConfig(**settings_of_export)))
    trained_folder(folder / "trained", bundle.chain.modules, bundle.adapter)


@pytest.fixture(scope="session")
def saved(made_once: FolderBuilder) -> Path:
    """Return a folder with models `llama`, `gpt2` and `bert`, and adapters `llama-trained` etc."""
    return made_once("publish", fill)


@pytest.fixture(scope="session")
def bundle(saved: Path) -> Bundle:
    """Return a bundle of the tiny Llama with a chat template, which the model itself lacks."""
    return open_bundle(saved / "bundle")


@pytest.fixture(scope="session")
def trained(saved: Path) -> Path:
    """Return the folder of a trained adapter of the bundle."""
    return saved / "trained"


def rows() -> tuple[Any, Any]:
    """Return tokens i64 [2, LENGTH] without padding ids, and a mask."""
    tokens = torch.randint(3, 128, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [7]])).long()
    return tokens, mask


def outputs_of(model: Any, architecture: str) -> Any:
    tokens, mask = rows()
    with torch.no_grad():
        if architecture in DECODERS:
            return model(input_ids=tokens).logits
        return model(input_ids=tokens, attention_mask=mask).last_hidden_state[:, :7]


def merged_model(saved: Path, architecture: str) -> Any:
    """Return the base model with weights W + alpha / rank * lora_b @ lora_a."""
    model = make_model(architecture)
    adapter = read_lora(saved / f"{architecture}-trained")
    with torch.no_grad():
        for name, lora_b in adapter.lora_b.items():
            delta = torch.from_numpy(16 / RANK * lora_b @ adapter.lora_a[name])
            weight = model.get_submodule(name).weight
            weight += delta.T if architecture == "gpt2" else delta
    return model


def auto(architecture: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM if architecture in DECODERS else transformers.AutoModel


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert"])
def test_peft_and_merged_folders_give_the_trained_logits(
    saved: Path, tmp_path: Path, architecture: str
) -> None:
    from peft import PeftModel

    source = saved / f"{architecture}-trained"
    expected = outputs_of(merged_model(saved, architecture), architecture)
    assert (outputs_of(make_model(architecture), architecture) - expected).abs().max() > 0.1

    model = str(saved / architecture)
    folder = publish(PublishConfig(source, tmp_path / "peft", model=model))
    base = auto(architecture).from_pretrained(saved / architecture)
    actual = outputs_of(PeftModel.from_pretrained(base, str(folder)).eval(), architecture)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)

    folder = publish(PublishConfig(source, tmp_path / "merged", model=model, format="merged"))
    merged = auto(architecture).from_pretrained(folder).eval()
    torch.testing.assert_close(outputs_of(merged, architecture), expected, atol=1e-4, rtol=0)
    if architecture in DECODERS:
        assert merged.config.use_cache
    assert not any("lora" in name for name, _ in merged.named_modules())

    for published in (tmp_path / "peft", tmp_path / "merged"):
        assert (published / "head.safetensors").exists() == (architecture == "bert")
        assert not (published / "state.json").exists()
        card = (published / "README.md").read_text()
        assert re.search(r"\| base model sha256 +\| [0-9a-f]{64} \|", card)
        for path in published.iterdir():
            # Only the field in which PEFT expects a path has one.
            has_path = path.name == "adapter_config.json"
            assert (str(saved).encode() in path.read_bytes()) == has_path, path
    from transformers import AutoTokenizer

    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) > 10


def run(program: Path, inputs: list[Any]) -> Any:
    from server_export.check.engine import bind_method

    (output,) = bind_method(program / "program.pte", "forward", inputs)()
    return output


def manifest_of(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return manifest


def test_an_encoder_program_returns_class_scores(saved: Path, tmp_path: Path) -> None:
    folder = publish(
        PublishConfig(
            saved / "bert-trained",
            tmp_path / "program",
            model=str(saved / "bert"),
            format="program",
            sequence_length=LENGTH,
        )
    )
    tokens, mask = rows()
    tokens = torch.where(mask.bool(), tokens, 0)
    with torch.no_grad():
        states = merged_model(saved, "bert")(input_ids=tokens, attention_mask=mask).last_hidden_state
    pooled = (states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    expected = pooled @ torch.from_numpy(HEAD["weight"]).T + torch.from_numpy(HEAD["bias"])
    for row in range(2):
        actual = run(folder, [tokens[row : row + 1], mask[row : row + 1]])
        torch.testing.assert_close(actual[0], expected[row], atol=1e-4, rtol=0)
    manifest = manifest_of(folder)
    assert manifest["inputs"][1] == {"name": "attention_mask", "dtype": "int64", "shape": [1, LENGTH]}
    assert manifest["outputs"] == [{"name": "scores", "dtype": "float32", "shape": [1, 3]}]
    for name, entry in manifest["files"].items():
        assert file_sha256(folder / name) == entry["sha256"]
    assert {"program.pte", "README.md", "tokenizer/tokenizer.json"} <= set(manifest["files"])


@pytest.mark.whole
def test_a_quantized_program_keeps_the_adapter_separate(saved: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"format": "program", "sequence_length": LENGTH, "quantize": "8da4w"}
    settings["model"] = str(saved / "bert")
    folder = publish(PublishConfig(saved / "bert-trained", tmp_path / "program", **settings))
    tokens, mask = rows()
    with torch.no_grad():
        states = merged_model(saved, "bert")(input_ids=tokens[:1], attention_mask=mask[:1]).last_hidden_state
    expected = states.mean(1) @ torch.from_numpy(HEAD["weight"]).T + torch.from_numpy(HEAD["bias"])
    actual = run(folder, [tokens[:1], mask[:1]])
    assert torch.corrcoef(torch.cat([actual, expected]))[0, 1] > 0.95
    manifest = manifest_of(folder)
    assert manifest["quantization"]["scheme"] == "8da4w" and not manifest["lora"]["merged"]
    assert 0.01 < manifest["verification"]["float_difference"] < 0.5


def test_a_decoder_is_published_as_llm_and_not_as_program(saved: Path, tmp_path: Path) -> None:
    refused(
        BundleError,
        "program-of-decoder",
        source=saved / "llama-trained",
        out=tmp_path / "out",
        model=str(saved / "llama"),
        format="program",
    )
    assert not (tmp_path / "out").exists()


def refused(error: type[PrgeError], code: str, containing: str = "", **settings: Any) -> Any:
    with raises(error, code, containing=containing) as caught:
        publish(PublishConfig(**settings))
    assert caught.value.remedy or isinstance(caught.value, ConfigError)
    return caught.value


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"seed": 9}, "SHA-256"),
        ({"num_hidden_layers": 1}, "parameters"),
        ({"tie_word_embeddings": False}, "parameters"),
    ],
)
def test_another_base_model_is_refused(
    trained: Path, bundle: Bundle, tmp_path: Path, changes: dict[str, Any], shown: str
) -> None:
    other = save_model(tmp_path / "other", "llama", **changes)
    for form in ("peft", "merged"):
        refused(
            BundleError,
            "another-base",
            shown,
            source=trained,
            out=tmp_path / "out",
            bundle=bundle.folder,
            model=str(other),
            format=form,
        )
    assert not (tmp_path / "out").exists()


def test_a_base_model_of_another_shape_is_refused_without_a_bundle(saved: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", "llama", hidden_size=32)
    error = refused(
        BundleError,
        "another-base",
        source=saved / "llama-trained",
        out=tmp_path / "out",
        model=str(other),
    )
    assert "q_proj has a weight [32, 32], the adapter is for [64, 64]" in str(error)


@pytest.mark.parametrize("model", ["gone", "/nowhere/model"])
def test_a_missing_base_model_is_refused(
    trained: Path, bundle: Bundle, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    error = refused(
        BundleError,
        "base-not-loadable",
        source=trained,
        out=tmp_path / "out",
        bundle=bundle.folder,
        model=str(tmp_path / model) if model == "gone" else model,
        format="merged",
    )
    assert "--model" in error.remedy


def make_run(folder: Path, bundle: Bundle, trained: Path, finished: bool = True) -> Path:
    """Write the files of a run folder that publishing reads."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "journal.jsonl").write_text("")
    write_settings(folder / "config.yaml", json.dumps({"bundle": str(bundle.folder)}) + "\n")
    facts = {
        "run": {"status": "completed", "out": str(folder)},
        "train": {"steps": 7, "dev": {"accuracy": 0.75}},
    }
    (folder / "run.json").write_text(json.dumps(facts))
    adapter = read_peft(trained, bundle.chain.modules)
    for name in ("checkpoints/step-000003", *(["final"] if finished else [])):
        write_peft(folder / name, adapter, bundle.adapter)
    return folder


def test_a_run_is_published_with_its_own_bundle_and_facts(
    bundle: Bundle, trained: Path, tmp_path: Path
) -> None:
    run_folder = make_run(tmp_path / "run", bundle, trained)
    for source in (run_folder, run_folder / "final", run_folder / "checkpoints/step-000003"):
        assert find_run(find_adapter(source)) == run_folder
    folder = publish(PublishConfig(run_folder, tmp_path / "out"))
    card = (folder / "README.md").read_text()
    assert bundle.sha256 in card
    for name, value in (("status", "completed"), ("steps", "7"), ("dev accuracy", "0.75")):
        assert re.search(rf"\| {name} +\| {value} \|", card)
    assert str(tmp_path) not in card
    config = json.loads((folder / "adapter_config.json").read_text())
    # A path that loads on this machine, and the hash of its content.
    assert Path(config["base_model_name_or_path"]).is_dir()
    assert config["revision"] == f"sha256:{bundle.manifest['model']['sha256']}"
    assert config["task_type"] == "CAUSAL_LM"


def test_a_bundle_named_by_a_foreign_run_is_not_used(bundle: Bundle, trained: Path, tmp_path: Path) -> None:
    run_folder = make_run(tmp_path / "run", bundle, trained)
    (run_folder / "config.yaml").write_text(json.dumps({"bundle": str(bundle.folder)}))
    with raises(RunError, "path-outside") as caught:
        publish(PublishConfig(run_folder, tmp_path / "out"))
    assert f"--bundle {bundle.folder}" in caught.value.remedy and not (tmp_path / "out").exists()
    assert publish(PublishConfig(run_folder, tmp_path / "out", bundle=bundle.folder)).is_dir()


def test_targets_of_links_are_not_published(bundle: Bundle, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    folder = tmp_path / "theirs"
    shutil.copytree(trained, folder)
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with raises(RunError, "link-outside", containing="chat_template.jinja"):
        publish(PublishConfig(folder, tmp_path / "out", bundle=bundle.folder))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [[], ["--model", "me/llama"]])
def test_a_hub_id_is_loaded_at_the_recorded_commit(
    saved: Path,
    bundle: Bundle,
    trained: Path,
    tmp_path: Path,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_environment(monkeypatch, HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    commit, newer = "0123456789" * 4, "9876543210" * 4
    stored = tmp_path / "hub" / "models--me--llama"
    shutil.copytree(saved / "llama", stored / "snapshots" / commit)
    shutil.copytree(saved / "gpt2", stored / "snapshots" / newer)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(newer)
    shutil.copytree(bundle.folder, tmp_path / "bundle")
    manifest = read_manifest(tmp_path / "bundle")
    manifest["model"] |= {"name_or_path": "me/llama", "revision": commit, "sha256": None}
    write_manifest(tmp_path / "bundle", manifest)
    for form in ("peft", "merged"):
        command = ["publish", trained, "--bundle", "bundle", "--out", form, "--format", form, *arguments]
        prge(*command, cwd=tmp_path)
        assert "base_model: me/llama\n" in (tmp_path / form / "README.md").read_text().split("---")[1]
    assert json.loads((tmp_path / "peft/adapter_config.json").read_text())["revision"] == commit


def test_the_chat_template_is_published(saved: Path, bundle: Bundle, trained: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = (bundle.tokenizer / "chat_template.jinja").read_text()
    assert "Assistant:" in template
    adapter = publish(PublishConfig(trained, tmp_path / "peft", bundle=bundle.folder))
    assert (adapter / "chat_template.jinja").read_text() == template
    assert "Messages become text by `chat_template.jinja`" in (adapter / "README.md").read_text()
    # The adapter's folder has the template even without the bundle.
    model = str(saved / "llama")
    merged = publish(PublishConfig(adapter, tmp_path / "merged", model=model, format="merged"))
    assert AutoTokenizer.from_pretrained(merged).chat_template == template
    assert "chat_template.jinja" in (merged / "README.md").read_text()


def test_a_run_without_a_result_is_refused_with_a_remedy(
    bundle: Bundle, trained: Path, tmp_path: Path
) -> None:
    run_folder = make_run(tmp_path / "run", bundle, trained, finished=False)
    error = refused(RunError, "run-unfinished", source=run_folder, out=tmp_path / "out")
    assert "prge run --resume" in error.remedy
    publish(PublishConfig(run_folder / "checkpoints/step-000003", tmp_path / "out"))


def test_nothing_is_replaced_without_overwrite(bundle: Bundle, trained: Path, tmp_path: Path) -> None:
    settings = PublishConfig(trained, tmp_path / "out", bundle.folder)
    publish(settings)
    before = sorted((tmp_path / "out").iterdir())
    with raises(RunError, "folder-exists", containing=str(tmp_path / "out")):
        publish(settings)
    publish(replace(settings, overwrite=True))
    assert sorted((tmp_path / "out").iterdir()) == before
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/letter.txt").write_text("x")
    with raises(RunError, "out-not-published", containing=str(tmp_path / "precious")):
        publish(replace(settings, out=tmp_path / "precious", overwrite=True))
    assert (tmp_path / "precious/letter.txt").exists()


def test_a_full_disk_leaves_nothing(saved: Path, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("128k")
    refused(
        RunError,
        "write-failed",
        source=saved / "llama-trained",
        out=disk / "out",
        format="merged",
        model=str(saved / "llama"),
    )
    assert list(disk.iterdir()) == []


def test_the_output_must_be_outside_of_the_inputs(bundle: Bundle, trained: Path, tmp_path: Path) -> None:
    run_folder = make_run(tmp_path / "run", bundle, trained)
    for out in (run_folder, run_folder / "final", run_folder / "final/sub", bundle.folder / "x", tmp_path):
        refused(RunError, "out-within-input", source=run_folder, out=out, overwrite=True)
    publish(PublishConfig(run_folder, run_folder / "published"))


def test_settings_of_another_format_are_refused() -> None:
    with raises(ConfigError, "settings-unusable") as caught:
        PublishConfig(Path("a"), Path("b"), quantize="8da4w", sequence_length=0)
    assert len(caught.value.problems) == 3


@pytest.fixture(scope="session")
def rounded(made_once: FolderBuilder) -> Path:
    """Return a folder with a model with tied embeddings, its int4 bundle and an adapter per architecture."""

    def fill(folder: Path) -> None:
        from server_export.export import ExportConfig, export

        for architecture in ("llama", "gpt2"):
            model = str(save_model(folder / architecture, architecture, **TIED[architecture]))
            out = folder / f"{architecture}-bundle"
            bundle = open_bundle(export(ExportConfig(model=model, out=out, **INT4[architecture])))
            trained_folder(folder / f"{architecture}-trained", bundle.chain.modules, bundle.adapter)

    return made_once("publish-rounded", fill)


TIED: dict[str, dict[str, Any]] = {"llama": {"tie_word_embeddings": True}, "gpt2": {}}
INT4: dict[str, dict[str, Any]] = {
    architecture: {
        "quantize": "8da4w",
        "rounding": rounding,
        "rank": RANK,
        "sequence_length": LENGTH,
        "roles": ["forward"],
    }
    for architecture, rounding in (("llama", "nearest"), ("gpt2", "gptq"))
}


def constants_of(export_again: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> dict[bytes, Any]:
    """Return the weights f32 whose codes an export writes, by the bytes of their shape and values."""
    from server_export.quantize.frozen import FrozenTensors, codes_name, scale_name

    weights: list[Any] = []
    tensors = FrozenTensors.tensors

    def record_tensors(self: Any, *given: Any) -> Any:
        named = dict(tensors(self, *given))
        for codes, scale in ((named[codes_name(name)], named[scale_name(name)]) for name in self.layers):
            groups = codes.float().view(*scale.shape, -1) * scale.float().unsqueeze(2)
            weights.append(groups.view(codes.shape))
        return iter(named.items())

    monkeypatch.setattr(FrozenTensors, "tensors", record_tensors)
    export_again()
    return {str(tuple(each.shape)).encode() + each.numpy().tobytes(): each for each in weights}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_merged_model_has_the_weights_of_the_training(
    rounded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """With a zero adapter, all weights equal the dequantized codes of the export exactly."""
    from server_export.export import ExportConfig, export

    bundle = open_bundle(rounded / f"{architecture}-bundle")
    model = str(rounded / architecture)
    settings = {"model": model, "format": "merged", "bundle": bundle.folder}
    folder = publish(PublishConfig(bundle.adapter, tmp_path / "zeros", **settings))
    zeros = auto(architecture).from_pretrained(folder).eval()

    def again() -> None:
        export(ExportConfig(model=model, out=tmp_path / "again", **INT4[architecture]))

    written = constants_of(again, monkeypatch)
    layers = {
        name: module.weight.detach().t().contiguous()
        if type(module).__name__ == "Conv1D"
        else module.weight.detach()
        for name, module in zeros.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D")
    }
    missing = [
        name
        for name, weight in layers.items()
        if str(tuple(weight.shape)).encode() + weight.contiguous().numpy().tobytes() not in written
    ]
    assert layers and not missing
    assert zeros.lm_head.weight is not zeros.get_input_embeddings().weight

    # With a trained adapter, scores differ from the engine's only by its rounded activations.
    from device_runner.engines.opening import open_engine
    from prge.objectives.scoring import score

    source = rounded / f"{architecture}-trained"
    adapter = read_peft(source, bundle.chain.modules)
    examples = [completion(row, tokens, 3) for row, tokens in enumerate(rows()[0].tolist(), 1)]
    engine = open_engine(bundle, threads=1).engine
    expected = np.concatenate(score(engine, adapter, examples).scores)
    scores = {}
    for weights in ("trained", "original"):
        folder = publish(
            PublishConfig(source, tmp_path / weights, weights=weights, **settings)  # type: ignore[arg-type]
        )
        merged = auto(architecture).from_pretrained(folder).eval()
        with torch.no_grad():
            logprobs = torch.log_softmax(merged(input_ids=rows()[0]).logits, -1)
        at = logprobs[:, 2:-1].gather(-1, rows()[0][:, 3:, None])
        scores[weights] = at.mean((1, 2)).numpy()
        card = (folder / "README.md").read_text()
        assert "rounded to 8da4w" in card
        assert ("original weights, with which answers can differ" in card) == (weights == "original")
        assert ("rounded in the engine alone" in " ".join(card.split())) == (weights == "trained")
    distances = {name: float(np.abs(actual - expected).max()) for name, actual in scores.items()}
    assert distances["trained"] < 0.02 and distances["trained"] < distances["original"] / 2


def test_unquantized_weights_are_merged_unchanged(
    bundle: Bundle, trained: Path, saved: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"model": str(saved / "llama"), "bundle": bundle.folder, "format": "merged"}
    folders = [
        publish(PublishConfig(trained, tmp_path / weights, weights=weights, **settings))  # type: ignore[arg-type]
        for weights in ("trained", "original")
    ]
    assert len({file_sha256(folder / "model.safetensors") for folder in folders}) == 1
    assert "rounded" not in (folders[0] / "README.md").read_text()
    with raises(ConfigError, "settings-unusable", containing="weights is for the format merged"):
        PublishConfig(trained, tmp_path / "peft", weights="original")


def test_a_published_adapter_names_a_base_model_that_loads(
    bundle: Bundle, trained: Path, saved: Path, tmp_path: Path
) -> None:
    """The adapter names the base model by path and hash; an adapter for the Hub names no path."""
    from peft import AutoPeftModelForCausalLM

    settings: dict[str, Any] = {"model": str(saved / "llama"), "bundle": bundle.folder}
    folder = publish(PublishConfig(trained, tmp_path / "peft", **settings))
    model = AutoPeftModelForCausalLM.from_pretrained(str(folder)).eval()
    adapter = read_lora(trained)
    for name, lora_b in adapter.lora_b.items():
        layer = model.base_model.model.get_submodule(name)
        assert np.array_equal(layer.lora_B["default"].weight.detach().numpy(), lora_b)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str((saved / "llama").resolve())
    assert config["revision"] == f"sha256:{bundle.manifest['model']['sha256']}"
    # All verbs that accept the bundle's own adapter accept the published one.
    again = publish(PublishConfig(folder, tmp_path / "again", bundle=bundle.folder))
    assert (again / "adapter_config.json").read_bytes() == (folder / "adapter_config.json").read_bytes()
    # An adapter for the Hub names no path.
    pushed = publish(PublishConfig(trained, tmp_path / "pushed", **settings, push="me/adapter"))
    name = json.loads((pushed / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert name == f"llama@{config['revision']}"
    assert not any(str(saved).encode() in path.read_bytes() for path in pushed.iterdir())
