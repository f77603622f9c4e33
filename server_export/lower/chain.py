"""A chain becomes files: a program for every kind, a weights file for every block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from prge.formats import chain as manifest
from prge.formats.bundle import PROGRAMS, TABLES, WEIGHTS
from prge.formats.chain import Bounds
from prge.formats.layers import StoredLayer
from prge.formats.signatures import CHUNK_ROLE, DECODE, FORWARD, JVP, PREFILL, STEP_ROLES, TRAINING_ROLES
from server_export.derive.jvp.transform import check_jvp_rules
from server_export.lower.block_type import WeightsLayout
from server_export.lower.cache import ProgramCache
from server_export.lower.roles import LoweredRoles, lower_roles
from server_export.memory import release_freed_memory
from server_export.model.chain import ModelChain, layer_name
from server_export.progress import count_parts
from server_export.quantize.frozen import codes_name, scale_name
from server_export.trace.tables import ModelTable

EMBEDDING, BLOCK, EXPERT, HEAD = "embedding", "block", "expert", "head"
# Lowering a kind takes about as long as writing the weights of so many blocks.
_OF_A_TYPE = 20


@dataclass(frozen=True)
class LoweredChain:
    """What a manifest says of the blocks that were written and of shared values, each kind's programs by
    number, and where calibrated layers lie, by their names in the model."""

    programs: tuple[manifest.BlockProgram, ...]
    blocks: tuple[manifest.BlockSpec, ...]
    tables: tuple[manifest.TableSpec, ...]
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
        roles: of prge.formats.chain.ROLES; `stack` is always there.
        bounds: sizes of one call.
        tell: is told of every kind when its program is written.
        cache: of programs; None: lower in any case.

    Raises:
        Refusal: a block can't be lowered, or the files lack a weight.
    """
    if not chain.can_generate:
        roles = {*roles} - {PREFILL, DECODE}
    if bounds.has_chunks:
        roles = {*roles, *(CHUNK_ROLE[role] for role in {FORWARD, *roles} & {*CHUNK_ROLE})}
    (folder / PROGRAMS).mkdir()
    (folder / WEIGHTS).mkdir()
    part = count_parts(_OF_A_TYPE * len(chain.block_types) + len(chain.blocks))
    programs: list[manifest.BlockProgram] = []
    lowered: list[LoweredRoles] = []
    for first in chain.block_types:
        taken = cache.taken if cache else 0
        done = _lowered_type(chain, first, roles, bounds, cache, lambda share: part(share * _OF_A_TYPE))
        lowered.append(done)
        name = _program_name(chain, first, {program.file for program in programs})
        interfaces = {role: method.interface() for role, method in done.methods.items()}
        programs.append(manifest.BlockProgram(_program(name), interfaces, chain.blocks[first].is_expert))
        (folder / programs[-1].file).write_bytes(done.block_type.program)
        cached = " (from the cache)" if cache and cache.taken > taken else ""
        tell(f"{name}: {', '.join(done.methods)}{cached}")
        release_freed_memory()
    place = {first: number for number, first in enumerate(chain.block_types)}
    number_of = {module.name: number for number, module in enumerate(chain.modules)}
    blocks = []
    layers = dict[str, StoredLayer]()
    written: dict[tuple[int, tuple[str, ...]], str] = {}
    for number, block in enumerate(chain.blocks):
        program, path = place[chain.type_of[number]], f"{WEIGHTS}/{_block_name(chain, number)}.ptd"
        if number < chain.head_start:
            # A layer that is used again has the file of its first use.
            path = written.setdefault((program, block.weights), path)
        if not (folder / path).exists():
            lowered[program].write(folder / path, chain.tensors(number))
            layers |= _stored_layers(chain, number, path, lowered[program].block_type.weights)
        modules = tuple(number_of[layer] for layer in block.modules)
        past = lowered[program].past
        blocks.append(manifest.BlockSpec(program, path, block.tables, modules, block.shared_in, past))
        part()
    _write_tables(folder / TABLES, chain.tables.all)
    tables = tuple(
        manifest.TableSpec(table.type, table.window, table.first, table.members) for table in chain.tables.all
    )
    return LoweredChain(tuple(programs), tuple(blocks), tables, tuple(lowered), tuple(chain.shared), layers)


def check_operators(chain: ModelChain, roles: Collection[str]) -> None:
    """Refuse in seconds what would be refused when a block is lowered.

    Raises:
        Refusal: an operator has no forward-mode derivative, and roles have `tangent`.
    """
    if JVP not in roles:
        return
    for first in chain.block_types:
        if first > 0:
            block = chain.block_types[first].block
            changing = {str(node.target) for port, node in block.inputs.items() if port.is_differentiable}
            check_jvp_rules(block.graph_module, changing)


def _lowered_type(
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
    is_stepped = first in chain.type_of[lowest:]
    of_type, is_expert = chain.block_types[first], chain.blocks[first].is_expert
    if is_expert:
        # It knows nothing of other tokens: a forward pass is one, whatever its tokens are.
        roles = {*roles} & {*STEP_ROLES}
    return lower_roles(
        of_type.block,
        of_type.frozen.stored,
        {FORWARD, *(role for role in roles if is_stepped or role not in TRAINING_ROLES)},
        bounds,
        cache=cache,
        done=done,
        saves=not is_expert,
    )


def _stored_layers(
    chain: ModelChain, number: int, path: str, weights: WeightsLayout
) -> dict[str, StoredLayer]:
    """Where the calibrated layers of a block lie in its weights file; experts have no names of their own."""
    rounded = {} if chain.blocks[number].is_expert else chain.rounded(number)
    offsets = {entry.name: entry.offset for entry in weights.entries}
    found = {}
    for name, own in chain.weight_names(number).items():
        if own in rounded:
            outputs, inputs = rounded[own].codes.shape
            places = offsets[codes_name(name)], offsets[scale_name(name)]
            found[layer_name(own)] = StoredLayer(path, *places, (outputs, inputs))
    return found


def _program_name(chain: ModelChain, first: int, programs: Collection[str]) -> str:
    if first == 0:
        return EMBEDDING
    if first >= chain.head_start:
        return HEAD
    name = EXPERT if chain.blocks[first].is_expert else BLOCK
    return f"{name}-{len(programs)}" if _program(name) in programs else name


def _program(name: str) -> str:
    return f"{PROGRAMS}/{name}.pte"


def _block_name(chain: ModelChain, number: int) -> str:
    if number >= chain.head_start:
        return HEAD if len(chain.head_rows) == 1 else f"{HEAD}-{number - chain.head_start:02d}"
    return EMBEDDING if number == 0 else f"{number - 1:03d}"


def _write_tables(path: Path, tables: list[ModelTable]) -> None:
    values: dict[str, torch.Tensor] = {
        str(number): torch.as_tensor(table.values).contiguous().clone()
        for number, table in enumerate(tables)
        if table.values is not None
    }
    if values:
        save_file(values, path)
