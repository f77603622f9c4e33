"""`prge export`: a model becomes a bundle that a device can train.

trace without weights -> cut into blocks -> compare with the model -> calibrate int4 layers -> lower every
kind -> write every block's weights -> verify in the engine -> write the manifest
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prge.errors import RunError
from prge.files.adapter import adapter_size
from prge.host.atomic import check_place, new_folder
from prge.host.threads import let_threads_sleep
from prge.model_spec import AdaptedModule, ModelSpec
from server_export.check.estimation import announce, check_room, estimate_of
from server_export.memory import give_back_freed
from server_export.settings import ExportConfig
from server_export.stage import stage

if TYPE_CHECKING:
    from prge.rows.tokenization.tokenizer import Tokenizer
    from server_export.calibrate.calibration import Calibration
    from server_export.check.model import ModelComparison
    from server_export.model.chain import ModelChain
    from server_export.source import Source
    from server_export.trace.passes import Changes

__all__ = ["ExportConfig", "export", "main"]

# Of one row for `--init eva`, such as candidates of a task; no call has them all.
# Within the folder of a bundle that is made, until its weights are written.
_CODES = ".codes"
# Types of GGUF files that were not rounded to codes.
_FLOATS = ("F32", "F16", "BF16", "F64")


def main(argv: Sequence[str]) -> int:
    """Run `prge export`; returns the exit code."""
    from prge.verbs.settings import parse_settings

    let_threads_sleep()
    config = parse_settings(
        ExportConfig,
        argv,
        "prge export",
    )
    export(config)
    return 0


def export(config: ExportConfig) -> Path:
    """Write the bundle that `config` describes; returns its folder.

    Raises:
        PrgeError: something can't be used, or a program doesn't compute what the model does; no bundle is
            written then.
    """
    from server_export.checkpoint.random_models import with_random_model

    out = Path(config.out)
    if out.exists() and not config.overwrite:
        raise RunError(
            f"{out} exists already", remedy="give another folder, or --overwrite", code="folder-exists"
        )
    check_place(out.parent)
    with with_random_model(config) as settled:
        return _export(settled, out)


def _export(config: ExportConfig, out: Path) -> Path:
    from server_export.lower.chain import check_operators
    from server_export.pipeline import explain
    from server_export.source import open_source
    from server_export.trace.passes import Changes
    from server_export.trace.positions import longest_context

    source = open_source(config)
    _tell_part(source)
    _describe_gguf(source)
    estimated = estimate_of(config, source)
    announce(estimated)
    check_room(estimated, out.parent, config.memory)
    with new_folder(out, overwrite=config.overwrite) as folder:
        source = source.with_weights()
        _tell_head(source)
        tokenizer, block = _tokenizer(config, source)
        context = longest_context(source.loaded, config.context, source.longest)
        if config.init == "eva":
            with stage("directions") as note:
                source = _from_rows(config, source, tokenizer, context, note)
        # Once the model is traced, its adapted layers have other names and its head is cut.
        _tell_targets(config, source)
        rows = _calibration_rows(config, source, tokenizer)
        changes = Changes() if config.explain else None
        with stage("tracing") as note:
            chain = _traced(config, source, context, changes)
            check_operators(chain, config.roles)
            note(f"{len(chain.blocks)} blocks of {len(chain.kinds)} kinds; {chain.quantization.describe()}")
        if changes is not None:
            print(explain(changes))
        _hint_about_bos(config, source, tokenizer)
        _tell_no_end(source, block)
        comparison = _compare(config, chain)
        calibration = _calibrated(config, chain, rows, folder) if rows else None
        manifest = _write(config, folder, source, tokenizer, block, context, chain, calibration, comparison)
    _summarize(out, manifest)
    return out


def _traced(config: ExportConfig, source: Source, context: int, changes: Changes | None) -> ModelChain:
    """The model's blocks; a model that no decoder is refused as such, whatever tracing raises of it."""
    from server_export.check.model import check_causal
    from server_export.check.own_forward import blame_own_forward

    with blame_own_forward(source.loaded):
        try:
            return source.chain(config.quantize, context, changes)
        except Exception:
            if source.loaded.is_decoder:
                check_causal(config.model, config.revision, source.files)
            raise


def _tokenizer(config: ExportConfig, source: Source) -> tuple[Any, dict[str, Any]]:
    """The model's tokenizer, with the template that the settings ask for, and the manifest's block of it."""
    from server_export.checkpoint.chat_templates import give_template
    from server_export.checkpoint.files import end_tokens
    from server_export.checkpoint.loading import vocabulary_size
    from server_export.checkpoint.tokenization import load_tokenizer, tokenizer_block

    loaded = source.loaded
    tokenizer = load_tokenizer(config.model, loaded.revision)
    give_template(tokenizer, config.chat_template, config.prepend_bos)
    # A template is read in a forked child: before torch has computed.
    block = tokenizer_block(
        tokenizer, config.prepend_bos, vocabulary_size(loaded.model), end_tokens(source.files)
    )
    return tokenizer, block


