"""`prge inspect`: show what a bundle holds, check its files, and estimate the memory of a run."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from device_runner.session.plan import DEFAULT_BATCH
from prge.cli.inputs import ModelInput
from prge.cli.settings import parse_settings
from prge.errors import BundleError, printable
from prge.formats.adapter import adapter_size
from prge.formats.bundle import MANIFEST, check_file, read_chain, read_manifest
from prge.formats.chain import Chain
from prge.formats.documents import mapping
from prge.formats.layers import read_layers
from prge.formats.signatures import DECODE
from prge.formats.tune_folder import resolve_bundle
from prge.model_spec import AdaptedModule
from prge.training.costs import (
    ModelSizes,
    StepShape,
    bundle_weight_bytes,
    format_bytes,
    format_memory_table,
    memory_table,
)
from prge.training.estimators.table import ESTIMATORS, available_estimators

_SECTIONS = ("lora", "readout", "quantization", "tokenizer", "verification", "versions")
_SHOWN_ELSEWHERE = {
    *("folder", "manifest_sha256", "format", "model", "files", "unlisted_files"),
    *("adapter_parameters", "chain", "roles", "programs", "weights", "outline", "memory", "text", "layers"),
}
# Tokens per row of the memory estimate, as in `prge estimate`.
_TOKENS = 64


@dataclass(frozen=True)
class InspectSettings:
    """What to inspect."""

    EXAMPLE: ClassVar = "bundle"

    bundle: ModelInput
    """Folder that `prge export` wrote."""
    json: bool = False
    """Print one JSON object instead of text."""


def main(argv: list[str]) -> int:
    """Run the verb; raises BundleError, after printing everything else, if a file is damaged."""
    settings = parse_settings(InspectSettings, argv, "prge inspect", ["bundle"])
    report = inspect(resolve_bundle(settings.bundle))
    print(json.dumps(report, indent=2) if settings.json else printable("\n".join(_report_lines(report))))
    damaged = {name: entry["problem"] for name, entry in report["files"].items() if entry["problem"]}
    if damaged:
        more = f" (and {len(damaged) - 1} more files)" if len(damaged) > 1 else ""
        raise BundleError(
            next(iter(damaged.values())) + more,
            remedy="Copy or export the bundle again.",
            code="bundle-damaged",
        )
    return 0


def inspect(folder: Path) -> dict[str, Any]:
    """Return the manifest with a check of every file, and the chain's roles, programs and weights.

    Raises:
        BundleError: the manifest can't be read.
    """
    manifest = read_manifest(folder)
    if not isinstance(manifest.get("files"), dict):
        raise BundleError(
            f"{folder / MANIFEST} lists no files.",
            remedy="Export the bundle again.",
            code="manifest-without-files",
        )
    facts = _chain_facts(folder, manifest)
    files = {
        name: {**mapping(entry), "problem": _problem(folder, manifest, name)}
        for name, entry in manifest["files"].items()
    }
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {
        "folder": str(folder),
        **manifest,
        "files": files,
        "unlisted_files": sorted(present - set(files) - {MANIFEST}),
        **facts,
    }


def _chain_facts(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    chain = read_chain(folder, manifest)

    def size(name: str) -> int:
        return int(mapping(manifest["files"][name]).get("bytes") or 0)

    loaded = chain.loaded_bytes(size)
    largest = loaded.index(max(loaded))
    return {
        "adapter_parameters": adapter_size(chain.modules),
        "roles": list(chain.roles),
        "programs": [
            {
                "file": program.file,
                "bytes": size(program.file),
                "roles": list(program.methods),
                "blocks": [index for index, block in enumerate(chain.blocks) if block.program == number],
            }
            for number, program in enumerate(chain.programs)
        ],
        "weights": {
            "bytes": sum(map(size, {block.weights for block in chain.blocks})),
            "largest": chain.blocks[largest].weights,
            "largest_bytes": loaded[largest],
        },
        "memory": _memory(manifest, chain, size),
        "text": _text_facts(manifest, chain),
        "layers": _layer_table(folder, manifest),
    }


def _layer_table(folder: Path, manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the table of calibrated layers; empty if it is damaged, which the check of its file reports."""
    try:
        return read_layers(folder, manifest)
    except BundleError:
        return {}


def _memory(
    manifest: Mapping[str, Any], chain: Chain, size: Callable[[str], int]
) -> list[dict[str, Any]] | None:
    """Return the memory of runs, see prge.training.costs.memory_table; None if the export kept no outline."""
    if "outline" not in manifest:
        return None
    outline = ModelSizes.from_json(manifest["outline"], chain)
    weights = bundle_weight_bytes(outline, chain, size, mapping(manifest.get("quantization")).get("scheme"))
    length = min(_TOKENS, chain.bounds.tokens)
    sizes = (DEFAULT_BATCH, length, length - 1, chain.vocabulary_size)
    shapes = {
        name: StepShape(entry.role, *sizes, copies=entry.copies(), queries=entry.directions())
        for name, entry in ((name, ESTIMATORS[name]) for name in available_estimators(chain.roles))
    }
    return memory_table(outline, shapes, weights, chain.roles)


