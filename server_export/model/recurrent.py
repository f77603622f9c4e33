"""A model's recurrences as operators of its graph, while it is traced.

transformers' models call functions of their own files, such as `causal_conv1d_fn`, which packages with
kernels take the place of by these names. So do the functions here: they compute the same of all tokens, and
leave how to `server_export.graph.recurrences`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from prge.errors import BundleError
from server_export.graph.recurrences import CONVOLUTION, RECURRENCE, SCAN
from server_export.model.tables import ModelTables


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
            f"{type(model).__name__} has a recurrence of a kind that isn't known here; "
            f"known are those that transformers calls {', '.join(RECURRENCES)}",
            remedy="take a model with attention or one of these",
        )
    try:
        for file, name, _ in replaced:
            setattr(file, name, getattr(operators, REPLACED[name]))
        yield
    finally:
        for file, name, function in replaced:
            setattr(file, name, function)


def functions_of(model: nn.Module) -> list[tuple[ModuleType, str, Any]]:
    """The functions that a model's recurrences and convolutions call: file, name, and what is there."""
    files = [sys.modules[name] for name in dict.fromkeys(type(m).__module__ for m in model.modules())]
    return [
        (file, name, getattr(file, name))
        for file in files
        for name in REPLACED
        if inspect.isfunction(getattr(file, name, None))
    ]


RECURRENCES = {
    "torch_chunk_gated_delta_rule": "delta_rule",
    "mamba2_chunk_scan": "state_space",
    "mamba_selective_scan": "selective_scan",
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

        (width, taps), tokens = weight.shape, hidden_states.shape[-1]
        found: torch.Tensor = CONVOLUTION(
            hidden_states,
            [weight[:, taps - 1 - back].reshape(width, 1) for back in range(taps)],
            self._tables.relation("behind", tokens, 1, 1),
            [self._tables.relation("entering", tokens, back, taps - 1) for back in range(1, taps)],
            self._tables.relation("leaving", tokens, 0, taps - 1),
            self._tables.relation("staying", tokens, 0, taps - 1),
        )
        if bias is not None:
            found = found + bias.reshape(width, 1)
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
        """Of [rows, tokens, heads, width], and decays and strengths [rows, tokens, heads]."""
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
        shifts, back = [], 1
        while back < self._tables.piece:
            shifts.append(self._tables.relation("behind", tokens, back, 1))
            back *= 2
        states: torch.Tensor = SCAN(
            factor.reshape(rows, width * size, tokens),
            source.reshape(rows, width * size, tokens),
            shifts,
            self._tables.relation("entering", tokens, 1, 1),
            self._tables.relation("leaving", tokens, 0, 1),
        )
        found = (states.reshape(rows, width, size, tokens) * C.unsqueeze(1)).sum(2)
        found = found if D is None else found + hidden_states * D.reshape(width, 1)
        return found if z is None else found * F.silu(z)

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

        halves, size = [], 1
        while strength is not None and size < self._tables.piece:
            halves.append(self._tables.relation("halves", tokens, size))
            size *= 2
        found: torch.Tensor = RECURRENCE(
            *map(flat, (query, key, value, decay)),
            None if strength is None else flat(strength),
            self._tables.relation("behind", tokens),
            self._tables.relation("behind", tokens, 1),
            halves,
        )
        turned = found.reshape(rows, heads, tokens, width).transpose(1, 2)
        # A copy, as a view of it needs: one that is called so is taken for none.
        return turned.reshape(rows, tokens, heads * width).reshape(rows, tokens, heads, width)


def _by_head(by_group: torch.Tensor, heads: int) -> torch.Tensor:
    """[rows, tokens, groups, width], each group as often as it has heads: [rows, tokens, heads, width]."""
    rows, tokens, groups, width = by_group.shape
    if groups == heads:
        return by_group
    spread = by_group.unsqueeze(3).expand(rows, tokens, groups, heads // groups, width)
    return spread.reshape(rows, tokens, heads, width)
