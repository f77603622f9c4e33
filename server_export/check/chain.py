"""The programs of a chain in the engine against the graphs that they were lowered from, at every export."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from prge.engine import FloatArray
from prge.errors import BundleError
from prge.files.chain import TABLE, Kind
from prge.learning.vocabulary import Reading
from server_export.checkpoint.classifier import Classifier, states_of
from server_export.checkpoint.loading import load_model, vocabulary_size
from server_export.ir.modules import replace_tensor
from server_export.lower.chain import LoweredChain
from server_export.model.chain import ModelChain
from server_export.model.eager import EagerBlock, through_experts
from server_export.pipeline import in_scheme
from server_export.quiet import quiet_engine
from server_export.stage import count_parts
from server_export.trace.attention import padding_mask
from server_export.trace.readout import log_probabilities

# Largest difference, as a part of the largest number. Float blocks of all architectures differ by less than
# 1e-5. Engine and graph round the same activations to int8, where a last bit of difference flips a code.
FLOAT_TOLERANCE = 1e-4
QUANTIZED_TOLERANCE = 5e-2
# Of the whole model in float32; random models of all tested architectures differ by less than 2e-6.
MODEL_TOLERANCE = 1e-3
# Where activations are rounded, tokens between two experts may get the other: so many numbers are compared.
_ALIKE = 0.9
_ROWS, _TOKENS, _ALIKE_TOKENS = 2, 7, 5
_REMEDY = "export it with --quantize fp32, and please report it with the name of the model"


@dataclass(frozen=True)
class ChainVerification:
    """Largest difference of any output, by role, as a part of the output's largest number."""

    differences: dict[str, float]
    tolerance: float

    def to_json(self) -> dict[str, Any]:
        """The manifest's `verification` block."""
        return asdict(self)


def verify_chain(chain: ModelChain, lowered: LoweredChain, folder: Path, scheme: str) -> ChainVerification:
    """Run every role of every kind on the weights of one of its blocks, in the engine and in PyTorch.

    Raises:
        BundleError: they differ by more than the tolerance, or an answer isn't finite.
    """
    tolerance = FLOAT_TOLERANCE if scheme == "fp32" else QUANTIZED_TOLERANCE
    differences: dict[str, float] = {}
    done = count_parts(len(lowered.kinds))
    for number, kind in enumerate(lowered.kinds):
        # The last of a kind: the programs were lowered with none's weights.
        place = max(index for index, block in enumerate(lowered.blocks) if block.kind == number)
        tensors = lowered.lowered[number].with_constants(chain.tensors(place))
        weights = folder / lowered.blocks[place].weights
        chooses = chain.blocks[place].experts is not None and scheme != "fp32"
        share = _ALIKE if chooses else 1.0
        for role, program in lowered.lowered[number].programs.items():
            inputs = _example(chain, program, kind.methods[role].inputs, lowered.blocks[place].tables)
            expected = _eager(program, tensors, inputs)
            found = _engine(folder / kind.program, weights, role, inputs)
            for name, ours, theirs in zip(kind.methods[role].outputs, found, expected, strict=True):
                difference = _difference(ours, theirs, share)
                if not difference <= tolerance:
                    raise BundleError(
                        f"{kind.program} computes {name} in the role {role} otherwise than the model's "
                        f"graph: they differ by {difference:.3g} of the largest number, {scheme} allows "
                        f"{tolerance:.3g}",
                        remedy=_REMEDY,
                    )
                differences[role] = max(difference, differences.get(role, 0.0))
        check_specs(folder / kind.program, kind)
        done()
    return ChainVerification(differences, tolerance)


def check_specs(path: Path, kind: Kind) -> None:
    """Compare the specs of a kind's methods with the metadata of its program.

    Raises:
        BundleError: an input or output has other sizes, or another dtype.
    """
    from executorch.runtime import Runtime

    with quiet_engine():
        program = Runtime.get().load_program(path)
    for role, method in kind.methods.items():
        found = program.metadata(role)
        for specs, count, tensor in (
            (method.input_specs, found.num_inputs(), found.input_tensor_meta),
            (method.output_specs, found.num_outputs(), found.output_tensor_meta),
        ):
            expected = [(spec.sizes, np.dtype(spec.dtype).itemsize * math.prod(spec.sizes)) for spec in specs]
            tensors = [(tuple(each.sizes()), each.nbytes()) for each in map(tensor, range(count))]
            if tensors != expected:
                raise BundleError(
                    f"{kind.program} has other tensors in the role {role} than the program that it was "
                    f"lowered from: {tensors}, must be {expected}",
                    remedy=_REMEDY,
                )


