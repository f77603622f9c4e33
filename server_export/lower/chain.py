"""A chain becomes files: a program for every kind, a weights file for every block."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from prge.contract import STEP_ROLES
from prge.files import chain as manifest
from prge.files.bundle import PROGRAMS, TABLES, WEIGHTS
from prge.files.chain import Bounds
from prge.files.signatures import DECODE, PREFILL, STACK
from server_export.lower.cache import ProgramCache
from server_export.lower.roles import LoweredRoles, lower_roles
from server_export.memory import give_back_freed
from server_export.model.chain import Chain
from server_export.model.tables import Table
from server_export.stage import count_parts

EMBEDDING, BLOCK, HEAD = "embedding", "block", "head"
# Lowering a kind takes about as long as writing the weights of so many blocks.
_OF_A_KIND = 20


@dataclass(frozen=True)
class LoweredChain:
    """What a manifest says of the blocks that were written, and each kind's programs by number."""

    kinds: tuple[manifest.Kind, ...]
    blocks: tuple[manifest.Block, ...]
    tables: tuple[manifest.Table, ...]
    lowered: tuple[LoweredRoles, ...]


def lower_chain(
    chain: Chain,
    folder: Path,
    roles: Collection[str],
    bounds: Bounds,
    tell: Callable[[str], object] = lambda text: None,
    cache: ProgramCache | None = None,
) -> LoweredChain:
    """Write the programs, weights files and tables of a model into a folder.

    Args:
        chain: the model's blocks.
        folder: of the bundle.
        roles: of prge.files.chain.ROLES; `stack` is always there.
        bounds: sizes of one call.
        tell: is told of every kind when its program is written.
        cache: of programs; None: lower in any case.

    Raises:
        BundleError: a block can't be lowered, or the files lack a weight.
    """
    last = len(chain.blocks) - 1
    if not chain.generates:
        roles = {*roles} - {PREFILL, DECODE}
    (folder / PROGRAMS).mkdir()
    (folder / WEIGHTS).mkdir()
    lowest = next(number for number, block in enumerate(chain.blocks) if block.adapter)
    above = {chain.kind_of[number] for number in range(lowest, last + 1)}
    kinds: list[manifest.Kind] = []
    lowered: list[LoweredRoles] = []
    place: dict[int, int] = {}
    part = count_parts(_OF_A_KIND * len(chain.kinds) + len(chain.blocks))
    for first, kind in chain.kinds.items():
        is_head = first >= chain.end
        name = EMBEDDING if first == 0 else HEAD if is_head else BLOCK
        if name == BLOCK and any(known.program == f"{PROGRAMS}/{BLOCK}.pte" for known in kinds):
            name = f"{BLOCK}-{len(kinds)}"
        taken = cache.taken if cache else 0
        done = lower_roles(
            kind.graph_module,
            chain.blocks[first].adapter,
            kind.frozen.stored,
            {STACK, *(role for role in roles if first in above or role not in STEP_ROLES)},
            bounds,
            is_head,
            cache,
            lambda share: part(share * _OF_A_KIND),
        )
        place[first] = len(kinds)
        lowered.append(done)
        kinds.append(manifest.Kind(f"{PROGRAMS}/{name}.pte", done.methods))
        (folder / kinds[-1].program).write_bytes(done.kind.program)
        cached = " (from the cache)" if cache and cache.taken > taken else ""
        tell(f"{name}: {', '.join(done.methods)}{cached}")
        give_back_freed()
    modules = {module.name: number for number, module in enumerate(chain.modules)}
    blocks = []
    for number, block in enumerate(chain.blocks):
        kind_number = place[chain.kind_of[number]]
        name = EMBEDDING if number == 0 else f"{number - 1:03d}"
        if number >= chain.end:
            name = HEAD if chain.end == last else f"{HEAD}-{number - chain.end:02d}"
        path = f"{WEIGHTS}/{name}.ptd"
        lowered[kind_number].write(folder / path, chain.tensors(number))
        adapter = tuple(modules[chain.adapter[name]] for name in block.adapter)
        blocks.append(manifest.Block(kind_number, path, block.tables, adapter))
        part()
    _write_tables(folder / TABLES, chain.tables.all)
    tables = tuple(
        manifest.Table(table.kind, table.window, table.first, table.members) for table in chain.tables.all
    )
    return LoweredChain(tuple(kinds), tuple(blocks), tables, tuple(lowered))


def _write_tables(path: Path, tables: list[Table]) -> None:
    values: dict[str, torch.Tensor] = {
        str(number): table.values.contiguous().clone()
        for number, table in enumerate(tables)
        if table.values is not None
    }
    if values:
        save_file(values, path)
