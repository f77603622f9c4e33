"""Compare the blocks of a chain with transformers' own model, at every export.

Both read each weight from the files when an operator needs it, and free it afterwards. So a model of any size
is compared in the memory of its largest layer (server_export/checkpoint/lazy_weights.py).
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
from server_export.check.transformers_forward import refuse_if_transformers_fails
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

# Largest allowed difference, relative to the largest value if that is more than 1. Models of all tested
# architectures differ by less than 2e-6.
MODEL_TOLERANCE = 1e-4
_ROWS, _TOKENS, _EQUAL_TOKENS = 2, 7, 5
_REMEDY = "Please report the problem with the name of the model."


@dataclass(frozen=True)
class ModelComparison:
    """How much a chain's blocks differ from transformers' model, in float32.

    Attributes:
        difference: largest difference of any log-probability or hidden state.
        allowed: largest allowed difference.
        tokens: number of tokens that were compared.
        experts: number of experts that these tokens were routed to, and of all experts; (0, 0) if the model
            has none.
    """

    difference: float
    allowed: float
    tokens: int
    experts: tuple[int, int]

    def describe(self) -> str:
        """Return the comparison as text for the log of an export."""
        called, total = self.experts
        experts = f"; {called:,} of {total:,} experts were called" if called < total else ""
        return f"blocks and transformers' model differ by {self.difference:.2g}{experts}"

    def to_json(self) -> dict[str, Any]:
        """Return the `model` block of a manifest's `verification`."""
        return asdict(self)


def compare_with_model(chain: ModelChain, name_or_path: str, revision: str | None) -> ModelComparison:
    """Compare outputs of the blocks in float32 with outputs of transformers' own model.

    The outputs are log-probabilities of a decoder or hidden states of an encoder, for two rows, without
    adapter. A decoder's rows begin with the same tokens; one of an encoder's rows has padding.

    Args:
        chain: the blocks.
        name_or_path: hub id or path of the model.
        revision: revision of a hub model.

    Raises:
        Refusal: outputs differ by more than `MODEL_TOLERANCE`, so that the model was cut or traced wrongly
            (`differs-from-model`); a decoder attends to later tokens (`not-causal`); an encoder reads padding
            (`reads-padding`); transformers can't run the model (`model-fails-in-transformers`).
        BundleError: the files lack a weight, have an additional one, or a weight isn't finite.
    """
    pooled, files = not chain.is_decoder, chain.weights.files
    loaded = load_meta_model(name_or_path, pooled=pooled, revision=revision, own_head=chain.has_own_head)
    check_names(loaded, files)
    model = _StoredModel(loaded, files)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (
        torch.randint(0, limit, (_ROWS, _TOKENS), generator=generator)
        for limit in (chain.vocabulary_size, max(chain.classes, 1))
    )
    padding = getattr(loaded.config, "pad_token_id", None)
    # RoBERTa doesn't count padding tokens in its positions.
    tokens[tokens == padding] = 0 if padding else 1
    mask = torch.ones_like(tokens)
    reads_padding = False
    with torch.no_grad():
        if chain.is_decoder:
            tokens[1, :_EQUAL_TOKENS], targets[1] = tokens[0, :_EQUAL_TOKENS], targets[0]
            columns = [row for rows in chain.head_rows for row in rows]
            expected = log_probabilities(model.run(tokens, mask).logits[..., columns], targets)
            _check_causal(model.name, expected[:, :_EQUAL_TOKENS])
        else:
            mask[1, _EQUAL_TOKENS:] = 0
            # The expected states of a padded row are those of the row alone.
            alone = hidden_states_of(model.run(tokens[1:, :_EQUAL_TOKENS]), _EQUAL_TOKENS)[0]
            output = model.run(tokens, mask)
            expected = hidden_states_of(output, _TOKENS).clone()
            if loaded.classifier is not None:
                _check_classifier(model, loaded.classifier, output.logits, (tokens, mask))
            reads_padding = not _is_close(expected[1, :_EQUAL_TOKENS], alone)
            expected[1, :_EQUAL_TOKENS] = alone
        extra_input = targets if chain.is_decoder else padding_mask(mask.float())
        blocks = _Blocks(replace(with_scheme(chain, "fp32"), weights=LazyWeights(chain.weights)))
        outputs = blocks.run(tokens, extra_input)
    outputs, expected = outputs.reshape(expected.shape)[mask.bool()], expected[mask.bool()]
    difference = float((outputs - expected).abs().max())
    if not _is_close(outputs, expected):
        if reads_padding:
            raise Refusal(
                "reads-padding",
                f"{model.name} reads the padding of a row like tokens, so its outputs depend on the other "
                "rows of a batch.",
                remedy="Use another checkpoint. The attention of other encoders masks padding.",
            )
        raise Refusal(
            "differs-from-model",
            f"Outputs of the blocks differ from those of the model {model.name} by {difference:.3g}"
            f"{_where(model.states, blocks.states)}.",
            remedy=_REMEDY,
        )
    return ModelComparison(difference, _allowed(expected), tokens.numel(), blocks.experts)


