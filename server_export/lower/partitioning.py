"""Which operators of a graph go to XNNPACK together.

ExecuTorch's own grouping compares every pair of groups, which takes longer than all else once a graph has
thousands of operators. Here a delegate is all that XNNPACK takes at one level, where the level of a value is
the number of times that its computation has come back into XNNPACK. A path that leaves a delegate ends in a
higher level, so delegates never wait for each other, and there are as few as one after another can be.

A delegate is prepared by one thread each time that it runs, and the others fall asleep meanwhile if that
takes more than some microseconds. Waking them up takes longer than a small layer, so a program of small
layers runs faster in pieces that are prepared one at a time.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Graph, Node
from torch.fx.passes.infra.partitioner import Partition


class LevelPartitioner(XnnpackPartitioner):
    """XNNPACK's choice of operators, float and dynamically quantized layers alike, grouped by level.

    XNNPACK rewrites every delegate sixteen times (convolutions, batch norms, paddings, clones), each time
    interpreting the whole graph: two thirds of a lowering, for nothing that these graphs hold. Its own
    compile option leaves only the rewriting that turns matrix products into linear layers.

    Args:
        most: operators of a piece; by default a delegate stays whole.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self._most = most
        # It warns of conversions that keep less than XNNPACK could take; this one keeps all of it.
        logging.getLogger(XnnpackPartitioner.__module__).setLevel(logging.ERROR)
        options = [CompileSpec("dqlinear_partitioner", b"")]
        self.delegation_spec = DelegationSpec(XnnpackBackend.__name__, options)

    def generate_partitions(self, ep: ExportedProgram) -> list[Any]:
        """Partitions in order; operators that only run together, such as a quantized layer's, stay so."""
        remembering = copy.copy(ep)
        remembering._graph_signature = _Remembering(
            ep.graph_signature.input_specs, ep.graph_signature.output_specs
        )
        groups = self.get_matched_nodes_from_configs(remembering)
        levels = delegate_levels(ep.graph, groups)
        members: dict[int, list[Node]] = {}
        for node in ep.graph.nodes:
            if node in levels:
                members.setdefault(levels[node], []).append(node)
        delegates = [members[level] for level in sorted(members)]
        if self._most is not None:
            delegates = [piece for nodes in delegates for piece in in_pieces(nodes, groups, self._most)]
        return [Partition(id=number, nodes=nodes) for number, nodes in enumerate(delegates)]


class _Remembering(ExportGraphSignature):
    """A signature that isn't to be changed: it reads its inputs once, not once for every operator."""

    inputs_to_parameters = cached_property(ExportGraphSignature.inputs_to_parameters.fget)
    inputs_to_buffers = cached_property(ExportGraphSignature.inputs_to_buffers.fget)
    inputs_to_lifted_tensor_constants = cached_property(
        ExportGraphSignature.inputs_to_lifted_tensor_constants.fget
    )


def delegate_levels(graph: Graph, groups: Sequence[Sequence[Node]]) -> dict[Node, int]:
    """The level of every node of `groups`; all nodes of a group have the same.

    Raises:
        ValueError: a value that leaves a group comes back into it.
    """
    group_of = {node: index for index, group in enumerate(groups) for node in group}
    levels = [0] * len(groups)
    # A group begins before the last of its operators has told how late it is.
    for _ in range(len(groups) + 1):
        if not _raise_levels(graph, group_of, levels):
            return {node: levels[index] for node, index in group_of.items()}
    raise ValueError("operators that must run together wait for one that waits for them")


def in_pieces(nodes: Sequence[Node], groups: Sequence[Sequence[Node]], most: int) -> list[list[Node]]:
    """Operators of a delegate, in order, as several that run one after another.

    Args:
        nodes: in the order of their graph.
        groups: that stay whole; they may share operators.
        most: operators of a piece, but for those that a group holds together.
    """
    count = -(-len(nodes) // most)
    piece = {node: index * count // len(nodes) for index, node in enumerate(nodes)}
    inside = [[node for node in group if node in piece] for group in groups]
    before: dict[Node, int] = {}
    while piece != before:
        before = dict(piece)
        for node in nodes:
            piece[node] = max(piece[node], *(piece.get(source, 0) for source in node.all_input_nodes), 0)
        for group in filter(None, inside):
            piece |= dict.fromkeys(group, max(map(piece.__getitem__, group)))
    found = ([node for node in nodes if piece[node] == number] for number in range(count))
    return [*filter(None, found)]


def _raise_levels(graph: Graph, group_of: dict[Node, int], levels: list[int]) -> bool:
    """Raise the groups' levels above what their operators read; whether any was raised."""
    outside: dict[Node, int] = {}
    raised = False
    for node in graph.nodes:
        # A constant is copied to every delegate that reads it.
        if node.op != "call_function":
            continue
        sources = [source for source in node.all_input_nodes if source.op == "call_function"]
        if node not in group_of:
            found = (levels[group_of[s]] if s in group_of else outside[s] for s in sources)
            outside[node] = max(found, default=-1)
            continue
        found = (levels[group_of[s]] if s in group_of else outside[s] + 1 for s in sources)
        level, group = max(found, default=0), group_of[node]
        if level > levels[group]:
            levels[group] = level
            raised = True
    return raised
