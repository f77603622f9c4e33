"""A published program generates the same text in ExecuTorch's runner as the merged model in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from executorch.extension.llm import runner

from prge.errors import BundleError, ConfigError
from server_export.checkpoint.loading import prepare_model
from server_export.publish import main
from server_export.publishing import llm
from server_export.publishing.llm import LlmSpec, bos_and_eos_ids, build_llm
from tests.refusals import raises, refusal
from tests.server_export.adapters import trained_adapter
from tests.tiny_models import DECODERS, SHALLOW, WINDOW, make_model, make_tokenizer, save_model

torch.set_num_threads(1)
NEW = 24
DEMO = Path(__file__).parents[3] / "server_export/demo_data/model"


def published(base: Path, root: Path, *settings: str) -> Path:
    """Publish a trained model as `llm` and `merged` in a folder, and return the folder of `llm`."""
    trained = trained_adapter(base, root / "trained", size=0.02)
    for form, more in (("merged", ()), ("llm", settings)):
        flags = ["--model", str(base), "--format", form, "--out", str(root / form), *more]
        assert main([str(trained), *flags]) == 0
    return root / "llm"


def in_runner(folder: Path, prompt: str) -> str:
    manifest = json.loads((folder / "manifest.json").read_text())
    chunks: list[str] = []
    generation = runner.GenerationConfig(
        max_new_tokens=NEW, temperature=0.0, echo=False, num_bos=manifest["tokenizer"]["num_bos"]
    )
    stock = runner.TextLLMRunner(str(folder / "program.pte"), str(folder / "tokenizer.json"))
    stock.generate(prompt, generation, chunks.append)
    return "".join(chunks)


def in_transformers(folder: Path, prompt: str) -> str:
    """Return the completion, decoded together with the prompt, including the last token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0]
    text: str = tokenizer.decode(tokens)
    return text.removeprefix(tokenizer.decode(inputs["input_ids"][0]))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(DEMO, tmp_path_factory.mktemp("demo"))


def test_the_stock_runner_generates_the_same_text_as_transformers(demo: Path) -> None:
    prompts = ("Once upon a time", "The little dog was very happy, because it was a sunny day. " * 3)
    for prompt in prompts:
        text = in_runner(demo, prompt)
        assert text == in_transformers(demo.with_name("merged"), prompt)
        assert text != in_transformers(DEMO, prompt), "the adapter changes nothing"


def test_the_folder_has_all_files_that_an_app_needs(demo: Path) -> None:
    manifest = json.loads((demo / "manifest.json").read_text())
    assert set(manifest["files"]) == {"program.pte", "tokenizer.json", "README.md"}
    assert manifest["runner"] == {
        "get_max_seq_len": 256,
        "get_max_context_len": 256,
        "get_vocab_size": 1024,
        "use_kv_cache": True,
        "use_sdpa_with_kv_cache": False,
        "enable_dynamic_shape": True,
        "get_bos_id": 1,
        "get_eos_ids": [2],
    }
    assert manifest["type"] == "llm" and manifest["lora"]["merged"]
    assert manifest["tokenizer"] == {"num_bos": 1, "different_ids": 0}
    assert "GenerationConfig(num_bos=1" in (demo / "README.md").read_text()


@pytest.mark.whole
@pytest.mark.parametrize("scheme", ["fp32", "8da4w"])
def test_a_tokenizer_of_sentencepiece_keeps_its_spaces(shared: Path, tmp_path: Path, scheme: str) -> None:
    folder = published(shared / "models/babyllama", tmp_path, "--quantize", scheme)
    prompt = "Once upon a time"
    text = in_runner(folder, prompt)
    assert " " in text.strip()
    if scheme == "fp32":
        assert text == in_transformers(tmp_path / "merged", prompt)
    else:
        # In int4, so small a model generates another story, but the program is close to the quantized model.
        checks = json.loads((folder / "manifest.json").read_text())["verification"]
        assert checks["quantized_difference"] < 0.02 and checks["float_difference"] < 0.3


@pytest.mark.whole
@pytest.mark.parametrize("architecture", sorted(DECODERS.keys() - {"opt"}))
def test_architectures_and_windows(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are longer than the attention window, and are computed in several calls."""
    monkeypatch.setattr(llm, "MAX_TOKENS_PER_CALL", 8)
    model = make_model(architecture, **SHALLOW[architecture])
    spec = LlmSpec(4 * WINDOW, "fp32", None, ())
    built = build_llm(tmp_path, prepare_model(model, architecture, True), spec)
    assert built.checks["max_absolute_difference"] < built.checks["tolerance"] / 10
    assert built.facts["runner"]["get_max_seq_len"] == 8 and "get_eos_ids" not in built.facts["runner"]


@pytest.mark.whole
def test_positions_that_depend_on_data_are_refused(tmp_path: Path) -> None:
    """transformers computes OPT's positions by a sum over the mask."""
    with refusal("not-lowered"):
        build_llm(tmp_path, prepare_model(make_model("opt"), "opt", True), LlmSpec(8, "fp32", None, ()))


def test_all_tokens_that_end_a_text_are_listed() -> None:
    model, tokenizer = make_model("llama"), make_tokenizer()
    assert bos_and_eos_ids(model, tokenizer) == (1, (2,))
    model.generation_config.eos_token_id = [5, 2, 7]
    assert bos_and_eos_ids(model, tokenizer) == (1, (5, 2, 7))
    tokenizer.bos_token = tokenizer.eos_token = None
    assert bos_and_eos_ids(model, tokenizer) == (1, (5, 2, 7))
    assert bos_and_eos_ids(model, tokenizer, [3, 7]) == (1, (5, 2, 7, 3))
    model.generation_config.bos_token_id = model.generation_config.eos_token_id = None
    assert bos_and_eos_ids(model, tokenizer) == (None, ())


def test_a_cache_of_a_few_tokens_is_refused() -> None:
    with raises(ConfigError, "sequence-too-short", containing="sequence_length is 6"):
        LlmSpec(6, "fp32", None, ())


def test_an_encoder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from prge.cli.main import main as prge

    base = save_model(tmp_path / "bert", "bert")
    trained = trained_adapter(base, tmp_path / "trained")
    flags = ["--model", str(base), "--format", "llm", "--out", str(tmp_path / "out")]
    assert prge(["publish", str(trained), *flags]) == 2
    assert "it is an encoder" in capsys.readouterr().err


def test_a_model_with_a_recurrence_is_refused() -> None:
    from server_export.checkpoint.loading import LoadedModel
    from server_export.publishing.llm import check_can_generate

    with raises(BundleError, "llm-of-recurrence"):
        check_can_generate(LoadedModel(make_model("lfm2"), "model", None, is_decoder=True))
    check_can_generate(LoadedModel(make_model("llama"), "model", None, is_decoder=True))
