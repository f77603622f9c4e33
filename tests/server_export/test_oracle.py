"""The PyTorch engine agrees with transformers and PEFT, its derivatives are exact, and prge can train it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from prge.engine import Call, FloatArray, Target, TokenSequence
from prge.errors import EngineError
from prge.formats.adapter import Adapter, adapter_size
from prge.formats.journal import Journal
from prge.model_spec import AdaptedModule, ModelSpec, matrices
from prge.objectives.objective import Loss
from prge.training.recipe import Recipe
from prge.training.session import SessionData, SilentObserver, open_session
from prge.training.store import RunStore
from server_export.adapter.layers import convert_conv1d, default_target_modules, match_target_modules
from server_export.oracle import TorchEngine, direction_values, split_adapter_values
from tests.refusals import raises
from tests.rows import bigram_completions
from tests.templates import write_peft_folder
from tests.tiers import second_tier
from tests.tiny_models import DECODERS, VOCABULARY, WIDTH, make_model

RANK, SCALE = 2, 1.5
MODELS = ["llama", "llama lora", "bert", *second_tier("gpt2", "gemma3", "bert lora", "deberta-v2", "mamba")]


def make_engine(name: str, **settings: Any) -> TorchEngine:
    """Return the engine of a tiny model in double precision, with LoRA-FA or LoRA."""
    architecture, _, adapter = name.partition(" ")
    network = make_model(architecture)
    network.eval().requires_grad_(False)
    convert_conv1d(network)
    layers = {
        name: network.get_submodule(name)
        for name in match_target_modules(network, default_target_modules(network))
    }
    modules = tuple(
        AdaptedModule(name, RANK, layer.in_features, layer.out_features, trains_a=bool(adapter))
        for name, layer in layers.items()
    )
    readout = "logprobs" if architecture in DECODERS or architecture == "mamba" else "pooled"
    model = ModelSpec(readout, WIDTH, VOCABULARY, 16, modules)
    generator = torch.Generator().manual_seed(0)
    lora_a = {m.name: 0.3 * torch.randn(RANK, m.in_features, generator=generator) for m in modules}
    scales = dict.fromkeys(lora_a, SCALE)
    return TorchEngine(network, model, lora_a, scales=scales, **settings).to(torch.float64)


def make_call(engine: TorchEngine, copies: int = 1) -> Call:
    """Return a call with sequences of different lengths."""
    random, sequences = np.random.default_rng(0), []
    for length in (5, 11, 1):
        tokens = tuple(random.integers(4, VOCABULARY, length).tolist())
        positions = random.integers(0, length, 3).tolist()
        targets = tuple(Target(position, int(random.integers(VOCABULARY)), 1.0, 0) for position in positions)
        sequences.append(TokenSequence(tokens, () if engine.model.is_encoder else targets))
    size = copies, adapter_size(engine.model.modules)
    return Call(tuple(sequences), 0.3 * random.standard_normal(size, np.float32))


def make_directions(engine: TorchEngine, queries: int, sequences: int) -> Mapping[str, FloatArray]:
    random = np.random.default_rng(1)
    return {
        name: random.standard_normal((queries, sequences, width), np.float32)
        for matrix in matrices(engine.model.modules)
        for name, width in ((matrix.u, matrix.rank), (matrix.v, matrix.width))
    }


@pytest.mark.parametrize("name", MODELS)
def test_outputs_of_every_copy_equal_pefts(name: str) -> None:
    engine = make_engine(name)
    call, names = make_call(engine, copies=2), [module.name for module in engine.model.modules]
    actual = engine.forward(call)
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names), engine.network)
    for outputs, values in zip(actual, call.adapters, strict=True):
        trained = split_adapter_values(engine.model.modules, torch.from_numpy(values).double())
        for layer in names:
            adapted: Any = engine.network.get_submodule(layer)
            lora_a, scale = trained.get(f"lora_a.{layer}"), SCALE
            if lora_a is None:
                lora_a, scale = engine.lora_a[layer], 1.0
            adapted.lora_A["default"].weight.data = lora_a * scale
            adapted.lora_B["default"].weight.data = trained[f"lora_b.{layer}"].T.contiguous()
        np.testing.assert_allclose(engine.outputs(call.sequences).detach().numpy(), outputs, atol=1e-12)


# The norms of other architectures always compute in single precision.
@pytest.mark.parametrize("name", ["bert", *second_tier("bert lora", "gpt2")])
def test_directional_derivatives_are_limits_of_differences(name: str) -> None:
    engine = make_engine(name)
    call, epsilon = make_call(engine), 1e-5
    directions = make_directions(engine, 2, len(call.sequences))
    outputs, actual = engine.jvp(call, directions)
    np.testing.assert_allclose(outputs, engine.forward(call)[0], atol=1e-12)
    start = 0
    for number, sequence in enumerate(call.sequences):
        end = start + (1 if engine.model.is_encoder else len(sequence.targets))
        for query in range(2):
            along = direction_values(engine.model.modules, directions, query, number)
            step = epsilon * torch.from_numpy(along).double()
            values = torch.from_numpy(call.adapters[0]).double()
            above, below = (engine.outputs([sequence], values + sign * step) for sign in (1, -1))
            expected = ((above - below) / (2 * epsilon)).numpy()
            np.testing.assert_allclose(actual[query, start:end], expected, atol=1e-6, rtol=1e-5)
        start = end


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_along_a_direction_is_the_derivative_along_it(name: str) -> None:
    engine = make_engine(name)
    call = replace(make_call(engine), sequences=make_call(engine).sequences[1:2])
    directions = make_directions(engine, 1, 1)
    outputs, changes = engine.jvp(call, directions)
    actual, gradient = engine.vjp(call, np.cos)
    np.testing.assert_allclose(actual, outputs)
    along = direction_values(engine.model.modules, directions, 0, 0)
    assert float(gradient @ along) == pytest.approx(float((np.cos(outputs) * changes[0]).sum()), rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "bert", *second_tier("gpt2", "roberta", "opt")])
def test_padding_changes_nothing(name: str) -> None:
    alone, padded = make_engine(name), make_engine(name, padding=1)
    call = make_call(alone)
    (expected, gradient), (actual, other) = (engine.vjp(call, np.cos) for engine in (alone, padded))
    np.testing.assert_allclose(actual, expected, atol=1e-12)
    np.testing.assert_allclose(other, gradient, atol=1e-10)


def test_each_row_may_have_its_own_adapter() -> None:
    engine = make_engine("llama lora")
    values = torch.from_numpy(make_call(engine, copies=3).adapters).double()
    tokens = torch.arange(4, 16).reshape(3, 4)
    actual = engine.logits(tokens, values)
    alone = torch.cat([engine.logits(*pair) for pair in zip(tokens.split(1), values, strict=True)])
    torch.testing.assert_close(actual, alone)


def test_a_non_finite_output_makes_the_whole_gradient_nan() -> None:
    engine = make_engine("llama")
    call = make_call(engine)
    call.adapters[0, 3] = np.inf
    assert np.isnan(engine.vjp(call, np.cos)[1]).all()
    call.adapters[0, 3] = 0
    assert np.isfinite(engine.vjp(call, np.cos)[1]).all()


def test_a_gradient_of_another_shape_is_refused() -> None:
    engine = make_engine("llama")
    with raises(EngineError, "gradient-of-other-shape"):
        engine.vjp(make_call(engine), np.sum)


def test_a_session_trains_the_engine_like_torch(tmp_path: Path) -> None:
    """prge's loop, loss, estimator and optimizer equal autograd and PyTorch's Adam."""
    engine, rows = make_engine("llama").to(torch.float32), bigram_completions(8)
    recipe = Recipe(
        estimator="exact", optimizer="adam", adam_beta2=0.98, batch_size=8, steps=5, learning_rate=0.01,
        lr_scheduler_type="constant", warmup_steps=0, eval_steps=5,
    )  # fmt: skip
    start = Adapter(engine.model.modules, make_call(engine).adapters[0])
    (tmp_path / "run").mkdir()
    with Journal(tmp_path / "run" / "journal.jsonl") as journal:
        identity = dict.fromkeys(("bundle", "train", "dev", "task", "adapter", "tokens", "objective"), "")
        store = RunStore(
            folder=tmp_path / "run",
            journal=journal,
            template=write_peft_folder(tmp_path / "template", engine.model.modules),
            save_steps=0,
        )
        settings = {"type": "start", **identity, "settings": recipe.to_record()}
        store.begin(settings, "", date=None, may_change=False)
        session = open_session(recipe, engine, SessionData(train=rows, dev=rows, adapter=start), store)
        session.train(SilentObserver())
        losses = [record["loss"] for record in journal.records if record["type"] == "step"]

    values = torch.nn.Parameter(torch.from_numpy(start.values.copy()))
    optimizer, expected = torch.optim.Adam([values], lr=0.01, betas=(0.9, 0.98)), list[float]()
    sequences = [sequence for row in rows for sequence in row.sequences]
    for _ in range(5):
        outputs = engine.outputs(sequences, values)
        loss = Loss(rows, outputs.detach().numpy()[None])
        expected.append(float(loss.losses.mean()))
        optimizer.zero_grad()
        outputs.backward(torch.from_numpy(loss.grad_outputs / len(rows)).float())
        optimizer.step()
    assert losses == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(session.state.adapter.values, values.detach().numpy(), atol=1e-4)
    assert losses[-1] < losses[0]
    assert engine.seconds > 0
