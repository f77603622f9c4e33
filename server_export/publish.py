"""`prge publish`: writes a trained adapter in a format that other software loads.

peft      the adapter as a PEFT folder: `PeftModel.from_pretrained(base, folder)`
merged    the base model with the adapter merged into its weights, as a Hugging Face folder
program   an encoder with the adapter as an ExecuTorch inference program, with its manifest
llm       a decoder with the adapter as a generating program, for ExecuTorch's LLM runner and its apps
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

from prge.data.tokenization.tokenizer import CHAT_TEMPLATE_FILE, load_bundle_tokenizer, read_chat_template
from prge.errors import BundleError, ConfigError, RunError
from prge.formats.bundle import MANIFEST, TOKENIZER
from prge.formats.documents import mapping
from prge.formats.peft import (
    CONFIG,
    HEAD,
    WEIGHTS,
    head_weights,
    read_arrays,
    read_lora,
    write_config,
)
from prge.system.atomic import new_folder
from server_export.checkpoint.base_model import base_of
from server_export.publishing.hub import find_repository, push
from server_export.publishing.model_card import CardFacts, model_card, read_adapter_step, read_run_summary
from server_export.publishing.settings import PublishConfig
from server_export.publishing.trained import TrainedAdapter, load_base, load_peft, read_trained

if TYPE_CHECKING:
    from server_export.checkpoint.loading import LoadedModel
    from server_export.quantize.quantization import BundleLayers

Facts = dict[str, Any]
CARD, GGUF = "README.md", "adapter.gguf"
# A folder is replaced only if it contains one of these files, and a model card.
_PUBLISHED = (CONFIG, "config.json", MANIFEST, GGUF)


def main(argv: Sequence[str]) -> int:
    """Run `prge publish`; return the exit code."""
    from prge.cli.settings import parse_settings

    config = parse_settings(PublishConfig, argv, "prge publish", positional=["source"])
    repository = None
    if config.push is not None:
        repository = find_repository(config.push, config.public, config.overwrite)
    out = publish(config)
    print(out if repository is None else push(out, repository))
    return 0


def publish(config: PublishConfig) -> Path:
    """Publish a trained adapter; return the folder, which is written completely or not at all.

    Raises:
        PrgeError: the adapter, bundle or base model can't be used or don't belong together, or `out` exists
            or can't be written.
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
    except safetensors.SafetensorError as error:  # raised by its writer instead of OSError for a full disk
        raise RunError(
            f"Cannot write {out}: {error}.",
            remedy="Free some storage, or choose another folder.",
            code="write-failed",
        ) from None
    return out


def _write_peft(
    folder: Path, config: PublishConfig, trained: TrainedAdapter, loaded: LoadedModel | None
) -> Facts:
    plain = {name: value for name, value in trained.config.items() if name != "revision"}
    # A local path would be useless on the Hub.
    plain |= {**trained.base.to_peft(with_path=config.push is None), "inference_mode": True}
    head = trained.own_head
    if head is None:
        shutil.copyfile(trained.folder / WEIGHTS, folder / WEIGHTS)
    else:
        plain["modules_to_save"] = [trained.head_layer]
        with_head = {**read_arrays(trained.folder / WEIGHTS), **head_weights(trained.head_layer, head)}
        save_file(with_head, folder / WEIGHTS, metadata={"format": "pt"})
    write_config(folder, plain)
    _copy_extra_files(folder, trained)
    return {}


def _write_merged(folder: Path, config: PublishConfig, trained: TrainedAdapter, loaded: LoadedModel) -> Facts:
    if config.weights != "original":
        _round_weights(loaded, trained)
    _with_head(_merge(loaded, trained), loaded, trained).save_pretrained(folder)
    _tokenizer(trained).save_pretrained(folder)
    _copy_extra_files(folder, trained)
    return {}


