"""Time and memory of a step by backpropagation, against tangents and antithetic copies on the same rows.

    python scripts/bench/exact.py --model smollm2-135m --quantize fp32 8da4w --queries 4 --json out.json

The programs have the same random weights and take steps on the same rows, interleaved in one process; seconds
are medians, ratios those of pairs of the same round. Memory is what the export planned, and what the engine
took for a call in a process of its own. `cos_float` is the cosine between the gradient of a quantized program
and PyTorch's through the same quantized weights and activations that are not rounded. Prints JSON: the keys
of the first scheme at the top, every scheme under `schemes`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_model import random_model
from reports import report_schemes
from step import TimedStep

from device_runner.engines.executorch_engine import ExecutorchEngine
from prge.adapter import Adapter
from prge.bundle import STEP_METHOD, Bundle
from prge.contract import Contract
from prge.exact import Exact
from server_export.check.verification import run_program
from server_export.lower.lowering import lower
from server_export.lower.method_graphs import export_programs
from server_export.model.program import BuiltProgram, build_program, example_inputs
from server_export.model.quantization import dequantize
from server_export.model.random_models import CONFIGURATIONS
from server_export.model.reference import exact_answers
from server_export.settings import ExportConfig

ESTIMATORS = ("exact", "tangent", "antithetic")


def build(arguments: argparse.Namespace, scheme: str, estimator: str) -> BuiltProgram:
    """The program of one estimator; the method that scores rows is no part of a step."""
    config = ExportConfig(
        model=arguments.model,
        out=Path("unused"),
        target_modules=arguments.target_modules,
        rank=arguments.rank,
        estimator=estimator,  # type: ignore[arg-type]
        queries=arguments.queries,
        batch_size=arguments.batch_size,
        sequence_length=arguments.seq_len,
        positions=arguments.positions,
        quantize=scheme,
    )
    return replace(
        build_program(config, random_model(arguments.model, arguments.layers)), score_contract=None
    )


def step_of(
    arguments: argparse.Namespace, scheme: str, estimator: str, folder: Path
) -> tuple[TimedStep, dict[str, Any]]:
    """One training step on a program, and what it takes."""
    built = build(arguments, scheme, estimator)
    lowered = lower(export_programs(built))
    folder.mkdir(parents=True)
    path = folder / "program.pte"
    lowered.write(path)
    report = lowered.reports[STEP_METHOD]
    del lowered
    (folder / "contract.json").write_text(json.dumps(built.contract.to_json()))
    child = [sys.executable, __file__, "--alone", str(folder), "--threads", str(arguments.threads)]
    alone = subprocess.run(child, check=True, capture_output=True, text=True).stdout
    inputs = example_inputs(built.contract)
    facts: dict[str, Any] = {
        "program_bytes": path.stat().st_size,
        "arena_bytes": report.planned_memory_bytes,
        "workspace_bytes": json.loads(alone.splitlines()[-1]),
        "delegates": report.delegates,
        "delegated_share": report.delegated_share,
        "operators_outside": sum(report.outside.values()),
    }
    if estimator == "exact" and scheme != "fp32":
        answers = run_program(path, inputs)
        dequantize(built.module)
        facts["cos_float"] = cosine(answers[1:], exact_answers(built.module, built.contract, inputs)[1:])
    step = TimedStep(
        ExecutorchEngine.load(Bundle(folder, built.contract, {}), check=False), arguments.queries
    )
    if estimator == "exact":
        step.estimator = Exact()
    return step, facts


def workspace(folder: Path) -> int | None:
    """Bytes that the first call of a program takes."""
    contract = Contract.from_json(json.loads((folder / "contract.json").read_text()))
    workspaces: dict[str, int] = {}
    run_program(folder / "program.pte", example_inputs(contract), STEP_METHOD, workspaces)
    return workspaces.get(STEP_METHOD)


def cosine(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> float:
    """Cosine between two lists of arrays."""
    left, right = (torch.cat([part.ravel() for part in parts]).double() for parts in (ours, theirs))
    return float(left @ right / (left.norm() * right.norm()))


def bench(arguments: argparse.Namespace, scheme: str, folder: Path) -> dict[str, Any]:
    """Figures of one scheme."""
    found = {name: step_of(arguments, scheme, name, folder / name) for name in ESTIMATORS}
    seconds: dict[str, list[float]] = {name: [] for name in ESTIMATORS}
    for repetition in range(arguments.repeats + 1):
        for name, (step, _) in found.items():
            spent = step()[0]
            if repetition:  # the first call of each warms caches up
                seconds[name].append(spent)
    ratios = {
        f"exact_over_{name}": statistics.median(np.divide(seconds["exact"], seconds[name]).tolist())
        for name in ESTIMATORS[1:]
    }
    programs = {
        name: {"seconds": statistics.median(seconds[name]), **facts} for name, (_, facts) in found.items()
    }
    size = Adapter.zeros(found["exact"][0].engine.contract.modules).size
    return {**ratios, "trained_values": size, "programs": programs}


def main() -> None:
    """Read the flags, run, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(CONFIGURATIONS), default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="make the model shallower")
    parser.add_argument("--quantize", nargs="+", default=["fp32"])
    parser.add_argument("--target-modules", nargs="+", default=["q_proj", "v_proj"])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--positions", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    ExecutorchEngine.set_threads(arguments.threads)
    if arguments.alone:
        print(json.dumps(workspace(arguments.alone)))
        return
    report_schemes(arguments, bench)


if __name__ == "__main__":
    main()
