"""A chain computes what transformers' own model computes, for all models and rows.

models      decoders, with shared values, with recurrences, of other designs; encoders with a classification
            head of their own
rows        whole, and in chunks
computed    by PyTorch graphs of the blocks, and by the engine
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from device_runner.engines import generator as generation
from device_runner.engines.activations import ActivationStore
from device_runner.engines.chain_engine import ChainEngine
from device_runner.engines.generator import ChainGenerationEngine
from prge.engine import Array, Call, Engine, Target, TokenSequence
from prge.errors import EngineError
from prge.formats import chain
from prge.formats.bundle import open_bundle
from prge.formats.chain import Bounds
from prge.formats.signatures import BACKWARD, FORWARD, JVP
from prge.model_spec import ModelSpec
from server_export.adapter.layers import default_target_modules, match_target_modules, per_token_layers
from server_export.checkpoint.loading import load_meta_model, load_model
from server_export.oracle import TorchEngine
from server_export.trace.patterns import unadapted_modules
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import (
    call_of,
    directions_of,
    export_chain,
    logits_of,
    loss_gradient_of,
    opened,
    oracle_of,
    split,
)
from tests.device_runner.engines.graph_blocks import GraphBlocks
from tests.refusals import raises
from tests.server_export.derive.test_blocks import IN_BLOCKS
from tests.templates import random_adapter
from tests.tiers import second_tier
from tests.tiny_models import RECURRENT, save_model
from tests.tiny_types import make_classifier, make_tiny
from tests.workshop import FolderBuilder

torch.set_num_threads(1)

CHUNK, CONTEXT, CLASSES = 8, 48, 3

# Gemmas have one or several residual streams, inputs per layer, and keys and values of earlier layers; with
# an adapter on the last layer alone its inputs don't depend on the adapter. Zamba's layers share weights.
SHARED = ["gemma4", "gemma3n", "gemma4 top", "zamba2"]
DESIGNS = {
    "doge": "each key has a bias that is added to its scores",
    "bigbird_pegasus": "it moves a table of positions to another device",
    "diffllama": "the same scores weigh two halves of the values",
    "glm_moe_dsa": "an indexer selects the tokens to attend to, and of short texts all",
    "qwen4_exp_text": "layers pass residual streams, and have experts",
    "git": "it has an image encoder, and computes its mask itself",
    "rwkv": "a weighted mean of past tokens, and tokens shifted by one",
    "moshi": "its input vocabulary has a token that its output lacks",
}
CLASSIFIERS = [
    *("bert", "roberta", "distilbert", "deberta-v2", "electra", "modernbert", "albert"),
    "modernbert mean",
]


@dataclass(frozen=True)
class Limits:
    """Limits of differences.

    Outputs are relative to their largest value or 1; gradients and tangents to their largest value; logits of
    generation to their largest value or 1.
    """

    outputs: float
    gradient: float
    tangents: float
    logits: float = 0.0
    is_relative: bool = False

    def scale(self, expected: Array) -> float:
        """Return the limits of outputs and logits as multiples of these."""
        return float(np.abs(expected).max()) if self.is_relative else 1.0


@dataclass(frozen=True)
class Case:
    """A chain, and PyTorch's outputs of the whole model.

    Attributes:
        engine: engine of the chain, by role.
        oracle: the model; `rounded` is the model in single precision, if that loses digits.
        lengths: lengths of the sequences.
        limits: limits of differences.
        blocks: blocks of the chain, if graphs compute them.
        head: classification head of an encoder, which is part of the oracle.
        seed: seed of calls.
    """

    engine: Callable[[str], Engine]
    oracle: TorchEngine
    lengths: Sequence[int]
    limits: Limits
    blocks: Any = None
    rounded: TorchEngine | None = None
    head: nn.Linear | None = None
    seed: int = 0

    @property
    def model(self) -> ModelSpec:
        """Spec of the chain's model."""
        return self.engine(FORWARD).model

    def call(self, sequences: int, copies: int = 1) -> Call:
        """Return a call with sequences of several chunks, and of one."""
        return call_of(self.model, sequences, copies, self.lengths, self.seed)

    def read(self, outputs: Array) -> Array:
        """Return the oracle's counterpart of the chain's outputs."""
        if self.head is None:
            return outputs
        result: Array = self.head(torch.from_numpy(np.asarray(outputs, np.float64))).detach().numpy()
        return result

    def grad_fn(self, outputs: Array) -> Array:
        """Return the gradient of a loss with respect to the chain's outputs."""
        by_output = loss_gradient_of(self.read(outputs))
        return by_output if self.head is None else by_output @ self.head.weight.detach().numpy()

    def changes(self, derivatives: Array) -> Array:
        """Return the oracle's counterpart of the chain's output tangents."""
        return derivatives if self.head is None else derivatives @ self.head.weight.detach().numpy().T


