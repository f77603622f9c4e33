"""A program's matrix products alone: which they are, what they cost, and that the engine takes them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("executorch")

import torch
from limit import Product, matrix_products

from server_export.check.verification import run_program
from server_export.lower.lowering import export_graph, lower
from server_export.lower.method_graphs import export_programs
from server_export.model.program import STEP_METHOD, example_inputs
from tests.server_export.programs import build
from tests.tiny_models import DECODERS, ENCODERS, LENGTH, SHALLOW, VOCABULARY, WIDTH

torch.set_num_threads(1)

ROWS, COPIES, RANK = 6, 3, 4


def products_of(architecture: str, **changes: object) -> list[Product]:
    built = build(architecture, **changes)
    return matrix_products(export_programs(built)[STEP_METHOD])[2]


def test_operations_are_those_of_the_model_on_its_rows() -> None:
    built = build("llama")
    model = built.module.model
    expected = 0
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            tokens = ROWS * 3 if name.startswith("lm_head") else ROWS * LENGTH
            expected += 2 * tokens * layer.weight.numel()
    for module in built.contract.modules:
        expected += 2 * ROWS * LENGTH * RANK * (module.in_features + module.out_features)
    # Scores and mixed values of 4 heads in each of 2 layers
    expected += 2 * 2 * 2 * ROWS * LENGTH * LENGTH * WIDTH
    found = matrix_products(export_graph(built.module, example_inputs(built.contract)))[2]
    assert sum(product.operations for product in found) == expected


def test_a_weight_counts_the_bytes_of_its_codes() -> None:
    sizes = {
        scheme: [product.weight_bytes for product in products_of("llama", quantize=scheme)]
        for scheme in ("fp32", "8da8w", "8da4w")
    }
    assert VOCABULARY * WIDTH * 4 in sizes["fp32"]
    assert VOCABULARY * WIDTH in sizes["8da8w"]
    # The vocabulary head is int8 in both; the other layers of 8da4w have half a byte a number.
    assert VOCABULARY * WIDTH in sizes["8da4w"]
    assert WIDTH * WIDTH // 2 in sizes["8da4w"]
    assert sizes["fp32"].count(0) > 0  # products of two computed values have no weight


def test_tangents_stand_beside_the_rows() -> None:
    """1 + queries values of every row after the first adapted layer, one before it."""
    queries, batch = 3, 2
    found = products_of("llama", estimator="tangent", queries=queries, batch_size=batch)
    heads = [product for product in found if product.weight_bytes == VOCABULARY * WIDTH * 4]
    assert [head.operations for head in heads] == [2 * (1 + queries) * batch * 3 * VOCABULARY * WIDTH]
    first_keys = next(product for product in found if "k_proj" in str(product.node.args[1]))
    assert first_keys.operations == 2 * batch * LENGTH * WIDTH * WIDTH // 2


@pytest.mark.export
@pytest.mark.parametrize("scheme", ["fp32", "8da4w"])
@pytest.mark.parametrize("estimator", ["antithetic", "tangent"])
@pytest.mark.parametrize("architecture", [next(iter(DECODERS)), next(iter(ENCODERS))])
def test_products_run_whole_in_the_engine(
    architecture: str, estimator: str, scheme: str, tmp_path: Path
) -> None:
    built = build(architecture, model=SHALLOW[architecture], estimator=estimator, quantize=scheme)
    program, inputs, products = matrix_products(export_programs(built)[STEP_METHOD])
    lowered = lower({STEP_METHOD: program})
    assert lowered.reports[STEP_METHOD].outside == {}
    assert lowered.reports[STEP_METHOD].delegates == 1
    path = tmp_path / "limit.pte"
    path.write_bytes(lowered.buffer)
    answers = run_program(path, inputs)
    assert len(answers) == len(products)
    with torch.no_grad():
        expected = program.module(check_guards=False)(*inputs)
    for ours, theirs in zip(answers, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-2 * theirs.abs().max()
