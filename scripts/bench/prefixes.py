"""Compare calls that compute common tokens of rows once with calls that compute every sequence on its own.

    python scripts/bench/prefixes.py --bundle BUNDLE --rows ROWS --json prefixes.json

BUNDLE takes rows of 768 tokens. ROWS has the folders copa and multirc, each with a test.jsonl, as
scripts/studies/results.py writes them. The cases, in turns in one process:

    copa       candidates as branches of one sequence, and as a sequence each
    multirc    all questions about a paragraph in one call, and in a call each

Prints JSON by case: `together_over_separate`, the ratio of seconds of scoring (`score`) and of a step by
estimator, a median over rounds; `tokens`; and the largest difference of losses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from reports import make_parser, measure_in_turns, median, report
from timing import TimedStep

from device_runner.engines.opening import open_engine
from prge.data.example_building import build_examples
from prge.data.forms.task import load_task
from prge.data.readers.files import Row, read_rows
from prge.data.tokenization.tokenizer import load_bundle_tokenizer
from prge.engine import Call, Engine, FloatArray
from prge.formats.bundle import Bundle, open_bundle
from prge.formats.peft import read_peft
from prge.formats.signatures import BACKWARD, FORWARD, JVP
from prge.objectives.examples import Example, token_count, without_branches
from prge.objectives.scoring import score
from prge.training.estimators.protocol import Step
from prge.training.estimators.table import EstimatorFlags, EstimatorName, make_estimator

STEPS: dict[str, tuple[EstimatorName, ...]] = {
    "copa": ("antithetic", "tangent", "exact"),
    "multirc": ("antithetic",),
}


class OneSequenceACall:
    """Implements prge.engine.Engine by another one, with a call for each sequence."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.model, self.jvp, self.vjp = inner.model, inner.jvp, inner.vjp

    @property
    def seconds(self) -> float:
        """See Engine."""
        return self._inner.seconds

    def forward(self, call: Call) -> FloatArray:
        """See Engine."""
        calls = [replace(call, sequences=(sequence,)) for sequence in call.sequences]
        return np.concatenate([self._inner.forward(each) for each in calls], -1)


@dataclass(frozen=True)
class Variant:
    """Examples, and whether a call has all of their sequences."""

    examples: Sequence[Example]
    in_one_call: bool = True


def variants_of(case: str, bundle: Bundle, rows: Sequence[Row]) -> dict[str, Variant]:
    """Return how the rows of a case are computed together and separately."""
    examples, _ = build_examples(
        rows, load_bundle_tokenizer(bundle), bundle.chain.model, load_task(case), training=False
    )
    if case == "copa":
        return {"together": Variant(examples), "separate": Variant([*map(without_branches, examples)])}
    return {"together": Variant(examples), "separate": Variant(examples, in_one_call=False)}


def chosen_rows(case: str, folder: Path, count: int) -> list[Row]:
    """Return the first rows of a task; of MultiRC, rows about the first paragraphs, one after the other."""
    rows = read_rows(folder / case / "test.jsonl")
    if case == "multirc":
        paragraphs = [*dict.fromkeys(row.fields["paragraph"] for row in rows)]
        rows.sort(key=lambda row: paragraphs.index(row.fields["paragraph"]))
    return rows[:count]


def bench(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the scoring and the steps of a case."""
    bundle = open_bundle(arguments.bundle)
    adapter = read_peft(bundle.adapter, bundle.chain.modules)
    adapter.values[:] = np.random.default_rng(0).standard_normal(adapter.size) * 0.01
    variants = variants_of(case, bundle, chosen_rows(case, arguments.rows, arguments.batch_size))

    def scoring(variant: Variant) -> Callable[[], tuple[float, float]]:
        opened = open_engine(bundle, FORWARD, threads=arguments.threads)
        engine = opened.engine if variant.in_one_call else OneSequenceACall(opened.engine)

        def measure() -> tuple[float, float]:
            begin = perf_counter()
            loss = score(engine, adapter, variant.examples).loss
            return perf_counter() - begin, loss

        return measure

    def step(variant: Variant, name: EstimatorName) -> Callable[[], tuple[float, float]]:
        role = {"antithetic": FORWARD, "tangent": JVP, "exact": BACKWARD}[name]
        opened = open_engine(bundle, role, threads=arguments.threads)
        if not variant.in_one_call:
            opened = replace(opened, engine=OneSequenceACall(opened.engine))
        estimator = make_estimator(EstimatorFlags(estimator=name, queries=4))
        return TimedStep(opened, estimator, Step(adapter, [*variant.examples], 0, 0)).with_loss

    figures: dict[str, Any] = {"rows": len(variants["together"].examples)}
    figures["tokens"] = {name: token_count(variant.examples) for name, variant in variants.items()}
    measurements = {"score": {name: scoring(variant) for name, variant in variants.items()}}
    for estimator in STEPS[case]:
        measurements[estimator] = {name: step(variant, estimator) for name, variant in variants.items()}
    for measured, by_variant in measurements.items():
        rounds = measure_in_turns(by_variant, arguments.repeats)
        seconds = [{name: each[0] for name, each in timings.items()} for timings in rounds]
        losses = {name: loss for name, (_, loss) in rounds[0].items()}
        figures[measured] = {
            "together_over_separate": median(seconds, "together", over="separate"),
            "seconds": {name: median(seconds, name) for name in variants},
            "loss_difference": abs(losses["together"] - losses["separate"]),
        }
        print(case, measured, figures[measured], file=sys.stderr, flush=True)
    return figures


def main() -> None:
    """Parse the flags, measure and print JSON."""
    parser = make_parser(__doc__, batch_size=16, threads=1, repeats=5)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=[*STEPS], default=[*STEPS])
    arguments = parser.parse_args()
    report({case: bench(case, arguments) for case in arguments.cases}, arguments)


if __name__ == "__main__":
    main()
