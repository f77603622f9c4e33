"""What a block's program takes and answers in each role: the one table of it.

The exporter names a method's outputs by it, a manifest is checked against it, and so are the tensors of its
programs. `name[sizes]` is a tensor, int64 for `tokens` and `targets`, else float32; `name.*` one for each
adapted module of the block; what has a `?` is taken only if the block's graph uses it.

    copies, batch, queries, tokens, sequences, states, context   what a call chooses, up to the chain's bounds
    entering, leaving        widths of the state before and behind the block
    rank, in, out            of an adapted module; of LoRA-FA, what ends in `_a` is no input but a constant
    heads, key, value        heads of keys of the block's attention, widths of a key and a value
    members                  queries that share a head of keys
    past                     tokens before, and one that stands for none of them: 1 + context
    words                    of a piece of the vocabulary
    saved                    width of a value that a forward pass saves for the way back
    high, wide               of what a recurrence, or a convolution over tokens, carries from call to call
    taken, given             width of a shared value that the block takes from another, or gives

`prefill_tangent` and `prefill_back` are of a piece of a row, which is given the past's tangents, or what
later pieces say of its keys and values as slopes, and so with what is `carried`. `seen`, `causal` and `own`
are added to the scores of the tokens before, of the call's own, and of the one token. `padding` is added to
an encoder's attention. In the backward roles each row has a copy of the adapter, and so its own gradient. A
head takes picked states, `targets` as its piece counts them and a `shift`, and answers `parts` for
prge.learning.vocabulary to add up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

STACK, TANGENT, BACK = STEP_ROLES = ("stack", "tangent", "back")
PREFILL, DECODE = "prefill", "decode"
PREFILL_TANGENT, PREFILL_BACK = "prefill_tangent", "prefill_back"
SAVED = "saved"
CARRIED = "carried"
# What an export is asked for; `back` brings those of `OF_BACK` along, rows longer than a piece theirs.
ROLES = (*STEP_ROLES, PREFILL, DECODE)
OF_BACK = SAVE, BACK_SAVED = "save", "back_saved"
IN_PIECES = {STACK: PREFILL, TANGENT: PREFILL_TANGENT, BACK: PREFILL_BACK}
ALL_ROLES = tuple(dict.fromkeys((*ROLES, *OF_BACK, *IN_PIECES.values())))
# Roles of steps: of an adapter they have an input for what is trained, and no other.
OF_STEPS = tuple(role for role in ALL_ROLES if role not in (PREFILL, DECODE))

_BLOCK = {
    STACK: "state[copies batch tokens entering] lora_a.*[copies rank in]? lora_b.*[copies rank out]?"
    " padding[copies batch 1 1 tokens]? ones[1 tokens 1]? -> state[copies*batch tokens leaving]",
    TANGENT: "state[batch tokens entering] d_state[queries batch tokens entering] lora_a.*[rank in]?"
    " lora_b.*[rank out]? u_a.*[queries batch rank]? v_a.*[queries batch in]? u.*[queries batch rank]?"
    " v.*[queries batch out]? padding[batch 1 1 tokens]? ones[1 tokens 1]?"
    " -> state[batch tokens leaving] d_state[queries batch tokens leaving]",
    BACK: "state[batch tokens entering] slope[batch tokens leaving] lora_a.*[batch rank in]?"
    " lora_b.*[batch rank out]? padding[batch 1 1 tokens]? ones[1 tokens 1]?"
    " -> slope[batch tokens entering] gradient_a.*[batch rank in] gradient.*[batch rank out]",
    SAVE: "state[batch tokens entering] lora_a.*[batch rank in]? lora_b.*[batch rank out]?"
    " padding[batch 1 1 tokens]? ones[1 tokens 1]?"
    " -> state[batch tokens leaving] saved.*[batch tokens saved]",
    BACK_SAVED: "state[batch tokens entering] slope[batch tokens leaving] lora_a.*[batch rank in]?"
    " lora_b.*[batch rank out]? padding[batch 1 1 tokens]? ones[1 tokens 1]? saved.*[batch tokens saved]"
    " -> slope[batch tokens entering] gradient_a.*[batch rank in] gradient.*[batch rank out]",
    PREFILL: "state[1 tokens entering] lora_a.*[1 rank in]? lora_b.*[1 rank out]? ones[1 tokens 1]?"
    " -> state[1 tokens leaving]",
    DECODE: "state[sequences 1 entering] lora_a.*[sequences rank in]? lora_b.*[sequences rank out]?"
    " ones[1 1 1]? -> state[sequences 1 leaving]",
    PREFILL_TANGENT: "state[1 tokens entering] d_state[queries 1 tokens entering] lora_a.*[rank in]?"
    " lora_b.*[rank out]? u_a.*[queries 1 rank]? v_a.*[queries 1 in]? u.*[queries 1 rank]?"
    " v.*[queries 1 out]? ones[1 tokens 1]?"
    " -> state[1 tokens leaving] d_state[queries 1 tokens leaving]",
    PREFILL_BACK: "state[1 tokens entering] slope[1 tokens leaving] lora_a.*[1 rank in]?"
    " lora_b.*[1 rank out]? ones[1 tokens 1]?"
    " -> slope[1 tokens entering] gradient_a.*[1 rank in] gradient.*[1 rank out]",
}
# What a block that looks at the tokens before has besides.
_ATTENTION = {
    PREFILL: "past_keys[heads past key] past_values[heads past value] seen[members*tokens past]"
    " causal[members*tokens tokens] -> keys[heads tokens key] values[heads tokens value]",
    DECODE: "past_keys[sequences*heads past key] past_values[sequences*heads past value]"
    " seen[sequences*heads 1 past] own[1 1 past]"
    " -> keys[sequences*heads 1 key] values[sequences*heads 1 value]",
    PREFILL_TANGENT: "past_keys[heads past key] past_values[heads past value] past_ones[1 past 1]?"
    " d_past_keys[queries heads past key] d_past_values[queries heads past value] seen[members*tokens past]"
    " causal[members*tokens tokens] -> keys[heads tokens key] d_keys[queries heads tokens key]"
    " values[heads tokens value] d_values[queries heads tokens value]",
    PREFILL_BACK: "past_keys[heads past key] past_values[heads past value] seen[members*tokens past]"
    " causal[members*tokens tokens] slope_keys[heads tokens key] slope_values[heads tokens value]"
    " -> slope_past_keys[heads past key] slope_past_values[heads past value]",
}
# What a block has besides for each thing that it carries from call to call.
_CARRIED = {
    PREFILL: "carried.*[1 high wide] -> carried.*[1 high wide]",
    DECODE: "carried.*[sequences high wide] -> carried.*[sequences high wide]",
    PREFILL_TANGENT: "carried.*[1 high wide] d_carried.*[queries 1 high wide]"
    " -> carried.*[1 high wide] d_carried.*[queries 1 high wide]",
    PREFILL_BACK: "carried.*[1 high wide] slope_carried.*[1 high wide] -> slope_carried.*[1 high wide]",
}
# What it has not if the keys and values are taken from another block, and if these don't change.
_OF_OWN_KEYS = ("keys", "values", "d_keys", "d_values", "slope_keys", "slope_values")
_OF_CHANGING_PAST = ("d_past_keys", "d_past_values", "slope_past_keys", "slope_past_values")
# What a block has of each shared value that it takes, and of each that it gives. Of one that comes from below
# the lowest adapter there is no derivative.
_TAKEN = {
    STACK: "taken[copies batch tokens taken] -> ",
    TANGENT: "taken[batch tokens taken] d_taken[queries batch tokens taken] -> ",
    BACK: "taken[batch tokens taken] -> slope_taken[batch tokens taken]",
    SAVE: "taken[batch tokens taken] -> ",
    BACK_SAVED: "taken[batch tokens taken] -> slope_taken[batch tokens taken]",
    PREFILL: "taken[1 tokens taken] -> ",
    DECODE: "taken[sequences 1 taken] -> ",
    PREFILL_TANGENT: "taken[1 tokens taken] d_taken[queries 1 tokens taken] -> ",
    PREFILL_BACK: "taken[1 tokens taken] -> slope_taken[1 tokens taken]",
}
_GIVEN = {
    STACK: "-> given[copies*batch tokens given]",
    TANGENT: "-> given[batch tokens given] d_given[queries batch tokens given]",
    BACK: "slope_given[batch tokens given] -> ",
    SAVE: "-> given[batch tokens given]",
    BACK_SAVED: "slope_given[batch tokens given] -> ",
    PREFILL: "-> given[1 tokens given]",
    DECODE: "-> given[sequences 1 given]",
    PREFILL_TANGENT: "-> given[1 tokens given] d_given[queries 1 tokens given]",
    PREFILL_BACK: "slope_given[1 tokens given] -> ",
}
_OF_CHANGING_TAKEN = ("d_taken", "slope_taken")
# The first block takes these in place of a state.
_TOKENS = {
    STACK: "tokens[copies batch tokens] -> ",
    TANGENT: "tokens[batch tokens] -> ",
    BACK: "tokens[batch tokens] -> ",
    SAVE: "tokens[batch tokens] -> ",
    BACK_SAVED: "tokens[batch tokens] -> ",
    PREFILL: "tokens[1 tokens] -> ",
    DECODE: "tokens[sequences 1] -> ",
}
_HEAD = {
    STACK: "state[1 states entering] targets[1 states] shift[1 states 1] -> parts[1 states 2]",
    TANGENT: "state[1 states entering] d_state[queries 1 states entering] targets[1 states] shift[1 states 1]"
    " -> parts[1 states 2] d_parts[queries 1 states 2]",
    BACK: "state[1 states entering] targets[1 states] shift[1 states 1] slope[1 states 2]"
    " -> slope[1 states entering]",
    SAVE: "state[1 states entering] targets[1 states] shift[1 states 1]"
    " -> parts[1 states 2] saved.*[1 states saved]",
    BACK_SAVED: "state[1 states entering] targets[1 states] shift[1 states 1] slope[1 states 2]"
    " saved.*[1 states saved] -> slope[1 states entering]",
    DECODE: "state[sequences 1 entering] -> logits[sequences 1 words]",
}
# What a step has of `lora_a` only if it is trained; texts may have one of an adapter from elsewhere.
_OF_LORA_A = ("lora_a", "u_a", "v_a", "gradient_a")
_STATES = ("state", "d_state", "slope")
_INTEGERS = ("tokens", "targets")
_TENSOR = re.compile(r"(?P<name>\w+)(?P<each>\.\*)?\[(?P<sizes>[\w* ]+)\](?P<optional>\??)")


@dataclass(frozen=True)
class Tensor:
    """A tensor of the table; `each` says whether it is one for each adapted module."""

    name: str
    sizes: tuple[str, ...]
    each: bool = False
    optional: bool = False

    @property
    def dtype(self) -> str:
        """Its numpy name."""
        return "int64" if self.name in _INTEGERS else "float32"

    def names(self, modules: int) -> list[str]:
        """Its name, or one for each of so many modules."""
        return [f"{self.name}.{number}" for number in range(modules)] if self.each else [self.name]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape where sizes have these numbers."""
        return tuple(math.prod(_number(word, sizes) for word in size.split("*")) for size in self.sizes)


