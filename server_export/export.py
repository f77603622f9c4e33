"""`prge export`: a model becomes a bundle that a device can train.

load -> insert LoRA-FA -> quantize the frozen base -> trace, with tangents -> lower -> verify in the engine
-> write the bundle
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prge.atomic import new_folder
from prge.errors import RunError
from server_export.check.estimation import announce
from server_export.settings import ExportConfig

if TYPE_CHECKING:
    from server_export.model.chain import Chain
    from server_export.model.files import ModelFiles
    from server_export.model.loading import LoadedModel
    from server_export.model.program import BuiltProgram, StartAdapter

__all__ = ["ExportConfig", "export", "main"]

# Parameters of a model that is held as a whole against its blocks.
_MOST_COMPARED = 1 << 28
_DOES = {"forward": "train", "score": "score", "trunk": "run below the adapter", "step": "train above it"}


def main(argv: Sequence[str]) -> int:
    """Run `prge export`; returns the exit code."""
    from prge.settings import parse_settings

    config = parse_settings(
        ExportConfig,
        argv,
        "prge export",
        description="Turn a transformers model into a bundle that a device can train.",
    )
    export(config)
    return 0


def export(config: ExportConfig) -> Path:
    """Write the bundle that `config` describes; returns its folder.

    Raises:
        PrgeError: something can't be used, or the lowered program isn't the model; no bundle is written then.
    """
    out = Path(config.out)
    if out.exists() and not config.overwrite:
        raise RunError(f"{out} exists already", remedy="give another folder, or --overwrite")
    if config.roles is not None:
        return _export_chain(config, out)
    announce(config)
    with _stage("loading") as note:
        built, tokenizer = _build(config)
        note(_program_note(built))
    _hint_about_bos(config, built, tokenizer)
    return _finish(config, built, tokenizer, out)


def _build(config: ExportConfig) -> tuple[BuiltProgram, Any]:
    from server_export.model.loading import load_model
    from server_export.model.program import build_program
    from server_export.model.tokenization import label_token_ids, load_tokenizer, tokenizer_block
    from server_export.quiet import quiet_libraries

    quiet_libraries()
    pooled = None if config.readout is None else config.readout == "pooled"
    loaded = load_model(config.model, pooled=pooled, revision=config.revision)
    tokenizer = load_tokenizer(config.model, loaded.revision)
    tokenizer_block(tokenizer, config.prepend_bos, loaded.model.get_input_embeddings().weight.shape[0])
    label_tokens = label_token_ids(tokenizer, config.label_words) if config.label_words else []
    return build_program(config, loaded, label_tokens), tokenizer


def _finish(config: ExportConfig, built: BuiltProgram, tokenizer: Any, out: Path) -> Path:
    from server_export.bundle import write_bundle, write_program
    from server_export.check.verification import verify
    from server_export.lower.lowering import collector_paused, lower
    from server_export.lower.method_graphs import cut_of, export_programs

    with new_folder(out, overwrite=config.overwrite) as folder, collector_paused():
        with _stage("tracing") as note:
            programs = export_programs(built)
            sizes = {name: len(graph.graph.nodes) for name, graph in programs.items() if name in _DOES}
            note(", ".join(f"{size:,} nodes to {_DOES[name]}" for name, size in sizes.items()))
            if built.shorter:
                note(f"the same for rows of {', '.join(map(str, built.shorter))} tokens")
        cut = cut_of(programs, built)
        shorter_cuts = {length: cut_of(programs, built, length) for length in built.shorter}
        with _stage("lowering") as note:
            lowered = lower(programs)
            program = write_program(folder, lowered)
            reports = lowered.reports
            # The file is written: its pieces, in graphs that refer to each other, needn't stay in memory.
            del lowered
            gc.collect()
            report = reports[built.step_method]
            outside = ", ".join(f"{count} {name}" for name, count in report.outside.items()) or "nothing"
            share = f"{report.delegated_share:.1%} of the operators"
            note(f"{report.delegates} delegates hold {share}; outside: {outside}")
        with _stage("verifying") as note:
            verification = verify(program, built, programs)
            difference, tolerance = verification.max_absolute_difference, verification.tolerance
            note(f"engine and model differ by {difference:.2g} (allowed {tolerance:.2g})")
            if verification.tangent_difference is not None:
                part, allowed = verification.tangent_difference, verification.tangent_tolerance
                what = "gradients" if built.contract.is_exact else "tangents"
                note(f"{what} by {part:.2g} of the largest (allowed {allowed:.2g})")
        with _stage("writing"):
            manifest = write_bundle(
                folder, config, built, tokenizer, reports, verification, cut, shorter_cuts
            )
    _summarize(out, manifest)
    return out


def _export_chain(config: ExportConfig, out: Path) -> Path:
    with new_folder(out, overwrite=config.overwrite) as folder:
        with _stage("tracing") as note:
            source = _open_source(config)
            twin = None if config.quantize == "fp32" else copy.deepcopy(source)
            chain = source.chain(config, config.quantize)
            note(f"{len(chain.blocks)} blocks of {len(chain.kinds)} kinds; {chain.quantization.describe()}")
        if source.start.parameters <= _MOST_COMPARED:
            _compare(config, source, chain if twin is None else twin.chain(config, "fp32"))
        manifest = _write_chain(config, folder, source, chain)
    size, chain_block = sum(entry["bytes"] for entry in manifest["files"].values()), manifest["chain"]
    programs = sum(manifest["files"][kind["program"]]["bytes"] for kind in chain_block["kinds"])
    roles = ", ".join(chain_block["kinds"][-1]["methods"])
    print(f"{out}: {size / 1e6:.1f} MB, of which programs {programs / 1e6:.2f} MB; roles {roles}")
    return out


@dataclass(frozen=True)
class _Source:
    """A model without weights, its files, and what an export makes of the settings for it."""

    files: ModelFiles
    outline: LoadedModel
    tokenizer: Any
    readout: str
    label_tokens: Sequence[int]
    transposed: set[str]
    start: StartAdapter

    def chain(self, config: ExportConfig, scheme: str) -> Chain:
        """The model's blocks; it can be made once."""
        from server_export.model.chain import build_chain

        scale = self.start.alpha / self.start.rank
        return build_chain(
            self.outline,
            self.files,
            {name: matrix * scale for name, matrix in self.start.lora_a.items()},
            longest=config.sequence_length,
            transposed=self.transposed,
            scheme=scheme,
            label_tokens=self.label_tokens,
        )


