"""The plan of a run: all settings resolved, and the shape of its calls."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from device_runner.session.settings import RunSettings
from prge.errors import ConfigError
from prge.formats.adapter import adapter_size
from prge.formats.bundle import Bundle
from prge.formats.signatures import DECODE, FORWARD, PREFILL
from prge.model_spec import matrices
from prge.objectives.examples import Example
from prge.objectives.objective import CROSS_ENTROPY, Objective
from prge.objectives.policy_gradient import completion_example
from prge.rewards.opening import check_roles
from prge.training.costs import StepShape, step_shape
from prge.training.estimators.exact import check_single_sequences
from prge.training.estimators.table import (
    DEFAULT_QUERIES,
    ESTIMATORS,
    EstimatorName,
    available_estimators,
)
from prge.training.recipe import Recipe
from prge.training.sampler import max_sequences

# Sequences of a step if no batch size is set.
DEFAULT_BATCH = 4
# Gradients of this many steps take about as much room as the checkpoint before them.
STEPS_OF_GRADIENTS = 4
_MAX_STEP_BYTES = 1 << 36


@dataclass(frozen=True)
class RunPlan:
    """What a run is going to do.

    `settings` are complete: estimator, queries if it uses directions, optimizer, adam_beta2, steps, warm-up,
    batch size. `role` is the role of a step, `shape` the largest shape of its calls.
    """

    settings: RunSettings
    role: str
    shape: StepShape

    @property
    def recipe(self) -> Recipe:
        """The settings that determine the run's bits."""
        return self.settings.recipe


def plan_run(
    bundle: Bundle,
    examples: Sequence[Example],
    settings: RunSettings,
    objective: Objective = CROSS_ENTROPY,
) -> RunPlan:
    """Resolve the settings of a run, and check that they fit each other, the bundle and the rows.

    Args:
        bundle: an opened bundle.
        examples: training examples.
        settings: settings of the run.
        objective: objective of the run.

    Raises:
        BundleError: the bundle lacks the estimator's role.
        ConfigError: settings have no meaning for the estimator, or don't fit bundle, rows or each other.
    """
    settings = resolve_settings(settings, bundle)
    if settings.estimator is None:
        raise ValueError("the estimator is not resolved")
    entry, chain = ESTIMATORS[settings.estimator], bundle.chain
    chain.check_role(entry.role)
    if settings.max_example_grad_norm and examples:
        check_single_sequences(examples)
    if settings.max_example_grad_norm and not objective.is_separable:
        raise ConfigError(
            "These settings can't be used:",
            [
                f"--max-example-grad-norm with --objective {settings.objective}, whose loss compares the "
                "examples of a step"
            ],
            remedy="Leave --max-example-grad-norm out, or choose an objective of single examples, such as "
            "completion.",
            code="clipping-compared-examples",
        )
    batch = settings.batch_size or default_batch(examples)
    sequences = batch * max_sequences(examples)
    if settings.objective == "grpo" and settings.reward is not None:
        examples = [_longest_completion(example, settings.max_completion_length) for example in examples]
        sequences *= settings.num_generations
    shape = step_shape(
        entry.role,
        examples,
        1 if settings.max_example_grad_norm else sequences,
        chain.model,
        copies=entry.copies(settings.queries),
        queries=entry.directions(settings.queries),
        is_separable=objective.is_separable,
        sequences_per_example=max_sequences(examples),
    )
    if examples and shape.tokens > chain.longest(entry.role):
        raise _settings_error(
            "row-too-long",
            f"a row has {shape.tokens} tokens, but steps of --estimator {settings.estimator} take at most "
            f"{chain.longest(entry.role)}",
            "use shorter rows, or export the bundle again",
        )
    factors = sum(matrix.rank + matrix.width for matrix in matrices(chain.modules))
    elements = shape.copies * adapter_size(chain.modules) + shape.queries * shape.sequences * factors
    if 4 * elements > _MAX_STEP_BYTES:
        raise _settings_error(
            "step-too-large",
            f"the perturbed adapters or directions of a step take {4 * elements:,} bytes, the limit is "
            f"{_MAX_STEP_BYTES:,}",
            "choose fewer --queries or a smaller --batch-size",
        )
    settings = replace(settings, batch_size=batch)
    return RunPlan(_resolve_steps(settings, batch, len(examples)), entry.role, shape)