@dataclass(frozen=True)
class Signature:
    """What a method takes and answers."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @classmethod
    def parse(cls, text: str) -> Signature:
        """Read a line of the table."""
        before, _, behind = text.partition("->")
        return cls(tuple(_tensors(before)), tuple(_tensors(behind)))

    def __add__(self, other: Signature) -> Signature:
        return Signature(self.inputs + other.inputs, self.outputs + other.outputs)

    def without(self, names: Collection[str]) -> Signature:
        """The same but for tensors of these names."""
        return Signature(_without(self.inputs, names), _without(self.outputs, names))

    def needed(self, modules: int) -> set[str]:
        """Inputs that a method must have, by so many adapted modules."""
        return {name for item in self.inputs if not item.optional for name in item.names(modules)}

    def allowed(self, modules: int) -> set[str]:
        """Inputs that a method may have."""
        return {name for item in self.inputs for name in item.names(modules)}

    def answers(self, modules: int) -> list[str]:
        """Outputs that it has, in order."""
        return [name for item in self.outputs for name in item.names(modules)]

    def tensor(self, name: str, is_output: bool = False) -> Tensor:
        """The tensor of a name, such as `state` or `lora_b.0`."""
        known = name, name.partition(".")[0]
        return next(item for item in (self.outputs if is_output else self.inputs) if item.name in known)


@dataclass(frozen=True)
class Sharing:
    """What a block has to do with values that one block makes and others read.

    Attributes:
        takes: of each that it takes, whether adapters change it.
        gives: how many it makes.
        past: which of those that it takes are the keys and the values of its attention; empty if it makes
            its own.
    """

    takes: tuple[bool, ...] = ()
    gives: int = 0
    past: tuple[int, ...] = ()

    def of(self, role: str) -> Signature:
        """What a method takes and answers of them."""
        found = Signature((), ())
        for number in range(self.gives):
            found += _numbered(Signature.parse(_GIVEN[role]), number)
        for number, changes in enumerate(self.takes):
            taken = Signature.parse(_TAKEN[role])
            found += _numbered(taken if changes else taken.without(_OF_CHANGING_TAKEN), number)
        return found

    def attention(self, role: str) -> Signature:
        """What a block that looks at the tokens before has besides."""
        found = Signature.parse(_ATTENTION.get(role, "->"))
        if self.past:
            found = found.without(_OF_OWN_KEYS)
            if not self.takes[self.past[0]]:
                found = found.without(_OF_CHANGING_PAST)
        return found


def of_block(
    role: str,
    is_first: bool = False,
    attends: bool = False,
    trains_a: bool = False,
    saved: int = 0,
    sharing: Sharing | None = None,
    carried: int = 0,
) -> Signature:
    """The signature of a block with a state, in a role.

    Args:
        role: of ALL_ROLES.
        is_first: whether tokens enter it.
        attends: whether it looks at the tokens before.
        trains_a: both matrices of an adapter.
        saved: values that its forward pass saves for the way back.
        sharing: values that it takes from other blocks or gives to them.
        carried: things that it carries from call to call.
    """
    sharing = sharing or Sharing()
    found = _with_saved(Signature.parse(_BLOCK[role]), saved)
    if role not in (PREFILL, DECODE) and not trains_a:
        found = found.without(_OF_LORA_A)
    if is_first:
        found = Signature(
            Signature.parse(_TOKENS[role]).inputs + _without(found.inputs, _STATES), found.outputs
        )
    found += sharing.of(role)
    for number in range(carried if role in _CARRIED else 0):
        found += _numbered(Signature.parse(_CARRIED[role]), number)
    return found + sharing.attention(role) if attends else found


def of_head(role: str, saved: int = 0) -> Signature:
    """The signature of a piece of a decoder's head; of a role that it lacks an empty one."""
    return _with_saved(Signature.parse(_HEAD.get(role, "->")), saved)


def _with_saved(signature: Signature, count: int) -> Signature:
    def numbered(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        names = (
            [f"{SAVED}.{number}" for number in range(count)] if tensor.name == SAVED else [tensor.name]
            for tensor in tensors
        )
        return tuple(
            replace(tensor, name=name, each=tensor.each and name == tensor.name)
            for tensor, of_tensor in zip(tensors, names, strict=True)
            for name in of_tensor
        )

    return Signature(numbered(signature.inputs), numbered(signature.outputs))


def _numbered(signature: Signature, number: int) -> Signature:
    inputs, outputs = (
        tuple(replace(tensor, name=f"{tensor.name}.{number}", each=False) for tensor in tensors)
        for tensors in (signature.inputs, signature.outputs)
    )
    return Signature(inputs, outputs)


def _without(tensors: Iterable[Tensor], names: Collection[str]) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor.name not in names)


def _tensors(text: str) -> Iterator[Tensor]:
    for match in _TENSOR.finditer(text):
        yield Tensor(
            match["name"], tuple(match["sizes"].split()), bool(match["each"]), bool(match["optional"])
        )


def _number(word: str, sizes: Mapping[str, int]) -> int:
    return int(word) if word.isdigit() else sizes[word]
