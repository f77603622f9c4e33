"""`prge publish`: a trained adapter leaves the toolkit.

peft      the adapter as a PEFT folder: `PeftModel.from_pretrained(base, folder)`
merged    the base model with the adapter merged into its weights, a Hugging Face folder
program   an ExecuTorch inference program of the merged model, with its manifest
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors

from prge.atomic import new_folder
from prge.bundle import MANIFEST, TOKENIZER
from prge.checkpoint import HEAD
from prge.errors import ConfigError, RunError
from prge.peft import CONFIG, WEIGHTS, read_arrays, read_lora, write_config
from server_export.model.base import base_of
from server_export.publishing.model_card import CardFacts, model_card, read_run
from server_export.publishing.settings import PublishConfig
from server_export.publishing.trained import Trained, load_base, load_peft, read_trained

if TYPE_CHECKING:
    from server_export.model.loading import LoadedModel

CARD = "README.md"
DESCRIPTION = "Give a trained adapter to PEFT, merge it into its model, or make an inference program of both."
# What a published folder has one of; no other folder is ever replaced.
_PUBLISHED = (CONFIG, "config.json", MANIFEST)


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
    if config.format != "peft" or trained.base is not trained.recorded:
        loaded = load_base(trained)
        trained = replace(trained, base=base_of(loaded))
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


def _publish_peft(out: Path, config: PublishConfig, trained: Trained) -> None:
    with new_folder(out, overwrite=config.overwrite) as folder:
        plain = {name: value for name, value in trained.config.items() if name != "revision"}
        write_config(folder, {**plain, **trained.base.in_peft(), "inference_mode": True})
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
    from server_export.bundle import write_manifest
    from server_export.model.loading import LoadedModel
    from server_export.publishing.inference import InferenceSpec, attach_fixed, build_inference

    manifest = trained.bundle.manifest if trained.bundle is not None else {}
    scheme = config.quantize or (trained.bundle.quantization if trained.bundle is not None else None)
    scheme = scheme or "fp32"
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
        attach_fixed(loaded.model, read_lora(trained.folder))
    pooling = (trained.bundle.pooling if trained.bundle is not None else None) or "mean"
    head = read_arrays(trained.head) if trained.head is not None else None
    with new_folder(out, overwrite=config.overwrite) as folder:
        spec = InferenceSpec(length, pooling, scheme)
        built = build_inference(folder, loaded, spec, head)
        if trained.bundle is not None:
            shutil.copytree(trained.bundle.tokenizer, folder / TOKENIZER)
        else:
            _write_bundle_tokenizer(folder / TOKENIZER, trained)
        _write_card(folder, out, config, trained)
        facts = {
            **built.to_json(),
            "model": {**manifest.get("model", {}), **trained.base.in_manifest()},
            "lora": {"alpha_over_rank": trained.scale, "merged": scheme == "fp32"},
            "readout": {"pooling": pooling if not loaded.is_decoder else None},
            "tokenizer": manifest.get("tokenizer"),
        }
        write_manifest(folder, facts)


def _merge(loaded: LoadedModel, trained: Trained) -> Any:
    """The base model with the adapter in its weights, as transformers made it."""
    from server_export.model.loading import read_use_cache

    merged = load_peft(loaded, trained).merge_and_unload()
    # Switched off for exporting; who generates with the model wants its own setting.
    merged.config.use_cache = read_use_cache(trained.base.name, trained.base.revision)
    return merged


def _save_tokenizer(folder: Path, trained: Trained) -> None:
    from server_export.model.tokenization import load_tokenizer

    load_tokenizer(trained.base.name, trained.base.revision).save_pretrained(folder)


def _write_bundle_tokenizer(folder: Path, trained: Trained) -> None:
    from server_export.model.tokenization import load_tokenizer, write_tokenizer

    write_tokenizer(load_tokenizer(trained.base.name, trained.base.revision), folder)


def _copy_head(folder: Path, trained: Trained) -> None:
    if trained.head is not None:
        shutil.copyfile(trained.head, folder / HEAD)


def _write_card(folder: Path, out: Path, config: PublishConfig, trained: Trained) -> None:
    facts = CardFacts(
        name=out.resolve().name,
        format=config.format,
        base=trained.base,
        is_encoder=bool(trained.is_encoder),
        pooling=trained.bundle.pooling if trained.bundle is not None else None,
        has_head=trained.head is not None,
        adapter=trained.config,
        run=read_run(trained.run),
        bundle_sha256=trained.bundle.sha256 if trained.bundle is not None else None,
    )
    (folder / CARD).write_text(model_card(facts), encoding="utf-8")


def _check_out(out: Path, config: PublishConfig, trained: Trained) -> None:
    """Refuse a folder that must not be written or replaced, before anything takes time."""
    target = out.resolve()
    run = trained.run.resolve() if trained.run is not None else None
    used = [
        trained.folder,
        Path(config.source),
        *([trained.bundle.folder] if trained.bundle is not None else []),
    ]
    used += [Path(trained.base.name)] if Path(trained.base.name).is_dir() else []
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
