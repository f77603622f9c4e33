"""Signatures of methods: the inputs and outputs of a block's program, computed from its ports and a role.

A role is a view of the block (which sequences and tokens a call has) times a derivative.

    view         batch           copies of the adapter, each with a batch of rows
                 chunk           consecutive tokens of one row, with keys and values of earlier tokens
                 token           one token of each of several sequences, likewise
    derivative   value           the forward pass
                 jvp             the forward pass with tangents along several directions, the queries
                 backward        gradients of the inputs from gradients of the outputs, with recomputation
                 save            the forward pass, which also returns residuals
                 backward_saved  gradients of the inputs from gradients of the outputs and residuals

`jvp` adds a tangent for each input and output that an adapter affects. `backward` adds an input for the
gradient of each such output, and returns the gradient of each such input. In backward roles, every row has
its own copy of the adapter and so its own gradient.

Names of sizes:

    copies, batch, queries, tokens, sequences, states, context   chosen by a call, up to the chain's bounds
    entering, leaving        widths of the hidden states before and after the block
    rank, in, out            of an adapted module
    heads, key, value        number of key heads of the block's attention, widths of a key and a value
    members                  number of query heads that share a key head
    past                     earlier tokens, and one placeholder for no token: 1 + context
    words                    number of tokens in a vocabulary shard
    residual                 width of a residual
    high, wide               of a recurrent state, or of the state of a convolution over tokens
    shared_in, shared_out    width of a shared value that the block uses or computes
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property, lru_cache


class View(Enum):
    """Which sequences a call has, and which of their tokens."""

    BATCH = auto()
    CHUNK = auto()
    TOKEN = auto()


class Derivative(Enum):
    """Which derivative of a block a method computes."""

    VALUE = auto()
    JVP = auto()
    BACKWARD = auto()
    SAVE = auto()
    BACKWARD_SAVED = auto()

    @property
    def is_backward(self) -> bool:
        """Whether it is a backward pass."""
        return self in (Derivative.BACKWARD, Derivative.BACKWARD_SAVED)


@dataclass(frozen=True)
class Role:
    """The purpose of a method: a view times a derivative."""

    view: View
    derivative: Derivative


# Names of the roles, which are also the names of a program's methods.
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
# Roles that a user can request; `backward` includes RESIDUAL_ROLES, and rows longer than a chunk add the
# chunk roles.
ROLES = (*STEP_ROLES, PREFILL, DECODE)
ALL_ROLES = tuple(ROLE_OF)
# By role of whole rows: the role that computes the same for a chunk.
CHUNK_ROLE = {
    name: chunk
    for name, role in ROLE_OF.items()
    for chunk, other in ROLE_OF.items()
    if role.view is View.BATCH and other == replace(role, view=View.CHUNK)
}
# Roles of training steps: of the adapter, they have inputs for trained matrices only.
TRAINING_ROLES = tuple(role for role in ALL_ROLES if role not in (PREFILL, DECODE))

HIDDEN_STATES, TOKENS, TABLE, ONES, PADDING_MASK = "hidden_states", "tokens", "table", "ones", "padding_mask"
TARGETS, SHIFT, PARTS, LOGITS = "targets", "shift", "parts", "logits"
LORA_A, LORA_B = "lora_a", "lora_b"
SHARED_IN, SHARED_OUT, RECURRENT_STATE, RESIDUAL = "shared_in", "shared_out", "recurrent_state", "residual"
KEYS, VALUES, PAST_KEYS, PAST_VALUES, PAST_ONES = "keys", "values", "past_keys", "past_values", "past_ones"
# Masks that are added to attention scores with earlier tokens, with the call's tokens, with the token itself.
PAST_MASK, CAUSAL_MASK, OWN_MASK = "past_mask", "causal_mask", "own_mask"
_INTEGERS = (TOKENS, TARGETS)


class Part(Enum):
    """Which tensor of a value a port is: the value itself, or one of its derivatives."""

    VALUE = auto()
    TANGENT = auto()
    GRADIENT = auto()
    # Factors of an adapter matrix's direction, u v^T.
    U = auto()
    V = auto()


@dataclass(frozen=True)
class Port:
    """An input or output of a method of a block.

    Attributes:
        value: the value of the block, such as `hidden_states` or `past_keys`.
        index: index among values of this name, if a block can have several.
        part: whether it is the value itself or one of its derivatives.
        sizes: names of the sizes of each axis; a product is `sequences*heads`.
        is_differentiable: whether an adapter affects the value, so that it has derivatives.
        optional: whether a method has the input only if its graph uses it.
    """

    value: str
    index: int | None = None
    part: Part = Part.VALUE
    sizes: tuple[str, ...] = field(default=(), compare=False)
    is_differentiable: bool = field(default=False, compare=False)
    optional: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        """Name in a manifest, such as `lora_b.0`."""
        return self._stem if self.index is None else f"{self._stem}.{self.index}"

    @property
    def is_adapter(self) -> bool:
        """Whether it is a matrix of the adapter, or belongs to the derivative of one."""
        return self.value in (LORA_A, LORA_B)

    @property
    def dtype(self) -> str:
        """Name of the numpy dtype."""
        return "int64" if self.value in _INTEGERS else "float32"

    @property
    def tangent(self) -> Port:
        """The port of the value's tangents, one for each query."""
        return replace(self.of(Part.TANGENT), sizes=("queries", *self.sizes))

    @property
    def gradient(self) -> Port:
        """The port of the gradient with respect to the value."""
        return self.of(Part.GRADIENT)

    def of(self, part: Part) -> Port:
        """Return the port of a part of the value; derivatives aren't differentiable themselves."""
        return replace(self, part=part, is_differentiable=self.is_differentiable and part is Part.VALUE)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape for given sizes."""
        return tuple(math.prod(_length(name, sizes) for name in size.split("*")) for size in self.sizes)

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
    """The ports of a block, independent of the role.

    Attributes:
        modules: number of adapted layers.
        trains_a: whether `lora_a` is trained, too.
        is_first: whether its inputs are tokens.
        is_head: whether it is a vocabulary shard of a decoder's output head.
        attends: whether it has causal attention, with keys and values of earlier tokens.
        shared_in: for each shared value that it uses, whether an adapter affects the value.
        shared_out: number of shared values that it computes.
        past: positions in `shared_in` of the keys and values of its attention; empty if it computes its own.
        recurrent_states: number of recurrent states.
        residuals: number of residuals.
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
    """The inputs of a method, which can be in any order, and its outputs, in this order."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @cached_property
    def required_inputs(self) -> frozenset[str]:
        """Names of the inputs that the method must have."""
        return frozenset(port.name for port in self.inputs if not port.optional)

    @cached_property
    def allowed_inputs(self) -> frozenset[str]:
        """Names of the inputs that the method may have."""
        return frozenset(port.name for port in self.inputs)

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs, in order."""
        return [port.name for port in self.outputs]

    def port(self, name: str, is_output: bool = False) -> Port:
        """Return the input, or output, of a name."""
        return next(port for port in (self.outputs if is_output else self.inputs) if port.name == name)


