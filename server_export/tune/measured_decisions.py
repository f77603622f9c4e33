"""Measure the facts for a tuning's decisions, and record the decisions that the record lacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from prge.data.readers.files import Row
from prge.data.sources import Part
from prge.data.tokenization.tokenizer import Tokenizer, load_bundle_tokenizer
from prge.errors import PrgeError
from prge.formats.adapter import adapter_size
from prge.formats.bundle import Bundle
from prge.objectives.examples import Example
from prge.rewards.opening import check_roles
from prge.system.memory import available_memory
from prge.training.costs import (
    BYTES_PER_WAITING_TOKEN,
    ModelSizes,
    StepShape,
    WeightBytes,
    bundle_costs,
    estimate_generation_memory,
    estimate_run_memory,
    fit_budget,
)
from prge.training.estimators.rollouts import ROLLOUT_SLOTS
from prge.training.estimators.table import ESTIMATORS, available_estimators
from server_export.check.estimation import Estimate, check_resources, estimate
from server_export.settings import EstimateConfig
from server_export.tune import decisions
from server_export.tune.decisions import Decision, RowFacts
from server_export.tune.record import Record
from server_export.tune.row_files import RowFiles
from server_export.tune.settings import TuneSettings
from server_export.tune.tokenizing import ROWS, Tokenizing
from server_export.tune.user_rows import UserRows

_REMEDY = (
    "Give more, or use --quantize 8da4w, a smaller --sequence-length or --rank, or --adapt-layers top:k."
)


class DecisionMaker:
    """Takes the decisions of a tuning before its export, and before the runs of its bundle.

    Args:
        settings: settings of the tuning.
        record: record of the tuning.
    """

    def __init__(self, settings: TuneSettings, record: Record) -> None:
        self._settings = settings
        self._record = record

    def decide(self, name: str, user_value: Any, make: Callable[[], Decision | None]) -> None:
        """Record a setting, unless the record has it.

        Args:
            name: name of the setting.
            user_value: value that the user gave; None: there is none.
            make: makes the decision if the user gave no value; returns None if there is nothing to decide.
        """
        if self._record.value(name) is None:
            decision = make() if user_value is None else Decision(name, user_value, "given by the user")
            self._record.decide(*([decision] if decision else []))

    def for_export(self, rows: UserRows) -> dict[Part, list[Row]]:
        """Decide quantization, adapter, chat template, first token and sequence length of a bundle.

        Returns:
            The rows of all parts, as such a bundle uses them.

        Raises:
            PrgeError: the model or the rows can't be used.
        """
        settings, model = self._settings, str(self._settings.model)
        estimated = self._decide_adapter(model, rows)
        check_resources(estimated, settings.out)
        spec = estimated.model
        tokenizing = Tokenizing(model, estimated)

        def template() -> Decision | None:
            needed = rows.chat == "needs"
            return decisions.chat_template(tokenizing.has_template()) if needed else None

        self.decide("chat_template", settings.chat_template, template)
        chat_template = self._record.value("chat_template")
        tokenizer = tokenizing.device_tokenizer(chat_template, None)
        longest = rows.check(tokenizer, spec)

        def sample_examples(tokenizer: Tokenizer) -> Sequence[Example]:
            return rows.sample_examples(ROWS, tokenizer, spec)

        self.decide(
            "prepend_bos", settings.prepend_bos, lambda: tokenizing.decide_bos(chat_template, sample_examples)
        )
        if begins := self._record.value("prepend_bos"):
            why = next(each.why for each in self._record.decisions if each.name == "prepend_bos")
            rows.notes.append(f"prepend_bos is {begins}: {why}")
            tokenizer = tokenizing.device_tokenizer(chat_template, begins)
            longest = rows.check(tokenizer, spec)
        self.decide(
            "sequence_length",
            settings.sequence_length,
            lambda: decisions.sequence_length(
                longest,
                estimated.positions,
                lambda length: self._on_a_row(estimated, model, length)(estimated.weights.largest),
                self._free(),
            ),
        )
        length = self._record.value("sequence_length")
        if limit := self._limit():
            # Refused within seconds, and not after minutes of an export.
            needed = self._on_a_row(estimated, model, min(length, longest))
            fit_budget(limit, needed, estimated.weights, "a run of this model", _REMEDY)
        return rows.split(tokenizer, replace(spec, sequence_length=length))

    def _decide_adapter(self, model: str, rows: UserRows) -> Estimate:
        """Decide quantization, adapter and roles, and return the estimate of such a bundle."""
        settings = self._settings
        try:
            whole = estimate(EstimateConfig(model=model, **decisions.ALL_LAYERS))
            numel = adapter_size(whole.outline.modules)
        except PrgeError:  # not all linear layers of this model can have an adapter
            whole, numel = estimate(EstimateConfig(model=model)), None
        self.decide("quantize", settings.quantize, lambda: decisions.scheme(whole.outline.parameters))
        is_encoder = whole.readout == "pooled"
        for each in decisions.adapted(settings.chosen_estimator, is_encoder, numel, self._free()):
            self.decide(each.name, getattr(settings, each.name), partial(Decision, **asdict(each)))
        generates = rows.is_generative and not is_encoder
        self.decide("roles", settings.roles, lambda: decisions.roles(settings.chosen_estimator, generates))
        if settings.reward is not None:
            check_roles(self._record.value("roles"))
        chosen = {name: self._record.value(name) for name in decisions.ALL_LAYERS}
        chosen["adapt_layers"] = settings.adapt_layers
        if numel is None or chosen != {**decisions.ALL_LAYERS, "adapt_layers": None}:
            adapter_settings = {name: value for name, value in chosen.items() if value is not None}
            whole = estimate(EstimateConfig(model=model, **adapter_settings))
        return whole.exported_as(self._record.value("quantize"), self._record.value("roles"))

    def _limit(self) -> int | None:
        """Return the memory limit of a run in bytes, of the user or of a phone; None: there is none."""
        limit: int | None = self._settings.memory or self._record.value("memory")
        return limit

    def _free(self) -> int:
        """Return the bytes of memory that a run may use: the limit, or half of this machine's free memory."""
        return self._limit() or available_memory() // 2

    def _on_a_row(self, estimated: Estimate, model: str, length: int) -> Callable[[int], int]:
        """Return a function from bytes of loaded weights to bytes of memory of steps on one row.

        Args:
            estimated: estimate of the bundle.
            model: hub id or path of the model.
            length: number of tokens of the row.
        """
        estimated = replace(estimated, outline=replace(estimated.outline, longest=length))
        config = EstimateConfig(model=model, batch_size=1)
        shape = estimated.shape(config, estimated.estimators[0], length, length - 1)
        return lambda loaded: self._run_memory(
            estimated.outline, shape, estimated.weights, estimated.roles, loaded
        )

    def _run_memory(
        self,
        outline: ModelSizes,
        shape: StepShape,
        weights: WeightBytes,
        roles: Collection[str],
        loaded: int,
    ) -> int:
        """Return the bytes of memory of a run, which generates completions if there is a reward."""
        settings = self._settings
        # A tuning's last run writes samples.
        steps = estimate_run_memory(outline, shape, weights, roles, "native", loaded, keeps_tokenizer=True)
        if settings.reward is None:
            return steps.total
        texts = estimate_generation_memory(
            outline,
            shape.vocabulary_size,
            weights,
            "native",
            ROLLOUT_SLOTS,
            shape.tokens,
            loaded,
            adapters=shape.copies,
        )
        return (texts if settings.is_evolution else texts.with_work_in_turn(steps)).total

    def for_runs(self, bundle: Bundle, rows: RowFiles) -> RowFacts:
        """Decide estimator, batch size, head folds, beta and steps of runs, and return facts of the rows."""
        settings, record = self._settings, self._record

        def measure() -> dict[str, Any]:
            return asdict(rows.facts(load_bundle_tokenizer(bundle), bundle.chain.model, settings.overflow))

        facts = RowFacts(**record.fact("facts", measure))
        self.decide("estimator", settings.estimator, lambda: _best_estimator(bundle, settings))
        self.decide("batch_size", settings.batch_size, lambda: self._batch_size(bundle, facts))
        batch = record.value("batch_size")
        repeats = 1 if settings.is_evolution else settings.num_iterations
        self.decide("head_folds", settings.head_folds, lambda: decisions.head_folds(facts))
        self.decide("beta", settings.beta, lambda: decisions.beta(facts))
        self.decide("steps", settings.steps, lambda: decisions.steps(facts, batch, settings.epochs, repeats))
        return facts

    def _batch_size(self, bundle: Bundle, facts: RowFacts) -> Decision:
        """Decide the batch size, within the memory limit of a run if there is one."""
        decision, limit = decisions.batch_size(facts), self._limit()
        if limit is None:
            return decision
        chain, entry = bundle.chain, ESTIMATORS[self._record.value("estimator")]
        outline, weights = bundle_costs(bundle)
        length = min(facts.longest, chain.bounds.tokens)

        def needed(examples: int) -> int:
            sequences = examples * facts.widest
            shape = StepShape(
                entry.role,
                sequences,
                length,
                length - 1,
                chain.vocabulary_size,
                copies=entry.copies(),
                queries=entry.directions(),
            )
            run_bytes = self._run_memory(outline, shape, weights, chain.roles, weights.largest)
            return run_bytes + BYTES_PER_WAITING_TOKEN * facts.tokens

        return decisions.within_memory(decision, limit, needed)


def _best_estimator(bundle: Bundle, settings: TuneSettings) -> Decision:
    """Choose the best estimator for the objective and the roles of a bundle."""
    if chosen := settings.chosen_estimator:
        return Decision("estimator", chosen, "evolution strategies compare perturbed adapters")
    best = available_estimators(bundle.chain.roles)[0]
    why = (
        "the best one for the bundle's roles"
        if ESTIMATORS[best].has_directions
        else "backpropagation needs the fewest steps"
    )
    return Decision("estimator", best, why)
