"""What a block's method takes and answers: computed from what the block has, and from the method's role.

A role is a view of a block times a derivative.

    view    batch           copies of the adapter, each with a batch of rows
            chunk           some tokens of one row, after others whose keys and values are known
            token           one token of any number of sequences, after others
    deriv.  value           the forward pass
            jvp             with tangents along several directions, the queries
            backward        gradients from the outputs' gradients; computes the forward pass again
            save            the forward pass, which answers residuals too
            backward_saved  gradients from these residuals

`jvp` adds a tangent for each value that an adapter changes, `backward` an input for the gradient of each
such output and an output for the gradient of each such input. In the backward roles each row has a copy of
the adapter, and so a gradient of its own.

Sizes are words:

    copies, batch, queries, tokens, sequences, states, context   what a call chooses, up to the chain's bounds
    entering, leaving        widths of the hidden states before and after the block
    rank, in, out            of an adapted module
    heads, key, value        heads of keys of the block's attention, widths of a key and a value
    members                  queries that share a head of keys
    past                     tokens before, and one that stands for none of them: 1 + context
    words                    of a shard of the vocabulary
    saved                    width of a residual
    high, wide               of a recurrent state, or of what a convolution over tokens keeps
    taken, given             width of a shared value that the block takes from another, or gives
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property, lru_cache


class View(Enum):
    """Which sequences a call has, and how many of their tokens."""

    BATCH = auto()
    CHUNK = auto()
    TOKEN = auto()


class Derivative(Enum):
    """What is computed of a block."""

    VALUE = auto()
    JVP = auto()
    BACKWARD = auto()
    SAVE = auto()
    BACKWARD_SAVED = auto()

    @property
    def is_backward(self) -> bool:
        """Whether gradients go through the block, from its outputs to its inputs."""
        return self in (Derivative.BACKWARD, Derivative.BACKWARD_SAVED)


@dataclass(frozen=True)
class Role:
    """What a method of a block is for."""

    view: View
    derivative: Derivative


# Names of the roles: those of a program's methods.
FORWARD, JVP, BACKWARD = STEP_ROLES = ("forward", "jvp", "backward")
PREFILL, DECODE = "prefill", "decode"
PREFILL_JVP, PREFILL_BACKWARD = "prefill_jvp", "prefill_backward"
RESIDUAL_ROLES = FORWARD_SAVE, BACKWARD_SAVED = "forward_save", "backward_saved"
ROLE_OF: Mapping[str, Role] = {
    FORWARD: Role(View.BATCH, Derivative.VALUE),
    JVP: Role(View.BATCH, Derivative.JVP),
    BACKWARD: Role(View.BATCH, Derivative.BACKWARD),
    PREFILL: Role(View.CHUNK, Derivative.VALUE),
    DECODE: Role(View.TOKEN, Derivative.VALUE),
    FORWARD_SAVE: Role(View.BATCH, Derivative.SAVE),
    BACKWARD_SAVED: Role(View.BATCH, Derivative.BACKWARD_SAVED),
    PREFILL_JVP: Role(View.CHUNK, Derivative.JVP),
    PREFILL_BACKWARD: Role(View.CHUNK, Derivative.BACKWARD),
}
# What an export is asked for; `back` brings those of `RESIDUAL_ROLES` along, rows longer than a chunk theirs.
ROLES = (*STEP_ROLES, PREFILL, DECODE)
ALL_ROLES = tuple(ROLE_OF)
# The role of chunks that computes what a role of whole rows does.
CHUNK_ROLE = {
    name: chunk
    for name, role in ROLE_OF.items()
    for chunk, other in ROLE_OF.items()
    if role.view is View.BATCH and other == replace(role, view=View.CHUNK)
}
# Roles of steps: of an adapter they have an input for what is trained, and no other.
TRAINING_ROLES = tuple(role for role in ALL_ROLES if role not in (PREFILL, DECODE))

HIDDEN_STATES, TOKENS, TABLE, ONES, PADDING_MASK = "hidden_states", "tokens", "table", "ones", "padding_mask"
TARGETS, SHIFT, PARTS, LOGITS = "targets", "shift", "parts", "logits"
LORA_A, LORA_B = "lora_a", "lora_b"
SHARED_IN, SHARED_OUT, RECURRENT_STATE, RESIDUAL = "shared_in", "shared_out", "recurrent_state", "residual"
KEYS, VALUES, PAST_KEYS, PAST_VALUES, PAST_ONES = "keys", "values", "past_keys", "past_values", "past_ones"
# What is added to the scores of the tokens before, of the call's own tokens, and of the one token.
PAST_MASK, CAUSAL_MASK, OWN_MASK = "past_mask", "causal_mask", "own_mask"
_INTEGERS = (TOKENS, TARGETS)


class Part(Enum):
    """Which of the tensors that belong to a value a port is."""

    VALUE = auto()
    TANGENT = auto()
    GRADIENT = auto()
    # Factors of an adapter matrix's direction, u v^T.
    U = auto()
    V = auto()


@dataclass(frozen=True)
class Port:
    """A tensor that enters or leaves a method of a block.

    Attributes:
        value: which value of the block it is, such as `state` or `past_keys`.
        index: its number among such values, where a block may have several.
        part: the value itself, or one of the tensors of its derivative.
        sizes: words for the length of each axis; a product is `sequences*heads`.
        is_differentiable: whether an adapter may change the value, so that it has derivatives.
        optional: whether a method has it only if its graph reads it.
    """

    value: str
    index: int | None = None
    part: Part = Part.VALUE
    sizes: tuple[str, ...] = field(default=(), compare=False)
    is_differentiable: bool = field(default=False, compare=False)
    optional: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        """Its name in a manifest, such as `lora_b.0`."""
        return self._stem if self.index is None else f"{self._stem}.{self.index}"

    @property
    def is_adapter(self) -> bool:
        """Whether it is a matrix of the adapter, or a part of one's derivative."""
        return self.value in (LORA_A, LORA_B)

    @property
    def dtype(self) -> str:
        """Its numpy name."""
        return "int64" if self.value in _INTEGERS else "float32"

    @property
    def tangent(self) -> Port:
        """The derivative of the value along every query's direction."""
        return replace(self.of(Part.TANGENT), sizes=("queries", *self.sizes))

    @property
    def gradient(self) -> Port:
        """The derivative of a loss by the value."""
        return self.of(Part.GRADIENT)

    def of(self, part: Part) -> Port:
        """The port of a tensor of the value's derivative, which has no derivative itself; or its own."""
        return replace(self, part=part, is_differentiable=self.is_differentiable and part is Part.VALUE)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape where sizes have these numbers."""
        return tuple(math.prod(_number(word, sizes) for word in size.split("*")) for size in self.sizes)

    @property
    def _stem(self) -> str:
        match self.part:
            case Part.VALUE:
                return self.value
            case Part.TANGENT:
                return f"tangent_{self.value}"
            case Part.GRADIENT:
                return f"grad_{self.value}"
            case _:
                return f"{self.part.name.lower()}_a" if self.value == LORA_A else self.part.name.lower()


@dataclass(frozen=True)
class BlockPorts:
    """What enters and leaves a block, whatever is computed of it.

    Attributes:
        modules: how many of its layers are adapted.
        trains_a: whether both matrices of an adapter are trained.
        is_first: whether tokens enter it.
        is_head: whether it is a shard of a decoder's head.
        attends: whether it looks at the tokens before through keys and values.
        shared_in: of each shared value that it takes from another block, whether adapters change it.
        shared_out: how many shared values it makes.
        past: which of the values that it takes are the keys and the values of its attention; empty if it
            makes its own.
        recurrent_states: how many recurrent states it has.
        residuals: how many residuals its forward pass answers.
    """

    modules: int = 0
    trains_a: bool = False
    is_first: bool = False
    is_head: bool = False
    attends: bool = False
    shared_in: tuple[bool, ...] = ()
    shared_out: int = 0
    past: tuple[int, ...] = ()
    recurrent_states: int = 0
    residuals: int = 0


@dataclass(frozen=True)
class Signature:
    """What a method takes, in any order, and answers, in this order."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @cached_property
    def required_inputs(self) -> frozenset[str]:
        """Names of the inputs that a method must have."""
        return frozenset(port.name for port in self.inputs if not port.optional)

    @cached_property
    def allowed_inputs(self) -> frozenset[str]:
        """Names of the inputs that a method may have."""
        return frozenset(port.name for port in self.inputs)

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs, in order."""
        return [port.name for port in self.outputs]

    def port(self, name: str, is_output: bool = False) -> Port:
        """The input, or output, of a name."""
        return next(port for port in (self.outputs if is_output else self.inputs) if port.name == name)


@lru_cache(maxsize=1024)
def signature(block: BlockPorts, role: Role) -> Signature:
    """What a method of a role takes and answers, but for tables; nothing in a role that a head lacks."""
    view, derivative = role.view, role.derivative
    if block.is_head and view is View.CHUNK:
        return Signature((), ())
    of_block = _of_head(view) if block.is_head else _of_block(block, view, derivative)
    return _with_derivative(of_block, derivative, block.residuals)


def _of_head(view: View) -> Signature:
    if view is View.TOKEN:
        state = Port(HIDDEN_STATES, sizes=("sequences", "1", "entering"))
        return Signature((state,), (Port(LOGITS, sizes=("sequences", "1", "words")),))
    asked = ("1", "states")
    inputs = (
        Port(HIDDEN_STATES, sizes=(*asked, "entering"), is_differentiable=True),
        Port(TARGETS, sizes=asked),
        Port(SHIFT, sizes=(*asked, "1")),
    )
    return Signature(inputs, (Port(PARTS, sizes=(*asked, "2"), is_differentiable=True),))


def _of_block(block: BlockPorts, view: View, derivative: Derivative) -> Signature:
    """The signature of a block's value, in the sizes that a derivative of it has."""
    is_value = derivative is Derivative.VALUE
    copies: tuple[str, ...] = ()
    match view:
        case View.BATCH:
            rows: tuple[str, ...] = ("copies", "batch") if is_value else ("batch",)
            copies = ("copies",) if is_value else ("batch",)
        case View.CHUNK:
            rows = copies = ("1",)
        case View.TOKEN:
            rows = copies = ("sequences",)
    if derivative is Derivative.JVP:
        copies = ()
    tokens = (*rows, "1" if view is View.TOKEN else "tokens")
    answered = ("*".join(rows), tokens[-1])
    entering = Port(HIDDEN_STATES, sizes=(*tokens, "entering"), is_differentiable=True)
    inputs = [Port(TOKENS, sizes=tokens) if block.is_first else entering]
    outputs = [Port(HIDDEN_STATES, sizes=(*answered, "leaving"), is_differentiable=True)]
    outputs += [
        Port(SHARED_OUT, n, sizes=(*answered, "shared_out"), is_differentiable=True)
        for n in range(block.shared_out)
    ]
    for number, changes in enumerate(block.shared_in):
        inputs.append(Port(SHARED_IN, number, sizes=(*tokens, "shared_in"), is_differentiable=changes))
    # Texts may be written with any adapter: `lora_a` is an input there, whatever is trained.
    has_lora_a = block.trains_a or (is_value and view is not View.BATCH)
    for number in range(block.modules):
        for value, width in ((LORA_A, "in"), (LORA_B, "out")) if has_lora_a else ((LORA_B, "out"),):
            sizes = (*copies, "rank", width)
            inputs.append(Port(value, number, sizes=sizes, is_differentiable=True, optional=True))
    inputs.append(Port(ONES, sizes=("1", tokens[-1], "1"), optional=True))
    if view is View.BATCH:
        inputs.append(Port(PADDING_MASK, sizes=(*rows, "1", "1", "tokens"), optional=True))
        return Signature(tuple(inputs), tuple(outputs))
    carried = [
        Port(RECURRENT_STATE, n, sizes=(*rows, "high", "wide"), is_differentiable=True)
        for n in range(block.recurrent_states)
    ]
    of_past = _of_past(block, view, derivative) if block.attends else Signature((), ())
    return Signature((*inputs, *carried, *of_past.inputs), (*outputs, *carried, *of_past.outputs))


