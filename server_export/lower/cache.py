"""Lowered kinds of earlier exports, in the user's cache: lowering takes most of an export's time.

    ~/.cache/prge/programs/<hash>   a kind's program, and how the weights file of a block is laid out

Neither weights nor rows are part of a file: a kind is lowered with random constants. The hash is of what the
program follows from: the graphs of its methods, constants that all blocks share, sizes, versions, and the
code that lowers. So torch.export doesn't trace a kind that is taken either. Every export compares the
programs in the engine with the graphs, wherever they come from.

A program has all methods of its kind, and ExecuTorch has no way to add one: other roles are another program
of the kinds that have these roles. So is another rank of the kinds with adapters, of which LoRA-FA's `lora_a`
is a constant, whose sizes can't be unknown. The other kinds are taken from the cache.
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
from prge.files.bundle import file_sha256
from prge.host.atomic import write_file
from prge.host.user_cache import PROGRAMS, user_cache
from server_export.lower.kind import LAYOUTS, Entry, LoweredKind, WeightsFile, bytes_of, lower_kind
from server_export.lower.sizes import Method

_PACKAGES = ("torch", "executorch", "torchao")
# Rooms of this package whose code lowers; what comes before shows in the graphs.
LOWERING_ROOMS = ("lower", "ir")
_DIGEST_BYTES = hashlib.sha256().digest_size


class ProgramCache:
    """Lowers kinds, or takes them from the cache; `taken` counts these.

    Args:
        folder: of the files; by default in the user's cache. None where there is none.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.taken = 0
        self._folder = folder
        if folder is None:
            with contextlib.suppress(EngineError):  # without a home
                self._folder = user_cache(PROGRAMS)

    def lower(
        self, methods: Mapping[str, Method], constants: Mapping[str, torch.Tensor], in_pieces: Collection[str]
    ) -> LoweredKind:
        """As `lower_methods`."""
        if self._folder is None:
            return lower_methods(methods, constants, in_pieces)
        path = self._folder / _key(methods, constants, in_pieces)
        known = _read(path)
        if known is not None:
            self.taken += 1
            return known
        kind = lower_methods(methods, constants, in_pieces)
        # What can't be kept is lowered again by the next export.
        with contextlib.suppress(OSError, RunError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(path, _content(kind))
        return kind


def lower_methods(
    methods: Mapping[str, Method], constants: Mapping[str, torch.Tensor], in_pieces: Collection[str]
) -> LoweredKind:
    """Lower a kind's methods; `constants` are those of them that all blocks share. See `lower_kind`."""
    sizes = {size for method in methods.values() for size in method.sizes.values()}
    return lower_kind({role: method.program() for role, method in methods.items()}, sizes, in_pieces)


def _key(
    methods: Mapping[str, Method], constants: Mapping[str, torch.Tensor], in_pieces: Collection[str]
) -> str:
    """Hash of all that a lowered kind follows from: graphs, sizes, constants that all blocks share, code."""
    found = hashlib.sha256(lowering_code().encode())

    def add(*facts: object) -> None:
        found.update(("\n".join(map(str, facts)) + "\n").encode())

    add(sorted(in_pieces))
    for role in sorted(methods):
        method = methods[role]
        add(role, sorted((name, repr(size)) for name, size in method.sizes.items()))
        numbers: dict[Node, str] = {}
        for node in method.block.graph_module.graph.nodes:
            numbers[node] = f"%{len(numbers)}"
            # A function's own text has its address, and names of nodes tell how a graph was made.
            target = getattr(node.target, "__qualname__", node.target)
            arguments = map_arg((node.args, node.kwargs), lambda source, numbers=numbers: numbers[source])
            add(node.op, target, arguments, _shape(node.meta.get("val")))
    for name, value in sorted(constants.items()):
        add(name, value.dtype, list(value.shape))
        found.update(bytes_of(value))
    return found.hexdigest()[:32]


def _shape(value: Any) -> object:
    """Types and shapes of a node's value."""
    if isinstance(value, torch.Tensor):
        return value.dtype, [*value.shape]
    if isinstance(value, list | tuple):
        return [_shape(each) for each in value]
    return None


@lru_cache(maxsize=1)
def lowering_code() -> str:
    """Versions of what lowers, and hashes of the code of this package that does."""
    root = Path(__file__).resolve().parents[1]
    files = sorted(path for room in LOWERING_ROOMS for path in (root / room).rglob("*.py"))
    versions = [importlib.metadata.version(name) for name in _PACKAGES]
    return "\n".join([platform.python_version(), *versions, *map(file_sha256, files)])


def _content(kind: LoweredKind) -> bytes:
    """A kind as the bytes of its file: their hash, and a safetensors file."""
    weights = kind.weights
    entries = [
        [entry.name, entry.layout, entry.offset, entry.shape, _name_of(entry.dtype)]
        for entry in weights.entries
    ]
    fixed = [[name, [*value.shape], _name_of(value.dtype)] for name, value in weights.fixed.items()]
    parts: dict[str, bytes | memoryview] = {
        "program": kind.program,
        "head": weights.head,
        "entries": json.dumps(entries).encode(),
        "fixed": json.dumps(fixed).encode(),
        **{f"fixed.{number}": bytes_of(value) for number, value in enumerate(weights.fixed.values())},
    }
    content = safetensors.numpy.save({name: np.frombuffer(part, np.uint8) for name, part in parts.items()})
    return hashlib.sha256(content).digest() + content


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read(path: Path) -> LoweredKind | None:
    """The kind in a file; None where there is none, or it is damaged."""
    try:
        stored = path.read_bytes()
        digest, content = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            return None
        parts = safetensors.numpy.load(content)
        entries = tuple(
            Entry(name, layout, offset, tuple(shape), getattr(torch, dtype))
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
    return LoweredKind(parts["program"].tobytes(), WeightsFile(parts["head"].tobytes(), entries, fixed))


def _tensor(content: NDArray[np.uint8], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if not content.size:
        return torch.empty(*shape, dtype=dtype)
    return torch.from_numpy(content.copy()).view(dtype).reshape(*shape)
