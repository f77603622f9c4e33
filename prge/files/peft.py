"""PEFT folders in and out: `adapter_config.json` and `adapter_model.safetensors`, their names and checks.

    base_model.model.<module>.lora_A.weight   [rank, in]     trained by LoRA, frozen by LoRA-FA
    base_model.model.<module>.lora_B.weight   [out, rank]    trained; prge.files.adapter has [rank, out]

Folders written here carry `hashes.json`; a folder that carries one isn't read when a file differs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import safetensors.numpy

from prge.engine import Array, FloatArray
from prge.errors import AdapterError, RunError, shown
from prge.files.adapter import Adapter
from prge.files.bundle import file_sha256
from prge.files.documents import MOST_JSON_BYTES, DocumentError, parse_json, read_document
from prge.files.run_folder import FINAL, JOURNAL
from prge.files.tuned import tuning_at
from prge.host.atomic import new_folder
from prge.host.memory import tells_no_memory
from prge.model_spec import AdaptedModule

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
HASHES = "hashes.json"
# An encoder's classification head, beside its adapter.
HEAD = "head.safetensors"
# How PEFT begins the name of a layer inside its model, in files and in memory.
PREFIX = "base_model.model."
# Between the name of a folder's model and the hash of its files, in `base_model_name_or_path`; without the
# first letter what begins such a hash in `revision`.
HASH_MARK = "@sha256:"
_FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_LETTERS: tuple[Literal["A", "B"], ...] = ("A", "B")
# Of expressions; names of modules have dots, which stand for themselves here.
_EXPRESSION_SIGNS = frozenset("*+?|()[]{}^$\\")
# Every other initialization of LoRA also changes the base weights.
_PLAIN_INITIALIZATIONS = (None, True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class PeftAdapter:
    """A plain LoRA adapter as PEFT stores it, of any model.

    `lora_a` [rank, in] and `lora_b` [out, rank] are float32 by module name and not scaled by alpha / rank.
    A module has the rank of its matrices, which may be another than its neighbour's.
    """

    config: Mapping[str, Any]
    lora_a: Mapping[str, FloatArray]
    lora_b: Mapping[str, FloatArray]

    @property
    def rank(self) -> int:
        """Rank of the modules that `rank_pattern` doesn't name."""
        return int(self.config["r"])

    @property
    def alpha(self) -> float:
        """What PEFT calls `lora_alpha`: that of the modules that `alpha_pattern` doesn't name."""
        return float(self.config["lora_alpha"])

    def alpha_of(self, module: str) -> float:
        """Alpha of a module."""
        return float(_of_module(self.config, "alpha_pattern", module, self.alpha))

    def scale_of(self, module: str) -> float:
        """What a module's product is multiplied by: alpha / rank, of rsLoRA (arXiv 2312.03732) its root."""
        return lora_scale(
            self.alpha_of(module), len(self.lora_a[module]), bool(self.config.get("use_rslora"))
        )

    @property
    def target_modules(self) -> str | list[str]:
        """An expression, or names in alphabetical order."""
        targets = self.config["target_modules"]
        return targets if isinstance(targets, str) else sorted(targets)

    @property
    def modules(self) -> tuple[AdaptedModule, ...]:
        """The layers that it adapts, in alphabetical order."""
        return tuple(
            AdaptedModule(name, lora_a.shape[0], lora_a.shape[1], self.lora_b[name].shape[0])
            for name, lora_a in self.lora_a.items()
        )


def lora_scale(alpha: float, rank: int, by_root: bool) -> float:
    """alpha / rank, or alpha over the rank's square root."""
    return alpha / math.sqrt(rank) if by_root else alpha / rank


def weight_name(module: str, letter: Literal["A", "B"]) -> str:
    """The name of a module's `lora_A` or `lora_B` in the file of weights."""
    return f"{PREFIX}{module}.lora_{letter}.weight"


