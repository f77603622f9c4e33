"""A chain computes what transformers' own model computes, whatever the model and the rows.

models      decoders, with values that several blocks read, with recurrences, of other designs; encoders
            with a classification head of their own
rows        whole, and in chunks
computed    by graphs of the blocks in PyTorch, and by the engine
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

from device_runner.engines import speaking
from device_runner.engines.activations import ActivationStore
from device_runner.engines.chain_engine import ChainEngine
from device_runner.engines.speaking import ChainSpeaker
from prge.engine import Array, Call, Engine
from prge.files import chain
from prge.files.bundle import open_bundle
from prge.files.chain import Bounds
from prge.files.signatures import BACK, STACK, TANGENT
from prge.model_spec import ModelSpec
from server_export.adapter.layers import default_target_modules, match_target_modules, read_by_rows
from server_export.checkpoint.loading import load_model, outline_model
from server_export.oracle import TorchEngine
from server_export.trace.patterns import unread_modules
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import (
    call_of,
    directions_of,
    export_chain,
    logits_of,
    opened,
    oracle_of,
    slope_of,
    split,
)
from tests.device_runner.engines.graph_blocks import GraphBlocks
from tests.server_export.derive.test_blocks import IN_BLOCKS
from tests.templates import random_adapter
from tests.tiers import rest
from tests.tiny_models import RECURRENT, save_model
from tests.tiny_types import make_classifier, make_tiny
from tests.workshop import Made

torch.set_num_threads(1)

CHUNK, CONTEXT, CLASSES = 8, 48, 3

# Gemmas have streams or one state, inputs for each layer, and keys and values of layers before; with an
# adapter on the last layer alone nothing changes what it takes. Zamba's layers share weights.
SHARED = ["gemma4", "gemma3n", "gemma4 top", "zamba2"]
DESIGNS = {
    "doge": "each key has a number that is added to its scores",
    "bigbird_pegasus": "what it looks up by position is brought to a place where it is",
    "diffllama": "the same scores weigh two halves of the values",
    "glm_moe_dsa": "an indexer chooses what tokens are seen, and of short texts all",
    "qwen4_exp_text": "layers hand on streams, and have experts",
    "git": "it has an encoder of images, and asks for its mask itself",
    "rwkv": "a mean of what came before, and tokens that are moved by one",
    "moshi": "it reads a word that it doesn't say",
}
CLASSIFIERS = [
    *("bert", "roberta", "distilbert", "deberta-v2", "electra", "modernbert", "albert"),
    "modernbert mean",
]


@dataclass(frozen=True)
class Limits:
    """How much may differ: outputs as a part of their largest number, or of 1; gradients and tangents as a
    part of theirs; logits of texts as a part of theirs, or of 1."""

    outputs: float
    gradient: float
    tangents: float
    logits: float = 0.0
    is_relative: bool = False

    def scale(self, expected: Array) -> float:
        """What outputs and logits may differ by, in units of the limits."""
        return float(np.abs(expected).max()) if self.is_relative else 1.0


@dataclass(frozen=True)
class Case:
    """A chain, and what PyTorch computes of the whole model.

    Attributes:
        engine: the chain's, by role.
        oracle: the model; `rounded` is it in single precision, where that loses digits.
        lengths: of sequences.
        limits: of differences.
        blocks: of the chain, where graphs compute them.
        head: of an encoder for classes, which the oracle has inside.
        seed: of calls.
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
        """What the chain computes."""
        return self.engine(STACK).model

    def call(self, sequences: int, copies: int = 1) -> Call:
        """Sequences of more chunks than one, and of one."""
        return call_of(self.model, sequences, copies, self.lengths, self.seed)

    def read(self, outputs: Array) -> Array:
        """What the oracle has for outputs of the chain."""
        if self.head is None:
            return outputs
        found: Array = self.head(torch.from_numpy(np.asarray(outputs, np.float64))).detach().numpy()
        return found

    def grad_fn(self, outputs: Array) -> Array:
        """Derivative of a loss by outputs of the chain."""
        by_output = slope_of(self.read(outputs))
        return by_output if self.head is None else by_output @ self.head.weight.detach().numpy()

    def changes(self, derivatives: Array) -> Array:
        """What the oracle has for derivatives of outputs of the chain."""
        return derivatives if self.head is None else derivatives @ self.head.weight.detach().numpy().T


