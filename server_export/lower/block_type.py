"""Lower a block type once, for the weights of any block of this type.

ExecuTorch can store constants outside of a program; XNNPACK names its constants by a digest of their bytes.
So a block type is lowered with random constants, all different. The position of a constant's bytes in
ExecuTorch's file of constants shows how the file is laid out. A block's weights file is this file with the
block's own bytes.
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
from server_export.ir.rewriting import is_dequantization, unshare_quantizations
from server_export.lower.program import lower_programs
from server_export.lower.sizes import Size

aten = torch.ops.aten

# A key of a node's `meta["custom"]`: XNNPACK writes the node's constant to the file that its value names.
_TAG, _WEIGHTS = "delegate_constant_tag", "weights"
_REMEDY = "Please report the problem with the name of the model."
# Operators whose outputs share memory with their inputs, and which tracing leaves as they are.
_VIEWS = {
    *(aten.view.default, aten.expand.default, aten.permute.default, aten.transpose.int, aten.t.default),
    *(aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims),
    *(aten.split_with_sizes.default, aten.alias.default, aten.diagonal.default),
}
_CAST_ARGUMENTS = 2


@dataclass(frozen=True)
class LoweredBlockType:
    """The program of a block type without weights, and the layout of a block's weights file."""

    program: bytes
    weights: WeightsLayout


