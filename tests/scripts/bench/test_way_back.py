"""Ways back through a frozen layer: all but a rounded weight give the slope, and constants are shared."""

from __future__ import annotations

import pytest
import torch
from emulation import WAYS, Emulated, cosine
from way_back import layer_figures, linear

torch.set_num_threads(1)


def test_only_rounding_turns_a_slope() -> None:
    ways = layer_figures("8da4w", "64x96", 8, 0.0)
    assert ways["unpacked"]["cosine"] == pytest.approx(1, abs=1e-9)
    assert ways["float32 input"]["cosine"] == pytest.approx(1, abs=1e-9)
    assert 0.99 < ways["int4"]["cosine"] < 0.999 < ways["int8"]["cosine"] < 0.99999


@pytest.mark.parametrize(("scheme", "other", "bytes_saved"), [("8da8w", "int8", 1), ("fp32", "float32", 4)])
def test_constants_that_both_directions_read_are_stored_once(
    scheme: str, other: str, bytes_saved: float
) -> None:
    ways = layer_figures(scheme, "256x384", 8, 0.0)
    assert ways["forward's"]["cosine"] > 0.9999
    saved = ways[other]["bytes_a_weight"] - ways["forward's"]["bytes_a_weight"]
    assert saved == pytest.approx(bytes_saved, abs=0.1)


@pytest.mark.parametrize("scheme", WAYS)
def test_an_emulated_layer_goes_forward_as_it_is_and_back_as_asked(scheme: str) -> None:
    torch.manual_seed(0)
    layer = linear(torch.randn(96, 64), scheme)[0]
    emulated = Emulated(layer.weight.data)
    x, slope = torch.randn(2, 8, 64, requires_grad=True), torch.randn(2, 8, 96) * 1e-9
    answer = emulated(x)
    assert torch.equal(answer, layer(x))
    exact = slope @ layer.weight.dequantize()
    for way in ("exact", *WAYS[scheme]):
        emulated.way = way
        (found,) = torch.autograd.grad(answer, x, slope, retain_graph=True)
        least = {"exact": 0.999999, "int4": 0.99, "int4 + slopes": 0.99}.get(way, 0.999)
        assert cosine(found, exact) > least
