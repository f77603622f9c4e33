"""Models with a learned embedding, or their own mask, for each position that they support.

While a row of any length is traced, these tensors have the size of that row. The graph gets the original ones
back.
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
from server_export.trace.positions import POSITION_EMBEDDINGS, POSITION_IDS, first_position


@contextmanager
def any_length(model: nn.Module, tokens: int, extra: int) -> Iterator[None]:
    """Resize everything that a model has per position to one row while it is traced.

    Args:
        model: the model, on the meta device.
        tokens: the number of tokens of the row.
        extra: the number of positions that tables have in addition to the row's.
    """
    originals = _by_position(model)
    try:
        for name, (table, dims) in originals.items():
            shape = [tokens + extra if dim in dims else size for dim, size in enumerate(table.shape)]
            resized = torch.empty(shape, dtype=table.dtype, device=table.device)
            is_parameter = isinstance(table, nn.Parameter)
            replace_module(
                model, name, nn.Parameter(resized, requires_grad=False) if is_parameter else resized
            )
        yield
    finally:
        for name, (table, _) in originals.items():
            replace_module(model, name, table)


def _by_position(model: nn.Module) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]]:
    """Return position embeddings, position ids and masks over positions, with their resized dimensions."""
    count = getattr(model.config, "max_position_embeddings", None)
    tables: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {
        f"{name}.weight": (module.weight, (0,))
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.endswith(POSITION_EMBEDDINGS)
    }
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name.rpartition(".")[2] == POSITION_IDS:
            tables[name] = (buffer, (buffer.dim() - 1,))
        elif [*buffer.shape] == [1, 1, count, count]:
            tables[name] = (buffer, (2, 3))
    return tables


def _restore(graph: ModelGraph) -> None:
    """Replace the resized tensors by the model's own, in place."""
    originals = {name: table for name, (table, _) in _by_position(graph.traced.model).items()}
    for node in graph.graph_module.graph.find_nodes(op="get_attr"):
        if (table := originals.get(str(node.target).removeprefix(WHOLE_PREFIX))) is not None:
            replace_tensor(graph.graph_module, str(node.target), table)
            node.meta["val"] = table


def _resized(traced: TracedModel) -> Any:
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
        tracing=_resized,
        rewrites=(Rewrite(_restore),),
    )
)
