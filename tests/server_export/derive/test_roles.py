"""A role is a view of a block times a derivative of it: any that makes sense is derived."""

from __future__ import annotations

from pathlib import Path

import torch

from prge.files.signatures import (
    ALL_ROLES,
    BACK,
    PREFILL,
    PREFILL_BACK,
    ROLE_OF,
    STACK,
    BlockPorts,
    Derivative,
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

TOKENS, PAST, RANK = 5, 4, 3


def names(block: Block) -> tuple[set[str], list[str]]:
    return {port.name for port in block.inputs}, [port.name for port in block.outputs]


def test_graphs_have_the_ports_that_the_signature_of_their_role_says(tmp_path: Path) -> None:
    """Exporter and device compute what a method takes each for itself, of the same block."""
    chain = chain_of("llama", tmp_path, "fp32", RANK)
    for number in sorted(chain.kinds)[1:]:
        block = chain.blocks[number]
        derived = derive(with_weights(chain, number), ALL_ROLES)
        assert derived
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
    """A chunk's forward pass that answers residuals, and the backward pass from these."""
    save, back = (Role(View.CHUNK, each) for each in (Derivative.SAVE, Derivative.BACKWARD_SAVED))
    assert not {save, back} & {*ROLE_OF.values()}
    chain = chain_of("llama", tmp_path, "fp32", RANK)
    block = with_weights(chain, 1)
    known, derived = derive(block, {PREFILL, PREFILL_BACK}), derive_together(block, save)
    inputs = {"ones": torch.ones(1, TOKENS, 1)}
    for name in (
        "state",
        "past_keys",
        "past_values",
        "seen",
        "causal",
        "slope",
        "slope_keys",
        "slope_values",
    ):
        port = next(port for port in known[PREFILL_BACK].inputs if port.name == name)
        sized = known[PREFILL_BACK].sized((markers.TOKENS, TOKENS), (markers.PAST, PAST))
        inputs[name] = 0.3 * random(*sized.inputs[port].meta["val"].shape, seed=len(name)).float()
    tables = enumerate(chain.blocks[1].tables)
    inputs |= {f"table.{place}": chain.tables.all[table].of(TOKENS) for place, table in tables}
    for port, node in block.inputs.items():
        if port.is_adapter:
            inputs[port.name] = random(1, *node.meta["val"].shape[1:]).float()
    for number, module in enumerate(chain.blocks[1].modules):
        inputs[f"lora_a.{number}"] = chain.lora_a[module][None]
    answers = derived[save].call(inputs)
    residuals = {name: value for name, value in answers.items() if name.startswith("saved.")}
    ports = BlockPorts(modules=len(chain.blocks[1].modules), attends=True, saved=len(residuals))
    assert residuals and list(answers) == signature(ports, save).answers
    for name, value in known[PREFILL].call(inputs).items():
        assert relative_difference(answers[name], value) < 1e-5
    found = derived[back].call({**inputs, **residuals})
    assert list(found) == signature(ports, back).answers
    for name, value in known[PREFILL_BACK].call(inputs).items():
        assert relative_difference(found[name], value) < 1e-5


def test_an_export_without_the_backward_pass_derives_none(tmp_path: Path) -> None:
    block = with_weights(chain_of("llama", tmp_path, "fp32", RANK), 1)
    assert [*derive(block, {STACK})] == [STACK]
    assert [*derive(block, {BACK}, saves=False)] == [BACK]
