"""`layers.json`: codes are read as the weights files store them; a hostile table is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prge.errors import BundleError
from prge.formats.bundle import Bundle
from prge.formats.layers import LAYERS, StoredLayer, read_layers, stored_layers
from tests.refusals import raises

SHAPE = (3, 64)


def bundle_with(folder: Path, table: object, size: int = 1000) -> Bundle:
    (folder / LAYERS).write_text(json.dumps(table))
    files = {LAYERS: {"bytes": 1, "sha256": ""}, "weights/000.ptd": {"bytes": size, "sha256": ""}}
    return Bundle(folder, {"files": files}, None)  # type: ignore[arg-type]


def entry(**changes: Any) -> dict[str, Any]:
    position = {"file": "weights/000.ptd", "codes": 16, "scales": 128, "shape": [*SHAPE]}
    return {"bits": 4, "sensitivity": 0.1, **position, **changes}


def test_codes_and_scales_are_those_of_the_file(tmp_path: Path) -> None:
    codes = np.random.default_rng(0).integers(-8, 8, SHAPE, np.int8)
    scales = np.array([[0.5, 2.0], [1.25, 3.0], [0.0078125, 1.0]], np.float32)
    unsigned = (codes + 8).astype(np.uint8)
    packed = unsigned[:, ::2] | unsigned[:, 1::2] << 4
    halfwords = (scales.view(np.uint32) >> 16).astype(np.uint16)
    (tmp_path / "weights").mkdir()
    content = b"\0" * 16 + packed.tobytes() + b"\0" * 16 + halfwords.tobytes()
    (tmp_path / "weights" / "000.ptd").write_bytes(content)
    bundle = bundle_with(tmp_path, {"a": entry(), "b": {"bits": 8, "sensitivity": 1.0}}, len(content))
    result = stored_layers(bundle)
    assert list(read_layers(tmp_path, bundle.manifest)) == ["a", "b"] and list(result) == ["a"]
    read_codes, read_scales = result["a"].read(tmp_path)
    assert np.array_equal(read_codes, codes) and np.array_equal(read_scales, scales)
    assert StoredLayer.from_json(result["a"].to_json(), bundle.manifest["files"]) == result["a"]


@pytest.mark.parametrize(
    "changes",
    [
        {"file": "weights/001.ptd"},
        {"file": "../weights/000.ptd"},
        {"codes": -1},
        {"codes": 950},
        {"scales": 10**30},
        {"codes": 1.5},
        {"codes": True},
        {"shape": [3]},
        {"shape": [3, 65]},
        {"shape": [0, 64]},
        {"shape": [10**9, 10**9]},
        {"shape": None},
    ],
)
def test_a_layer_outside_of_the_bundle_s_files_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with raises(BundleError, "layers-unusable", containing="'a'"):
        stored_layers(bundle_with(tmp_path, {"a": entry(**changes)}))


def test_an_invalid_table_is_refused(tmp_path: Path) -> None:
    with raises(BundleError, "layers-unusable"):
        stored_layers(bundle_with(tmp_path, {"a": 1}))
    bundle = bundle_with(tmp_path, {})
    (tmp_path / LAYERS).write_text("{")
    with raises(BundleError, "layers-unusable"):
        stored_layers(bundle)


def test_a_bundle_without_the_file_has_none(tmp_path: Path) -> None:
    assert stored_layers(Bundle(tmp_path, {"files": {}}, None)) == {}  # type: ignore[arg-type]
