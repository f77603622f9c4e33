"""Partition a graph into delegates of XNNPACK.

ExecuTorch's own partitioner compares every pair of groups, which dominates the time of graphs with thousands
of operators. Here a delegate has all operators for XNNPACK of one level, where the level of a value is the
number of times that its computation has re-entered XNNPACK. A path that leaves a delegate ends in a higher
level, so delegates never depend on each other in a cycle, and their number is minimal.

One thread prepares a delegate each time that it runs, and the other threads fall asleep if that takes more
than some microseconds. Waking them up takes longer than a small layer. So a program of small layers runs
faster if its delegates are split and prepared one at a time.
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

from server_export.lower.slices import CONFIGS


class LevelPartitioner(XnnpackPartitioner):
    """Groups all operators that XNNPACK supports, float and dynamically quantized, by level.

    XNNPACK rewrites every delegate sixteen times (convolutions, batch norms, paddings, clones), and
    interprets the whole graph each time. That takes two thirds of lowering and changes nothing in these
    graphs. A compile option of XNNPACK restricts it to the rewrite that turns matrix products into linear
    layers.

    Args:
        limit: maximum number of operators of a delegate; None: no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(configs=CONFIGS)
        self._limit = limit
        # The superclass warns about conversions that decompose operators of XNNPACK; this one doesn't.
        logging.getLogger(XnnpackPartitioner.__module__).setLevel(logging.ERROR)
        options = [CompileSpec("dqlinear_partitioner", b"")]
        self.delegation_spec = DelegationSpec(XnnpackBackend.__name__, options)

    def generate_partitions(self, ep: ExportedProgram) -> list[Any]:
        """Return the partitions in order; groups of operators, such as a quantized layer's, stay together."""
        with_cache = copy.copy(ep)
        with_cache._graph_signature = _CachedSignature(
            ep.graph_signature.input_specs, ep.graph_signature.output_specs
        )
        groups = self.get_matched_nodes_from_configs(with_cache)
        levels = delegate_levels(ep.graph, groups)
        members: dict[int, list[Node]] = {}
        for node in ep.graph.nodes:
            if node in levels:
                members.setdefault(levels[node], []).append(node)
        delegates = [members[level] for level in sorted(members)]
        if self._limit is not None:
            delegates = [part for nodes in delegates for part in split_delegate(nodes, groups, self._limit)]
        return [Partition(id=number, nodes=nodes) for number, nodes in enumerate(delegates)]


class _CachedSignature(ExportGraphSignature):
    """An immutable signature that collects its inputs once, and not once for every operator."""

    inputs_to_parameters = cached_property(ExportGraphSignature.inputs_to_parameters.fget)
    inputs_to_buffers = cached_property(ExportGraphSignature.inputs_to_buffers.fget)
    inputs_to_lifted_tensor_constants = cached_property(
        ExportGraphSignature.inputs_to_lifted_tensor_constants.fget
    )


def delegate_levels(graph: Graph, groups: Sequence[Sequence[Node]]) -> dict[Node, int]:
    """Return the level of every node of `groups`, which is equal for all nodes of a group.

    Raises:
        ValueError: a value leaves a group and re-enters the same group.
    """
    group_of = {node: index for index, group in enumerate(groups) for node in group}
    levels = [0] * len(groups)
    # The level of a group may rise after operators that depend on it were visited.
    for _ in range(len(groups) + 1):
        if not _raise_levels(graph, group_of, levels):
            return {node: levels[index] for node, index in group_of.items()}
    raise ValueError("Operators of one group depend on an operator that depends on the group.")


def split_delegate(nodes: Sequence[Node], groups: Sequence[Sequence[Node]], limit: int) -> list[list[Node]]:
    """Split the operators of a delegate into several delegates that run one after another.

    Args:
        nodes: operators of the delegate, in the order of their graph.
        groups: operators that stay together; groups may overlap.
        limit: maximum number of operators of a delegate, apart from those that a group adds.
    """
    count = -(-len(nodes) // limit)
    part = {node: index * count // len(nodes) for index, node in enumerate(nodes)}
    inside = [[node for node in group if node in part] for group in groups]
    before: dict[Node, int] = {}
    while part != before:
        before = dict(part)
        for node in nodes:
            part[node] = max(part[node], *(part.get(source, 0) for source in node.all_input_nodes), 0)
        for group in filter(None, inside):
            part |= dict.fromkeys(group, max(map(part.__getitem__, group)))
    parts = ([node for node in nodes if part[node] == number] for number in range(count))
    return [*filter(None, parts)]


def _raise_levels(graph: Graph, group_of: dict[Node, int], levels: list[int]) -> bool:
    """Raise the levels of groups to those of their inputs, and return whether any level was raised."""
    outside: dict[Node, int] = {}
    raised = False
    for node in graph.nodes:
        # A constant is copied to every delegate that reads it.
        if node.op != "call_function":
            continue
        sources = [source for source in node.all_input_nodes if source.op == "call_function"]
        if node not in group_of:
            source_levels = (levels[group_of[s]] if s in group_of else outside[s] for s in sources)
            outside[node] = max(source_levels, default=-1)
            continue
        source_levels = (levels[group_of[s]] if s in group_of else outside[s] + 1 for s in sources)
        level, group = max(source_levels, default=0), group_of[node]
        if level > levels[group]:
            levels[group] = level
            raised = True
    return raised
