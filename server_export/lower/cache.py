"""Lowered kinds of earlier exports, in the user's cache: lowering takes most of an export's time.

    ~/.cache/prge/programs/<hash>   a kind's program, and how the weights file of a block is laid out

Neither weights nor rows are part of a file: a kind is lowered with random constants. The hash is of what the
program follows from: graphs, constants that belong to it, sizes, versions, and the code that lowers. Every
export compares the programs in the engine with the graphs, wherever they come from.

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
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from safetensors import SafetensorError
from torch.export import ExportedProgram

from prge.errors import EngineError, RunError
from prge.files.bundle import file_sha256
from prge.host.atomic import write_file
from prge.host.user_cache import PROGRAMS, user_cache
from server_export.lower.kind import (
    LAYOUTS,
    Constants,
    Entry,
    LoweredKind,
    WeightsFile,
    bytes_of,
    lower_kind,
)
from server_export.lower.sizes import Size

_PACKAGES = ("torch", "executorch", "torchao")
# Rooms of this package whose code lowers; what comes before shows in the graphs.
_ROOMS = ("lower", "ir")
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
        self, methods: Mapping[str, ExportedProgram], sizes: Iterable[Size], in_pieces: Collection[str]
    ) -> LoweredKind:
        """As `lower_kind`."""
        sizes = list(sizes)
        if self._folder is None:
            return lower_kind(methods, sizes, in_pieces)
        constants = Constants(methods)
        path = self._folder / _key(methods, constants, sizes, in_pieces)
        known = _read(path, constants.fixed)
        if known is not None:
            self.taken += 1
            return known
        kind = lower_kind(methods, sizes, in_pieces)
        # What can't be kept is lowered again by the next export.
        with contextlib.suppress(OSError, RunError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(path, _content(kind))
        return kind


def _key(
    methods: Mapping[str, ExportedProgram],
    constants: Constants,
    sizes: Iterable[Size],
    in_pieces: Collection[str],
) -> str:
    """Hash of all that a lowered kind follows from."""
    found = hashlib.sha256(_code().encode())

    def add(*facts: object) -> None:
        found.update(("\n".join(map(str, facts)) + "\n").encode())

    add(sorted(map(repr, sizes)), sorted(in_pieces))
    for method in sorted(methods):
        program = methods[method]
        add(method, program.graph_signature, program.range_constraints)
        for node in program.graph.nodes:
            # A function's own text has its address.
            target = getattr(node.target, "__qualname__", node.target)
            add(node.op, node.name, target, node.args, node.kwargs, _shape(node.meta.get("val")))
    for name, value in sorted(constants.values.items()):
        add(name, value.dtype, list(value.shape), isinstance(value, torch.nn.Parameter))
    for name, value in sorted(constants.fixed.items()):
        add(name)
        found.update(bytes_of(value))
    return found.hexdigest()[:32]


def _shape(value: Any) -> object:
    """What the meta of a node tells of its value: types and shapes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, [str(size) for size in value.shape], [str(step) for step in value.stride()]
    if isinstance(value, list | tuple):
        return [_shape(each) for each in value]
    return str(value)


@lru_cache(maxsize=1)
def _code() -> str:
    """Versions of what lowers, and hashes of the code of this package that does."""
    root = Path(__file__).resolve().parents[1]
    files = sorted(path for room in _ROOMS for path in (root / room).rglob("*.py"))
    versions = [importlib.metadata.version(name) for name in _PACKAGES]
    return "\n".join([platform.python_version(), *versions, *map(file_sha256, files)])


def _content(kind: LoweredKind) -> bytes:
    """A kind as the bytes of its file: their hash, and a safetensors file."""
    entries = [
        [entry.name, entry.layout, entry.offset, entry.shape, str(entry.dtype).removeprefix("torch.")]
        for entry in kind.weights.entries
    ]
    parts = {
        "program": kind.program,
        "head": kind.weights.head,
        "entries": json.dumps(entries).encode(),
    }
    content = safetensors.numpy.save({name: np.frombuffer(part, np.uint8) for name, part in parts.items()})
    return hashlib.sha256(content).digest() + content


def _read(path: Path, fixed: Mapping[str, torch.Tensor]) -> LoweredKind | None:
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
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError):
        return None
    if any(entry.layout not in LAYOUTS for entry in entries):
        return None
    return LoweredKind(parts["program"].tobytes(), WeightsFile(parts["head"].tobytes(), entries, dict(fixed)))
