"""Shapes of the inputs and outputs of a chain's methods, from the specs in its manifest.

When a bundle opens, its programs are compared with the manifest's specs, and the specs of each block with the
manifest's modules, tables and bounds. These fix all sizes except the widths of hidden states, heads, shared
values, residuals and recurrent states, which must agree between neighbouring blocks. Later code trusts the
specs.
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

# Sizes of the trial run of a method.
PROBE_SIZES = Bounds(copies=1, batch=1, queries=1, tokens=4, states=4, sequences=1, context=4, chunk=4)


def program_problems(described: BlockProgram, program: Any) -> Iterator[str]:
    """Yield the differences between a program and the manifest.

    Args:
        described: the program's entry in the manifest.
        program: program opened by one of the engines, with the program's own metadata.
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
                yield f"{role} has {len(tensors)} {what}s, the manifest has {len(names)}"
                continue
            for name, spec, tensor in zip(names, specs or tensors, tensors, strict=True):
                if tensor is None or spec != tensor:
                    yield f"{what} {name} of {role} is {tensor or 'no tensor'}, must be {spec or 'one'}"


def with_specs(chain: Chain, programs: Sequence[Any]) -> Chain:
    """Return the chain with specs of all methods: bundles of older versions take them from their programs.

    Args:
        chain: chain of a manifest.
        programs: opened programs without `program_problems`.
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
    """The shapes of the inputs and outputs of a chain's methods.

    Args:
        chain: chain with specs.
        tables: tables of its bundle.

    Attributes:
        widths: widths of the hidden states that enter and leave each block; 0 if there are none.
        heads: heads of each block's keys and values.
        residuals: widths of each block's residuals, by name.
        recurrent_states: height and width of each block's recurrent states, by name.
        shared: widths of all shared values.
        routings: layout of hidden states around each layer's experts, by the number of the first expert.
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
        """Return the spec of an input or output of a block's method in a call of the given sizes."""
        chain, block, heads = self._chain, self._chain.blocks[number], self.heads[number]
        if name.startswith(TABLE):
            length = 1 if role == DECODE else sizes.tokens
            dtype, shape = self._tables.tensor(block.tables[_index(name)], length)
            rows = {PREFILL: (1,), DECODE: (sizes.sequences,)}.get(role, shape[:1])
            return TensorSpec(dtype, (*rows, *shape[1:]))
        mask = chain.causal_table(number)
        entering, leaving = self.widths[number]
        axis_sizes = {
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
            axis_sizes["words"] = chain.shard_size
        if name in self.residuals[number]:
            axis_sizes["residual"] = self.residuals[number][name]
        elif RECURRENT_STATE in name:
            shape = self.recurrent_states[number].get(name[name.index(RECURRENT_STATE) :], (0, 0))
            axis_sizes |= {"high": shape[0], "wide": shape[1]}
        elif SHARED_IN in name:
            axis_sizes["shared_in"] = self.shared[block.shared_in[_index(name)]]
        elif SHARED_OUT in name:
            axis_sizes["shared_out"] = self.shared[chain.shared_out(number)[_index(name)]]
        elif "." in name:
            module = chain.modules[block.modules[_index(name)]]
            axis_sizes |= {"rank": module.rank, "in": module.in_features, "out": module.out_features}
        port = chain.signature(number, role).port(name, is_output)
        return TensorSpec(port.dtype, port.shape(axis_sizes))


@dataclass(frozen=True)
class AttentionHeads:
    """Number of key heads of an attention, and widths of a key and a value."""

    count: int
    key_width: int
    value_width: int


def _method(chain: Chain, block: BlockSpec, role: str) -> Interface:
    """Return a block's method, or an empty one if the program lacks the role."""
    return chain.programs[block.program].methods.get(role, Interface((), ()))


def _generation_method(chain: Chain, block: BlockSpec) -> Interface:
    """Return a block's method for generation, or an empty one."""
    methods = chain.programs[block.program].methods
    return _method(chain, block, DECODE if DECODE in methods else PREFILL)


def _last(sizes: tuple[int, ...]) -> int:
    return sizes[-1] if sizes else 0


def _widths(method: Interface) -> tuple[int, int]:
    return _last(method.sizes("hidden_states")), _last(method.sizes("hidden_states", True))


def _heads(chain: Chain, block: BlockSpec) -> AttentionHeads:
    """Return the heads of a block's attention; none if its program has no generation role."""
    method = _generation_method(chain, block)
    sequences = chain.bounds.sequences if DECODE in chain.programs[block.program].methods else 1
    keys, values = method.sizes(PAST_KEYS), method.sizes(PAST_VALUES)
    fits = len(keys) == len(values) == 3
    return AttentionHeads(keys[0] // sequences, keys[2], values[2]) if fits else AttentionHeads(0, 0, 0)


def _recurrent_states(chain: Chain, number: int) -> dict[str, tuple[int, int]]:
    """Return height and width of a block's recurrent states, by name."""
    method = _generation_method(chain, chain.blocks[number])
    both = {name: method.sizes(name) for name in chain.recurrent_states(number)}
    return {name: (sizes[1], sizes[2]) if len(sizes) == 3 else (0, 0) for name, sizes in both.items()}


def read_routings(chain: Chain, widths: Sequence[tuple[int, int]]) -> dict[int, Routing]:
    """Return the layout of hidden states around each layer's experts, by the number of the first expert."""
    groups = (group for group in chain.block_groups(range(chain.head_start)) if chain.is_expert(group.start))
    return {
        group.start: Routing(
            widths[group.start - 1][1], widths[group.stop][0], *widths[group.start], len(group)
        )
        for group in groups
    }


def block_problems(chain: Chain, shapes: MethodShapes, number: int) -> Iterator[str]:
    """Yield the contradictions between a block's specs, the manifest, and the neighbouring blocks."""
    widths, block = shapes.widths, chain.blocks[number]
    previous = min(number, chain.head_start) - 1
    if routing := shapes.routings.get(number):
        if not routing.is_consistent:
            yield f"experts of {widths[number]} don't fit states of {routing.entering, routing.leaving}"
    elif chain.is_expert(number):
        if widths[number] != widths[previous]:
            yield f"an expert has the widths {widths[number]}, the previous one {widths[previous]}"
    elif number and not chain.is_expert(previous) and widths[number][0] != widths[previous][1]:
        yield f"it takes states of width {widths[number][0]}, the previous block has {widths[previous][1]}"
    if chain.is_encoder and number == len(widths) - 1 and widths[number][1] != chain.width:
        yield f"it outputs states of width {widths[number][1]}, the manifest says {chain.width}"
    heads = shapes.heads[number]
    for index, width in zip(block.past, (heads.key_width, heads.value_width), strict=False):
        if heads.count * width not in (0, shapes.shared[block.shared_in[index]]):
            yield f"it takes keys or values of width {shapes.shared[block.shared_in[index]]} for {heads}"
    if any(
        not 1 <= width <= LARGEST_SIZE
        for width in (shapes.shared[value] for value in chain.shared_out(number))
    ):
        yield f"its shared values have {[shapes.shared[value] for value in chain.shared_out(number)]}"
    if any(not 1 <= width <= LARGEST_SIZE for width in shapes.residuals[number].values()):
        yield f"its residuals have the widths {sorted(shapes.residuals[number].values())}"
    if any(
        not 1 <= size <= LARGEST_SIZE for shape in shapes.recurrent_states[number].values() for size in shape
    ):
        yield f"its recurrent states have shapes {sorted(shapes.recurrent_states[number].values())}"
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
