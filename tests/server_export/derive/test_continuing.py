"""A block that goes on with a sequence answers what the block does that reads it from its beginning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from prge.files.chain import MASKED
from prge.files.signatures import (
    BACK,
    CAUSAL,
    DECODE,
    OWN,
    PAST_KEYS,
    PAST_VALUES,
    PREFILL,
    PREFILL_BACK,
    SEEN,
    STACK,
    Port,
)
from server_export.derive.continuing import continued
from server_export.derive.roles import derive
from server_export.ir.block import Block, new_input
from server_export.ir.markers import PAST
from server_export.ir.shapes import fill_in_values
from tests.refusals import refusal
from tests.server_export.derive.tangent.graphs import random, relative_difference
from tests.server_export.derive.test_blocks import chain_of, with_weights
from tests.tiers import rest
from tests.tiny_models import DECODERS

torch.set_num_threads(1)

RANK = 4
# What came before, and what comes: more than the window of those that have one.
BEFORE, AFTER = 6, 3
LENGTH = BEFORE + AFTER
ROLES = {STACK, BACK, PREFILL, DECODE, PREFILL_BACK}


class Derived:
    """The first block of a tiny model by role, with the tables and adapters of its call."""

    def __init__(self, architecture: str, folder: Path) -> None:
        chain, number = chain_of(architecture, folder, "fp32", RANK), 1
        block = with_weights(chain, number)
        self.blocks = derive(block, ROLES)
        self.tables = [chain.tables.all[table] for table in chain.blocks[number].tables]
        self.adapter = {
            port.name: random(*node.meta["val"].shape[1:]).float()[None]
            for port, node in block.inputs.items()
            if port.is_adapter
        }
        modules = enumerate(chain.blocks[number].modules)
        self.frozen = {f"lora_a.{place}": chain.lora_a[module][None] for place, module in modules}
        self.width = block.inputs[Port("state")].meta["val"].shape[-1]
        causal = next(table for table in self.tables if table.kind == "causal")
        self.members, self.window = causal.members, causal.window

    def shape(self, kind: str) -> torch.Size:
        """Of what a chunk is given of the tokens before."""
        shape: torch.Size = self.blocks[PREFILL].inputs[Port(kind)].meta["val"].shape
        return shape

    def call(self, role: str, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        rows = len(given["state"])
        matrices = {
            name: matrix.expand(rows, -1, -1) for name, matrix in (self.adapter | self.frozen).items()
        }
        return list(self.blocks[role].call({**given, **matrices}).values())

    def tables_of(self, start: int, end: int) -> dict[str, torch.Tensor]:
        return {
            f"table.{number}": table.of(end)[:, start:]
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
    block = Derived(architecture, tmp_path)
    states = random(2, LENGTH, block.width).float()
    causal = {f"table.{n}": t.of(LENGTH) for n, t in enumerate(block.tables)}
    whole = [block.call(STACK, {"state": state[None], **causal})[0][0] for state in states]
    # Nothing came before: the mask hides what lies there.
    hidden = torch.full((block.members * BEFORE, 2), MASKED)
    known = []
    for state, expected in zip(states, whole, strict=True):
        shapes = {kind: block.shape(kind) for kind in (PAST_KEYS, PAST_VALUES)}
        empty = {kind: torch.ones(shape[0], 2, shape[2]) for kind, shape in shapes.items()}
        masks = {SEEN: hidden, CAUSAL: block.mask(0, BEFORE)}
        given = {"state": state[None, :BEFORE], **block.tables_of(0, BEFORE), **empty, **masks}
        answer, keys, values = block.call(PREFILL, given)
        assert torch.allclose(answer[0], expected[:BEFORE], atol=1e-5)
        known.append((keys, values))
    # A chunk of one sequence.
    keys, values = known[0]
    mask = block.mask(BEFORE, LENGTH)
    past = {PAST_KEYS: keys, PAST_VALUES: values, SEEN: mask[:, :BEFORE], CAUSAL: mask[:, BEFORE:]}
    given = {"state": states[:1, BEFORE:], **block.tables_of(BEFORE, LENGTH), **past}
    answer, *_ = block.call(PREFILL, given)
    assert torch.allclose(answer[0], whole[0][BEFORE:], atol=1e-5)
    # A token of two, in the first place of what came before.
    seen = torch.zeros(2 * len(keys), 1, 1 + BEFORE)
    seen[..., 1:] = block.mask(BEFORE, BEFORE + 1)[:1, :BEFORE]
    tables = {
        name: table.expand(2, *table.shape[1:]) for name, table in block.tables_of(BEFORE, BEFORE + 1).items()
    }
    both = [nn.functional.pad(torch.cat(parts), (0, 0, 1, 0)) for parts in zip(*known, strict=True)]
    past = {PAST_KEYS: both[0], PAST_VALUES: both[1], SEEN: seen, OWN: torch.eye(1, 1 + BEFORE)[None]}
    answer, keys, values = block.call(DECODE, {"state": states[:, BEFORE : BEFORE + 1], **tables, **past})
    assert torch.allclose(answer[:, 0], torch.stack([w[BEFORE] for w in whole]), atol=1e-5)
    assert keys.shape == (len(both[0]), 1, both[0].shape[-1]) and values.shape[:2] == keys.shape[:2]


@pytest.mark.parametrize("architecture", ["llama", *rest(*(name for name in DECODERS if name != "llama"))])
def test_the_way_back_in_pieces_is_that_of_the_whole(architecture: str, tmp_path: Path) -> None:
    """The last piece first: it answers what the piece before is given for its keys and values."""
    block = Derived(architecture, tmp_path)
    state, slope = (random(1, LENGTH, block.width, seed=seed).float() for seed in range(2))
    tables = {f"table.{number}": table.of(LENGTH) for number, table in enumerate(block.tables)}
    ones = torch.ones(1, LENGTH, 1)
    expected = block.call(BACK, {"state": state, "slope": slope, "ones": ones, **tables})

    def piece(role: str, start: int, end: int, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        mask = block.mask(start, end)
        masks = {SEEN: mask[:, :start] if start else torch.full((len(mask), 2), MASKED)}
        of_piece = {"state": state[:, start:end], "slope": slope[:, start:end], "ones": ones[:, start:end]}
        return block.call(
            role, {**given, **of_piece, **block.tables_of(start, end), **masks, CAUSAL: mask[:, start:]}
        )

    shapes = {kind: block.shape(kind) for kind in (PAST_KEYS, PAST_VALUES)}
    nothing = {kind: torch.zeros(shape[0], 2, shape[2]) for kind, shape in shapes.items()}
    _, keys, values = piece(PREFILL, 0, BEFORE, nothing)
    past = {PAST_KEYS: keys, PAST_VALUES: values}
    none = {"slope_keys": keys[:, :AFTER] * 0, "slope_values": values[:, :AFTER] * 0}
    last, by_keys, by_values, *later = piece(PREFILL_BACK, BEFORE, LENGTH, past | none)
    of_past = {"slope_keys": by_keys, "slope_values": by_values}
    first, _, _, *earlier = piece(PREFILL_BACK, 0, BEFORE, nothing | of_past)
    found = [torch.cat([first, last], 1), *(a + b for a, b in zip(earlier, later, strict=True))]
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_difference(ours, theirs) < 1e-5


def test_scores_of_another_kind_are_refused() -> None:
    """Those that aren't a product of queries and transposed keys."""
    graph = Graph()
    value = torch.empty(1, 4, 4, device="meta")
    state, table = (new_input(graph, port, value) for port in (Port("state"), Port("table", 0)))
    scores = graph.call_function(torch.ops.aten.bmm.default, (state, state))
    mask = graph.call_function(torch.ops.aten.reshape.default, (table, [-1, 4]))
    masked = graph.call_function(torch.ops.aten.add.Tensor, (scores, mask))
    weights = graph.call_function(torch.ops.aten.softmax.int, (masked, -1))
    graph.output((graph.call_function(torch.ops.aten.bmm.default, (weights, state)),))
    graph_module = GraphModule(torch.nn.Module(), graph)
    fill_in_values(graph_module)
    with refusal("unknown-attention"):
        continued(Block(graph_module, (Port("state"),)), rows=1, tokens=4, past=PAST, any_lora_a=False)