@dataclass(frozen=True)
class NamedBase:
    """The base model that an `adapter_config.json` names.

    `name` is a hub id or a folder, or the name alone of a folder whose place isn't told; `sha256` is of a
    folder's content, `commit` of a hub id.
    """

    name: str
    commit: str | None = None
    sha256: str | None = None


def named_base(config: Mapping[str, Any]) -> NamedBase | None:
    """The base model of an adapter's configuration; None where it names none.

    The hash of a folder's content is in `revision` where the name is a path, which loads without it; else
    after the name.
    """
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name:
        return None
    folder, _, sha256 = name.partition(HASH_MARK)
    revision = revision if isinstance(revision, str) else ""
    if revision.startswith(HASH_MARK[1:]):
        return NamedBase(folder, None, revision.removeprefix(HASH_MARK[1:]))
    return NamedBase(folder, revision or None, sha256 or None)


def find_adapter(source: Path) -> Path:
    """The PEFT folder that a user names by a tuning, a run, its `final/`, a checkpoint, or the folder itself.

    Raises:
        RunError: a tuning or a run without a result.
        AdapterError: there is no adapter.
    """
    if tuning := tuning_at(source):
        source = tuning.adapter
    for folder in (source, source / FINAL):
        if (folder / CONFIG).is_file():
            return folder
    if (source / JOURNAL).is_file():
        raise RunError(
            f"{source} is a run without a result",
            remedy=f"finish it with `prge run --resume {source}`, or give one of its checkpoints",
            code="run-unfinished",
        )
    raise AdapterError(
        f"{source} holds no trained adapter:",
        [f"neither {CONFIG} nor {FINAL}/{CONFIG} is there"],
        remedy="give a run folder, a checkpoint or a PEFT folder",
        code="adapter-missing",
    )


def run_of(folder: Path) -> Path | None:
    """The run folder that a PEFT folder is the result or a checkpoint of."""
    absolute = folder.resolve()
    run = absolute.parent if absolute.name == FINAL else absolute.parent.parent
    return run if (run / JOURNAL).is_file() else None


def read_lora(folder: Path | str) -> PeftAdapter:
    """Read a folder that PEFT or prge wrote, in float32, float16 or bfloat16.

    Raises:
        AdapterError: it is damaged, or uses a variant of LoRA that a bundle doesn't compute.
    """
    folder = Path(folder)
    config = _checked_config(folder)
    heads = _head_names(folder, config)
    problems = _variant_problems(config, heads) + _number_problems(config)
    if problems:
        raise AdapterError(
            f"the adapter {folder} can't be used:",
            problems,
            remedy="train it as plain LoRA on linear layers",
            code="adapter-unsupported",
        )
    matrices: dict[str, dict[str, FloatArray]] = {"A": {}, "B": {}}
    for name, array in _read_floats(folder / WEIGHTS, problems).items():
        module, letter = _module_of(name)
        if letter:
            matrices[letter][module] = array
        elif name not in heads:
            problems.append(f"{name} is neither lora_A nor lora_B of a linear layer")
    lora_a, lora_b = matrices.values()
    problems += _pair_problems(config, lora_a, lora_b)
    if problems:
        raise AdapterError(f"the adapter {folder} can't be used:", problems, code="adapter-incomplete")
    return PeftAdapter(config, lora_a, lora_b)


