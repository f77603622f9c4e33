"""Blocks with recurrences and short convolutions: all tokens at once, in pieces and one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from prge.files.chain import CAUSAL, OWN, PAST_KEYS, PAST_VALUES, SEEN, SLOPE_KEYS, SLOPE_VALUES
from prge.files.signatures import (
    BACK,
    DECODE,
    PREFILL,
    PREFILL_BACK,
    PREFILL_TANGENT,
    STACK,
    TANGENT,
)
from server_export.derive.continuing import FROZEN_PREFIX
from server_export.ir.markers import BATCH, COPIES, PAST, QUERIES, TOKENS
from server_export.ir.modules import attribute
from server_export.ir.recurrences import (
    CONVOLUTION,
    RECURRENCE,
    SCAN,
    convolution,
    recurrence,
    scan,
)
from server_export.ir.shapes import with_size
from server_export.lower.roles import role_graphs
from server_export.model.chain import ModelChain
from server_export.model.eager import EagerBlock
from tests.server_export.derive.tangent.graphs import inputs_of, random, relative_difference
from tests.server_export.derive.test_blocks import chain_of
from tests.tiers import rest
from tests.tiny_models import RECURRENT

torch.set_num_threads(1)

RANK = 3
# Pieces of a row, of which one is shorter than what a convolution looks back at.
PIECES = [(0, 5), (5, 7), (7, 13)]
LENGTH = PIECES[-1][1]
ROLES = {STACK, TANGENT, BACK, PREFILL, DECODE, PREFILL_TANGENT, PREFILL_BACK}

Tensors = dict[str, torch.Tensor]


class Block:
    """A block that carries something, by role; what it carries is zeros at first."""

    def __init__(self, chain: ModelChain, number: int) -> None:
        self.chain, self.number = chain, number
        self.block, kind = chain.blocks[number], chain.kinds[chain.kind_of[number]]
        for name, tensor in chain.tensors(number).items():
            attribute(kind.graph_module, name).copy_(tensor)
        adapted = {name: chain.adapter[name] for name in self.block.adapter}
        self.graphs = role_graphs(kind.graph_module, adapted, ROLES, is_head=False)
        self.tables = [chain.tables.all[table] for table in self.block.tables]
        self.adapter = {
            name: 0.3 * random(1, each.rank, each.width, seed=place).float()
            for place, (name, each) in enumerate(adapted.items())
        }
        self.frozen = {FROZEN_PREFIX + name: chain.lora_a[each.of][None] for name, each in adapted.items()}
        self.width = kind.graph_module.graph.find_nodes(op="placeholder")[0].meta["val"].shape[-1]
        self.shapes = {
            str(node.target): tuple(node.meta["val"].shape)
            for node in self.graphs[PREFILL].graph.find_nodes(op="placeholder")
        }
        self.carried = {name: torch.zeros(s) for name, s in self.shapes.items() if name.startswith("carried")}
        causal = [table for table in self.tables if table.kind == "causal"]
        self.members = causal[0].members if causal else 0

    def graph(self, role: str, rows: int, tokens: int, past: int, queries: int = 1) -> GraphModule:
        graph = self.graphs[role]
        copies = self.copies(role, rows)
        sizes = {COPIES: copies, BATCH: rows // copies}
        for marker, size in {**sizes, TOKENS: tokens, PAST: past, QUERIES: queries}.items():
            graph = with_size(graph, marker, size)
        return graph

    def copies(self, role: str, rows: int) -> int:
        """Copies of the adapter in a call of some rows."""
        return rows if role in (DECODE, BACK) else 1

    def call(
        self, role: str, rows: int, tokens: int, past: int = 2, queries: int = 1, **given: torch.Tensor
    ) -> list[torch.Tensor]:
        graph = self.graph(role, rows, tokens, past, queries)
        copies = self.copies(role, rows)
        flat = role in (TANGENT, PREFILL_TANGENT)
        given |= {name: m[0] if flat else m.expand(copies, -1, -1) for name, m in self.adapter.items()}
        given |= {name: matrix.expand(copies, -1, -1) for name, matrix in self.frozen.items()}
        given |= {"ones": torch.ones(1, tokens, 1), "past_ones": torch.ones(1, past, 1)}
        return list(graph(*(given[name] for name in inputs_of(graph))))

    def whole(self) -> Tensors:
        return {f"table_{number}": table.of(LENGTH) for number, table in enumerate(self.tables)}

    def beside(self, start: int, end: int, rows: int = 1) -> Tensors:
        """Tables of a piece, masks of its attention, and room for what attention knows of the past."""
        given: Tensors = {}
        for number, table in enumerate(self.tables):
            is_place = table.kind in ("rotary", "positions", "zeros")
            found = table.of(end)[:, start:] if is_place else table.of(end - start)
            given[f"table_{number}"] = found.expand(rows, *found.shape[1:]) if is_place else found
        past = max(start, 2)
        seen = torch.zeros(self.members * (end - start), past)
        seen[:, : past - start] = -3e4
        mask = [table.of(end - start) for table in self.tables if table.kind == "causal"]
        return given | {SEEN: seen, CAUSAL: mask[0].flatten(0, 1) if mask else seen}


class OneByOne(EagerBlock):
    """A block whose recurrences go from token to token, so that autograd goes through them."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        functions = {CONVOLUTION: convolution, RECURRENCE: recurrence, SCAN: scan}
        return super().call_function(functions.get(target, target), args, kwargs)


