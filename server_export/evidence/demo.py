"""The demo that comes with the package: a tiny model, and rows of a task."""

from __future__ import annotations

from pathlib import Path

DEMO = Path(__file__).resolve().parents[1] / "demo_data"


def model_path(name: str | None) -> str:
    """A model as `prge export` takes it, of its name: `demo`, or a folder, a GGUF file or a hub id."""
    return str(DEMO / "model") if name == "demo" else name or ""
