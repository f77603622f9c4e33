"""Which lengths of a bundle's methods are used: all that were exported, or the longest alone.

A loaded method has its own copy of the weights, unless the engine can share them. Loading and dropping
methods from one step to the next would cost more than short rows save, so all of a kind stay in memory
together, and several lengths are used only if the memory asked for allows that. The choice is part of what a
run is: methods of different lengths answer the same row alike up to the last bits, not with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from prge.bundle import SCORE_METHOD, TRUNK_METHOD, Bundle
from prge.costs import PROGRAM_BYTES as PROGRAM_BYTES
from prge.errors import ConfigError


def chosen_lengths(
    bundle: Bundle,
    lengths: Sequence[int] | None,
    limit: int,
    can_share: Callable[[Sequence[str]], bool],
    keep: bool = False,
    only_scoring: bool = False,
) -> tuple[tuple[int, ...], str]:
    """The lengths to use, shortest first and the longest always, and what to say about them.

    Args:
        bundle: an opened bundle.
        lengths: what was asked for; None lets the memory decide.
        limit: bytes that programs which are loaded together may take.
        can_share: whether the engine can load some methods with the weights in memory once.
        keep, only_scoring: see `groups`.

    Raises:
        ConfigError: the bundle lacks a length that was asked for.
    """
    every = bundle.lengths
    if lengths is not None:
        check_lengths(bundle, lengths)
        return tuple(n for n in every if n in lengths or n == every[-1]), ""
    together = groups(bundle, every, keep, only_scoring)

    def fit(shared: bool) -> bool:
        sizes = [group_bytes(bundle, group, shared) for group in together]
        return all(size is not None and size <= limit for size in sizes)

    if len(every) == 1 or fit(False) or (fit(True) and all(map(can_share, together))):
        return every, ""
    most = max((group_bytes(bundle, group, False) or 0 for group in together), default=0)
    return every[-1:], (
        f"every row is computed at {every[-1]} tokens: programs of all lengths need {most or 'unknown'} "
        f"bytes, --program-bytes is {limit}"
    )


def check_lengths(bundle: Bundle, lengths: Collection[int]) -> None:
    """Raise ConfigError unless a bundle has methods of all these lengths."""
    exported = ", ".join(map(str, bundle.lengths))
    problems = [f"--lengths has {n}, the bundle's are {exported}" for n in lengths if n not in bundle.lengths]
    if problems:
        raise ConfigError("the settings don't fit the bundle:", problems, remedy="leave --lengths out")


def groups(
    bundle: Bundle, lengths: Collection[int], keep: bool = False, only_scoring: bool = False
) -> list[list[str]]:
    """The methods that are used, those together that are in memory at a time.

    Args:
        bundle: an opened bundle.
        lengths: of its methods, those that are used.
        keep: whether the methods for steps and for scoring are in memory together.
        only_scoring: whether no step is taken.
    """
    parts = [TRUNK_METHOD] if bundle.trunk is not None else []
    steps = [name for part in (*parts, bundle.step_method) for name in variants_of(bundle, part, lengths)]
    scoring = variants_of(bundle, bundle.score_method, lengths)
    if only_scoring:
        return [scoring]
    if bundle.scoring is None:
        return [steps]
    return [[*steps, *scoring]] if keep else [steps, scoring]


def variants_of(bundle: Bundle, method: str, lengths: Collection[int]) -> list[str]:
    """The methods that do what `method` does for rows of these lengths, shortest first."""
    variants = bundle.variants(method)
    return [name for name, length in zip(variants, bundle.lengths, strict=True) if length in lengths]


def group_bytes(bundle: Bundle, group: Collection[str], shared: bool) -> int | None:
    """Weights and planned memory of methods in memory together; None where the manifest doesn't tell.

    Trunk and step of a length have one copy of the weights between them.
    """
    names = {"lowering": bundle.step_method, "score_lowering": SCORE_METHOD, "trunk_lowering": TRUNK_METHOD}
    reports = {method: bundle.manifest.get(name) for name, method in names.items()}
    for block in bundle.manifest.get("lengths") or ():
        reports |= _block(_block(block).get("lowering"))
    weights = _block(bundle.manifest.get("lowering")).get("constant_bytes")
    planned = [_block(reports.get(method)).get("planned_memory_bytes") for method in group]
    bytes_told = [count for count in planned if isinstance(count, int)]
    if len(bytes_told) < len(planned) or not isinstance(weights, int):
        return None
    trunks = set() if bundle.trunk is None else set(bundle.variants(TRUNK_METHOD))
    return sum(bytes_told) + weights * (1 if shared else len(set(group) - trunks))


def _block(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