def check_causal(name_or_path: str, revision: str | None, files: ModelFiles) -> None:
    """Raise Refusal (`not-causal`) if the outputs of a decoder depend on later tokens."""
    loaded = load_meta_model(name_or_path, pooled=False, revision=revision)
    model = _StoredModel(loaded, files)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, vocabulary_size(loaded.model), (_ROWS, _TOKENS), generator=generator)
    tokens[1, :_EQUAL_TOKENS] = tokens[0, :_EQUAL_TOKENS]
    with torch.no_grad():
        logprobs = torch.log_softmax(model.run(tokens).logits, -1)
    _check_causal(model.name, logprobs[:, :_EQUAL_TOKENS])


class _StoredModel:
    """transformers' model, which reads its weights from the files while it runs.

    Attributes:
        name: name of the model's class.
        states: names and outputs of the layers in the last run, in order.
    """

    def __init__(self, loaded: LoadedModel, files: ModelFiles) -> None:
        self._loaded = loaded
        self.model: Any = loaded.model
        self.name = type(self.model).__name__
        self.states = list[tuple[str, torch.Tensor]]()
        self._files = files
        if any(not is_dense_experts(module) for module in expert_layers(self.model).values()):
            # This implementation calls one expert after another, and only those that the router chose.
            self.model.set_experts_implementation("eager")
        self._tensors = LazyWeights(CheckpointWeights(files, self.model)).of(self.model)

    def run(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        """Return the outputs of the model."""
        self.states.clear()
        inputs = {"input_ids": tokens} | ({} if mask is None else {"attention_mask": mask})
        with self._watched(), refuse_if_transformers_fails(self._loaded):
            return functional_call(self.model, self._tensors, kwargs=inputs)

    def scores(
        self, classifier: CheckpointClassifier, inputs: Sequence[torch.Tensor]
    ) -> tuple[nn.Linear, torch.Tensor]:
        """Return the last layer of the model's own head with its weights, and the model's scores with it."""
        linear = load_classifier_weights(classifier, self.model, self._files).linear
        self.model.set_submodule(classifier.layer, linear)
        scores = self.run(*inputs).logits
        self.model.set_submodule(classifier.layer, nn.Identity())
        return linear, scores

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Record the outputs of the model's layers in `states` during the block."""
        try:
            names = block_names(self.model)
        except ConfigError:
            names = []

        def record(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                state = output[0] if isinstance(output, tuple) else output
                if isinstance(state, torch.Tensor):
                    self.states.append((name, state.clone()))

            return hook

        hooks = [self.model.get_submodule(name).register_forward_hook(record(name)) for name in names]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _Blocks:
    """The blocks of a chain, run one after another.

    Attributes:
        states: hidden states after each block in the last run.
        experts: number of experts that were called, and of all experts.
    """

    def __init__(self, chain: ModelChain) -> None:
        self._chain = chain
        self.states = list[torch.Tensor]()
        self.experts = (0, sum(block.is_expert for block in chain.blocks))

    def run(self, tokens: torch.Tensor, extra_input: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities of a decoder, or hidden states of an encoder.

        Args:
            tokens: i64 [rows, tokens].
            extra_input: targets of a decoder's head, or padding mask of an encoder's attention.
        """
        chain = self._chain
        state, done, shared = tokens, count_parts(chain.head_start), dict[int, torch.Tensor]()
        called = set[int]()
        for group in chain.block_groups(chain.head_start):
            if chain.blocks[group.start].is_expert:
                (state,) = run_experts(chain, group, [state], lambda each, _: called.add(each.number))
            else:
                state = EagerBlock(chain, group.start).compute(state, extra_input, shared=shared)
            self.states.append(state)
            done(len(group))
        self.experts = (len(called), self.experts[1])
        return self._log_probabilities(state, extra_input) if chain.is_decoder else state

    def _log_probabilities(self, state: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the targets, from all vocabulary shards."""
        chain, everything = self._chain, slice(None)
        reading = TargetLogProbs(targets.numpy().ravel(), len(chain.head_rows[0]))
        for shard in range(len(chain.head_rows)):
            within = torch.from_numpy(reading.local_targets(shard, everything)[0]).reshape(targets.shape)
            head = EagerBlock(chain, chain.head_start + shard)

            def parts(shift: FloatArray, head: EagerBlock = head, within: torch.Tensor = within) -> Any:
                shifts = torch.from_numpy(shift).reshape(*targets.shape, 1)
                return head.compute(state, within, shifts).reshape(-1, 2).numpy(), None

            reading.add(shard, everything, *reading.compute_shifted(everything, parts))
        return torch.from_numpy(reading.logprobs)


def _where(layers: Sequence[tuple[str, torch.Tensor]], states: Sequence[torch.Tensor]) -> str:
    """Return text that names the last layer whose output equals that of a block, and the next layer."""
    is_same = [
        any(
            state.numel() == layer.numel() and _is_close(state.flatten(), layer.flatten()) for state in states
        )
        for _, layer in layers
    ]
    if not any(is_same) or all(is_same):
        return ""
    last = len(is_same) - 1 - is_same[::-1].index(True)
    after = "" if last + 1 == len(layers) else f", those of {layers[last + 1][0]} differ"
    return f"; the outputs of {layers[last][0]} are equal{after}"


def _check_classifier(
    model: _StoredModel,
    classifier: CheckpointClassifier,
    features: torch.Tensor,
    inputs: Sequence[torch.Tensor],
) -> None:
    """Raise Refusal unless the last layer of the model's head computes the model's scores from its input.

    Args:
        model: the model without this layer.
        classifier: the layer.
        features: outputs of the model without the layer.
        inputs: inputs of the model.
    """
    linear, scores = model.scores(classifier, inputs)
    if not _is_close(linear(features), scores):
        raise Refusal(
            "not-the-last-layer",
            f"{classifier.layer} isn't the last layer of the classification head of {model.name}.",
            remedy="Leave the head out with --pooling mean.",
        )


def _check_causal(name: str, beginnings: torch.Tensor) -> None:
    """Raise Refusal unless two rows have equal outputs for the tokens that both begin with."""
    if not _is_close(*beginnings):
        raise Refusal(
            "not-causal",
            f"{name} attends to later tokens, so it isn't a causal language model.",
            remedy="If it was trained as one, set is_decoder to true in its config.json.",
        )


def _is_close(outputs: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((outputs - expected).abs().max()) <= _allowed(expected)


def _allowed(expected: torch.Tensor) -> float:
    """Return the largest allowed difference from these values."""
    return MODEL_TOLERANCE * max(1.0, float(expected.abs().max()))
