"""The matrix products of a step are complete and run in the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from products import BlockProducts, Call, load_products

from server_export.checkpoint.random_models import CONFIGURATIONS

torch.set_num_threads(1)
TINY = {
    **CONFIGURATIONS["smollm2-135m"],
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


def test_tangents_of_attention_are_two_products_each() -> None:
    assert Call(8, 1, 16, False).attention_products == 8
    assert Call(5, 1, 16, True).attention_products == 9


def test_every_layer_and_adapter_is_multiplied() -> None:
    block = BlockProducts([(8, 8), (8, 12), (12, 8)], [(8, 12)], 2)
    inputs = [torch.randn(2, 5, 8), torch.randn(2, 5, 12), torch.randn(4, 5, 4), torch.randn(4, 4, 5)]
    answers = block(*inputs, torch.randn(2, 5, 2), torch.randn(2, 2, 12))
    assert [answer.shape[-1] for answer in answers] == [8, 12, 8, 2, 5, 4, 12]


@pytest.mark.parametrize("scheme", ["fp32", "8da4w"])
def test_products_run_in_the_engine(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGURATIONS, "tiny", TINY)
    call = Call(3, 2, 5, True)
    products = load_products("tiny", None, scheme, call, ["q_proj", "v_proj"], 4, tmp_path)
    assert len(products.programs) == 3
    assert products() > 0
