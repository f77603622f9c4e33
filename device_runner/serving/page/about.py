"""What the page shows about models: the bundle, and each adapter's origin and training."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from device_runner.serving.protocol import Json
from prge.errors import PrgeError, printable, shortened
from prge.formats.bundle import Bundle
from prge.formats.curves import score_of
from prge.formats.documents import DocumentError, mapping, read_json, read_yaml
from prge.formats.peft import CONFIG as PEFT
from prge.formats.peft import find_adapter, find_run
from prge.formats.run_folder import CONFIG, SUMMARY

_LONGEST, _MOST = 200, 1e300
# Settings of a run that the page shows; of the path `train`, only the file name.
_SETTINGS = ("estimator", "objective", "optimizer", "learning_rate", "train")


def describe_bundle(bundle: Bundle) -> Json:
    """Return model, weights and size of a bundle, by names of the page's texts."""
    model = mapping(bundle.manifest.get("model"))
    facts = {
        "bundle": bundle.folder.resolve().name,
        "base_model": _name(model.get("name_or_path")),
        "architecture": model.get("architecture"),
        "parameters": model.get("parameters"),
        "weights": bundle.quantization or "fp32",
        "hash": bundle.sha256[:16],
    }
    return _showable(facts)


def describe_adapter(source: Path) -> Json:
    """Return where an adapter comes from and how it was trained, as far as its folder and its run say.

    Args:
        source: anything that `prge.formats.peft.find_adapter` accepts.
    """
    with suppress(PrgeError):
        folder = find_adapter(source)
        config = mapping(_document(folder / PEFT))
        facts = {"adapter": folder.resolve().name, "rank": config.get("r"), "alpha": config.get("lora_alpha")}
        if (run := find_run(folder)) is not None:
            facts |= {"adapter": run.name, **describe_run(run)}
        return _showable(facts)
    return {}


def describe_run(run: Path) -> Json:
    """Return how a run was trained and its result, from the run's folder."""
    settings, summary = mapping(_document(run / CONFIG)), mapping(_document(run / SUMMARY))
    run_facts, result = mapping(summary.get("run")), mapping(summary.get("train"))
    facts = {name: settings.get(name) for name in _SETTINGS}
    facts |= {
        "estimator": facts["estimator"] or run_facts.get("method"),
        "train": _name(facts["train"]),
        "base_model": _name(mapping(run_facts.get("model")).get("name_or_path")),
        "weights": mapping(run_facts.get("quantization")).get("scheme"),
        "steps_taken": result.get("final_step") or result.get("steps"),
        "training_rows": result.get("training_rows"),
        "seconds": result.get("seconds"),
        "best": _score(mapping(result.get("best"))),
    }
    return _showable(facts)


def _document(path: Path) -> Any:
    if (
        path.name != PEFT and path.is_symlink()
    ):  # may lead to any file; PEFT's may be a link of the hub's cache
        return None
    try:
        return read_yaml(path) if path.suffix == ".yaml" else read_json(path)
    except (OSError, DocumentError):
        return None


def _name(path: Any) -> str | None:
    """Return the last part of a path, which reveals no folders of the machine; hub names are unchanged.

    For several paths, the result has their last parts.
    """
    if isinstance(path, list):
        return ", ".join(filter(None, map(_name, path)))
    if not isinstance(path, str):
        return None
    return path if path.count("/") == 1 and not path.startswith(("/", ".")) else Path(path).name


def _score(record: Mapping[str, Any]) -> str | None:
    """Format the metric of an evaluation with its name."""
    with suppress(KeyError, TypeError, ValueError):
        name, value = score_of(record)
        return f"{name.replace('_', ' ')} {value:.4g}"
    return None


def _showable(facts: Mapping[str, Any]) -> Json:
    """Return the strings and numbers that the page can show."""
    return {
        name: printable(shortened(value, _LONGEST)) if isinstance(value, str) else value
        for name, value in facts.items()
        if (isinstance(value, str) and value) or (isinstance(value, int | float) and abs(value) < _MOST)
    }
