"""Lower a chain to files: a program for each block type, and a weights file for each block."""

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
from prge.system.memory import release_freed_memory
from server_export.derive.jvp.transform import check_jvp_rules
from server_export.lower.block_type import WeightsLayout
from server_export.lower.cache import ProgramCache
from server_export.lower.roles import LoweredRoles, lower_roles
from server_export.model.chain import ModelChain, layer_name
from server_export.progress import count_parts
from server_export.quantize.frozen import codes_name, scale_name
from server_export.trace.tables import ModelTable

EMBEDDING, BLOCK, EXPERT, HEAD = "embedding", "block", "expert", "head"
# Lowering a block type takes about as long as writing the weights of this many blocks.
_BLOCKS_PER_TYPE = 20


@dataclass(frozen=True)
class LoweredChain:
    """The files of a chain, as its manifest describes them.

    Attributes:
        programs: the programs, one for each block type.
        blocks: program, weights file and inputs of each block.
        tables: the tables of positions.
        lowered: the lowered roles of each block type, in the order of `programs`.
        shared: numbers of the blocks whose outputs other blocks share.
        layers: files and offsets of calibrated layers, by their names in the model.
    """

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
    log: Callable[[str], object] = lambda text: None,
    cache: ProgramCache | None = None,
) -> LoweredChain:
    """Write the programs, weights files and tables of a model into a folder.

    Args:
        chain: the model's blocks.
        folder: folder of the bundle.
        roles: names in prge.formats.signatures.ROLES; `forward` is always included.
        bounds: largest sizes of one call.
        log: called with a line of text when a program is written.
        cache: cache of programs; None: lower all block types.

    Raises:
        Refusal: a block can't be lowered, or the files lack a weight.
    """
    if not chain.can_generate:
        roles = {*roles} - {PREFILL, DECODE}
    if bounds.has_chunks:
        roles = {*roles, *(CHUNK_ROLE[role] for role in {FORWARD, *roles} & {*CHUNK_ROLE})}
    (folder / PROGRAMS).mkdir()
    (folder / WEIGHTS).mkdir()
    part = count_parts(_BLOCKS_PER_TYPE * len(chain.block_types) + len(chain.blocks))
    programs: list[manifest.BlockProgram] = []
    lowered: list[LoweredRoles] = []
    for first in chain.block_types:
        hits = cache.hits if cache else 0
        done = _lowered_type(chain, first, roles, bounds, cache, lambda share: part(share * _BLOCKS_PER_TYPE))
        lowered.append(done)
        name = _program_name(chain, first, {program.file for program in programs})
        interfaces = {role: method.interface() for role, method in done.methods.items()}
        programs.append(manifest.BlockProgram(_program(name), interfaces, chain.blocks[first].is_expert))
        (folder / programs[-1].file).write_bytes(done.block_type.program)
        cached = " (from the cache)" if cache and cache.hits > hits else ""
        log(f"{name}: {', '.join(done.methods)}{cached}")
        release_freed_memory()
    program_of = {first: number for number, first in enumerate(chain.block_types)}
    number_of = {module.name: number for number, module in enumerate(chain.modules)}
    blocks = []
    layers = dict[str, StoredLayer]()
    written: dict[tuple[int, tuple[str, ...]], str] = {}
    for number, block in enumerate(chain.blocks):
        program, path = program_of[chain.type_of[number]], f"{WEIGHTS}/{_block_name(chain, number)}.ptd"
        if number < chain.head_start:
            # Blocks that share their weights share a file.
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
    """Check within seconds whether the operators have the derivatives that the roles need.

    Raises:
        Refusal: the roles include `jvp`, and an operator has no forward-mode derivative.
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
    """Lower the block type whose first block has this number."""
    lowest = next(number for number, block in enumerate(chain.blocks) if block.modules)
    # Blocks below the first adapter need no training roles.
    is_trained = first in chain.type_of[lowest:]
    of_type, is_expert = chain.block_types[first], chain.blocks[first].is_expert
    if is_expert:
        # An expert computes each token by itself, so chunks and tokens need no roles of their own.
        roles = {*roles} & {*STEP_ROLES}
    return lower_roles(
        of_type.block,
        of_type.frozen.stored,
        {FORWARD, *(role for role in roles if is_trained or role not in TRAINING_ROLES)},
        bounds,
        cache=cache,
        done=done,
        saves=not is_expert,
    )


def _stored_layers(
    chain: ModelChain, number: int, path: str, weights: WeightsLayout
) -> dict[str, StoredLayer]:
    """Return the offsets of a block's calibrated layers in its weights file; none for experts."""
    rounded = {} if chain.blocks[number].is_expert else chain.rounded(number)
    offsets = {entry.name: entry.offset for entry in weights.entries}
    layers = {}
    for name, own in chain.weight_names(number).items():
        if own in rounded:
            outputs, inputs = rounded[own].codes.shape
            layer_offsets = offsets[codes_name(name)], offsets[scale_name(name)]
            layers[layer_name(own)] = StoredLayer(path, *layer_offsets, (outputs, inputs))
    return layers


def _program_name(chain: ModelChain, first: int, programs: Collection[str]) -> str:
    """Return the name of a block type's program, which no program in `programs` has."""
    if first == 0:
        return EMBEDDING
    if first >= chain.head_start:
        return HEAD
    name = EXPERT if chain.blocks[first].is_expert else BLOCK
    return f"{name}-{len(programs)}" if _program(name) in programs else name


def _program(name: str) -> str:
    """Return the path of a program in a bundle."""
    return f"{PROGRAMS}/{name}.pte"


def _block_name(chain: ModelChain, number: int) -> str:
    """Return the name of a block's weights file."""
    if number >= chain.head_start:
        return HEAD if len(chain.head_rows) == 1 else f"{HEAD}-{number - chain.head_start:02d}"
    return EMBEDDING if number == 0 else f"{number - 1:03d}"


def _write_tables(path: Path, tables: list[ModelTable]) -> None:
    """Write the values of the tables to a file, if there are any."""
    values: dict[str, torch.Tensor] = {
        str(number): torch.as_tensor(table.values).contiguous().clone()
        for number, table in enumerate(tables)
        if table.values is not None
    }
    if values:
        save_file(values, path)
