"""`prge export`: exports a model as a bundle that a device can train.

trace without weights -> cut into blocks -> compare with the model -> calibrate int4 layers -> lower every
block type -> write every block's weights -> verify in the engine -> write the manifest
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prge.errors import RunError
from prge.formats.adapter import adapter_size
from prge.model_spec import AdaptedModule, ModelSpec
from prge.system.atomic import check_writable_folder, new_folder
from prge.system.memory import release_freed_memory
from prge.system.threads import set_passive_wait_policy
from server_export.check.estimation import check_resources, estimate_source, print_estimate
from server_export.progress import stage
from server_export.settings import ExportConfig

if TYPE_CHECKING:
    from prge.data.tokenization.tokenizer import Tokenizer
    from server_export.calibrate.calibration import Calibration
    from server_export.check.model import ModelComparison
    from server_export.model.chain import ModelChain
    from server_export.source import ExportSource
    from server_export.trace.passes import Changes

__all__ = ["ExportConfig", "export", "main"]

# Folder of calibrated codes inside an unfinished bundle; removed when the weights are written.
_CODES = ".codes"
# Types of GGUF tensors that are not quantized.
_FLOATS = ("F32", "F16", "BF16", "F64")


def main(argv: Sequence[str]) -> int:
    """Run `prge export`; return the exit code."""
    from prge.cli.settings import parse_settings

    set_passive_wait_policy()
    config = parse_settings(
        ExportConfig,
        argv,
        "prge export",
    )
    export(config)
    return 0


def export(config: ExportConfig) -> Path:
    """Export a model as a bundle; return the bundle's folder.

    Raises:
        PrgeError: the settings or the model can't be used, or a program does not compute what the model does.
            No bundle is written in that case.
    """
    from server_export.checkpoint.random_models import with_random_model

    out = Path(config.out)
    if out.exists() and not config.overwrite:
        raise RunError(
            f"{out} already exists.",
            remedy="Choose another folder or pass --overwrite.",
            code="folder-exists",
        )
    check_writable_folder(out.parent)
    with with_random_model(config) as resolved:
        return _export(resolved, out)


def _export(config: ExportConfig, out: Path) -> Path:
    """Write the bundle in `out`, for settings whose random model, if any, has been made."""
    from server_export.lower.chain import check_operators
    from server_export.pipeline import describe_changes
    from server_export.source import open_source
    from server_export.trace.passes import Changes
    from server_export.trace.positions import resolve_context_length

    source = open_source(config)
    _print_text_part(source)
    _print_gguf(source)
    estimated = estimate_source(config, source)
    print_estimate(estimated)
    check_resources(estimated, out.parent, config.memory)
    with new_folder(out, overwrite=config.overwrite) as folder:
        source = source.with_weights()
        _print_head(source)
        tokenizer, entry = _tokenizer(config, source)
        context = resolve_context_length(source.loaded, config.context, source.longest)
        if config.init == "eva":
            with stage("directions") as note:
                source = _init_from_rows(config, source, tokenizer, context, note)
        # Tracing renames the adapted layers and cuts the head.
        _print_targets(config, source)
        rows = _calibration_rows(config, source, tokenizer)
        changes = Changes() if config.explain else None
        with stage("tracing") as note:
            chain = _trace(config, source, context, changes)
            check_operators(chain, config.roles)
            note(
                f"{len(chain.blocks)} blocks of {len(chain.block_types)} types; "
                f"{chain.quantization.describe()}"
            )
        if changes is not None:
            print(describe_changes(changes))
        _print_bos_hint(config, source, tokenizer)
        _print_missing_eos(source, entry)
        comparison = _compare(config, chain)
        calibration = _calibrate(config, chain, rows, folder) if rows else None
        manifest = _write(config, folder, source, tokenizer, entry, context, chain, calibration, comparison)
    _summarize(out, manifest)
    return out


def _trace(config: ExportConfig, source: ExportSource, context: int, changes: Changes | None) -> ModelChain:
    """Return the model as a chain of blocks; raises a Refusal if the model is not a causal decoder."""
    from server_export.check.model import check_causal
    from server_export.check.transformers_forward import refuse_if_transformers_fails

    with refuse_if_transformers_fails(source.loaded):
        try:
            return source.chain(config.quantize, context, changes)
        except Exception:
            if source.loaded.is_decoder:
                check_causal(config.model, config.revision, source.files)
            raise


def _tokenizer(config: ExportConfig, source: ExportSource) -> tuple[Any, dict[str, Any]]:
    """Return the tokenizer with the chat template of the settings, and the manifest's entry for it."""
    from server_export.checkpoint.chat_templates import set_chat_template
    from server_export.checkpoint.files import eos_token_ids
    from server_export.checkpoint.loading import vocabulary_size
    from server_export.checkpoint.tokenization import load_tokenizer, tokenizer_manifest

    loaded = source.loaded
    tokenizer = load_tokenizer(config.model, loaded.revision)
    set_chat_template(tokenizer, config.chat_template, config.prepend_bos)
    # Templates are rendered in a forked child, which must happen before torch starts threads.
    entry = tokenizer_manifest(
        tokenizer, config.prepend_bos, vocabulary_size(loaded.model), eos_token_ids(source.files)
    )
    return tokenizer, entry