def difference(result: Array, expected: Array) -> float:
    """Return the difference relative to the largest value."""
    return float(np.abs(result - expected).max() / np.abs(expected).max())


@contextmanager
def short_chunks() -> Iterator[None]:
    """Compute rows of more than two calls' tokens in chunks, later ones in shorter chunks."""
    numbers = {"MAX_WHOLE_TOKENS": 2 * CHUNK, "_CHUNK": CHUNK, "_MAX_SCORES": 4 * CHUNK * 20}
    with pytest.MonkeyPatch.context() as patch:
        for name, number in {**numbers, "_MIN_CHUNK": 2}.items():
            patch.setattr(chain, name, number)
        patch.setattr(generation, "GROWTH", 16)
        yield


def lora_a_of(network: Any, names: Sequence[str], size: float) -> dict[str, torch.Tensor]:
    """Return random `lora_a` of rank 2 by layer."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: size * torch.randn(2, network.get_submodule(name).in_features, generator=generator)
        for name in names
    }


def graphs_of(folder: Path, lora_a: dict[str, torch.Tensor], tokens: int, limits: Limits) -> Case:
    """Return a decoder computed by graphs, for rows in chunks; the oracle is in double precision."""
    blocks: Any = GraphBlocks(folder, lora_a, Bounds(tokens=tokens, context=CONTEXT, chunk=CHUNK))
    network: Any = load_model(str(folder)).model
    network.set_experts_implementation("eager")
    oracle = TorchEngine(network, blocks.chain.model, lora_a)
    lengths = [tokens, 5, 2 * CHUNK + 1]
    return Case(lambda _: ChainEngine(blocks, 1), oracle, lengths, limits, blocks)


def shared_values(folder: Path, name: str) -> Case:
    """Return a decoder with values that several blocks read."""
    architecture, *top = name.split()
    save_model(folder, architecture)
    network: Any = load_model(str(folder)).model
    names = match_target_modules(network, ["q_proj", "v_proj", "o_proj", "down_proj"])
    lora_a = lora_a_of(network, [name for name in names if not top or ".3." in name], 0.3)
    limits = Limits(outputs=1e-5, gradient=1e-4, tangents=1e-4, logits=5e-5, is_relative=True)
    case = graphs_of(folder, lora_a, 40, limits)
    rounded = case.oracle
    oracle = TorchEngine(deepcopy(rounded.network), rounded.model, lora_a).to(torch.float64)
    # With some other tokens PyTorch's gradients in single precision have large errors too.
    return replace(case, oracle=oracle, rounded=rounded, seed=1)


def recurrence(folder: Path, name: str) -> Case:
    """Return a decoder with recurrences."""
    save_model(folder, name)
    network: Any = load_model(str(folder)).model
    lora_a = lora_a_of(network, match_target_modules(network, IN_BLOCKS), 0.1)
    limits = Limits(outputs=2e-5, gradient=1e-5, tangents=1e-5, logits=2e-5)
    case = graphs_of(folder, lora_a, 20, limits)
    return replace(case, lengths=[19, 4, CHUNK + 2])


def design(folder: Path, name: str) -> Case:
    """Return a decoder of another design."""
    make_tiny(name).save_pretrained(folder)
    network: Any = load_meta_model(str(folder)).model
    unread = unadapted_modules(network)
    names = match_target_modules(network, default_target_modules(network, unread), unread)
    # Layers for the outputs of an encoder are never used.
    lora_a = lora_a_of(network, per_token_layers(network, names) or names, 0.3)
    limits = Limits(outputs=1e-5, gradient=1e-4, tangents=1e-4, logits=1e-4)
    case = graphs_of(folder, lora_a, 24, limits)
    case.oracle.to(torch.float64)
    return replace(case, lengths=())


def classifier(folder: Path, name: str) -> Case:
    """Return an encoder with a classification head, which the oracle has too."""
    architecture, *pooling = name.split()
    changes = {"classifier_pooling": "mean"} if pooling else {}
    make_classifier(architecture, CLASSES, **changes).save_pretrained(folder)
    loaded = load_model(str(folder))
    network: Any = loaded.model
    lora_a = lora_a_of(network, match_target_modules(network, default_target_modules(network)), 0.3)
    blocks: Any = GraphBlocks(folder, lora_a, Bounds(tokens=12, context=12, chunk=12))
    assert loaded.classifier is not None
    head = loaded.classifier.linear.double()
    network.set_submodule(loaded.classifier.layer, head)
    model = replace(blocks.chain.model, width=CLASSES)
    oracle = TorchEngine(network, model, lora_a, pooling="first").to(torch.float64)
    limits = Limits(outputs=1e-5, gradient=1e-5, tangents=1e-5)
    return Case(lambda _: ChainEngine(blocks, 1), oracle, (), limits, blocks, head=head)


def chunks(made_once: FolderBuilder, name: str) -> Case:
    """Return a bundle on the engine, for rows of up to five chunks; windows of tiny models are shorter."""
    architecture, *adapter = name.split()
    settings: dict[str, Any] = {"adapter": adapter[0]} if adapter else {}
    settings |= {"sequence_length": 40, "context": 40, "roles": ["forward", "jvp", "backward"]}
    folder = made_once(f"chunks of {name}", lambda position: export_chain(position, architecture, **settings))
    bundle = open_bundle(folder / "bundle")
    limits = Limits(outputs=2e-5, gradient=1e-5, tangents=2e-5)
    lengths = [40, 5, 2 * CHUNK + 1, 27, CHUNK]
    return Case(lambda role: opened(bundle, role).engine, oracle_of(folder), lengths, limits)


MAKERS = {"shared": shared_values, "recurrent": recurrence, "design": design, "classifier": classifier}
DECODERS = [
    *(f"shared: {name}" for name in SHARED),
    *(f"recurrent: {name}" for name in RECURRENT),
    *(f"design: {name}" for name in DESIGNS),
]
CLASSES_OF_ROWS = [f"classifier: {name}" for name in CLASSIFIERS]
ON_ENGINE = [
    pytest.param(f"engine: {name}", marks=marks)
    for name, marks in (
        ("llama", needs_compiler),
        ("gemma3", [needs_compiler, pytest.mark.whole]),
        ("llama lora", [needs_compiler, pytest.mark.whole]),
    )
]
# One of each type in the first tier.
FIRST = ["shared: gemma4", "recurrent: lfm2", "design: doge", "classifier: bert"]


def cases(names: Sequence[str], *more: Any) -> Any:
    """Return a test's parameter: the first model of each type always runs, the others in the whole suite."""
    first = [name for name in names if name in FIRST]
    others = second_tier(*(name for name in names if name not in FIRST))
    return pytest.mark.parametrize("case", [*first, *others, *more], indirect=True)


