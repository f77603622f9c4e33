"""The shapes of what a chain's methods take and answer, by the specs of its manifest.

A program is compared with the manifest's specs once, when a bundle opens, and so are the specs of every
block with what the manifest says of it: modules, tables and bounds fix all sizes but the widths of states,
heads, shared, saved and carried values, which its neighbours must have too. After that specs are trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from device_runner.engines.tables import Tables
from prge.formats.chain import (
    SHARED_IN,
    SHARED_OUT,
    TABLE,
    BlockProgram,
    BlockSpec,
    Bounds,
    Chain,
    Interface,
    TensorSpec,
)
from prge.formats.signatures import (
    DECODE,
    FORWARD,
    FORWARD_SAVE,
    PAST_KEYS,
    PAST_VALUES,
    PREFILL,
    RECURRENT_STATE,
)
from prge.model_spec import LARGEST_SIZE
from prge.numerics.expert_routing import Routing

# Sizes that a method is tried with before it is used.
PROBE_SIZES = Bounds(copies=1, batch=1, queries=1, tokens=4, states=4, sequences=1, context=4, chunk=4)


def program_problems(described: BlockProgram, program: Any) -> Iterator[str]:
    """What a program has otherwise than the manifest says.

    Args:
        described: in a manifest.
        program: opened by one of the engines, which reads the program's own metadata.
    """
    for role, method in described.methods.items():
        name = described.method_name(role)
        if name not in program.methods:
            yield f"its methods are {', '.join(program.methods)}, must include {name}"
            continue
        signature = program.signature(name)
        for what, names, specs, tensors in (
            ("input", method.inputs, method.input_specs, signature.inputs),
            ("output", method.outputs, method.output_specs, signature.outputs),
        ):
            if len(names) != len(tensors):
                yield f"{role} has {len(tensors)} {what}s, the manifest {len(names)}"
                continue
            for name, spec, tensor in zip(names, specs or tensors, tensors, strict=True):
                if tensor is None or spec != tensor:
                    yield f"{what} {name} of {role} is {tensor or 'no tensor'}, must be {spec or 'one'}"


def with_specs(chain: Chain, programs: Sequence[Any]) -> Chain:
    """The chain with specs of all methods: bundles of older versions have those of their programs.

    Args:
        chain: of a manifest.
        programs: opened, without `program_problems`.
    """
    methods = (method for program in chain.programs for method in program.methods.values())
    if all(method.has_specs for method in methods):
        return chain

    def of(method: Interface, role: str, program: Any) -> Interface:
        if method.has_specs:
            return method
        signature = program.signature(method.method or role)
        return replace(method, input_specs=tuple(signature.inputs), output_specs=tuple(signature.outputs))

    return replace(
        chain,
        programs=tuple(
            replace(
                described,
                methods={role: of(method, role, program) for role, method in described.methods.items()},
            )
            for described, program in zip(chain.programs, programs, strict=True)
        ),
    )


class MethodShapes:
    """The shapes of a chain's inputs and outputs.

    Args:
        chain: with specs.
        tables: of its bundle.

    Attributes:
        widths: of the states that enter and leave every block; 0 where none does.
        heads: of the keys and values of every block.
        residuals: widths of every block's residuals, by name.
        recurrent_states: height and width of what every block carries from call to call, by name.
        shared: widths of all shared values.
        routings: how states lie around the experts of each layer, by the number of the first.
    """

    def __init__(self, chain: Chain, tables: Tables) -> None:
        self._chain = chain
        self._tables = tables
        self.widths = [_widths(_method(chain, block, FORWARD)) for block in chain.blocks]
        self.routings = read_routings(chain, self.widths)
        self.heads = [_heads(chain, block) for block in chain.blocks]
        self.residuals = [
            {
                name: _last(_method(chain, block, FORWARD_SAVE).sizes(name, True))
                for name in chain.residuals(number)
            }
            for number, block in enumerate(chain.blocks)
        ]
        self.recurrent_states = [_recurrent_states(chain, number) for number in range(len(chain.blocks))]
        self.shared = [
            _last(
                _method(chain, chain.blocks[maker], FORWARD).sizes(
                    f"{SHARED_OUT}{chain.shared_out(maker).index(value)}", True
                )
            )
            for value, maker in enumerate(chain.shared)
        ]

    def of(self, number: int, role: str, name: str, sizes: Bounds, is_output: bool = False) -> TensorSpec:
        """The spec of one input or output of a block's method, in a call of some sizes."""
        chain, block, heads = self._chain, self._chain.blocks[number], self.heads[number]
        if name.startswith(TABLE):
            length = 1 if role == DECODE else sizes.tokens
            dtype, shape = self._tables.tensor(block.tables[_index(name)], length)
            rows = {PREFILL: (1,), DECODE: (sizes.sequences,)}.get(role, shape[:1])
            return TensorSpec(dtype, (*rows, *shape[1:]))
        mask = chain.causal_table(number)
        entering, leaving = self.widths[number]
        numbers = {
            **asdict(sizes),
            "past": 1 + sizes.context,
            "entering": entering,
            "leaving": leaving,
            "heads": heads.count,
            "key": heads.key_width,
            "value": heads.value_width,
            "members": mask.members if mask else 0,
        }
        if chain.is_head(number):
            numbers["words"] = chain.shard_size
        if name in self.residuals[number]:
            numbers["residual"] = self.residuals[number][name]
        elif RECURRENT_STATE in name:
            shape = self.recurrent_states[number].get(name[name.index(RECURRENT_STATE) :], (0, 0))
            numbers |= {"high": shape[0], "wide": shape[1]}
        elif SHARED_IN in name:
            numbers["shared_in"] = self.shared[block.shared_in[_index(name)]]
        elif SHARED_OUT in name:
            numbers["shared_out"] = self.shared[chain.shared_out(number)[_index(name)]]
        elif "." in name:
            module = chain.modules[block.modules[_index(name)]]
            numbers |= {"rank": module.rank, "in": module.in_features, "out": module.out_features}
        port = chain.signature(number, role).port(name, is_output)
        return TensorSpec(port.dtype, port.shape(numbers))


