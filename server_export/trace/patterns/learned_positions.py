"""Models with a learned embedding, or a mask of their own, for each position that they have.

While a row of any length is traced, they have them for that row. The graph gets the model's own back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from server_export.adapter.layers import replace_module
from server_export.ir.markers import TOKENS
from server_export.ir.modules import replace_tensor
from server_export.trace.model_graph import WHOLE_PREFIX, ModelGraph, TracedModel
from server_export.trace.patterns import Pattern, Rewrite, register
from server_export.trace.positions import NUMBERS, TABLES, first_position


@contextmanager
def any_length(model: nn.Module, tokens: int, more: int) -> Iterator[None]:
    """While a row of any length is traced, a model has all that it has for each position for that row.

    Args:
        model: without memory.
        tokens: of the row.
        more: positions that tables have beside the row's.
    """
    own = _by_position(model)
    try:
        for name, (table, dims) in own.items():
            shape = [tokens + more if dim in dims else size for dim, size in enumerate(table.shape)]
            longer = torch.empty(shape, dtype=table.dtype, device=table.device)
            is_parameter = isinstance(table, nn.Parameter)
            replace_module(model, name, nn.Parameter(longer, requires_grad=False) if is_parameter else longer)
        yield
    finally:
        for name, (table, _) in own.items():
            replace_module(model, name, table)


def _by_position(model: nn.Module) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]]:
    """Tables of positions, buffers that number them, and masks of all of them; with their dimensions."""
    count = getattr(model.config, "max_position_embeddings", None)
    found: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {
        f"{name}.weight": (module.weight, (0,))
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.endswith(TABLES)
    }
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name.rpartition(".")[2] == NUMBERS:
            found[name] = (buffer, (buffer.dim() - 1,))
        elif [*buffer.shape] == [1, 1, count, count]:
            found[name] = (buffer, (2, 3))
    return found


def _put_back(graph: ModelGraph) -> None:
    """Put a model's own tables in the place of those that it was traced with."""
    own = {name: table for name, (table, _) in _by_position(graph.traced.model).items()}
    for node in graph.graph_module.graph.find_nodes(op="get_attr"):
        if (table := own.get(str(node.target).removeprefix(WHOLE_PREFIX))) is not None:
            replace_tensor(graph.graph_module, str(node.target), table)
            node.meta["val"] = table


def _longer(traced: TracedModel) -> Any:
    return any_length(traced.model, TOKENS, first_position(traced.model) + 1)


register(
    Pattern(
        "learned positions",
        serves="models with a learned embedding or a mask for each position",
        model_types=tuple(
            """
            albert bert bert-generation big_bird camembert clip_text_model convbert data2vec-text
            deberta deberta-v2 distilbert electra ernie esm flaubert fnet git gpt_neo jina_embeddings_v3
            layoutlm longformer luke megatron-bert mobilebert mpnet mra nomic_bert nystromformer
            openai-gpt prophetnet rembert roberta roberta-prelayernorm roc_bert tapas tipsv2_text_model
            xlm xlm-roberta xlm-roberta-xl xmod yoso
            """.split()
        ),
        example="bert",
        matches=lambda traced: bool(_by_position(traced.model)),
        tracing=_longer,
        rewrites=(Rewrite(_put_back),),
    )
)
