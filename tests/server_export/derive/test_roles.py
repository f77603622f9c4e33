"""A role is a view of a block times a derivative, and every useful combination can be derived."""

from __future__ import annotations

from pathlib import Path

import torch

from prge.formats.signatures import (
    ALL_ROLES,
    BACKWARD,
    FORWARD,
    PREFILL,
    PREFILL_BACKWARD,
    ROLE_OF,
    BlockPorts,
    Derivative,
    Role,
    View,
    signature,
)
from server_export.derive.roles import derive, derive_together
from server_export.ir import markers
from server_export.ir.block import Block
from tests.server_export.derive.jvp.graphs import random, relative_difference
from tests.server_export.derive.test_blocks import chain_of, with_weights

torch.set_num_threads(1)

TOKENS, PAST, RANK = 5, 4, 3


def names(block: Block) -> tuple[set[str], list[str]]:
    return {port.name for port in block.inputs}, [port.name for port in block.outputs]


def test_graphs_have_the_ports_of_their_roles_signature(tmp_path: Path) -> None:
    """Exporter and device compute the signature of a method independently, from the same block."""
    chain = chain_of("llama", tmp_path, "fp32", RANK)
    for number in sorted(chain.block_types)[1:]:
        block = chain.blocks[number]
        derived = derive(with_weights(chain, number), ALL_ROLES)
        assert derived
        for role, of_role in derived.items():
            ports = BlockPorts(
                modules=len(block.modules),
                is_head=number >= chain.head_start,
                attends=number < chain.head_start,
                residuals=sum(port.value == "residual" for port in derived["forward_save"].outputs),
            )
            expected, (inputs, outputs) = signature(ports, ROLE_OF[role]), names(of_role)
            tables = {f"table.{index}" for index in range(len(block.tables))}
            assert expected.required_inputs <= inputs <= expected.allowed_inputs | tables
            assert outputs == expected.output_names


def test_a_role_that_no_bundle_contains_can_be_derived(tmp_path: Path) -> None:
    """A chunk's forward pass that returns residuals, and the backward pass from these."""
    save, backward_saved = (Role(View.CHUNK, each) for each in (Derivative.SAVE, Derivative.BACKWARD_SAVED))
    assert not {save, backward_saved} & {*ROLE_OF.values()}
    chain = chain_of("llama", tmp_path, "fp32", RANK)
    block = with_weights(chain, 1)
    known, derived = derive(block, {PREFILL, PREFILL_BACKWARD}), derive_together(block, save)
    inputs = {"ones": torch.ones(1, TOKENS, 1)}
    for name in (
        "hidden_states",
        "past_keys",
        "past_values",
        "past_mask",
        "causal_mask",
        "grad_hidden_states",
        "grad_keys",
        "grad_values",
    ):
        port = next(port for port in known[PREFILL_BACKWARD].inputs if port.name == name)
        sized = known[PREFILL_BACKWARD].sized((markers.TOKENS, TOKENS), (markers.PAST, PAST))
        inputs[name] = 0.3 * random(*sized.inputs[port].meta["val"].shape, seed=len(name)).float()
    tables = enumerate(chain.blocks[1].tables)
    inputs |= {f"table.{index}": chain.tables.all[table].of(TOKENS) for index, table in tables}
    for port, node in block.inputs.items():
        if port.is_adapter:
            inputs[port.name] = random(1, *node.meta["val"].shape[1:]).float()
    for number, module in enumerate(chain.blocks[1].modules):
        inputs[f"lora_a.{number}"] = chain.lora_a[module][None]
    outputs_of_save = derived[save].call(inputs)
    residuals = {name: value for name, value in outputs_of_save.items() if name.startswith("residual.")}
    ports = BlockPorts(modules=len(chain.blocks[1].modules), attends=True, residuals=len(residuals))
    assert residuals and list(outputs_of_save) == signature(ports, save).output_names
    for name, value in known[PREFILL].call(inputs).items():
        assert relative_difference(outputs_of_save[name], value) < 1e-5
    gradients = derived[backward_saved].call({**inputs, **residuals})
    assert list(gradients) == signature(ports, backward_saved).output_names
    for name, value in known[PREFILL_BACKWARD].call(inputs).items():
        assert relative_difference(gradients[name], value) < 1e-5


def test_an_export_without_the_backward_pass_derives_none(tmp_path: Path) -> None:
    block = with_weights(chain_of("llama", tmp_path, "fp32", RANK), 1)
    assert [*derive(block, {FORWARD})] == [FORWARD]
    assert [*derive(block, {BACKWARD}, saves=False)] == [BACKWARD]