@lru_cache(maxsize=1024)
def signature(block: BlockPorts, role: Role) -> Signature:
    """Return the signature of a method, without tables; empty for roles that an output head doesn't have."""
    view, derivative = role.view, role.derivative
    if block.is_head and view is View.CHUNK:
        return Signature((), ())
    value = _head_signature(view) if block.is_head else _block_signature(block, view, derivative)
    return _with_derivative(value, derivative, block.residuals)


def _head_signature(view: View) -> Signature:
    """Return the signature of the value of a vocabulary shard."""
    if view is View.TOKEN:
        state = Port(HIDDEN_STATES, sizes=("sequences", "1", "entering"))
        return Signature((state,), (Port(LOGITS, sizes=("sequences", "1", "words")),))
    states = ("1", "states")
    inputs = (
        Port(HIDDEN_STATES, sizes=(*states, "entering"), is_differentiable=True),
        Port(TARGETS, sizes=states),
        Port(SHIFT, sizes=(*states, "1")),
    )
    return Signature(inputs, (Port(PARTS, sizes=(*states, "2"), is_differentiable=True),))


def _block_signature(block: BlockPorts, view: View, derivative: Derivative) -> Signature:
    """Return the signature of a block's value, with the sizes that it has in a method of the derivative."""
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
    output_sizes = ("*".join(rows), tokens[-1])
    entering = Port(HIDDEN_STATES, sizes=(*tokens, "entering"), is_differentiable=True)
    inputs = [Port(TOKENS, sizes=tokens) if block.is_first else entering]
    outputs = [Port(HIDDEN_STATES, sizes=(*output_sizes, "leaving"), is_differentiable=True)]
    outputs += [
        Port(SHARED_OUT, n, sizes=(*output_sizes, "shared_out"), is_differentiable=True)
        for n in range(block.shared_out)
    ]
    for number, is_differentiable in enumerate(block.shared_in):
        inputs.append(
            Port(SHARED_IN, number, sizes=(*tokens, "shared_in"), is_differentiable=is_differentiable)
        )
    # Text generation accepts any adapter: there, `lora_a` is an input even if it isn't trained.
    has_lora_a = block.trains_a or (is_value and view is not View.BATCH)
    for number in range(block.modules):
        for value, width in ((LORA_A, "in"), (LORA_B, "out")) if has_lora_a else ((LORA_B, "out"),):
            sizes = (*copies, "rank", width)
            inputs.append(Port(value, number, sizes=sizes, is_differentiable=True, optional=True))
    inputs.append(Port(ONES, sizes=("1", tokens[-1], "1"), optional=True))
    if view is View.BATCH:
        inputs.append(Port(PADDING_MASK, sizes=(*rows, "1", "1", "tokens"), optional=True))
        return Signature(tuple(inputs), tuple(outputs))
    recurrent_states = [
        Port(RECURRENT_STATE, n, sizes=(*rows, "high", "wide"), is_differentiable=True)
        for n in range(block.recurrent_states)
    ]
    past = _past_signature(block, view, derivative) if block.attends else Signature((), ())
    return Signature((*inputs, *recurrent_states, *past.inputs), (*outputs, *recurrent_states, *past.outputs))


