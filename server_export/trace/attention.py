"""Attention with the interface of transformers, in operators that stay in one delegate.

It is registered under a name for which transformers has no mask function, so transformers builds no mask.
Causal masks and windows are tables, which modules have as `tables`; an encoder gets its padding as an
additive mask. Keys and values of grouped heads aren't repeated: the queries of a group are rows of one matrix
product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from prge.formats.chain import MASKED

NAME, CACHED = "prge", "prge_cached"
# The smallest value of the additive mask at a token; at padding it is smaller.
MIN_SEEN = -1


def register() -> None:
    """Register the attention functions with transformers: `prge`, and `prge_cached` over a cache."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, grouped_attention)
    AttentionInterface.register(CACHED, cached_attention)
    AttentionMaskInterface.register(CACHED, cached_mask)


def causal_mask(length: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return an additive mask [length, length]: a token sees itself and `window` - 1 tokens before it."""
    mask = torch.full((length, length), MASKED, dtype=dtype).triu(1)
    if window is not None and window < length:
        mask = mask + torch.full((length, length), MASKED, dtype=dtype).tril(-window)
    return mask


def padding_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return an additive mask [rows, 1, 1, length] from a mask float [rows, length] that is 1 at tokens."""
    return ((1 - mask) * MASKED).reshape(mask.shape[0], 1, 1, mask.shape[1])


def seen_tokens(padding: torch.Tensor) -> torch.Tensor:
    """Return the tokens that an additive mask [rows, 1, 1, length] doesn't hide: bool [rows, length]."""
    return (padding >= MIN_SEEN).reshape(padding.shape[0], padding.shape[-1])


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of queries [rows, heads, length, width] over keys [rows, groups, length, width].

    Args:
        key, value: [rows, groups, length, width].
        s_aux: sinks [heads], if the attention has any; see `_share_without_sink`.
        is_causal: whether a token only sees tokens before it; None: as `module` says.
        position_bias: [1, heads, length, length], depending on the distance of tokens.

    Returns:
        [rows, length, heads, width], and None instead of the attention weights.
    """
    rows, heads, length, width = query.shape
    groups, value_width = key.shape[1], value.shape[-1]
    members = heads // groups
    query = _scaled(query, scaling).reshape(rows * groups, members * length, width)
    scores = _scores(query, key.reshape(rows * groups, length, width), softcap)
    if position_bias is not None:
        scores = scores + position_bias.expand(rows, heads, length, length).reshape(scores.shape)
    is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    tables: Any = getattr(module, "tables", None)
    # A reshape of scores of dynamic size would leave the delegate. Masks have the shape of the scores
    # instead, with a row for each query of a group, or one for each group.
    if is_causal:
        scores = scores + tables.causal(length, sliding_window, members).reshape(-1, length)
    elif sliding_window is not None and sliding_window < tables.longest:
        scores = scores + tables.window(length, sliding_window, members).reshape(-1, length)
    if attention_mask is not None:
        mask_rows = (heads, length) if attention_mask.shape[2] == length else (groups, 1)
        scores = scores + attention_mask.expand(rows, *mask_rows, length).reshape(rows * groups, -1, length)
    weights = torch.softmax(scores, dim=-1)
    mixed = torch.bmm(weights, value.reshape(rows * groups, length, value_width))
    mixed = mixed.reshape(rows, heads, length, value_width)
    if s_aux is not None:
        mixed = mixed * _share_without_sink(scores, s_aux, (rows, heads, length))
    # The memory layout of transformers' own attention, which some models rely on in a view.
    return mixed.transpose(1, 2).contiguous(), None


def cached_mask(*, config: Any, **arguments: Any) -> torch.Tensor:
    """Return the additive mask of transformers for one row and one group: [1, members x length, cached].

    It is computed once for all layers, because a reshape of dynamic size would leave the delegates of the
    layers.
    """
    from transformers.masking_utils import eager_mask

    mask = eager_mask(config=config, **arguments)
    heads = config.num_attention_heads
    members = heads // (getattr(config, "num_key_value_heads", None) or heads)
    return mask.expand(1, members, *mask.shape[2:]).reshape(1, -1, mask.shape[3])


def cached_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of one row over all slots of a cache of fixed size; see `grouped_attention`.

    Args:
        query: [1, heads, length, width]; keys and values are [1, groups, cached, width].
        attention_mask: the result of `cached_mask`.
    """
    heads, length, width = query.shape[1:]
    groups, cached = key.shape[1:3]
    query = _scaled(query, scaling).reshape(groups, heads // groups * length, width)
    scores = _scores(query, key.reshape(groups, cached, width), softcap) + attention_mask
    mixed = torch.bmm(torch.softmax(scores, dim=-1), value.reshape(groups, cached, value.shape[-1]))
    mixed = mixed.reshape(1, heads, length, value.shape[-1])
    if s_aux is not None:
        mixed = mixed * _share_without_sink(scores, s_aux, (1, heads, length))
    return mixed.transpose(1, 2), None


def _share_without_sink(
    scores: torch.Tensor, sinks: torch.Tensor, shape: tuple[int, int, int]
) -> torch.Tensor:
    """Return the share of attention that a head's sink, a score without a value, leaves to the tokens.

    With exp(sink) in the sum of the softmax: sum / (sum + exp(sink)) = sigmoid(log(sum) - sink).

    Args:
        scores: [rows x groups, members x length, tokens].
        sinks: [heads].
        shape: rows, heads, length.

    Returns:
        [rows, heads, length, 1].
    """
    total = torch.logsumexp(scores, -1, keepdim=True).reshape(*shape, 1)
    return torch.sigmoid(total - sinks.reshape(1, -1, 1, 1))


def _scaled(query: torch.Tensor, scaling: float | None) -> torch.Tensor:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return query * scale if scale != 1.0 else query


def _scores(query: torch.Tensor, key: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Return scores [groups, queries, keys] from queries and keys [groups, ..., width]."""
    scores = torch.bmm(query, key.transpose(1, 2))
    return scores if softcap is None else torch.tanh(scores * (1.0 / softcap)) * softcap