def difference_from_model(chain: ModelChain, name_or_path: str, revision: str | None) -> float:
    """Largest difference between the blocks in float32, in PyTorch, and transformers' own model.

    Of log-probabilities or states, of two rows without adapter, a decoder's with the same beginning, one of
    an encoder's with padding. The model is in memory as a whole.

    Raises:
        BundleError: they differ by more than `MODEL_TOLERANCE`, so that the model was cut or traced wrongly;
            or what a decoder answers depends on tokens that come later, an encoder's answer on padding.
    """
    loaded = load_model(
        name_or_path, pooled=not chain.is_decoder, revision=revision, own_head=chain.has_own_head
    )
    model: Any = loaded.model
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (
        torch.randint(0, most, (_ROWS, _TOKENS), generator=generator)
        for most in (chain.vocabulary_size, max(chain.classes, 1))
    )
    padding = getattr(model.config, "pad_token_id", None)
    # RoBERTa numbers its positions by what isn't the padding token.
    tokens[tokens == padding] = 0 if padding else 1
    mask = torch.ones_like(tokens)
    if chain.is_decoder:
        tokens[1, :_ALIKE_TOKENS], targets[1] = tokens[0, :_ALIKE_TOKENS], targets[0]
    else:
        mask[1, _ALIKE_TOKENS:] = 0
    name = type(model).__name__
    reads_padding = False
    with torch.no_grad():
        output = model(input_ids=tokens, attention_mask=mask)
        if chain.is_decoder:
            words = [word for rows in chain.head_rows for word in rows]
            expected = log_probabilities(output.logits[..., words], targets)
            _check_causal(name, expected[:, :_ALIKE_TOKENS])
        else:
            expected = states_of(output, _TOKENS).clone()
            if loaded.classifier is not None:
                _check_classifier(model, loaded.classifier, output.logits, tokens, mask)
            # A row means what it means alone.
            alone = states_of(model(input_ids=tokens[1:, :_ALIKE_TOKENS]), _ALIKE_TOKENS)[0]
            reads_padding = not _is_alike(expected[1, :_ALIKE_TOKENS], alone)
            expected[1, :_ALIKE_TOKENS] = alone
        # The blocks need its memory.
        del model, output, loaded
        beside = targets if chain.is_decoder else padding_mask(mask.float())
        found = _answers(in_scheme(chain, "fp32"), tokens, beside)
    found, expected = found.reshape(expected.shape)[mask.bool()], expected[mask.bool()]
    is_alike, difference = _is_alike(found, expected), float((found - expected).abs().max())
    if not is_alike and reads_padding:
        raise BundleError(
            f"{name} reads the padding of a row as if it were tokens, so what it answers changes with the "
            "rows beside",
            remedy="take another checkpoint; of other encoders padding is hidden by attention",
        )
    if not is_alike:
        raise BundleError(
            f"the blocks don't compute what the model {name} computes: their outputs differ "
            f"by {difference:.3g}",
            remedy=_REMEDY,
        )
    return difference


def _check_classifier(
    model: torch.nn.Module,
    classifier: Classifier,
    read: torch.Tensor,
    tokens: torch.Tensor,
    mask: torch.Tensor,
) -> None:
    """That the last layer of a model's head makes its scores of what it reads of rows."""
    model.set_submodule(classifier.layer, classifier.linear)
    scores = model(input_ids=tokens, attention_mask=mask).logits
    model.set_submodule(classifier.layer, torch.nn.Identity())
    if not _is_alike(classifier.linear(read), scores):
        raise BundleError(
            f"{classifier.layer} isn't the last layer of the classification head of {type(model).__name__}",
            remedy="leave the head out with --pooling mean",
        )


def check_causal(name_or_path: str, revision: str | None) -> None:
    """Raise BundleError if what a decoder answers depends on tokens that come later.

    The model is in memory as a whole.
    """
    model: Any = load_model(name_or_path, pooled=False, revision=revision).model
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, vocabulary_size(model), (_ROWS, _TOKENS), generator=generator)
    tokens[1, :_ALIKE_TOKENS] = tokens[0, :_ALIKE_TOKENS]
    with torch.no_grad():
        answers = torch.log_softmax(model(input_ids=tokens).logits, -1)
    _check_causal(type(model).__name__, answers[:, :_ALIKE_TOKENS])


