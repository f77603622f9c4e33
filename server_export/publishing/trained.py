"""Find and check a trained adapter and its base model before publishing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prge.data.tokenization.tokenizer import CHAT_TEMPLATE_FILE
from prge.engine import Array
from prge.errors import AdapterError, BundleError, ConfigError, RunError, as_clause
from prge.formats.bundle import MANIFEST, Bundle, open_bundle
from prge.formats.chain import OWN_HEAD
from prge.formats.documents import DocumentError, mapping
from prge.formats.peft import (
    CONFIG,
    HEAD,
    PREFIX,
    PeftAdapter,
    find_adapter,
    find_run,
    lora_scale,
    read_arrays,
    read_compatible_adapter,
    read_config,
    read_lora,
)
from prge.formats.run_folder import CONFIG as RUN_CONFIG
from prge.formats.stored_settings import check_links
from prge.formats.tune_folder import find_tuning, read_bundle_path, resolve_bundle
from prge.model_spec import AdaptedModule
from server_export.checkpoint.base_model import (
    BaseModel,
    base_from_manifest,
    base_from_peft,
    content_problems,
    model_problems,
)

if TYPE_CHECKING:
    from server_export.checkpoint.loading import LoadedModel
    from server_export.publishing.settings import PublishConfig


@dataclass(frozen=True)
class TrainedAdapter:
    """A trained adapter with its bundle and base model.

    Attributes:
        folder: PEFT folder of the adapter.
        run: run folder of the adapter, if there is one.
        bundle: bundle that the adapter was trained with, if it is known.
        adapter: the adapter.
        config: the adapter's `adapter_config.json`.
        base: the base model: the recorded one, unless the user named another.
        recorded: the base model that the bundle or the adapter records.
    """

    folder: Path
    run: Path | None
    bundle: Bundle | None
    adapter: PeftAdapter
    config: dict[str, Any]
    base: BaseModel
    recorded: BaseModel | None

    @property
    def is_encoder(self) -> bool | None:
        """Whether the base model is an encoder; None if it isn't known."""
        if self.bundle is not None:
            return self.bundle.chain.is_encoder
        return {"CAUSAL_LM": False, "FEATURE_EXTRACTION": True}.get(str(self.config.get("task_type")))

    @property
    def has_own_head(self) -> bool:
        """Whether the model includes the layers of the checkpoint's own classification head."""
        if self.bundle is not None:
            return self.bundle.pooling == OWN_HEAD
        return self.is_encoder is not True

    @property
    def scale(self) -> float:
        """Factor of the product of both matrices, for modules without a scale of their own."""
        alpha, rank = float(self.config["lora_alpha"]), int(self.config["r"])
        return lora_scale(alpha, rank, bool(self.config.get("use_rslora")))

    @property
    def chat_template(self) -> Path | None:
        """File of the chat template that the adapter was trained with; None if there is none."""
        folders = [self.bundle.tokenizer] if self.bundle is not None else []
        paths = [folder / CHAT_TEMPLATE_FILE for folder in (*folders, self.folder)]
        return next((path for path in paths if path.is_file()), None)

    @property
    def head(self) -> Path | None:
        """File of a trained encoder's classification head; None if there is none."""
        path = self.folder / HEAD
        return path if path.is_file() else None

    @property
    def head_layer(self) -> str:
        """Layer of the checkpoint's own head that a trained head replaces; empty if there is none."""
        block = mapping(self.bundle.manifest.get("head")) if self.bundle is not None else {}
        saved = self.config.get("modules_to_save") or [block.get("layer") or ""]
        return str(saved[0])

    @property
    def own_head(self) -> dict[str, Array] | None:
        """The trained head, if it is for the classes of the checkpoint's own head; else None."""
        if self.head is None or not self.head_layer:
            return None
        head = read_arrays(self.head)
        is_for_own_classes = self.bundle is None or len(head["bias"]) == len(self.bundle.labels)
        return head if is_for_own_classes else None


def read_trained(config: PublishConfig) -> TrainedAdapter:
    """Find and check the adapter, and its bundle if there is one.

    Raises:
        PrgeError: there is no adapter, it is damaged, or it doesn't fit the bundle.
    """
    folder = find_adapter(Path(config.source))
    run = find_run(folder)
    check_links(run or folder)  # published files must not lead to private ones
    tuning = find_tuning(Path(config.source))
    bundle = _find_bundle(config.bundle or (tuning.bundle if tuning else None), run)
    adapter = read_lora(folder)
    if bundle is not None:
        # Only checks that the adapter fits: the folder's own values are published.
        read_compatible_adapter(folder, bundle.chain.modules, bundle.adapter, generates=True)
    settings = read_config(folder)
    model = bundle.manifest.get("model", {}) if bundle is not None else {}
    recorded = base_from_manifest(model) or base_from_peft(settings)
    base = recorded
    # The hub id of the recorded model means its recorded commit.
    if config.model and not (recorded and recorded.revision and recorded.name == config.model):
        base = BaseModel(config.model)
    if base is None:
        raise ConfigError(
            "The base model isn't known:",
            [f"neither a bundle nor {folder / CONFIG} names it"],
            remedy="Give --model or --bundle.",
            code="base-unknown",
        )
    if config.revision is not None:
        base = BaseModel(base.name, config.revision)
    return TrainedAdapter(folder, run, bundle, adapter, settings, base, recorded)