def _from_rows(
    config: ExportConfig, source: Source, tokenizer: Any, context: int, note: Callable[[str], None]
) -> Source:
    """The same model with an adapter from rows."""
    from server_export.check.own_forward import blame_own_forward
    from server_export.model.eva import principal_start
    from server_export.model.row_tokens import row_tokens

    assert config.init_rows is not None
    reader, model = _reader(config, source, tokenizer)
    rows = row_tokens(
        config.init_rows,
        config.init_task,
        config.init_tokens,
        seed=config.seed,
        tokenizer=reader,
        model=model,
    )
    with blame_own_forward(source.loaded):
        thin = source.thin_chain("fp32", context)
    start, explained = principal_start(source.start, thin, rows, config.spread_ranks)
    shares = sorted(explained.values())
    ranks = sorted(map(len, start.lora_a.values()))
    note(
        f"of {sum(map(len, rows)):,} tokens; ranks {ranks[0]} to {ranks[-1]} explain "
        f"{shares[0]:.0%} to {shares[-1]:.0%} of what a layer sees"
    )
    return source.starting_from(start)


def _reader(config: ExportConfig, source: Source, tokenizer: Any) -> tuple[Tokenizer, ModelSpec]:
    """What rows are read with: the device's tokenizer, and a model with room for any row."""
    from server_export.checkpoint.loading import vocabulary_size
    from server_export.checkpoint.tokenization import on_device

    costs, vocabulary = source.costs, vocabulary_size(source.loaded.model)
    model = ModelSpec(source.readout, costs.width, vocabulary, source.longest, costs.modules)
    return on_device(tokenizer, config.prepend_bos, vocabulary), model


def _calibration_rows(config: ExportConfig, source: Source, tokenizer: Any) -> list[Sequence[int]]:
    """Tokens of the rows that int4 layers are calibrated on; none where they aren't."""
    from server_export.calibrate.rows import filled_up
    from server_export.model.row_tokens import row_tokens

    if config.quantize != "8da4w" or config.rounding == "nearest":
        return []
    reader, model = _reader(config, source, tokenizer)
    rows: list[Sequence[int]] = []
    if config.calibration_rows is not None:
        rows += row_tokens(
            config.calibration_rows,
            config.calibration_task,
            config.calibration_tokens,
            seed=config.seed,
            tokenizer=reader,
            model=model,
        )
    else:
        print("hint: int4 is calibrated on a neutral text; better on rows like yours: --calibration-rows")
    rows = filled_up(rows, reader, config.calibration_tokens, source.longest)
    if not rows:
        print("note: the tokenizer makes no tokens of a text: int4 weights are rounded to the nearest")
    return rows


def _calibrated(
    config: ExportConfig, chain: ModelChain, rows: Sequence[Sequence[int]], folder: Path
) -> Calibration:
    from server_export.calibrate.calibration import calibrate

    found = calibrate(chain, rows, config.weight_bits, folder / _CODES)
    give_back_freed()
    return found


def _compare(config: ExportConfig, chain: ModelChain) -> ModelComparison:
    from server_export.check.model import compare_with_model

    with stage("comparing") as note:
        comparison = compare_with_model(chain, config.model, config.revision)
        note(comparison.describe())
    give_back_freed()
    return comparison


def _write(
    config: ExportConfig,
    folder: Path,
    source: Source,
    tokenizer: Any,
    block: Mapping[str, Any],
    context: int,
    chain: ModelChain,
    calibration: Calibration | None,
    comparison: ModelComparison,
) -> dict[str, Any]:
    """Fill a bundle's folder; returns its manifest."""
    from prge.files import chain as manifest
    from server_export.bundle import write_bundle
    from server_export.check.chain import verify_chain
    from server_export.lower.cache import ProgramCache
    from server_export.lower.chain import lower_chain

    if calibration is not None:
        chain = calibration.chain
    is_encoder = source.readout == "pooled"
    bounds = manifest.Bounds.for_rows(source.longest, context, is_encoder, chain.tables.recurs)
    with stage("lowering") as note:
        cache = ProgramCache() if config.cache else None
        lowered = lower_chain(chain, folder, config.roles, bounds, note, cache)
    give_back_freed()
    with stage("verifying") as note:
        verification = replace(verify_chain(chain, lowered, folder, config.quantize), model=comparison)
        differences = ", ".join(f"{role} {part:.2g}" for role, part in verification.differences.items())
        note(f"engine and graphs differ by {differences} (allowed {verification.tolerance:.2g})")
    if calibration is not None:
        calibration.remove_codes()
    described = manifest.Chain(
        readout=source.readout,
        pooling=_pooling(config, source),
        width=_width(source),
        vocabulary_size=chain.vocabulary_size,
        modules=chain.modules,
        bounds=bounds,
        tables=lowered.tables,
        shared=lowered.shared,
        kinds=lowered.kinds,
        blocks=lowered.blocks,
    )
    with stage("writing"):
        return write_bundle(
            folder,
            config,
            source.start,
            described,
            source.costs,
            tokenizer,
            block,
            chain.quantization if calibration is None else calibration.report,
            verification,
            {} if calibration is None else calibration.table(lowered.layers),
        )


