"""Blocks with recurrences and convolutions: all tokens at once, in chunks, and one token at a time."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from prge.formats.signatures import (
    BACKWARD,
    CAUSAL_MASK,
    DECODE,
    FORWARD,
    JVP,
    OWN_MASK,
    PAST_KEYS,
    PAST_MASK,
    PAST_VALUES,
    PREFILL,
    PREFILL_BACKWARD,
    PREFILL_JVP,
    Port,
)
from server_export.derive.roles import derive
from server_export.ir.recurrences import (
    CONVOLUTION,
    RECURRENCE,
    SCAN,
    convolution,
    recurrence,
    scan,
)
from server_export.model.chain import ModelChain
from server_export.model.eager import EagerBlock
from tests.server_export.derive.jvp.graphs import random, relative_difference
from tests.server_export.derive.test_blocks import chain_of, with_weights
from tests.tiers import second_tier
from tests.tiny_models import RECURRENT

torch.set_num_threads(1)

RANK = 3
# Chunks of a row, one of which is shorter than the convolution's kernel.
CHUNKS = [(0, 5), (5, 7), (7, 13)]
LENGTH = CHUNKS[-1][1]
ROLES = {FORWARD, JVP, BACKWARD, PREFILL, DECODE, PREFILL_JVP, PREFILL_BACKWARD}

Tensors = dict[str, torch.Tensor]


class Derived:
    """A block with recurrent states by role; the states are zeros at first."""

    def __init__(self, chain: ModelChain, number: int) -> None:
        self.chain, self.number = chain, number
        block = with_weights(chain, number)
        self.blocks = derive(block, ROLES)
        self.tables = [chain.tables.all[table] for table in chain.blocks[number].tables]
        self.modules = chain.blocks[number].modules
        adapter = ((port, node.meta["val"].shape) for port, node in block.inputs.items() if port.is_adapter)
        self.adapter = {
            port.name: 0.3 * random(1, *shape[1:], seed=index).float()
            for index, (port, shape) in enumerate(adapter)
        }
        self.frozen = {f"lora_a.{n}": chain.lora_a[module][None] for n, module in enumerate(self.modules)}
        self.width = block.inputs[Port("hidden_states")].meta["val"].shape[-1]
        self.shapes = {
            port.name: tuple(node.meta["val"].shape) for port, node in self.blocks[PREFILL].inputs.items()
        }
        self.recurrent_states = {
            name: torch.zeros(s) for name, s in self.shapes.items() if name.startswith("recurrent_state")
        }
        causal = [table for table in self.tables if table.type == "causal"]
        self.members = causal[0].members if causal else 0

    def call(self, role: str, arguments: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        rows, tokens, _ = arguments["hidden_states"].shape
        copies = rows if role in (DECODE, BACKWARD) else 1
        flat = role in (JVP, PREFILL_JVP)
        inputs = {name: m[0] if flat else m.expand(copies, -1, -1) for name, m in self.adapter.items()}
        inputs |= {name: matrix.expand(copies, -1, -1) for name, matrix in self.frozen.items()}
        past = arguments[PAST_MASK].shape[-1] if PAST_MASK in arguments else 2
        inputs |= {"ones": torch.ones(1, tokens, 1), "past_ones": torch.ones(1, past, 1)}
        return list(self.blocks[role].call({**inputs, **arguments}).values())

    def one_by_one(self, state: torch.Tensor, adapter: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the output with token-by-token recurrences, which autograd differentiates."""
        named = {f"lora_b.{self.modules[int(name.partition('.')[2])]}": m for name, m in adapter.items()}
        return EagerBlock(self.chain, self.number).compute(state, adapter=named, operators=ONE_BY_ONE)

    def whole(self) -> Tensors:
        return {f"table.{number}": table.of(LENGTH) for number, table in enumerate(self.tables)}

    def extra_inputs(self, start: int, end: int, rows: int = 1) -> Tensors:
        """Return the tables of a chunk and the masks of its attention."""
        arguments: Tensors = {}
        for number, table in enumerate(self.tables):
            is_by_position = table.type in ("rotary", "positions", "zeros")
            rows_of_table = table.of(end)[:, start:] if is_by_position else table.of(end - start)
            arguments[f"table.{number}"] = (
                rows_of_table.expand(rows, *rows_of_table.shape[1:]) if is_by_position else rows_of_table
            )
        past = max(start, 2)
        past_mask = torch.zeros(self.members * (end - start), past)
        past_mask[:, : past - start] = -3e4
        mask = [table.of(end - start) for table in self.tables if table.type == "causal"]
        return arguments | {PAST_MASK: past_mask, CAUSAL_MASK: mask[0].flatten(0, 1) if mask else past_mask}


