"""Settings of `prge run`: flags, keys of a YAML file, and the `config.yaml` of a run folder."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from device_runner.engines.lengths import PROGRAM_BYTES, check_lengths
from device_runner.engines.trunk_cache import Precision
from prge.bounds import BOUNDS, flag
from prge.bundle import Bundle
from prge.chain import ROLE_OF, Chain
from prge.directions import Distribution
from prge.engine import EngineName
from prge.errors import BundleError, ConfigError, shown
from prge.examples import Example
from prge.optimizers import OptimizerName
from prge.training_flags import TrainingFlags

EstimatorName = Literal["tangent", "antithetic", "one-sided", "exact"]

DEFAULT_QUERIES = DEFAULT_BATCH = 4
_OF_WHOLE_PROGRAMS = frozenset(
    {"keep_programs", "lengths", "program_bytes", "trunk_cache_bytes", "trunk_cache_dtype"}
)
_OF_CHAINS = ("memory", "batch_size")
# By kind of program, the default first.
_FITTING: dict[str, tuple[EstimatorName, ...]] = {
    "tangent": ("tangent",),
    "exact": ("exact",),
    "stack": ("antithetic", "one-sided"),
}


@dataclass(frozen=True)
class RunSettings(TrainingFlags):
    """Fine-tune the adapter of a bundle on the stock engine."""

    adapter: Path | None = None
    """Run, checkpoint or PEFT folder to start from instead of the bundle's own adapter."""

    estimator: EstimatorName | None = None
    """tangent: exact derivatives along directions; antithetic: two perturbed copies a query; one-sided: one
    copy a query and a baseline; exact: the gradient by backpropagation. Default: tangent, antithetic or
    exact, whichever the bundle's program is for; of a bundle with roles the first of these that it has."""
    queries: int | None = None
    """Random directions a step; default: what the bundle was exported for, with roles 4. A tangent program
    has its own, an exact gradient none."""
    share_directions: bool = False
    """tangent: one direction a query for all examples of a step, instead of one for each."""
    epsilon: float = 1e-2
    """antithetic, one-sided: length of a perturbation, in units of the adapter's values."""
    baseline: Literal["clean", "leave-one-out"] = "clean"
    """one-sided: compare with an unperturbed copy, or each query with the others."""
    normalize: bool = False
    """one-sided: divide by the deviation of the losses instead of epsilon (FZOO)."""
    clip: float = 0.0
    """Largest root mean square of a step's scalars, of each example's with tangents: an estimate of the
    gradient's norm; exact: largest norm of a step's gradient; 0: no clipping. Helps where a step has few
    examples and they differ much."""
    directions: Distribution = "rademacher"
    """antithetic, one-sided: distribution of directions; rademacher is bit-identical on every machine."""
    batch_size: int | None = None
    """Bundles with roles: sequences of one call, before copies; default: 4, or as many as a row needs."""
    calls: int = 1
    """Batches accumulated into one step."""
    optimizer: OptimizerName = "adam"
    """sgd, momentum or adam."""
    momentum: float = 0.9
    """momentum's coefficient, and adam's beta1."""
    beta2: float = 0.999
    """adam's second coefficient."""
    head_learning_rate: float = 0.0
    """Encoders: train the fitted head by its exact gradient at this peak rate, without folds; 0 keeps it."""

    engine: EngineName = "auto"
    """native: the stock libraries, without torch, compiled against once; torch: the runtime's Python module.
    The same bits. auto: native where it is built or can be, else torch."""
    memory: int | None = None
    """Bundles with roles: bytes of weights that may stay loaded; the others are loaded when their turn comes.
    The same bits. Default: all stay."""
    keep_programs: bool = False
    """Tangent bundles: keep the programs for steps and for scoring loaded side by side. Evaluations begin
    sooner, and the weights are in memory twice, but for those that the native engine can share."""
    lengths: list[int] | None = None
    """Bundles exported with --lengths: those to use, and the longest in any case. Default: all, if the
    programs fit into program_bytes together, else the longest alone."""
    program_bytes: int = PROGRAM_BYTES
    """Bundles exported with --lengths: bytes that loaded programs may take to use more than one length."""
    trunk_cache_bytes: int = 1 << 30
    """Bundles with a trunk: bytes of the run folder that may keep what the trunk made of training rows; 0:
    computed every time."""
    trunk_cache_dtype: Precision = "float32"
    """Bundles with a trunk: precision of what is kept. float16 takes half the room and rounds the states."""
    pause_above_celsius: float | None = None
    """Pause while the device is hotter than this, until it is three degrees cooler."""
    pause_below_battery: float | None = None
    """Pause while the battery holds less than this many percent and is not charged."""
    only_charging: bool = False
    """Pause while the battery is not charged."""

    def __post_init__(self) -> None:
        problems = self.shared_problems()
        if self.resume is None:
            # A resumed run is told of every setting that it wasn't begun with.
            problems += self._without_meaning()
        if self.baseline == "leave-one-out" and self.queries == 1:
            problems.append("--baseline leave-one-out needs --queries of at least 2")
        if problems:
            raise ConfigError(
                "these settings can't be used:", problems, remedy="`prge run --help` explains them"
            )

    def _without_meaning(self) -> list[str]:
        """Settings that were changed and belong to another estimator."""
        estimator = self.estimator or "not given"
        owners = {"baseline": "one-sided", "normalize": "one-sided", "share_directions": "tangent"}
        if self.estimator in ("tangent", "exact"):
            owners |= {"epsilon": "antithetic or one-sided", "directions": "antithetic or one-sided"}
        if self.estimator == "exact":
            owners["queries"] = "tangent, antithetic or one-sided"
        if self.estimator is None:
            # The bundle may turn out to be for tangents.
            del owners["share_directions"]
        return [
            f"{flag(name)} belongs to --estimator {owner}, the estimator is {estimator}"
            for name, owner in owners.items()
            if owner != self.estimator and getattr(self, name) != getattr(RunSettings, name)
        ]


