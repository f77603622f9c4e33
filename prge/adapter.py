"""The trained adapter: every module's `lora_b` in one vector, and PEFT folders in and out.

    values  [ module 0: rank x out | module 1: rank x out | ... ]       one float32 vector, contract order
    named   {module name: view [rank, out]}                             views into it
    stack   {"lora_b.<module>": [copies, rank, out]}                    what a program takes

A PEFT folder holds `adapter_config.json` and `adapter_model.safetensors`. PEFT's `lora_B` is [out, rank], so
it is transposed on the way; `lora_A` never changes and is copied from the adapter that the bundle came with.
Every folder written here carries `hashes.json`; a folder that carries one isn't read when a file differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from prge.atomic import new_folder
from prge.bundle import file_sha256
from prge.contract import AdaptedModule
from prge.engine import Array, FloatArray
from prge.errors import AdapterError
from prge.regular_files import read_regular

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
HASHES = "hashes.json"
_PREFIX = "base_model.model."
_A = ".lora_A.weight"
_B = ".lora_B.weight"


class Adapter:
    """`lora_b` of all modules in one float32 vector, `values`; `modules` gives its layout.

    Raises:
        ValueError: `values` is not a contiguous float32 vector of the modules' total size.
    """

    def __init__(self, modules: Sequence[AdaptedModule], values: FloatArray) -> None:
        self.modules = tuple(modules)
        size = adapter_size(modules)
        if values.shape != (size,) or values.dtype != np.float32 or not values.flags.c_contiguous:
            raise ValueError(f"values is {values.dtype} {values.shape}, must be contiguous float32 ({size},)")
        self.values = values
        names = [module.name for module in self.modules]
        self._named = dict(zip(names, _views(self.modules, values), strict=True))

    @classmethod
    def zeros(cls, modules: Sequence[AdaptedModule]) -> Adapter:
        """The adapter that changes nothing."""
        return cls(modules, np.zeros(adapter_size(modules), np.float32))

    @property
    def size(self) -> int:
        """How many numbers are trained."""
        return len(self.values)

    def named(self) -> dict[str, FloatArray]:
        """Views [rank, out] into `values` by module name, always the same; writing to one writes to it."""
        return dict(self._named)

    def copy(self) -> Adapter:
        """An adapter with its own values."""
        return Adapter(self.modules, self.values.copy())


class LoraBStack:
    """Buffers for the `lora_b` inputs of a stack program, allocated once and filled copy by copy.

    `inputs` maps every program input name to its f32 [copies, rank, out] buffer, contiguous. The engine reads
    them in place, so fill all copies before a forward.
    """

    def __init__(self, modules: Sequence[AdaptedModule], copies: int) -> None:
        self.modules = tuple(modules)
        self.copies = copies
        self.inputs: dict[str, FloatArray] = {
            module.input_name: np.zeros((copies, module.rank, module.out_features), np.float32)
            for module in self.modules
        }
        self._size = adapter_size(self.modules)

    def fill(self, copy: int, values: FloatArray) -> None:
        """Write the adapter vector `values` f32 [size] as copy number `copy`; no temporary arrays.

        Raises:
            ValueError: `copy` is out of range, or `values` has another size.
        """
        if not 0 <= copy < self.copies:
            raise ValueError(f"copy is {copy}, the stack has {self.copies}")
        if values.shape != (self._size,):
            raise ValueError(f"values has shape {values.shape}, must be ({self._size},)")
        for buffer, view in zip(self.inputs.values(), _views(self.modules, values), strict=True):
            buffer[copy] = view


def adapter_size(modules: Sequence[AdaptedModule]) -> int:
    """How many numbers the adapter of these modules trains."""
    return sum(module.rank * module.out_features for module in modules)


def stack(adapter: Adapter, copies: int) -> dict[str, FloatArray]:
    """Program inputs with the same adapter in every copy: f32 [copies, rank, out] by input name."""
    buffers = LoraBStack(adapter.modules, copies)
    for copy in range(copies):
        buffers.fill(copy, adapter.values)
    return buffers.inputs


def read_peft(
    folder: Path | str, modules: Sequence[AdaptedModule], template_folder: Path | str | None = None
) -> Adapter:
    """Read the adapter of a PEFT folder.

    Args:
        folder: holds `adapter_config.json` and `adapter_model.safetensors`, float32.
        modules: what the program adapts.
        template_folder: the bundle's own adapter. Its `lora_A` and its scale are inside the program; an
            adapter trained with others would silently mean something else, and given this it is refused.

    Raises:
        AdapterError: every tensor that is missing, unexpected, of another shape or dtype, or not finite;
            a damaged file; a file that `hashes.json` doesn't name so.
    """
    folder = Path(folder)
    config = _read_config(folder)
    _check_hashes(folder)
    problems = _config_problems(config, modules)
    frozen: Mapping[str, Array] = {}
    if template_folder is not None:
        template = Path(template_folder)
        problems += _scale_problems(config, _read_config(template))
        frozen = read_arrays(template / WEIGHTS)
    adapter = Adapter.zeros(modules)
    with _open_weights(folder / WEIGHTS) as weights:
        bad = _tensor_problems(weights, modules)
        problems += bad.values()
        for module, view in zip(adapter.modules, _views(adapter.modules, adapter.values), strict=True):
            name = _PREFIX + module.name + _B
            if name not in bad:
                lora_b = weights.get_tensor(name)
                problems += _infinite(name, lora_b)
                view[...] = lora_b.T
            name = _PREFIX + module.name + _A
            if name not in bad:
                lora_a = weights.get_tensor(name)
                problems += _infinite(name, lora_a)
                if template_folder is not None and not np.array_equal(lora_a, frozen.get(name, ())):
                    problems.append(f"{name} differs from the one inside the program")
    if problems:
        raise AdapterError(
            f"the adapter {folder} doesn't fit the program",
            problems,
            remedy="give an adapter of this bundle, or export a bundle from it with --adapter",
        )
    return adapter


def write_peft(
    folder: Path | str,
    adapter: Adapter,
    template_folder: Path | str,
    extra: Mapping[str, Mapping[str, Array] | bytes] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write an adapter as a PEFT folder, whole or not at all; the same arrays give the same bytes.

    Args:
        folder: the new folder; it appears by one rename after everything is on storage.
        adapter: the `lora_b` to write.
        template_folder: the bundle's adapter; its configuration and `lora_A` are copied unchanged.
        extra: further files by name: arrays become safetensors, bytes are written as they are.
        overwrite: whether an existing folder is replaced, by exchanging the two.

    Raises:
        AdapterError: the template is damaged or not of these modules.
        RunError: the folder exists, or the storage is full or refuses.
    """
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
            )
        for module, view in zip(adapter.modules, _views(adapter.modules, adapter.values), strict=True):
            tensors[_PREFIX + module.name + _A] = weights.get_tensor(_PREFIX + module.name + _A)
            tensors[_PREFIX + module.name + _B] = np.ascontiguousarray(view.T)
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
                f"{path} can't be read", [f"{error}"], remedy="give a file that prge wrote"
            ) from None


