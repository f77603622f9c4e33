"""The blocks of a chain against transformers' own model with the weights of the files, at every export.

Both sides read a weight when an operator takes it, and free it then: a model of any size is compared as a
whole, in the memory of its largest layer (server_export/checkpoint/lazy_weights.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from prge.engine import FloatArray
from prge.errors import ConfigError, Refusal
from prge.numerics.vocabulary_shards import TargetLogProbs
from server_export.adapter.repeated_blocks import block_names
from server_export.check.own_forward import refuse_if_transformers_fails
from server_export.checkpoint.classifier import CheckpointClassifier, hidden_states_of
from server_export.checkpoint.experts import expert_layers, is_dense_experts
from server_export.checkpoint.files import ModelFiles
from server_export.checkpoint.lazy_weights import LazyWeights
from server_export.checkpoint.loading import LoadedModel, check_names, load_meta_model, vocabulary_size
from server_export.checkpoint.weights import CheckpointWeights, load_classifier_weights
from server_export.model.chain import ModelChain
from server_export.model.eager import EagerBlock, run_experts
from server_export.pipeline import with_scheme
from server_export.progress import count_parts
from server_export.trace.attention import padding_mask
from server_export.trace.readout import log_probabilities

# Largest difference, as a part of the largest number, if that is more than 1. Models of all tested
# architectures differ by less than 2e-6.
MODEL_TOLERANCE = 1e-4
_ROWS, _TOKENS, _ALIKE_TOKENS = 2, 7, 5
_REMEDY = "please report it with the name of the model"


@dataclass(frozen=True)
class ModelComparison:
    """What the blocks of a chain were compared with, and how much they differ, in float32.

    Attributes:
        difference: the largest one of any log-probability or state of `tokens` tokens.
        allowed: the most that it may be.
        experts: of the chain that these tokens called, and all; 0 of 0 without a mixture.
    """

    difference: float
    allowed: float
    tokens: int
    experts: tuple[int, int]

    def describe(self) -> str:
        """In words, for the line of an export."""
        asked, every = self.experts
        experts = f"; {asked:,} of {every:,} experts were called" if asked < every else ""
        return f"blocks and transformers' model differ by {self.difference:.2g}{experts}"

    def to_json(self) -> dict[str, Any]:
        """The `model` block of a manifest's `verification`."""
        return asdict(self)


