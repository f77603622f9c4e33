"""Reading and writing PEFT folders: `adapter_config.json` and `adapter_model.safetensors`.

    base_model.model.<module>.lora_A.weight   [rank, in]     trained by LoRA, frozen by LoRA-FA
    base_model.model.<module>.lora_B.weight   [out, rank]    trained; [rank, out] in prge.formats.adapter

Folders written here contain `hashes.json`. A folder with this file is rejected if another file doesn't match
its hash.
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
from prge.errors import AdapterError, RunError, format_value
from prge.formats.adapter import Adapter
from prge.formats.bundle import file_sha256
from prge.formats.documents import MAX_JSON_BYTES, DocumentError, parse_json, read_document
from prge.formats.run_folder import FINAL, JOURNAL
from prge.formats.tune_folder import find_tuning
from prge.model_spec import AdaptedModule
from prge.system.atomic import new_folder
from prge.system.memory import is_out_of_memory

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
HASHES = "hashes.json"
# The classification head of an encoder, in the folder of its adapter.
HEAD = "head.safetensors"
# PEFT's prefix of layer names, in files and in memory.
PREFIX = "base_model.model."
# Separates the name of a model folder from the hash of its files in `base_model_name_or_path`; without its
# first character, it is the prefix of such a hash in `revision`.
HASH_MARK = "@sha256:"
_FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_LETTERS: tuple[Literal["A", "B"], ...] = ("A", "B")
# Characters of regular expressions; dots are allowed, because module names contain them.
_REGEX_CHARACTERS = frozenset("*+?|()[]{}^$\\")
# All other initializations of LoRA change the base weights, too.
_PLAIN_INITIALIZATIONS = (None, True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class PeftAdapter:
    """A plain LoRA adapter of any model, as PEFT stores it.

    Attributes:
        config: content of `adapter_config.json`.
        lora_a: f32 [rank, in] by module name, not scaled by alpha / rank; ranks can differ between modules.
        lora_b: f32 [out, rank] by module name.
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
        """PEFT's `lora_alpha`: alpha of the modules that `alpha_pattern` doesn't name."""
        return float(self.config["lora_alpha"])

    def alpha_of(self, module: str) -> float:
        """Return the alpha of a module."""
        return float(_of_module(self.config, "alpha_pattern", module, self.alpha))

    def scale_of(self, module: str) -> float:
        """Return the scale of a module: alpha / rank; for rsLoRA (arXiv 2312.03732) alpha / sqrt(rank)."""
        return lora_scale(
            self.alpha_of(module), len(self.lora_a[module]), bool(self.config.get("use_rslora"))
        )

    @property
    def target_modules(self) -> str | list[str]:
        """A regular expression, or names in alphabetical order."""
        targets = self.config["target_modules"]
        return targets if isinstance(targets, str) else sorted(targets)

    @property
    def modules(self) -> tuple[AdaptedModule, ...]:
        """The adapted layers, in alphabetical order."""
        return tuple(
            AdaptedModule(name, lora_a.shape[0], lora_a.shape[1], self.lora_b[name].shape[0])
            for name, lora_a in self.lora_a.items()
        )


def lora_scale(alpha: float, rank: int, by_root: bool) -> float:
    """Return the scale of an adapter: alpha / rank, or alpha / sqrt(rank)."""
    return alpha / math.sqrt(rank) if by_root else alpha / rank


def weight_name(module: str, letter: Literal["A", "B"]) -> str:
    """Return the name of a module's `lora_A` or `lora_B` in the weights file."""
    return f"{PREFIX}{module}.lora_{letter}.weight"


@dataclass(frozen=True)
class NamedBase:
    """The base model that an `adapter_config.json` names.

    Attributes:
        name: a hub id or a folder; of folders possibly only the last part of the path.
        commit: commit of a hub id.
        sha256: hash of a folder's content.
    """

    name: str
    commit: str | None = None
    sha256: str | None = None


