"""`prge publish`: a trained adapter leaves the toolkit.

peft      the adapter as a PEFT folder: `PeftModel.from_pretrained(base, folder)`
merged    the base model with the adapter merged into its weights, a Hugging Face folder
program   an encoder with the adapter as an ExecuTorch inference program, with its manifest
llm       a decoder with it as a program that generates, for ExecuTorch's LLM runner and its apps
gguf      the adapter as a file for llama.cpp's `--lora`
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
from safetensors.numpy import save_file

from prge.errors import BundleError, ConfigError, RunError
from prge.files.bundle import MANIFEST, TOKENIZER
from prge.files.documents import mapping
from prge.files.peft import (
    CONFIG,
    HEAD,
    WEIGHTS,
    head_weights,
    read_arrays,
    read_lora,
    write_config,
)
from prge.host.atomic import new_folder
from prge.rows.tokenization.tokenizer import CHAT_TEMPLATE_FILE, bundle_tokenizer, read_chat_template
from server_export.checkpoint.base import base_of
from server_export.publishing.hub import find_repository, push
from server_export.publishing.model_card import CardFacts, model_card, read_run, read_step
from server_export.publishing.settings import PublishConfig
from server_export.publishing.trained import Trained, load_base, load_peft, read_trained

if TYPE_CHECKING:
    from server_export.checkpoint.loading import LoadedModel
    from server_export.quantize.quantization import BundleLayers

Facts = dict[str, Any]
CARD, GGUF = "README.md", "adapter.gguf"
# What a published folder has one of; no other folder is ever replaced.
_PUBLISHED = (CONFIG, "config.json", MANIFEST, GGUF)


def main(argv: Sequence[str]) -> int:
    """Run `prge publish`; returns the exit code."""
    from prge.verbs.settings import parse_settings

    config = parse_settings(PublishConfig, argv, "prge publish", positional=["source"])
    repository = None
    if config.push is not None:
        repository = find_repository(config.push, config.public, config.overwrite)
    out = publish(config)
    print(out if repository is None else push(out, repository))
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
        with new_folder(out, overwrite=config.overwrite) as folder:
            facts = _FORMATS[config.format](folder, config, trained, loaded)
            _write_card(folder, out, config, trained, loaded, facts.get("tokenizer"))
            if facts:
                from server_export.bundle import write_manifest

                write_manifest(folder, facts)
    except safetensors.SafetensorError as error:  # its writer has no OSError for a full disk
        raise RunError(
            f"{out} can't be written: {error}",
            remedy="free some storage, or write to another place",
            code="write-failed",
        ) from None
    return out


def _write_peft(folder: Path, config: PublishConfig, trained: Trained, loaded: LoadedModel | None) -> Facts:
    plain = {name: value for name, value in trained.config.items() if name != "revision"}
    # Who reads the hub has no use for a place on this machine.
    plain |= {**trained.base.in_peft(tells_place=config.push is None), "inference_mode": True}
    head = trained.own_head
    if head is None:
        shutil.copyfile(trained.folder / WEIGHTS, folder / WEIGHTS)
    else:
        plain["modules_to_save"] = [trained.head_layer]
        with_head = {**read_arrays(trained.folder / WEIGHTS), **head_weights(trained.head_layer, head)}
        save_file(with_head, folder / WEIGHTS, metadata={"format": "pt"})
    write_config(folder, plain)
    _copy_beside(folder, trained)
    return {}


def _write_merged(folder: Path, config: PublishConfig, trained: Trained, loaded: LoadedModel) -> Facts:
    if config.weights != "original":
        _give_trained_weights(loaded, trained)
    _with_head(_merge(loaded, trained), loaded, trained).save_pretrained(folder)
    _tokenizer(trained).save_pretrained(folder)
    _copy_beside(folder, trained)
    return {}


def _write_encoder(folder: Path, config: PublishConfig, trained: Trained, loaded: LoadedModel) -> Facts:
    from server_export.checkpoint.tokenization import write_tokenizer
    from server_export.publishing.encoder import EncoderSpec, build_encoder

    if loaded.is_decoder:
        raise BundleError(
            f"{loaded.name_or_path} can't be published as program: it is a decoder",
            remedy="publish it as llm instead, which generates",
            code="program-of-decoder",
        )
    bundle, scheme = trained.bundle, _scheme(config, trained)
    length = config.sequence_length
    if length is None:
        if bundle is None:
            raise ConfigError(
                "the program's length isn't known:",
                ["there is no bundle"],
                remedy="give --sequence-length",
                code="length-unknown",
            )
        length = bundle.chain.bounds.tokens
    pooling = (bundle.pooling if bundle is not None else None) or "mean"
    head = read_arrays(trained.head) if trained.head is not None else None
    merged = replace(loaded, model=_merge(loaded, trained))
    spec = EncoderSpec(length, pooling, scheme, head, _layers(trained, scheme))
    built = build_encoder(folder, merged, read_lora(trained.folder), spec)
    if bundle is not None:
        shutil.copytree(bundle.tokenizer, folder / TOKENIZER)
    else:
        write_tokenizer(_tokenizer(trained), folder / TOKENIZER)
    return {
        **built.to_json(),
        **_origin(trained, scheme),
        "readout": {"pooling": pooling},
        "tokenizer": _in_manifest(trained, "tokenizer"),
    }


def _write_llm(folder: Path, config: PublishConfig, trained: Trained, loaded: LoadedModel) -> Facts:
    from server_export.publishing.llm import LlmSpec, build_llm, check_generates, ends_of
    from server_export.publishing.runner_tokenizer import write_runner_tokenizer
    from server_export.trace.positions import longest_row

    scheme = _scheme(config, trained)
    check_generates(loaded)
    length = longest_row(loaded, config.sequence_length)
    if config.sequence_length is None and trained.bundle is not None:
        length = max(length, trained.bundle.chain.bounds.tokens)
    tokenizer = _tokenizer(trained)
    block = _in_manifest(trained, "tokenizer") or {}
    begins, stops = bool(block.get("prepend_bos")), block.get("stop_token_ids", [])
    loaded = _tuned(loaded, trained, scheme)
    written = write_runner_tokenizer(tokenizer, folder, begins)
    spec = LlmSpec(length, scheme, *ends_of(loaded.model, tokenizer, stops))
    built = build_llm(folder, loaded, spec, _layers(trained, scheme))
    return {**built.to_json(), **_origin(trained, scheme), "tokenizer": written}


def _write_gguf(folder: Path, config: PublishConfig, trained: Trained, loaded: LoadedModel) -> Facts:
    from server_export.publishing.gguf_adapter import write_gguf

    write_gguf(folder / GGUF, read_lora(trained.folder), loaded.config)
    return {}


# What writes a format's files; it returns what its manifest says, nothing where it has none.
_FORMATS: dict[str, Callable[[Path, PublishConfig, Trained, Any], Facts]] = {
    "peft": _write_peft,
    "merged": _write_merged,
    "program": _write_encoder,
    "llm": _write_llm,
    "gguf": _write_gguf,
}


def _scheme(config: PublishConfig, trained: Trained) -> str:
    """Quantization of the frozen weights: what was asked for, else the bundle's."""
    return config.quantize or (trained.bundle.quantization if trained.bundle is not None else None) or "fp32"


