"""Calibrate a chain's int4 layers: measure sensitivities, choose int8 layers, and round the others (GPTQ)."""

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

# Tokens for measuring sensitivities; their order needs few.
_TOKENS = 512


@dataclass(frozen=True)
class Calibration:
    """A calibrated chain, with the sensitivities and bits of its layers.

    Attributes:
        chain: the chain, whose codes are read from `folder`.
        folder: the folder of the codes; `remove_codes` removes it.
        sensitivities: the sensitivities by the number of the block and the name of the weight.
        int8: the names of weights that stay int8 by the number of the block.
        tokens: the number of calibration tokens.
    """

    chain: ModelChain
    folder: Path
    sensitivities: Mapping[int, Mapping[str, Sensitivity]]
    int8: Mapping[int, frozenset[str]]
    tokens: int

    @property
    def report(self) -> QuantizationReport:
        """The manifest's `quantization` entry."""
        bits = round(mean_bits(self.sensitivities, self.int8), 4)
        rounding = {"method": "gptq", "tokens": self.tokens, "weight_bits": bits}
        return replace(self.chain.quantization, rounding=rounding)

    def table(self, stored: Mapping[str, StoredLayer]) -> dict[str, dict[str, Any]]:
        """Return the content of `layers.json`; `stored` has the location of each int4 layer's codes."""
        entries: dict[str, dict[str, Any]] = {}
        for number, by_name in self.sensitivities.items():
            for name, each in by_name.items():
                layer, is_int8 = layer_name(name), name in self.int8.get(number, ())
                location = {} if is_int8 or layer not in stored else stored[layer].to_json()
                sensitivity = float(f"{each.error:.3g}")
                entries.setdefault(
                    layer, {"bits": 8 if is_int8 else 4, "sensitivity": sensitivity, **location}
                )
        return entries

    def remove_codes(self) -> None:
        """Remove the folder of the codes; the chain's tensors can't be made afterwards."""
        shutil.rmtree(self.folder)


def calibrate(
    chain: ModelChain, rows: Sequence[Sequence[int]], weight_bits: float, folder: Path
) -> Calibration:
    """Choose the bits of a chain's int4 layers and round them with errors compensated on rows.

    Args:
        chain: a chain in 8da4w.
        rows: the tokens of the rows.
        weight_bits: the average bits per weight, from 4 to 8.
        folder: the folder to create for the codes.

    Raises:
        BundleError: a weight is missing from the files or not finite.
    """
    with stage("bits") as note:
        sensitivities = measure_sensitivities(chain, _first_tokens(rows, _TOKENS))
        int8 = choose_int8(chain, sensitivities, weight_bits)
        chain = with_int8(chain, int8)
        layers = sum(map(len, int8.values()))
        note(
            f"{layers} layer{'s' * (layers != 1)} in int8, "
            f"{mean_bits(sensitivities, int8):.3g} bits per weight"
        )
    tokens = sum(map(len, rows))
    with stage("rounding") as note:
        folder.mkdir()
        chain = calibrate_codes(chain, rows, folder)
        note(f"{tokens:,} tokens{_too_few_note(chain)}")
    return Calibration(chain, folder, sensitivities, int8, tokens)


def _too_few_note(chain: ModelChain) -> str:
    """Return a note about int4 layers with fewer calibration tokens than inputs; empty if there are none."""
    blocks = range(chain.head_start)
    count = sum(len(int4_layers(chain, number)) - len(chain.rounded(number)) for number in blocks)
    return f"; {count} layers see too few tokens and are rounded to the nearest" if count else ""


def _first_tokens(rows: Sequence[Sequence[int]], tokens: int) -> list[Sequence[int]]:
    """Return the first rows, with at most `tokens` tokens in total."""
    chosen: list[Sequence[int]] = []
    for row in rows:
        if (remaining := tokens - sum(map(len, chosen))) <= 0:
            break
        chosen.append(row[:remaining])
    return chosen