def _open_source(config: ExportConfig) -> _Source:
    from server_export.model.chain import plain_layers
    from server_export.model.files import fetch_weights, find_files
    from server_export.model.loading import outline_model
    from server_export.model.program import position_numbers, readout_of, start_adapter
    from server_export.model.tokenization import label_token_ids, load_tokenizer, tokenizer_block
    from server_export.quiet import quiet_libraries

    quiet_libraries()
    pooled = None if config.readout is None else config.readout == "pooled"
    files = find_files(config.model, config.revision)
    outline = outline_model(config.model, pooled=pooled, revision=config.revision)
    fetch_weights(files)
    if not files.revision:
        outline = replace(outline, sha256=files.sha256())
    tokenizer = load_tokenizer(config.model, outline.revision)
    tokenizer_block(tokenizer, config.prepend_bos, outline.model.get_input_embeddings().weight.shape[0])
    labels = label_token_ids(tokenizer, config.label_words) if config.label_words else []
    readout = readout_of(config, outline, labels)
    position_numbers(outline, config.sequence_length)
    transposed = plain_layers(outline.model)
    start = start_adapter(config, outline, bool(transposed))
    return _Source(files, outline, tokenizer, readout, labels, transposed, start)


def _compare(config: ExportConfig, source: _Source, chain: Chain) -> None:
    from server_export.check.chain import difference_from_model

    with _stage("comparing") as note:
        part = difference_from_model(chain, config.model, config.revision, source.outline.is_decoder)
        note(f"the blocks in float32 and the whole model differ by {part:.2g}")
    # Its graphs refer to each other, and to weights.
    gc.collect()