def compare_with_model(chain: ModelChain, name_or_path: str, revision: str | None) -> ModelComparison:
    """Compare what the blocks compute in float32 with what transformers' own model does.

    Of log-probabilities or states, of two rows without adapter, a decoder's with the same beginning, one of
    an encoder's with padding.

    Raises:
        Refusal: they differ by more than `MODEL_TOLERANCE`, so that the model was cut or traced wrongly
            (`differs-from-model`); a decoder sees tokens that come later (`not-causal`); an encoder reads
            padding (`reads-padding`); transformers can't run the model (`model-fails-in-transformers`).
        BundleError: the files lack a weight, have one more, or it isn't finite.
    """
    pooled, files = not chain.is_decoder, chain.weights.files
    loaded = load_meta_model(name_or_path, pooled=pooled, revision=revision, own_head=chain.has_own_head)
    check_names(loaded, files)
    model = _StoredModel(loaded, files)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (
        torch.randint(0, most, (_ROWS, _TOKENS), generator=generator)
        for most in (chain.vocabulary_size, max(chain.classes, 1))
    )
    padding = getattr(loaded.config, "pad_token_id", None)
    # RoBERTa numbers its positions by what isn't the padding token.
    tokens[tokens == padding] = 0 if padding else 1
    mask = torch.ones_like(tokens)
    reads_padding = False
    with torch.no_grad():
        if chain.is_decoder:
            tokens[1, :_ALIKE_TOKENS], targets[1] = tokens[0, :_ALIKE_TOKENS], targets[0]
            words = [word for rows in chain.head_rows for word in rows]
            expected = log_probabilities(model.run(tokens, mask).logits[..., words], targets)
            _check_causal(model.name, expected[:, :_ALIKE_TOKENS])
        else:
            mask[1, _ALIKE_TOKENS:] = 0
            # A row means what it means alone.
            alone = hidden_states_of(model.run(tokens[1:, :_ALIKE_TOKENS]), _ALIKE_TOKENS)[0]
            output = model.run(tokens, mask)
            expected = hidden_states_of(output, _TOKENS).clone()
            if loaded.classifier is not None:
                _check_classifier(model, loaded.classifier, output.logits, (tokens, mask))
            reads_padding = not _is_alike(expected[1, :_ALIKE_TOKENS], alone)
            expected[1, :_ALIKE_TOKENS] = alone
        beside = targets if chain.is_decoder else padding_mask(mask.float())
        blocks = _Blocks(replace(with_scheme(chain, "fp32"), weights=LazyWeights(chain.weights)))
        found = blocks.run(tokens, beside)
    found, expected = found.reshape(expected.shape)[mask.bool()], expected[mask.bool()]
    difference = float((found - expected).abs().max())
    if not _is_alike(found, expected):
        if reads_padding:
            raise Refusal(
                "reads-padding",
                f"{model.name} reads the padding of a row as if it were tokens, so what it answers changes "
                "with the rows beside",
                remedy="take another checkpoint; of other encoders padding is hidden by attention",
            )
        raise Refusal(
            "differs-from-model",
            f"the blocks don't compute what the model {model.name} computes: their outputs differ by "
            f"{difference:.3g}{_where(model.states, blocks.states)}",
            remedy=_REMEDY,
        )
    return ModelComparison(difference, _allowed(expected), tokens.numel(), blocks.experts)


def check_causal(name_or_path: str, revision: str | None, files: ModelFiles) -> None:
    """Raise Refusal, `not-causal`, if what a decoder answers depends on tokens that come later."""
    loaded = load_meta_model(name_or_path, pooled=False, revision=revision)
    model = _StoredModel(loaded, files)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, vocabulary_size(loaded.model), (_ROWS, _TOKENS), generator=generator)
    tokens[1, :_ALIKE_TOKENS] = tokens[0, :_ALIKE_TOKENS]
    with torch.no_grad():
        answers = torch.log_softmax(model.run(tokens).logits, -1)
    _check_causal(model.name, answers[:, :_ALIKE_TOKENS])