@dataclass(frozen=True)
class WeightsLayout:
    """The layout of the weights file of every block of a type.

    Attributes:
        head: beginning of the file, with keys and offsets of the constants; equal for all blocks.
        entries: the constants, in the order of the file.
        fixed: constants that are part of the program, and so must be equal for all blocks.
    """

    head: bytes
    entries: tuple[ConstantEntry, ...]
    fixed: Mapping[str, torch.Tensor]

    @property
    def names(self) -> set[str]:
        """Names of the constants that `write` needs."""
        return {entry.name for entry in self.entries} | set(self.fixed)

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the weights file of a block.

        Args:
            path: the file.
            tensors: the block's constants by name; those that are not in `names` are left out.

        Raises:
            Refusal: a constant is missing, or has another shape, dtype or fixed value than the block type's.
        """
        if missing := sorted(self.names - set(tensors)):
            raise Refusal(
                "constant-missing", f"The block lacks the constants {', '.join(missing)}.", remedy=_REMEDY
            )
        for name, value in self.fixed.items():
            if not torch.equal(tensors[name], value):
                raise Refusal(
                    "constant-differs-from-program",
                    f"The block's constant {name} differs from the one inside the program of its block type.",
                    remedy=_REMEDY,
                )
        with path.open("wb") as stream:
            stream.write(self.head)
            for entry in self.entries:
                stream.seek(entry.offset)
                stream.write(entry.bytes_of(tensors[entry.name]))


@dataclass(frozen=True)
class ConstantEntry:
    """Offset and layout of a constant in a weights file."""

    name: str
    layout: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def bytes_of(self, tensor: torch.Tensor) -> memoryview:
        """Return the bytes of a constant in this layout; raises Refusal for another shape or dtype."""
        if (tuple(tensor.shape), tensor.dtype) != (self.shape, self.dtype):
            raise Refusal(
                "constant-of-another-shape",
                f"The block's constant {self.name} is {tensor.dtype} {list(tensor.shape)}, but its block "
                f"type has {self.dtype} {list(self.shape)}.",
                remedy=_REMEDY,
            )
        return bytes_of(LAYOUTS[self.layout](tensor))


def _packed_int4(codes: torch.Tensor) -> torch.Tensor:
    """Pack int4 codes from -8 to 7 into bytes, with the first code of a pair in the lower half.

    The packed codes are unsigned, shifted by 8. Other tensors than matrices of codes stay as they are.
    """
    if codes.dtype is not torch.int8 or codes.dim() != 2 or codes.shape[1] % 2:
        return codes
    unsigned = (codes + 8).view(torch.uint8)
    return unsigned[:, ::2] | unsigned[:, 1::2] << 4


# The layouts of ExecuTorch 1.5.1: constants stay as they are, except weights of layers with groupwise int4.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda tensor: tensor,
    "int4": _packed_int4,
    "bfloat16": lambda tensor: tensor.to(torch.bfloat16),
}


def lower_block_type(
    methods: Mapping[str, ExportedProgram], sizes: Iterable[Size] = (), split_methods: Collection[str] = ()
) -> LoweredBlockType:
    """Lower the methods of a block type to one program.

        lowered = lower_block_type({"forward": forward, "backward": backward})
        Path("block.pte").write_bytes(lowered.program)
        lowered.weights.write(Path("000.ptd"), tensors)

    Args:
        methods: methods by name, which are not changed; a constant has the same name in all of them.
        sizes: dynamic sizes; memory of values outside of delegates is planned for the largest.
        split_methods: methods of small layers, which are split among several delegates.

    Raises:
        Refusal: ExecuTorch refuses a method, or stores a constant in an unknown layout.
    """
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    from server_export.lower.planning import largest_shapes

    constants = StandInConstants(methods)
    config = ExecutorchBackendConfig(
        # Constants of portable kernels go to the same file as those of XNNPACK.
        external_constants=lambda node: node.meta.get("custom", {}).get(_TAG),
        memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False),
        sym_shape_eval_pass=largest_shapes(sizes),
    )
    stand_ins = {method: constants.as_placeholders(program) for method, program in methods.items()}
    with TemporaryDirectory() as folder:
        executorch = lower_programs(stand_ins, config, split_methods=split_methods)
        executorch.write_tensor_data_to_file(folder)
        program = bytes(executorch.buffer)
        del executorch
        (path,) = Path(folder).iterdir()
        weights = constants.explain(path.read_bytes(), config.segment_alignment)
    constants.refuse_inlined(weights)
    return LoweredBlockType(program, weights)


class StandInConstants:
    """The constants of a block type, and the random constants that replace them during lowering.

    Attributes:
        values: values of all constants, by name.
        fixed: values of the constants that are part of the program.
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
                        f"Two methods have different constants {name}.",
                        remedy=_REMEDY,
                    )
                _refuse_packed_and_read(node, name)
                if _is_part_of_program(node):
                    fixed.add(name)
        self.fixed = {name: self.values[name] for name in fixed}

    @cached_property
    def random(self) -> dict[str, torch.Tensor]:
        """Random values for the constants that are not fixed; all different, and equal in every process."""
        return {name: _random(name, value) for name, value in self.values.items() if name not in self.fixed}

    def as_placeholders(self, program: ExportedProgram) -> ExportedProgram:
        """Return a copy of the program with random constants, marked to be stored in the weights file."""
        graph, copies = Graph(), dict[Node, Node]()
        graph.output(graph.graph_copy(program.graph, copies))
        for node, name, _ in _constants_of(program):
            if name in self.random:
                # XNNPACK reads the mark from a constant, or from the dequantization of a quantized one.
                for marked in (node, *filter(is_dequantization, node.users)):
                    copies[marked].meta["custom"] = {_TAG: _WEIGHTS}
        unshare_quantizations(graph)
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

    def explain(self, content: bytes, alignment: int) -> WeightsLayout:
        """Find the layout of a weights file that ExecuTorch wrote with the random constants.

        Args:
            content: the file.
            alignment: alignment of its parts, in bytes.

        Raises:
            Refusal: a part equals no constant in any known layout, or more than one.
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
            matches = origins.get(_digest(part), {})
            is_at_offset = content.startswith(part, start + offset)
            if len(matches) != 1 or not is_at_offset:
                which = f"equals {' and '.join(sorted(matches))}" if matches else "equals no known constant"
                raise Refusal(
                    "ambiguous-constant" if matches else "unknown-constant",
                    f"ExecuTorch's constant {', '.join(keys)} ({len(part)} bytes) {which}.",
                    remedy=_REMEDY,
                )
            ((name, layout),) = matches.items()
            value = self.values[name]
            entries.append(ConstantEntry(name, layout, start + offset, tuple(value.shape), value.dtype))
        return WeightsLayout(content[:start], tuple(entries), self.fixed)

    def _origins(self, sizes: set[int]) -> dict[bytes, dict[str, str]]:
        """Return the names and layouts of the random constants, by the digest of their bytes.

        Only layouts whose number of bytes is in `sizes` are computed.
        """
        origins: dict[bytes, dict[str, str]] = defaultdict(dict)
        for name, value in self.random.items():
            for layout, apply in LAYOUTS.items():
                if apply(value.to("meta")).nbytes in sizes:
                    origins[_digest(bytes_of(apply(value)))].setdefault(name, layout)
        return origins

    def refuse_inlined(self, weights: WeightsLayout) -> None:
        """Raise Refusal if a random constant is not in the weights file, and so is part of the program."""
        written = {entry.name for entry in weights.entries}
        if inside := sorted(set(self.random) - written):
            raise Refusal(
                "constants-inside-program",
                f"ExecuTorch stores constants inside the program that differ between blocks: "
                f"{', '.join(inside)}",
                remedy=_REMEDY,
            )


class _Functional(ExportedProgram):
    """A program in functional form, which is not traced again: that took half of an export's time."""

    def run_decompositions(self, decomp_table: Any = None, *options: Any, **more: Any) -> ExportedProgram:
        """Return the program itself if only functional form is required and the program has it.

        An empty table requires functional form only. For others, see ExportedProgram.
        """
        # torch's own tables are lazy dictionaries of another type, which look empty until they are read.
        only_functional = type(decomp_table) is dict and not decomp_table
        is_functional = only_functional and not any(map(_is_rewritten_by_tracing, self.graph.nodes))
        return self if is_functional else super().run_decompositions(decomp_table, *options, **more)


