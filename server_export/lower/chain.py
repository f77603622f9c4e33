"""A chain becomes files: a program for every kind, a weights file for every block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from prge.files import chain as manifest
from prge.files.bundle import PROGRAMS, TABLES, WEIGHTS
from prge.files.chain import Bounds
from prge.files.layers import StoredLayer
from prge.files.signatures import DECODE, IN_PIECES, OF_STEPS, PREFILL, STACK, STEP_ROLES, TANGENT
from server_export.derive.tangent.transform import check_rules
from server_export.lower.cache import ProgramCache
from server_export.lower.kind import WeightsFile
from server_export.lower.roles import LoweredRoles, lower_roles
from server_export.memory import give_back_freed
from server_export.model.chain import ModelChain, layer_of
from server_export.quantize.frozen import codes_of, scale_of
from server_export.stage import count_parts
from server_export.trace.tables import ModelTable

EMBEDDING, BLOCK, EXPERT, HEAD = "embedding", "block", "expert", "head"
# Lowering a kind takes about as long as writing the weights of so many blocks.
_OF_A_KIND = 20


@dataclass(frozen=True)
class LoweredChain:
    """What a manifest says of the blocks that were written and of shared values, each kind's programs by
    number, and where calibrated layers lie, by their names in the model."""

    kinds: tuple[manifest.Kind, ...]
    blocks: tuple[manifest.Block, ...]
    tables: tuple[manifest.Table, ...]
    lowered: tuple[LoweredRoles, ...]
    shared: tuple[int, ...] = ()
    layers: Mapping[str, StoredLayer] = field(default_factory=dict)


def lower_chain(
    chain: ModelChain,
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
        Refusal: a block can't be lowered, or the files lack a weight.
    """
    if not chain.generates:
        roles = {*roles} - {PREFILL, DECODE}
    if bounds.has_pieces:
        roles = {*roles, *(IN_PIECES[role] for role in {STACK, *roles} & {*IN_PIECES})}
    (folder / PROGRAMS).mkdir()
    (folder / WEIGHTS).mkdir()
    part = count_parts(_OF_A_KIND * len(chain.kinds) + len(chain.blocks))
    kinds: list[manifest.Kind] = []
    lowered: list[LoweredRoles] = []
    for first in chain.kinds:
        taken = cache.taken if cache else 0
        done = _lowered_kind(chain, first, roles, bounds, cache, lambda share: part(share * _OF_A_KIND))
        lowered.append(done)
        name = _kind_name(chain, first, {kind.program for kind in kinds})
        interfaces = {role: method.interface() for role, method in done.methods.items()}
        kinds.append(manifest.Kind(_program(name), interfaces, chain.blocks[first].is_expert))
        (folder / kinds[-1].program).write_bytes(done.kind.program)
        cached = " (from the cache)" if cache and cache.taken > taken else ""
        tell(f"{name}: {', '.join(done.methods)}{cached}")
        give_back_freed()
    place = {first: number for number, first in enumerate(chain.kinds)}
    number_of = {module.name: number for number, module in enumerate(chain.modules)}
    blocks = []
    layers = dict[str, StoredLayer]()
    written: dict[tuple[int, tuple[str, ...]], str] = {}
    for number, block in enumerate(chain.blocks):
        kind, path = place[chain.kind_of[number]], f"{WEIGHTS}/{_block_name(chain, number)}.ptd"
        if number < chain.end:
            # A layer that is used again has the file of its first use.
            path = written.setdefault((kind, block.weights), path)
        if not (folder / path).exists():
            lowered[kind].write(folder / path, chain.tensors(number))
            layers |= _stored_layers(chain, number, path, lowered[kind].kind.weights)
        modules = tuple(number_of[layer] for layer in block.modules)
        past = lowered[kind].past
        blocks.append(manifest.Block(kind, path, block.tables, modules, block.takes, past))
        part()
    _write_tables(folder / TABLES, chain.tables.all)
    tables = tuple(
        manifest.Table(table.kind, table.window, table.first, table.members) for table in chain.tables.all
    )
    return LoweredChain(tuple(kinds), tuple(blocks), tables, tuple(lowered), tuple(chain.shared), layers)


def check_operators(chain: ModelChain, roles: Collection[str]) -> None:
    """Refuse in seconds what would be refused when a block is lowered.

    Raises:
        Refusal: an operator has no forward-mode derivative, and roles have `tangent`.
    """
    if TANGENT not in roles:
        return
    for first in chain.kinds:
        if first > 0:
            block = chain.kinds[first].block
            changing = {str(node.target) for port, node in block.inputs.items() if port.changes}
            check_rules(block.graph_module, changing)


def _lowered_kind(
    chain: ModelChain,
    first: int,
    roles: Collection[str],
    bounds: Bounds,
    cache: ProgramCache | None,
    done: Callable[[float], object],
) -> LoweredRoles:
    """The programs of the kind whose first block has this number."""
    lowest = next(number for number, block in enumerate(chain.blocks) if block.modules)
    # No step goes through blocks below the first adapter.
    is_stepped = first in chain.kind_of[lowest:]
    kind, is_expert = chain.kinds[first], chain.blocks[first].is_expert
    if is_expert:
        # It knows nothing of other tokens: a forward pass is one, whatever its tokens are.
        roles = {*roles} & {*STEP_ROLES}
    return lower_roles(
        kind.block,
        kind.frozen.stored,
        {STACK, *(role for role in roles if is_stepped or role not in OF_STEPS)},
        bounds,
        cache=cache,
        done=done,
        saves=not is_expert,
    )


def _stored_layers(chain: ModelChain, number: int, path: str, weights: WeightsFile) -> dict[str, StoredLayer]:
    """Where the calibrated layers of a block lie in its weights file; experts have no names of their own."""
    rounded = {} if chain.blocks[number].is_expert else chain.rounded(number)
    offsets = {entry.name: entry.offset for entry in weights.entries}
    found = {}
    for name, own in chain.own_names(number).items():
        if own in rounded:
            outputs, inputs = rounded[own].codes.shape
            places = offsets[codes_of(name)], offsets[scale_of(name)]
            found[layer_of(own)] = StoredLayer(path, *places, (outputs, inputs))
    return found


def _kind_name(chain: ModelChain, first: int, programs: Collection[str]) -> str:
    if first == 0:
        return EMBEDDING
    if first >= chain.end:
        return HEAD
    name = EXPERT if chain.blocks[first].is_expert else BLOCK
    return f"{name}-{len(programs)}" if _program(name) in programs else name


def _program(name: str) -> str:
    return f"{PROGRAMS}/{name}.pte"


def _block_name(chain: ModelChain, number: int) -> str:
    if number >= chain.end:
        return HEAD if len(chain.head_rows) == 1 else f"{HEAD}-{number - chain.end:02d}"
    return EMBEDDING if number == 0 else f"{number - 1:03d}"


def _write_tables(path: Path, tables: list[ModelTable]) -> None:
    values: dict[str, torch.Tensor] = {
        str(number): torch.as_tensor(table.values).contiguous().clone()
        for number, table in enumerate(tables)
        if table.values is not None
    }
    if values:
        save_file(values, path)
