"""Programs in the user's cache are reused by an export in another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verbs import prge


@pytest.mark.whole
def test_another_adapter_of_the_same_shapes_lowers_nothing(workshop: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        arguments = ["--out", tmp_path / name, "--roles", "forward", "--seed", len(name)]
        output = prge("export", "--model", workshop / "model", *arguments).stdout
    assert output.count("(from the cache)") == 3
    first, second = (
        (tmp_path / name / "adapter/adapter_model.safetensors").read_bytes() for name in ("first", "second")
    )
    assert first != second
