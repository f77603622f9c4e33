"""Problems of tiny models for the tests of this folder, and engines that a driver would call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prge.files.adapter import Adapter
from prge.files.bundle import Bundle
from prge.files.chain import Block, Bounds, Chain, Interface, Kind
from prge.files.signatures import STACK
from prge.learning.examples import Example
from prge.model_spec import AdaptedModule
from server_export.adapter.layers import convert_conv1d
from server_export.adapter.start import StartAdapter, start_adapter
from server_export.bundle import write_adapter
from server_export.checkpoint.loading import prepare_model
from server_export.evidence.baselines.problem import ModelProblem
from server_export.evidence.baselines.settings import BaselineSettings
from server_export.oracle import TorchEngine, as_exported
from server_export.publishing.module_quantization import quantize
from server_export.quantize.quantization import dequantize_layers
from server_export.settings import ExportConfig
from tests.rows import bigram_completions, classified
from tests.tiny_models import DECODERS, LENGTH, VOCABULARY, WIDTH, make_model


def build_problem(
    folder: Path,
    architecture: str,
    train: Sequence[Example],
    lora_b: float = 0.0,
    model: Mapping[str, Any] | None = None,
    *,
    scheme: str = "fp32",
    pooling: str = "mean",
) -> tuple[ModelProblem, TorchEngine, Adapter]:
    """A problem on a tiny model, the same model as an engine, and the adapter that both start from.

    `lora_b` is the deviation of the adapter's values, `model` changes its transformers configuration.
    """
    loaded, again = (
        prepare_model(make_model(architecture, **(model or {})), architecture, architecture in DECODERS)
        for _ in range(2)
    )
    config = ExportConfig(model=architecture, out=folder, rank=4)
    start = start_adapter(config, loaded, convert_conv1d(loaded.model) > 0)
    generator = torch.Generator().manual_seed(1)
    for matrix in start.lora_b.values():
        matrix.copy_(torch.randn(matrix.shape, generator=generator) * lora_b)
    write_adapter(folder / "adapter", start)
    chain = _make_chain(start, pooling)
    bundle = Bundle(folder, {"quantization": {"scheme": scheme}, "model": {}}, chain)
    adapter = Adapter.zeros(chain.modules)
    for name, view in adapter.lora_b.items():
        view[...] = start.lora_b[name].numpy().T
    quantize(loaded.model, scheme)
    dequantize_layers(loaded.model)
    engine = TorchEngine(loaded.model, chain.model, start.scaled_lora_a(), pooling=pooling)
    as_exported(bundle, again)
    return ModelProblem(bundle, again, train, 0, 4, 7, head_folds=3), engine, adapter


def tiny_problem(folder: Path, architecture: str) -> ModelProblem:
    """A problem with rows that fit an architecture: eight that can be learnt, or classes for an encoder."""
    rows = bigram_completions(8) if architecture in DECODERS else classified_rows(24)
    return build_problem(folder, architecture, rows)[0]


def method_settings(method: Any, **changes: Any) -> BaselineSettings:
    """Settings of a method, with the defaults of its own ones."""
    return BaselineSettings(
        method=method, model="model", bundle=Path("bundle"), train=Path("train"), out=Path("out"), **changes
    )


def outputs(problem: ModelProblem) -> torch.Tensor:
    """What a problem's model answers to some tokens."""
    answers: torch.Tensor = problem.model(input_ids=torch.arange(4, 4 + 2 * LENGTH).reshape(2, LENGTH))[0]
    return answers.detach()


def values_of(problem: ModelProblem) -> dict[str, torch.Tensor]:
    """Copies of a model's parameters."""
    return {name: value.detach().clone() for name, value in problem.model.named_parameters()}


def changed(problem: ModelProblem, before: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of the parameters that are others than they were."""
    return {name for name, value in problem.model.named_parameters() if not value.equal(before[name])}


def _make_chain(start: StartAdapter, pooling: str) -> Chain:
    """What a manifest would say of the model, as far as a baseline reads it."""
    model, is_decoder = start.loaded.model, start.loaded.is_decoder
    layers = {name: model.get_submodule(name) for name in start.lora_a}
    modules = tuple(
        AdaptedModule(name, start.rank, layer.in_features, layer.out_features)
        for name, layer in layers.items()
    )
    inputs = ("state", *(f"lora_b.{number}" for number in range(len(modules))))
    kinds = [
        Kind("", {STACK: Interface(("tokens",), ("state",))}),
        Kind("", {STACK: Interface(inputs, ("state",))}),
    ]
    blocks = [Block(0, "0", (), ()), Block(1, "1", (), tuple(range(len(modules))))]
    if is_decoder:
        kinds.append(Kind("", {STACK: Interface(("state", "targets", "shift"), ("parts",))}))
        blocks.append(Block(2, "2", (), ()))
    return Chain(
        readout="logprobs" if is_decoder else "pooled",
        pooling=pooling,
        width=WIDTH,
        vocabulary_size=VOCABULARY,
        modules=modules,
        bounds=Bounds(tokens=LENGTH),
        tables=(),
        kinds=tuple(kinds),
        blocks=tuple(blocks),
    )


def classified_rows(count: int = 200) -> list[Example]:
    """Rows of two classes that can't be told apart, of different lengths."""
    random = np.random.default_rng(0)
    return [
        classified(
            row + 1, random.integers(3, 100, random.integers(3, 12)).tolist(), 2, int(random.integers(2))
        )
        for row in range(count)
    ]
