"""`layers.json`: which bits each calibrated layer of a bundle has, why, and where its codes lie.

    {"model.layers.0.mlp.down_proj": {"bits": 8, "sensitivity": 0.0069},
     "model.layers.0.mlp.up_proj":   {"bits": 4, "sensitivity": 0.0011, "file": "weights/000.ptd",
                                      "codes": 4096, "scales": 446464, "shape": [1536, 576]}}

Codes and scales lie in a block's weights file as the engine reads them: two codes to a byte, the first in the
lower half, 8 added to each; a scale is a bfloat16. Int8 layers are made of the model's weights again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prge.errors import BundleError, shown
from prge.files.bundle import Bundle
from prge.files.documents import DocumentError, mapping, read_json

LAYERS = "layers.json"
_GROUP, _ZERO = 32, 8
_MOST_LAYERS = 1 << 20


@dataclass(frozen=True)
class StoredLayer:
    """Where an int4 layer lies: offsets of its codes and scales in one of the bundle's files."""

    file: str
    codes: int
    scales: int
    shape: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        """The layer's part of `layers.json`."""
        return {**asdict(self), "shape": [*self.shape]}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], files: Mapping[str, Any]) -> StoredLayer:
        """Inverse of `to_json`; `files` are those of the bundle's manifest.

        Raises:
            ValueError: it doesn't lie in one of them.
        """
        file, codes, scales, shape = (entry.get(name) for name in ("file", "codes", "scales", "shape"))
        numbers = [codes, scales, *(shape if isinstance(shape, list) else ())]
        if not (len(numbers) == 4 and all(type(n) is int and n >= 0 for n in numbers)):
            raise ValueError
        outputs, inputs = numbers[2:]
        if not isinstance(file, str) or file not in files or inputs % _GROUP or not outputs * inputs:
            raise ValueError
        ends = numbers[0] + outputs * inputs // 2, numbers[1] + 2 * outputs * inputs // _GROUP
        if max(ends) > files[file]["bytes"]:
            raise ValueError
        return cls(file, numbers[0], numbers[1], (outputs, inputs))

    def read(self, folder: Path) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """Codes i8 [out, in] from -8 to 7, and scales f32 [out, in / 32]."""
        outputs, inputs = self.shape
        path = folder / self.file
        packed = np.fromfile(path, np.uint8, outputs * inputs // 2, offset=self.codes)
        halves = np.stack([packed & 15, packed >> 4], 1).astype(np.int8) - np.int8(_ZERO)
        halfwords = np.fromfile(path, np.uint16, outputs * inputs // _GROUP, offset=self.scales)
        scales = (halfwords.astype(np.uint32) << 16).view(np.float32)
        return halves.reshape(outputs, inputs), scales.reshape(outputs, -1)


def read_layers(folder: Path, manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The table of a bundle's calibrated layers by name; empty where none was calibrated.

    Args:
        folder: of the bundle.
        manifest: the bundle's.

    Raises:
        BundleError: the file can't be used.
    """
    if LAYERS not in mapping(manifest.get("files")):
        return {}
    try:
        table = read_json(folder / LAYERS)
    except (OSError, DocumentError) as error:
        raise _unusable(folder, str(error)) from None
    found = mapping(table)
    if len(found) > _MOST_LAYERS or not all(isinstance(entry, dict) for entry in found.values()):
        raise _unusable(folder, "it has something else than layers")
    return {str(name): dict(entry) for name, entry in found.items()}


def stored_layers(bundle: Bundle) -> dict[str, StoredLayer]:
    """Where a bundle's int4 layers lie, by name; the bundle's files have been checked.

    Raises:
        BundleError: the file can't be used.
    """
    found = {}
    for name, entry in read_layers(bundle.folder, bundle.manifest).items():
        if "file" in entry:
            try:
                found[name] = StoredLayer.from_json(entry, bundle.manifest["files"])
            except ValueError:
                raise _unusable(bundle.folder, f"{shown(name)} is {shown(entry)}") from None
    return found


def _unusable(folder: Path, why: str) -> BundleError:
    return BundleError(
        f"{folder / LAYERS} can't be used: {why}", remedy="export the bundle again", code="layers-unusable"
    )
