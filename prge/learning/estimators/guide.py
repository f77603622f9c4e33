"""What keeps random directions to where gradients lie: a few axes of every adapted layer's outputs.

A direction is made of one random number for each axis instead of one for each output. So forward-only runs
search as many dimensions as there are axes, and the noise of their estimates falls with them.

    axes of a layer   f32 [axes, out], longer where gradients are
    direction         random numbers [rank, axes] times axes
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import safetensors.numpy

from prge.contract import Matrix
from prge.engine import Array, FloatArray
from prge.errors import BundleError
from prge.files.bundle import MANIFEST, Bundle, manifest_sha256
from prge.files.journal import Journal, Record, decode_array, encode_array
from prge.files.peft import read_arrays
from prge.host.atomic import write_file

# Of a bundle, where it has one.
GUIDE = "guide.safetensors"
_KIND = "guide"


@dataclass(frozen=True, eq=False)
class Guide:
    """The axes of every `lora_b`, f32 [axes, out] by module name; a trained `lora_a` has none."""

    axes: Mapping[str, FloatArray]

    def width(self, matrix: Matrix) -> int:
        """Random numbers of a direction for each rank of a matrix."""
        return matrix.width if matrix.letter == "a" else len(self.axes[matrix.of])

    def spread(self, matrix: Matrix, numbers: Array) -> Array:
        """Directions [..., width] of numbers along the axes [..., axes], in the numbers' own dtype.

        Added up axis by axis: a matrix product's order, and so its last bits, is the machine's.
        """
        if matrix.letter == "a":
            return numbers
        axes = self.axes[matrix.of].astype(numbers.dtype)
        total: Array = numbers[..., :1] * axes[0]
        for place in range(1, len(axes)):
            total += numbers[..., place : place + 1] * axes[place]
        return total

    def to_record(self) -> Record:
        """The journal's record of it."""
        layers = {
            name: {"axes": len(axes), "values": encode_array(axes.ravel())}
            for name, axes in self.axes.items()
        }
        return {"kind": _KIND, "layers": layers}

    @classmethod
    def from_journal(cls, journal: Journal) -> Guide | None:
        """The guide that a run's journal holds."""
        record = journal.first(_KIND)
        if record is None:
            return None
        with journal.reading(record):
            return cls(
                {
                    name: decode_array(layer["values"]).reshape(layer["axes"], -1)
                    for name, layer in record["layers"].items()
                }
            )


def add_guide(bundle: Bundle, guide: Guide) -> None:
    """Write a guide into a bundle's folder, in the place of an older one, and then a manifest that has it.

    Raises:
        RunError: the storage is full, read-only or refuses.
    """
    content = safetensors.numpy.save({name: np.ascontiguousarray(axes) for name, axes in guide.axes.items()})
    write_file(bundle.file(GUIDE), content)
    entry = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    manifest = {**bundle.manifest, "files": {**bundle.manifest["files"], GUIDE: entry}}
    manifest["manifest_sha256"] = manifest_sha256(manifest)
    write_file(bundle.file(MANIFEST), (json.dumps(manifest, indent=1) + "\n").encode())


def guide_of(bundle: Bundle) -> Guide | None:
    """The guide of a bundle, checked; None where it has none.

    Raises:
        AdapterError: the file can't be read.
        BundleError: it isn't of the bundle's layers.
    """
    if GUIDE not in bundle.manifest["files"]:
        return None
    arrays, modules = read_arrays(bundle.file(GUIDE)), bundle.chain.modules
    problems = [
        f"{module.name}: {problem}"
        for module in modules
        if (problem := _problem(arrays.get(module.name), module.out_features))
    ]
    if arrays.keys() - {module.name for module in modules}:
        problems.append("it has layers that the bundle doesn't adapt")
    if problems:
        raise BundleError(
            f"the bundle's {GUIDE} doesn't fit it: {'; '.join(problems)}", remedy="run `prge guide` again"
        )
    return Guide(arrays)


def _problem(axes: Array | None, outputs: int) -> str:
    if axes is None:
        return "it has no axes"
    if axes.dtype != np.float32 or axes.ndim != 2 or not len(axes) or axes.shape[1] != outputs:
        return f"axes are {axes.dtype} {axes.shape}, must be float32 (axes, {outputs})"
    return "" if np.isfinite(axes).all() else "axes are not finite"