def settled(settings: RunSettings, bundle: Bundle) -> RunSettings:
    """The settings with the estimator and the number of queries, if any, that a bundle's program is for.

    Raises:
        ConfigError: other ones were asked for, or settings have no meaning for them.
    """
    contract = bundle.contract
    check_form(settings, bundle)
    if bundle.chain is not None:
        return _settled_on_chain(settings, bundle.chain)
    fitting = _FITTING[contract.kind]
    estimator = settings.estimator or fitting[0]
    if estimator not in fitting:
        raise ConfigError(
            "the settings don't fit the bundle:",
            [f"--estimator is {estimator}, the bundle's program is for {' or '.join(fitting)}"],
            remedy="leave --estimator out, or export with --estimator "
            + ("antithetic" if estimator == "one-sided" else estimator),
        )
    queries = settings.queries if contract.is_exact else settings.queries or suggested_queries(bundle)
    if contract.is_tangent and queries != contract.queries:
        raise ConfigError(
            "the settings don't fit the bundle:",
            [f"--queries is {queries}, the bundle's tangent program computes {contract.queries}"],
            remedy=f"leave --queries out, or export with --queries {queries}",
        )
    if bundle.trunk is None and settings.trunk_cache_dtype != "float32":
        raise ConfigError(
            "the settings don't fit the bundle:",
            [f"--trunk-cache-dtype is {settings.trunk_cache_dtype}, the bundle has no trunk"],
            remedy="leave it out, or export with --trunk-cache",
        )
    check_lengths(bundle, settings.lengths or ())
    return replace(settings, estimator=estimator, queries=queries)


_KIND: dict[EstimatorName, str] = {
    "tangent": "tangent",
    "exact": "exact",
    "antithetic": "stack",
    "one-sided": "stack",
}


def _settled_on_chain(settings: RunSettings, chain: Chain) -> RunSettings:
    fitting = [name for name, kind in _KIND.items() if ROLE_OF[kind] in chain.roles]
    # Exact gradients are asked for by name: they take a backward pass.
    estimator = settings.estimator or ("tangent" if "tangent" in fitting else "antithetic")
    if estimator not in fitting:
        raise ConfigError(
            "the settings don't fit the bundle:",
            [f"--estimator is {estimator}, the bundle has the roles {', '.join(chain.roles)}"],
            remedy=f"choose one of {', '.join(fitting)}, or export with the role {ROLE_OF[_KIND[estimator]]}",
        )
    queries = None if estimator == "exact" else settings.queries or DEFAULT_QUERIES
    return replace(settings, estimator=estimator, queries=queries)


def check_form(settings: Any, bundle: Bundle, of_chains: Collection[str] = _OF_CHAINS) -> None:
    """Raise ConfigError for settings that were given and have no meaning for a bundle of this form.

    Args:
        settings: of a verb that runs a bundle.
        bundle: an opened bundle.
        of_chains: names of those that are for a bundle with a chain.
    """
    is_chain = bundle.chain is not None
    foreign = _OF_WHOLE_PROGRAMS if is_chain else of_chains
    made = "without --roles" if is_chain else "with --roles"
    problems = [
        f"{flag(item.name)} is for a bundle that was exported {made}"
        for item in fields(settings)
        if item.name in foreign and getattr(settings, item.name) != item.default
    ]
    if problems:
        raise ConfigError("the settings don't fit the bundle:", problems, remedy="leave them out")


def bundle_for(settings: RunSettings, bundle: Bundle, examples: Sequence[Example] = ()) -> Bundle:
    """The bundle with the contract of a step that settled settings ask for.

    Args:
        settings: of the run.
        bundle: one with a chain is given a contract; any other stays what it is.
        examples: training rows; without `batch_size` a batch has room for the widest.

    Raises:
        BundleError: it lacks the estimator's role.
    """
    if bundle.chain is None:
        return bundle
    batch = settings.batch_size or batch_for(examples)
    if settings.estimator == "exact":
        classes = max((example.candidates for example in examples), default=0)
        contract = bundle.chain.contract("exact", batch, classes=classes)
    elif settings.estimator == "tangent":
        contract = bundle.chain.contract("tangent", batch, queries=settings.queries or DEFAULT_QUERIES)
    else:
        queries = settings.queries or DEFAULT_QUERIES
        copies = (
            2 * queries if settings.estimator == "antithetic" else queries + (settings.baseline == "clean")
        )
        contract = bundle.chain.contract("stack", batch, copies=copies)
    return bundle.for_calls(contract, bundle.score_contract)


def batch_for(examples: Sequence[Example]) -> int:
    """Sequences of a call where nobody names a number: 4, or as many as the widest example has."""
    return max([DEFAULT_BATCH, *(len(example.sequences) for example in examples)])


def suggested_queries(bundle: Bundle) -> int:
    """Random directions a step that a bundle was exported for."""
    queries = bundle.contract.queries or bundle.manifest.get("queries") or 4
    if type(queries) is not int or BOUNDS["queries"].problem(queries):
        raise BundleError(
            f"the manifest's queries are {shown(queries)}, must be a number", remedy="export the bundle again"
        )
    return queries