def difference(found: Array, expected: Array) -> float:
    """As a part of the largest number."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@contextmanager
def short_chunks() -> Iterator[None]:
    """Rows of more than two calls' tokens go in chunks, later ones in shorter ones; memory grows often."""
    numbers = {"MOST_WHOLE_TOKENS": 2 * CHUNK, "_SHORT": CHUNK, "_MOST_SCORES": 4 * CHUNK * 20}
    with pytest.MonkeyPatch.context() as patch:
        for name, number in {**numbers, "_SHORTEST_PIECE": 2}.items():
            patch.setattr(chain, name, number)
        patch.setattr(speaking, "GROWTH", 16)
        yield


def lora_a_of(network: Any, names: Sequence[str], size: float) -> dict[str, torch.Tensor]:
    """Random `lora_a` of rank 2 by layer."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: size * torch.randn(2, network.get_submodule(name).in_features, generator=generator)
        for name in names
    }


def graphs_of(folder: Path, lora_a: dict[str, torch.Tensor], tokens: int, limits: Limits) -> Case:
    """Of a decoder in a folder, for rows of so many tokens in chunks; the oracle is in double precision."""
    blocks: Any = GraphBlocks(folder, lora_a, Bounds(tokens=tokens, context=CONTEXT, piece=CHUNK))
    network: Any = load_model(str(folder)).model
    network.set_experts_implementation("eager")
    oracle = TorchEngine(network, blocks.chain.model, lora_a)
    lengths = [tokens, 5, 2 * CHUNK + 1]
    return Case(lambda _: ChainEngine(blocks, 1), oracle, lengths, limits, blocks)


def shared_values(folder: Path, name: str) -> Case:
    """A decoder with values that several blocks read."""
    architecture, *top = name.split()
    save_model(folder, architecture)
    network: Any = load_model(str(folder)).model
    names = match_target_modules(network, ["q_proj", "v_proj", "o_proj", "down_proj"])
    lora_a = lora_a_of(network, [name for name in names if not top or ".3." in name], 0.3)
    limits = Limits(outputs=1e-5, gradient=1e-4, tangents=1e-4, logits=5e-5, is_relative=True)
    case = graphs_of(folder, lora_a, 40, limits)
    rounded = case.oracle
    oracle = TorchEngine(deepcopy(rounded.network), rounded.model, lora_a).to(torch.float64)
    # Some other tokens give gradients that PyTorch is off of too, in single precision.
    return replace(case, oracle=oracle, rounded=rounded, seed=1)


def recurrence(folder: Path, name: str) -> Case:
    """A decoder with recurrences."""
    save_model(folder, name)
    network: Any = load_model(str(folder)).model
    lora_a = lora_a_of(network, match_target_modules(network, IN_BLOCKS), 0.1)
    limits = Limits(outputs=2e-5, gradient=1e-5, tangents=1e-5, logits=2e-5)
    case = graphs_of(folder, lora_a, 20, limits)
    return replace(case, lengths=[19, 4, CHUNK + 2])


def design(folder: Path, name: str) -> Case:
    """A decoder of another design."""
    make_tiny(name).save_pretrained(folder)
    network: Any = outline_model(str(folder)).model
    unread = unread_modules(network)
    names = match_target_modules(network, default_target_modules(network, unread), unread)
    # Layers for what an encoder made are never asked.
    lora_a = lora_a_of(network, read_by_rows(network, names) or names, 0.3)
    limits = Limits(outputs=1e-5, gradient=1e-4, tangents=1e-4, logits=1e-4)
    case = graphs_of(folder, lora_a, 24, limits)
    case.oracle.to(torch.float64)
    return replace(case, lengths=())


def classifier(folder: Path, name: str) -> Case:
    """An encoder with a classification head; the oracle has the head too."""
    architecture, *pooling = name.split()
    changes = {"classifier_pooling": "mean"} if pooling else {}
    make_classifier(architecture, CLASSES, **changes).save_pretrained(folder)
    loaded = load_model(str(folder))
    network: Any = loaded.model
    lora_a = lora_a_of(network, match_target_modules(network, default_target_modules(network)), 0.3)
    blocks: Any = GraphBlocks(folder, lora_a, Bounds(tokens=12, context=12, piece=12))
    assert loaded.classifier is not None
    head = loaded.classifier.linear.double()
    network.set_submodule(loaded.classifier.layer, head)
    model = replace(blocks.chain.model, width=CLASSES)
    oracle = TorchEngine(network, model, lora_a, pooling="first").to(torch.float64)
    limits = Limits(outputs=1e-5, gradient=1e-5, tangents=1e-5)
    return Case(lambda _: ChainEngine(blocks, 1), oracle, (), limits, blocks, head=head)


def chunks(made_once: Made, name: str) -> Case:
    """A bundle on the engine, for rows of up to five chunks; windows of tiny models are shorter than one."""
    architecture, *adapter = name.split()
    settings: dict[str, Any] = {"adapter": adapter[0]} if adapter else {}
    settings |= {"sequence_length": 40, "context": 40, "roles": ["stack", "tangent", "back"]}
    folder = made_once(f"pieces of {name}", lambda place: export_chain(place, architecture, **settings))
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
# One of each in the first tier.
FIRST = ["shared: gemma4", "recurrent: lfm2", "design: doge", "classifier: bert"]


def cases(names: Sequence[str], *more: Any) -> Any:
    """A test's parameter: the first of each sort of model, the others with everything."""
    first = [name for name in names if name in FIRST]
    others = rest(*(name for name in names if name not in FIRST))
    return pytest.mark.parametrize("case", [*first, *others, *more], indirect=True)


