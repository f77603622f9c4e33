"""What an adapter in each place would contribute: gradients without noise, and what ranks explain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prge.adapter import Adapter
from prge.contract import Contract
from prge.errors import DataError
from prge.estimators import Step
from prge.exact import Exact
from prge.examples import Example, Slot, TokenSequence, make_batch
from server_export.model.chain import Chain
from server_export.model.contributions import Contribution, gradient_norms
from server_export.model.gradients import EagerEngine
from tests.server_export.model.test_gradients import adapted_chain
from tests.tiny_models import VOCABULARY, WIDTH, save_model

LAST, FIRST = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.v_proj"


def text(number: int, tokens: tuple[int, ...]) -> Example:
    share = 1 / (len(tokens) - 1)
    slots = tuple(Slot(place, target, share, 0) for place, target in enumerate(tokens[1:]))
    return Example(number, (TokenSequence(tokens, slots),), 1, None)


def texts(count: int, seed: int = 0) -> list[Example]:
    draw = np.random.default_rng(seed)
    return [text(number + 1, tuple(draw.integers(3, 100, 6).tolist())) for number in range(count)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return adapted_chain(save_model(tmp_path_factory.mktemp("model"), "llama"), [FIRST, LAST])


def contract(chain: Chain) -> Contract:
    return Contract("stack", "logprobs", 1, 1, 8, 7, WIDTH, VOCABULARY, (), chain.modules)


def gradients(chain: Chain, examples: list[Example]) -> dict[str, np.ndarray]:
    """Of the mean loss, by layer."""
    own = replace(contract(chain), kind="exact", batch_size=len(examples))
    adapter = Adapter.zeros(chain.modules)
    batch = make_batch(examples, own)
    measured = Exact().measure(EagerEngine(chain, own, "mean"), Step(adapter, [batch], 0, 0))
    return Adapter(chain.modules, np.asarray(measured.derivatives, np.float32)).named()


def test_of_equal_rows_batches_have_nothing_but_the_mean(llama: Chain) -> None:
    norms = gradient_norms(llama, contract(llama), texts(1) * 4, pad=0, pooling="mean")
    assert norms == {name: pytest.approx(1.0, rel=1e-4) for name in (FIRST, LAST)}


def test_what_rows_differ_in_does_not_count(llama: Chain) -> None:
    # Random texts pull in random directions: most of a mean over a few is what they differ in.
    rows = texts(64, seed=1)
    norms = gradient_norms(llama, contract(llama), rows, pad=0, pooling="mean")
    batches = [gradients(llama, rows[start : start + 8]) for start in range(0, 64, 8)]
    for name, norm in norms.items():
        own = np.stack([batch[name].ravel() for batch in batches]).astype(float)
        products, size = own @ own.T, float((own**2).sum() / 8)
        common = (products.sum() - np.trace(products)) / (8 * 7)
        assert norm == pytest.approx(max(common / size, 0.0) ** 0.5, rel=1e-3)
        assert norm**2 < float((own.mean(0) ** 2).sum()) / size


def test_an_encoder_is_measured_with_heads_that_did_not_see_the_row(tmp_path: Path) -> None:
    name = "encoder.layer.1.output.dense"
    chain = adapted_chain(save_model(tmp_path, "bert"), [name])
    draw = np.random.default_rng(0)
    rows = [
        Example(number, (TokenSequence(tuple(draw.integers(3, 100, 6).tolist())),), 2, number % 2)
        for number in range(1, 41)
    ]
    own = Contract("stack", "pooled", 1, 1, 8, 0, WIDTH, VOCABULARY, (), chain.modules)
    assert gradient_norms(chain, own, rows, pad=0, pooling="mean").keys() == {name}


def test_one_row_is_too_few(llama: Chain) -> None:
    with pytest.raises(DataError, match="1 examples, must be 2 or more"):
        gradient_norms(llama, contract(llama), texts(1), pad=0, pooling="mean")


def test_a_rank_contributes_what_its_directions_explain() -> None:
    layer = Contribution(gradient=2.0, shares=(0.5, 0.25, 0.125))
    assert [layer.of_rank(rank) for rank in (1, 2, 3)] == [1.0, 1.5, 1.75]
