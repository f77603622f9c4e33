"""`prge publish`: a trained adapter leaves the toolkit.

peft      the adapter as a PEFT folder: `PeftModel.from_pretrained(base, folder)`
merged    the base model with the adapter merged into its weights, a Hugging Face folder
program   an ExecuTorch inference program of the merged model, with its manifest
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import safetensors

from prge.adapter import CONFIG, WEIGHTS, Adapter, read_arrays, read_peft
from prge.atomic import new_folder
from prge.bundle import MANIFEST, TOKENIZER, Bundle, open_bundle
from prge.checkpoint import HEAD
from prge.contract import LORA_B_PREFIX, AdaptedModule
from prge.engine import Array
from prge.errors import AdapterError, BundleError, ConfigError, RunError
from server_export.model_card import CardFacts, model_card, read_run

if TYPE_CHECKING:
    from server_export.loading import LoadedModel

CARD = "README.md"
DESCRIPTION = "Give a trained adapter to PEFT, merge it into its model, or make an inference program of both."
# What a published folder has one of; no other folder is ever replaced.
_PUBLISHED = (CONFIG, "config.json", MANIFEST)
_LORA_A = ".lora_A.weight"
# Eager and engine differ by 1e-5 in float32; another model of the same shapes by far more.
_TOLERANCE = 1e-3
_ROWS = 8


@dataclass(frozen=True)
class PublishConfig:
    """Publish a trained adapter."""

    source: Path
    """Run folder, checkpoint or PEFT folder with the trained adapter."""

    out: Path
    """Folder to write."""

    bundle: Path | None = None
    """Bundle that the adapter was trained with; without it the one that the run's config.yaml names."""

    model: str | None = None
    """Folder or hub id of the base model; without it the one that bundle or adapter name."""

    revision: str | None = None
    """Revision of a hub model; without it the one that the bundle names."""

    format: Literal["peft", "merged", "program"] = "peft"
    """peft: an adapter for PEFT; merged: a Hugging Face model; program: an ExecuTorch inference program."""

    sequence_length: int | None = None
    """program: tokens that it takes; without it the bundle's length."""

    quantize: str | None = None
    """program: quantization of the frozen weights; without it the bundle's."""

    overwrite: bool = False
    """Replace the folder if it was published before."""

    def __post_init__(self) -> None:
        problems = []
        if self.format != "program":
            problems += [
                f"{name} is for the format program, but format is {self.format}"
                for name in ("sequence_length", "quantize")
                if getattr(self, name) is not None
            ]
        if self.sequence_length is not None and self.sequence_length < 1:
            problems.append(f"sequence_length is {self.sequence_length}, must be at least 1")
        if problems:
            raise ConfigError("these settings can't be used:", problems)


@dataclass(frozen=True)
class Trained:
    """A trained adapter with what is known of it.

    `folder` is its PEFT folder, `run` its run folder or None; `config` is its `adapter_config.json`.
    """

    folder: Path
    run: Path | None
    bundle: Bundle | None
    modules: tuple[AdaptedModule, ...]
    adapter: Adapter
    config: dict[str, Any]
    base: str
    revision: str | None

    @property
    def is_encoder(self) -> bool | None:
        """Whether the base model is an encoder, None where nothing tells."""
        if self.bundle is not None:
            return self.bundle.contract.is_encoder
        return {"CAUSAL_LM": False, "FEATURE_EXTRACTION": True}.get(str(self.config.get("task_type")))

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return float(self.config["lora_alpha"]) / int(self.config["r"])

    @property
    def head(self) -> Path | None:
        """The classification head of a trained encoder."""
        path = self.folder / HEAD
        return path if path.is_file() else None


def main(argv: Sequence[str]) -> int:
    """Run `prge publish`; returns the exit code."""
    from prge.settings import parse_settings

    config = parse_settings(
        PublishConfig, argv, "prge publish", positional=["source"], description=DESCRIPTION
    )
    print(publish(config))
    return 0


def publish(config: PublishConfig) -> Path:
    """Write the folder that `config` describes, whole or not at all; returns it.

    Raises:
        PrgeError: the adapter, bundle or base model can't be used or don't belong together; `out` exists, or
            can't be written.
    """
    out = Path(config.out)
    trained = read_trained(config)
    _check_out(out, config, trained)
    loaded = None
    if config.format != "peft" or config.model is not None:
        loaded = load_base(trained)
    try:
        if config.format == "peft":
            _publish_peft(out, config, trained)
        elif config.format == "merged":
            assert loaded is not None
            _publish_merged(out, config, trained, loaded)
        else:
            assert loaded is not None
            _publish_program(out, config, trained, loaded)
    except safetensors.SafetensorError as error:  # its writer has no OSError for a full disk
        raise RunError(
            f"{out} can't be written: {error}", remedy="free some storage, or write to another place"
        ) from None
    return out