def _of_past(block: BlockPorts, view: View, derivative: Derivative) -> Signature:
    """What a block that looks at the tokens before takes and answers besides."""
    is_token = view is View.TOKEN
    heads, length = ("sequences*heads", "1") if is_token else ("heads", "tokens")
    changes = not block.past or block.shared_in[block.past[0]]
    inputs = [
        Port(PAST_KEYS, sizes=(heads, "past", "key"), is_differentiable=changes),
        Port(PAST_VALUES, sizes=(heads, "past", "value"), is_differentiable=changes),
    ]
    if is_token:
        inputs += [Port(PAST_MASK, sizes=(heads, "1", "past")), Port(OWN_MASK, sizes=("1", "1", "past"))]
    else:
        seen, causal = ("members*tokens", "past"), ("members*tokens", "tokens")
        inputs += [Port(PAST_MASK, sizes=seen), Port(CAUSAL_MASK, sizes=causal)]
    if derivative is Derivative.JVP:
        inputs.append(Port(PAST_ONES, sizes=("1", "past", "1"), optional=True))
    made = ((KEYS, "key"), (VALUES, "value")) if not block.past else ()
    outputs = [Port(value, sizes=(heads, length, width), is_differentiable=True) for value, width in made]
    return Signature(tuple(inputs), tuple(outputs))


