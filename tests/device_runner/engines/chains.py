"""Exported chains, and the whole models that they must answer like, in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prge.contract import Contract
from safetensors.numpy import load_file
from torch.func import functional_call

from device_runner.engines.opening import Engines, open_engines
from device_runner.engines.speaking import open_speaker
from prge.engine import Array, Engine
from prge.files.bundle import Bundle, open_bundle
from prge.files.peft import write_peft
from prge.learning import vocabulary
from prge.model_spec import matrices
from tests.templates import random_adapter
from tests.tiny_models import save_model

TOKENS = 16
# More than a call computes at once.
POSITIONS = 224
Inputs = dict[str, Array]


def export_chain(
    folder: Path, architecture: str, layers: int = 0, positions: int = 0, **settings: Any
) -> Path:
    """A folder with `model` and `bundle`: a tiny model for rows of TOKENS, with all roles if none are given.

    It has two blocks, or so many layers of a Llama, and 64 positions, or so many. Its vocabulary is read in
    four pieces, as a large one is.
    """
    from server_export.export import ExportConfig, export

    changes = {"num_hidden_layers": layers} if layers else {}
    if positions:
        changes["n_positions" if architecture == "gpt2" else "max_position_embeddings"] = positions
    save_model(folder / "model", architecture, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "_LARGEST_PIECE", 2048)
        export(
            ExportConfig(
                model=str(folder / "model"),
                out=folder / "bundle",
                **{"rank": 2, "sequence_length": TOKENS, **settings},
            )
        )
    return folder


@dataclass
class Whole:
    """The model of a chain in PyTorch, which merges an adapter, given by names of inputs."""

    model: Any
    lora_a: dict[str, torch.Tensor]
    scale: float
    pooling: str

    @classmethod
    def of(cls, folder: Path, dtype: torch.dtype = torch.float32) -> Whole:
        """From what `export_chain` wrote."""
        from server_export.model.adapted import convert_conv1d

        bundle = open_bundle(folder / "bundle")
        model = text_model(folder, bundle)
        # GPT-2's layers keep their weights transposed.
        convert_conv1d(model)
        tensors = load_file(bundle.adapter / "adapter_model.safetensors")
        scale = bundle.manifest["lora"]["alpha"] / bundle.manifest["lora"]["rank"]
        lora_a = {
            module.name: torch.from_numpy(
                next(value for key, value in tensors.items() if f".{module.name}.lora_A" in f".{key}") * scale
            )
            for module in bundle.chain.modules
        }
        lora_a = {name: matrix.to(dtype) for name, matrix in lora_a.items()}
        return cls(model.requires_grad_(False).to(dtype), lora_a, scale, bundle.chain.pooling)

    def answers(self, given: Mapping[str, Array], adapter: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What some rows are answered with one adapter; it can be differentiated."""
        tokens = torch.from_numpy(given["tokens"])
        if "attention_mask" in given:
            # Row by row: some models answer no number where there is padding.
            lengths = given["attention_mask"].sum(1).tolist()
            found = [
                self._called(adapter, input_ids=row[None, :length])
                for row, length in zip(tokens, lengths, strict=True)
            ]
            states = [each.last_hidden_state[0] for each in found]
            return torch.stack([row[0] if self.pooling == "first" else row.mean(0) for row in states])
        logits = self.logits(tokens, adapter)
        rows = torch.arange(len(tokens))[:, None]
        at = torch.log_softmax(logits, -1)[rows, torch.from_numpy(given["positions"])]
        return at.gather(-1, torch.from_numpy(given["targets"])[..., None])[..., 0]

    def logits(self, tokens: torch.Tensor, adapter: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits [rows, tokens, vocabulary] with one adapter."""
        found: torch.Tensor = self._called(adapter, input_ids=tokens, use_cache=False).logits
        return found

    def states(self, tokens: torch.Tensor, adapter: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits, or an encoder's states, of tokens with one adapter."""
        return self.answered(self._called(adapter, input_ids=tokens))

    def _called(self, adapter: Mapping[str, torch.Tensor], **given: Any) -> Any:
        usual = torch.get_default_dtype()
        # Some models make numbers as they run.
        torch.set_default_dtype(self.model.dtype)
        try:
            return functional_call(self.model, self.merged(adapter), (), given, tie_weights=False)
        finally:
            torch.set_default_dtype(usual)

    @staticmethod
    def answered(output: Any) -> torch.Tensor:
        """Logits or states of what a model answers."""
        found: torch.Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
        return found

    def merged(self, adapter: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's parameters with one adapter; layers that share a weight have adapters of their own."""
        parameters: dict[str, torch.Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        for name, frozen in self.lora_a.items():
            key, trained = f"{name}.weight", adapter.get(f"lora_a.{name}")
            lora_a = frozen if trained is None else trained * self.scale
            parameters[key] = parameters[key] + adapter[f"lora_b.{name}"].T @ lora_a
        return parameters


def text_model(folder: Path, bundle: Bundle) -> Any:
    """The model of a chain as transformers has it, or the text part of one."""
    from server_export.model.loading import load_model

    model: Any = load_model(str(folder / "model"), pooled=bundle.chain.is_encoder).model
    model.set_experts_implementation("eager")
    return model


def loss_of(answers: torch.Tensor) -> torch.Tensor:
    """Some loss of an exact call's answers, in their precision: every answer counts, and not in a line."""
    weights = torch.rand(answers.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return (weights.to(answers.dtype) * torch.sin(answers)).sum() / len(answers)


def slope_of(answers: Array) -> Array:
    """Derivative of `loss_of` by the answers."""
    given = torch.tensor(answers, dtype=torch.float64, requires_grad=True)
    loss_of(given).backward()
    assert given.grad is not None
    return given.grad.numpy()


def computed(engine: Engine, given: Inputs) -> dict[str, Array]:
    """What an engine answers to a call; to an exact one with `loss_of`, also its gradient."""
    if not engine.contract.is_exact:
        return engine.forward(given)
    answers, gradients = engine.gradient(given, slope_of)
    return {engine.contract.answer: answers, **gradients}


def opened(bundle: Bundle, contract: Contract, engine: str = "native", **more: Any) -> Engines:
    """The engines of a bundle for a contract."""
    return open_engines(bundle, contract, engine=engine, **more)  # type: ignore[arg-type]


def inputs_of(contract: Contract, seed: int = 0) -> Inputs:
    """Rows of different lengths, the first as long as can be, with questions that repeat; an adapter."""
    random = np.random.default_rng(seed)
    rows, length = contract.rows, contract.sequence_length
    lengths = random.integers(1, length + 1, rows)
    lengths[0] = length
    given: Inputs = {}
    for spec in contract.inputs:
        if spec.name == "tokens":
            given[spec.name] = random.integers(3, contract.vocabulary_size, spec.shape)
        elif spec.name == "attention_mask":
            given[spec.name] = (np.arange(length) < lengths[:, None]).astype(np.int64)
        elif spec.name == "positions":
            given[spec.name] = random.integers(0, length, spec.shape) % lengths[:, None]
        elif spec.name == "targets":
            given[spec.name] = random.integers(0, 3, spec.shape)
        else:
            scale = 0.3 if spec.name.startswith("lora_") else 1.0
            given[spec.name] = scale * random.standard_normal(spec.shape, np.float32)
    return given


@contextmanager
def counted_loads(engines: Engines) -> Iterator[list[tuple[int, str]]]:
    """The blocks and roles that are loaded meanwhile."""
    blocks: Any = engines.step._blocks  # type: ignore[attr-defined]
    load, found = blocks._load, []

    def counted(number: int, role: str, arena: Any) -> Any:
        found.append((number, role))
        return load(number, role, arena)

    blocks._load = counted
    yield found
    blocks._load = load


def call_of(bundle: Bundle, role: str, rows: int, longest: int = 0, **sizes: int) -> tuple[Contract, Inputs]:
    """A call of rows of all lengths, up to what the chain takes or `longest`."""
    contract = bundle.chain.contract(role, rows, **sizes)
    if longest:
        contract = replace(contract, sequence_length=longest)
    return contract, inputs_of(contract)


def gradient_error(folder: Path, bundle: Bundle, longest: int = 0, rows: int = 3) -> float:
    """How far an exact gradient is from autograd's in double precision, as a part of its largest entry."""
    contract, given = call_of(bundle, "back", rows, longest)
    adapter = {
        matrix.name: torch.tensor(given[matrix.name], dtype=torch.float64, requires_grad=True)
        for matrix in matrices(contract.modules)
    }
    loss_of(Whole.of(folder, torch.float64).answers(given, adapter)).backward()
    found = opened(bundle, contract).step.gradient(given, slope_of)[1]
    expected = {name: np.asarray(matrix.grad) for name, matrix in adapter.items()}
    largest = max(float(np.abs(each).max()) for each in expected.values())
    return max(float(np.abs(found[name] - each).max()) for name, each in expected.items()) / largest


def tangent_error(folder: Path, bundle: Bundle, longest: int = 0, rows: int = 2, queries: int = 2) -> float:
    """How far tangents are from the derivatives of autograd, as a part of the largest."""
    contract, given = call_of(bundle, "tangent", rows, longest, queries=queries)
    _, tangents = opened(bundle, contract).step.forward(given).values()
    whole, error, largest = Whole.of(folder, torch.float64), 0.0, 0.0
    adapter = {
        matrix.name: torch.tensor(given[matrix.name], dtype=torch.float64, requires_grad=True)
        for matrix in matrices(contract.modules)
    }
    for row in range(rows):
        names = ("tokens", "attention_mask", "positions", "targets")
        one = {name: given[name][row : row + 1] for name in names if name in given}
        answers = whole.answers(one, adapter)[0]
        # One sum of all answers, each with a weight of its own.
        weights = torch.linspace(1, 2, answers.numel(), dtype=torch.float64).reshape(answers.shape)
        slopes = torch.autograd.grad((weights * answers).sum(), list(adapter.values()))
        for query in range(queries):
            expected = sum(
                float(
                    torch.from_numpy(given[matrix.u][query, row]).double()
                    @ slope
                    @ given[matrix.v][query, row]
                )
                for matrix, slope in zip(matrices(contract.modules), slopes, strict=True)
            )
            found = float((tangents[query, row] * weights.numpy()).sum())
            error, largest = max(error, abs(found - expected)), max(largest, abs(expected))
    return error / largest


def spoken_and_expected(
    folder: Path, bundle: Bundle, whole: Whole, count: int, prompt: int = 5
) -> tuple[list[int], list[int]]:
    """So many tokens that follow a prompt with a random adapter, of the engine and of transformers."""
    adapter = random_adapter(bundle.chain.modules, 1, 0.3)
    start = np.random.default_rng(0).integers(3, bundle.chain.vocabulary_size, prompt).tolist()
    speaker = open_speaker(bundle)
    sequence = speaker.open(adapter)
    logits, written = speaker.feed(sequence, start), list[int]()
    for _ in range(count):
        written.append(int(logits.argmax()))
        logits = speaker.step({sequence: written[-1]})[sequence]
    model = Whole.of(folder).model
    merged = whole.merged({name: torch.from_numpy(array) for name, array in adapter.inputs().items()})
    for name, parameter in model.named_parameters():
        parameter.copy_(merged[name])
    # Without words that some models are made to begin or end with.
    model.generation_config = type(model.generation_config)()
    found = model.generate(torch.tensor([start]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return written, found[0, prompt:].tolist()


def published_error(folder: Path, bundle: Bundle, whole: Whole) -> float:
    """How far PEFT's answers with a published adapter are from the model's, as a part of the largest."""
    from peft import PeftModel

    from server_export.publish import publish
    from server_export.publishing.settings import PublishConfig

    adapter = random_adapter(bundle.chain.modules, 1, 0.3)
    write_peft(folder / "trained", adapter, bundle.adapter, {"state.json": b"{}"})
    published = publish(
        PublishConfig(
            folder / "trained", folder / "peft", bundle=folder / "bundle", model=str(folder / "model")
        )
    )
    given = {name: torch.from_numpy(array) for name, array in adapter.inputs().items()}
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        expected = whole.states(tokens, given)
        base = text_model(folder, bundle)
        found = Whole.answered(PeftModel.from_pretrained(base, str(published)).eval()(input_ids=tokens))
    return float((found - expected).abs().max() / expected.abs().max())