def read_trained(config: PublishConfig) -> Trained:
    """Find and check the adapter, and its bundle where there is one.

    Raises:
        PrgeError: there is no adapter, it is damaged, or not of the bundle.
    """
    folder, run = find_adapter(Path(config.source))
    bundle = _find_bundle(config.bundle, run)
    modules = bundle.contract.modules if bundle is not None else adapter_modules(folder)
    adapter = read_peft(folder, modules, bundle.adapter if bundle is not None else None)
    settings = json.loads((folder / CONFIG).read_bytes())
    model = bundle.manifest.get("model", {}) if bundle is not None else {}
    base = config.model or model.get("name_or_path") or settings.get("base_model_name_or_path")
    if not base:
        raise ConfigError(
            "the base model isn't known:",
            [f"neither a bundle nor {folder / CONFIG} names it"],
            remedy="give --model or --bundle",
        )
    revision = config.revision or (
        None if config.model else model.get("revision") or settings.get("revision")
    )
    return Trained(folder, run, bundle, modules, adapter, settings, str(base), revision)


def find_adapter(source: Path) -> tuple[Path, Path | None]:
    """PEFT folder and run folder of what a user named: a run, its `final/`, a checkpoint, a PEFT folder."""
    if (source / CONFIG).is_file():
        absolute = source.resolve()
        above = absolute.parent if absolute.name == "final" else absolute.parent.parent
        return source, above if (above / "journal.jsonl").is_file() else None
    if (source / "final" / CONFIG).is_file():
        return source / "final", source
    if (source / "journal.jsonl").is_file():
        raise RunError(
            f"{source} is a run without a result",
            remedy=f"finish it with `prge run --resume {source}`, or give one of its checkpoints",
        )
    raise AdapterError(
        f"{source} holds no trained adapter:",
        [f"neither {CONFIG} nor final/{CONFIG} is there"],
        remedy="give a run folder, a checkpoint or a PEFT folder",
    )


def adapter_modules(folder: Path) -> tuple[AdaptedModule, ...]:
    """The layers that a PEFT folder adapts, by name."""
    prefix = "base_model.model."
    arrays = read_arrays(folder / WEIGHTS)
    modules = []
    for key, lora_a in arrays.items():
        lora_b = arrays.get(key.replace(_LORA_A, ".lora_B.weight"))
        if key.endswith(_LORA_A) and lora_a.ndim == 2 and lora_b is not None and lora_b.ndim == 2:
            name = key.removeprefix(prefix).removesuffix(_LORA_A)
            modules.append(AdaptedModule(name, lora_a.shape[0], lora_a.shape[1], lora_b.shape[0]))
    if not modules:
        raise AdapterError(f"{folder} is no LoRA adapter:", [f"{WEIGHTS} has no pair of lora_A and lora_B"])
    return tuple(modules)


