"""How a bundle rounded its layers, read from the bundle: what was trained against is what is published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from prge.formats.bundle import Bundle, check_file
from prge.formats.documents import mapping
from prge.formats.layers import stored_layers
from server_export.quantize.quantization import NO_LAYERS, BundleLayers, Int4Weight


def rounded_layers_of(bundle: Bundle | None) -> BundleLayers:
    """The layers of a bundle that can't be rounded again of a model's weights; none without one.

    Raises:
        BundleError: the bundle's table of layers can't be used.
    """
    if bundle is None:
        return NO_LAYERS
    block = mapping(bundle.manifest.get("quantization"))
    int8 = block.get("per_channel")
    names = frozenset(map(str, int8)) if isinstance(int8, list) else frozenset[str]()
    return BundleLayers(names if block.get("scheme") == "8da4w" else (), _Codes(bundle))


class _Codes(Mapping[str, Int4Weight]):
    """Codes of a bundle's int4 layers, read when they are asked for."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle, self._layers = bundle, stored_layers(bundle)
        self._checked: set[str] = set()

    def __getitem__(self, name: str) -> Int4Weight:
        """The layer's codes; raises BundleError where the file isn't what the manifest says."""
        layer = self._layers[name]
        if layer.file not in self._checked:
            check_file(self._bundle.folder, self._bundle.manifest, layer.file)
            self._checked.add(layer.file)
        codes, scales = layer.read(self._bundle.folder)
        return Int4Weight(torch.from_numpy(codes), torch.from_numpy(scales).bfloat16())

    def __iter__(self) -> Iterator[str]:
        """Names of the layers."""
        return iter(self._layers)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._layers)