def _text_facts(manifest: Mapping[str, Any], chain: Chain) -> dict[str, int] | None:
    """Return the largest context, and the bytes of a token's keys and values; None if that is unknown."""
    if "outline" not in manifest or DECODE not in chain.roles:
        return None
    outline = ModelSizes.from_json(manifest["outline"], chain)
    # Keys and values of about the same width, in float32.
    return {"context": chain.bounds.context, "token_bytes": 2 * 4 * outline.key_width * outline.blocks}


def _problem(folder: Path, manifest: Mapping[str, Any], name: str) -> str | None:
    try:
        check_file(folder, manifest, name)
    except BundleError as error:
        return error.what
    return None


def _report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"bundle {report['folder']}"
    yield f"  manifest {report['manifest_sha256']}"
    yield from _section_lines("model", report.get("model"))
    yield from _chain_lines(report)
    for name in _SECTIONS:
        yield from _section_lines(name, report.get(name))
        if name == "quantization":
            yield from _layer_lines(report["layers"])
    yield from _section_lines(
        "other", {key: report[key] for key in report if key not in {*_SECTIONS, *_SHOWN_ELSEWHERE}}
    )
    yield "\nfiles"
    for name, entry in report["files"].items():
        state = entry["problem"] or "ok"
        yield f"  {format_bytes(entry.get('bytes')):>10}  {str(entry.get('sha256'))[:12]}  {name}  {state}"
    for name in report["unlisted_files"]:
        yield f"  {'':>10}  {'':12}  {name}  not in the manifest, never loaded"


def _chain_lines(report: Mapping[str, Any]) -> Iterator[str]:
    chain = read_chain(Path(report["folder"]), report)
    facts: dict[str, Any] = {
        "blocks": f"{len(chain.blocks)} of {len(chain.programs)} types, the lowest adapted block is "
        f"{chain.lowest_adapted}",
        "roles": report["roles"],
        "readout": chain.readout,
        "width": chain.width,
        "vocabulary_size": chain.vocabulary_size,
    }
    if chain.is_encoder:
        facts["pooling"] = chain.pooling
    yield from _section_lines("chain", {**facts, "format": report["format"]})
    yield "\nprograms, without weights"
    for program in report["programs"]:
        used = f"{_count_blocks(len(program['blocks']))}: {', '.join(program['roles'])}"
        yield f"  {format_bytes(program['bytes']):>10}  {program['file']}  {used}"
    weights = report["weights"]
    yield "\nweights"
    yield f"  {format_bytes(weights['bytes']):>10}  in all"
    yield (
        f"  {format_bytes(weights['largest_bytes']):>10}  {weights['largest']}, "
        "the largest block and the minimum to load at once"
    )
    if report["memory"] is None:
        yield "\nmemory of a run is unknown: an earlier version exported the bundle"
    else:
        tokens = min(_TOKENS, chain.bounds.tokens)
        yield (
            f"\nmemory of a run, {DEFAULT_BATCH} rows of {tokens} tokens, native engine, estimated; "
            "--memory is the most that the process takes"
        )
        yield from format_memory_table(report["memory"])
    if text := report["text"]:
        size = format_bytes(text["token_bytes"])
        yield f"\ncontext of up to {text['context']} tokens, each of which takes {size}"
    yield from _section_lines(
        "largest sizes of one call of a program; longer rows pass in chunks", asdict(chain.bounds)
    )
    yield "\ntables"
    for number, table in enumerate(chain.tables):
        window = f", window {table.window}" if table.window else ""
        first = f", counted from {table.first}" if table.first else ""
        users = sum(number in block.tables for block in chain.blocks)
        yield f"  {table.type}{window}{first}: {_count_blocks(users)}"
    yield from _module_lines(chain.modules)


def _layer_lines(table: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the bits of calibrated layers, one line for layers of one name and number of bits."""
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for name, entry in table.items():
        bits, sensitivity = entry.get("bits"), entry.get("sensitivity")
        if isinstance(bits, int) and isinstance(sensitivity, int | float):
            groups[name.rsplit(".", 1)[-1], bits].append(float(sensitivity))
    if groups:
        yield "\nlayers: bits, and how much a block's output changes if only this layer is int4"
    for (name, bits), sensitivities in groups.items():
        least, most = min(sensitivities), max(sensitivities)
        yield f"  {len(sensitivities):>3} x {name:<16} int{bits}, {least:.2g} to {most:.2g}"


def _count_blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _module_lines(modules: Sequence[AdaptedModule]) -> Iterator[str]:
    """Yield the adapted modules, one line for modules of one name and shape."""
    counts = Counter(
        (module.name.rsplit(".", 1)[-1], module.rank, module.in_features, module.out_features)
        for module in modules
    )
    method = "LoRA" if any(module.trains_a for module in modules) else "LoRA-FA"
    yield f"\nadapter: {method}, {adapter_size(modules):,} parameters in {len(modules)} modules"
    for (name, rank, width_in, width_out), count in counts.items():
        yield f"  {count:>3} x {name:<16} rank {rank}, {width_in} -> {width_out}"


def _section_lines(title: str, content: Any) -> Iterator[str]:
    if content in (None, {}, []):
        return
    yield f"\n{title}"
    if not isinstance(content, Mapping):
        yield f"  {content}"
        return
    width = max(map(len, map(str, content)))
    for name, value in content.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key}: {entry}" for key, entry in value.items()) or "none"
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) or "none"
        elif str(name).endswith("bytes"):
            value = f"{format_bytes(value)} ({value})"
        elif value is None:
            value = "none"
        yield f"  {name:<{width}}  {value}"
