"""The demo of the package: a tiny model and the rows of a task."""

from __future__ import annotations

from pathlib import Path

DEMO = Path(__file__).resolve().parents[1] / "demo_data"


def model_path(name: str | None) -> str:
    """Return the path that `prge export` takes for a model: `demo`, a folder, a GGUF file or a hub id."""
    return str(DEMO / "model") if name == "demo" else name or ""
