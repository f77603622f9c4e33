"""The quantized layers of a bundle, for publishing an adapter with the weights of its training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from prge.formats.bundle import Bundle, check_file
from prge.formats.documents import mapping
from prge.formats.layers import stored_layers
from server_export.quantize.quantization import NO_LAYERS, BundleLayers, Int4Weight


def rounded_layers_of(bundle: Bundle | None) -> BundleLayers:
    """Return the layers of a bundle whose rounding can't be recomputed from the model; none without a bundle.

    Raises:
        BundleError: the bundle's table of layers can't be used.
    """
    if bundle is None:
        return NO_LAYERS
    quantization = mapping(bundle.manifest.get("quantization"))
    int8 = quantization.get("per_channel")
    names = frozenset(map(str, int8)) if isinstance(int8, list) else frozenset[str]()
    return BundleLayers(names if quantization.get("scheme") == "8da4w" else (), _Codes(bundle))


class _Codes(Mapping[str, Int4Weight]):
    """The codes of a bundle's int4 layers by name, read on access."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle, self._layers = bundle, stored_layers(bundle)
        self._checked: set[str] = set()

    def __getitem__(self, name: str) -> Int4Weight:
        """Return a layer's codes; raises BundleError if the file differs from the manifest."""
        layer = self._layers[name]
        if layer.file not in self._checked:
            check_file(self._bundle.folder, self._bundle.manifest, layer.file)
            self._checked.add(layer.file)
        codes, scales = layer.read(self._bundle.folder)
        return Int4Weight(torch.from_numpy(codes), torch.from_numpy(scales).bfloat16())

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the layers."""
        return iter(self._layers)

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self._layers)
