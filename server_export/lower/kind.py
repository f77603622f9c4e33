"""A kind of block, lowered once for the weights of any block of it.

ExecuTorch keeps constants outside of a program if it is told to; XNNPACK's go by a digest of their bytes. So
a kind is lowered with random constants, no two of them alike: where the bytes of one turn up in ExecuTorch's
file of constants tells how they are laid out there. A block's weights file is that file with its own bytes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from prge.errors import Refusal
from server_export.ir.rewriting import is_dequantization, quantize_apart
from server_export.lower.program import lowered
from server_export.lower.sizes import Size

aten = torch.ops.aten

# In the meta of a node, under "custom": XNNPACK puts what the node stands for into the file of that name.
_TAG, _WEIGHTS = "delegate_constant_tag", "weights"
_REMEDY = "please report it with the name of the model"
# Of what shares memory with what it is given, tracing leaves these as they are.
_VIEWS = {
    *(aten.view.default, aten.expand.default, aten.permute.default, aten.transpose.int, aten.t.default),
    *(aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims),
    *(aten.split_with_sizes.default, aten.alias.default, aten.diagonal.default),
}
_OF_A_CAST = 2


@dataclass(frozen=True)
class LoweredKind:
    """The program of all blocks of a kind, without weights, and the file that holds those of a block."""

    program: bytes
    weights: WeightsFile


@dataclass(frozen=True)
class WeightsFile:
    """How to write the weights file of a block.

    Attributes:
        head: what comes before the constants: their keys and where they lie. The same for all blocks.
        entries: the constants in the order of the file.
        fixed: constants that are part of the program, so that every block needs the same.
    """

    head: bytes
    entries: tuple[Entry, ...]
    fixed: Mapping[str, torch.Tensor]

    @property
    def names(self) -> set[str]:
        """The constants that `write` needs."""
        return {entry.name for entry in self.entries} | set(self.fixed)

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a block's constants, one after the other; others than those in `names` are left out.

        Raises:
            Refusal: one is missing, or isn't what the kind has in its place.
        """
        if missing := sorted(self.names - set(tensors)):
            raise Refusal(
                "constant-missing", f"the block has no constant {', '.join(missing)}", remedy=_REMEDY
            )
        for name, value in self.fixed.items():
            if not torch.equal(tensors[name], value):
                raise Refusal(
                    "constant-differs-from-program",
                    f"the block's constant {name} differs from that of its kind, whose program holds it",
                    remedy=_REMEDY,
                )
        with path.open("wb") as stream:
            stream.write(self.head)
            for entry in self.entries:
                stream.seek(entry.offset)
                stream.write(entry.bytes_of(tensors[entry.name]))


@dataclass(frozen=True)
class Entry:
    """A constant in a weights file: where it lies, and in which of the layouts."""

    name: str
    layout: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def bytes_of(self, tensor: torch.Tensor) -> memoryview:
        """The constant as the engine reads it."""
        if (tuple(tensor.shape), tensor.dtype) != (self.shape, self.dtype):
            raise Refusal(
                "constant-of-another-shape",
                f"the block's constant {self.name} is {tensor.dtype} {list(tensor.shape)}, its kind's "
                f"{self.dtype} {list(self.shape)}",
                remedy=_REMEDY,
            )
        return bytes_of(LAYOUTS[self.layout](tensor))


def _packed_int4(codes: torch.Tensor) -> torch.Tensor:
    """Codes from -8 to 7, two to a byte: the first of a pair is the lower half, both without a sign."""
    if codes.dtype is not torch.int8 or codes.dim() != 2 or codes.shape[1] % 2:
        return codes
    unsigned = (codes + 8).view(torch.uint8)
    return unsigned[:, ::2] | unsigned[:, 1::2] << 4


# How ExecuTorch 1.5.1 lays out what it is given: as it is, but for layers of int4 in groups.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda tensor: tensor,
    "int4": _packed_int4,
    "bfloat16": lambda tensor: tensor.to(torch.bfloat16),
}


