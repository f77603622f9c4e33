"""What a run is going to do: every setting decided, and what its calls look like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from device_runner.session.settings import RunSettings
from prge.errors import ConfigError
from prge.files.adapter import adapter_size
from prge.files.bundle import Bundle
from prge.files.signatures import DECODE, PREFILL
from prge.learning.costs import StepShape, shape_of
from prge.learning.estimators.exact import check_single_sequences
from prge.learning.estimators.table import DEFAULT_QUERIES, ESTIMATORS, fitting
from prge.learning.examples import Example
from prge.learning.objectives import CROSS_ENTROPY, Objective
from prge.learning.sampling import most_sequences
from prge.model_spec import matrices
from prge.running.recipe import Recipe

# Sequences of a step where nobody names its examples.
DEFAULT_BATCH = 4
# Gradients of so many steps and the checkpoint before them take about as much room.
STEPS_OF_GRADIENTS = 4
_MOST_STEP_BYTES = 1 << 36


@dataclass(frozen=True)
class RunPlan:
    """What a run is going to do.

    `settings` have all that nobody need name: estimator, queries if it has directions, optimizer, beta2,
    steps, warm-up, batch size. `role` is what a step computes, `shape` how large it is at most.
    """

    settings: RunSettings
    role: str
    shape: StepShape

    @property
    def recipe(self) -> Recipe:
        """What determines the run's bits."""
        return self.settings.recipe


def plan_run(
    bundle: Bundle,
    examples: Sequence[Example],
    settings: RunSettings,
    objective: Objective = CROSS_ENTROPY,
) -> RunPlan:
    """Decide what nobody has named, and check that all of it goes together.

    Args:
        bundle: an opened bundle.
        examples: training rows.
        settings: of the run.
        objective: of the run.

    Raises:
        BundleError: the bundle lacks the estimator's role.
        ConfigError: settings have no meaning for the estimator, or don't fit bundle, rows or each other.
    """
    settings = settled(settings, bundle)
    if settings.estimator is None:
        raise ValueError("which estimator is not settled")
    entry, chain = ESTIMATORS[settings.estimator], bundle.chain
    chain.check_role(entry.role)
    if settings.clip_examples and examples:
        check_single_sequences(examples)
    batch = settings.batch_size or default_batch(examples)
    shape = shape_of(
        entry.role,
        examples,
        1 if settings.clip_examples else batch * most_sequences(examples),
        chain.model,
        copies=entry.copies(settings.queries),
        queries=entry.directions(settings.queries),
        is_separate=objective.is_separate,
        of_example=most_sequences(examples),
    )
    if examples and shape.tokens > chain.longest(entry.role):
        raise _unfit(
            "row-too-long",
            f"a row has {shape.tokens} tokens, and steps of --estimator {settings.estimator} take "
            f"{chain.longest(entry.role)}",
            "give shorter rows, or export the bundle again",
        )
    factors = sum(matrix.rank + matrix.width for matrix in matrices(chain.modules))
    numbers = shape.copies * adapter_size(chain.modules) + shape.queries * shape.sequences * factors
    if 4 * numbers > _MOST_STEP_BYTES:
        raise _unfit(
            "step-too-large",
            f"the perturbed adapters or directions of a step take {4 * numbers:,} bytes, at most "
            f"{_MOST_STEP_BYTES:,} are possible",
            "choose fewer --queries or a smaller --batch-size",
        )
    settings = replace(settings, batch_size=batch)
    return RunPlan(_paced(settings, batch, len(examples)), entry.role, shape)


def settled(settings: RunSettings, bundle: Bundle) -> RunSettings:
    """The settings with the estimator of a run on a bundle, and what follows from it.

    Raises:
        ConfigError: the bundle lacks the estimator's role, or settings have no meaning for it.
    """
    chain = bundle.chain
    names = fitting(chain.roles)
    estimator = settings.estimator or names[0]
    entry = ESTIMATORS[estimator]
    if estimator not in names:
        raise _unfit(
            "role-missing",
            f"--estimator is {estimator}, the bundle has the roles {', '.join(chain.roles)}",
            f"choose one of {', '.join(names)}, or export with the role {entry.role}",
        )
    if settings.trunk_cache_bytes and chain.lowest_adapted == 1:
        raise _unfit(
            "trunk-missing",
            "--trunk-cache-bytes is given, and no block lies below the first adapted layer",
            "leave it out, or export with --adapt-layers top:k",
        )
    if settings.lora_plus != 1 and not chain.trains_a:
        raise _unfit(
            "lora-a-not-trained",
            f"--lora-plus is {settings.lora_plus:g}, and the bundle trains lora_b alone",
            "leave it out, or export with --adapter lora",
        )
    if settings.sample_prompts and not {PREFILL, DECODE} <= set(chain.roles):
        raise _unfit(
            "role-missing",
            f"--sample-prompts is given, and the bundle has the roles {', '.join(chain.roles)}",
            "leave it out, or export with the roles prefill and decode",
        )
    queries = settings.queries or DEFAULT_QUERIES if entry.has_directions else None
    every = settings.checkpoint_every
    if not entry.has_directions and not settings.keep_gradients:
        every = min(every or STEPS_OF_GRADIENTS, STEPS_OF_GRADIENTS)
    return replace(
        settings,
        estimator=estimator,
        queries=queries,
        checkpoint_every=every,
        optimizer=settings.optimizer or "adam",
        beta2=entry.beta2 if settings.beta2 is None else settings.beta2,
    )


def _unfit(code: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError("the settings don't fit the bundle:", [problem], remedy=remedy, code=code)


def _paced(settings: RunSettings, batch: int, examples: int) -> RunSettings:
    """The settings with the steps that their epochs of so many examples take, and those of warm-up.

    Raises:
        ConfigError: other settings don't fit so many steps.
    """
    if settings.epochs is not None:
        steps = max(1, math.ceil(settings.epochs * examples / batch))
        settings = replace(settings, epochs=None, steps=steps)
    return replace(settings, warmup=settings.rising)


def default_batch(examples: Sequence[Example]) -> int:
    """Examples of a step where nobody names a number: as many as have 4 sequences together, at least one."""
    return max(DEFAULT_BATCH // most_sequences(examples), 1)
