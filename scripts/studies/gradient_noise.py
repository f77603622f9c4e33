"""Measure how much of finite differences is signal, against exact derivatives along the same directions.

    python scripts/studies/gradient_noise.py --bundle BUNDLE --data rows.jsonl --batches 16 \\
        --epsilons 0.01 0.1

The bundle has the role `jvp`. Prints JSON: for each type of difference and epsilon the correlation `r` of
projected gradients with exact derivatives of a batch's mean loss, and the `slope` of their regression.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from device_runner.engines.opening import open_engine
from device_runner.session.gradient_noise import difference_rules, measure_agreement
from prge.data.example_building import load_examples
from prge.data.sources import read_source
from prge.data.tokenization.tokenizer import load_bundle_tokenizer
from prge.engine import Float64Array
from prge.formats.adapter import Adapter
from prge.formats.bundle import open_bundle
from prge.formats.peft import find_adapter, read_compatible_adapter
from prge.objectives.scoring import score
from prge.training.checkpoint_heads import load_bundle_task
from prge.training.estimators.differences import perturb_adapter
from prge.training.estimators.directions import RankOneDirections
from prge.training.estimators.protocol import Step
from prge.training.estimators.tangents import TangentEstimator
from prge.training.sampler import Sampler


def study(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare projected gradients of every type of difference and epsilon."""
    bundle = open_bundle(arguments.bundle)
    task = load_bundle_task(bundle, arguments.task)
    source = read_source(tuple(arguments.data), "train", task=task)
    examples, _ = load_examples(source, load_bundle_tokenizer(bundle), bundle.chain.model, task)
    start = find_adapter(arguments.adapter) if arguments.adapter else bundle.adapter
    adapter = read_compatible_adapter(start, bundle.chain.modules, bundle.adapter)
    sampler = Sampler(examples, arguments.batch_size, arguments.seed)
    engine = open_engine(bundle, "jvp").engine
    exact, differences = list[Float64Array](), dict[str, list[Float64Array]]()
    for number in range(arguments.batches):
        batch = sampler.batch(number)
        step = Step(adapter, batch, arguments.seed, number)
        measurement = TangentEstimator(arguments.queries, shared=True).measure(engine, step)
        exact.append(measurement.projected_gradients.mean(1))
        directions = RankOneDirections(
            arguments.seed, number, arguments.queries, 1, adapter.modules, shared=True
        )
        for epsilon in arguments.epsilons:
            for name, rule in difference_rules(arguments.queries, epsilon).items():
                perturbed_values = (
                    perturb_adapter(adapter, variant, directions) for variant in rule.perturbations()
                )
                losses = [
                    score(engine, Adapter(adapter.modules, values), batch).loss for values in perturbed_values
                ]
                differences.setdefault(f"{name} {epsilon:g}", []).append(
                    rule.projected_gradients(np.array(losses))
                )
    reference = np.stack(exact)
    agreements = {
        name: measure_agreement(np.stack(estimates), reference) for name, estimates in differences.items()
    }
    return {
        "quantization": bundle.quantization,
        "projected_gradients": reference.size,
        "differences": {name: {"r": each.r, "slope": each.scale} for name, each in agreements.items()},
    }


def main() -> None:
    """Parse the flags, run and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--task")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1e-3, 1e-2, 1e-1])
    parser.add_argument("--seed", type=int, default=42)
    print(json.dumps(study(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()