def _longest_completion(prompt: Example, length: int) -> Example:
    """Return the example of a completion of a prompt with a number of tokens."""
    return completion_example(prompt.row, prompt.sequences[0].tokens, [0] * length)


def resolve_settings(settings: RunSettings, bundle: Bundle) -> RunSettings:
    """Resolve the estimator of a run on a bundle, and the settings that follow from it.

    Raises:
        ConfigError: the bundle lacks the estimator's role, or settings have no meaning for it.
    """
    chain = bundle.chain
    names = available_estimators(chain.roles)
    estimator = settings.estimator or ("antithetic" if settings.objective == "es" else names[0])
    if settings.reward is not None:
        settings, estimator = _resolve_reward(settings, estimator, chain.roles)
    entry = ESTIMATORS[estimator]
    if estimator not in names:
        raise _settings_error(
            "role-missing",
            f"--estimator is {estimator}, but the bundle has only the roles {', '.join(chain.roles)}",
            f"choose one of {', '.join(names)}, or export with the role {entry.role}",
        )
    if settings.trunk_cache_bytes and chain.lowest_adapted == 1:
        raise _settings_error(
            "trunk-missing",
            "--trunk-cache-bytes is set, but no block lies below the first adapted layer",
            "leave it out, or export with --adapt-layers top:k",
        )
    if settings.loraplus_lr_ratio != 1 and not chain.trains_a:
        raise _settings_error(
            "lora-a-not-trained",
            f"--loraplus-lr-ratio is {settings.loraplus_lr_ratio:g}, but the bundle trains only lora_b",
            "leave it out, or export with --adapter lora",
        )
    if settings.sample_prompts and not {PREFILL, DECODE} <= set(chain.roles):
        raise _settings_error(
            "role-missing",
            f"--sample-prompts is set, but the bundle has only the roles {', '.join(chain.roles)}",
            "leave it out, or export with the roles prefill and decode",
        )
    queries = settings.queries or DEFAULT_QUERIES if entry.has_directions else None
    save_steps = settings.save_steps
    if not entry.has_directions and not settings.keep_gradients:
        save_steps = min(save_steps or STEPS_OF_GRADIENTS, STEPS_OF_GRADIENTS)
    return replace(
        settings,
        estimator=estimator,
        queries=queries,
        save_steps=save_steps,
        optimizer=settings.optimizer or "adam",
        adam_beta2=entry.adam_beta2 if settings.adam_beta2 is None else settings.adam_beta2,
    )


def _resolve_reward(
    settings: RunSettings, estimator: EstimatorName, roles: Collection[str]
) -> tuple[RunSettings, EstimatorName]:
    """Resolve the objective of a run with a reward; raises ConfigError if it doesn't fit the estimator."""
    check_roles(roles)
    compares_copies = ESTIMATORS[estimator].role == FORWARD
    objective = settings.objective
    if objective == "auto":
        objective = "es" if compares_copies else "grpo"
    if objective == "es" and not compares_copies:
        raise _settings_error(
            "estimator-does-not-fit",
            f"--objective is es, which compares perturbed adapters, and --estimator is {estimator}",
            "choose --estimator antithetic or fzoo, or --objective grpo",
        )
    if objective == "grpo" and not settings.temperature:
        raise _settings_error(
            "temperature-zero",
            "--objective is grpo, which compares completions, and with --temperature 0 all are equal",
            "choose a --temperature above 0",
        )
    return replace(settings, objective=objective), estimator


def _settings_error(code: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError("The settings don't fit the bundle:", [problem], remedy=remedy, code=code)


def _resolve_steps(settings: RunSettings, batch: int, examples: int) -> RunSettings:
    """Return the settings with the number of steps for their epochs, and of warm-up steps.

    Raises:
        ConfigError: other settings don't fit the number of steps.
    """
    if settings.epochs is not None:
        steps = max(1, math.ceil(settings.epochs * examples / batch)) * settings.steps_per_batch
        settings = replace(settings, epochs=None, steps=steps)
    return replace(settings, warmup_steps=settings.resolved_warmup_steps)


def default_batch(examples: Sequence[Example]) -> int:
    """Return the default number of examples per step: as many as have 4 sequences together, at least one."""
    return max(DEFAULT_BATCH // max_sequences(examples), 1)