def _with_derivative(of_block: Signature, derivative: Derivative, saved: int) -> Signature:
    """The signature of a derivative of a block whose value has this one."""
    inputs, outputs = of_block.inputs, of_block.outputs
    residuals = tuple(
        Port(RESIDUAL, number, sizes=(*outputs[0].sizes[:-1], "residual")) for number in range(saved)
    )
    match derivative:
        case Derivative.JVP:
            tangents = tuple(
                tangent for port in inputs if port.is_differentiable for tangent in _tangents(port, inputs)
            )
            pairs = tuple(each for port in outputs for each in (port, port.tangent))
            return Signature((*inputs, *tangents), pairs)
        case Derivative.SAVE:
            return Signature(inputs, (outputs[0], *residuals, *outputs[1:]))
        case Derivative.BACKWARD | Derivative.BACKWARD_SAVED:
            given = tuple(port.gradient for port in outputs)
            kept = residuals if derivative is Derivative.BACKWARD_SAVED else ()
            return Signature((*inputs, *given, *kept), gradients(inputs))
    return of_block


def with_tangents(outputs: Iterable[Port]) -> tuple[Port, ...]:
    """The outputs of `jvp`, of a block with these: each with its tangents after it."""
    return tuple(each for port in outputs for each in (port, port.tangent))


def gradients(inputs: Iterable[Port]) -> tuple[Port, ...]:
    """The outputs of `backward`, of a block with these inputs: those of the adapter come last."""
    return tuple(port.gradient for port in differentiable_ports(inputs))


def differentiable_ports(inputs: Iterable[Port]) -> list[Port]:
    """The inputs that a block has derivatives by: those of the adapter come last."""
    return sorted((port for port in inputs if port.is_differentiable), key=lambda port: port.is_adapter)


def _tangents(port: Port, inputs: Collection[Port]) -> Iterator[Port]:
    """The inputs that a value's direction comes as: an adapter matrix's as two factors for each row."""
    if not port.is_adapter:
        yield port.tangent
        return
    rows = next(each.sizes[0] for each in inputs if each.value in (HIDDEN_STATES, TOKENS))
    for part, width in zip((Part.U, Part.V), port.sizes[-2:], strict=True):
        yield replace(port.of(part), sizes=("queries", rows, width))


def _number(word: str, sizes: Mapping[str, int]) -> int:
    return int(word) if word.isdigit() else sizes[word]