def write_lora(folder: Path, adapter: PeftAdapter) -> None:
    """Write both files of an adapter into a new folder; the same adapter gives the same bytes."""
    folder.mkdir(parents=True)
    tensors = {weight_name(module, "A"): matrix for module, matrix in adapter.lora_a.items()}
    tensors |= {weight_name(module, "B"): matrix for module, matrix in adapter.lora_b.items()}
    (folder / WEIGHTS).write_bytes(_serialize(tensors))
    write_config(folder, adapter.config)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write `adapter_config.json`; PEFT takes its own defaults for what isn't there."""
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def read_peft(folder: Path | str, modules: Sequence[AdaptedModule]) -> Adapter:
    """Read an adapter that prge wrote for exactly these modules, such as a bundle's own or a checkpoint's.

    Args:
        folder: holds `adapter_config.json` and `adapter_model.safetensors`, float32.
        modules: what the bundle adapts.

    Raises:
        AdapterError: every tensor that is missing, unexpected, of another shape or dtype, or not finite;
            a damaged file; a file that `hashes.json` doesn't name so.
    """
    folder = Path(folder)
    config = _checked_config(folder)
    heads = _head_names(folder, config)
    problems = _variant_problems(config, heads)
    problems += _number_problems(config) or _rank_problems(config, modules)
    with _open_weights(folder / WEIGHTS) as weights:
        bad = _tensor_problems(weights, modules, heads)
        problems += bad.values()
        for name in (weight_name(module.name, letter) for module in modules for letter in _LETTERS):
            if name not in bad:
                problems += _infinite(name, weights.get_tensor(name))
        if problems:
            raise AdapterError(
                f"the adapter {folder} doesn't fit the bundle",
                problems,
                remedy="give an adapter of this bundle, or export a bundle from it with --start-adapter",
                code="adapter-does-not-fit",
            )
        # Only now: the modules are a manifest's, and their sizes are those of the file.
        adapter = Adapter.zeros(modules)
        for name, lora_b in adapter.lora_b.items():
            lora_b[...] = weights.get_tensor(weight_name(name, "B")).T
        for name, lora_a in (adapter.lora_a or {}).items():
            np.copyto(lora_a, weights.get_tensor(weight_name(name, "A")))
    return adapter


def read_compatible_adapter(
    folder: Path | str,
    modules: Sequence[AdaptedModule],
    template_folder: Path | str,
    *,
    generates: bool = False,
) -> Adapter:
    """Read an adapter for a bundle from any PEFT folder of the bundle's model; every verb reads with this.

    What the folder lacks changes nothing and can be trained: a module, or the ranks above a lower one, have
    the bundle's own `lora_a` and a `lora_b` of zeros.

    Args:
        folder: of plain LoRA, in float32, float16 or bfloat16; of the bundle's modules or some of them, and
            of its rank or a lower one.
        modules: what the bundle adapts.
        template_folder: the bundle's own adapter.
        generates: whether it is only generated with, for which programs take any `lora_a`. Programs that
            train and score have that of a LoRA-FA bundle inside them.

    Returns:
        The adapter, with a `lora_a` if it isn't the bundle's.

    Raises:
        AdapterError: it is damaged or a variant of LoRA; it was trained on another model, as far as hash or
            commit tell; its rank is higher, or its modules are others or of other sizes; or it has another
            `lora_a` than the one inside the bundle's programs.
    """
    found, template = read_lora(folder), read_lora(template_folder)
    problems = _base_problems(found.config, read_config(Path(template_folder)))
    known = {module.name: module for module in modules}
    strangers = [name for name in found.lora_a if name not in known]
    if strangers:
        problems.append(
            f"it adapts {len(strangers)} modules that the bundle doesn't, the first is {strangers[0]}"
        )
    for module in found.modules:
        wanted = known.get(module.name, module)
        if module.rank > wanted.rank:
            problems.append(f"{module.name} has rank {module.rank}, the bundle has {wanted.rank}")
        sizes, expected = ((each.in_features, each.out_features) for each in (module, wanted))
        if sizes != expected:
            problems.append(f"{module.name} is a layer from {sizes[0]} to {sizes[1]}, not {expected}")
    others: list[str] = []
    if not problems:
        adapter = Adapter.zeros(modules)
        # Programs of LoRA have the bundle's own scale in them, those of LoRA-FA take it within `lora_a`.
        units = {name: template.scale_of(name) if known[name].trains_a else 1.0 for name in known}
        frozen = {
            name: template.lora_a[name] * np.float32(template.scale_of(name) / units[name]) for name in known
        }
        lora_a = {name: np.array(matrix) for name, matrix in frozen.items()}
        for name, matrix in found.lora_a.items():
            lora_a[name][: len(matrix)] = matrix * np.float32(found.scale_of(name) / units[name])
            adapter.lora_b[name][: len(matrix)] = found.lora_b[name].T
        for name, trained in (adapter.lora_a or {}).items():
            np.copyto(trained, lora_a[name])
        others = [
            module.name
            for module in modules
            if not module.trains_a and not np.array_equal(lora_a[module.name], frozen[module.name])
        ]
        if others and not generates:
            problems.append(
                f"lora_A of {len(others)} of {len(modules)} modules, or its scale, differs from the one "
                f"inside the bundle, which is frozen there; the first is {others[0]}"
            )
    if problems:
        raise AdapterError(
            f"the adapter {folder} doesn't fit the bundle",
            problems,
            remedy="export a bundle from it with --start-adapter, or give one of this model"
            + ("; a bundle of --adapter lora takes any lora_A" if others else ""),
            code="adapter-does-not-fit",
        )
    return Adapter(adapter.modules, adapter.values, lora_a) if others else adapter