def _pooling(config: ExportConfig, source: Source) -> str:
    """How states become what a head reads."""
    from prge.files.chain import OWN_HEAD
    from server_export.checkpoint.files import stored_pooling

    if source.loaded.classifier is not None:
        return OWN_HEAD
    stored = stored_pooling(source.files) if source.readout == "pooled" else None
    return config.pooling or stored or "mean"


def _width(source: Source) -> int:
    """Width of what the blocks answer."""
    classifier = source.loaded.classifier
    return int(source.loaded.config.hidden_size if classifier is None else classifier.linear.in_features)


def _tell_part(source: Source) -> None:
    """Say that a checkpoint holds more than texts."""
    loaded = source.loaded
    if loaded.part_of is not None:
        print(
            f"{loaded.name_or_path} holds more than texts: of {loaded.part_of} the text part "
            f"({loaded.config.model_type}) is taken, and weights for images, audio or video are left out"
        )


def _describe_gguf(source: Source) -> None:
    """Say that weights were rounded before."""
    if (told := source.loaded.source) and any(kind not in _FLOATS for kind in told["types"]):
        print(
            f"{source.loaded.name_or_path} holds weights in {told['description']}: they are dequantized, and "
            "the model is what they stand for"
        )


def _tell_head(source: Source) -> None:
    """Say what becomes of a checkpoint's own classification head."""
    loaded = source.loaded
    if (classifier := loaded.classifier) is not None:
        print(
            f"{loaded.name_or_path} has a classification head of its own: rows of its classes "
            f"({', '.join(classifier.labels)}) are scored by it, others by one that a run fits"
        )
        return
    architectures = getattr(loaded.config, "architectures", None) or []
    if not loaded.is_decoder and any("Classification" in name for name in architectures):
        print(
            f"the classification head of {loaded.name_or_path} is left out: a run fits a linear one of "
            "pooled states to its rows"
        )


def _tell_targets(config: ExportConfig, source: Source) -> None:
    """Say that linear layers of all kinds are adapted for want of a usual choice."""
    from server_export.adapter.layers import usual_target_modules

    is_chosen = config.target_modules or config.start_adapter
    if not is_chosen and usual_target_modules(source.loaded.model) is None:
        print(
            f"PEFT has no usual target modules for {source.loaded.config.model_type}: linear layers of all "
            f"kinds are adapted, {len(source.start.lora_a)} in all; --target-modules chooses others"
        )


def _hint_about_bos(config: ExportConfig, source: Source, tokenizer: Any) -> None:
    from server_export.checkpoint.tokenization import adds_bos

    loaded = source.loaded
    model_has_bos = getattr(loaded.config, "bos_token_id", None) is not None
    if config.prepend_bos == "auto" and loaded.is_decoder and model_has_bos and not adds_bos(tokenizer):
        print(
            "hint: the model knows a begin-of-sequence token, but its tokenizer adds none; "
            "if it was trained with one, export with --prepend-bos always"
        )


def _tell_no_end(source: Source, block: Mapping[str, Any]) -> None:
    """Say that a model that writes has no token that ends what it writes."""
    if source.loaded.is_decoder and block["eos_token_id"] is None:
        what = "the chat template's end of a turn alone" if block["stop_token_ids"] else "--max-tokens alone"
        print(
            f"note: {source.loaded.name_or_path} names no end-of-sequence token, in its tokenizer, "
            "config.json or generation_config.json: the end of texts and completions is not learnt, and "
            f"answers are ended by {what}; to learn it, name the token as eos_token_id in config.json"
        )


def _summarize(out: Path, manifest: dict[str, Any]) -> None:
    files, chain = manifest["files"], manifest["chain"]
    size = sum(entry["bytes"] for entry in files.values())
    programs = sum(files[kind["program"]]["bytes"] for kind in chain["kinds"])
    trained = adapter_size([AdaptedModule(**module) for module in chain["modules"]])
    tokens, piece = chain["bounds"]["tokens"], chain["bounds"]["piece"]
    print(f"{out}: {size / 1e6:.1f} MB, of which programs {programs / 1e6:.2f} MB")
    print(
        f"  {len(chain['modules'])} layers adapted, {trained:,} numbers trained; rows of up to "
        f"{tokens} tokens{f' in pieces of {piece}' if piece < tokens else ''}; readout {chain['readout']}; "
        f"roles {', '.join(dict.fromkeys(role for kind in chain['kinds'] for role in kind['methods']))}"
    )