every = cases([*DECODERS, *CLASSES_OF_ROWS], *ON_ENGINE)


@pytest.fixture(scope="module")
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, made_once: Made
) -> Iterator[Case]:
    kind, _, name = request.param.partition(": ")
    with short_chunks():
        if kind == "engine":
            yield chunks(made_once, name)
        else:
            yield MAKERS[kind](tmp_path_factory.mktemp(kind) / "model", name)


@every
def test_outputs_of_all_copies(case: Case) -> None:
    for copies, sequences in ((1, 5), (3, 2)):
        call = case.call(sequences, copies)
        found = case.read(case.engine(STACK).forward(call))
        for ours, expected in zip(found, case.oracle.forward(call), strict=True):
            assert np.abs(ours - expected).max() < case.limits.outputs * case.limits.scale(expected)


@every
def test_gradient(case: Case) -> None:
    call = case.call(max(len(case.lengths), 3))
    outputs, found = case.engine(BACK).vjp(call, case.grad_fn)
    expected, gradient = case.oracle.vjp(call, slope_of)
    most = case.limits.outputs * case.limits.scale(expected)
    assert np.abs(case.read(outputs) - expected).max() < most
    assert difference(found, gradient) < case.limits.gradient


@every
def test_tangents(case: Case) -> None:
    call, directions = case.call(3), directions_of(case.model, 2, 3)
    found = case.changes(case.engine(TANGENT).jvp(call, directions)[1])
    exact = case.oracle.jvp(call, directions)[1]
    rounded = exact if case.rounded is None else case.rounded.jvp(call, directions)[1]
    parts = (split(case.oracle.model, call, each) for each in (found, exact, rounded))
    for ours, expected, single in zip(*parts, strict=True):
        for query in range(2):
            # Streams that all but cancel lose digits in PyTorch's own single precision as well.
            most = max(case.limits.tangents, difference(single[query], expected[query]))
            assert difference(ours[query], expected[query]) < most


