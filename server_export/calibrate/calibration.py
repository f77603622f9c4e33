"""A chain whose int4 layers are calibrate_codes: sensitivities -> layers in int8 -> codes of the others."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prge.formats.layers import StoredLayer
from server_export.calibrate.rounding import calibrate_codes
from server_export.calibrate.sensitivities import (
    Sensitivity,
    choose_int8,
    int4_layers,
    mean_bits,
    measure_sensitivities,
)
from server_export.model.chain import ModelChain, layer_name
from server_export.pipeline import with_int8
from server_export.progress import stage
from server_export.quantize.quantization import QuantizationReport

# Tokens that sensitivities are measured on: their order needs few.
_TOKENS = 512


@dataclass(frozen=True)
class Calibration:
    """A calibrate_codes chain, with the sensitivities and bits of its layers.

    Attributes:
        chain: with codes, which are read from `folder`.
        folder: of the codes; `remove_codes` removes it.
        sensitivities: of layers, by number of the block and name of the weight.
        int8: names of weights that stay int8, by number of the block.
        tokens: of the rows.
    """

    chain: ModelChain
    folder: Path
    sensitivities: Mapping[int, Mapping[str, Sensitivity]]
    int8: Mapping[int, frozenset[str]]
    tokens: int

    @property
    def report(self) -> QuantizationReport:
        """What the manifest says of quantization."""
        bits = round(mean_bits(self.sensitivities, self.int8), 4)
        rounding = {"method": "gptq", "tokens": self.tokens, "weight_bits": bits}
        return replace(self.chain.quantization, rounding=rounding)

    def table(self, stored: Mapping[str, StoredLayer]) -> dict[str, dict[str, Any]]:
        """The content of `layers.json`; `stored` says where int4 layers lie, by name."""
        found: dict[str, dict[str, Any]] = {}
        for number, of_block in self.sensitivities.items():
            for name, each in of_block.items():
                layer, is_int8 = layer_name(name), name in self.int8.get(number, ())
                place = {} if is_int8 or layer not in stored else stored[layer].to_json()
                sensitivity = float(f"{each.error:.3g}")
                found.setdefault(layer, {"bits": 8 if is_int8 else 4, "sensitivity": sensitivity, **place})
        return found

    def remove_codes(self) -> None:
        """Remove the folder; the chain's tensors can't be made any more."""
        shutil.rmtree(self.folder)


def calibrate(
    chain: ModelChain, rows: Sequence[Sequence[int]], weight_bits: float, folder: Path
) -> Calibration:
    """Choose the bits of a chain's int4 layers and calibrate their codes on rows.

    Args:
        chain: in 8da4w.
        rows: tokens.
        weight_bits: of a weight on average, from 4 to 8.
        folder: to make, for the codes.

    Raises:
        BundleError: the files lack a weight, or it isn't finite.
    """
    with stage("bits") as note:
        sensitivities = measure_sensitivities(chain, _first(rows, _TOKENS))
        int8 = choose_int8(chain, sensitivities, weight_bits)
        chain = with_int8(chain, int8)
        layers = sum(map(len, int8.values()))
        note(
            f"{layers} layer{'s' * (layers != 1)} in int8, {mean_bits(sensitivities, int8):.3g} bits a weight"
        )
    tokens = sum(map(len, rows))
    with stage("rounding") as note:
        folder.mkdir()
        chain = calibrate_codes(chain, rows, folder)
        note(f"{tokens:,} tokens{_left_out(chain)}")
    return Calibration(chain, folder, sensitivities, int8, tokens)


def _left_out(chain: ModelChain) -> str:
    """A note on int4 layers that saw fewer tokens than they have inputs."""
    blocks = range(chain.head_start)
    count = sum(len(int4_layers(chain, number)) - len(chain.rounded(number)) for number in blocks)
    return f"; {count} layers see too few and are rounded to the nearest" if count else ""


def _first(rows: Sequence[Sequence[int]], tokens: int) -> list[Sequence[int]]:
    """The first rows, of so many tokens in all."""
    found: list[Sequence[int]] = []
    for row in rows:
        if (left := tokens - sum(map(len, found))) <= 0:
            break
        found.append(row[:left])
    return found