def load_base(trained: TrainedAdapter) -> LoadedModel:
    """Load the base model in float32, and check that the adapter was trained on it.

    Raises:
        BundleError: the model doesn't exist, or is another one.
    """
    from server_export.checkpoint.loading import load_model
    from server_export.quiet_libraries import quiet_libraries

    quiet_libraries()
    remedy = "Give the base model with --model."
    base, pooled = trained.base, trained.is_encoder
    try:
        if base is trained.recorded:
            loaded = base.load(pooled=pooled, own_head=trained.has_own_head)
        else:
            loaded = load_model(
                base.name, pooled=pooled, revision=base.revision, own_head=trained.has_own_head
            )
    except BundleError as error:
        raise BundleError(
            f"Cannot load the base model: {as_clause(error.what)}.", remedy=remedy, code="base-not-loadable"
        ) from None
    problems = model_problems(loaded, trained.bundle.manifest.get("model", {})) if trained.bundle else []
    if not problems:
        problems = _layer_problems(loaded.model, trained.adapter.modules)
    if not problems and trained.bundle is not None:
        problems = _record_problems(loaded, trained)
    elif not problems and trained.recorded is not None:
        problems = content_problems(loaded, trained.recorded.sha256)
    if problems:
        raise BundleError(
            f"{trained.base.name} is not the model that the adapter was trained on: " + "; ".join(problems),
            remedy=remedy,
            code="another-base",
        )
    return loaded


def _layer_problems(model: Any, modules: Sequence[AdaptedModule]) -> list[str]:
    """Return a sentence for each adapted layer that the model lacks, or has in another shape."""
    layers = dict(model.named_modules())
    problems = []
    for module in modules:
        weight = getattr(layers.get(module.name), "weight", None)
        if weight is None:
            problems.append(f"it has no layer {module.name}")
        elif sorted(weight.shape) != sorted((module.out_features, module.in_features)):
            problems.append(
                f"{module.name} has a weight {list(weight.shape)}, the adapter is for "
                f"{[module.out_features, module.in_features]}"
            )
    return problems


def _record_problems(loaded: LoadedModel, trained: TrainedAdapter) -> list[str]:
    """Return why a model is not the one that a bundle was exported from; empty if it is or may be."""
    recorded = trained.recorded
    if recorded is None or trained.base == recorded:
        return []
    if recorded.sha256 is None or loaded.sha256 is None:
        return [f"it can't be compared with {recorded.name}, since there are no hashes of both"]
    return content_problems(loaded, recorded.sha256)


def load_peft(loaded: LoadedModel, trained: TrainedAdapter) -> Any:
    """Load the adapter onto the base model with PEFT, and check that all its values are there.

    Raises:
        AdapterError: PEFT adapts other layers, or loads other values.
    """
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(loaded.model, str(trained.folder))
    layers = {
        name.removeprefix(PREFIX): module.lora_B["default"].weight.detach().numpy()
        for name, module in model.named_modules()
        if hasattr(module, "lora_B") and "default" in module.lora_B
    }
    needed = trained.adapter.lora_b
    problems = [f"PEFT adapts {name}, the adapter doesn't" for name in sorted(layers.keys() - needed.keys())]
    problems += [f"PEFT doesn't adapt {name}" for name in sorted(needed.keys() - layers.keys())]
    problems += [
        f"PEFT has other values for {name}"
        for name, values in needed.items()
        if name in layers and not np.array_equal(layers[name], values)
    ]
    if problems:
        raise AdapterError(
            f"PEFT doesn't load {trained.folder} as it was trained:",
            problems,
            remedy="Please report the problem with the name of the model.",
            code="peft-differs",
        )
    return model.eval()


def _find_bundle(named: Path | None, run: Path | None) -> Bundle | None:
    """Open the bundle that the user named, or else the run's own bundle; None if that doesn't exist."""
    if named is not None:
        return open_bundle(named)
    if run is None:
        return None
    try:
        path = read_bundle_path(run / RUN_CONFIG)
    except (OSError, DocumentError):
        return None
    with suppress(RunError):  # the folder of a tuning may have no bundle yet
        if path is not None and (resolve_bundle(path) / MANIFEST).is_file():
            return open_bundle(path)
    return None
