"""A block that goes on with a sequence answers what the block does that reads it from its beginning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from prge.errors import BundleError
from prge.files.chain import (
    CAUSAL,
    MASKED,
    OWN,
    PAST_KEYS,
    PAST_VALUES,
    SEEN,
    SLOPE_KEYS,
    SLOPE_VALUES,
)
from prge.files.signatures import BACK, DECODE, PREFILL, PREFILL_BACK, STACK
from server_export.derive.continuing import FROZEN_PREFIX, continued
from server_export.ir.markers import BATCH, COPIES, PAST, TOKENS
from server_export.ir.modules import attribute
from server_export.ir.shapes import fill_in_values, with_size
from server_export.lower.roles import role_graphs
from tests.server_export.derive.tangent.graphs import inputs_of, random, relative_difference
from tests.server_export.derive.test_blocks import chain_of
from tests.tiers import rest
from tests.tiny_models import DECODERS

torch.set_num_threads(1)

RANK = 4
# What came before, and what comes: more than the window of those that have one.
BEFORE, AFTER = 6, 3
LENGTH = BEFORE + AFTER
ROLES = {STACK, BACK, PREFILL, DECODE, PREFILL_BACK}


class Block:
    """The first block of a tiny model by role, with the tables and adapters of its call."""

    def __init__(self, architecture: str, folder: Path) -> None:
        chain = chain_of(architecture, folder, "fp32", RANK)
        number = 1
        self.block, kind = chain.blocks[number], chain.kinds[number]
        for name, tensor in chain.tensors(number).items():
            attribute(kind.graph_module, name).copy_(tensor)
        adapted = {name: chain.adapter[name] for name in self.block.adapter}
        self.graphs = role_graphs(kind.graph_module, adapted, ROLES, is_head=False)
        self.tables = [chain.tables.all[table] for table in self.block.tables]
        self.adapter = {name: random(1, each.rank, each.width).float() for name, each in adapted.items()}
        self.frozen = {FROZEN_PREFIX + name: chain.lora_a[each.of][None] for name, each in adapted.items()}
        self.width = kind.graph_module.graph.find_nodes(op="placeholder")[0].meta["val"].shape[-1]
        causal = next(table for table in self.tables if table.kind == "causal")
        self.members, self.window = causal.members, causal.window

    def call(self, role: str, rows: int, tokens: int, past: int, **given: torch.Tensor) -> list[torch.Tensor]:
        graph = self.graphs[role]
        for marker, size in ((COPIES, rows), (BATCH, 1), (TOKENS, tokens), (PAST, past)):
            graph = with_size(graph, marker, size)
        for matrices in (self.adapter, self.frozen):
            given |= {name: matrix.expand(rows, -1, -1) for name, matrix in matrices.items()}
        return list(graph(*(given[name] for name in inputs_of(graph))))

    def tables_of(self, start: int, end: int) -> dict[str, torch.Tensor]:
        return {
            f"table_{number}": table.of(end)[:, start:]
            for number, table in enumerate(self.tables)
            if table.kind != "causal"
        }

    def mask(self, start: int, end: int) -> torch.Tensor:
        """What tokens [start, end) see of those before them, and of each other: [members x tokens, end]."""
        table = next(table for table in self.tables if table.kind == "causal")
        return table.of(end)[:, start:].reshape(-1, end)


@pytest.mark.parametrize(
    "architecture",
    ["llama", *rest(*(name for name in DECODERS if name != "llama"), "gpt_oss", "bloom", "gpt_neo")],
)
def test_tokens_that_come_later_are_answered_as_in_the_whole(architecture: str, tmp_path: Path) -> None:
    block = Block(architecture, tmp_path)
    states = random(2, LENGTH, block.width).float()
    causal = {f"table_{n}": t.of(LENGTH) for n, t in enumerate(block.tables)}
    whole = [block.call(STACK, 1, LENGTH, 1, state=state[None], **causal)[0][0] for state in states]
    # Nothing came before: the mask hides what lies there.
    hidden = torch.full((block.members * BEFORE, 2), MASKED)
    known = []
    for state, expected in zip(states, whole, strict=True):
        shapes = {PAST_KEYS: None, PAST_VALUES: None}
        heads = {
            name: next(n for n in block.graphs[PREFILL].graph.nodes if n.name == name).meta["val"].shape
            for name in shapes
        }
        empty = {name: torch.ones(shape[0], 2, shape[2]) for name, shape in heads.items()}
        answer, keys, values = block.call(
            PREFILL,
            1,
            BEFORE,
            2,
            state=state[None, :BEFORE],
            **block.tables_of(0, BEFORE),
            **empty,
            **{SEEN: hidden, CAUSAL: block.mask(0, BEFORE)},
        )
        assert torch.allclose(answer[0], expected[:BEFORE], atol=1e-5)
        known.append((keys, values))
    # A piece of one sequence.
    keys, values = known[0]
    mask = block.mask(BEFORE, LENGTH)
    answer, *_ = block.call(
        PREFILL,
        1,
        AFTER,
        BEFORE,
        state=states[:1, BEFORE:],
        **block.tables_of(BEFORE, LENGTH),
        **{PAST_KEYS: keys, PAST_VALUES: values, SEEN: mask[:, :BEFORE], CAUSAL: mask[:, BEFORE:]},
    )
    assert torch.allclose(answer[0], whole[0][BEFORE:], atol=1e-5)
    # A token of two, in the first place of what came before.
    seen = torch.zeros(2 * len(keys), 1, 1 + BEFORE)
    seen[..., 1:] = block.mask(BEFORE, BEFORE + 1)[:1, :BEFORE]
    tables = {
        name: table.expand(2, *table.shape[1:]) for name, table in block.tables_of(BEFORE, BEFORE + 1).items()
    }
    both = [nn.functional.pad(torch.cat(parts), (0, 0, 1, 0)) for parts in zip(*known, strict=True)]
    answer, keys, values = block.call(
        DECODE,
        2,
        1,
        1 + BEFORE,
        state=states[:, BEFORE : BEFORE + 1],
        **tables,
        **{PAST_KEYS: both[0], PAST_VALUES: both[1], SEEN: seen, OWN: torch.eye(1, 1 + BEFORE)[None]},
    )
    assert torch.allclose(answer[:, 0], torch.stack([w[BEFORE] for w in whole]), atol=1e-5)
    assert keys.shape == (len(both[0]), 1, both[0].shape[-1]) and values.shape[:2] == keys.shape[:2]


@pytest.mark.parametrize("architecture", ["llama", *rest(*(name for name in DECODERS if name != "llama"))])
def test_the_way_back_in_pieces_is_that_of_the_whole(architecture: str, tmp_path: Path) -> None:
    """The last piece first: it answers what the piece before is given for its keys and values."""
    block = Block(architecture, tmp_path)
    state, slope = (random(1, LENGTH, block.width, seed=seed).float() for seed in range(2))
    tables = {f"table_{number}": table.of(LENGTH) for number, table in enumerate(block.tables)}
    ones = torch.ones(1, LENGTH, 1)
    expected = block.call(BACK, 1, LENGTH, 1, state=state, slope=slope, ones=ones, **tables)

    def piece(role: str, start: int, end: int, **given: torch.Tensor) -> list[torch.Tensor]:
        mask = block.mask(start, end)
        of_past = {SEEN: mask[:, :start] if start else torch.full((len(mask), 2), MASKED)}
        given |= {"state": state[:, start:end], "slope": slope[:, start:end], "ones": ones[:, start:end]}
        past = max(start, 2)
        return block.call(
            role, 1, end - start, past, **given, **block.tables_of(start, end), **of_past,
            **{CAUSAL: mask[:, start:]},
        )  # fmt: skip

    shapes = {n.name: n.meta["val"].shape for n in block.graphs[PREFILL].graph.nodes if "past_" in n.name}
    nothing = {name: torch.zeros(shape[0], 2, shape[2]) for name, shape in shapes.items()}
    _, keys, values = piece(PREFILL, 0, BEFORE, **nothing)
    of_own = {SLOPE_KEYS: keys[:, :AFTER] * 0, SLOPE_VALUES: values[:, :AFTER] * 0}
    past = {PAST_KEYS: keys, PAST_VALUES: values}
    last, by_keys, by_values, *later = piece(PREFILL_BACK, BEFORE, LENGTH, **past, **of_own)
    of_own = {SLOPE_KEYS: by_keys, SLOPE_VALUES: by_values}
    (
        first,
        *_,
    ) = rest_of = piece(PREFILL_BACK, 0, BEFORE, **nothing, **of_own)
    found = [torch.cat([first, last], 1), *(a + b for a, b in zip(rest_of[3:], later, strict=True))]
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_difference(ours, theirs) < 1e-5


def test_scores_of_another_kind_are_refused() -> None:
    """Those that aren't a product of queries and transposed keys."""
    graph = Graph()
    state, table = graph.placeholder("state"), graph.placeholder("table_0")
    scores = graph.call_function(torch.ops.aten.bmm.default, (state, state))
    mask = graph.call_function(torch.ops.aten.reshape.default, (table, [-1, 4]))
    masked = graph.call_function(torch.ops.aten.add.Tensor, (scores, mask))
    weights = graph.call_function(torch.ops.aten.softmax.int, (masked, -1))
    graph.output((graph.call_function(torch.ops.aten.bmm.default, (weights, state)),))
    for node in (state, table):
        node.meta["val"] = torch.empty(1, 4, 4, device="meta")
    graph_module = GraphModule(torch.nn.Module(), graph)
    fill_in_values(graph_module)
    with pytest.raises(BundleError, match="keys come from"):
        continued(graph_module, [], 1, 4, PAST)