every = cases([*DECODERS, *CLASSES_OF_ROWS], *ON_ENGINE)


@pytest.fixture(scope="module")
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, made_once: FolderBuilder
) -> Iterator[Case]:
    case_type, _, name = request.param.partition(": ")
    with short_chunks():
        if case_type == "engine":
            yield chunks(made_once, name)
        else:
            yield MAKERS[case_type](tmp_path_factory.mktemp(case_type) / "model", name)


@every
def test_outputs_of_all_copies(case: Case) -> None:
    for copies, sequences in ((1, 5), (3, 2)):
        call = case.call(sequences, copies)
        result = case.read(case.engine(FORWARD).forward(call))
        for actual, expected in zip(result, case.oracle.forward(call), strict=True):
            assert np.abs(actual - expected).max() < case.limits.outputs * case.limits.scale(expected)


@every
def test_gradient(case: Case) -> None:
    call = case.call(max(len(case.lengths), 3))
    outputs, result = case.engine(BACKWARD).vjp(call, case.grad_fn)
    expected, gradient = case.oracle.vjp(call, loss_gradient_of)
    max_difference = case.limits.outputs * case.limits.scale(expected)
    assert np.abs(case.read(outputs) - expected).max() < max_difference
    assert difference(result, gradient) < case.limits.gradient


