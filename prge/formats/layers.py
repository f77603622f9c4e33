"""`layers.json`: bits, sensitivity and stored codes of the calibrated layers of a bundle.

    {"model.layers.0.mlp.down_proj": {"bits": 8, "sensitivity": 0.0069},
     "model.layers.0.mlp.up_proj":   {"bits": 4, "sensitivity": 0.0011, "file": "weights/000.ptd",
                                      "codes": 4096, "scales": 446464, "shape": [1536, 576]}}

Codes and scales are stored in a block's weights file as the engine reads them: two codes per byte, the first
one in the lower half, with 8 added to each; scales are bfloat16. Int8 layers are quantized again from the
model's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prge.errors import BundleError, format_value
from prge.formats.bundle import Bundle
from prge.formats.documents import DocumentError, mapping, read_json

LAYERS = "layers.json"
_GROUP, _ZERO = 32, 8
_MAX_LAYERS = 1 << 20


@dataclass(frozen=True)
class StoredLayer:
    """The location of an int4 layer in a bundle.

    Attributes:
        file: name of the file.
        codes: offset of the codes, in bytes.
        scales: offset of the scales, in bytes.
        shape: output and input features.
    """

    file: str
    codes: int
    scales: int
    shape: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        """Return the layer's entry in `layers.json`."""
        return {**asdict(self), "shape": [*self.shape]}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], files: Mapping[str, Any]) -> StoredLayer:
        """Read a layer's entry; `files` are the entries of the bundle's manifest.

        Raises:
            ValueError: the entry is invalid, or exceeds its file.
        """
        file, codes, scales, shape = (entry.get(name) for name in ("file", "codes", "scales", "shape"))
        values = [codes, scales, *(shape if isinstance(shape, list) else ())]
        if not (len(values) == 4 and all(type(value) is int and value >= 0 for value in values)):
            raise ValueError
        outputs, inputs = values[2:]
        if not isinstance(file, str) or file not in files or inputs % _GROUP or not outputs * inputs:
            raise ValueError
        ends = values[0] + outputs * inputs // 2, values[1] + 2 * outputs * inputs // _GROUP
        if max(ends) > files[file]["bytes"]:
            raise ValueError
        return cls(file, values[0], values[1], (outputs, inputs))

    def read(self, folder: Path) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """Read the codes, i8 [out, in] from -8 to 7, and the scales, f32 [out, in / 32]."""
        outputs, inputs = self.shape
        path = folder / self.file
        packed = np.fromfile(path, np.uint8, outputs * inputs // 2, offset=self.codes)
        codes = np.stack([packed & 15, packed >> 4], 1).astype(np.int8) - np.int8(_ZERO)
        halfwords = np.fromfile(path, np.uint16, outputs * inputs // _GROUP, offset=self.scales)
        scales = (halfwords.astype(np.uint32) << 16).view(np.float32)
        return codes.reshape(outputs, inputs), scales.reshape(outputs, -1)


def read_layers(folder: Path, manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Read the entries of a bundle's calibrated layers by name; empty if no layer was calibrated.

    Args:
        folder: folder of the bundle.
        manifest: manifest of the bundle.

    Raises:
        BundleError: the file is invalid.
    """
    if LAYERS not in mapping(manifest.get("files")):
        return {}
    try:
        table = read_json(folder / LAYERS)
    except (OSError, DocumentError) as error:
        raise _unusable_error(folder, str(error)) from None
    entries = mapping(table)
    if len(entries) > _MAX_LAYERS or not all(isinstance(entry, dict) for entry in entries.values()):
        raise _unusable_error(folder, "it has something else than layers")
    return {str(name): dict(entry) for name, entry in entries.items()}


def stored_layers(bundle: Bundle) -> dict[str, StoredLayer]:
    """Return the locations of a bundle's int4 layers by name; the bundle's files must have been checked.

    Raises:
        BundleError: the file is invalid.
    """
    layers = {}
    for name, entry in read_layers(bundle.folder, bundle.manifest).items():
        if "file" in entry:
            try:
                layers[name] = StoredLayer.from_json(entry, bundle.manifest["files"])
            except ValueError:
                why = f"{format_value(name)} is {format_value(entry)}"
                raise _unusable_error(bundle.folder, why) from None
    return layers


def _unusable_error(folder: Path, why: str) -> BundleError:
    return BundleError(
        f"{folder / LAYERS} can't be used: {why}", remedy="Export the bundle again.", code="layers-unusable"
    )