def named_base(config: Mapping[str, Any]) -> NamedBase | None:
    """Return the base model of an adapter's configuration; None if it names none.

    The hash of a folder's content is in `revision` if the name is a path that can be loaded, else after the
    name.
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
    """Return the PEFT folder of a tuning, a run, a run's `final/`, a checkpoint, or a PEFT folder.

    Raises:
        RunError: the tuning or the run has no result yet.
        AdapterError: there is no adapter.
    """
    if tuning := find_tuning(source):
        source = tuning.adapter
    for folder in (source, source / FINAL):
        if (folder / CONFIG).is_file():
            return folder
    if (source / JOURNAL).is_file():
        raise RunError(
            f"{source} is a run without a result.",
            remedy=f"Finish it with `prge run --resume {source}`, or give one of its checkpoints.",
            code="run-unfinished",
        )
    raise AdapterError(
        f"{source} holds no trained adapter:",
        [f"neither {CONFIG} nor {FINAL}/{CONFIG} is there"],
        remedy="Give a run folder, a checkpoint or a PEFT folder.",
        code="adapter-missing",
    )


def find_run(folder: Path) -> Path | None:
    """Return the run folder of a PEFT folder that is a run's result or checkpoint; else None."""
    absolute = folder.resolve()
    run = absolute.parent if absolute.name == FINAL else absolute.parent.parent
    return run if (run / JOURNAL).is_file() else None