def _write_chain(config: ExportConfig, folder: Path, source: _Source, chain: Chain) -> dict[str, Any]:
    """Fill a bundle's folder; returns its manifest."""
    from prge import chain as manifest
    from server_export.bundle import write_chain_bundle
    from server_export.check.chain import verify_chain
    from server_export.lower.chain import lower_chain

    bounds = manifest.Bounds(tokens=config.sequence_length)
    with _stage("lowering") as note:
        lowered = lower_chain(chain, folder, config.roles or (), bounds, source.outline.is_decoder, note)
    with _stage("verifying") as note:
        verification = verify_chain(chain, lowered, folder, config.quantize)
        differences = ", ".join(f"{role} {part:.2g}" for role, part in verification.differences.items())
        note(f"engine and graphs differ by {differences} (allowed {verification.tolerance:.2g})")
    described = manifest.Chain(
        readout=source.readout,
        pooling=config.pooling,
        width=int(source.outline.config.hidden_size),
        vocabulary_size=chain.vocabulary_size,
        label_tokens=tuple(source.label_tokens),
        modules=chain.modules,
        bounds=bounds,
        tables=lowered.tables,
        kinds=lowered.kinds,
        blocks=lowered.blocks,
    )
    with _stage("writing"):
        return write_chain_bundle(
            folder, config, source.start, described, source.tokenizer, chain.quantization, verification
        )


@contextmanager
def _stage(name: str) -> Iterator[Any]:
    """Print a stage's name when it begins, and its time and note when it ends."""
    notes: list[str] = []
    print(f"{name:<10}", end="", flush=True)
    start = time.monotonic()
    try:
        yield notes.append
    except BaseException:
        print()
        raise
    print(f"{time.monotonic() - start:6.1f} s  {'; '.join(notes)}", flush=True)


def _program_note(built: BuiltProgram) -> str:
    contract = built.contract
    trained = sum(module.rank * module.out_features for module in contract.modules)
    return (
        f"{built.loaded.config.model_type}, {built.parameters:,} parameters; "
        f"{len(contract.modules)} layers adapted, {trained:,} numbers trained; "
        f"{built.quantization.describe()}"
    )


def _hint_about_bos(config: ExportConfig, built: BuiltProgram, tokenizer: Any) -> None:
    from server_export.model.tokenization import adds_bos

    model_has_bos = getattr(built.loaded.config, "bos_token_id", None) is not None
    if config.prepend_bos == "auto" and built.loaded.is_decoder and model_has_bos and not adds_bos(tokenizer):
        print(
            "hint: the model knows a begin-of-sequence token, but its tokenizer adds none; "
            "if it was trained with one, export with --prepend-bos always"
        )


def _summarize(out: Path, manifest: dict[str, Any]) -> None:
    contract, lowering = manifest["contract"], manifest["lowering"]
    batch, copies, queries = contract["batch_size"], contract["copies"], contract["queries"]
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    reads = f", {contract['positions']} positions" if contract["positions"] else ""
    is_exact = contract["kind"] == "exact"
    each = f"{queries} tangents beside each of {batch}" if queries else f"{copies} copies x {batch}"
    each = f"{batch} rows forward and backward" if is_exact else each
    rows = batch * (2 if is_exact else 1 + queries) * copies
    print(f"{out}: {size / 1e6:.1f} MB, program {lowering['program_bytes'] / 1e6:.1f} MB")
    lengths = [*(block["sequence_length"] for block in manifest["lengths"]), contract["sequence_length"]]
    print(
        f"  a step computes {rows} rows ({each}) of {', '.join(map(str, lengths))} tokens{reads}; "
        f"readout {contract['readout']}"
    )
    if contract["cut"]:
        numbers = sum(math.prod(spec["shape"]) for spec in contract["cut"])
        print(f"  a trunk cache holds {4 * numbers // batch:,} bytes for a row in float32")