@cases([name for name in DECODERS if name.startswith("shared")])
def test_gradient_from_residuals(case: Case) -> None:
    call, blocks = case.call(3), case.blocks
    _, found = case.engine(BACK).vjp(call, slope_of)
    store = ActivationStore(blocks, residual_bytes=1 << 40)
    _, from_saved = ChainEngine(blocks, 1, store).vjp(call, slope_of)
    # PyTorch's products have other last bits where their operands lie otherwise; test_activations.py has the
    # engine's, which don't.
    assert difference(from_saved, found) < 1e-5


@pytest.mark.parametrize("precision", ["float32", "float16"])
@cases(DECODERS)
def test_texts(case: Case, precision: Any) -> None:
    """Token by token, of two sequences at once, one of which moves to the other's place."""
    chain_of = case.blocks.chain
    tokens = np.random.default_rng(0).integers(3, chain_of.vocabulary_size, chain_of.bounds.tokens).tolist()
    adapter = random_adapter(chain_of.modules, 1, 0.3)
    expected = logits_of(case.oracle, adapter, tokens)
    speaker = ChainSpeaker(case.blocks, 2, precision=precision)

    def check(logits: Array, place: int) -> None:
        if precision == "float32":
            most = case.limits.logits * case.limits.scale(expected[place])
            assert np.abs(logits - expected[place]).max() < most
        else:
            assert difference(logits, expected[place]) < 2e-2

    first, second = speaker.open(adapter), speaker.open(adapter)
    check(speaker.feed(first, tokens[:9]), 8)
    speaker.feed(second, tokens[:4])
    for place in range(9, 16):
        found = speaker.step({second: tokens[speaker.length(second)], first: tokens[place]})
        check(found[first], place)
        check(found[second], speaker.length(second) - 1)
    speaker.close(first)
    check(speaker.step({second: tokens[11]})[second], 11)
    third = speaker.open(adapter)
    speaker.feed(third, tokens[:1])
    check(speaker.feed(third, tokens[1:]), -1)


@cases([name for name in DECODERS if name.startswith("recurrent")])
def test_texts_of_a_recurrence_in_slots_that_others_left(case: Case) -> None:
    """Its state can't go back: a sequence is read from its beginning again."""
    adapter = random_adapter(case.blocks.chain.modules, 1, 0.3)
    speaker = ChainSpeaker(case.blocks, slots=3)

    def check(logits: Array, tokens: list[int]) -> None:
        np.testing.assert_allclose(logits, logits_of(case.oracle, adapter, tokens)[-1], atol=2e-5)

    prompts = [np.random.default_rng(n).integers(3, 100, n).tolist() for n in (1, 2, 7, 19)]
    open_ones = {}
    for prompt in prompts:
        if len(open_ones) == 3:
            speaker.close(open_ones.popitem()[0])
        sequence = speaker.open(adapter)
        logits, tokens = speaker.feed(sequence, prompt), list(prompt)
        for _ in range(4):
            check(logits, tokens)
            tokens.append(int(logits.argmax()))
            logits = speaker.step({sequence: tokens[-1]})[sequence]
        open_ones[sequence] = tokens
    first = next(iter(open_ones))
    speaker.close(first)
    del open_ones[first]
    for sequence, logits in speaker.step(dict.fromkeys(reversed(open_ones), 9)).items():
        check(logits, [*open_ones[sequence], 9])
    sequence, tokens = open_ones.popitem()
    speaker.rewind(sequence, 4)
    assert speaker.length(sequence) == 0
    check(speaker.feed(sequence, tokens[:6]), tokens[:6])
