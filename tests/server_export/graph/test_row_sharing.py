"""A P-RGE program takes an example's row once for all copies where blocks lie below its adapter."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from dataclasses import replace  # noqa: E402

from torch import nn  # noqa: E402
from torch.fx import GraphModule, Node  # noqa: E402

from server_export.graph.row_sharing import share_rows  # noqa: E402
from server_export.lower.lowering import rewritten_graph  # noqa: E402
from server_export.model.program import BuiltProgram, example_inputs  # noqa: E402
from server_export.model.reference import exact_answers  # noqa: E402
from tests.server_export.programs import build  # noqa: E402
from tests.tiny_models import ARCHITECTURES, SHALLOW  # noqa: E402

torch.set_num_threads(1)

COPIES = 3


def placeholders(graph_module: GraphModule) -> list[str]:
    return [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]


def traced(built: BuiltProgram) -> GraphModule:
    """The graph of all rows."""
    plain = replace(built.contract, shared_rows=False)
    return rewritten_graph(built.module, example_inputs(plain))


def shared(built: BuiltProgram) -> GraphModule:
    graph_module = traced(built)
    adapter = placeholders(graph_module)[-len(built.contract.modules) :]
    return share_rows(graph_module, adapter, built.contract.copies)


def nodes_of(graph_module: GraphModule, name: str) -> list[Node]:
    nodes = graph_module.graph.nodes
    return [node for node in nodes if node.op == "call_function" and name in str(node.target)]


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_are_those_of_all_rows(architecture: str, batch_size: int) -> None:
    built = build(architecture, adapt_layers="top:1", target_modules="all-linear", batch_size=batch_size)
    contract = built.contract
    assert contract.shared_rows and contract.given_rows == batch_size
    graph_module = shared(built)
    inputs = example_inputs(contract, lora_b_scale=0.1)
    assert inputs[0].shape == (batch_size, contract.sequence_length)
    with torch.no_grad():
        (found,) = graph_module(*inputs)
    (expected,) = exact_answers(built.module, contract, inputs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_lies_below_the_adapter_runs_once(architecture: str) -> None:
    built = build(architecture, adapt_layers="top:1")
    rows = built.contract.batch_size
    layers = nodes_of(shared(built), "linear")
    once = [node for node in layers if node.meta["val"].shape[0] == rows]
    # A block has at least four layers; the upper one computes what its first product takes once too.
    assert len(once) >= 4
    assert len(once) < len(layers)
    # An encoder has a table of token types too, and one row of them.
    assert {node.meta["val"].shape[0] for node in nodes_of(shared(built), "embedding")} <= {1, rows}


def test_a_program_adapted_from_the_first_block_on_takes_every_row() -> None:
    built = build("llama", SHALLOW["llama"])
    assert not built.contract.shared_rows
    assert built.score_contract is None
    assert built.contract.can_score


def test_a_program_that_shares_rows_scores_with_another_one() -> None:
    built = build("llama", adapt_layers="top:1")
    assert not built.contract.can_score
    assert built.score_contract is not None and built.score_contract.can_score
    assert (built.score_contract.copies, built.score_contract.batch_size) == (1, built.contract.rows)


def test_one_copy_has_nothing_to_share() -> None:
    built = build("llama", adapt_layers="top:1", copies=1)
    assert not built.contract.shared_rows
    assert built.score_contract is None


class Function(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, rows: torch.Tensor, adapter: torch.Tensor) -> torch.Tensor:
        return self.function(rows, adapter)


def numbered(rows: torch.Tensor, adapter: torch.Tensor) -> torch.Tensor:
    """Looks up rows by their number among all, which differs between copies."""
    flat = rows.reshape(-1, 4)
    numbers = torch.arange(flat.shape[0]).reshape(-1, 1).reshape(-1)
    return flat.index_select(0, numbers).reshape(rows.shape) + adapter.repeat_interleave(2, 0)


def summed_over_rows(rows: torch.Tensor, adapter: torch.Tensor) -> torch.Tensor:
    """Mixes rows."""
    return rows + rows.sum(0, keepdim=True) + adapter.repeat_interleave(2, 0)


@pytest.mark.parametrize("function", [numbered, summed_over_rows])
def test_operators_that_tell_rows_apart_stay_on_all_rows(
    function: Callable[..., torch.Tensor],
) -> None:
    rows, adapter = torch.randn(2, 3, 4), torch.randn(COPIES, 3, 4)
    everything = rows.repeat(COPIES, 1, 1)
    graph_module = rewritten_graph(Function(function), (everything, adapter))
    (found,) = share_rows(graph_module, [placeholders(graph_module)[1]], COPIES)(rows, adapter)
    torch.testing.assert_close(found, function(everything, adapter))


def test_what_no_copy_changes_is_answered_once() -> None:
    rows, adapter = torch.randn(2, 3, 4), torch.randn(COPIES, 3, 4)
    graph_module = rewritten_graph(Function(lambda rows, _: rows * 2), (rows.repeat(COPIES, 1, 1), adapter))
    (found,) = share_rows(graph_module, [placeholders(graph_module)[1]], COPIES)(rows, adapter)
    assert torch.equal(found, rows * 2)
