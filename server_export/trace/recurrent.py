"""A model's recurrences as operators of its graph, while it is traced.

transformers' models call functions of their own files, such as `causal_conv1d_fn`, which packages with
kernels take the place of by these names, or methods of a layer. So do the functions here: they compute the
same of all tokens, and leave how to `server_export.ir.recurrences`. A convolution that reads the tokens
before each is found in the graph, whoever calls it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from prge.errors import BundleError
from prge.files.relations import relation_shape
from server_export.ir.recurrences import CONVOLUTION, RECURRENCE, SCAN
from server_export.ir.writer import Writer
from server_export.trace.neighbours import convolution_of
from server_export.trace.tables import ModelTable, ModelTables, asked

aten = torch.ops.aten


@contextmanager
def traced_recurrences(model: nn.Module, tables: ModelTables) -> Iterator[None]:
    """Let a model's recurrences be operators meanwhile.

    Raises:
        BundleError: it has one of another kind.
    """
    operators, replaced = _Operators(tables), functions_of(model)
    # A class of models that keep a state of their own says so, or the types of its layers do.
    types = getattr(getattr(model, "config", None), "layer_types", None) or ()
    recurs = getattr(model, "_is_stateful", False) or "linear_attention" in types
    if recurs and not any(name in RECURRENCES for _, name, _ in replaced):
        raise BundleError(
            f"{type(model).__name__} has a recurrence of a kind that isn't known here; known are delta "
            "rules, state spaces of Mamba 1 and 2, gated linear recurrences and RWKV's, where transformers "
            f"calls them {', '.join(RECURRENCES)}",
            remedy="take a model with attention or one of these",
        )
    try:
        for place, name, _ in replaced:
            setattr(place, name, getattr(operators, REPLACED[name]))
        yield
    finally:
        for place, name, function in replaced:
            setattr(place, name, function)


def functions_of(model: nn.Module) -> list[tuple[ModuleType | type, str, Any]]:
    """What a model's recurrences and convolutions call: a file or class, a name, and the function there."""
    classes = [*dict.fromkeys(type(module) for module in model.modules())]
    files = [sys.modules[name] for name in dict.fromkeys(each.__module__ for each in classes)]
    places: list[ModuleType | type] = [*files, *classes]
    return [
        (place, name, vars(place)[name])
        for place in places
        for name in REPLACED
        if inspect.isfunction(vars(place).get(name))
    ]


RECURRENCES = {
    "torch_chunk_gated_delta_rule": "delta_rule",
    "mamba2_chunk_scan": "state_space",
    "mamba_selective_scan": "selective_scan",
    "_rnn_scan": "gated_scan",
    "chunk_kimi_delta_attention": "delta_rule",
    "rwkv_linear_attention": "weighted_mean",
}
REPLACED = {"causal_conv1d_fn": "convolution", **RECURRENCES}


