"""What a page tells of models: the bundle, and of each adapter where it is from and how it was trained."""

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
# Of a run's settings: how it was trained. `train` is a file, of which the name is told.
_SETTINGS = ("estimator", "objective", "optimizer", "learning_rate", "train")


def describe_bundle(bundle: Bundle) -> Json:
    """Model, weights and size of a bundle, by names of the page's texts."""
    model = mapping(bundle.manifest.get("model"))
    told = {
        "bundle": bundle.folder.resolve().name,
        "base_model": _name(model.get("name_or_path")),
        "architecture": model.get("architecture"),
        "parameters": model.get("parameters"),
        "weights": bundle.quantization or "fp32",
        "hash": bundle.sha256[:16],
    }
    return _known(told)


def describe_adapter(source: Path) -> Json:
    """Where an adapter is from and how it was trained, as far as its folder and its run's tell.

    Args:
        source: what `prge.formats.peft.find_adapter` takes.
    """
    with suppress(PrgeError):
        folder = find_adapter(source)
        config = mapping(_document(folder / PEFT))
        told = {"adapter": folder.resolve().name, "rank": config.get("r"), "alpha": config.get("lora_alpha")}
        if (run := find_run(folder)) is not None:
            told |= {"adapter": run.name, **about_run(run)}
        return _known(told)
    return {}


def about_run(run: Path) -> Json:
    """How a run was trained and what came out, as its folder tells."""
    settings, summary = mapping(_document(run / CONFIG)), mapping(_document(run / SUMMARY))
    ran, trained = mapping(summary.get("run")), mapping(summary.get("train"))
    told = {name: settings.get(name) for name in _SETTINGS}
    told |= {
        "estimator": told["estimator"] or ran.get("method"),
        "train": _name(told["train"]),
        "base_model": _name(mapping(ran.get("model")).get("name_or_path")),
        "weights": mapping(ran.get("quantization")).get("scheme"),
        "steps_taken": trained.get("final_step") or trained.get("steps"),
        "training_rows": trained.get("training_rows"),
        "seconds": trained.get("seconds"),
        "best": _score(mapping(trained.get("best"))),
    }
    return _known(told)


def _document(path: Path) -> Any:
    if path.name != PEFT and path.is_symlink():  # to a file of this machine, perhaps; PEFT's may be a cache's
        return None
    try:
        return read_yaml(path) if path.suffix == ".yaml" else read_json(path)
    except (OSError, DocumentError):
        return None


def _name(path: Any) -> str | None:
    """The end of a path, which tells nothing of the machine's folders; names of the hub stay as they are.

    Of several paths, their ends.
    """
    if isinstance(path, list):
        return ", ".join(filter(None, map(_name, path)))
    if not isinstance(path, str):
        return None
    return path if path.count("/") == 1 and not path.startswith(("/", ".")) else Path(path).name


def _score(record: Mapping[str, Any]) -> str | None:
    """The metric of an evaluation with its name."""
    with suppress(KeyError, TypeError, ValueError):
        name, value = score_of(record)
        return f"{name.replace('_', ' ')} {value:.4g}"
    return None


def _known(told: Mapping[str, Any]) -> Json:
    """Texts and numbers of it."""
    return {
        name: printable(shortened(value, _LONGEST)) if isinstance(value, str) else value
        for name, value in told.items()
        if (isinstance(value, str) and value) or (isinstance(value, int | float) and abs(value) < _MOST)
    }