def scaled_lora_a(folder: Path | str) -> dict[str, FloatArray]:
    """A PEFT folder's `lora_A` f32 [rank, in] by module name, times alpha / rank; raises AdapterError."""
    found = read_lora(folder)
    return {name: matrix * np.float32(found.scale_of(name)) for name, matrix in found.lora_a.items()}


def write_peft(
    folder: Path | str,
    adapter: Adapter,
    template_folder: Path | str,
    extra: Mapping[str, Mapping[str, Array] | bytes] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write the adapter of a bundle as a PEFT folder, whole or not at all; equal arrays give equal bytes.

    Args:
        folder: the new folder; it appears by one rename after everything is on storage.
        adapter: what to write.
        template_folder: the bundle's adapter; its configuration is copied unchanged, and so is its `lora_A`
            unless that is trained.
        extra: further files by name: arrays become safetensors, bytes are written as they are.
        overwrite: whether an existing folder is replaced, by exchanging the two.

    Raises:
        AdapterError: the adapter has values that are not finite; the template is damaged or not of these
            modules.
        RunError: the folder exists, or the storage is full or refuses.
    """
    if problem := _infinite("its vector", adapter.values):
        raise AdapterError(
            f"the adapter is not written to {folder}",
            problem,
            remedy="train again with a lower learning rate",
            code="adapter-not-finite",
        )
    template = Path(template_folder)
    config = _read_bytes(template / CONFIG)
    tensors: dict[str, Array] = {}
    with _open_weights(template / WEIGHTS) as weights:
        problems = _tensor_problems(weights, adapter.modules)
        if problems:
            raise AdapterError(
                f"the adapter {template} is not of these modules",
                problems.values(),
                remedy="give the bundle's own adapter",
                code="adapter-of-other-modules",
            )
        for module in adapter.modules:
            name, lora_a = weight_name(module.name, "A"), (adapter.lora_a or {}).get(module.name)
            tensors[name] = weights.get_tensor(name) if lora_a is None else lora_a
            tensors[weight_name(module.name, "B")] = adapter.lora_b[module.name].T
    files = {CONFIG: config, WEIGHTS: _serialize(tensors)}
    for name, content in (extra or {}).items():
        if Path(name).name != name or name in (CONFIG, WEIGHTS, HASHES):
            raise ValueError(f"{name!r} can't be the name of an extra file")
        files[name] = content if isinstance(content, bytes) else _serialize(content)
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    files[HASHES] = json.dumps(hashes, indent=1).encode() + b"\n"
    with new_folder(Path(folder), overwrite=overwrite) as partial:
        for name, content in files.items():
            (partial / name).write_bytes(content)


def read_arrays(path: Path | str) -> dict[str, Array]:
    """Every array of a safetensors file, such as `optimizer.safetensors` or `head.safetensors`.

    Raises:
        AdapterError: the file is missing, damaged, or holds a dtype that numpy lacks.
    """
    path = Path(path)
    _check_hashes(path.parent, only=path.name)
    with _open_weights(path) as weights:
        try:
            return {name: weights.get_tensor(name) for name in sorted(weights.keys())}
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise AdapterError(
                f"{path} can't be read",
                [f"{error}"],
                remedy="give a file that prge wrote",
                code="arrays-unreadable",
            ) from None


def _serialize(tensors: Mapping[str, Array]) -> bytes:
    # "pt" names the layout for transformers and PEFT, which refuse a safetensors file without it.
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return bytes(safetensors.numpy.save(contiguous, metadata={"format": "pt"}))


def _no_adapter(path: Path, reason: str) -> AdapterError:
    return AdapterError(
        f"{path.parent} is not a PEFT adapter",
        [f"{path.name}{reason}"],
        remedy=f"give a folder with {CONFIG} and {WEIGHTS}",
        code="not-an-adapter",
    )


def _damaged(path: Path, problem: object) -> AdapterError:
    return AdapterError(
        f"{path} is damaged", [str(problem)], remedy="copy the folder again", code="adapter-damaged"
    )


def _read_bytes(path: Path) -> bytes:
    try:
        return read_document(path, MOST_JSON_BYTES)
    except (OSError, DocumentError) as error:
        raise _no_adapter(path, f": {getattr(error, 'strerror', None) or error}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `adapter_config.json`; raises AdapterError where it is missing or damaged."""
    return _json_object(folder / CONFIG, _read_bytes(folder / CONFIG))


def _checked_config(folder: Path) -> dict[str, Any]:
    """The configuration of a folder whose files are those that it was written with."""
    config = read_config(folder)
    _check_hashes(folder)
    return config


def _json_object(path: Path, content: bytes) -> dict[str, Any]:
    try:
        found = parse_json(content)
    except DocumentError as error:
        raise _damaged(path, error) from None
    if not isinstance(found, dict):
        raise _damaged(path, "it holds no JSON object")
    return found


def _open_weights(path: Path) -> Any:
    """Open a safetensors file: header checked, arrays read when asked for."""
    if not path.is_file():
        raise _no_adapter(path, " is missing")
    try:
        return safetensors.safe_open(str(path), framework="numpy")
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        if tells_no_memory(error):
            raise MemoryError(f"{path} can't be read") from None
        raise _damaged(path, error) from None


def _check_hashes(folder: Path, only: str | None = None) -> None:
    """Compare the folder's files with its `hashes.json`, where it has one."""
    path = folder / HASHES
    if not path.is_file():
        return
    hashes = _json_object(path, _read_bytes(path))
    problems = []
    present = {each.name for each in folder.iterdir() if each.is_file()}
    for name, expected in hashes.items():
        if only is not None and name != only:
            continue
        if Path(name).name != name:
            problems.append(f"{HASHES} names a file outside the folder: {shown(name)}")
        elif name not in present:
            problems.append(f"{name} is missing")
        elif file_sha256(folder / name) != expected:
            problems.append(f"{name} was changed after it was written: its SHA-256 differs")
    if problems:
        raise AdapterError(
            f"{folder} is damaged",
            problems,
            remedy=f"copy the folder again; if the change was meant, delete its {HASHES}",
            code="adapter-changed",
        )


def head_weights(layer: str, head: Mapping[str, Array]) -> dict[str, Array]:
    """A classification head as PEFT has a layer that is saved whole, `weight` and `bias` by their names."""
    return {f"{PREFIX}{layer}.{name}": array for name, array in head.items()}


def _head_names(folder: Path, config: Mapping[str, Any]) -> set[str]:
    """Names of the tensors of a classification head, which a folder also has in a file of its own."""
    saved = config.get("modules_to_save")
    if not (folder / HEAD).is_file() or not isinstance(saved, list):
        return set()
    return {name for layer in saved for name in head_weights(str(layer), {"weight": 0, "bias": 0})}  # type: ignore[dict-item]


def _variant_problems(config: Mapping[str, Any], heads: Collection[str] = ()) -> list[str]:
    """What of a configuration changes the formula base(x) + alpha / rank * lora_b(lora_a(x)).

    `heads` are tensors of layers that are saved whole and known to be heads.
    """
    problems = []
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        problems.append(f"{CONFIG} has peft_type {shown(config['peft_type'])}, must be 'LORA'")
    for name in ("use_dora", "use_qalora", "lora_bias", "alora_invocation_tokens"):
        if config.get(name):
            problems.append(f"{name} is set: the bundle computes plain LoRA")
    for name in ("modules_to_save", "target_parameters", "layer_replication", "trainable_token_indices"):
        if config.get(name) and not (heads and name == "modules_to_save"):
            problems.append(f"{name} is set: the bundle adapts linear layers only")
    if config.get("bias", "none") != "none":
        problems.append(f"bias is {shown(config['bias'])}: the bundle's biases are frozen")
    if config.get("init_lora_weights", True) not in _PLAIN_INITIALIZATIONS:
        problems.append(
            f"init_lora_weights is {shown(config['init_lora_weights'])}: it changes the base weights, "
            "which are exported as they are"
        )
    return problems


def _base_problems(config: Mapping[str, Any], template: Mapping[str, Any]) -> list[str]:
    """Whether an adapter was trained on another model than its bundle's, as far as hash or commit tell."""
    named, expected = named_base(config), named_base(template)
    if named is None or expected is None:
        return []
    hashes, commits = (named.sha256, expected.sha256), (named.commit, expected.commit)
    if (all(hashes) and hashes[0] != hashes[1]) or (
        named.name == expected.name and all(commits) and commits[0] != commits[1]
    ):
        given, wanted = (
            f"{shown(each.name)}{f' of {shown(mark)}' if mark else ''}"
            for each in (named, expected)
            for mark in [each.sha256 or each.commit]
        )
        return [f"{CONFIG} names the base model {given}, the bundle was exported from {wanted}"]
    return []


def _number_problems(config: Mapping[str, Any]) -> list[str]:
    """What of rank, alpha and targets is missing or no such value."""
    problems = []
    rank, alpha, targets = (config.get(name) for name in ("r", "lora_alpha", "target_modules"))
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        problems.append(f"r is {shown(rank)}, must be a whole number of at least 1")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        problems.append(f"lora_alpha is {shown(alpha)}, must be a number above 0")
    for name, kind in (("rank_pattern", int), ("alpha_pattern", int | float)):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(
            isinstance(value, kind) and not isinstance(value, bool) and 0 < value < math.inf
            for value in pattern.values()
        ):
            problems.append(f"{name} is {shown(pattern)}, must map modules to numbers above 0")
        elif any(_EXPRESSION_SIGNS.intersection(key) for key in pattern):
            problems.append(f"{name} is {shown(pattern)}, must have names of modules, no expressions")
    is_names = isinstance(targets, list) and all(isinstance(name, str) for name in targets)
    if not (is_names or isinstance(targets, str)) or not targets:
        problems.append(f"target_modules is {shown(targets)}, must be names or an expression")
    return problems


def _of_module(config: Mapping[str, Any], pattern: str, module: str, otherwise: float) -> float:
    """What a pattern says of a module: of its whole name or the end of it, the first that fits."""
    values: Mapping[str, float] = config.get(pattern) or {}
    fits = (value for key, value in values.items() if module == key or module.endswith(f".{key}"))
    return next(fits, otherwise)


def _module_of(name: str) -> tuple[str, str]:
    """Module and letter of a tensor's name; no letter if it is no matrix of LoRA."""
    plain = name.removeprefix(PREFIX).replace(".default.weight", ".weight")
    for letter in ("A", "B"):
        if plain.endswith(f".lora_{letter}.weight"):
            return plain.removesuffix(f".lora_{letter}.weight"), letter
    return plain, ""


def _rank_problems(config: Mapping[str, Any], modules: Sequence[AdaptedModule]) -> list[str]:
    """Whether a configuration says other ranks than modules have."""
    said = {module: _of_module(config, "rank_pattern", module.name, config["r"]) for module in modules}
    others = [module for module, rank in said.items() if rank != module.rank]
    return [
        f"{CONFIG} has rank {said[first]} for {first.name}, the bundle has {first.rank}; {len(others)} of "
        f"{len(modules)} modules have others"
        for first in others[:1]
    ]


def _pair_problems(
    config: Mapping[str, Any], lora_a: Mapping[str, FloatArray], lora_b: Mapping[str, FloatArray]
) -> list[str]:
    """Modules with one matrix, or with matrices that aren't of the rank that the configuration says."""
    problems = [
        f"{module} has only one of lora_A and lora_B" for module in sorted(lora_a.keys() ^ lora_b.keys())
    ]
    for name, matrices, axis in (("lora_A", lora_a, 0), ("lora_B", lora_b, 1)):
        problems += [
            f"{module}.{name} is {list(matrix.shape)}, the adapter says rank {rank}"
            for module, matrix in matrices.items()
            for rank in [_of_module(config, "rank_pattern", module, config["r"])]
            if matrix.ndim != 2 or matrix.shape[axis] != rank
        ]
    return problems if lora_a else [*problems, "it holds no lora_A"]


def _read_floats(path: Path, problems: list[str]) -> dict[str, FloatArray]:
    """Every array of a file as float32; what is no float, or not finite, is added to `problems`."""
    _open_weights(path)
    deserialize: Any = safetensors.deserialize  # numpy has no bfloat16, so safetensors' own reader refuses it
    arrays = {}
    for name, stored in sorted(deserialize(path.read_bytes())):
        if stored["dtype"] not in _FLOATS:
            problems.append(f"{name} is {stored['dtype']}, must be one of {', '.join(_FLOATS)}")
            continue
        array = np.frombuffer(stored["data"], _FLOATS[stored["dtype"]]).reshape(stored["shape"])
        if stored["dtype"] == "BF16":  # the upper half of a float32
            array = (array.astype(np.uint32) << 16).view(np.float32)
        arrays[name] = array.astype(np.float32)
        problems += _infinite(name, arrays[name])
    return arrays


def _infinite(name: str, array: Array) -> list[str]:
    count = int(array.size - np.count_nonzero(np.isfinite(array)))
    return [f"{name} {list(array.shape)} has {count} values that are not finite"] if count else []


def _tensor_problems(
    weights: Any, modules: Sequence[AdaptedModule], heads: Collection[str] = ()
) -> dict[str, str]:
    """By tensor name, everything in which a file's header differs from what the modules need."""
    expected: dict[str, list[int]] = {}
    for module in modules:
        expected[weight_name(module.name, "A")] = [module.rank, module.in_features]
        expected[weight_name(module.name, "B")] = [module.out_features, module.rank]
    held = set(weights.keys())
    problems = {
        name: f"{name} is missing, must be F32 {shape}"
        for name, shape in expected.items()
        if name not in held
    }
    for name in sorted(held.difference(heads)):
        tensor = weights.get_slice(name)
        shape, dtype = list(tensor.get_shape()), tensor.get_dtype()
        if name not in expected:
            problems[name] = f"{name} {dtype} {shape} is unexpected: the bundle doesn't adapt it"
        elif shape != expected[name] or dtype != "F32":
            problems[name] = f"{name} is {dtype} {shape}, must be F32 {expected[name]}"
    return problems