def read_lora(folder: Path | str) -> PeftAdapter:
    """Read a folder that PEFT or prge wrote, in float32, float16 or bfloat16.

    Raises:
        AdapterError: the adapter is damaged, or uses a variant of LoRA that bundles don't support.
    """
    folder = Path(folder)
    config = _checked_config(folder)
    heads = _head_names(folder, config)
    problems = _variant_problems(config, heads) + _number_problems(config)
    if problems:
        raise AdapterError(
            f"The adapter {folder} can't be used:",
            problems,
            remedy="Train it as plain LoRA on linear layers.",
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
        raise AdapterError(f"The adapter {folder} can't be used:", problems, code="adapter-incomplete")
    return PeftAdapter(config, lora_a, lora_b)


def write_lora(folder: Path, adapter: PeftAdapter) -> None:
    """Write both files of an adapter into a new folder; equal adapters give equal bytes."""
    folder.mkdir(parents=True)
    tensors = {weight_name(module, "A"): matrix for module, matrix in adapter.lora_a.items()}
    tensors |= {weight_name(module, "B"): matrix for module, matrix in adapter.lora_b.items()}
    (folder / WEIGHTS).write_bytes(_serialize(tensors))
    write_config(folder, adapter.config)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write `adapter_config.json`; PEFT uses its defaults for missing fields."""
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def read_peft(folder: Path | str, modules: Sequence[AdaptedModule]) -> Adapter:
    """Read an adapter that prge wrote for exactly these modules, such as a bundle's own or a checkpoint's.

    Args:
        folder: folder with `adapter_config.json` and `adapter_model.safetensors`, float32.
        modules: the bundle's adapted layers.

    Raises:
        AdapterError: a tensor is missing, unexpected, has another shape or dtype, or isn't finite; a file is
            damaged or doesn't match its hash. The message lists all tensors.
    """
    folder = Path(folder)
    config = _checked_config(folder)
    heads = _head_names(folder, config)
    problems = _variant_problems(config, heads)
    problems += _number_problems(config) or _rank_problems(config, modules)
    with _open_weights(folder / WEIGHTS) as weights:
        tensor_problems = _tensor_problems(weights, modules, heads)
        problems += tensor_problems.values()
        for name in (weight_name(module.name, letter) for module in modules for letter in _LETTERS):
            if name not in tensor_problems:
                problems += _infinite(name, weights.get_tensor(name))
        if problems:
            raise AdapterError(
                f"The adapter {folder} doesn't fit the bundle:",
                problems,
                remedy="Give an adapter of this bundle, or export a bundle from it with --start-adapter.",
                code="adapter-does-not-fit",
            )
        # Allocated only after the file has confirmed the sizes, which come from a manifest.
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
    """Read an adapter for a bundle from any PEFT folder of the bundle's model; all verbs use this function.

    Modules that the folder lacks, and ranks above a lower rank, get the bundle's own `lora_a` and a `lora_b`
    of zeros: they don't change outputs, and can be trained.

    Args:
        folder: folder of a plain LoRA adapter in float32, float16 or bfloat16, with the bundle's modules or
            some of them, and the bundle's rank or a lower one.
        modules: the bundle's adapted layers.
        template_folder: folder of the bundle's own adapter.
        generates: whether the adapter is used only for text generation, whose programs accept any `lora_a`.
            In a LoRA-FA bundle, programs for training and scoring contain `lora_a` as a constant.

    Returns:
        The adapter, with `lora_a` set if it isn't the bundle's own.

    Raises:
        AdapterError: the adapter is damaged or a variant of LoRA; it was trained on another model, according
            to its hash or commit; its rank is higher; its modules are others or have other sizes; or its
            `lora_a` isn't the one in the bundle's programs.
    """
    source, template = read_lora(folder), read_lora(template_folder)
    problems = _base_problems(source.config, read_config(Path(template_folder)))
    known = {module.name: module for module in modules}
    unknown = [name for name in source.lora_a if name not in known]
    if unknown:
        problems.append(
            f"it adapts {len(unknown)} modules that the bundle doesn't, the first is {unknown[0]}"
        )
    for module in source.modules:
        expected = known.get(module.name, module)
        if module.rank > expected.rank:
            problems.append(f"{module.name} has rank {module.rank}, the bundle has {expected.rank}")
        sizes, expected_sizes = ((each.in_features, each.out_features) for each in (module, expected))
        if sizes != expected_sizes:
            problems.append(f"{module.name} is a layer from {sizes[0]} to {sizes[1]}, not {expected_sizes}")
    differing: list[str] = []
    if not problems:
        adapter = Adapter.zeros(modules)
        # Programs of LoRA contain the bundle's scale; in LoRA-FA, the scale is part of `lora_a`.
        program_scales = {name: template.scale_of(name) if known[name].trains_a else 1.0 for name in known}
        frozen = {
            name: template.lora_a[name] * np.float32(template.scale_of(name) / program_scales[name])
            for name in known
        }
        lora_a = {name: np.array(matrix) for name, matrix in frozen.items()}
        for name, matrix in source.lora_a.items():
            lora_a[name][: len(matrix)] = matrix * np.float32(source.scale_of(name) / program_scales[name])
            adapter.lora_b[name][: len(matrix)] = source.lora_b[name].T
        for name, trained in (adapter.lora_a or {}).items():
            np.copyto(trained, lora_a[name])
        differing = [
            module.name
            for module in modules
            if not module.trains_a and not np.array_equal(lora_a[module.name], frozen[module.name])
        ]
        if differing and not generates:
            problems.append(
                f"lora_A of {len(differing)} of {len(modules)} modules, or its scale, differs from the one "
                f"inside the bundle, which is frozen there; the first is {differing[0]}"
            )
    if problems:
        raise AdapterError(
            f"The adapter {folder} doesn't fit the bundle:",
            problems,
            remedy="Export a bundle from it with --start-adapter, or give one of this model"
            + ("; a bundle of --adapter lora takes any lora_A." if differing else "."),
            code="adapter-does-not-fit",
        )
    return Adapter(adapter.modules, adapter.values, lora_a) if differing else adapter


def scaled_lora_a(folder: Path | str) -> dict[str, FloatArray]:
    """Return `lora_A` times alpha / rank, f32 [rank, in] by module name; raises AdapterError."""
    adapter = read_lora(folder)
    return {name: matrix * np.float32(adapter.scale_of(name)) for name, matrix in adapter.lora_a.items()}


def write_peft(
    folder: Path | str,
    adapter: Adapter,
    template_folder: Path | str,
    extra: Mapping[str, Mapping[str, Array] | bytes] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write the adapter of a bundle as a PEFT folder, atomically; equal arrays give equal bytes.

    Args:
        folder: the new folder; it appears with one rename, after all files are on storage.
        adapter: the adapter to write.
        template_folder: the bundle's adapter; its configuration is copied unchanged, and so is its `lora_A`
            unless that is trained.
        extra: further files by name: arrays become safetensors, bytes are written as they are.
        overwrite: whether to replace an existing folder, by exchanging the two.

    Raises:
        AdapterError: the adapter has values that are not finite; or the template is damaged or has other
            modules.
        RunError: the folder exists, or can't be written.
    """
    if problem := _infinite("its vector", adapter.values):
        raise AdapterError(
            f"The adapter is not written to {folder}:",
            problem,
            remedy="Train again with a lower learning rate.",
            code="adapter-not-finite",
        )
    template = Path(template_folder)
    config = _read_bytes(template / CONFIG)
    tensors: dict[str, Array] = {}
    with _open_weights(template / WEIGHTS) as weights:
        problems = _tensor_problems(weights, adapter.modules)
        if problems:
            raise AdapterError(
                f"The adapter {template} is not of these modules:",
                problems.values(),
                remedy="Give the bundle's own adapter.",
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
    """Read all arrays of a safetensors file, such as `optimizer.safetensors` or `head.safetensors`.

    Raises:
        AdapterError: the file is missing or damaged, or has a dtype that numpy lacks.
    """
    path = Path(path)
    _check_hashes(path.parent, only=path.name)
    with _open_weights(path) as weights:
        try:
            return {name: weights.get_tensor(name) for name in sorted(weights.keys())}
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise AdapterError(
                f"{path} can't be read:",
                [f"{error}"],
                remedy="Give a file that prge wrote.",
                code="arrays-unreadable",
            ) from None


def _serialize(tensors: Mapping[str, Array]) -> bytes:
    # transformers and PEFT reject safetensors files without this format name.
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return bytes(safetensors.numpy.save(contiguous, metadata={"format": "pt"}))


def _no_adapter_error(path: Path, reason: str) -> AdapterError:
    return AdapterError(
        f"{path.parent} is not a PEFT adapter:",
        [f"{path.name}{reason}"],
        remedy=f"Give a folder with {CONFIG} and {WEIGHTS}.",
        code="not-an-adapter",
    )


def _damaged_error(path: Path, problem: object) -> AdapterError:
    return AdapterError(
        f"{path} is damaged:", [str(problem)], remedy="Copy the folder again.", code="adapter-damaged"
    )


def _read_bytes(path: Path) -> bytes:
    try:
        return read_document(path, MAX_JSON_BYTES)
    except (OSError, DocumentError) as error:
        raise _no_adapter_error(path, f": {getattr(error, 'strerror', None) or error}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """Read `adapter_config.json`; raises AdapterError if it is missing or damaged."""
    return _json_object(folder / CONFIG, _read_bytes(folder / CONFIG))


def _checked_config(folder: Path) -> dict[str, Any]:
    """Read the configuration of a folder, after comparing its files with `hashes.json`."""
    config = read_config(folder)
    _check_hashes(folder)
    return config


def _json_object(path: Path, content: bytes) -> dict[str, Any]:
    try:
        value = parse_json(content)
    except DocumentError as error:
        raise _damaged_error(path, error) from None
    if not isinstance(value, dict):
        raise _damaged_error(path, "it is not a JSON object")
    return value


def _open_weights(path: Path) -> Any:
    """Open a safetensors file; its arrays are read on access."""
    if not path.is_file():
        raise _no_adapter_error(path, " is missing")
    try:
        return safetensors.safe_open(str(path), framework="numpy")
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        if is_out_of_memory(error):
            raise MemoryError(f"{path} can't be read") from None
        raise _damaged_error(path, error) from None


def _check_hashes(folder: Path, only: str | None = None) -> None:
    """Compare the files of a folder, or `only` one of them, with `hashes.json`, if there is one."""
    path = folder / HASHES
    if not path.is_file():
        return
    hashes = _json_object(path, _read_bytes(path))
    problems = []
    present = {item.name for item in folder.iterdir() if item.is_file()}
    for name, expected in hashes.items():
        if only is not None and name != only:
            continue
        if Path(name).name != name:
            problems.append(f"{HASHES} names a file outside the folder: {format_value(name)}")
        elif name not in present:
            problems.append(f"{name} is missing")
        elif file_sha256(folder / name) != expected:
            problems.append(f"{name} was changed after it was written: its SHA-256 differs")
    if problems:
        raise AdapterError(
            f"{folder} is damaged:",
            problems,
            remedy=f"Copy the folder again; if the change was meant, delete its {HASHES}.",
            code="adapter-changed",
        )


def head_weights(layer: str, head: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays of a classification head by PEFT's names of a layer in `modules_to_save`."""
    return {f"{PREFIX}{layer}.{name}": array for name, array in head.items()}


def _head_names(folder: Path, config: Mapping[str, Any]) -> set[str]:
    """Return the tensor names of a classification head that is also stored as `head.safetensors`."""
    saved = config.get("modules_to_save")
    if not (folder / HEAD).is_file() or not isinstance(saved, list):
        return set()
    return {name for layer in saved for name in head_weights(str(layer), {"weight": 0, "bias": 0})}  # type: ignore[dict-item]


def _variant_problems(config: Mapping[str, Any], heads: Collection[str] = ()) -> list[str]:
    """Return problems of a configuration that isn't base(x) + alpha / rank * lora_b(lora_a(x)).

    `heads` are names of tensors in `modules_to_save` that are known to be classification heads.
    """
    problems = []
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        problems.append(f"{CONFIG} has peft_type {format_value(config['peft_type'])}, must be 'LORA'")
    for name in ("use_dora", "use_qalora", "lora_bias", "alora_invocation_tokens"):
        if config.get(name):
            problems.append(f"{name} is set: the bundle computes plain LoRA")
    for name in ("modules_to_save", "target_parameters", "layer_replication", "trainable_token_indices"):
        if config.get(name) and not (heads and name == "modules_to_save"):
            problems.append(f"{name} is set: the bundle adapts linear layers only")
    if config.get("bias", "none") != "none":
        problems.append(f"bias is {format_value(config['bias'])}: the bundle's biases are frozen")
    if config.get("init_lora_weights", True) not in _PLAIN_INITIALIZATIONS:
        problems.append(
            f"init_lora_weights is {format_value(config['init_lora_weights'])}: it changes the base weights, "
            "which are exported as they are"
        )
    return problems


def _base_problems(config: Mapping[str, Any], template: Mapping[str, Any]) -> list[str]:
    """Return a problem if, by hash or commit, an adapter was trained on another base model."""
    named, expected = named_base(config), named_base(template)
    if named is None or expected is None:
        return []
    hashes, commits = (named.sha256, expected.sha256), (named.commit, expected.commit)
    if (all(hashes) and hashes[0] != hashes[1]) or (
        named.name == expected.name and all(commits) and commits[0] != commits[1]
    ):
        actual, wanted = (
            f"{format_value(each.name)}{f' of {format_value(mark)}' if mark else ''}"
            for each in (named, expected)
            for mark in [each.sha256 or each.commit]
        )
        return [f"{CONFIG} names the base model {actual}, the bundle was exported from {wanted}"]
    return []


def _number_problems(config: Mapping[str, Any]) -> list[str]:
    """Return problems of rank, alpha and target modules: missing or invalid values."""
    problems = []
    rank, alpha, targets = (config.get(name) for name in ("r", "lora_alpha", "target_modules"))
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        problems.append(f"r is {format_value(rank)}, must be a whole number of at least 1")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        problems.append(f"lora_alpha is {format_value(alpha)}, must be a number above 0")
    for name, value_type in (("rank_pattern", int), ("alpha_pattern", int | float)):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(
            isinstance(value, value_type) and not isinstance(value, bool) and 0 < value < math.inf
            for value in pattern.values()
        ):
            problems.append(f"{name} is {format_value(pattern)}, must map modules to numbers above 0")
        elif any(_REGEX_CHARACTERS.intersection(key) for key in pattern):
            problems.append(f"{name} is {format_value(pattern)}, must have names of modules, no expressions")
    is_names = isinstance(targets, list) and all(isinstance(name, str) for name in targets)
    if not (is_names or isinstance(targets, str)) or not targets:
        problems.append(f"target_modules is {format_value(targets)}, must be names or an expression")
    return problems


def _of_module(config: Mapping[str, Any], pattern: str, module: str, default: float) -> float:
    """Return a pattern's value for a module: the first whose key is the module's name or the end of it."""
    values: Mapping[str, float] = config.get(pattern) or {}
    matching = (value for key, value in values.items() if module == key or module.endswith(f".{key}"))
    return next(matching, default)


def _module_of(name: str) -> tuple[str, str]:
    """Split a tensor's name into its module and `A` or `B`; the letter is empty for other tensors."""
    plain = name.removeprefix(PREFIX).replace(".default.weight", ".weight")
    for letter in ("A", "B"):
        if plain.endswith(f".lora_{letter}.weight"):
            return plain.removesuffix(f".lora_{letter}.weight"), letter
    return plain, ""


def _rank_problems(config: Mapping[str, Any], modules: Sequence[AdaptedModule]) -> list[str]:
    """Return a problem if the ranks of a configuration differ from the modules' ranks."""
    ranks = {module: _of_module(config, "rank_pattern", module.name, config["r"]) for module in modules}
    differing = [module for module, rank in ranks.items() if rank != module.rank]
    return [
        f"{CONFIG} has rank {ranks[first]} for {first.name}, the bundle has {first.rank}; {len(differing)} "
        f"of {len(modules)} modules have others"
        for first in differing[:1]
    ]


def _pair_problems(
    config: Mapping[str, Any], lora_a: Mapping[str, FloatArray], lora_b: Mapping[str, FloatArray]
) -> list[str]:
    """Describe each module that lacks a matrix, or has another rank than adapter_config.json says."""
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
    """Read all arrays of a file as float32; add those that aren't finite floats to `problems`."""
    _open_weights(path)
    deserialize: Any = safetensors.deserialize  # safetensors' numpy reader rejects bfloat16
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
    """Return a problem if an array has values that are not finite."""
    count = int(array.size - np.count_nonzero(np.isfinite(array)))
    return [f"{name} {list(array.shape)} has {count} values that are not finite"] if count else []


def _tensor_problems(
    weights: Any, modules: Sequence[AdaptedModule], heads: Collection[str] = ()
) -> dict[str, str]:
    """Return the differences between a file's header and the tensors of the modules, by tensor name."""
    expected: dict[str, list[int]] = {}
    for module in modules:
        expected[weight_name(module.name, "A")] = [module.rank, module.in_features]
        expected[weight_name(module.name, "B")] = [module.out_features, module.rank]
    present = set(weights.keys())
    problems = {
        name: f"{name} is missing, must be F32 {shape}"
        for name, shape in expected.items()
        if name not in present
    }
    for name in sorted(present.difference(heads)):
        tensor = weights.get_slice(name)
        shape, dtype = list(tensor.get_shape()), tensor.get_dtype()
        if name not in expected:
            problems[name] = f"{name} {dtype} {shape} is unexpected: the bundle doesn't adapt it"
        elif shape != expected[name] or dtype != "F32":
            problems[name] = f"{name} is {dtype} {shape}, must be F32 {expected[name]}"
    return problems
