"""A role is a view of a block times a derivative of it: any that makes sense is derived."""

from __future__ import annotations

from pathlib import Path

import torch

from prge.files.signatures import (
    ALL_ROLES,
    BACK,
    DECODE,
    ROLE_OF,
    STACK,
    BlockPorts,
    Derivative,
    Part,
    Port,
    Role,
    View,
    signature,
)
from server_export.derive.roles import derive, derive_together
from server_export.ir import markers
from server_export.ir.block import Block
from tests.server_export.derive.tangent.graphs import random, relative_difference
from tests.server_export.derive.test_blocks import chain_of, with_weights

torch.set_num_threads(1)

SEQUENCES, PAST, RANK = 2, 4, 3


def names(block: Block) -> tuple[set[str], list[str]]:
    return {port.name for port in block.inputs}, [port.name for port in block.outputs]


def test_graphs_have_the_ports_that_the_signature_of_their_role_says(tmp_path: Path) -> None:
    """Exporter and device compute what a method takes each for itself, of the same block."""
    chain = chain_of("llama", tmp_path, "fp32", RANK)
    for number in sorted(chain.kinds)[1:]:
        block = chain.blocks[number]
        derived = derive(with_weights(chain, number), ALL_ROLES)
        for role, of_role in derived.items():
            ports = BlockPorts(
                modules=len(block.modules),
                is_head=number >= chain.end,
                attends=number < chain.end,
                saved=sum(port.kind == "saved" for port in derived["save"].outputs),
            )
            expected, (inputs, outputs) = signature(ports, ROLE_OF[role]), names(of_role)
            tables = {f"table.{place}" for place in range(len(block.tables))}
            assert expected.needed <= inputs <= expected.allowed | tables
            assert outputs == expected.answers


def test_a_role_that_no_program_has_yet_is_a_combination(tmp_path: Path) -> None:
    """The backward pass of one token of each sequence, after others, is autograd's through `decode`."""
    role = Role(View.TOKEN, Derivative.BACKWARD)
    assert role not in ROLE_OF.values()
    chain = chain_of("llama", tmp_path, "fp32", RANK)
    block = with_weights(chain, 1)
    forward, backward = derive(block, {DECODE})[DECODE], derive_together(block, role)[role]
    inputs = {}
    for place, (port, node) in enumerate(forward.inputs.items()):
        sizes = {markers.COPIES: SEQUENCES, markers.PAST: PAST}
        shape = [
            next((n // m * s for m, s in sizes.items() if n % m == 0), n) for n in node.meta["val"].shape
        ]
        inputs[port.name] = 0.3 * random(*shape, seed=place).float()
    inputs["own"] = torch.eye(1, PAST)[None]
    for number, module in enumerate(chain.blocks[1].modules):
        inputs[f"lora_a.{number}"] = chain.lora_a[module].expand(SEQUENCES, -1, -1)
    wanted = {
        port.name: inputs[port.name].clone().requires_grad_() for port in backward.inputs if port.changes
    }
    answers = forward.call({**inputs, **wanted})
    gradients = {name: torch.randn(answer.shape) for name, answer in answers.items()}
    changing = [port.name for port in differentiated(backward)]
    expected = torch.autograd.grad(
        list(answers.values()), [wanted[name] for name in changing], list(gradients.values())
    )
    given = dict(zip(("slope", "slope_keys", "slope_values"), gradients.values(), strict=True))
    found = backward.call({**inputs, **given})
    ports = BlockPorts(modules=len(chain.blocks[1].modules), attends=True)
    assert list(found) == signature(ports, role).answers
    for ours, theirs in zip(found.values(), expected, strict=True):
        assert relative_difference(ours, theirs) < 1e-4


def differentiated(block: Block) -> list[Port]:
    """The inputs whose gradients a block answers, in order."""
    values = {(port.kind, port.index): port for port in block.inputs if port.part is Part.VALUE}
    return [values[port.kind, port.index] for port in block.outputs]


def test_an_export_without_the_backward_pass_derives_none(tmp_path: Path) -> None:
    block = with_weights(chain_of("llama", tmp_path, "fp32", RANK), 1)
    assert [*derive(block, {STACK})] == [STACK]
    assert [*derive(block, {BACK}, saves=False)] == [BACK]