def _write_encoder(
    folder: Path, config: PublishConfig, trained: TrainedAdapter, loaded: LoadedModel
) -> Facts:
    from server_export.checkpoint.tokenization import write_tokenizer
    from server_export.publishing.encoder import EncoderSpec, build_encoder

    if loaded.is_decoder:
        raise BundleError(
            f"Cannot publish {loaded.name_or_path} as `program`: it is a decoder.",
            remedy="Publish it with --format llm, which can generate.",
            code="program-of-decoder",
        )
    bundle, scheme = trained.bundle, _scheme(config, trained)
    length = config.sequence_length
    if length is None:
        if bundle is None:
            raise ConfigError(
                "The sequence length of the program is unknown:",
                ["there is no bundle that defines it"],
                remedy="Give --sequence-length.",
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


def _write_llm(folder: Path, config: PublishConfig, trained: TrainedAdapter, loaded: LoadedModel) -> Facts:
    from server_export.publishing.llm import LlmSpec, bos_and_eos_ids, build_llm, check_can_generate
    from server_export.publishing.runner_tokenizer import write_runner_tokenizer
    from server_export.trace.positions import resolve_sequence_length

    scheme = _scheme(config, trained)
    check_can_generate(loaded)
    length = resolve_sequence_length(loaded, config.sequence_length)
    if config.sequence_length is None and trained.bundle is not None:
        length = max(length, trained.bundle.chain.bounds.tokens)
    tokenizer = _tokenizer(trained)
    block = _in_manifest(trained, "tokenizer") or {}
    begins, stops = bool(block.get("prepend_bos")), block.get("stop_token_ids", [])
    loaded = _with_adapter(loaded, trained, scheme)
    written = write_runner_tokenizer(tokenizer, folder, begins)
    spec = LlmSpec(length, scheme, *bos_and_eos_ids(loaded.model, tokenizer, stops))
    built = build_llm(folder, loaded, spec, _layers(trained, scheme))
    return {**built.to_json(), **_origin(trained, scheme), "tokenizer": written}


def _write_gguf(folder: Path, config: PublishConfig, trained: TrainedAdapter, loaded: LoadedModel) -> Facts:
    from server_export.publishing.gguf_adapter import write_gguf

    write_gguf(folder / GGUF, read_lora(trained.folder), loaded.config)
    return {}


# The functions that write the files of a format. They return the content of its manifest, if it has one.
_FORMATS: dict[str, Callable[[Path, PublishConfig, TrainedAdapter, Any], Facts]] = {
    "peft": _write_peft,
    "merged": _write_merged,
    "program": _write_encoder,
    "llm": _write_llm,
    "gguf": _write_gguf,
}


def _scheme(config: PublishConfig, trained: TrainedAdapter) -> str:
    """Return the quantization of the frozen weights: the setting's, or else the bundle's."""
    return config.quantize or (trained.bundle.quantization if trained.bundle is not None else None) or "fp32"


def _layers(trained: TrainedAdapter, scheme: str) -> BundleLayers:
    """Return the bundle's quantized layers if they have the requested quantization."""
    from server_export.quantize.bundle_layers import rounded_layers_of

    bundle = trained.bundle
    return rounded_layers_of(bundle if bundle is not None and bundle.quantization == scheme else None)


def _with_adapter(loaded: LoadedModel, trained: TrainedAdapter, scheme: str) -> LoadedModel:
    """Return the model with the adapter, merged unless its weights are quantized later."""
    from server_export.publishing.module_quantization import attach_adapter

    if scheme == "fp32":
        return replace(loaded, model=_merge(loaded, trained))
    attach_adapter(loaded.model, read_lora(trained.folder))
    return loaded


def _origin(trained: TrainedAdapter, scheme: str) -> dict[str, Any]:
    """Return the manifest's entries about the model and the adapter of a program."""
    return {
        "model": {**(_in_manifest(trained, "model") or {}), **trained.base.to_manifest()},
        "lora": {"alpha_over_rank": trained.scale, "merged": scheme == "fp32"},
    }


def _in_manifest(trained: TrainedAdapter, block: str) -> Any:
    return trained.bundle.manifest.get(block) if trained.bundle is not None else None


def _merge(loaded: LoadedModel, trained: TrainedAdapter) -> Any:
    """Return the base model of transformers with the adapter merged into its weights."""
    from server_export.checkpoint.loading import read_use_cache

    merged = load_peft(loaded, trained).merge_and_unload()
    # The export disabled the KV cache; generation with the published model needs the original setting.
    merged.config.use_cache = read_use_cache(trained.base.name, trained.base.revision)
    return merged


def _round_weights(loaded: LoadedModel, trained: TrainedAdapter) -> None:
    """Replace a model's frozen weights in place by the rounded values that the adapter was trained with.

    Raises:
        BundleError: the model has quantized experts, whose weights are not those of linear layers.
    """
    from server_export.quantize.bundle_layers import rounded_layers_of
    from server_export.quantize.quantization import round_base

    bundle = trained.bundle
    if bundle is None or bundle.quantization is None:
        return
    if any(bundle.chain.is_expert(number) for number in range(len(bundle.chain.blocks))):
        raise BundleError(
            f"Cannot write the quantized experts of {loaded.name_or_path} as floats.",
            remedy="Pass --weights original; the outputs then differ slightly from those in training.",
            code="quantized-experts",
        )
    model: Any = loaded.model
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    was_tied = head is not None and head.weight is table.weight
    round_base(model, bundle.quantization, rounded_layers_of(bundle))
    if was_tied and head.weight is not table.weight:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}


