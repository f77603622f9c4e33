"""A cache of lowered block types in the user's cache folder: lowering takes most of an export's time.

    ~/.cache/prge/programs/<hash>   a block type's program, and the layout of a block's weights file

Files contain neither weights nor rows, since block types are lowered with random constants. The hash covers
everything that a program depends on: the graphs of its methods, constants that all blocks share, sizes,
versions, and the code that lowers. torch.export doesn't trace a cached block type either. Every export
compares programs in the engine with the graphs, whether they are cached or not.

A program has all methods of its block type, and ExecuTorch can't add one later. So block types are lowered
again for other roles, if they have these roles, and for another rank, if they have adapters: LoRA-FA's
`lora_a` is a constant, whose sizes can't be dynamic. The other block types are read from the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch.fx import Node
from torch.fx.node import map_arg

from prge.errors import EngineError, RunError
from prge.formats.bundle import file_sha256
from prge.system.atomic import write_file
from prge.system.user_cache import PROGRAMS, user_cache
from server_export.lower.block_type import (
    LAYOUTS,
    ConstantEntry,
    LoweredBlockType,
    WeightsLayout,
    bytes_of,
    lower_block_type,
)
from server_export.lower.sizes import SizedMethod

_PACKAGES = ("torch", "executorch", "torchao")
# Packages whose code lowers graphs; changes of earlier passes show in the graphs.
LOWERING_ROOMS = ("lower", "ir")
_DIGEST_BYTES = hashlib.sha256().digest_size


class ProgramCache:
    """Lowers block types, or reads them from the cache.

    Args:
        folder: folder of the files; None: a folder in the user's cache.

    Attributes:
        hits: number of block types that were read from the cache.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.hits = 0
        self._folder = folder
        if folder is None:
            with contextlib.suppress(EngineError):  # the user has no home folder
                self._folder = user_cache(PROGRAMS)

    def lower(
        self,
        methods: Mapping[str, SizedMethod],
        constants: Mapping[str, torch.Tensor],
        split_methods: Collection[str],
    ) -> LoweredBlockType:
        """Return the lowered methods, from the cache if it has them; see `lower_methods`."""
        if self._folder is None:
            return lower_methods(methods, constants, split_methods)
        path = self._folder / _key(methods, constants, split_methods)
        cached = _read(path)
        if cached is not None:
            self.hits += 1
            return cached
        lowered = lower_methods(methods, constants, split_methods)
        # If the file can't be written, the next export lowers the block type again.
        with contextlib.suppress(OSError, RunError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(path, _content(lowered))
        return lowered


def lower_methods(
    methods: Mapping[str, SizedMethod], constants: Mapping[str, torch.Tensor], split_methods: Collection[str]
) -> LoweredBlockType:
    """Lower the methods of a block type; see `lower_block_type`.

    Args:
        methods: methods by role.
        constants: their constants that all blocks share.
        split_methods: methods that are split among several delegates.
    """
    sizes = {size for method in methods.values() for size in method.sizes.values()}
    return lower_block_type(
        {role: method.program() for role, method in methods.items()}, sizes, split_methods
    )


def _key(
    methods: Mapping[str, SizedMethod], constants: Mapping[str, torch.Tensor], split_methods: Collection[str]
) -> str:
    """Return a hash of graphs, sizes, constants that all blocks share, and lowering code."""
    key = hashlib.sha256(lowering_code().encode())

    def add(*facts: object) -> None:
        key.update(("\n".join(map(str, facts)) + "\n").encode())

    add(sorted(split_methods))
    for role in sorted(methods):
        method = methods[role]
        add(role, sorted((name, repr(size)) for name, size in method.sizes.items()))
        numbers: dict[Node, str] = {}
        for node in method.block.graph_module.graph.nodes:
            numbers[node] = f"%{len(numbers)}"
            # A function's repr has its address, and names of nodes depend on how a graph was made.
            target = getattr(node.target, "__qualname__", node.target)
            arguments = map_arg((node.args, node.kwargs), lambda source, numbers=numbers: numbers[source])
            add(node.op, target, arguments, _shape(node.meta.get("val")))
    for name, value in sorted(constants.items()):
        add(name, value.dtype, list(value.shape))
        key.update(bytes_of(value))
    return key.hexdigest()[:32]


def _shape(value: Any) -> object:
    """Return dtypes and shapes of a node's value."""
    if isinstance(value, torch.Tensor):
        return value.dtype, [*value.shape]
    if isinstance(value, list | tuple):
        return [_shape(each) for each in value]
    return None


@lru_cache(maxsize=1)
def lowering_code() -> str:
    """Return versions of the libraries that lower, and hashes of this package's code that does."""
    root = Path(__file__).resolve().parents[1]
    files = sorted(path for room in LOWERING_ROOMS for path in (root / room).rglob("*.py"))
    versions = [importlib.metadata.version(name) for name in _PACKAGES]
    return "\n".join([platform.python_version(), *versions, *map(file_sha256, files)])


def _content(lowered: LoweredBlockType) -> bytes:
    """Return a lowered block type as the content of its file: a hash, and a safetensors file."""
    weights = lowered.weights
    entries = [
        [entry.name, entry.layout, entry.offset, entry.shape, _dtype_name(entry.dtype)]
        for entry in weights.entries
    ]
    fixed = [[name, [*value.shape], _dtype_name(value.dtype)] for name, value in weights.fixed.items()]
    parts: dict[str, bytes | memoryview] = {
        "program": lowered.program,
        "head": weights.head,
        "entries": json.dumps(entries).encode(),
        "fixed": json.dumps(fixed).encode(),
        **{f"fixed.{number}": bytes_of(value) for number, value in enumerate(weights.fixed.values())},
    }
    content = safetensors.numpy.save({name: np.frombuffer(part, np.uint8) for name, part in parts.items()})
    return hashlib.sha256(content).digest() + content


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read(path: Path) -> LoweredBlockType | None:
    """Read a lowered block type; None if there is no such file, or it is damaged."""
    try:
        stored = path.read_bytes()
        digest, content = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            return None
        parts = safetensors.numpy.load(content)
        entries = tuple(
            ConstantEntry(name, layout, offset, tuple(shape), getattr(torch, dtype))
            for name, layout, offset, shape, dtype in json.loads(parts["entries"].tobytes())
        )
        fixed = {
            name: _tensor(parts[f"fixed.{number}"], shape, getattr(torch, dtype))
            for number, (name, shape, dtype) in enumerate(json.loads(parts["fixed"].tobytes()))
        }
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError, SafetensorError):
        return None
    if any(entry.layout not in LAYOUTS for entry in entries):
        return None
    return LoweredBlockType(
        parts["program"].tobytes(), WeightsLayout(parts["head"].tobytes(), entries, fixed)
    )


def _tensor(content: NDArray[np.uint8], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if not content.size:
        return torch.empty(*shape, dtype=dtype)
    return torch.from_numpy(content.copy()).view(dtype).reshape(*shape)