def lower_kind(
    methods: Mapping[str, ExportedProgram], sizes: Iterable[Size] = (), in_pieces: Collection[str] = ()
) -> LoweredKind:
    """Lower the methods of a kind of block.

        kind = lower_kind({"stack": stack, "back": back})
        Path("block.pte").write_bytes(kind.program)
        kind.weights.write(Path("000.ptd"), tensors)

    Args:
        methods: by name; what several of them read has one name. Not changed.
        sizes: that a call chooses; memory of values outside of delegates is planned for the largest.
        in_pieces: methods of small layers, which several delegates compute.

    Raises:
        Refusal: ExecuTorch refuses a method, or stores a constant in a way that isn't known here.
    """
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    from server_export.lower.planning import largest_shapes

    constants = Constants(methods)
    config = ExecutorchBackendConfig(
        # What portable kernels read goes to the file that XNNPACK is told too.
        external_constants=lambda node: node.meta.get("custom", {}).get(_TAG),
        memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False),
        sym_shape_eval_pass=largest_shapes(sizes),
    )
    standing = {method: constants.as_placeholders(program) for method, program in methods.items()}
    with TemporaryDirectory() as folder:
        executorch = lowered(standing, config, in_pieces=in_pieces)
        executorch.write_tensor_data_to_file(folder)
        program = bytes(executorch.buffer)
        del executorch
        (path,) = Path(folder).iterdir()
        weights = constants.explain(path.read_bytes(), config.segment_alignment)
    constants.refuse_inlined(weights)
    return LoweredKind(program, weights)