@dataclass(frozen=True)
class AttentionHeads:
    """Heads of keys of an attention, and widths of a key and a value."""

    count: int
    key_width: int
    value_width: int


def _method(chain: Chain, block: BlockSpec, role: str) -> Interface:
    """A block's method, or one of nothing."""
    return chain.programs[block.program].methods.get(role, Interface((), ()))


def _of_texts(chain: Chain, block: BlockSpec) -> Interface:
    """A block's method that goes on with sequences, or one of nothing."""
    methods = chain.programs[block.program].methods
    return _method(chain, block, DECODE if DECODE in methods else PREFILL)


def _last(sizes: tuple[int, ...]) -> int:
    return sizes[-1] if sizes else 0


def _widths(method: Interface) -> tuple[int, int]:
    return _last(method.sizes("hidden_states")), _last(method.sizes("hidden_states", True))


def _heads(chain: Chain, block: BlockSpec) -> AttentionHeads:
    """The heads of a block's attention; none where it has no role for texts."""
    method = _of_texts(chain, block)
    sequences = chain.bounds.sequences if DECODE in chain.programs[block.program].methods else 1
    keys, values = method.sizes(PAST_KEYS), method.sizes(PAST_VALUES)
    fits = len(keys) == len(values) == 3
    return AttentionHeads(keys[0] // sequences, keys[2], values[2]) if fits else AttentionHeads(0, 0, 0)


def _recurrent_states(chain: Chain, number: int) -> dict[str, tuple[int, int]]:
    """Height and width of what a block carries from call to call, by name."""
    method = _of_texts(chain, chain.blocks[number])
    both = {name: method.sizes(name) for name in chain.recurrent_states(number)}
    return {name: (sizes[1], sizes[2]) if len(sizes) == 3 else (0, 0) for name, sizes in both.items()}


def read_routings(chain: Chain, widths: Sequence[tuple[int, int]]) -> dict[int, Routing]:
    """How states lie around the experts of each layer, by the number of the first."""
    turns = (turn for turn in chain.block_groups(range(chain.head_start)) if chain.is_expert(turn.start))
    return {
        turn.start: Routing(widths[turn.start - 1][1], widths[turn.stop][0], *widths[turn.start], len(turn))
        for turn in turns
    }


def block_problems(chain: Chain, shapes: MethodShapes, number: int) -> Iterator[str]:
    """What the specs of a block have otherwise than the manifest says of the block and of those around it."""
    widths, block = shapes.widths, chain.blocks[number]
    before = min(number, chain.head_start) - 1
    if routing := shapes.routings.get(number):
        if not routing.is_consistent:
            yield f"experts from {widths[number]} don't fit states from {routing.entering, routing.leaving}"
    elif chain.is_expert(number):
        if widths[number] != widths[before]:
            yield f"an expert is from {widths[number]}, the one before from {widths[before]}"
    elif number and not chain.is_expert(before) and widths[number][0] != widths[before][1]:
        yield f"it takes states of width {widths[number][0]}, the block before gives {widths[before][1]}"
    if chain.is_encoder and number == len(widths) - 1 and widths[number][1] != chain.width:
        yield f"it gives states of width {widths[number][1]}, the manifest says {chain.width}"
    heads = shapes.heads[number]
    for place, width in zip(block.past, (heads.key_width, heads.value_width), strict=False):
        if heads.count * width not in (0, shapes.shared[block.shared_in[place]]):
            yield f"it takes keys or values of the width {shapes.shared[block.shared_in[place]]} for {heads}"
    if any(
        not 1 <= width <= LARGEST_SIZE
        for width in (shapes.shared[value] for value in chain.shared_out(number))
    ):
        yield f"it gives values of the widths {[shapes.shared[value] for value in chain.shared_out(number)]}"
    if any(not 1 <= width <= LARGEST_SIZE for width in shapes.residuals[number].values()):
        yield f"it saves values of the widths {sorted(shapes.residuals[number].values())}"
    if any(
        not 1 <= size <= LARGEST_SIZE for shape in shapes.recurrent_states[number].values() for size in shape
    ):
        yield f"it carries things of the shapes {sorted(shapes.recurrent_states[number].values())}"
    for role, method in chain.programs[block.program].methods.items():
        for what, names, specs in (
            ("input", method.inputs, method.input_specs),
            ("output", method.outputs, method.output_specs),
        ):
            for name, spec in zip(names, specs, strict=True):
                expected = shapes.of(number, role, name, chain.bounds.per_call, what == "output")
                if spec != expected:
                    yield f"{what} {name} of {role} is {spec}, must be {expected}"


def _index(name: str) -> int:
    return int(name.partition(".")[2])
