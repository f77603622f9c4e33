"""A program as a torch module: the model with adapters, its constants, its readout, and its contracts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from prge.bundle import SCORE_METHOD as SCORE_METHOD
from prge.bundle import STEP_METHOD as STEP_METHOD
from prge.bundle import TRUNK_METHOD, UPPER_METHOD, variant_name
from prge.contract import ABSENT, U_PREFIX, V_PREFIX, AdaptedModule, Contract
from prge.errors import BundleError, ConfigError
from prge.peft import PeftAdapter, read_lora
from server_export.model import attention, readout
from server_export.model.blocks import blocks_below, in_top_blocks
from server_export.model.loading import LoadedModel, load_model, parameter_count
from server_export.model.lora_fa import (
    CallInputs,
    convert_conv1d,
    default_target_modules,
    initial_lora_a,
    insert_lora,
    match_start_adapter,
    match_target_modules,
    normal_targets,
)
from server_export.model.quantization import QuantizationReport, quantize
from server_export.model.reference import exact_answers
from server_export.model.rotary import make_rotary_constant
from server_export.model.tokenization import label_token_ids, load_tokenizer
from server_export.settings import ExportConfig

# Random float32 models of all tested architectures differ by less than 2e-6 here.
MODEL_TOLERANCE = 1e-3


class StackProgram(nn.Module):
    """The program before lowering; inputs and outputs are those of its stack contract, in order.

    It takes any number of rows and copies, and rows of any length up to the contract's; only its graph is
    traced with those of a contract.
    """

    position_ids: torch.Tensor
    token_type_ids: torch.Tensor
    dtype_marker: torch.Tensor

    def __init__(
        self,
        model: nn.Module,
        inputs: CallInputs,
        contract: Contract,
        pooling: str,
        position_ids: torch.Tensor,
    ) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.contract = contract
        self.pool = readout.pooling_of(pooling)
        self.accepted = frozenset(inspect.signature(model.forward).parameters)
        self.register_buffer("position_ids", position_ids, persistent=False)
        self.register_buffer("token_type_ids", torch.zeros_like(position_ids), persistent=False)
        # Follows the module's conversions: a quantized model has no floating point parameter to ask.
        self.register_buffer("dtype_marker", torch.zeros(1), persistent=False)

    def forward(self, tokens: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        """(tokens, positions, targets, *lora_b) -> logprobs; (tokens, attention_mask, *lora_b) -> pooled."""
        leading = len(self.contract.inputs) - len(self.contract.modules) - 1
        lora_b = rest[leading:]
        names = (module.name for module in self.contract.modules)
        self.inputs.lora_b = dict(zip(names, lora_b, strict=True))
        try:
            if self.contract.is_encoder:
                return self._pooled(tokens, rest[0])
            return self._logprobs(tokens, rest[0], rest[1])
        finally:
            self.inputs.clear()

    def _logprobs(self, tokens: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.inputs.positions = positions
        logits = self._call(tokens, None).logits
        return readout.log_probabilities(logits, targets)

    def _pooled(self, tokens: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask.to(self.dtype_marker.dtype)
        states = self._call(tokens, attention.padding_mask(mask)).last_hidden_state
        return self.pool(states, mask)

    def _call(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> Any:
        length = tokens.shape[1]
        values = {
            "position_ids": self.position_ids[:, :length],
            # Passed with one row: the model's own default has all rows and would be a large constant.
            "token_type_ids": self.token_type_ids[:, :length] if _has_token_types(self.model) else None,
            "use_cache": False,
        }
        arguments = {
            name: value for name, value in values.items() if name in self.accepted and value is not None
        }
        return self.model(input_ids=tokens, attention_mask=mask, return_dict=True, **arguments)


@dataclass(frozen=True)
class StartAdapter:
    """The adapter that a bundle starts from, and the model that it belongs to.

    `lora_a` f32 [rank, in] and `lora_b` f32 [out, rank] are unscaled.
    """

    loaded: LoadedModel
    rank: int
    alpha: float
    target_modules: str | list[str]
    lora_a: Mapping[str, torch.Tensor]
    lora_b: Mapping[str, torch.Tensor]
    had_conv1d: bool
    parameters: int


def start_adapter(config: ExportConfig, outline: LoadedModel, had_conv1d: bool) -> StartAdapter:
    """The adapter that `config` asks for, of a model that may lack its weights.

    Raises:
        PrgeError: the adapter or settings can't be used.
    """
    parameters = parameter_count(outline.model)
    start = read_lora(config.adapter) if config.adapter is not None else None
    rank, alpha, targets, names = _adapted_layers(config, outline.model, start)
    lora_a, lora_b = _matrices(config, outline.model, start, names)
    return StartAdapter(outline, rank, alpha, targets, lora_a, lora_b, had_conv1d, parameters)


@dataclass(frozen=True)
class BuiltProgram:
    """A program ready to be lowered, with what its bundle says about it.

    `contract` is that of a training step, `score_contract` that of the program which scores rows where a
    step's can't. With `has_trunk` the step is to be cut into a trunk and what is above it. `shorter` has the
    lengths below theirs that every method gets a variant for. `lora_a` f32
    [rank, in] and `lora_b` f32 [out, rank] are the adapter to start from, unscaled. `float_answers` holds by
    method the outputs for `example_inputs(contract)` before the base was quantized; nothing where it wasn't.
    """

    module: StackProgram
    contract: Contract
    score_contract: Contract | None
    loaded: LoadedModel
    rank: int
    alpha: float
    target_modules: str | list[str]
    lora_a: Mapping[str, torch.Tensor]
    lora_b: Mapping[str, torch.Tensor]
    had_conv1d: bool
    parameters: int
    has_trunk: bool = False
    shorter: tuple[int, ...] = ()
    float_answers: Mapping[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    quantization: QuantizationReport = field(default_factory=QuantizationReport)

    @property
    def step_method(self) -> str:
        """The method that takes steps."""
        return UPPER_METHOD if self.has_trunk else STEP_METHOD

    @property
    def contracts(self) -> dict[str, Contract]:
        """Contract of every method of the program file, a step's as it is before it is cut."""
        scoring = {} if self.score_contract is None else self._variants(SCORE_METHOD, self.score_contract)
        return {**self.steps, **scoring}

    @property
    def steps(self) -> dict[str, Contract]:
        """Contracts of the methods that take steps, before they are cut: the longest, then the shorter."""
        return self._variants(self.step_method, self.contract)

    def longest(self, method: str) -> Contract:
        """Contract of the method that does what one of `contracts` does, for the longest rows."""
        if method in self.steps or self.score_contract is None:
            return self.contract
        return self.score_contract

    def trunk_method(self, contract: Contract) -> str:
        """The method below the step of a contract, of whatever length."""
        if contract.sequence_length == self.contract.sequence_length:
            return TRUNK_METHOD
        return variant_name(TRUNK_METHOD, contract.sequence_length)

    def _variants(self, method: str, contract: Contract) -> dict[str, Contract]:
        shorter = {variant_name(method, length): contract.shortened(length) for length in self.shorter}
        return {method: contract, **shorter}


