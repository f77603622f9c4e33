"""`--memory`: a bound of a process's memory, what it leaves for an engine, and whether it was kept.

The bound is on peak resident memory, as `top` shows it and as VmHWM of /proc reports it: it includes pages of
mapped weights and what was swapped out. The prediction follows from the bundle and the rows, plus the
measured memory that the process already holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from device_runner.engines.backend import choose_backend
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
from prge.training.estimators.rollouts import ROLLOUT_SLOTS

_STEP_REMEDY = "Give more, or take a smaller --batch-size, shorter rows, or a bundle with a smaller adapter."
_ROLLOUT_REMEDY = (
    "Give more, or take a smaller --max-completion-length or --batch-size, shorter prompts, or a bundle with "
    "a smaller adapter."
)
_CONTEXT_REMEDY = "Give more, or take a smaller --context."
# Shortest useful context in tokens.
_MIN_TOKENS, _STEP = 64, 64


def step_budget(
    bundle: Bundle,
    shapes: Sequence[StepShape],
    limit: int | None,
    engine: EngineName = "auto",
    process: str = "this run",
    *,
    taken: int = 0,
) -> Budget | None:
    """Return what `--memory` leaves for training steps and scores; None without a bound.

    Args:
        bundle: an opened bundle.
        shapes: shapes of all that the process computes.
        limit: bytes that the process may take.
        engine: the requested engine.
        process: name of the process in messages.
        taken: bytes that the process took before, some of which may be free again.

    Raises:
        ConfigError: the process needs more than the limit; the message names the minimum.
        BundleError: the bundle doesn't describe its memory.
        EngineError: see device_runner.engines.backend.choose_backend.
    """
    if limit is None:
        return None
    outline, weights = bundle_costs(bundle)
    name = choose_backend(engine).name

    def memory(shape: StepShape) -> Callable[[int], int]:
        roles = bundle.chain.roles
        return _with_held_memory(
            name, lambda loaded: estimate_run_memory(outline, shape, weights, roles, name, loaded)
        )

    needed = [memory(shape) for shape in shapes]
    return fit_budget(
        limit,
        lambda loaded: max(taken, *(each(loaded) for each in needed)),
        weights,
        process,
        _STEP_REMEDY,
    )


def shape_of_scores(bundle: Bundle, examples: Sequence[Example]) -> StepShape:
    """Return the shape of scoring some rows."""
    return step_shape(FORWARD, examples, len(sequences_of(examples)), bundle.chain.model)


def generation_budget(
    bundle: Bundle,
    limit: int | None,
    engine: EngineName = "auto",
    *,
    slots: int = 1,
    context: int | None = None,
    precision: Precision = "float32",
    steps: StepShape | None = None,
) -> tuple[int | None, Budget | None]:
    """Return the largest context within `--memory`, and what it leaves for weights.

    Args:
        bundle: bundle with the roles `prefill` and `decode`.
        limit: bytes that the process may take.
        engine: the requested engine.
        slots: number of sequences at once.
        context: tokens of each sequence as the user set them; None: as many as fit, up to all positions.
        precision: dtype of keys and values.
        steps: shape of what a child process computes within the same limit.

    Raises:
        PrgeError: as in `step_budget`.
    """
    if limit is None:
        return context, None
    outline, weights = bundle_costs(bundle)
    chain, name = bundle.chain, choose_backend(engine).name
    cache_bytes = 2 if precision == "float16" else 4
    slots = min(slots, chain.bounds.sequences)

    def needed(tokens: int) -> Callable[[int], int]:
        texts = _with_held_memory(
            name,
            lambda loaded: estimate_generation_memory(
                outline, chain.vocabulary_size, weights, name, slots, tokens, loaded, cache_bytes
            ),
        )

        def both(loaded: int) -> int:
            assert steps is not None
            # Resident pages of the weights count in either process.
            return (
                texts(loaded)
                + estimate_run_memory(
                    outline, steps, weights, chain.roles, name, loaded, keeps_tokenizer=True
                ).total
            )

        return texts if steps is None else both

    most = chain.bounds.context
    if context is None:
        # The context comes first: weights can be mapped on demand, but a truncated text is lost.
        context = most
        while context > _MIN_TOKENS and needed(context)(weights.largest) > limit:
            context = max(context // 2 // _STEP * _STEP, _MIN_TOKENS)
    context = min(context, most)
    process = "this process" if steps is None else "a server that learns"
    return context, fit_budget(limit, needed(context), weights, process, _CONTEXT_REMEDY)


def rollout_budget(
    bundle: Bundle,
    limit: int | None,
    engine: EngineName = "auto",
    *,
    context: int,
    adapters: int = 1,
    steps: Sequence[StepShape] = (),
    process: str = "this run",
) -> Budget | None:
    """Return what `--memory` leaves for a process whose completions a reward scores; None without a bound.

    Args:
        bundle: bundle with the roles `prefill` and `decode`.
        limit: bytes that the process may take.
        engine: the requested engine.
        context: largest number of tokens of a prompt and its completion.
        adapters: number of adapters that write completions of the same prompts.
        steps: shapes of what the process computes with the completions.
        process: name of the process in messages.

    Raises:
        PrgeError: as in `step_budget`.
    """
    if limit is None:
        return None
    outline, weights = bundle_costs(bundle)
    chain, name = bundle.chain, choose_backend(engine).name
    slots = min(ROLLOUT_SLOTS, chain.bounds.sequences)

    def memory(shape: StepShape | None) -> Callable[[int], int]:
        def predicted(loaded: int) -> RunMemory:
            texts = estimate_generation_memory(
                outline, chain.vocabulary_size, weights, name, slots, context, loaded, adapters=adapters
            )
            if shape is None:
                return texts
            return texts.with_work_in_turn(
                estimate_run_memory(outline, shape, weights, chain.roles, name, loaded)
            )

        return _with_held_memory(name, predicted)

    needed = [memory(shape) for shape in steps or (None,)]
    return fit_budget(
        limit, lambda loaded: max(each(loaded) for each in needed), weights, process, _ROLLOUT_REMEDY
    )


@contextmanager
def watched_memory(
    limit: int | None, log: Callable[[str], None], of_child: Callable[[], int] = lambda: 0
) -> Iterator[None]:
    """Report at the end of the block whether the process kept a bound; does nothing without one.

    `of_child` returns the peak bytes of a child process, which count towards the bound.
    """
    before = PeakMemory().peak
    try:
        yield
    finally:
        if limit is not None and (line := describe_memory_use(limit, before, of_child())):
            log(line)


def describe_memory_use(limit: int, before: int | None = None, of_child: int = 0) -> str:
    """Return a line on whether this process kept a bound of its memory; empty if that is unknown.

    Args:
        limit: bytes that the process may take.
        before: peak of the process when the work began, which may have another cause.
        of_child: peak bytes of a child process.
    """
    peak = PeakMemory().peak
    if peak is None or (before is not None and peak <= before):
        return ""
    peak += of_child
    if peak <= limit:
        return f"memory: {format_megabytes(peak)} at most, of the {format_megabytes(limit)} of --memory"
    return (
        f"warning: this process took {format_megabytes(peak)}, more than the {format_megabytes(limit)} of "
        "--memory: the prediction was wrong for this bundle; please report it with the output of "
        "`prge inspect`"
    )


def _with_held_memory(engine: str, memory: Callable[[int], RunMemory]) -> Callable[[int], int]:
    """Return a function from loaded weight bytes to the memory of the process, with what it already holds."""
    held = resident_bytes()

    def needed(loaded: int) -> int:
        predicted = memory(loaded)
        return predicted.total if held is None else predicted.total_starting_from(held, engine)

    return needed