ALL = ["qwen3_5", *rest(*(name for name in RECURRENT if name != "qwen3_5"))]


@pytest.fixture(scope="module")
def block(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Block:
    return Block(chain_of(request.param, tmp_path_factory.mktemp("model"), "fp32", RANK), 1)


def in_pieces(block: Block, state: torch.Tensor) -> tuple[torch.Tensor, list[Tensors]]:
    """What the pieces of a row answer, and what each was given of those before."""
    answers, given, carried = [], [], dict(block.carried)
    known = {n: torch.zeros(block.shapes[n][0], 0, block.shapes[n][2]) for n in PASTS if n in block.shapes}
    for start, end in PIECES:
        past = {
            n: torch.cat([torch.zeros(len(v), max(0, 2 - start), v.shape[2]), v], 1) for n, v in known.items()
        }
        given.append(carried | past)
        answer, *behind = block.call(
            PREFILL, 1, end - start, max(start, 2), state=state[:, start:end],
            **block.beside(start, end), **carried, **past,
        )  # fmt: skip
        answers.append(answer)
        new = dict(zip([*carried, *known], behind, strict=True))
        known = {name: torch.cat([known[name], new[name]], 1) for name in known}
        carried = {name: new[name] for name in carried}
    given.append(carried | known)
    return torch.cat(answers, 1), given


PASTS = (PAST_KEYS, PAST_VALUES)


@pytest.mark.parametrize("block", ALL, indirect=True)
def test_all_tokens_at_once_are_those_one_after_the_other(block: Block) -> None:
    state = random(2, LENGTH, block.width).float()
    matrices = {block.chain.adapter[name].name: m for name, m in block.adapter.items()}
    expected = OneByOne(block.chain, block.number).answer(state, adapter=matrices)
    (found,) = block.call(STACK, 2, LENGTH, state=state, **block.whole())
    assert relative_difference(found, expected) < 1e-5


@pytest.mark.parametrize("block", ALL, indirect=True)
def test_pieces_and_single_tokens_go_on_with_what_came_before(block: Block) -> None:
    state = random(1, LENGTH, block.width).float()
    (expected,) = block.call(STACK, 1, LENGTH, state=state, **block.whole())
    found, given = in_pieces(block, state)
    assert relative_difference(found, expected) < 1e-5
    # Two sequences, of which one is behind the second piece and one behind the third.
    last = PIECES[-1][0]
    carried = {name: torch.cat([given[2][name], given[2][name]]) for name in block.carried}
    pasts = {}
    for name in PASTS:
        if name in block.shapes:
            pasts[name] = torch.cat([torch.nn.functional.pad(given[2][name], (0, 0, 1, 0))] * 2)
    heads = len(pasts[PAST_KEYS]) if pasts else 0
    seen = torch.zeros(heads, 1, last + 1)
    seen[..., 0] = 0
    tokens = block.beside(last, last + 1, rows=2) | {SEEN: seen, OWN: torch.eye(1, last + 1)[None]}
    answer, *_ = block.call(
        DECODE, 2, 1, last + 1, state=state[:, last : last + 1].expand(2, 1, -1), **tokens, **carried, **pasts
    )
    assert relative_difference(answer, expected[:, last : last + 1].expand(2, 1, -1)) < 1e-5


@pytest.mark.parametrize("block", ALL, indirect=True)
def test_the_way_back_is_autograds_whole_and_in_pieces(block: Block) -> None:
    state, slope = (random(1, LENGTH, block.width, seed=seed).float() for seed in range(2))
    matrices = {name: m.clone().requires_grad_() for name, m in block.adapter.items()}
    wanted = state.clone().requires_grad_()
    named = {block.chain.adapter[name].name: m for name, m in matrices.items()}
    with torch.enable_grad():
        answer = OneByOne(block.chain, block.number).answer(wanted, adapter=named)
    expected = torch.autograd.grad(answer, [wanted, *matrices.values()], slope)
    found = block.call(BACK, 1, LENGTH, state=state, slope=slope, **block.whole())
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_difference(ours, theirs) < 1e-4
    _, given = in_pieces(block, state)
    later = {f"slope_{name}": torch.zeros_like(value) for name, value in given[-1].items()}
    slopes, gradients = [], []
    for (start, end), before in reversed(list(zip(PIECES, given[:-1], strict=True))):
        own = {
            name: later[f"slope_{past}"][:, start:end]
            for name, past in ((SLOPE_KEYS, PAST_KEYS), (SLOPE_VALUES, PAST_VALUES))
            if past in before
        }
        own |= {name: value for name, value in later.items() if "carried" in name}
        by_state, *rest_of = block.call(
            PREFILL_BACK, 1, end - start, max(start, 2),
            state=state[:, start:end], slope=slope[:, start:end], **block.beside(start, end), **before, **own,
        )  # fmt: skip
        slopes.insert(0, by_state)
        names = [name for name in (*block.carried, *PASTS) if name in before]
        for name, by_past in zip(names, rest_of, strict=False):
            if name in PASTS:
                later[f"slope_{name}"][:, :start] += by_past[:, -start:] if start else 0
            else:
                later[f"slope_{name}"] = by_past
        gradients.append(rest_of[len(names) :])
    found = [torch.cat(slopes, 1), *(sum(parts) for parts in zip(*gradients, strict=True))]
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_difference(ours, theirs) < 1e-4


@pytest.mark.parametrize("block", ALL, indirect=True)
def test_tangents_are_derivatives_whole_and_in_pieces(block: Block) -> None:
    state, moved = (random(*lead, LENGTH, block.width, seed=5).float() for lead in ((1,), (2, 1)))
    directions = {
        f"{factor}_{name}": random(2, 1, width, seed=9).float()
        for name, matrix in block.adapter.items()
        for factor, width in zip("uv", matrix.shape[1:], strict=True)
    }
    eager = OneByOne(block.chain, block.number)

    def at(state: torch.Tensor, *matrices: torch.Tensor) -> torch.Tensor:
        named = {block.chain.adapter[n].name: m for n, m in zip(block.adapter, matrices, strict=True)}
        return eager.answer(state, adapter=named)

    expected = []
    for query in range(2):
        along = [
            torch.outer(directions[f"u_{n}"][query, 0], directions[f"v_{n}"][query, 0])[None]
            for n in block.adapter
        ]
        _, derivative = torch.autograd.functional.jvp(
            at, (state, *block.adapter.values()), (moved[query], *along)
        )
        expected.append(derivative)
    _, found = block.call(TANGENT, 1, LENGTH, 2, 2, state=state, d_state=moved, **block.whole(), **directions)
    assert relative_difference(found, torch.stack(expected)) < 1e-4
    _, given = in_pieces(block, state)
    later = {f"d_{name}": torch.zeros(2, *value.shape) for name, value in block.carried.items()}
    pieces = []
    d_known = {
        f"d_{n}": torch.zeros(2, block.shapes[n][0], 0, block.shapes[n][2])
        for n in PASTS
        if n in block.shapes
    }
    for (start, end), before in zip(PIECES, given[:-1], strict=True):
        d_past = {
            n: torch.cat([torch.zeros(2, v.shape[1], max(0, 2 - start), v.shape[3]), v], 2)
            for n, v in d_known.items()
        }
        _, d_state, *behind = block.call(
            PREFILL_TANGENT, 1, end - start, max(start, 2), 2,
            state=state[:, start:end], d_state=moved[:, :, start:end],
            **block.beside(start, end), **directions, **before, **later, **d_past,
        )  # fmt: skip
        pieces.append(d_state)
        tangents = dict(zip([*later, *d_known], behind[1::2], strict=True))
        d_known = {n: torch.cat([d_known[n], tangents[n]], 2) for n in d_known}
        later = {n: tangents[n] for n in later}
    assert relative_difference(torch.cat(pieces, 2), torch.stack(expected)) < 1e-4
