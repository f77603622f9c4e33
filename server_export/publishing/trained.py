"""A trained adapter and its base model, found and checked before anything is published."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prge.engine import Array
from prge.errors import AdapterError, BundleError, ConfigError, RunError
from prge.files.bundle import MANIFEST, Bundle, open_bundle
from prge.files.chain import OWN_HEAD
from prge.files.documents import DocumentError, mapping
from prge.files.own_settings import check_links
from prge.files.peft import (
    CONFIG,
    HEAD,
    PREFIX,
    PeftAdapter,
    find_adapter,
    lora_scale,
    read_arrays,
    read_compatible_adapter,
    read_config,
    read_lora,
    run_of,
)
from prge.files.run_folder import CONFIG as RUN_CONFIG
from prge.files.tuned import bundle_at, bundle_in, tuning_at
from prge.model_spec import AdaptedModule
from prge.rows.tokenization.tokenizer import CHAT_TEMPLATE_FILE
from server_export.checkpoint.base import (
    BaseModel,
    base_in_manifest,
    base_in_peft,
    content_problems,
    model_problems,
)

if TYPE_CHECKING:
    from server_export.checkpoint.loading import LoadedModel
    from server_export.publishing.settings import PublishConfig


@dataclass(frozen=True)
class Trained:
    """A trained adapter with what is known of it.

    `folder` is its PEFT folder, `run` its run folder or None; `config` is its `adapter_config.json`. The base
    model is the recorded one, if the user named no other.
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
        """Whether the base model is an encoder, None where nothing tells."""
        if self.bundle is not None:
            return self.bundle.chain.is_encoder
        return {"CAUSAL_LM": False, "FEATURE_EXTRACTION": True}.get(str(self.config.get("task_type")))

    @property
    def has_own_head(self) -> bool:
        """Whether the layers of the checkpoint's own classification head belong to the model."""
        if self.bundle is not None:
            return self.bundle.pooling == OWN_HEAD
        return self.is_encoder is not True

    @property
    def scale(self) -> float:
        """What the product of the matrices of modules that no pattern names is multiplied by."""
        alpha, rank = float(self.config["lora_alpha"]), int(self.config["r"])
        return lora_scale(alpha, rank, bool(self.config.get("use_rslora")))

    @property
    def chat_template(self) -> Path | None:
        """The template of the messages that it was trained on, where its bundle or its folder has one."""
        folders = [self.bundle.tokenizer] if self.bundle is not None else []
        paths = [folder / CHAT_TEMPLATE_FILE for folder in (*folders, self.folder)]
        return next((path for path in paths if path.is_file()), None)

    @property
    def head(self) -> Path | None:
        """The classification head of a trained encoder."""
        path = self.folder / HEAD
        return path if path.is_file() else None

    @property
    def head_layer(self) -> str:
        """The layer of the checkpoint's own head that a trained one takes the place of, if it has one."""
        block = mapping(self.bundle.manifest.get("head")) if self.bundle is not None else {}
        saved = self.config.get("modules_to_save") or [block.get("layer") or ""]
        return str(saved[0])

    @property
    def own_head(self) -> dict[str, Array] | None:
        """The trained head, if it is one for the classes of the checkpoint's own."""
        if self.head is None or not self.head_layer:
            return None
        head = read_arrays(self.head)
        is_own = self.bundle is None or len(head["bias"]) == len(self.bundle.labels)
        return head if is_own else None


def read_trained(config: PublishConfig) -> Trained:
    """Find and check the adapter, and its bundle where there is one.

    Raises:
        PrgeError: there is no adapter, it is damaged, or not of the bundle.
    """
    folder = find_adapter(Path(config.source))
    run = run_of(folder)
    check_links(run or folder)  # what lies there is given away
    tuning = tuning_at(Path(config.source))
    bundle = _find_bundle(config.bundle or (tuning.bundle if tuning else None), run)
    found = read_lora(folder)
    if bundle is not None:
        # Whether it fits; published is what the folder holds.
        read_compatible_adapter(folder, bundle.chain.modules, bundle.adapter, generates=True)
    settings = read_config(folder)
    model = bundle.manifest.get("model", {}) if bundle is not None else {}
    recorded = base_in_manifest(model) or base_in_peft(settings)
    base = recorded
    # A hub id that is the recorded one means the recorded commit.
    if config.model and not (recorded and recorded.revision and recorded.name == config.model):
        base = BaseModel(config.model)
    if base is None:
        raise ConfigError(
            "the base model isn't known:",
            [f"neither a bundle nor {folder / CONFIG} names it"],
            remedy="give --model or --bundle",
            code="base-unknown",
        )
    if config.revision is not None:
        base = BaseModel(base.name, config.revision)
    return Trained(folder, run, bundle, found, settings, base, recorded)


def load_base(trained: Trained) -> LoadedModel:
    """Load the base model in float32 and check that it is the one that the adapter was trained on.

    Raises:
        BundleError: it isn't there, or is another model.
    """
    from server_export.checkpoint.loading import load_model
    from server_export.quiet import quiet_libraries

    quiet_libraries()
    remedy = "give the base model with --model"
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
            f"the base model can't be loaded: {error.what}", remedy=remedy, code="base-not-loadable"
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
    """Adapted layers that the model lacks, or has in another shape."""
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


def _record_problems(loaded: LoadedModel, trained: Trained) -> list[str]:
    """Whether a model is the one that a bundle was exported from, by hash, or by the revision of one name."""
    recorded = trained.recorded
    if recorded is None or trained.base == recorded:
        return []
    if recorded.sha256 is None or loaded.sha256 is None:
        return [f"nothing tells that it is {recorded.name}: their contents have no hashes to compare"]
    return content_problems(loaded, recorded.sha256)


def load_peft(loaded: LoadedModel, trained: Trained) -> Any:
    """The base model with the adapter on it, loaded by PEFT itself and compared number by number.

    Raises:
        AdapterError: PEFT puts the adapter on other layers, or leaves some of its values out.
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
            remedy="please report it with the name of the model",
            code="peft-differs",
        )
    return model.eval()


def _find_bundle(given: Path | None, run: Path | None) -> Bundle | None:
    """The bundle that was named, or the run's own where it still is."""
    if given is not None:
        return open_bundle(given)
    if run is None:
        return None
    try:
        path = bundle_in(run / RUN_CONFIG)
    except (OSError, DocumentError):
        return None
    with suppress(RunError):  # a tuning that has no bundle yet
        if path is not None and (bundle_at(path) / MANIFEST).is_file():
            return open_bundle(path)
    return None