def build_program(
    config: ExportConfig, loaded: LoadedModel | None = None, label_tokens: Sequence[int] = ()
) -> BuiltProgram:
    """Make the program that `config` asks for.

    Args:
        config: the export's settings; its paths are used for what isn't given here.
        loaded: the model, changed in place; None loads it.
        label_tokens: token ids of the label words of a verbalizer.

    Raises:
        PrgeError: the model, adapter or settings can't be used, or the model isn't computed rightly by it.
    """
    if loaded is None:
        pooled = None if config.readout is None else config.readout == "pooled"
        loaded = load_model(config.model, pooled=pooled, revision=config.revision)
    if config.label_words and not label_tokens:
        label_tokens = label_token_ids(load_tokenizer(config.model, config.revision), config.label_words)
    kind = readout_of(config, loaded, label_tokens)
    position_ids = position_numbers(loaded, config.sequence_length)
    reference = _Reference(loaded, config)
    parameters = parameter_count(loaded.model)
    had_conv1d = convert_conv1d(loaded.model) > 0

    start = read_lora(config.adapter) if config.adapter is not None else None
    rank, alpha, targets, names = _adapted_layers(config, loaded.model, start)
    lora_a, lora_b = _matrices(config, loaded.model, start, names)
    inputs = CallInputs()
    modules = insert_lora(loaded.model, lora_a, alpha / rank, inputs)
    if kind != "pooled":
        readout.insert_head(loaded.model, inputs, label_tokens)
    attention.register()
    loaded.model.set_attn_implementation(attention.NAME)
    make_rotary_constant(loaded.model)
    stack = _contract(config, loaded, kind, modules, label_tokens)
    module = StackProgram(loaded.model, inputs, stack, config.pooling, position_ids).eval()
    reference.check(module)
    contract, score_contract = _method_contracts(config, stack, blocks_below(loaded.model, list(lora_a)))
    built = BuiltProgram(
        module=module,
        contract=contract,
        score_contract=score_contract,
        loaded=loaded,
        rank=rank,
        alpha=alpha,
        target_modules=targets,
        lora_a=lora_a,
        lora_b=lora_b,
        had_conv1d=had_conv1d,
        parameters=parameters,
        has_trunk=config.trunk_cache,
        shorter=config.shorter_lengths,
    )
    if config.quantize == "fp32":
        return built
    float_answers = {
        method: exact_answers(module, contract, example_inputs(contract))
        for method, contract in built.contracts.items()
    }
    return replace(built, float_answers=float_answers, quantization=quantize(module, config.quantize))