def _is_alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    difference = float((found - expected).abs().max())
    return difference <= MODEL_TOLERANCE * max(1.0, float(expected.abs().max()))


def _check_causal(name: str, beginnings: torch.Tensor) -> None:
    """That two rows with the same beginning are answered the same there."""
    if not _is_alike(*beginnings):
        raise BundleError(
            f"{name} sees tokens that come later, so it isn't a causal language model",
            remedy="set is_decoder to true in its config.json if it was trained as one; else take another",
        )


def _answers(chain: ModelChain, tokens: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """What the blocks compute one after the other; `beside` is of a head, or of an encoder's attention."""
    state, done, shared = tokens, count_parts(chain.end), dict[int, torch.Tensor]()
    for turn in chain.turns(chain.end):
        if chain.blocks[turn.start].is_expert:
            (state,) = through_experts(chain, turn, [state])
        else:
            state = EagerBlock(chain, turn.start).answer(state, beside, shared=shared)
        done(len(turn))
    if not chain.is_decoder:
        return state
    every = slice(None)
    reading = Reading(beside.numpy().ravel(), len(chain.head_rows[0]))
    for piece in range(len(chain.head_rows)):
        within = torch.from_numpy(reading.within(piece, every)[0]).reshape(beside.shape)
        head = EagerBlock(chain, chain.end + piece)

        def parts(shift: FloatArray, head: EagerBlock = head, within: torch.Tensor = within) -> Any:
            shifts = torch.from_numpy(shift).reshape(*beside.shape, 1)
            return head.answer(state, within, shifts).reshape(-1, 2).numpy(), None

        reading.add(piece, every, *reading.ask(every, parts))
    return torch.from_numpy(reading.logprobs)


def _difference(ours: torch.Tensor, theirs: torch.Tensor, share: float) -> float:
    """Largest difference of all numbers, or of this share of them that differ least."""
    if ours.numel() != theirs.numel() or not bool(torch.isfinite(ours).all()):
        return float("inf")
    differences = (ours.reshape(theirs.shape) - theirs).abs().flatten().sort().values
    largest = differences[math.ceil(share * len(differences)) - 1]
    return float(largest) / max(float(theirs.abs().max()), 1e-30)


def _example(
    chain: ModelChain, program: ExportedProgram, names: Sequence[str], tables: Sequence[int]
) -> list[torch.Tensor]:
    """Random inputs in the shapes that the program was traced with."""
    generator = torch.Generator().manual_seed(0)
    values = []
    shapes = dict(zip(names, (like.shape for like in program.example_inputs[0]), strict=True))
    tokens = shapes["tokens"][-1] if "tokens" in shapes else shapes["state"][-2]
    for name, like in zip(names, program.example_inputs[0], strict=True):
        if name in ("tokens", "targets"):
            most = len(chain.head_rows[0]) if name == "targets" else chain.vocabulary_size
            values.append(torch.randint(0, most, like.shape, generator=generator))
        elif name == "ones":
            values.append(torch.ones(like.shape))
        elif name == "padding":
            values.append(torch.zeros(like.shape))
        elif name.startswith(TABLE):
            table = chain.tables.all[tables[int(name.removeprefix(TABLE))]]
            values.append(table.of(tokens).expand(like.shape))
        else:
            values.append(torch.randn(like.shape, generator=generator) * 0.3)
    return values


def _eager(
    program: ExportedProgram, tensors: dict[str, torch.Tensor], inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    module = program.module(check_guards=False)
    for name in (*program.state_dict, *program.constants):
        replace_tensor(module, name, tensors[name])
    with torch.no_grad():
        return list(module(*inputs))


def _engine(program: Path, weights: Path, role: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    from executorch.extension.pybindings import _C

    try:
        with quiet_engine():
            module = _C._load_for_executorch(str(program), str(weights))
            return list(module.run_method(role, [tensor.contiguous() for tensor in inputs]))
    except RuntimeError as error:
        raise BundleError(
            f"the engine refuses {program.name} in the role {role}: {error}",
            remedy="please report it with the name of the model",
        ) from None
