"""A block that continues a sequence returns the same as a block that reads the whole sequence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from prge.formats.chain import MASKED
from prge.formats.signatures import (
    BACKWARD,
    CAUSAL_MASK,
    DECODE,
    FORWARD,
    OWN_MASK,
    PAST_KEYS,
    PAST_MASK,
    PAST_VALUES,
    PREFILL,
    PREFILL_BACKWARD,
    Port,
)
from server_export.derive.continuation import continuation
from server_export.derive.roles import derive
from server_export.ir.block import Block, new_input
from server_export.ir.markers import PAST
from server_export.ir.shapes import fill_in_values
from tests.refusals import refusal
from tests.server_export.derive.jvp.graphs import random, relative_difference
from tests.server_export.derive.test_blocks import chain_of, with_weights
from tests.tiers import second_tier
from tests.tiny_models import DECODERS

torch.set_num_threads(1)

RANK = 4
# Earlier and later tokens: more than the window of models that have one.
BEFORE, AFTER = 6, 3
LENGTH = BEFORE + AFTER
ROLES = {FORWARD, BACKWARD, PREFILL, DECODE, PREFILL_BACKWARD}


class Derived:
    """The first block of a tiny model by role, with tables and adapters for its calls."""

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
        self.frozen = {f"lora_a.{index}": chain.lora_a[module][None] for index, module in modules}
        self.width = block.inputs[Port("hidden_states")].meta["val"].shape[-1]
        causal = next(table for table in self.tables if table.type == "causal")
        self.members, self.window = causal.members, causal.window

    def shape(self, value: str) -> torch.Size:
        """Return the shape of an input of a chunk that holds the past."""
        shape: torch.Size = self.blocks[PREFILL].inputs[Port(value)].meta["val"].shape
        return shape

    def call(self, role: str, arguments: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        rows = len(arguments["hidden_states"])
        matrices = {
            name: matrix.expand(rows, -1, -1) for name, matrix in (self.adapter | self.frozen).items()
        }
        return list(self.blocks[role].call({**arguments, **matrices}).values())

    def tables_of(self, start: int, end: int) -> dict[str, torch.Tensor]:
        return {
            f"table.{number}": table.of(end)[:, start:]
            for number, table in enumerate(self.tables)
            if table.type != "causal"
        }

    def mask(self, start: int, end: int) -> torch.Tensor:
        """Return the mask of tokens [start, end) over all tokens up to `end`: [members x tokens, end]."""
        table = next(table for table in self.tables if table.type == "causal")
        return table.of(end)[:, start:].reshape(-1, end)


@pytest.mark.parametrize(
    "architecture",
    ["llama", *second_tier(*(name for name in DECODERS if name != "llama"), "gpt_oss", "bloom", "gpt_neo")],
)
def test_later_tokens_have_the_outputs_of_the_whole_sequence(architecture: str, tmp_path: Path) -> None:
    block = Derived(architecture, tmp_path)
    states = random(2, LENGTH, block.width).float()
    causal = {f"table.{n}": t.of(LENGTH) for n, t in enumerate(block.tables)}
    whole = [block.call(FORWARD, {"hidden_states": state[None], **causal})[0][0] for state in states]
    # The past is empty: the mask hides its slots.
    hidden = torch.full((block.members * BEFORE, 2), MASKED)
    known = []
    for state, expected in zip(states, whole, strict=True):
        shapes = {value: block.shape(value) for value in (PAST_KEYS, PAST_VALUES)}
        empty = {value: torch.ones(shape[0], 2, shape[2]) for value, shape in shapes.items()}
        masks = {PAST_MASK: hidden, CAUSAL_MASK: block.mask(0, BEFORE)}
        arguments = {"hidden_states": state[None, :BEFORE], **block.tables_of(0, BEFORE), **empty, **masks}
        output, keys, values = block.call(PREFILL, arguments)
        assert torch.allclose(output[0], expected[:BEFORE], atol=1e-5)
        known.append((keys, values))
    # A chunk of one sequence.
    keys, values = known[0]
    mask = block.mask(BEFORE, LENGTH)
    past = {PAST_KEYS: keys, PAST_VALUES: values, PAST_MASK: mask[:, :BEFORE], CAUSAL_MASK: mask[:, BEFORE:]}
    arguments = {"hidden_states": states[:1, BEFORE:], **block.tables_of(BEFORE, LENGTH), **past}
    output, *_ = block.call(PREFILL, arguments)
    assert torch.allclose(output[0], whole[0][BEFORE:], atol=1e-5)
    # One token of two sequences, in the first slot of the past.
    past_mask = torch.zeros(2 * len(keys), 1, 1 + BEFORE)
    past_mask[..., 1:] = block.mask(BEFORE, BEFORE + 1)[:1, :BEFORE]
    tables = {
        name: table.expand(2, *table.shape[1:]) for name, table in block.tables_of(BEFORE, BEFORE + 1).items()
    }
    both = [nn.functional.pad(torch.cat(parts), (0, 0, 1, 0)) for parts in zip(*known, strict=True)]
    past = {
        PAST_KEYS: both[0],
        PAST_VALUES: both[1],
        PAST_MASK: past_mask,
        OWN_MASK: torch.eye(1, 1 + BEFORE)[None],
    }
    output, keys, values = block.call(
        DECODE, {"hidden_states": states[:, BEFORE : BEFORE + 1], **tables, **past}
    )
    assert torch.allclose(output[:, 0], torch.stack([w[BEFORE] for w in whole]), atol=1e-5)
    assert keys.shape == (len(both[0]), 1, both[0].shape[-1]) and values.shape[:2] == keys.shape[:2]


@pytest.mark.parametrize(
    "architecture", ["llama", *second_tier(*(name for name in DECODERS if name != "llama"))]
)
def test_the_backward_pass_in_chunks_equals_that_of_the_whole_row(architecture: str, tmp_path: Path) -> None:
    """The last chunk comes first: it returns gradients of the keys and values of the chunk before it."""
    block = Derived(architecture, tmp_path)
    state, grad_output = (random(1, LENGTH, block.width, seed=seed).float() for seed in range(2))
    tables = {f"table.{number}": table.of(LENGTH) for number, table in enumerate(block.tables)}
    ones = torch.ones(1, LENGTH, 1)
    expected = block.call(
        BACKWARD, {"hidden_states": state, "grad_hidden_states": grad_output, "ones": ones, **tables}
    )

    def chunk(role: str, start: int, end: int, arguments: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        mask = block.mask(start, end)
        masks = {PAST_MASK: mask[:, :start] if start else torch.full((len(mask), 2), MASKED)}
        of_chunk = {
            "hidden_states": state[:, start:end],
            "grad_hidden_states": grad_output[:, start:end],
            "ones": ones[:, start:end],
        }
        return block.call(
            role,
            {**arguments, **of_chunk, **block.tables_of(start, end), **masks, CAUSAL_MASK: mask[:, start:]},
        )

    shapes = {value: block.shape(value) for value in (PAST_KEYS, PAST_VALUES)}
    empty_past = {value: torch.zeros(shape[0], 2, shape[2]) for value, shape in shapes.items()}
    _, keys, values = chunk(PREFILL, 0, BEFORE, empty_past)
    past = {PAST_KEYS: keys, PAST_VALUES: values}
    zero_gradients = {"grad_keys": keys[:, :AFTER] * 0, "grad_values": values[:, :AFTER] * 0}
    last, grad_keys, grad_values, *later = chunk(PREFILL_BACKWARD, BEFORE, LENGTH, past | zero_gradients)
    of_past = {"grad_keys": grad_keys, "grad_values": grad_values}
    first, _, _, *earlier = chunk(PREFILL_BACKWARD, 0, BEFORE, empty_past | of_past)
    gradients = [torch.cat([first, last], 1), *(a + b for a, b in zip(earlier, later, strict=True))]
    for actual, reference in zip(gradients, expected, strict=True):
        assert relative_difference(actual, reference) < 1e-5


def test_unknown_scores_are_refused() -> None:
    """Scores that are not a product of queries and transposed keys."""
    graph = Graph()
    value = torch.empty(1, 4, 4, device="meta")
    state, table = (new_input(graph, port, value) for port in (Port("hidden_states"), Port("table", 0)))
    scores = graph.call_function(torch.ops.aten.bmm.default, (state, state))
    mask = graph.call_function(torch.ops.aten.reshape.default, (table, [-1, 4]))
    masked = graph.call_function(torch.ops.aten.add.Tensor, (scores, mask))
    weights = graph.call_function(torch.ops.aten.softmax.int, (masked, -1))
    graph.output((graph.call_function(torch.ops.aten.bmm.default, (weights, state)),))
    graph_module = GraphModule(torch.nn.Module(), graph)
    fill_in_values(graph_module)
    with refusal("unknown-attention"):
        continuation(
            Block(graph_module, (Port("hidden_states"),)), rows=1, tokens=4, past=PAST, any_lora_a=False
        )
