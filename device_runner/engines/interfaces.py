"""The shapes of what a chain's methods take and answer, and whether its programs have them.

What the manifest says, `prge.files.chain` with its modules, tables and bounds, fixes all but the widths of
states between blocks: those a program has, and the blocks before and behind it must have the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from device_runner.engines.base import DTYPES, Tensors
from device_runner.engines.tables import Tables
from prge.files.chain import GIVEN, PAST_KEYS, PAST_VALUES, TABLE, TAKEN, Block, Bounds, Chain
from prge.files.signatures import CARRIED, DECODE, PREFILL, SAVE, STACK
from prge.learning.experts import Routing
from prge.model_spec import LARGEST_SIZE

# Sizes that a method is tried with before it is used.
TRIED = Bounds(copies=1, batch=1, queries=1, tokens=4, states=4, sequences=1, context=4, piece=4)


class Shapes:
    """The shapes of a chain's inputs and outputs.

    Args:
        chain: of a manifest.
        tables: of its bundle.
        widths: of the states that enter and leave every block; 0 where none does.
        heads: of the keys and values of every block.
        saved: of every block's saved values, by name.
        carried: height and width of what every block carries from call to call, by name.
        shared: of every shared value.
    """

    def __init__(
        self,
        chain: Chain,
        tables: Tables,
        widths: Sequence[tuple[int, int]],
        heads: Sequence[AttentionHeads],
        saved: Sequence[Mapping[str, int]],
        carried: Sequence[Mapping[str, tuple[int, int]]],
        shared: Sequence[int] = (),
    ) -> None:
        self._chain = chain
        self._tables = tables
        self.widths = widths
        self.routings = read_routings(chain, widths)
        self.heads = heads
        self.saved = saved
        self.carried = carried
        self.shared = shared

    def of(
        self, number: int, role: str, name: str, sizes: Bounds, is_output: bool = False
    ) -> tuple[str, tuple[int, ...]]:
        """dtype and shape of one input or output of a block's method, in a call of some sizes."""
        chain, block, heads = self._chain, self._chain.blocks[number], self.heads[number]
        if name.startswith(TABLE):
            length = 1 if role == DECODE else sizes.tokens
            dtype, shape = self._tables.tensor(block.tables[_index(name)], length)
            rows = {PREFILL: (1,), DECODE: (sizes.sequences,)}.get(role, shape[:1])
            return dtype, (*rows, *shape[1:])
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
            numbers["words"] = chain.piece_words
        if name in self.saved[number]:
            numbers["saved"] = self.saved[number][name]
        elif CARRIED in name:
            shape = self.carried[number].get(name[name.index(CARRIED) :], (0, 0))
            numbers |= {"high": shape[0], "wide": shape[1]}
        elif TAKEN in name:
            numbers["taken"] = self.shared[block.takes[_index(name)]]
        elif GIVEN in name:
            numbers["given"] = self.shared[chain.gives(number)[_index(name)]]
        elif "." in name:
            module = chain.modules[block.modules[_index(name)]]
            numbers |= {"rank": module.rank, "in": module.in_features, "out": module.out_features}
        tensor = chain.signature(number, role).tensor(name, is_output)
        return tensor.dtype, tensor.shape(numbers)


@dataclass(frozen=True)
class AttentionHeads:
    """Heads of keys of an attention, and widths of a key and a value."""

    count: int
    key_width: int
    value_width: int