def _init_from_rows(
    config: ExportConfig, source: ExportSource, tokenizer: Any, context: int, note: Callable[[str], None]
) -> ExportSource:
    """Return the source with an adapter that is initialized from rows (`--init eva`)."""
    from server_export.check.transformers_forward import refuse_if_transformers_fails
    from server_export.model.eva import eva_adapter
    from server_export.model.row_tokens import row_tokens

    assert config.init_rows is not None
    on_device_tokenizer, model = _row_inputs(config, source, tokenizer)
    rows = row_tokens(
        config.init_rows,
        config.init_task,
        config.init_tokens,
        seed=config.seed,
        tokenizer=on_device_tokenizer,
        model=model,
    )
    with refuse_if_transformers_fails(source.loaded):
        chain = source.rank1_chain("fp32", context)
    start, explained = eva_adapter(source.start, chain, rows, config.spread_ranks)
    shares = sorted(explained.values())
    ranks = sorted(map(len, start.lora_a.values()))
    note(
        f"of {sum(map(len, rows)):,} tokens; ranks {ranks[0]} to {ranks[-1]} capture "
        f"{shares[0]:.0%} to {shares[-1]:.0%} of the layers' inputs"
    )
    return source.starting_from(start)


def _row_inputs(config: ExportConfig, source: ExportSource, tokenizer: Any) -> tuple[Tokenizer, ModelSpec]:
    """Return the device's tokenizer and a model with room for any row, for building examples of rows."""
    from server_export.checkpoint.loading import vocabulary_size
    from server_export.checkpoint.tokenization import device_tokenizer

    costs, vocabulary = source.costs, vocabulary_size(source.loaded.model)
    model = ModelSpec(source.readout, costs.width, vocabulary, source.longest, costs.modules)
    return device_tokenizer(tokenizer, config.prepend_bos, vocabulary), model


def _calibration_rows(config: ExportConfig, source: ExportSource, tokenizer: Any) -> list[Sequence[int]]:
    """Return the tokens of the rows that int4 layers are calibrated on; empty if none are calibrated."""
    from server_export.calibrate.rows import fill_up_rows
    from server_export.model.row_tokens import row_tokens

    if config.quantize != "8da4w" or config.rounding == "nearest":
        return []
    on_device_tokenizer, model = _row_inputs(config, source, tokenizer)
    rows: list[Sequence[int]] = []
    if config.calibration_rows is not None:
        rows += row_tokens(
            config.calibration_rows,
            config.calibration_task,
            config.calibration_tokens,
            seed=config.seed,
            tokenizer=on_device_tokenizer,
            model=model,
        )
    else:
        print(
            "hint: int4 weights are calibrated on a neutral text; for better results, pass rows like your "
            "own with --calibration-rows"
        )
    rows = fill_up_rows(rows, on_device_tokenizer, config.calibration_tokens, source.longest)
    if not rows:
        print(
            "note: the tokenizer has no tokens for the calibration text, so int4 weights are rounded to the "
            "nearest"
        )
    return rows