def planned_contracts(
    config: ExportConfig, loaded: LoadedModel, label_tokens: Sequence[int] = ()
) -> tuple[Contract, Contract | None, int]:
    """What `build_program` would make of a model, which may lack its weights.

    Returns:
        The contract of a step before it is cut, that of the program for scoring if there is another one, and
        the number of blocks below the first adapted layer.

    Raises:
        PrgeError: the model, adapter or settings can't be used.
    """
    kind = readout_of(config, loaded, label_tokens)
    position_numbers(loaded, config.sequence_length)
    start = read_lora(config.adapter) if config.adapter is not None else None
    rank, _, _, names = _adapted_layers(config, loaded.model, start)
    layers = {name: loaded.model.get_submodule(name) for name in names}
    modules = tuple(
        AdaptedModule(name, rank, int(layer.in_features), int(layer.out_features))
        for name, layer in layers.items()
    )
    stack = _contract(config, loaded, kind, modules, label_tokens)
    below = blocks_below(loaded.model, list(names))
    return (*_method_contracts(config, stack, below), below)


def example_inputs(contract: Contract, seed: int = 0, lora_b_scale: float = 0.02) -> tuple[torch.Tensor, ...]:
    """Random inputs in order: padded rows of different lengths, another `lora_b` in every copy, signs."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    classes = len(contract.label_tokens) or contract.vocabulary_size
    # Every row an example with some candidates, in turn one of which is right, or a completion.
    several = min(3, contract.candidates) if contract.is_exact else 0
    values: list[torch.Tensor] = []
    for spec in contract.inputs:
        if spec.name == "tokens":
            values.append(draw(contract.vocabulary_size, spec.shape))
        elif spec.name == "attention_mask":
            lengths = draw(contract.sequence_length, (spec.shape[0], 1)) + 1
            values.append((torch.arange(contract.sequence_length) < lengths).long())
        elif spec.name == "positions":
            values.append(draw(contract.sequence_length, spec.shape))
        elif spec.name == "targets":
            values.append(draw(classes, spec.shape))
        elif spec.name == "cells":
            values.append(
                draw(several, spec.shape) + torch.arange(spec.shape[0]).unsqueeze(1) * contract.candidates
            )
        elif spec.name == "offsets":
            values.append(
                torch.where(torch.arange(spec.shape[1]) < several, 0.0, ABSENT).repeat(spec.shape[0], 1)
            )
        elif spec.name == "labels":
            chosen = torch.arange(spec.shape[1]) == draw(several, (spec.shape[0], 1))
            values.append(chosen.float() / spec.shape[0])
        elif spec.name == "shares":
            values.append(
                (torch.arange(1, spec.shape[0] + 1) % 2).float().reshape(spec.shape) / spec.shape[0]
            )
        elif spec.name in ("weights", "heads"):
            values.append(torch.randn(spec.shape, generator=generator))
        elif spec.name.startswith((U_PREFIX, V_PREFIX)):
            values.append(draw(2, spec.shape) * 2.0 - 1.0)
        else:
            values.append(torch.randn(spec.shape, generator=generator) * lora_b_scale)
    return tuple(values)


class _Reference:
    """What the untouched model computes, kept to compare the program without adapter with it."""

    def __init__(self, loaded: LoadedModel, config: ExportConfig) -> None:
        generator = torch.Generator().manual_seed(1)
        length = config.sequence_length
        vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
        padding = getattr(loaded.config, "pad_token_id", None)
        padding = padding if padding is not None and 0 <= padding < vocabulary else 0
        tokens = torch.randint(0, vocabulary, (2, length), generator=generator)
        # RoBERTa numbers its positions by what isn't the padding token.
        tokens[tokens == padding] = (padding + 1) % vocabulary
        self.lengths = (length, max(1, length * 2 // 3))
        self.mask = (torch.arange(length) < torch.tensor(self.lengths).reshape(2, 1)).long()
        self.tokens = torch.where(self.mask.bool(), tokens, padding)
        with torch.no_grad():
            output = loaded.model(input_ids=self.tokens, attention_mask=self.mask, return_dict=True)
        self.values = output.logits if loaded.is_decoder else output.last_hidden_state

    def check(self, program: StackProgram) -> None:
        """Raise BundleError if the program with a zero adapter isn't the model."""
        contract = program.contract
        rows = torch.arange(contract.rows) % 2
        mask = self.mask[rows]
        zeros = [torch.zeros(spec.shape) for spec in contract.inputs if spec.name.startswith("lora_b.")]
        if contract.is_encoder:
            rest = [mask]
            expected = program.pool(self.values, self.mask.to(self.values.dtype))[rows]
        else:
            last = mask.sum(1, keepdim=True) - 1
            positions = (torch.arange(contract.positions) * 7 % contract.sequence_length).minimum(last)
            labels = list(contract.label_tokens) or list(range(contract.vocabulary_size))
            targets = torch.arange(positions.numel()).reshape(positions.shape) % len(labels)
            rest = [positions, targets]
            logits = self.values[rows][torch.arange(contract.rows).unsqueeze(1), positions][..., labels]
            expected = readout.log_probabilities(logits, targets)
        with torch.no_grad():
            difference = float((program(self.tokens[rows], *rest, *zeros) - expected).abs().max())
        if not difference <= MODEL_TOLERANCE * max(1.0, float(expected.abs().max())):
            raise BundleError(
                f"the program doesn't compute what the model {type(program.model).__name__} computes: "
                f"their outputs differ by {difference:.3g}",
                remedy="this architecture isn't supported; take another checkpoint, and please report it",
            )


