"""`--memory`: the most that a process takes, what that leaves for an engine, and whether it was kept.

The figure is resident memory at its peak, as `top` shows it and VmHWM of /proc tells it: pages of mapped
weights are part of it, and so is what was swapped out. What is predicted follows from the bundle and the
rows; what the process holds already is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from device_runner.engines.backend import choose
from device_runner.engines.trunk_cache import Precision
from prge.engine import EngineName
from prge.formats.bundle import Bundle
from prge.formats.signatures import FORWARD
from prge.objectives.examples import Example, sequences_of
from prge.system.memory import PeakMemory, resident_bytes
from prge.training.costs import (
    Budget,
    RunMemory,
    StepShape,
    bundle_costs,
    estimate_generation_memory,
    estimate_run_memory,
    fit_budget,
    format_megabytes,
    step_shape,
)

_LESS = "give more, or take a smaller --batch-size, shorter rows, or a bundle with a smaller adapter"
_LESS_TEXT = "give more, or take a smaller --context"
# Tokens of a text that is worth writing.
_FEWEST_TOKENS, _STEP = 64, 64


def budget_of_steps(
    bundle: Bundle,
    shapes: Sequence[StepShape],
    limit: int | None,
    engine: EngineName = "auto",
    process: str = "this run",
) -> Budget | None:
    """What `--memory` leaves for steps and scores; None without a bound.

    Args:
        bundle: an opened one.
        shapes: of all that the process computes.
        limit: bytes that the process may take.
        engine: the one that is asked for.
        process: what it is called in a message.

    Raises:
        ConfigError: it needs more than the limit; the message tells the least.
        BundleError: the bundle doesn't tell what it needs.
        EngineError: see device_runner.engines.backend.choose.
    """
    if limit is None:
        return None
    outline, weights = bundle_costs(bundle)
    name = choose(engine).name

    def memory(shape: StepShape) -> Callable[[int], int]:
        roles = bundle.chain.roles
        return _beside_what_is_held(
            name, lambda loaded: estimate_run_memory(outline, shape, weights, roles, name, loaded)
        )

    needed = [memory(shape) for shape in shapes]
    return fit_budget(limit, lambda loaded: max(each(loaded) for each in needed), weights, process, _LESS)


def shape_of_scores(bundle: Bundle, examples: Sequence[Example]) -> StepShape:
    """The shape of scoring some rows."""
    return step_shape(FORWARD, examples, len(sequences_of(examples)), bundle.chain.model)


def budget_of_texts(
    bundle: Bundle,
    limit: int | None,
    engine: EngineName = "auto",
    *,
    slots: int = 1,
    context: int | None = None,
    precision: Precision = "float32",
    steps: StepShape | None = None,
) -> tuple[int | None, Budget | None]:
    """The most tokens of a text within `--memory`, and what it leaves for weights.

    Args:
        bundle: with the roles `prefill` and `decode`.
        limit: bytes that the process may take.
        engine: the one that is asked for.
        slots: sequences at once.
        context: tokens of each, by the user; None: as many as fit, all that the bundle has positions for.
        precision: of keys and values.
        steps: what a child process computes meanwhile, which the limit is for, too.

    Raises:
        PrgeError: as `budget_of_steps`.
    """
    if limit is None:
        return context, None
    outline, weights = bundle_costs(bundle)
    chain, name = bundle.chain, choose(engine).name
    cache_bytes = 2 if precision == "float16" else 4
    slots = min(slots, chain.bounds.sequences)

    def needed(tokens: int) -> Callable[[int], int]:
        texts = _beside_what_is_held(
            name,
            lambda loaded: estimate_generation_memory(
                outline, chain.vocabulary_size, weights, name, slots, tokens, loaded, cache_bytes
            ),
        )

        def both(loaded: int) -> int:
            assert steps is not None
            # Resident pages of the weights count in either process.
            return (
                texts(loaded) + estimate_run_memory(outline, steps, weights, chain.roles, name, loaded).total
            )

        return texts if steps is None else both

    most = chain.bounds.context
    if context is None:
        # Weights are mapped again when their turn comes; a text that is cut off is lost.
        context = most
        while context > _FEWEST_TOKENS and needed(context)(weights.largest) > limit:
            context = max(context // 2 // _STEP * _STEP, _FEWEST_TOKENS)
    context = min(context, most)
    process = "this process" if steps is None else "a server that learns"
    return context, fit_budget(limit, needed(context), weights, process, _LESS_TEXT)


@contextmanager
def watched_memory(
    limit: int | None, tell: Callable[[str], None], of_child: Callable[[], int] = lambda: 0
) -> Iterator[None]:
    """Tell at the end of the block whether the process kept a bound; nothing without one.

    `of_child` gives the most bytes that a child process took, for which the bound is, too.
    """
    before = PeakMemory().peak
    try:
        yield
    finally:
        if limit is not None and (told := outcome(limit, before, of_child())):
            tell(told)


def outcome(limit: int, before: int | None = None, of_child: int = 0) -> str:
    """Whether this process kept a bound of its memory, in a line; empty where that isn't known.

    Args:
        limit: bytes that it may take.
        before: its peak when the work began, which may be of something else.
        of_child: bytes that a child process took at most.
    """
    peak = PeakMemory().peak
    if peak is None or (before is not None and peak <= before):
        return ""
    peak += of_child
    if peak <= limit:
        return f"memory: {format_megabytes(peak)} at most, of the {format_megabytes(limit)} of --memory"
    return (
        f"warning: this process took {format_megabytes(peak)}, more than the {format_megabytes(limit)} of --memory: "
        "the prediction was wrong for this bundle; please report it with the output of `prge inspect`"
    )


def _beside_what_is_held(engine: str, memory: Callable[[int], RunMemory]) -> Callable[[int], int]:
    """What a process takes by the bytes of weights that it loads, with what it holds now."""
    held = resident_bytes()

    def needed(loaded: int) -> int:
        taken = memory(loaded)
        return taken.total if held is None else taken.total_starting_from(held, engine)

    return needed