def _layers(trained: Trained, scheme: str) -> BundleLayers:
    """How the bundle rounded its layers, where they are to have the same scheme."""
    from server_export.quantize.bundle_layers import layers_of

    bundle = trained.bundle
    return layers_of(bundle if bundle is not None and bundle.quantization == scheme else None)


def _tuned(loaded: LoadedModel, trained: Trained, scheme: str) -> LoadedModel:
    """The model with the adapter, in its float weights or beside those that are to be quantized."""
    from server_export.publishing.module_quantization import attach_fixed

    if scheme == "fp32":
        return replace(loaded, model=_merge(loaded, trained))
    attach_fixed(loaded.model, read_lora(trained.folder))
    return loaded


def _origin(trained: Trained, scheme: str) -> dict[str, Any]:
    """What a manifest says of the model and adapter that a program is made of."""
    return {
        "model": {**(_in_manifest(trained, "model") or {}), **trained.base.in_manifest()},
        "lora": {"alpha_over_rank": trained.scale, "merged": scheme == "fp32"},
    }


def _in_manifest(trained: Trained, block: str) -> Any:
    return trained.bundle.manifest.get(block) if trained.bundle is not None else None


def _merge(loaded: LoadedModel, trained: Trained) -> Any:
    """The base model with the adapter in its weights, as transformers made it."""
    from server_export.checkpoint.loading import read_use_cache

    merged = load_peft(loaded, trained).merge_and_unload()
    # Switched off for exporting; who generates with the model wants its own setting.
    merged.config.use_cache = read_use_cache(trained.base.name, trained.base.revision)
    return merged