def _views(modules: Sequence[AdaptedModule], values: FloatArray) -> list[FloatArray]:
    views, start = [], 0
    for module in modules:
        end = start + module.rank * module.out_features
        views.append(values[start:end].reshape(module.rank, module.out_features))
        start = end
    return views


def _serialize(tensors: Mapping[str, Array]) -> bytes:
    # "pt" names the layout for transformers and PEFT, which refuse a safetensors file without it.
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return bytes(safetensors.numpy.save(contiguous, metadata={"format": "pt"}))


def _read_bytes(path: Path) -> bytes:
    try:
        return read_regular(path, follow=True)  # files of a hub's cache are links
    except OSError as error:
        raise AdapterError(
            f"{path.parent} is not a PEFT adapter",
            [f"{path.name}: {error.strerror or error}"],
            remedy=f"give a folder with {CONFIG} and {WEIGHTS}",
        ) from None


def _read_config(folder: Path) -> dict[str, Any]:
    content = _read_bytes(folder / CONFIG)
    try:
        config = json.loads(content)
    except ValueError as error:
        raise AdapterError(
            f"{folder / CONFIG} is damaged", [str(error)], remedy="copy the folder again"
        ) from None
    if not isinstance(config, dict):
        raise AdapterError(
            f"{folder / CONFIG} is damaged", ["it holds no JSON object"], remedy="copy the folder again"
        )
    return config


