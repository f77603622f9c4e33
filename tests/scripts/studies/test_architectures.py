"""The study of architectures: tiny models of any type, some of them tried, and its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import architectures
import pytest

from prge.errors import PrgeError
from server_export.ir.decomposition import unknown_operators
from server_export.settings import ExportConfig
from server_export.source import open_source
from tests.compilers import needs_compiler
from tests.tiers import second_tier
from tests.tiny_types import LAYERS, family, make_tiny, text_types

# Operators of models' numeric computations without forward-mode derivative.
WITHOUT_DERIVATIVE = {
    "aten.fft_fftn.default",
    "aten.acos.default",
    "aten.conv1d.default",
    "aten.index.Tensor",
}
# One type of each sort; the study tries all types.
SORTS = (
    *("ernie4_5", "exaone4", "falcon_h1", "gemma3n_text", "gemma4_text", "glm4", "gpt_neox", "gptj"),
    *("granitemoe", "granitemoehybrid", "helium", "hunyuan_v1_dense", "dots1"),
)
FIGURES: dict[str, Any] = {
    "family": "decoder",
    "exported": True,
    "gradient_error": 1e-7,
    "tangent_error": 1e-6,
    "generates": True,
    "published": True,
    "code": None,
    "why_not": None,
    "defect": None,
    "only_graphs": None,
    "seconds": 20.0,
    "commit": "1234567",
}
RECORDED: dict[str, dict[str, Any]] = {
    "llama": FIGURES,
    "bert": {**FIGURES, "family": "encoder", "generates": None},
    "aria_text": {**dict.fromkeys(FIGURES), "family": "experts", "only_graphs": True},
    "bart": {
        **dict.fromkeys(FIGURES),
        "family": "encoder-decoder",
        "code": "encoder-decoder",
        "why_not": "it is | [an] (encoder-decoder)",
    },
    "dots": {**dict.fromkeys(FIGURES), "family": "decoder", "defect": "KeyError: 'a' (tracing.py:7)"},
    "blt": {**dict.fromkeys(FIGURES), "family": "", "code": "not-made-tiny", "why_not": "no layers"},
    "skewed": {**FIGURES, "gradient_error": 1e-3},
}
PAGE = """\
| family | works | only graphs | wrong | refused | defect | not made |
| --- | --- | --- | --- | --- | --- | --- |
| decoder | 1 | 0 | 1 | 0 | 1 | 0 |
| encoder | 1 | 0 | 0 | 0 | 0 | 0 |
| encoder-decoder | 0 | 0 | 0 | 1 | 0 | 0 |
| experts | 0 | 1 | 0 | 0 | 0 | 0 |
| not made | 0 | 0 | 0 | 0 | 0 | 1 |

## Works

- **decoder**: llama
- **encoder**: bert

## Only graphs

- **experts**: aria_text

## Wrong

| type | family | code | why |
| --- | --- | --- | --- |
| skewed | decoder | - | gradient_error 0.001, tangent_error 1e-06, generates, published, 20.0 s |

## Refused

| type | family | code | why |
| --- | --- | --- | --- |
| bart | encoder-decoder | encoder-decoder | it is \\| [an] (encoder-decoder) |

## Defect

| type | family | code | why |
| --- | --- | --- | --- |
| dots | decoder | - | KeyError: 'a' (tracing.py:7) |

## Not made

| type | family | code | why |
| --- | --- | --- | --- |
| blt | - | not-made-tiny | no layers |
"""
DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize("model_type", ["llama", "bert", *second_tier("cohere2", "olmo3", "xlm-roberta")])
def test_a_model_is_made_tiny_by_the_names_of_its_configuration(model_type: str) -> None:
    model = make_tiny(model_type)
    assert model.config.hidden_size == 64
    assert LAYERS <= model.config.num_hidden_layers <= 2 * LAYERS
    assert family(model_type, model) == ("decoder" if text_types()[model_type] else "encoder")


@needs_compiler
@pytest.mark.whole
@pytest.mark.parametrize("model_type", ["arcee", "glm4", "electra", "esm", "youtu"])
def test_a_slice_of_the_sweep_works(model_type: str) -> None:
    result = architectures.try_type(model_type, "fp32", None)
    assert architectures.outcome({**dict.fromkeys(architectures.FIGURES), **result}) == "works", result


@pytest.mark.whole
@pytest.mark.parametrize("model_type", SORTS)
def test_a_model_computes_with_operators_that_have_a_derivative_or_is_refused(
    model_type: str, tmp_path: Path
) -> None:
    """A new operator of a later transformers version fails here by name."""
    try:
        make_tiny(model_type).save_pretrained(tmp_path)
    except ValueError:
        return
    try:
        chain = open_source(ExportConfig(str(tmp_path), tmp_path, rank=2)).chain("fp32", 48)
    except PrgeError:
        return
    graphs = [block_type.block.graph_module for number, block_type in chain.block_types.items() if number]
    assert {name for graph in graphs for name in unknown_operators(graph)} <= WITHOUT_DERIVATIVE


def test_families_are_those_of_what_a_model_computes() -> None:
    """Convolutions of ConvBERT and SqueezeBERT are no recurrence; RWKV has only its own attention."""
    families = {"convbert": "encoder", "squeezebert": "encoder", "rwkv": "recurrent", "mamba": "recurrent"}
    assert {name: family(name, make_tiny(name)) for name in families} == families


def test_outcomes_of_a_refusal_a_defect_and_a_wrong_result() -> None:
    outcomes = {name: architectures.outcome(figures) for name, figures in RECORDED.items()}
    assert outcomes == {
        "llama": "works",
        "bert": "works",
        "aria_text": "only graphs",
        "bart": "refused",
        "dots": "defect",
        "blt": "not made",
        "skewed": "wrong",
    }
    assert architectures.outcome({**FIGURES, "generates": False}) == "wrong"


def test_the_page_is_written_from_recorded_results() -> None:
    page = architectures.markdown("5.0", RECORDED)
    assert page.startswith("# Architectures\n") and "transformers 5.0" in page
    assert page.endswith(PAGE)


def test_a_type_that_is_tried_has_the_code_of_its_refusal_or_the_line_of_a_defect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = architectures.try_type("bart", "fp32", None)
    assert (result["family"], result["code"]) == ("encoder-decoder", "encoder-decoder")

    def check_bundle(*_: Any) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(architectures, "check_bundle", check_bundle)
    defect = architectures.try_type("llama", "fp32", None)["defect"]
    assert defect.startswith("KeyError: 'a defect' (test_architectures.py:")


def test_the_page_of_the_docs_is_that_of_its_results() -> None:
    results = json.loads((DOCS / "architectures.json").read_bytes())
    page = architectures.markdown(results["transformers"], results["types"])
    assert (DOCS / "architectures.md").read_text(encoding="utf-8") == page