class _StoredModel:
    """transformers' model, whose weights are read from the files while it runs.

    Attributes:
        name: of its class.
        states: what its layers gave in the last run, in order, with their names.
    """

    def __init__(self, loaded: LoadedModel, files: ModelFiles) -> None:
        self._loaded = loaded
        self.model: Any = loaded.model
        self.name = type(self.model).__name__
        self.states = list[tuple[str, torch.Tensor]]()
        self._files = files
        if any(not is_dense_experts(module) for module in expert_layers(self.model).values()):
            # It calls one expert after the other, those alone that a router chose.
            self.model.set_experts_implementation("eager")
        self._tensors = LazyWeights(CheckpointWeights(files, self.model)).of(self.model)

    def run(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        """What the model answers."""
        self.states.clear()
        given = {"input_ids": tokens} | ({} if mask is None else {"attention_mask": mask})
        with self._watched(), refuse_if_transformers_fails(self._loaded):
            return functional_call(self.model, self._tensors, kwargs=given)

    def scores(
        self, classifier: CheckpointClassifier, given: Sequence[torch.Tensor]
    ) -> tuple[nn.Linear, torch.Tensor]:
        """The last layer of the model's own head with its numbers, and what the model answers with it."""
        linear = load_classifier_weights(classifier, self.model, self._files).linear
        self.model.set_submodule(classifier.layer, linear)
        scores = self.run(*given).logits
        self.model.set_submodule(classifier.layer, nn.Identity())
        return linear, scores

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Meanwhile what the model's layers give is kept."""
        try:
            names = block_names(self.model)
        except ConfigError:
            names = []

        def keep(name: str) -> Callable[..., None]:
            def watch(module: nn.Module, given: Any, answer: Any) -> None:
                state = answer[0] if isinstance(answer, tuple) else answer
                if isinstance(state, torch.Tensor):
                    self.states.append((name, state.clone()))

            return watch

        hooks = [self.model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _Blocks:
    """The blocks of a chain, run one after the other.

    Attributes:
        states: behind each block that has one.
        experts: how many were called, and all.
    """

    def __init__(self, chain: ModelChain) -> None:
        self._chain = chain
        self.states = list[torch.Tensor]()
        self.experts = (0, sum(block.is_expert for block in chain.blocks))

    def run(self, tokens: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        """What the blocks compute; `beside` is of a head, or of an encoder's attention."""
        chain = self._chain
        state, done, shared = tokens, count_parts(chain.head_start), dict[int, torch.Tensor]()
        called = set[int]()
        for turn in chain.block_groups(chain.head_start):
            if chain.blocks[turn.start].is_expert:
                (state,) = run_experts(chain, turn, [state], lambda each, _: called.add(each.number))
            else:
                state = EagerBlock(chain, turn.start).compute(state, beside, shared=shared)
            self.states.append(state)
            done(len(turn))
        self.experts = (len(called), self.experts[1])
        return self._log_probabilities(state, beside) if chain.is_decoder else state

    def _log_probabilities(self, state: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Of the targets, from all pieces of the vocabulary."""
        chain, every = self._chain, slice(None)
        reading = TargetLogProbs(targets.numpy().ravel(), len(chain.head_rows[0]))
        for piece in range(len(chain.head_rows)):
            within = torch.from_numpy(reading.local_targets(piece, every)[0]).reshape(targets.shape)
            head = EagerBlock(chain, chain.head_start + piece)

            def parts(shift: FloatArray, head: EagerBlock = head, within: torch.Tensor = within) -> Any:
                shifts = torch.from_numpy(shift).reshape(*targets.shape, 1)
                return head.compute(state, within, shifts).reshape(-1, 2).numpy(), None

            reading.add(piece, every, *reading.compute_shifted(every, parts))
        return torch.from_numpy(reading.logprobs)


def _where(layers: Sequence[tuple[str, torch.Tensor]], states: Sequence[torch.Tensor]) -> str:
    """The last of the model's layers whose state a block has, and the next one."""
    is_same = [
        any(
            state.numel() == layer.numel() and _is_alike(state.flatten(), layer.flatten()) for state in states
        )
        for _, layer in layers
    ]
    if not any(is_same) or all(is_same):
        return ""
    last = len(is_same) - 1 - is_same[::-1].index(True)
    after = "" if last + 1 == len(layers) else f", not {layers[last + 1][0]}"
    return f"; the states of {layers[last][0]} are the same{after}"


def _check_classifier(
    model: _StoredModel, classifier: CheckpointClassifier, read: torch.Tensor, given: Sequence[torch.Tensor]
) -> None:
    """That the last layer of a model's head makes its scores of what it reads of rows."""
    linear, scores = model.scores(classifier, given)
    if not _is_alike(linear(read), scores):
        raise Refusal(
            "not-the-last-layer",
            f"{classifier.layer} isn't the last layer of the classification head of {model.name}",
            remedy="leave the head out with --pooling mean",
        )


def _check_causal(name: str, beginnings: torch.Tensor) -> None:
    """That two rows with the same beginning are answered the same there."""
    if not _is_alike(*beginnings):
        raise Refusal(
            "not-causal",
            f"{name} sees tokens that come later, so it isn't a causal language model",
            remedy="set is_decoder to true in its config.json if it was trained as one; else take another",
        )


def _is_alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).abs().max()) <= _allowed(expected)


def _allowed(expected: torch.Tensor) -> float:
    return MODEL_TOLERANCE * max(1.0, float(expected.abs().max()))
