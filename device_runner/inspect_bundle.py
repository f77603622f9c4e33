"""`prge inspect`: what a bundle holds, whether its files are whole, and the memory that a run of it takes."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from device_runner.session.planning import DEFAULT_BATCH
from prge.errors import BundleError, printable
from prge.files.adapter import adapter_size
from prge.files.bundle import MANIFEST, check_file, read_chain, read_manifest
from prge.files.chain import Chain
from prge.files.documents import mapping
from prge.files.layers import read_layers
from prge.files.signatures import DECODE
from prge.files.tuned import bundle_at
from prge.learning.costs import Outline, StepShape, bytes_text, memory_table, memory_text, weights_of_bundle
from prge.learning.estimators.table import ESTIMATORS, fitting
from prge.model_spec import AdaptedModule
from prge.verbs.inputs import ModelInput
from prge.verbs.settings import parse_settings

_SECTIONS = ("lora", "readout", "quantization", "tokenizer", "verification", "versions")
_SHOWN_ELSEWHERE = {
    *("folder", "manifest_sha256", "format", "model", "files", "unlisted_files"),
    *("adapter_parameters", "chain", "roles", "programs", "weights", "outline", "memory", "text", "layers"),
}
# Tokens of a row whose memory is told, as by `prge estimate`.
_TOKENS = 64


@dataclass(frozen=True)
class InspectSettings:
    """What to inspect."""

    bundle: ModelInput
    """Folder that `prge export` wrote."""
    json: bool = False
    """Print one JSON object instead of text."""


def main(argv: list[str]) -> int:
    """Entry of `prge inspect`; raises BundleError, after printing all else, if a file is damaged."""
    settings = parse_settings(InspectSettings, argv, "prge inspect", ["bundle"])
    report = inspect(bundle_at(settings.bundle))
    print(json.dumps(report, indent=2) if settings.json else printable("\n".join(_text(report))))
    damaged = {name: entry["problem"] for name, entry in report["files"].items() if entry["problem"]}
    if damaged:
        more = f" (and {len(damaged) - 1} more files)" if len(damaged) > 1 else ""
        raise BundleError(
            next(iter(damaged.values())) + more,
            remedy="copy or export the bundle again",
            code="bundle-damaged",
        )
    return 0


def inspect(folder: Path) -> dict[str, Any]:
    """The manifest with a check of every file, and its chain's roles, programs and weights.

    Raises:
        BundleError: the manifest can't be read.
    """
    manifest = read_manifest(folder)
    if not isinstance(manifest.get("files"), dict):
        raise BundleError(
            f"{folder / MANIFEST} lists no files",
            remedy="export the bundle again",
            code="manifest-without-files",
        )
    facts = _facts(folder, manifest)
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


def _facts(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
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
                "file": kind.program,
                "bytes": size(kind.program),
                "roles": list(kind.methods),
                "blocks": [place for place, block in enumerate(chain.blocks) if block.kind == number],
            }
            for number, kind in enumerate(chain.kinds)
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
    """The table of calibrated layers; empty where it can't be used, which a check of its file tells."""
    try:
        return read_layers(folder, manifest)
    except BundleError:
        return {}


def _memory(
    manifest: Mapping[str, Any], chain: Chain, size: Callable[[str], int]
) -> list[dict[str, Any]] | None:
    """What runs take, see learning.costs.memory_table; None for a bundle whose export kept no outline."""
    if "outline" not in manifest:
        return None
    outline = Outline.from_json(manifest["outline"], chain)
    weights = weights_of_bundle(outline, chain, size, mapping(manifest.get("quantization")).get("scheme"))
    length = min(_TOKENS, chain.bounds.tokens)
    sizes = (DEFAULT_BATCH, length, length - 1, chain.vocabulary_size)
    shapes = {
        name: StepShape(entry.role, *sizes, copies=entry.copies(), queries=entry.directions())
        for name, entry in ((name, ESTIMATORS[name]) for name in fitting(chain.roles))
    }
    return memory_table(outline, shapes, weights, chain.roles)


def _text_facts(manifest: Mapping[str, Any], chain: Chain) -> dict[str, int] | None:
    """How long texts may be, and what keys and values of a token take; None if that isn't known."""
    if "outline" not in manifest or DECODE not in chain.roles:
        return None
    outline = Outline.from_json(manifest["outline"], chain)
    # Keys and values of about one width, in float32.
    return {"context": chain.bounds.context, "token_bytes": 2 * 4 * outline.key_width * outline.blocks}


def _problem(folder: Path, manifest: Mapping[str, Any], name: str) -> str | None:
    try:
        check_file(folder, manifest, name)
    except BundleError as error:
        return error.what
    return None