def read_heads(chain: Chain, programs: Sequence[Any]) -> list[AttentionHeads]:
    """The heads of every block's attention, as its program has them; none where it has no role for texts."""
    found = []
    for block in chain.blocks:
        methods = chain.kinds[block.kind].methods
        sequences = chain.bounds.sequences if DECODE in methods else 1
        shapes = _shapes_of_texts(chain, block, programs)
        keys, values = shapes.get(PAST_KEYS, ()), shapes.get(PAST_VALUES, ())
        fits = len(keys) == len(values) == 3
        found.append(
            AttentionHeads(keys[0] // sequences, keys[2], values[2]) if fits else AttentionHeads(0, 0, 0)
        )
    return found


def read_carried(chain: Chain, programs: Sequence[Any]) -> list[dict[str, tuple[int, int]]]:
    """Height and width of what every block carries from call to call, by name, as its program has them."""
    found = []
    for number, block in enumerate(chain.blocks):
        shapes = _shapes_of_texts(chain, block, programs)
        both = {name: shapes.get(name, ()) for name in chain.carried(number)}
        found.append(
            {name: (shape[1], shape[2]) if len(shape) == 3 else (0, 0) for name, shape in both.items()}
        )
    return found


def _shapes_of_texts(chain: Chain, block: Block, programs: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """Shapes by name of what a block takes to go on with sequences; none if it can't."""
    methods, program = chain.kinds[block.kind].methods, programs[block.kind]
    role = DECODE if DECODE in methods else PREFILL
    if role not in methods or role not in program.methods:
        return {}
    pairs = zip(methods[role].inputs, program.signature(role).inputs, strict=False)
    return {name: tensor[1] for name, tensor in pairs if tensor}


def read_saved(chain: Chain, programs: Sequence[Any]) -> list[dict[str, int]]:
    """Widths by name of the values that every block saves, as its program has them; 0 of no tensor."""
    found = []
    for number, block in enumerate(chain.blocks):
        names, program = chain.saved(number), programs[block.kind]
        outputs: Sequence[str] = ()
        tensors: Tensors = []
        if names and SAVE in program.methods:
            outputs = chain.kinds[block.kind].methods[SAVE].outputs
            tensors = program.signature(SAVE).outputs
        shapes = {name: tensor[1] for name, tensor in zip(outputs, tensors, strict=False) if tensor}
        found.append({name: (shapes.get(name) or (0,))[-1] for name in names})
    return found


def read_shared(chain: Chain, programs: Sequence[Any]) -> list[int]:
    """Widths of all shared values, as the programs that give them have them; 0 of no tensor."""
    found = []
    for value, maker in enumerate(chain.shared):
        method, program = (
            chain.kinds[chain.blocks[maker].kind].methods[STACK],
            programs[chain.blocks[maker].kind],
        )
        name = f"{GIVEN}{chain.gives(maker).index(value)}"
        tensors = program.signature(STACK).outputs if STACK in program.methods else []
        found.append(_width(method.outputs, tensors, name))
    return found


def read_widths(chain: Chain, programs: Sequence[Any]) -> list[tuple[int, int]]:
    """Widths of the states that enter and leave every block, as its program has them; 0 where none does."""
    widths = []
    for block in chain.blocks:
        method, program = chain.kinds[block.kind].methods[STACK], programs[block.kind]
        found = []
        if STACK in program.methods:
            signature = program.signature(STACK)
            found = [
                _width(names, tensors)
                for names, tensors in (
                    (method.inputs, signature.inputs),
                    (method.outputs, signature.outputs),
                )
            ]
        widths.append((found[0], found[1]) if found else (0, 0))
    return widths


def read_routings(chain: Chain, widths: Sequence[tuple[int, int]]) -> dict[int, Routing]:
    """How states lie around the experts of each layer, by the number of the first."""
    turns = (turn for turn in chain.turns(range(chain.end)) if chain.is_expert(turn.start))
    return {
        turn.start: Routing(widths[turn.start - 1][1], widths[turn.stop][0], *widths[turn.start], len(turn))
        for turn in turns
    }


def problems_of(chain: Chain, shapes: Shapes, programs: Sequence[Any], number: int) -> Iterator[str]:
    """What the program of a block's kind has otherwise than the manifest says of the block."""
    widths, block = shapes.widths, chain.blocks[number]
    program = programs[block.kind]
    before = min(number, chain.end) - 1
    if routing := shapes.routings.get(number):
        if not routing.fits:
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
        if heads.count * width not in (0, shapes.shared[block.takes[place]]):
            yield f"it takes keys or values of the width {shapes.shared[block.takes[place]]} for {heads}"
    if any(
        not 1 <= width <= LARGEST_SIZE for width in (shapes.shared[value] for value in chain.gives(number))
    ):
        yield f"it gives values of the widths {[shapes.shared[value] for value in chain.gives(number)]}"
    if any(not 1 <= width <= LARGEST_SIZE for width in shapes.saved[number].values()):
        yield f"it saves values of the widths {sorted(shapes.saved[number].values())}"
    if any(not 1 <= size <= LARGEST_SIZE for shape in shapes.carried[number].values() for size in shape):
        yield f"it carries things of the shapes {sorted(shapes.carried[number].values())}"
    for role, method in chain.kinds[block.kind].methods.items():
        if role not in program.methods:
            yield f"its methods are {', '.join(program.methods)}, must include {role}"
            continue
        signature = program.signature(role)
        for what, names, tensors in (
            ("input", method.inputs, signature.inputs),
            ("output", method.outputs, signature.outputs),
        ):
            if len(names) != len(tensors):
                yield f"{role} has {len(tensors)} {what}s, the manifest {len(names)}"
                continue
            for name, tensor in zip(names, tensors, strict=True):
                expected = shapes.of(number, role, name, chain.bounds.of_call, what == "output")
                found = (DTYPES.get(tensor[0], str(tensor[0])), tensor[1]) if tensor else ("no tensor", ())
                if found != expected:
                    yield (
                        f"{what} {name} of {role} is {found[0]} {list(found[1])}, "
                        f"must be {expected[0]} {list(expected[1])}"
                    )


def _width(names: Sequence[str], tensors: Tensors, name: str = "state") -> int:
    tensor = tensors[names.index(name)] if name in names and len(names) == len(tensors) else None
    return tensor[1][-1] if tensor and tensor[1] else 0


def _index(name: str) -> int:
    return int(name.partition(".")[2])
