"""`--adapt-layers auto`: where adapters go and at which ranks, by contribution within time and memory.

    contributions, costs of places -> question -> choice -> adapter of the layers that were chosen

What is counted of a step: operations of its matrix products, as `prge estimate` tells them; bytes of trained
values, their gradient and Adam's moments, and of the states that are kept between blocks; trained numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prge.contract import Contract
from prge.costs import Outline, bytes_text, work_of
from prge.errors import ConfigError
from server_export.allocation import Choice, Depth, Option, Part, Question, choose
from server_export.model.blocks import block_names, in_top_blocks
from server_export.model.contributions import Contribution
from server_export.model.loading import LoadedModel
from server_export.model.lora_fa import ALL_LINEAR
from server_export.model.outline import outline_of
from server_export.model.start import StartAdapter, start_adapter
from server_export.settings import ExportConfig, SearchName

# Rows of a call whose states are counted.
CALL_ROWS = 4
# A trained number with its gradient and Adam's two moments, f32.
_BYTES_OF_A_NUMBER = 16


@dataclass(frozen=True)
class Limits:
    """What adapters may cost: a share of the time of a step with adapters everywhere, bytes, and numbers.

    Without `bytes` there is no bound of memory.
    """

    time: float
    bytes: int | None
    numbers: int


@dataclass(frozen=True)
class Places:
    """Which layers are adapted and why.

    `ranks` by layer that was chosen; `share` what they contribute of all layers at the highest ranks; `time`
    of a step, as a share of one with adapters everywhere.
    """

    ranks: Mapping[str, int]
    contributions: Mapping[str, Contribution]
    lowest: int
    blocks: int
    share: float
    time: float
    bytes: int
    numbers: int
    limits: Limits
    search: SearchName

    @property
    def why(self) -> str:
        """In a sentence."""
        ranks = sorted(self.ranks.values())
        memory = "" if self.limits.bytes is None else f" of {bytes_text(self.limits.bytes)}"
        return (
            f"{len(self.ranks)} of {len(self.contributions)} layers, from block {self.lowest + 1} of "
            f"{self.blocks} up, ranks {ranks[0]} to {ranks[-1]}: {self.share:.0%} of what all could "
            f"contribute, for {self.time:.0%} of the time (limit {self.limits.time:.0%}), "
            f"{bytes_text(self.bytes)}{memory} and {self.numbers:,} of {self.limits.numbers:,} numbers"
        )

    def to_json(self) -> dict[str, Any]:
        """For a manifest: the choice, its costs and limits, and what was measured of every layer."""
        return {
            "search": self.search,
            "why": self.why,
            "contribution": self.share,
            "costs": {"time": self.time, "bytes": self.bytes, "numbers": self.numbers},
            "limits": {
                "time": self.limits.time,
                "bytes": self.limits.bytes,
                "numbers": self.limits.numbers,
            },
            "layers": {
                name: {
                    "rank": self.ranks.get(name, 0),
                    "gradient": each.gradient,
                    "explained": each.shares,
                }
                for name, each in self.contributions.items()
            },
        }


def every_place(config: ExportConfig, outline: LoadedModel, had_conv1d: bool) -> StartAdapter:
    """An adapter of all layers that may be chosen: the target modules, or all linear layers of the blocks."""
    targets = config.target_modules or ALL_LINEAR
    start = start_adapter(replace(config, target_modules=targets), outline, had_conv1d)
    every = f"top:{len(block_names(outline.model))}"
    return start.only(in_top_blocks(outline.model, list(start.lora_a), every))


def find_places(
    contributions: Mapping[str, Contribution],
    start: StartAdapter,
    everywhere: Outline,
    contract: Contract,
    limits: Limits,
    search: SearchName = "greedy",
    seed: int = 0,
) -> Places:
    """The layers and ranks that contribute most within limits.

    Args:
        contributions: of all layers that may be chosen.
        start: an adapter of these.
        everywhere: the model with an adapter in all blocks, whose time `limits` mean.
        contract: of an exact call.
        limits: of what adapters cost.
        search: how it is searched.
        seed: of an evolutionary search.

    Raises:
        ConfigError: no adapter fits, or none gets a gradient.
    """
    blocks = block_names(start.loaded.model)
    by_depth = _outlines(start, everywhere.longest, blocks)
    whole = work_of(everywhere, contract).operations
    question = make_question(contributions, start, by_depth, contract, limits, whole)
    choice = choose(question, search, seed)
    if choice is None:
        raise _nothing_fits(question, limits, whole)
    every = sum(part.options[-1].gain for part in question.parts)
    return Places(
        ranks={name: int(level) for name, level in choice.levels.items()},
        contributions=contributions,
        lowest=_lowest(choice, question),
        blocks=len(blocks),
        share=choice.gain / every,
        time=choice.costs[0] / whole,
        bytes=choice.costs[1],
        numbers=choice.costs[2],
        limits=limits,
        search=search,
    )


def make_question(
    contributions: Mapping[str, Contribution],
    start: StartAdapter,
    by_depth: Sequence[Outline],
    contract: Contract,
    limits: Limits,
    whole: int,
) -> Question:
    """What may learn at which costs: operations of a step, bytes, trained numbers.

    Args:
        contributions: by layer.
        start: an adapter of these layers.
        by_depth: the model with adapters from each block on.
        contract: of a step's call.
        limits: `time` is a share of `whole`.
        whole: operations of a step with adapters everywhere.
    """
    names = [f"{name}." for name in block_names(start.loaded.model)]
    tokens = contract.rows * contract.sequence_length
    depths = []
    for outline in by_depth:
        without = replace(outline, modules=())
        states = 4 * tokens * outline.width * (outline.adapted_blocks + 1)
        depths.append(Depth(0.0, (work_of(without, contract).operations, states, 0)))
    parts = []
    for name, contribution in contributions.items():
        inputs, outputs = start.lora_a[name].shape[1], len(start.lora_b[name])
        options = tuple(
            Option(
                rank,
                contribution.of_rank(rank),
                # Its two products are computed forwards twice and once backwards.
                (6 * rank * (inputs + outputs) * tokens, _BYTES_OF_A_NUMBER * rank * outputs, rank * outputs),
            )
            for rank in sorted({max(start.rank // 2, 1), start.rank, 2 * start.rank})
            if rank <= len(contribution.shares)
        )
        block = next(number for number, prefix in enumerate(names) if name.startswith(prefix))
        parts.append(Part(name, block, options))
    bytes_limit = (1 << 62) if limits.bytes is None else limits.bytes
    return Question(tuple(depths), tuple(parts), (int(limits.time * whole), bytes_limit, limits.numbers))


def _outlines(start: StartAdapter, longest: int, blocks: Sequence[str]) -> list[Outline]:
    """The model with adapters from each block on; above the last layer that may be chosen, from that on."""
    found: list[Outline] = []
    for depth in range(len(blocks)):
        above = tuple(f"{block}." for block in blocks[depth:])
        names = [name for name in start.lora_a if name.startswith(above)]
        found.append(outline_of(start.only(names), longest) if names else found[-1])
    return found


def _lowest(choice: Choice, question: Question) -> int:
    return min(part.block for part in question.parts if part.name in choice.levels)


def _nothing_fits(question: Question, limits: Limits, whole: int) -> ConfigError:
    time, size, _ = question.depths[-1].costs
    problems = [
        f"adapters in the top block alone take {time / whole:.0%} of the time of adapters everywhere and "
        f"{bytes_text(size)}; --adapt-time is {limits.time:.0%}"
        + ("" if limits.bytes is None else f", --adapt-memory {bytes_text(limits.bytes)}")
    ]
    if not any(option.gain > 0 for part in question.parts for option in part.options):
        problems = ["no layer gets a gradient of the rows"]
    return ConfigError(
        "no layers can be chosen:",
        problems,
        remedy="raise --adapt-time or --adapt-memory, or leave out --adapt-layers auto",
    )
