"""What a run is going to do: every setting decided, and what its calls look like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from device_runner.session.settings import RunSettings
from prge.contract import Contract
from prge.errors import ConfigError
from prge.files.bundle import Bundle
from prge.files.signatures import DECODE, PREFILL, STACK
from prge.learning.estimators.exact import check_single_sequences
from prge.learning.estimators.guide import GUIDE
from prge.learning.estimators.table import DEFAULT_QUERIES, ESTIMATORS, fitting
from prge.learning.examples import Example
from prge.learning.sampling import Sampler, check_batch

DEFAULT_BATCH = 4
# Gradients of so many steps and the checkpoint before them take about as much room.
STEPS_OF_GRADIENTS = 4


@dataclass(frozen=True)
class RunPlan:
    """What a run is going to do.

    `settings` have all that nobody need name: estimator, queries if it has directions, optimizer, beta2,
    steps, warm-up. `contract` is of the calls that take steps, `scoring` of those that score.
    """

    settings: RunSettings
    contract: Contract
    scoring: Contract


def plan_run(bundle: Bundle, examples: Sequence[Example], settings: RunSettings) -> RunPlan:
    """Decide what nobody has named, and check that all of it goes together.

    Args:
        bundle: an opened bundle.
        examples: training rows; without `batch_size` a batch has room for the widest.
        settings: of the run.

    Raises:
        BundleError: the bundle lacks the estimator's role.
        ConfigError: settings have no meaning for the estimator, or don't fit bundle, rows or each other.
    """
    settings = settled(settings, bundle)
    if settings.estimator is None:
        raise ValueError("which estimator is not settled")
    entry, chain = ESTIMATORS[settings.estimator], bundle.chain
    batch = settings.batch_size or batch_for(examples)
    contract = chain.contract(entry.role, batch, **entry.sizes(settings.queries, settings.copies))
    if examples:
        if settings.clip_examples:
            check_single_sequences(examples)
        check_batch(contract, examples)
    scoring = chain.scoring if settings.memory is None else chain.contract(STACK, contract.rows)
    return RunPlan(_paced(settings, contract, examples), contract, scoring)


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
            f"--estimator is {estimator}, the bundle has the roles {', '.join(chain.roles)}",
            f"choose one of {', '.join(names)}, or export with the role {entry.role}",
        )
    if settings.trunk_cache_bytes and chain.lowest_adapted == 1:
        raise _unfit(
            "--trunk-cache-bytes is given, and no block lies below the first adapted layer",
            "leave it out, or export with --adapt-layers top:k",
        )
    if settings.lora_plus != 1 and not chain.trains_a:
        raise _unfit(
            f"--lora-plus is {settings.lora_plus:g}, and the bundle trains lora_b alone",
            "leave it out, or export with --adapter lora",
        )
    if settings.sample_prompts and not {PREFILL, DECODE} <= set(chain.roles):
        raise _unfit(
            f"--sample-prompts is given, and the bundle has the roles {', '.join(chain.roles)}",
            "leave it out, or export with the roles prefill and decode",
        )
    queries = settings.queries or DEFAULT_QUERIES if entry.has_directions else None
    is_guided = settings.guided and entry.has_directions and GUIDE in bundle.manifest.get("files", {})
    every = settings.checkpoint_every
    if not entry.has_directions and not settings.keep_gradients:
        every = min(every or STEPS_OF_GRADIENTS, STEPS_OF_GRADIENTS)
    return replace(
        settings,
        estimator=estimator,
        queries=queries,
        checkpoint_every=every,
        optimizer=settings.optimizer or ("adam-norm" if is_guided else "adam"),
        beta2=entry.beta2 if settings.beta2 is None else settings.beta2,
    )


def _unfit(problem: str, remedy: str) -> ConfigError:
    return ConfigError("the settings don't fit the bundle:", [problem], remedy=remedy)


def _paced(settings: RunSettings, contract: Contract, examples: Sequence[Example]) -> RunSettings:
    """The settings with the steps that their epochs of some training rows take, and those of warm-up.

    Raises:
        ConfigError: a batch has no room for an example, or other settings don't fit so many steps.
    """
    if settings.epochs is not None:
        per_step = Sampler(examples, contract, settings.seed, settings.calls).per_step
        steps = max(1, math.ceil(settings.epochs * len(examples) / per_step))
        settings = replace(settings, epochs=None, steps=steps)
    return replace(settings, warmup=settings.rising)


def batch_for(examples: Sequence[Example]) -> int:
    """Sequences of a call where nobody names a number: 4, or as many as the widest example has."""
    return max([DEFAULT_BATCH, *(len(example.sequences) for example in examples)])