def _past_signature(block: BlockPorts, view: View, derivative: Derivative) -> Signature:
    """Return the additional inputs and outputs of a block with causal attention."""
    is_token = view is View.TOKEN
    heads, length = ("sequences*heads", "1") if is_token else ("heads", "tokens")
    is_differentiable = not block.past or block.shared_in[block.past[0]]
    inputs = [
        Port(PAST_KEYS, sizes=(heads, "past", "key"), is_differentiable=is_differentiable),
        Port(PAST_VALUES, sizes=(heads, "past", "value"), is_differentiable=is_differentiable),
    ]
    if is_token:
        inputs += [Port(PAST_MASK, sizes=(heads, "1", "past")), Port(OWN_MASK, sizes=("1", "1", "past"))]
    else:
        past_sizes, causal_sizes = ("members*tokens", "past"), ("members*tokens", "tokens")
        inputs += [Port(PAST_MASK, sizes=past_sizes), Port(CAUSAL_MASK, sizes=causal_sizes)]
    if derivative is Derivative.JVP:
        inputs.append(Port(PAST_ONES, sizes=("1", "past", "1"), optional=True))
    own = ((KEYS, "key"), (VALUES, "value")) if not block.past else ()
    outputs = [Port(value, sizes=(heads, length, width), is_differentiable=True) for value, width in own]
    return Signature(tuple(inputs), tuple(outputs))


def _with_derivative(value: Signature, derivative: Derivative, residual_count: int) -> Signature:
    """Return the signature of a derivative, given the signature of the value."""
    inputs, outputs = value.inputs, value.outputs
    residuals = tuple(
        Port(RESIDUAL, number, sizes=(*outputs[0].sizes[:-1], "residual")) for number in range(residual_count)
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
            output_gradients = tuple(port.gradient for port in outputs)
            saved = residuals if derivative is Derivative.BACKWARD_SAVED else ()
            return Signature((*inputs, *output_gradients, *saved), gradients(inputs))
    return value


def with_tangents(outputs: Iterable[Port]) -> tuple[Port, ...]:
    """Return the outputs of a `jvp` method: each output followed by its tangents."""
    return tuple(output for port in outputs for output in (port, port.tangent))


def gradients(inputs: Iterable[Port]) -> tuple[Port, ...]:
    """Return the outputs of a `backward` method for a block's inputs; gradients of the adapter come last."""
    return tuple(port.gradient for port in differentiable_ports(inputs))


def differentiable_ports(inputs: Iterable[Port]) -> list[Port]:
    """Return the inputs with respect to which a block has derivatives; the adapter's matrices come last."""
    return sorted((port for port in inputs if port.is_differentiable), key=lambda port: port.is_adapter)


def _tangents(port: Port, inputs: Collection[Port]) -> Iterator[Port]:
    """Yield the inputs for a port's tangent; for an adapter matrix, the factors of its directions."""
    if not port.is_adapter:
        yield port.tangent
        return
    rows = next(entering.sizes[0] for entering in inputs if entering.value in (HIDDEN_STATES, TOKENS))
    for part, width in zip((Part.U, Part.V), port.sizes[-2:], strict=True):
        yield replace(port.of(part), sizes=("queries", rows, width))


def _length(name: str, sizes: Mapping[str, int]) -> int:
    """Return the length of an axis: a literal number, or the size of that name."""
    return int(name) if name.isdigit() else sizes[name]