def readout_of(config: ExportConfig, loaded: LoadedModel, label_tokens: Sequence[int]) -> str:
    """What a program answers; raises ConfigError for a readout that the model hasn't."""
    if not loaded.is_decoder:
        if config.readout not in (None, "pooled") or config.label_words:
            raise ConfigError(
                "the readout doesn't fit the model:",
                [
                    f"{loaded.name_or_path} is an encoder ({loaded.config.model_type}), "
                    "it has the readout pooled only"
                ],
            )
        return "pooled"
    return "verbalizer" if label_tokens else "logprobs"


def _adapted_layers(
    config: ExportConfig, model: nn.Module, start: PeftAdapter | None
) -> tuple[int, float, str | list[str], dict[str, str]]:
    """Rank, alpha, target modules, and layers in module order with the names that `start` has for them."""
    if start is not None:
        return start.rank, start.alpha, start.target_modules, match_start_adapter(model, start)
    targets = normal_targets(config.target_modules or default_target_modules(model))
    names = match_target_modules(model, targets)
    if config.adapt_layers is not None:
        # Whole names mean the same layers to PEFT, however the targets were chosen.
        targets = names = in_top_blocks(model, names, config.adapt_layers)
    return config.rank, config.alpha, targets, {name: name for name in names}


def _matrices(
    config: ExportConfig, model: nn.Module, start: PeftAdapter | None, names: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """`lora_a` and `lora_b` to start from."""
    if start is not None:
        lora_a, lora_b = (
            {ours: torch.from_numpy(matrices[theirs]) for ours, theirs in names.items()}
            for matrices in (start.lora_a, start.lora_b)
        )
        return lora_a, lora_b
    lora_a = initial_lora_a(model, list(names), config.rank, config.seed)
    return lora_a, {n: torch.zeros(model.get_submodule(n).out_features, config.rank) for n in names}


def _contract(
    config: ExportConfig,
    loaded: LoadedModel,
    kind: str,
    modules: tuple[AdaptedModule, ...],
    label_tokens: Sequence[int],
) -> Contract:
    return Contract(
        kind="stack",
        readout=kind,
        copies=config.stack_copies,
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        positions=0 if kind == "pooled" else config.read_positions,
        width=int(loaded.config.hidden_size),
        vocabulary_size=int(loaded.model.get_input_embeddings().weight.shape[0]),
        label_tokens=tuple(label_tokens),
        modules=modules,
    )


def _method_contracts(config: ExportConfig, stack: Contract, below: int) -> tuple[Contract, Contract | None]:
    """Contracts of a step, not cut yet, and of scoring; `below` blocks lie under the first adapted layer."""
    if config.trunk_cache and not below:
        raise ConfigError(
            "there is no trunk to cache:",
            ["no block lies below the first adapted layer"],
            remedy="adapt upper blocks only, with --adapt-layers top:k, or leave --trunk-cache out",
        )
    if config.estimator != "antithetic":
        contract = (
            replace(stack, kind="tangent", queries=config.queries)
            if config.estimator == "tangent"
            else replace(stack, kind="exact", classes=config.classes if stack.is_encoder else 0)
        )
        return contract, replace(stack, batch_size=config.score_batch_size or contract.computed_rows)
    if stack.copies > 1 and below:
        return replace(stack, shared_rows=True), replace(stack, copies=1, batch_size=stack.rows)
    return stack, stack if config.trunk_cache else None


def position_numbers(loaded: LoadedModel, length: int) -> torch.Tensor:
    """Position numbers i64 [1, length] of a right-padded row."""
    limit = getattr(loaded.config, "max_position_embeddings", None)
    numbering = [
        module for module in loaded.model.modules() if hasattr(module, "create_position_ids_from_input_ids")
    ]
    # RoBERTa's family counts from after the padding token.
    first = int(numbering[0].padding_idx) + 1 if numbering else 0
    if limit is not None and first + length > limit:
        raise ConfigError(
            "the sequence length doesn't fit the model:",
            [f"sequence_length is {length}, {loaded.name_or_path} has {limit - first} positions"],
        )
    return torch.arange(first, first + length).reshape(1, length)


def _has_token_types(model: nn.Module) -> bool:
    """Whether `token_type_ids` go through a table of their own; GPT-2 would look them up as tokens."""
    return any(name.endswith("token_type_embeddings") for name, _ in model.named_modules())
