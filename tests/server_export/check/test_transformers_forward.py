"""A model that fails in transformers itself is refused; defects of prge keep their traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prge.errors import DataError, Refusal
from server_export import estimate
from server_export.check import transformers_forward
from server_export.check.transformers_forward import refuse_if_transformers_fails, transformers_failure
from server_export.checkpoint.loading import load_meta_model
from tests.refusals import raises
from tests.tiny_models import save_model
from tests.tiny_types import make_tiny


def save_broken(folder: Path) -> Path:
    """Save a Zamba 2 whose Mamba layers are 3 times as wide as the model, with heads for twice its width."""
    make_tiny("zamba2").save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "mamba_expand": 3}))
    return folder


def test_an_estimate_of_a_model_that_fails_in_transformers_is_refused(tmp_path: Path) -> None:
    with raises(Refusal, "model-fails-in-transformers", containing="Zamba2ForCausalLM raises RuntimeError"):
        estimate.main(["--model", str(save_broken(tmp_path))])


@pytest.mark.parametrize("max_parameters", [transformers_forward.MAX_PARAMETERS, 0], ids=["values", "shapes"])
def test_a_model_runs_with_random_weights_or_if_it_is_large_with_shapes(
    max_parameters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_forward, "MAX_PARAMETERS", max_parameters)
    broken = load_meta_model(str(save_broken(tmp_path / "broken")))
    assert isinstance(transformers_failure(type(broken.model), broken.config), RuntimeError)
    for name in ("llama", "bert"):
        whole = load_meta_model(str(save_model(tmp_path / name, name)))
        assert transformers_failure(type(whole.model), whole.config) is None


def test_a_model_that_needs_values_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class NeedsValues:
        def __init__(self, config: Any) -> None:
            pass

        def eval(self) -> NeedsValues:
            return self

        def named_parameters(self) -> list[Any]:
            return []

        named_modules = named_parameters
        config = None

        def __call__(self, input_ids: Any) -> int:
            return int(input_ids.max())

    config = make_tiny("llama").config
    assert transformers_failure(NeedsValues, config) is None
    monkeypatch.setattr(transformers_forward, "MAX_PARAMETERS", -1)
    assert transformers_failure(NeedsValues, config) is None


@pytest.mark.parametrize("error", [KeyError("a defect"), DataError("rows", ["row 3"]), MemoryError()])
def test_other_exceptions_pass_where_transformers_runs_the_model(error: Exception, tmp_path: Path) -> None:
    loaded = load_meta_model(str(save_model(tmp_path, "llama")))
    with pytest.raises(type(error)) as caught, refuse_if_transformers_fails(loaded):
        raise error
    assert caught.value is error