def _give_trained_weights(loaded: LoadedModel, trained: Trained) -> None:
    """Give a model the frozen weights that the adapter was trained against, as floats, in place.

    Raises:
        BundleError: experts, whose weights are no layers', are quantized.
    """
    from server_export.quantize.bundle_layers import layers_of
    from server_export.quantize.quantization import round_base

    bundle = trained.bundle
    if bundle is None or bundle.quantization is None:
        return
    if any(bundle.chain.is_expert(number) for number in range(len(bundle.chain.blocks))):
        raise BundleError(
            f"the quantized experts of {loaded.name_or_path} can't be written as floats",
            remedy="give --weights original; what was trained against these answers a little differently",
            code="quantized-experts",
        )
    model: Any = loaded.model
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    was_tied = head is not None and head.weight is table.weight
    round_base(model, bundle.quantization, layers_of(bundle))
    if was_tied and head.weight is not table.weight:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}


def _with_head(merged: Any, loaded: LoadedModel, trained: Trained) -> Any:
    """A model whose own classification head lacks its last layer, with that, or with a trained one."""
    from server_export.publishing.encoder import linear_of

    if loaded.classifier is None:
        return merged
    head = read_arrays(trained.head) if trained.head is not None else None
    linear = loaded.classifier.linear if head is None else linear_of(head)
    if linear.out_features != merged.config.num_labels:
        merged.config.num_labels = linear.out_features
    merged.set_submodule(loaded.classifier.layer, linear)
    return merged


def _tokenizer(trained: Trained) -> Any:
    """The base model's tokenizer, with the chat template that the adapter was trained with."""
    from server_export.checkpoint.tokenization import load_tokenizer

    tokenizer = load_tokenizer(trained.base.name, trained.base.revision)
    if trained.chat_template is not None:
        tokenizer.chat_template = read_chat_template(trained.chat_template)
    return tokenizer


def _copy_beside(folder: Path, trained: Trained) -> None:
    """What belongs to the adapter and is no part of PEFT's: an encoder's head, the chat template."""
    if trained.head is not None:
        shutil.copyfile(trained.head, folder / HEAD)
    if trained.chat_template is not None:
        shutil.copyfile(trained.chat_template, folder / CHAT_TEMPLATE_FILE)


def _write_card(
    folder: Path,
    out: Path,
    config: PublishConfig,
    trained: Trained,
    loaded: LoadedModel | None,
    tokenizer: Mapping[str, Any] | None,
) -> None:
    run = read_run(trained.run)
    model = mapping(_in_manifest(trained, "model"))
    facts = CardFacts(
        name=out.resolve().name,
        format=config.format,
        base=trained.base,
        is_encoder=bool(trained.is_encoder),
        pooling=trained.bundle.pooling if trained.bundle is not None else None,
        has_head=trained.head is not None,
        head_layer=trained.head_layer,
        has_own_classes=trained.own_head is not None,
        adapter=trained.config,
        run=run,
        step=read_step(trained.folder, run),
        bundle_sha256=trained.bundle.sha256 if trained.bundle is not None else None,
        num_bos=(tokenizer or {}).get("num_bos", 0),
        begin=_begin(trained),
        has_chat_template=(folder / CHAT_TEMPLATE_FILE).is_file(),
        is_part="text_part_of" in model,
        key_mapping=dict(mapping(model.get("key_mapping"))),
        source=mapping(model.get("source")) or (loaded.source if loaded else trained.base.source),
        weights=config.weights or "trained",
        scheme=_scheme(config, trained) if config.format in ("program", "llm") else None,
        trained_scheme=trained.bundle.quantization if trained.bundle is not None else None,
    )
    (folder / CARD).write_text(model_card(facts), encoding="utf-8")


def _begin(trained: Trained) -> str:
    """The token that texts began with in training, where the tokenizer doesn't put it there itself."""
    block = mapping(_in_manifest(trained, "tokenizer"))
    if trained.bundle is None or not block.get("prepend_bos"):
        return ""
    return bundle_tokenizer(trained.bundle).special_tokens.get("bos_token", "")


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
                f"{out} and {folder} lie in each other",
                remedy="give another folder for the output",
                code="out-within-input",
            )
    if not out.exists() and not out.is_symlink():
        return
    if not config.overwrite:
        raise RunError(
            f"{out} exists already", remedy="give another folder, or --overwrite", code="folder-exists"
        )
    content = {path.name for path in out.iterdir()} if out.is_dir() and not out.is_symlink() else None
    if content is None or (content and not (CARD in content and content & set(_PUBLISHED))):
        raise RunError(
            f"{out} was not published before, so it is not replaced",
            remedy="give another folder",
            code="out-not-published",
        )