ONE_BY_ONE = {CONVOLUTION: convolution, RECURRENCE: recurrence, SCAN: scan}
ALL = ["qwen3_5", *second_tier(*(name for name in RECURRENT if name != "qwen3_5"))]


@pytest.fixture(scope="module")
def block(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Derived:
    return Derived(chain_of(request.param, tmp_path_factory.mktemp("model"), "fp32", RANK), 1)


def in_chunks(block: Derived, state: torch.Tensor) -> tuple[torch.Tensor, list[Tensors]]:
    """Return the outputs of the chunks of a row, and recurrent states and past before each chunk."""
    outputs, known_before, states = [], [], dict(block.recurrent_states)
    known = {n: torch.zeros(block.shapes[n][0], 0, block.shapes[n][2]) for n in PASTS if n in block.shapes}
    for start, end in CHUNKS:
        past = {
            n: torch.cat([torch.zeros(len(v), max(0, 2 - start), v.shape[2]), v], 1) for n, v in known.items()
        }
        known_before.append(states | past)
        inputs = {"hidden_states": state[:, start:end], **block.extra_inputs(start, end), **states, **past}
        output, *state_outputs = block.call(PREFILL, inputs)
        outputs.append(output)
        new = dict(zip([*states, *known], state_outputs, strict=True))
        known = {name: torch.cat([known[name], new[name]], 1) for name in known}
        states = {name: new[name] for name in states}
    known_before.append(states | known)
    return torch.cat(outputs, 1), known_before


PASTS = (PAST_KEYS, PAST_VALUES)


@pytest.mark.parametrize("block", ALL, indirect=True)
def test_all_tokens_at_once_equal_one_token_at_a_time(block: Derived) -> None:
    state = random(2, LENGTH, block.width).float()
    expected = block.one_by_one(state, block.adapter)
    (output,) = block.call(FORWARD, {"hidden_states": state, **block.whole()})
    assert relative_difference(output, expected) < 1e-5


@pytest.mark.parametrize("block", ALL, indirect=True)
def test_chunks_and_single_tokens_continue_the_sequence(block: Derived) -> None:
    state = random(1, LENGTH, block.width).float()
    (expected,) = block.call(FORWARD, {"hidden_states": state, **block.whole()})
    outputs, known_before = in_chunks(block, state)
    assert relative_difference(outputs, expected) < 1e-5
    # Two sequences that both continue after the second chunk.
    last = CHUNKS[-1][0]
    states = {
        name: torch.cat([known_before[2][name], known_before[2][name]]) for name in block.recurrent_states
    }
    pasts = {}
    for name in PASTS:
        if name in block.shapes:
            pasts[name] = torch.cat([torch.nn.functional.pad(known_before[2][name], (0, 0, 1, 0))] * 2)
    heads = len(pasts[PAST_KEYS]) if pasts else 0
    past_mask = torch.zeros(heads, 1, last + 1)
    past_mask[..., 0] = 0
    tokens = block.extra_inputs(last, last + 1, rows=2) | {
        PAST_MASK: past_mask,
        OWN_MASK: torch.eye(1, last + 1)[None],
    }
    state = state[:, last : last + 1].expand(2, 1, -1)
    output, *_ = block.call(DECODE, {"hidden_states": state, **tokens, **states, **pasts})
    assert relative_difference(output, expected[:, last : last + 1].expand(2, 1, -1)) < 1e-5


@pytest.mark.parametrize("block", ALL, indirect=True)
def test_gradients_equal_autograds_at_once_and_in_chunks(block: Derived) -> None:
    state, grad_output = (random(1, LENGTH, block.width, seed=seed).float() for seed in range(2))
    matrices = {name: m.clone().requires_grad_() for name, m in block.adapter.items()}
    differentiated = state.clone().requires_grad_()
    with torch.enable_grad():
        output = block.one_by_one(differentiated, matrices)
    expected = torch.autograd.grad(output, [differentiated, *matrices.values()], grad_output)
    actual_gradients = block.call(
        BACKWARD, {"hidden_states": state, "grad_hidden_states": grad_output, **block.whole()}
    )
    for actual, reference in zip(actual_gradients, expected, strict=True):
        assert relative_difference(actual, reference) < 1e-4
    _, known_before = in_chunks(block, state)
    later = {f"grad_{name}": torch.zeros_like(value) for name, value in known_before[-1].items()}
    grad_states, gradients = [], []
    for (start, end), before in reversed(list(zip(CHUNKS, known_before[:-1], strict=True))):
        own = {
            name: later[f"grad_{past}"][:, start:end]
            for name, past in (("grad_keys", PAST_KEYS), ("grad_values", PAST_VALUES))
            if past in before
        }
        own |= {name: value for name, value in later.items() if "recurrent_state" in name}
        chunk = {
            "hidden_states": state[:, start:end],
            "grad_hidden_states": grad_output[:, start:end],
            **block.extra_inputs(start, end),
        }
        grad_state, *other_gradients = block.call(PREFILL_BACKWARD, {**chunk, **before, **own})
        grad_states.insert(0, grad_state)
        names = [name for name in (*block.recurrent_states, *PASTS) if name in before]
        for name, grad_past in zip(names, other_gradients, strict=False):
            if name in PASTS:
                later[f"grad_{name}"][:, :start] += grad_past[:, -start:] if start else 0
            else:
                later[f"grad_{name}"] = grad_past
        gradients.append(other_gradients[len(names) :])
    actual_gradients = [torch.cat(grad_states, 1), *(sum(parts) for parts in zip(*gradients, strict=True))]
    for actual, reference in zip(actual_gradients, expected, strict=True):
        assert relative_difference(actual, reference) < 1e-4


@pytest.mark.parametrize("block", ALL, indirect=True)
def test_tangents_are_derivatives_at_once_and_in_chunks(block: Derived) -> None:
    state, tangents_in = (random(*lead, LENGTH, block.width, seed=5).float() for lead in ((1,), (2, 1)))
    directions = {
        name.replace("lora_b", factor): random(2, 1, width, seed=9).float()
        for name, matrix in block.adapter.items()
        for factor, width in zip("uv", matrix.shape[1:], strict=True)
    }

    def at(state: torch.Tensor, *matrices: torch.Tensor) -> torch.Tensor:
        return block.one_by_one(state, dict(zip(block.adapter, matrices, strict=True)))

    expected = []
    for query in range(2):
        along = [
            torch.outer(*(directions[n.replace("lora_b", factor)][query, 0] for factor in "uv"))[None]
            for n in block.adapter
        ]
        _, derivative = torch.autograd.functional.jvp(
            at, (state, *block.adapter.values()), (tangents_in[query], *along)
        )
        expected.append(derivative)
    _, tangents_out = block.call(
        JVP, {"hidden_states": state, "tangent_hidden_states": tangents_in, **block.whole(), **directions}
    )
    assert relative_difference(tangents_out, torch.stack(expected)) < 1e-4
    _, known_before = in_chunks(block, state)
    later = {
        f"tangent_{name}": torch.zeros(2, *value.shape) for name, value in block.recurrent_states.items()
    }
    chunks = []
    d_known = {
        f"tangent_{n}": torch.zeros(2, block.shapes[n][0], 0, block.shapes[n][2])
        for n in PASTS
        if n in block.shapes
    }
    for (start, end), before in zip(CHUNKS, known_before[:-1], strict=True):
        d_past = {
            n: torch.cat([torch.zeros(2, v.shape[1], max(0, 2 - start), v.shape[3]), v], 2)
            for n, v in d_known.items()
        }
        chunk = {
            "hidden_states": state[:, start:end],
            "tangent_hidden_states": tangents_in[:, :, start:end],
            **directions,
        }
        chunk |= block.extra_inputs(start, end)
        _, d_state, *state_outputs = block.call(PREFILL_JVP, {**chunk, **before, **later, **d_past})
        chunks.append(d_state)
        tangents = dict(zip([*later, *d_known], state_outputs[1::2], strict=True))
        d_known = {n: torch.cat([d_known[n], tangents[n]], 2) for n in d_known}
        later = {n: tangents[n] for n in later}
    assert relative_difference(torch.cat(chunks, 2), torch.stack(expected)) < 1e-4