@every
def test_tangents(case: Case) -> None:
    call, directions = case.call(3), directions_of(case.model, 2, 3)
    result = case.changes(case.engine(JVP).jvp(call, directions)[1])
    exact = case.oracle.jvp(call, directions)[1]
    rounded = exact if case.rounded is None else case.rounded.jvp(call, directions)[1]
    parts = (split(case.oracle.model, call, each) for each in (result, exact, rounded))
    for actual, expected, single in zip(*parts, strict=True):
        for query in range(2):
            # Residual streams that nearly cancel lose digits in PyTorch's single precision as well.
            max_difference = max(case.limits.tangents, difference(single[query], expected[query]))
            assert difference(actual[query], expected[query]) < max_difference


@cases(DECODERS, *ON_ENGINE)
def test_branches(case: Case) -> None:
    plain = case.call(3)
    random = np.random.default_rng(0)
    tokens = tuple(random.integers(3, case.model.vocabulary_size, CHUNK).tolist())
    positions = [(0, (2, 3, 4)), (1, (1, 2, 5, 7))]
    targets = [Target(n, tokens[n], 1.0, candidate) for candidate, some in positions for n in some]
    branched = TokenSequence(tokens, tuple(targets), (3, 5))
    call = replace(plain, sequences=(plain.sequences[0], branched, *plain.sequences[1:]))
    if not case.model.max_branched:
        with raises(EngineError, "branched-too-long", containing=str(CHUNK)):
            case.engine(FORWARD).forward(call)
        return
    result = split(case.model, call, case.engine(FORWARD).forward(call))[1]
    expected = split(case.model, call, case.oracle.forward(call))[1]
    assert np.abs(result - expected).max() < case.limits.outputs * case.limits.scale(expected)
    directions = directions_of(case.model, 2, 4)
    tangents = split(case.model, call, case.engine(JVP).jvp(call, directions)[1])[1]
    exact = split(case.model, call, case.oracle.jvp(call, directions)[1])[1]
    assert difference(tangents, exact) < case.limits.tangents
    gradient = case.engine(BACKWARD).vjp(call, loss_gradient_of)[1]
    assert difference(gradient, case.oracle.vjp(call, loss_gradient_of)[1]) < case.limits.gradient


@cases(DECODERS)
def test_rows_in_chunks_with_a_common_prefix(case: Case) -> None:
    longest = max(case.lengths, default=3 * CHUNK)
    call = call_of(case.model, 2, 2, [longest], case.seed)
    first, second = call.sequences
    tokens = (*first.tokens[: 2 * CHUNK], *second.tokens[2 * CHUNK :])
    call = replace(call, sequences=(first, replace(second, tokens=tokens)))
    result = case.engine(FORWARD).forward(call)
    for actual, expected in zip(result, case.oracle.forward(call), strict=True):
        assert np.abs(actual - expected).max() < case.limits.outputs * case.limits.scale(expected)