class Constants:
    """The constants of a kind, and what stands for them while they are lowered.

    Attributes:
        values: of all, by name.
        fixed: of those that are part of the program.
    """

    def __init__(self, methods: Mapping[str, ExportedProgram]) -> None:
        self.values: dict[str, torch.Tensor] = {}
        fixed: set[str] = set()
        for program in methods.values():
            for node, name, value in _constants_of(program):
                if not node.users:
                    continue
                known = self.values.setdefault(name, value)
                if (known.shape, known.dtype) != (value.shape, value.dtype):
                    raise Refusal(
                        "constants-differ-between-methods",
                        f"two methods have different constants {name}",
                        remedy=_REMEDY,
                    )
                _refuse_packed_and_read(node, name)
                if _belongs_to_the_program(node):
                    fixed.add(name)
        self.fixed = {name: self.values[name] for name in fixed}

    @cached_property
    def random(self) -> dict[str, torch.Tensor]:
        """What stands for the others: no two alike, the same in every process."""
        return {name: _random(name, value) for name, value in self.values.items() if name not in self.fixed}

    def as_placeholders(self, program: ExportedProgram) -> ExportedProgram:
        """A copy of the program with random constants, each marked with the file that it goes to."""
        graph, copies = Graph(), dict[Node, Node]()
        graph.output(graph.graph_copy(program.graph, copies))
        for node, name, _ in _constants_of(program):
            if name in self.random:
                # XNNPACK looks at a constant, and at what restores a quantized one.
                for marked in (node, *filter(is_dequantization, node.users)):
                    copies[marked].meta["custom"] = {_TAG: _WEIGHTS}
        quantize_apart(graph)
        _write_as_traced(graph)
        return _Functional(
            root=program.graph_module,
            graph=graph,
            graph_signature=program.graph_signature,
            state_dict={name: self.random.get(name, value) for name, value in program.state_dict.items()},
            range_constraints=program.range_constraints,
            module_call_graph=program.module_call_graph,
            example_inputs=program.example_inputs,
            constants={name: self.random.get(name, value) for name, value in program.constants.items()},
        )

    def explain(self, content: bytes, alignment: int) -> WeightsFile:
        """What each part of a file of the random constants is made of.

        Raises:
            Refusal: nothing explains a part, or two constants do.
        """
        from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

        payload = FlatTensorSerializer().deserialize(content)
        parts = [bytes(part) for part in payload.buffers]
        origins = self._origins({len(part) for part in parts})
        offsets, end = [], 0
        for part in parts:
            offsets.append(-(-end // alignment) * alignment)
            end = offsets[-1] + len(part)
        start = len(content) - end
        entries = []
        for index, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
            keys = [key for key, entry in payload.named_data.items() if entry.buffer_index == index]
            found = origins.get(_digest(part), {})
            lies_there = content.startswith(part, start + offset)
            if len(found) != 1 or not lies_there:
                what = f"is that of {' and '.join(sorted(found))}" if found else "is none that is known here"
                raise Refusal(
                    "ambiguous-constant" if found else "unknown-constant",
                    f"ExecuTorch's constant {', '.join(keys)} ({len(part)} bytes) {what}",
                    remedy=_REMEDY,
                )
            ((name, layout),) = found.items()
            value = self.values[name]
            entries.append(Entry(name, layout, start + offset, tuple(value.shape), value.dtype))
        return WeightsFile(content[:start], tuple(entries), self.fixed)

    def _origins(self, sizes: set[int]) -> dict[bytes, dict[str, str]]:
        """By digest of bytes: the constants that give them, each with its layout."""
        found: dict[bytes, dict[str, str]] = defaultdict(dict)
        for name, value in self.random.items():
            for layout, apply in LAYOUTS.items():
                # A large constant is laid out in no way that no part has.
                if apply(value.to("meta")).nbytes in sizes:
                    found[_digest(bytes_of(apply(value)))].setdefault(name, layout)
        return found

    def refuse_inlined(self, weights: WeightsFile) -> None:
        """Every constant that was random has to be in a file: none in the program, where it would stay."""
        written = {entry.name for entry in weights.entries}
        if inside := sorted(set(self.random) - written):
            raise Refusal(
                "constants-inside-program",
                f"ExecuTorch keeps constants inside of the program that differ from block to block: "
                f"{', '.join(inside)}",
                remedy=_REMEDY,
            )


class _Functional(ExportedProgram):
    """A program that is lowered as it is: tracing it once more took half of an export's time."""

    def run_decompositions(self, decomp_table: Any = None, *options: Any, **more: Any) -> ExportedProgram:
        """See ExportedProgram; an empty table asks for a functional program and for nothing else."""
        # torch's own tables are dictionaries that look empty until they are asked.
        asks_no_more = type(decomp_table) is dict and not decomp_table
        is_one = asks_no_more and not any(map(_is_taken_apart, self.graph.nodes))
        return self if is_one else super().run_decompositions(decomp_table, *options, **more)


def _is_taken_apart(node: Node) -> bool:
    """Whether tracing writes an operator otherwise, since its answer shares, or may share, memory."""
    schema = getattr(node.target, "_schema", None)
    shares = schema is not None and any(argument.alias_info for argument in schema.arguments)
    return shares and node.target not in _VIEWS


def _write_as_traced(graph: Graph) -> None:
    """Write views as views and casts as copies; leave out asserts, which no engine checks; in place."""
    for node in graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
        graph.erase_node(node)
    graph.eliminate_dead_code()
    for node in graph.find_nodes(op="call_function", target=aten.to.dtype):
        if len(node.args) == _OF_A_CAST and not node.kwargs:
            node.target, node.args, node.kwargs = (
                aten._to_copy.default,
                node.args[:1],
                {"dtype": node.args[1]},
            )
    for node in graph.find_nodes(op="call_function", target=aten.reshape.default):
        with suppress(RuntimeError, ValueError):
            node.args[0].meta["val"].view(node.meta["val"].shape)
            node.target = aten.view.default


def _constants_of(program: ExportedProgram) -> Iterator[tuple[Node, str, torch.Tensor]]:
    """The placeholders of a program's constants, their names and values."""
    from torch.export.graph_signature import InputKind

    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            name = str(spec.target)
            value = program.state_dict[name] if name in program.state_dict else program.constants[name]
            yield nodes[spec.arg.name], name, value


def _belongs_to_the_program(node: Node) -> bool:
    """Zero points, which XNNPACK's layers don't read, and numbers that ExecuTorch takes for code."""
    is_zero_point = any(is_dequantization(user) and user.args[3] is node for user in node.users)
    return is_zero_point or "lifted_tensor" in node.name


def _refuse_packed_and_read(node: Node, name: str) -> None:
    """XNNPACK packs the weight of a layer and gives its bytes back, also if another operator reads them."""
    as_weight = [user for user in node.users if user.target is aten.linear.default and node in user.args[1:]]
    if as_weight and len(as_weight) < len(node.users):
        raise Refusal(
            "weight-read-otherwise",
            f"the constant {name} is read by a linear layer and by another operator, which needs a copy",
            remedy=_REMEDY,
        )


def _random(name: str, like: torch.Tensor) -> torch.Tensor:
    """A constant that stands for another; by its name, so that methods left out don't change it."""
    generator = torch.Generator().manual_seed(int.from_bytes(_digest(name.encode())[:7], "big"))
    if like.dtype.is_floating_point:
        # Positive, as scales are, and of many magnitudes, so that few of them are enough to differ.
        random = torch.randn(like.shape, generator=generator).mul_(4).exp_().to(like.dtype)
    elif like.dtype is torch.bool:
        random = torch.randint(2, like.shape, generator=generator).bool()
    else:
        # Codes have to be int4 where the graph says so.
        low, high = (-8, 8) if like.dtype is torch.int8 else (0, torch.iinfo(like.dtype).max)
        random = torch.randint(low, high, like.shape, generator=generator, dtype=like.dtype)
    # A program's parameters have to be such.
    return nn.Parameter(random, requires_grad=False) if isinstance(like, nn.Parameter) else random


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor as it lies in memory."""
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()