def _calibrate(
    config: ExportConfig, chain: ModelChain, rows: Sequence[Sequence[int]], folder: Path
) -> Calibration:
    from server_export.calibrate.calibration import calibrate

    calibration = calibrate(chain, rows, config.weight_bits, folder / _CODES)
    release_freed_memory()
    return calibration


def _compare(config: ExportConfig, chain: ModelChain) -> ModelComparison:
    from server_export.check.model import compare_with_model

    with stage("comparing") as note:
        comparison = compare_with_model(chain, config.model, config.revision)
        note(comparison.describe())
    release_freed_memory()
    return comparison


def _write(
    config: ExportConfig,
    folder: Path,
    source: ExportSource,
    tokenizer: Any,
    tokenizer_entry: Mapping[str, Any],
    context: int,
    chain: ModelChain,
    calibration: Calibration | None,
    comparison: ModelComparison,
) -> dict[str, Any]:
    """Fill a bundle's folder; return its manifest."""
    from prge.formats import chain as manifest
    from server_export.bundle import write_bundle
    from server_export.check.chain import verify_chain
    from server_export.lower.cache import ProgramCache
    from server_export.lower.chain import lower_chain

    if calibration is not None:
        chain = calibration.chain
    is_encoder = source.readout == "pooled"
    bounds = manifest.Bounds.for_rows(source.longest, context, is_encoder, chain.tables.has_recurrence)
    with stage("lowering") as note:
        cache = ProgramCache() if config.cache else None
        lowered = lower_chain(chain, folder, config.roles, bounds, note, cache)
    release_freed_memory()
    with stage("verifying") as note:
        verification = replace(verify_chain(chain, lowered, folder, config.quantize), model=comparison)
        differences = ", ".join(f"{role} {part:.2g}" for role, part in verification.differences.items())
        note(f"engine and graphs differ by {differences} (allowed {verification.tolerance:.2g})")
    if calibration is not None:
        calibration.remove_codes()
    description = manifest.Chain(
        readout=source.readout,
        pooling=_pooling(config, source),
        width=_width(source),
        vocabulary_size=chain.vocabulary_size,
        modules=chain.modules,
        bounds=bounds,
        tables=lowered.tables,
        shared=lowered.shared,
        programs=lowered.programs,
        blocks=lowered.blocks,
    )
    with stage("writing"):
        return write_bundle(
            folder,
            config,
            source.start,
            description,
            source.costs,
            tokenizer,
            tokenizer_entry,
            chain.quantization if calibration is None else calibration.report,
            verification,
            {} if calibration is None else calibration.table(lowered.layers),
        )


def _pooling(config: ExportConfig, source: ExportSource) -> str:
    """Return how hidden states are pooled for the head."""
    from prge.formats.chain import OWN_HEAD
    from server_export.checkpoint.files import stored_pooling

    if source.loaded.classifier is not None:
        return OWN_HEAD
    stored = stored_pooling(source.files) if source.readout == "pooled" else None
    return config.pooling or stored or "mean"


def _width(source: ExportSource) -> int:
    """Return the width of the hidden states after the last block."""
    classifier = source.loaded.classifier
    return int(source.loaded.config.hidden_size if classifier is None else classifier.linear.in_features)