def _with_head(merged: Any, loaded: LoadedModel, trained: TrainedAdapter) -> Any:
    """Return a classifier with its last layer restored, either its own or a trained one."""
    from server_export.publishing.encoder import make_head

    if loaded.classifier is None:
        return merged
    head = read_arrays(trained.head) if trained.head is not None else None
    linear = loaded.classifier.linear if head is None else make_head(head)
    if linear.out_features != merged.config.num_labels:
        merged.config.num_labels = linear.out_features
    merged.set_submodule(loaded.classifier.layer, linear)
    return merged


def _tokenizer(trained: TrainedAdapter) -> Any:
    """Return the base model's tokenizer with the chat template that the adapter was trained with."""
    from server_export.checkpoint.tokenization import load_tokenizer

    tokenizer = load_tokenizer(trained.base.name, trained.base.revision)
    if trained.chat_template is not None:
        tokenizer.chat_template = read_chat_template(trained.chat_template)
    return tokenizer


def _copy_extra_files(folder: Path, trained: TrainedAdapter) -> None:
    """Copy the files that PEFT does not define: an encoder's head, and the chat template."""
    if trained.head is not None:
        shutil.copyfile(trained.head, folder / HEAD)
    if trained.chat_template is not None:
        shutil.copyfile(trained.chat_template, folder / CHAT_TEMPLATE_FILE)


def _write_card(
    folder: Path,
    out: Path,
    config: PublishConfig,
    trained: TrainedAdapter,
    loaded: LoadedModel | None,
    tokenizer: Mapping[str, Any] | None,
) -> None:
    run = read_run_summary(trained.run)
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
        step=read_adapter_step(trained.folder, run),
        bundle_sha256=trained.bundle.sha256 if trained.bundle is not None else None,
        num_bos=(tokenizer or {}).get("num_bos", 0),
        bos_token=_begin_token(trained),
        has_chat_template=(folder / CHAT_TEMPLATE_FILE).is_file(),
        is_text_part="text_part_of" in model,
        key_mapping=dict(mapping(model.get("key_mapping"))),
        source=mapping(model.get("source")) or (loaded.source if loaded else trained.base.source),
        weights=config.weights or "trained",
        scheme=_scheme(config, trained) if config.format in ("program", "llm") else None,
        trained_scheme=trained.bundle.quantization if trained.bundle is not None else None,
    )
    (folder / CARD).write_text(model_card(facts), encoding="utf-8")


def _begin_token(trained: TrainedAdapter) -> str:
    """Return the token that training prepended to texts, unless the tokenizer adds it itself."""
    block = mapping(_in_manifest(trained, "tokenizer"))
    if trained.bundle is None or not block.get("prepend_bos"):
        return ""
    return load_bundle_tokenizer(trained.bundle).special_tokens.get("bos_token", "")


def _check_out(out: Path, config: PublishConfig, trained: TrainedAdapter) -> None:
    """Refuse an output folder that must not be written or replaced, before any work is done."""
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
                f"The output {out} and the input {folder} contain each other.",
                remedy="Choose another folder for the output.",
                code="out-within-input",
            )
    if not out.exists() and not out.is_symlink():
        return
    if not config.overwrite:
        raise RunError(
            f"{out} already exists.",
            remedy="Choose another folder or pass --overwrite.",
            code="folder-exists",
        )
    content = {path.name for path in out.iterdir()} if out.is_dir() and not out.is_symlink() else None
    if content is None or (content and not (CARD in content and content & set(_PUBLISHED))):
        raise RunError(
            f"{out} was not written by `prge publish`, so it is not replaced.",
            remedy="Choose another folder.",
            code="out-not-published",
        )