def load_base(trained: Trained) -> LoadedModel:
    """Load the base model in float32 and check that it is the one that the adapter was trained on.

    Raises:
        BundleError: it isn't there, or is another model.
    """
    from server_export.loading import load_model, parameter_count
    from server_export.quiet import quiet_libraries

    quiet_libraries()
    remedy = "give the base model with --model"
    try:
        loaded = load_model(trained.base, pooled=trained.is_encoder, revision=trained.revision)
    except BundleError as error:
        raise BundleError(f"the base model can't be loaded: {error.what}", remedy=remedy) from None
    known = trained.bundle.manifest.get("model", {}) if trained.bundle is not None else {}
    seen = {
        "architecture": type(loaded.model).__name__,
        "model_type": loaded.config.model_type,
        "parameters": parameter_count(loaded.model),
    }
    problems = [
        f"its {name} is {value}, the bundle's {known[name]}"
        for name, value in seen.items()
        if known.get(name) is not None and known[name] != value
    ]
    if not problems:
        problems = _layer_problems(loaded.model, trained.modules)
    if not problems and trained.bundle is not None:
        problems = _answer_problems(loaded, trained, trained.bundle)
    if problems:
        raise BundleError(
            f"{trained.base} is not the model that the adapter was trained on: " + "; ".join(problems),
            remedy=remedy,
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


def _answer_problems(loaded: LoadedModel, trained: Trained, bundle: Bundle) -> list[str]:
    """Whether model and program answer alike without adapter, on random rows."""
    import torch

    from server_export.inference import padded_tokens
    from server_export.program import example_inputs
    from server_export.verify import run_program

    contract = bundle.contract
    inputs = dict(zip((spec.name for spec in contract.inputs), example_inputs(contract, 7, 0.0), strict=True))
    if contract.is_encoder:
        inputs["tokens"] = padded_tokens(inputs["tokens"], inputs["attention_mask"], loaded.config)
    answers = run_program(bundle.program, tuple(inputs.values()))
    rows = min(_ROWS, contract.rows)
    with torch.no_grad():
        # One row at a time: full logits of all rows may be gigabytes.
        expected = torch.cat([_model_answer(loaded, bundle, inputs, row) for row in range(rows)])
    scheme = bundle.manifest.get("quantization", {}).get("scheme", "fp32")
    return answer_problems(answers[:rows].numpy(), expected.numpy(), scheme)


def answer_problems(answers: Array, expected: Array, scheme: str) -> list[str]:
    """What a program's answers say against a model's; quantized ones differ a little from the right's."""
    difference = np.abs(answers - expected)
    if scheme == "fp32":
        alike = bool(difference.max() <= _TOLERANCE * max(1.0, float(np.abs(expected).max())))
    else:
        # Answers of an unrelated model are off by 1.1 standard deviations in the mean.
        alike = bool(difference.mean() <= 0.6 * expected.std())
    return [] if alike else [f"its answers differ from the bundle's program by up to {difference.max():.3g}"]


def _model_answer(loaded: LoadedModel, bundle: Bundle, inputs: Mapping[str, Any], row: int) -> Any:
    """The plain model's answer to one row of a program's inputs."""
    from server_export import readout

    one = {name: value[row : row + 1] for name, value in inputs.items() if not name.startswith(LORA_B_PREFIX)}
    if bundle.contract.is_encoder:
        mask = one["attention_mask"]
        output = loaded.model(input_ids=one["tokens"], attention_mask=mask, return_dict=True)
        first = bundle.manifest.get("readout", {}).get("pooling") == "first"
        return (readout.pool_first if first else readout.pool_mean)(output.last_hidden_state, mask)
    logits = loaded.model(input_ids=one["tokens"], return_dict=True).logits[:, one["positions"][0]]
    labels = list(bundle.contract.label_tokens)
    return readout.log_probabilities(logits[..., labels] if labels else logits, one["targets"])


def load_peft(loaded: LoadedModel, trained: Trained) -> Any:
    """The base model with the adapter on it, loaded by PEFT itself and compared number by number.

    Raises:
        AdapterError: PEFT puts the adapter on other layers, or leaves some of its values out.
    """
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(loaded.model, str(trained.folder))
    prefix = "base_model.model."
    layers = {
        name.removeprefix(prefix): module.lora_B["default"].weight.detach().numpy()
        for name, module in model.named_modules()
        if hasattr(module, "lora_B") and "default" in module.lora_B
    }
    needed = trained.adapter.named()
    problems = [f"PEFT adapts {name}, the adapter doesn't" for name in sorted(layers.keys() - needed.keys())]
    problems += [f"PEFT doesn't adapt {name}" for name in sorted(needed.keys() - layers.keys())]
    problems += [
        f"PEFT has other values for {name}"
        for name, values in needed.items()
        if name in layers and not np.array_equal(layers[name].T, values)
    ]
    if problems:
        raise AdapterError(
            f"PEFT doesn't load {trained.folder} as it was trained:",
            problems,
            remedy="please report it with the name of the model",
        )
    return model.eval()


def _publish_peft(out: Path, config: PublishConfig, trained: Trained) -> None:
    with new_folder(out, overwrite=config.overwrite) as folder:
        _write_json(folder / CONFIG, {**trained.config, **_base_names(trained)})
        shutil.copyfile(trained.folder / WEIGHTS, folder / WEIGHTS)
        _copy_head(folder, trained)
        _write_card(folder, out, config, trained)


def _publish_merged(out: Path, config: PublishConfig, trained: Trained, loaded: LoadedModel) -> None:
    merged = _merge(loaded, trained)
    with new_folder(out, overwrite=config.overwrite) as folder:
        merged.save_pretrained(folder)
        _save_tokenizer(folder, trained)
        _copy_head(folder, trained)
        _write_card(folder, out, config, trained)


def _publish_program(out: Path, config: PublishConfig, trained: Trained, loaded: LoadedModel) -> None:
    import torch

    from server_export.inference import InferenceSpec, attach_fixed, build_inference, write_manifest
    from server_export.loading import LoadedModel

    manifest = trained.bundle.manifest if trained.bundle is not None else {}
    scheme = config.quantize or manifest.get("quantization", {}).get("scheme", "fp32")
    length = config.sequence_length
    if length is None:
        if trained.bundle is None:
            raise ConfigError(
                "the program's length isn't known:", ["there is no bundle"], remedy="give --sequence-length"
            )
        length = trained.bundle.contract.sequence_length
    if scheme == "fp32":
        model = _merge(loaded, trained)
        loaded = LoadedModel(model, loaded.name_or_path, loaded.revision, loaded.is_decoder)
    else:
        arrays = read_arrays(trained.folder / WEIGHTS)
        lora_a, lora_b = (
            {
                module.name: torch.from_numpy(arrays[f"base_model.model.{module.name}.lora_{letter}.weight"])
                for module in trained.modules
            }
            for letter in ("A", "B")
        )
        attach_fixed(loaded.model, lora_a, lora_b, trained.scale)
    pooling = manifest.get("readout", {}).get("pooling") or "mean"
    head = read_arrays(trained.head) if trained.head is not None else None
    with new_folder(out, overwrite=config.overwrite) as folder:
        spec = InferenceSpec(length, trained.modules, pooling, scheme)
        built = build_inference(folder, loaded, spec, head)
        if trained.bundle is not None:
            shutil.copytree(trained.bundle.tokenizer, folder / TOKENIZER)
        else:
            _write_bundle_tokenizer(folder / TOKENIZER, trained)
        _write_card(folder, out, config, trained)
        facts = {
            "model": manifest.get("model", {"name_or_path": trained.base, "revision": trained.revision}),
            "lora": {"alpha_over_rank": trained.scale, "merged": scheme == "fp32"},
            "readout": {"pooling": pooling if not loaded.is_decoder else None},
            "tokenizer": manifest.get("tokenizer"),
        }
        write_manifest(folder, built, facts)


def _merge(loaded: LoadedModel, trained: Trained) -> Any:
    """The base model with the adapter in its weights, as transformers made it."""
    from transformers import AutoConfig

    merged = load_peft(loaded, trained).merge_and_unload()
    # Switched off for exporting; who generates with the model wants its own setting.
    merged.config.use_cache = getattr(
        AutoConfig.from_pretrained(trained.base, revision=trained.revision), "use_cache", True
    )
    return merged


def _save_tokenizer(folder: Path, trained: Trained) -> None:
    from server_export.tokenization import load_tokenizer

    load_tokenizer(trained.base, trained.revision).save_pretrained(folder)


def _write_bundle_tokenizer(folder: Path, trained: Trained) -> None:
    from server_export.tokenization import load_tokenizer, write_tokenizer

    write_tokenizer(load_tokenizer(trained.base, trained.revision), folder)


def _copy_head(folder: Path, trained: Trained) -> None:
    if trained.head is not None:
        shutil.copyfile(trained.head, folder / HEAD)


def _base_names(trained: Trained) -> dict[str, Any]:
    """How PEFT names the base model; a revision only where a hub id has one."""
    names: dict[str, Any] = {"base_model_name_or_path": trained.base, "inference_mode": True}
    if trained.revision is not None and not Path(trained.base).is_dir():
        names["revision"] = trained.revision
    return names


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_card(folder: Path, out: Path, config: PublishConfig, trained: Trained) -> None:
    manifest = trained.bundle.manifest if trained.bundle is not None else {}
    facts = CardFacts(
        name=out.resolve().name,
        format=config.format,
        base=trained.base,
        base_is_folder=Path(trained.base).is_dir(),
        is_encoder=bool(trained.is_encoder),
        pooling=manifest.get("readout", {}).get("pooling"),
        has_head=trained.head is not None,
        adapter=trained.config,
        run=read_run(trained.run),
        bundle_sha256=trained.bundle.sha256 if trained.bundle is not None else None,
    )
    (folder / CARD).write_text(model_card(facts), encoding="utf-8")


def _find_bundle(given: Path | None, run: Path | None) -> Bundle | None:
    """The bundle that was named, or the run's own where it still is."""
    if given is not None:
        return open_bundle(given)
    if run is None:
        return None
    import yaml

    try:
        settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        path = Path(settings["bundle"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return None
    return open_bundle(path) if (path / MANIFEST).is_file() else None


def _check_out(out: Path, config: PublishConfig, trained: Trained) -> None:
    """Refuse a folder that must not be written or replaced, before anything takes time."""
    target = out.resolve()
    run = trained.run.resolve() if trained.run is not None else None
    used = [
        trained.folder,
        Path(config.source),
        *([trained.bundle.folder] if trained.bundle is not None else []),
    ]
    used += [Path(trained.base)] if Path(trained.base).is_dir() else []
    for folder in (path.resolve() for path in used):
        if target == folder or target in folder.parents or (folder in target.parents and folder != run):
            raise RunError(
                f"{out} and {folder} lie in each other", remedy="give another folder for the output"
            )
    if not out.exists() and not out.is_symlink():
        return
    if not config.overwrite:
        raise RunError(f"{out} exists already", remedy="give another folder, or --overwrite")
    content = {path.name for path in out.iterdir()} if out.is_dir() and not out.is_symlink() else None
    if content is None or (content and not (CARD in content and content & set(_PUBLISHED))):
        raise RunError(f"{out} was not published before, so it is not replaced", remedy="give another folder")