class _Operators:
    """Functions with the parameters of transformers' own."""

    def __init__(self, tables: ModelTables) -> None:
        self._tables = tables

    def convolution(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | Callable[[torch.Tensor], torch.Tensor] | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Of states [rows, width, tokens] and a weight [width, taps]."""
        from transformers.activations import ACT2FN

        width, taps = weight.shape
        padded = F.conv1d(hidden_states, weight.unsqueeze(1), bias, padding=taps - 1, groups=width)
        found = padded[..., : hidden_states.shape[-1]]
        if activation is None:
            return found
        act: Any = ACT2FN[activation] if isinstance(activation, str) else activation
        result: torch.Tensor = act(found)
        return result

    def delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Of [rows, tokens, heads, width], and decays and strengths [rows, tokens, heads].

        Decays may be those of each number of a key, [rows, tokens, heads, width].
        """
        heads = value.shape[2]
        if use_qk_l2norm_in_kernel:
            query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
        query = _by_head(query, heads) * query.shape[-1] ** -0.5
        found = self._recurrence(query, _by_head(key, heads), value, g, beta)
        return found, None

    def state_space(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        chunk_size: int,
        D: torch.Tensor | None = None,  # noqa: N803
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        z: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Of states [rows, tokens, heads, width], steps [rows, tokens, heads], B and C by group."""
        heads = hidden_states.shape[2]
        dt = dt if dt_bias is None else dt + dt_bias
        dt = F.softplus(dt) if dt_softplus else dt
        low, high = dt_limit
        # A softplus is above 0, and most models have no other limits.
        if low > 0 or not dt_softplus:
            dt = dt.clamp(min=low)
        if high != float("inf"):
            dt = dt.clamp(max=high)
        found = self._recurrence(
            _by_head(C, heads), _by_head(B, heads), hidden_states * dt.unsqueeze(-1), dt * A, None
        )
        found = found if D is None else found + hidden_states * D.reshape(heads, 1)
        return found if z is None else found * F.silu(z)

    def selective_scan(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor | None = None,  # noqa: N803
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        """Of states and steps [rows, width, tokens], A [width, size], B and C [rows, size, tokens]."""
        (rows, width, tokens), size = hidden_states.shape, A.shape[1]
        dt = dt if delta_bias is None else dt + delta_bias.reshape(width, 1)
        dt = F.softplus(dt) if delta_softplus else dt
        factor = torch.exp(A.reshape(width, size, 1) * dt.unsqueeze(2))
        source = (dt * hidden_states).unsqueeze(2) * B.unsqueeze(1)
        states = self._scan(
            factor.reshape(rows, width * size, tokens), source.reshape(rows, width * size, tokens)
        )
        found = (states.reshape(rows, width, size, tokens) * C.unsqueeze(1)).sum(2)
        found = found if D is None else found + hidden_states * D.reshape(width, 1)
        return found if z is None else found * F.silu(z)

    def gated_scan(
        self,
        hidden_states: torch.Tensor,
        recurrent_gate: torch.Tensor,
        reset: torch.Tensor,
        recurrent_states: None = None,
    ) -> tuple[torch.Tensor, None]:
        """Of states and factors [rows, tokens, width], and where a text begins [1, tokens, 1]."""
        factor = recurrent_gate * ~reset
        return self._scan(factor.transpose(1, 2), hidden_states.transpose(1, 2)).transpose(1, 2), None

    def weighted_mean(
        self,
        time_decay: torch.Tensor,
        time_first: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Of [rows, tokens, width]: the mean of values so far, that weigh by their keys and grow lighter.

        Keys above 88 have weights that float32 lacks: answers that are not finite are refused.
        """
        weight, width = torch.exp(key), key.shape[-1]
        by_width = key.transpose(1, 2)
        factor = torch.exp(-torch.exp(time_decay)).reshape(width, 1).expand(by_width.shape)

        def before(source: torch.Tensor) -> torch.Tensor:
            moved = F.pad(source, (0, 0, 1, -1)).transpose(1, 2)
            return self._scan(factor, moved).transpose(1, 2)

        own = torch.exp(key + time_first)
        return (before(weight * value) + own * value) / (before(weight) + own), None

    def _scan(self, factor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Of [rows, width, tokens]."""
        tokens, shifts, back = source.shape[-1], [], 1
        while back < self._tables.piece:
            shifts.append(self._tables.relation("behind", tokens, back, 1))
            back *= 2
        found: torch.Tensor = SCAN(
            factor,
            source,
            shifts,
            self._tables.relation("entering", tokens, 1, 1),
            self._tables.relation("leaving", tokens, 0, 1),
        )
        return found

    def _recurrence(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        strength: torch.Tensor | None,
    ) -> torch.Tensor:
        rows, tokens, heads, width = value.shape

        def flat(by_token: torch.Tensor) -> torch.Tensor:
            turned = by_token.transpose(1, 2)
            return turned.reshape(rows * heads, *turned.shape[2:])

        halves, meeting, size = [], [], 1
        own = decay.dim() == key.dim()
        while (own or strength is not None) and size < self._tables.piece:
            halves.append(self._tables.relation("halves", tokens, size))
            if own:
                meeting.append(self._tables.relation("meeting", tokens, size))
            size *= 2
        found: torch.Tensor = RECURRENCE(
            *map(flat, (query, key, value, decay)),
            None if strength is None else flat(strength),
            self._tables.relation("behind", tokens),
            self._tables.relation("behind", tokens, 1),
            halves,
            meeting,
        )
        turned = found.reshape(rows, heads, tokens, width).transpose(1, 2)
        # A copy, as a view of it needs: one that is called so is taken for none.
        return turned.reshape(rows, tokens, heads * width).reshape(rows, tokens, heads, width)


def write_convolutions(graph_module: GraphModule, tables: ModelTables) -> None:
    """Write convolutions that read the tokens before each as operators with a memory, in place.

    Args:
        graph_module: as it was traced.
        tables: of the model; more are asked for.
    """
    writer = Writer(graph_module)
    for node in list(graph_module.graph.nodes):
        if node.target in (aten.pad.default, aten.constant_pad_nd.default):
            writer.replace(node, _moved, tables, node)
        if node.target in (aten.conv1d.default, aten.convolution.default):
            for part in list(node.users):
                writer.replace(part, _convolved, tables, node, part)
    graph_module.graph.eliminate_dead_code()


def _convolved(writer: Writer, tables: ModelTables, node: Any, part: Any) -> Node | None:
    """What a convolution answers of f32 [rows, width, tokens], without what is behind the last token."""
    source, weight, bias, stride, padding, dilation, groups = convolution_of(node)
    width, each, *sizes = weight.meta["val"].shape
    tokens = source.meta["val"].shape[-1]
    taps = sizes[0]
    is_one = part.target is aten.slice.Tensor and part.meta["val"].shape[-1] == tokens
    is_first = is_one and part.args[1] % 3 == 2 and part.args[2] in (None, 0)
    is_causal = len(sizes) == 1 and (*stride, *padding, *dilation) == (1, taps - 1, 1)
    if not (is_first and is_causal and (groups, each) == (width, 1) and taps > 1):
        return None

    columns = [
        writer.reshape(writer.call(aten.select.int, weight, 2, taps - 1 - back), [width, 1])
        for back in range(taps)
    ]
    found = _with_memory(writer, tables, part, source, columns)
    return found if bias is None else writer.plus(found, writer.reshape(bias, [width, 1]))


def _moved(writer: Writer, tables: ModelTables, node: Any) -> Node | None:
    """Of f32 [rows, tokens, width], the token that is so many places before each."""
    source, pads, *fill = node.args
    shape = node.meta["val"].shape
    is_nothing = all(each in ("constant", None, 0) for each in fill)
    is_moved = len(pads) == 4 and pads[:2] == [0, 0] and pads[2] == -pads[3] > 0
    if len(shape) != 3 or not (is_moved and is_nothing):
        return None
    ones = [torch.zeros(shape[2], 1)] * pads[2] + [torch.ones(shape[2], 1)]
    turned = writer.call(aten.permute.default, source, [0, 2, 1])
    found = _with_memory(writer, tables, node, turned, [*map(writer.constant, ones)])
    return writer.call(aten.permute.default, found, [0, 2, 1])


def _with_memory(
    writer: Writer, tables: ModelTables, before: Node, source: Node, columns: Sequence[Node]
) -> Node:
    """The operator of a convolution of f32 [rows, width, tokens] with taps [width, 1]."""
    taps, tokens = len(columns), source.meta["val"].shape[-1]

    def relation(kind: str, first: int, window: int) -> Node:
        shape = [1, *relation_shape(kind, tokens, window)[1:]]
        key, table = (kind, first, window), ModelTable(kind, window, first)
        return asked(before, tables, key, table, shape, torch.float32)

    return writer.call(
        CONVOLUTION,
        source,
        [*columns],
        relation("behind", 1, 1),
        [relation("entering", back, taps - 1) for back in range(1, taps)],
        relation("leaving", 0, taps - 1),
        relation("staying", 0, taps - 1),
    )


def _by_head(by_group: torch.Tensor, heads: int) -> torch.Tensor:
    """[rows, tokens, groups, width], each group as often as it has heads: [rows, tokens, heads, width]."""
    rows, tokens, groups, width = by_group.shape
    if groups == heads:
        return by_group
    spread = by_group.unsqueeze(3).expand(rows, tokens, groups, heads // groups, width)
    return spread.reshape(rows, tokens, heads, width)
