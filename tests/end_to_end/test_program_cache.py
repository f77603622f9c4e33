"""Programs that an export leaves in the user's cache, for another one in a process of its own."""

from __future__ import annotations

from pathlib import Path

from tests.verbs import prge


def test_another_adapter_of_the_same_shapes_lowers_nothing(workshop: Path, tmp_path: Path) -> None:
    told = prge(
        "export", "--model", workshop / "model", "--out", tmp_path / "bundle", "--target-modules",
        "all-linear", "--rank", 2, "--sequence-length", 32, "--seed", 7,
    ).stdout  # fmt: skip
    assert told.count("(from the cache)") == 3
    ours, theirs = (
        (folder / "adapter/adapter_model.safetensors").read_bytes()
        for folder in (tmp_path / "bundle", workshop / "bundle")
    )
    assert ours != theirs