def _print_text_part(source: ExportSource) -> None:
    """Print that only the text part of a multimodal checkpoint is exported."""
    loaded = source.loaded
    if loaded.part_of is not None:
        print(
            f"{loaded.name_or_path} is a multimodal checkpoint ({loaded.part_of}). Only its text part "
            f"({loaded.config.model_type}) is exported; the weights for images, audio or video are ignored."
        )


def _print_gguf(source: ExportSource) -> None:
    """Print that the weights of a GGUF file are dequantized."""
    if (gguf := source.loaded.source) and any(ggml_type not in _FLOATS for ggml_type in gguf["types"]):
        print(
            f"The weights of {source.loaded.name_or_path} are quantized ({gguf['description']}). They are "
            "dequantized, and the dequantized model is exported."
        )


def _print_head(source: ExportSource) -> None:
    """Print what happens to a checkpoint's own classification head."""
    loaded = source.loaded
    if (classifier := loaded.classifier) is not None:
        print(
            f"{loaded.name_or_path} has its own classification head. It scores rows of its classes "
            f"({', '.join(classifier.labels)}); for other classes, a run fits a new head."
        )
        return
    architectures = getattr(loaded.config, "architectures", None) or []
    if not loaded.is_decoder and any("Classification" in name for name in architectures):
        print(
            f"The classification head of {loaded.name_or_path} is not exported. Instead, a run fits a "
            "linear head on pooled hidden states to its rows."
        )


def _print_targets(config: ExportConfig, source: ExportSource) -> None:
    """Print that all linear layers are adapted because the architecture has no usual target modules."""
    from server_export.adapter.layers import usual_target_modules

    is_chosen = config.target_modules or config.start_adapter
    if not is_chosen and usual_target_modules(source.loaded.model) is None:
        print(
            f"PEFT has no default target modules for {source.loaded.config.model_type}, so all linear "
            f"layers of the blocks are adapted ({len(source.start.lora_a)} layers). Use --target-modules to "
            "choose others."
        )


def _print_bos_hint(config: ExportConfig, source: ExportSource, tokenizer: Any) -> None:
    from server_export.checkpoint.tokenization import adds_bos

    loaded = source.loaded
    model_has_bos = getattr(loaded.config, "bos_token_id", None) is not None
    if config.prepend_bos == "auto" and loaded.is_decoder and model_has_bos and not adds_bos(tokenizer):
        print(
            "hint: the model defines a begin-of-sequence token, but its tokenizer does not add it. If the "
            "model was trained with the token, export with --prepend-bos always"
        )


def _print_missing_eos(source: ExportSource, entry: Mapping[str, Any]) -> None:
    """Print that a generating model has no end-of-sequence token."""
    if source.loaded.is_decoder and entry["eos_token_id"] is None:
        what = "only the chat template's end of a message" if entry["stop_token_ids"] else "only --max-tokens"
        print(
            "note: the tokenizer, config.json and generation_config.json of "
            f"{source.loaded.name_or_path} define no end-of-sequence token. The model can't learn to end its "
            f"texts, and {what} ends its answers. To train the end of texts, set eos_token_id in config.json"
        )


def _summarize(out: Path, manifest: dict[str, Any]) -> None:
    files, chain = manifest["files"], manifest["chain"]
    size = sum(entry["bytes"] for entry in files.values())
    programs = sum(files[program["file"]]["bytes"] for program in chain["programs"])
    trainable = adapter_size([AdaptedModule(**module) for module in chain["modules"]])
    tokens, chunk = chain["bounds"]["tokens"], chain["bounds"]["chunk"]
    print(f"{out}: {size / 1e6:.1f} MB, of which programs {programs / 1e6:.2f} MB")
    print(
        f"  {len(chain['modules'])} adapted layers, {trainable:,} trainable parameters; rows of up to "
        f"{tokens} tokens{f' in chunks of {chunk}' if chunk < tokens else ''}; readout {chain['readout']}; "
        "roles "
        f"{', '.join(dict.fromkeys(role for program in chain['programs'] for role in program['methods']))}"
    )
