"""Methods for shorter rows answer what the longest answers, from the same weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prge.estimators import Step

pytest.importorskip("executorch")

import torch

from device_runner.engines.executorch_engine import ExecutorchEngine
from device_runner.engines.length_engine import LengthEngine
from prge.adapter import Adapter
from prge.bundle import Bundle, open_bundle
from prge.differences import Antithetic, Differences
from prge.engine import Engine
from prge.errors import BundleError, ConfigError
from prge.evaluation import pooled_states, score
from prge.examples import Example, make_batch
from prge.head import Head
from prge.tangents import Tangents
from server_export.check import verification
from server_export.check.verification import lengthened
from server_export.export import export
from server_export.model.program import build_program, example_inputs
from tests.rows import choice, classified, completion
from tests.server_export.programs import build, make_export_config
from tests.tiny_models import ARCHITECTURES, LENGTH, SHALLOW, save_model

torch.set_num_threads(1)

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "stack": ("llama", {}),
    "tangent encoder": ("bert", {"estimator": "tangent", "score_batch_size": 4}),
    "quantized": ("gemma3", {"quantize": "8da4w"}),
}
SHORT = 5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """A bundle of each kind, exported when it is first asked for."""

    @lru_cache
    def make(kind: str) -> Bundle:
        architecture, changes = KINDS[kind]
        folder: Path = tmp_path_factory.mktemp(kind)
        model = save_model(folder / "model", architecture, **SHALLOW[architecture])
        config = make_export_config(str(model), folder / "bundle", lengths=[SHORT], **changes)
        return open_bundle(export(config))

    return make


def engine(bundle: Bundle, method: str, length: int | None = None) -> Engine:
    """All lengths of a method, or one alone."""
    return LengthEngine(
        [
            ExecutorchEngine.load(bundle, check=False, method=name)
            for name, contract in bundle.variants(method).items()
            if length in (None, contract.sequence_length)
        ]
    )


def random_adapter(bundle: Bundle) -> Adapter:
    adapter = Adapter.zeros(bundle.contract.modules)
    adapter.values[:] = np.random.default_rng(0).normal(size=adapter.size) * 0.05
    return adapter


def rows(bundle: Bundle) -> list[Example]:
    """Rows of three to five tokens, and longer ones."""
    random = np.random.default_rng(1)
    lengths = [3, 5, LENGTH, 4, 5, 7, 3, 3]
    drawn = [random.integers(3, 128, length).tolist() for length in lengths]
    if bundle.contract.is_encoder:
        return [classified(row, tokens, 2, row % 2) for row, tokens in enumerate(drawn, 1)]
    return [
        choice(row, tokens, [5, 9], row % 2) if row % 3 else completion(row, tokens, len(tokens) - 2)
        for row, tokens in enumerate(drawn, 1)
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_answers_short_rows_the_same(architecture: str) -> None:
    """Positions and rotary tables of the longest rows begin with those of the shorter."""
    built = build(architecture, SHALLOW[architecture], target_modules="all-linear")
    short = built.contract.shortened(SHORT)
    inputs = example_inputs(short, lora_b_scale=0.1)
    with torch.no_grad():
        found = built.module(*inputs)
        expected = built.module(*lengthened(inputs, short, built.contract))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.export
@pytest.mark.parametrize("kind", ["stack", "tangent encoder"])
def test_scalars_are_those_of_the_longest(made: Callable[[str], Bundle], kind: str) -> None:
    bundle = made(kind)
    contract = bundle.contract
    adapter, examples = random_adapter(bundle), rows(bundle)
    head = None
    if contract.is_encoder:
        head = Head(2, contract.width)
        head.values[:] = np.random.default_rng(2).normal(size=head.size) * 0.1
    estimator = Tangents() if contract.is_tangent else Differences(Antithetic(3, 0.05))
    short, fixed = engine(bundle, bundle.step_method), engine(bundle, bundle.step_method, LENGTH)
    assert short.contract == fixed.contract == contract
    for start in range(0, len(examples), 2):
        batch = make_batch(examples[start : start + 2], contract)
        found, expected = (
            estimator.measure(each, Step(adapter, [batch], 7, start, head)).scalars for each in (short, fixed)
        )
        # A difference divides the last bits of a loss by its step.
        np.testing.assert_allclose(found, expected, atol=1e-6 if contract.is_tangent else 1e-4)
        assert np.abs(expected).max() > 1e-3


@pytest.mark.export
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_longest(made: Callable[[str], Bundle], kind: str) -> None:
    bundle = made(kind)
    adapter, examples = random_adapter(bundle), rows(bundle)
    short, fixed = engine(bundle, bundle.score_method), engine(bundle, bundle.score_method, LENGTH)
    if bundle.contract.is_encoder:
        states = [pooled_states(each, adapter, examples) for each in (short, fixed)]
        np.testing.assert_allclose(*states, atol=1e-5)
        return
    found, expected = (score(each, adapter, examples).losses for each in (short, fixed))
    np.testing.assert_allclose(found, expected, atol=0.2 if kind == "quantized" else 1e-5)


@pytest.mark.export
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_stored_once_and_the_manifest_lists_the_lengths(
    made: Callable[[str], Bundle], kind: str
) -> None:
    bundle = made(kind)
    assert bundle.lengths == (SHORT, LENGTH)
    for method in {bundle.step_method, bundle.score_method}:
        short, longest = bundle.variants(method).values()
        assert short == longest.shortened(SHORT)
    (block,) = bundle.manifest["lengths"]
    assert sorted(block["lowering"]) == sorted({f"{bundle.step_method}_5", f"{bundle.score_method}_5"})
    parameters = bundle.manifest["model"]["parameters"]
    stored = bundle.manifest["lowering"]["constant_bytes"]
    contract = bundle.contract
    width = contract.modules[0].out_features // 4
    # Queries and keys are turned by a matrix for every position, of either length.
    rotations = 2 * 4 * (SHORT + LENGTH) * width * width
    # float32, or int4 with scales and an embedding in float32.
    assert stored - rotations < (1.3 * 4 if kind != "quantized" else 3) * parameters


@pytest.mark.export
def test_a_method_that_answers_otherwise_is_not_written(
    made: Callable[[str], Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = made("stack")
    config = make_export_config(str(bundle.folder.parent / "model"), tmp_path / "bundle", lengths=[SHORT])
    built = build_program(config)
    run_program = verification.run_program

    def wrong(path: Path, inputs: Any, method: str = "forward", *_: object) -> Any:
        (answer,) = run_program(path, inputs, method)
        return (answer + 0.01 * (method == "forward_5"),)

    monkeypatch.setattr(verification, "run_program", wrong)
    with pytest.raises(BundleError, match=r"differs from the model by 0\.01"):
        verification.verify(bundle.program, built, {})


def test_lengths_are_chosen_or_named() -> None:
    assert make_export_config("m").shorter_lengths == ()
    assert make_export_config("m", sequence_length=64, lengths=[]).shorter_lengths == (16, 32, 48)
    assert make_export_config("m", sequence_length=3, lengths=[]).shorter_lengths == (1, 2)
    assert make_export_config("m", sequence_length=64, lengths=[40, 8, 64, 8]).shorter_lengths == (8, 40)
    with pytest.raises(ConfigError, match="--lengths has 65, must be at most --sequence-length 64"):
        make_export_config("m", sequence_length=64, lengths=[65])