def _is_rewritten_by_tracing(node: Node) -> bool:
    """Return whether tracing rewrites an operator because its output may share memory with an input."""
    schema = getattr(node.target, "_schema", None)
    shares = schema is not None and any(argument.alias_info for argument in schema.arguments)
    return shares and node.target not in _VIEWS


def _write_as_traced(graph: Graph) -> None:
    """Rewrite reshapes as views and casts as copies, and remove asserts, in place, as tracing would."""
    for node in graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
        graph.erase_node(node)
    graph.eliminate_dead_code()
    for node in graph.find_nodes(op="call_function", target=aten.to.dtype):
        if len(node.args) == _CAST_ARGUMENTS and not node.kwargs:
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
    """Yield placeholders, names and values of a program's constants."""
    from torch.export.graph_signature import InputKind

    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            name = str(spec.target)
            value = program.state_dict[name] if name in program.state_dict else program.constants[name]
            yield nodes[spec.arg.name], name, value


def _is_part_of_program(node: Node) -> bool:
    """Return whether a constant stays in the program: a zero point, which XNNPACK ignores, or a literal."""
    is_zero_point = any(is_dequantization(user) and user.args[3] is node for user in node.users)
    return is_zero_point or "lifted_tensor" in node.name


def _refuse_packed_and_read(node: Node, name: str) -> None:
    """Raise Refusal if a linear layer's weight is also read by another operator.

    XNNPACK packs the weight and frees its bytes, even if another operator reads them.
    """
    as_weight = [user for user in node.users if user.target is aten.linear.default and node in user.args[1:]]
    if as_weight and len(as_weight) < len(node.users):
        raise Refusal(
            "weight-read-otherwise",
            f"The constant {name} is read by a linear layer and by another operator, which needs a copy.",
            remedy=_REMEDY,
        )


def _random(name: str, like: torch.Tensor) -> torch.Tensor:
    """Return random values like a constant's; the seed is its name, so that other methods don't matter."""
    generator = torch.Generator().manual_seed(int.from_bytes(_digest(name.encode())[:7], "big"))
    if like.dtype.is_floating_point:
        # Positive like scales, and of many magnitudes, so that even short constants differ.
        random = torch.randn(like.shape, generator=generator).mul_(4).exp_().to(like.dtype)
    elif like.dtype is torch.bool:
        random = torch.randint(2, like.shape, generator=generator).bool()
    else:
        # int8 tensors may hold int4 codes.
        low, high = (-8, 8) if like.dtype is torch.int8 else (0, torch.iinfo(like.dtype).max)
        random = torch.randint(low, high, like.shape, generator=generator, dtype=like.dtype)
    # torch.export requires a program's parameters to be nn.Parameter.
    return nn.Parameter(random, requires_grad=False) if isinstance(like, nn.Parameter) else random


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor as they are in memory."""
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()
