"""The study of architectures: tiny models of any type, a slice of them tried, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import architectures
import pytest

from prge.errors import PrgeError
from server_export.ir.plain import unknown_operators
from server_export.settings import ExportConfig
from server_export.source import open_source
from tests.compilers import needs_compiler
from tests.tiers import rest
from tests.tiny_types import LAYERS, family, make_tiny, text_types

# Operators that models compute numbers with, and that have no forward-mode derivative.
WITHOUT_DERIVATIVE = {
    "aten.fft_fftn.default",
    "aten.acos.default",
    "aten.conv1d.default",
    "aten.index.Tensor",
}
# Of each sort one: the study tries all types.
SORTS = (
    *("ernie4_5", "exaone4", "falcon_h1", "gemma3n_text", "gemma4_text", "glm4", "gpt_neox", "gptj"),
    *("granitemoe", "granitemoehybrid", "helium", "hunyuan_v1_dense", "dots1"),
)
FIGURES: dict[str, Any] = {
    "family": "decoder",
    "exported": True,
    "gradient_error": 1e-7,
    "tangent_error": 1e-6,
    "spoke": True,
    "published": True,
    "why_not": None,
    "seconds": 20.0,
}


@pytest.mark.parametrize("model_type", ["llama", "bert", *rest("cohere2", "olmo3", "xlm-roberta")])
def test_a_model_is_made_tiny_by_the_names_of_its_configuration(model_type: str) -> None:
    model = make_tiny(model_type)
    assert model.config.hidden_size == 64
    assert LAYERS <= model.config.num_hidden_layers <= 2 * LAYERS
    assert family(model_type, model) == ("decoder" if text_types()[model_type] else "encoder")


@needs_compiler
@pytest.mark.whole
@pytest.mark.parametrize("model_type", ["arcee", "glm4", "electra", "esm", "youtu"])
def test_a_slice_of_the_sweep_works(model_type: str) -> None:
    found = architectures.tried(model_type, "fp32", None)
    assert architectures.works({**dict.fromkeys(architectures.FIGURES), **found}), found


@pytest.mark.whole
@pytest.mark.parametrize("model_type", SORTS)
def test_a_model_computes_with_operators_that_have_a_derivative_or_is_refused(
    model_type: str, tmp_path: Path
) -> None:
    """One that a later transformers brings shows here with its name."""
    try:
        make_tiny(model_type).save_pretrained(tmp_path)
    except ValueError:
        return
    try:
        chain = open_source(ExportConfig(str(tmp_path), tmp_path, rank=2)).chain("fp32", 48)
    except PrgeError:
        return
    graphs = [kind.block.graph_module for number, kind in chain.kinds.items() if number]
    assert {name for graph in graphs for name in unknown_operators(graph)} <= WITHOUT_DERIVATIVE


def test_what_is_wrong_is_told_apart_from_what_is_refused() -> None:
    assert architectures.outcome(FIGURES) == "works"
    assert architectures.outcome({**FIGURES, "gradient_error": 1e-3}) == "wrong"
    assert architectures.outcome({**FIGURES, "spoke": False}) == "wrong"
    assert architectures.outcome({**FIGURES, "exported": False, "why_not": "too large"}) == "refused"
    assert architectures.outcome({**FIGURES, "why_not": "traceback: KeyError"}) == "traceback"


def test_the_table_has_a_sentence_for_what_does_not_work() -> None:
    known = {"good": FIGURES, "bad": {**FIGURES, "exported": False, "why_not": "it is | too large"}}
    page = architectures.markdown("5.0", known)
    assert "transformers 5.0" in page
    assert "**decoder** that work: good." in page
    assert "| bad | decoder | it is \\| too large |" in page