@cases([name for name in DECODERS if name.startswith("shared")])
def test_gradient_from_residuals(case: Case) -> None:
    call, blocks = case.call(3), case.blocks
    _, result = case.engine(BACKWARD).vjp(call, loss_gradient_of)
    store = ActivationStore(blocks, residual_bytes=1 << 40)
    _, from_saved = ChainEngine(blocks, 1, store).vjp(call, loss_gradient_of)
    # PyTorch's products have other last bits when operands are stored elsewhere; test_activations.py tests
    # the engine's, which don't.
    assert difference(from_saved, result) < 1e-5


@pytest.mark.parametrize("precision", ["float32", "float16"])
@cases(DECODERS)
def test_texts(case: Case, precision: Any) -> None:
    """Two sequences are generated at once, token by token; one of them moves to the other's slot."""
    chain_of = case.blocks.chain
    tokens = np.random.default_rng(0).integers(3, chain_of.vocabulary_size, chain_of.bounds.tokens).tolist()
    adapter = random_adapter(chain_of.modules, 1, 0.3)
    expected = logits_of(case.oracle, adapter, tokens)
    generation_engine = ChainGenerationEngine(case.blocks, 2, precision=precision)

    def check(logits: Array, position: int) -> None:
        if precision == "float32":
            max_difference = case.limits.logits * case.limits.scale(expected[position])
            assert np.abs(logits - expected[position]).max() < max_difference
        else:
            assert difference(logits, expected[position]) < 2e-2

    first, second = generation_engine.open(adapter), generation_engine.open(adapter)
    check(generation_engine.feed(first, tokens[:9]), 8)
    generation_engine.feed(second, tokens[:4])
    for position in range(9, 16):
        result = generation_engine.step(
            {second: tokens[generation_engine.length(second)], first: tokens[position]}
        )
        check(result[first], position)
        check(result[second], generation_engine.length(second) - 1)
    generation_engine.close(first)
    check(generation_engine.step({second: tokens[11]})[second], 11)
    third = generation_engine.open(adapter)
    generation_engine.feed(third, tokens[:1])
    check(generation_engine.feed(third, tokens[1:]), -1)


@cases([name for name in DECODERS if name.startswith("recurrent")])
def test_texts_of_a_recurrence_in_reused_slots(case: Case) -> None:
    """A recurrent state can't return to an earlier token: the sequence starts again from its beginning."""
    adapter = random_adapter(case.blocks.chain.modules, 1, 0.3)
    generation_engine = ChainGenerationEngine(case.blocks, slots=3)

    def check(logits: Array, tokens: list[int]) -> None:
        np.testing.assert_allclose(logits, logits_of(case.oracle, adapter, tokens)[-1], atol=2e-5)

    prompts = [np.random.default_rng(n).integers(3, 100, n).tolist() for n in (1, 2, 7, 19)]
    open_ones = {}
    for prompt in prompts:
        if len(open_ones) == 3:
            generation_engine.close(open_ones.popitem()[0])
        sequence = generation_engine.open(adapter)
        logits, tokens = generation_engine.feed(sequence, prompt), list(prompt)
        for _ in range(4):
            check(logits, tokens)
            tokens.append(int(logits.argmax()))
            logits = generation_engine.step({sequence: tokens[-1]})[sequence]
        open_ones[sequence] = tokens
    first = next(iter(open_ones))
    generation_engine.close(first)
    del open_ones[first]
    for sequence, logits in generation_engine.step(dict.fromkeys(reversed(open_ones), 9)).items():
        check(logits, [*open_ones[sequence], 9])
    sequence, tokens = open_ones.popitem()
    generation_engine.rewind(sequence, 4)
    assert generation_engine.length(sequence) == 0
    check(generation_engine.feed(sequence, tokens[:6]), tokens[:6])
    copy = generation_engine.open(adapter)
    generation_engine.copy(sequence, copy, 4)
    assert generation_engine.length(copy) == 0
    generation_engine.copy(sequence, copy, 6)
    for copied, logits in generation_engine.step({copy: 9, sequence: 11}).items():
        check(logits, [*tokens[:6], 9 if copied == copy else 11])
