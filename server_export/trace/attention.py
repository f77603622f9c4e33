"""Attention as transformers calls it, in operators that stay in one delegate.

Registered under a name that transformers has no mask function for, so that it builds no mask at all: causal
masks and windows are tables, which modules have as `tables`, and an encoder gets its padding as an additive
mask. Keys and values of grouped heads aren't repeated: the queries of a group are rows of one matrix product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from prge.files.chain import MASKED

NAME, CACHED = "prge", "prge_cached"
# What a token has at least of padding's additive mask, and padding hasn't.
LEAST_SEEN = -1


def register() -> None:
    """Make the attentions known to transformers: `prge`, and over a cache `prge_cached`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, grouped_attention)
    AttentionInterface.register(CACHED, cached_attention)
    AttentionMaskInterface.register(CACHED, cached_mask)


def causal_mask(length: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [length, length]: a token sees itself and at most `window` - 1 tokens before."""
    mask = torch.full((length, length), MASKED, dtype=dtype).triu(1)
    if window is not None and window < length:
        mask = mask + torch.full((length, length), MASKED, dtype=dtype).tril(-window)
    return mask


def padding_mask(mask: torch.Tensor) -> torch.Tensor:
    """Mask float [rows, length], 1 for a token and 0 for padding -> additive mask [rows, 1, 1, length]."""
    return ((1 - mask) * MASKED).reshape(mask.shape[0], 1, 1, mask.shape[1])


def seen_tokens(padding: torch.Tensor) -> torch.Tensor:
    """Which tokens an additive mask [rows, 1, 1, length] doesn't hide: bool [rows, length]."""
    return (padding >= LEAST_SEEN).reshape(padding.shape[0], padding.shape[-1])


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
    """Attention of queries [rows, heads, length, width] over keys and values [rows, groups, length, width].

    Args:
        s_aux: sinks [heads], if there are any; see `_share`.
        is_causal: whether a token sees those before alone; None: as `module` says.
        position_bias: [1, heads, length, length], of how far tokens are apart.

    Returns:
        [rows, length, heads, width], and None in the place of the attention weights.
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
    # Of unknown sizes a reshape of the scores would leave the delegate: masks have their shape instead, once
    # for each query of a group, or once for each group.
    if is_causal:
        scores = scores + tables.causal(length, sliding_window, members).reshape(-1, length)
    elif sliding_window is not None and sliding_window < tables.longest:
        scores = scores + tables.window(length, sliding_window, members).reshape(-1, length)
    if attention_mask is not None:
        own = (heads, length) if attention_mask.shape[2] == length else (groups, 1)
        scores = scores + attention_mask.expand(rows, *own, length).reshape(rows * groups, -1, length)
    weights = torch.softmax(scores, dim=-1)
    mixed = torch.bmm(weights, value.reshape(rows * groups, length, value_width))
    mixed = mixed.reshape(rows, heads, length, value_width)
    if s_aux is not None:
        mixed = mixed * _share(scores, s_aux, (rows, heads, length))
    # Laid out as transformers' own attention has it: some models view it otherwise.
    return mixed.transpose(1, 2).contiguous(), None


def cached_mask(*, config: Any, **given: Any) -> torch.Tensor:
    """transformers' additive mask of a program's one row, for a group: [1, members x length, cached].

    Made once for all layers: a reshape of unknown sizes would leave their delegates.
    """
    from transformers.masking_utils import eager_mask

    mask = eager_mask(config=config, **given)
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
    """As `grouped_attention`, of one row, over all that a cache of fixed size has room for.

    Args:
        query: [1, heads, length, width]; keys and values are [1, groups, cached, width].
        attention_mask: of `cached_mask`.
    """
    heads, length, width = query.shape[1:]
    groups, cached = key.shape[1:3]
    query = _scaled(query, scaling).reshape(groups, heads // groups * length, width)
    scores = _scores(query, key.reshape(groups, cached, width), softcap) + attention_mask
    mixed = torch.bmm(torch.softmax(scores, dim=-1), value.reshape(groups, cached, value.shape[-1]))
    mixed = mixed.reshape(1, heads, length, value.shape[-1])
    if s_aux is not None:
        mixed = mixed * _share(scores, s_aux, (1, heads, length))
    return mixed.transpose(1, 2), None


def _share(scores: torch.Tensor, sinks: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    """What a sink of each head, one more score that has no value, leaves to the tokens of these scores.

    With exp(sink) in the sum of a softmax: sum / (sum + exp(sink)) = sigmoid(log(sum) - sink).

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
    """[groups, queries, keys] of queries and keys [groups, ..., width]."""
    scores = torch.bmm(query, key.transpose(1, 2))
    return scores if softcap is None else torch.tanh(scores * (1.0 / softcap)) * softcap
