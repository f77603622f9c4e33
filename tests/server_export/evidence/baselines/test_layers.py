"""Linear layers of blocks and feed-forward networks are detected by structure; batches never end."""

from __future__ import annotations

from itertools import islice

import pytest
from torch import nn

from prge.errors import ConfigError
from server_export.adapter.layers import convert_conv1d
from server_export.evidence.baselines.layers import block_linears, feed_forward_linears, shuffled_batches
from tests.refusals import raises
from tests.rows import bigram_completions
from tests.tiny_models import ARCHITECTURES, WIDTH, make_model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_feed_forward_widens_and_narrows_and_the_rest_is_attention(architecture: str) -> None:
    model = make_model(architecture)
    convert_conv1d(model)
    for block, feed_forward in zip(block_linears(model), feed_forward_linears(model), strict=True):
        *first, last = feed_forward.values()
        assert all(layer.in_features == WIDTH and layer.out_features in (96, 192) for layer in first)
        assert (last.in_features, last.out_features) == (96, WIDTH)
        assert set(feed_forward) < set(block)


def test_a_block_without_feed_forward_is_refused() -> None:
    blocks = nn.ModuleList([nn.ModuleDict({"attention": nn.Linear(2, 2)})])
    with raises(ConfigError, "unknown-feed-forward", containing="ModuleDict"):
        feed_forward_linears(nn.ModuleDict({"blocks": blocks}))


def test_batches_pass_through_all_examples_again_and_again() -> None:
    examples = bigram_completions(8)
    first_pass = list(islice(shuffled_batches(examples, 4, seed=1), 2))
    assert sorted(example.row for batch in first_pass for example in batch) == list(range(1, 9))
    assert list(islice(shuffled_batches(examples, 4, seed=1), 2)) == first_pass
    assert [len(batch) for batch in islice(shuffled_batches(examples, 20, seed=1), 3)] == [8, 8, 8]