def _open_weights(path: Path) -> Any:
    """Open a safetensors file: header checked, arrays read when asked for."""
    if not path.is_file():
        raise AdapterError(
            f"{path.parent} is not a PEFT adapter",
            [f"{path.name} is missing"],
            remedy=f"give a folder with {CONFIG} and {WEIGHTS}",
        )
    try:
        return safetensors.safe_open(str(path), framework="numpy")
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise AdapterError(f"{path} is damaged", [f"{error}"], remedy="copy the folder again") from None


def _check_hashes(folder: Path, only: str | None = None) -> None:
    """Compare the folder's files with its `hashes.json`, where it has one."""
    path = folder / HASHES
    if not path.is_file():
        return
    try:
        hashes = {str(name): str(value) for name, value in json.loads(path.read_bytes()).items()}
    except (ValueError, AttributeError) as error:
        raise AdapterError(f"{path} is damaged", [str(error)], remedy="copy the folder again") from None
    problems = []
    for name, expected in hashes.items():
        if only is not None and name != only:
            continue
        if Path(name).name != name:
            problems.append(f"{HASHES} names a file outside the folder: {name!r}")
        elif not (folder / name).is_file():
            problems.append(f"{name} is missing")
        elif file_sha256(folder / name) != expected:
            problems.append(f"{name} was changed after it was written: its SHA-256 differs")
    if problems:
        raise AdapterError(
            f"{folder} is damaged",
            problems,
            remedy=f"copy the folder again; if the change was meant, delete its {HASHES}",
        )


def _config_problems(config: Mapping[str, Any], modules: Sequence[AdaptedModule]) -> list[str]:
    problems = []
    if str(config.get("peft_type", "")).upper() != "LORA":
        problems.append(f"{CONFIG} has peft_type {config.get('peft_type')!r}, must be 'LORA'")
    for key in ("use_rslora", "use_dora"):
        if config.get(key):
            problems.append(f"{CONFIG} has {key}, which a LoRA-FA program doesn't compute")
    ranks = {module.rank for module in modules}
    if not config.get("rank_pattern") and config.get("r") not in ranks:
        problems.append(f"{CONFIG} has rank r = {config.get('r')!r}, the program has {sorted(ranks)}")
    return problems


def _scale_problems(config: Mapping[str, Any], template: Mapping[str, Any]) -> list[str]:
    """Where alpha / rank differs from the scale inside the program."""
    return [
        f"{CONFIG} has {key} {config.get(key)!r}, the program was exported with {template.get(key)!r}"
        for key in ("lora_alpha", "rank_pattern", "alpha_pattern")
        if (config.get(key) or None) != (template.get(key) or None)
    ]


def _infinite(name: str, array: Array) -> list[str]:
    count = int(array.size - np.count_nonzero(np.isfinite(array)))
    return [f"{name} {list(array.shape)} has {count} values that are not finite"] if count else []


def _tensor_problems(weights: Any, modules: Sequence[AdaptedModule]) -> dict[str, str]:
    """By tensor name, everything in which a file's header differs from what the modules need."""
    expected: dict[str, list[int]] = {}
    for module in modules:
        expected[_PREFIX + module.name + _A] = [module.rank, module.in_features]
        expected[_PREFIX + module.name + _B] = [module.out_features, module.rank]
    found = set(weights.keys())
    problems = {
        name: f"{name} is missing, must be F32 {shape}"
        for name, shape in expected.items()
        if name not in found
    }
    for name in sorted(found):
        tensor = weights.get_slice(name)
        shape, dtype = list(tensor.get_shape()), tensor.get_dtype()
        if name not in expected:
            problems[name] = f"{name} {dtype} {shape} is unexpected: the program doesn't adapt it"
        elif shape != expected[name] or dtype != "F32":
            problems[name] = f"{name} is {dtype} {shape}, must be F32 {expected[name]}"
    return problems