def _text(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"bundle {report['folder']}"
    yield f"  manifest {report['manifest_sha256']}"
    yield from _section("model", report.get("model"))
    yield from _chain_text(report)
    for name in _SECTIONS:
        yield from _section(name, report.get(name))
        if name == "quantization":
            yield from _layers(report["layers"])
    yield from _section(
        "other", {key: report[key] for key in report if key not in {*_SECTIONS, *_SHOWN_ELSEWHERE}}
    )
    yield "\nfiles"
    for name, entry in report["files"].items():
        state = entry["problem"] or "ok"
        yield f"  {bytes_text(entry.get('bytes')):>10}  {str(entry.get('sha256'))[:12]}  {name}  {state}"
    for name in report["unlisted_files"]:
        yield f"  {'':>10}  {'':12}  {name}  not in the manifest, never loaded"


def _chain_text(report: Mapping[str, Any]) -> Iterator[str]:
    chain = Chain.from_json(report["chain"])
    facts: dict[str, Any] = {
        "blocks": f"{len(chain.blocks)} of {len(chain.kinds)} kinds, the lowest adapted one is "
        f"{chain.lowest_adapted}",
        "roles": report["roles"],
        "readout": chain.readout,
        "width": chain.width,
        "vocabulary_size": chain.vocabulary_size,
    }
    if chain.is_encoder:
        facts["pooling"] = chain.pooling
    yield from _section("chain", {**facts, "format": report["format"]})
    yield "\nprograms, without weights"
    for program in report["programs"]:
        used = f"{_blocks(len(program['blocks']))}: {', '.join(program['roles'])}"
        yield f"  {bytes_text(program['bytes']):>10}  {program['file']}  {used}"
    weights = report["weights"]
    yield "\nweights"
    yield f"  {bytes_text(weights['bytes']):>10}  in all"
    yield (
        f"  {bytes_text(weights['largest_bytes']):>10}  {weights['largest']}, the largest block, the least "
        "that is loaded at once"
    )
    if report["memory"] is None:
        yield "\nmemory of a run is not known: the export was made before bundles tell it"
    else:
        tokens = min(_TOKENS, chain.bounds.tokens)
        yield (
            f"\nmemory of a run, {DEFAULT_BATCH} rows of {tokens} tokens, native engine, estimated; "
            "--memory is the most that the process takes"
        )
        yield from memory_text(report["memory"])
    if text := report["text"]:
        size = bytes_text(text["token_bytes"])
        yield f"\ntexts of up to {text['context']} tokens, of which each takes {size}"
    yield from _section(
        "most of each size in one call of a program; a row goes in pieces", asdict(chain.bounds)
    )
    yield "\ntables"
    for number, table in enumerate(chain.tables):
        window = f", window {table.window}" if table.window else ""
        first = f", counted from {table.first}" if table.first else ""
        users = sum(number in block.tables for block in chain.blocks)
        yield f"  {table.kind}{window}{first}: {_blocks(users)}"
    yield from _modules(chain.modules)


def _layers(table: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Bits of calibrated layers, those of one name and as many bits in one line."""
    kinds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for name, entry in table.items():
        bits, sensitivity = entry.get("bits"), entry.get("sensitivity")
        if isinstance(bits, int) and isinstance(sensitivity, int | float):
            kinds[name.rsplit(".", 1)[-1], bits].append(float(sensitivity))
    if kinds:
        yield "\nlayers: bits, and how much a block's answer changes where one of them alone is int4"
    for (name, bits), found in kinds.items():
        least, most = min(found), max(found)
        yield f"  {len(found):>3} x {name:<16} int{bits}, {least:.2g} to {most:.2g}"


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _modules(modules: Sequence[AdaptedModule]) -> Iterator[str]:
    """The adapted modules, those of one kind and shape in one line."""
    kinds = Counter(
        (module.name.rsplit(".", 1)[-1], module.rank, module.in_features, module.out_features)
        for module in modules
    )
    kind = "LoRA" if any(module.trains_a for module in modules) else "LoRA-FA"
    yield f"\nadapter: {kind}, {adapter_size(modules):,} parameters in {len(modules)} modules"
    for (name, rank, width_in, width_out), count in kinds.items():
        yield f"  {count:>3} x {name:<16} rank {rank}, {width_in} -> {width_out}"


def _section(title: str, block: Any) -> Iterator[str]:
    if block in (None, {}, []):
        return
    yield f"\n{title}"
    if not isinstance(block, Mapping):
        yield f"  {block}"
        return
    width = max(map(len, map(str, block)))
    for name, value in block.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key}: {entry}" for key, entry in value.items()) or "none"
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) or "none"
        elif str(name).endswith("bytes"):
            value = f"{bytes_text(value)} ({value})"
        elif value is None:
            value = "none"
        yield f"  {name:<{width}}  {value}"
