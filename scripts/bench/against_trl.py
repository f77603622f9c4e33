"""Compare steps on preferences with steps on completions, and with TRL's trainers in PyTorch.

The command is `scripts/bench/preferences.py`. A model is trained with SGD to prefer one mood of the demo's
texts: in the engine, and by TRL from the same adapter on the same rows in the same order. ORPO has one pair
in a step and no prompt, since TRL's trainer also trains on the prompt and averages over all tokens of a step.
Prints JSON:

    dpo_step_over_completion_step   seconds of a step on pairs, over those of a step on as many completions
    over_trl_seconds, over_trl_memory
                                    ratios of step time and of the processes' peak memory, by objective
    loss_difference_trl             largest relative difference of the losses of --steps steps, by objective
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from timing import export

from prge.cli.subprocesses import verb_command
from prge.data.forms.task import load_task
from prge.data.readers.files import read_rows
from prge.formats.journal import Journal
from prge.formats.run_folder import JOURNAL, environment, read_metrics
from prge.system.processes import watch_memory

DEMO = Path(__file__).resolve().parents[2] / "server_export" / "demo_data"
BETA = 0.1
# A steep loss needs a low rate: rounding errors grow with each step.
RATES = {"ipo": 0.005}
RATE = 0.05
# Rows of a step; see the module's docstring.
ROWS = {"dpo": 4, "ipo": 4, "simpo": 4, "kto": 4, "orpo": 1, "completion": 4}


@dataclass(frozen=True)
class StepFigures:
    """Losses and seconds of a process's steps, and its peak anonymous memory in MB."""

    losses: list[float]
    seconds: list[float]
    memory: float

    @property
    def step(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)


def main() -> None:
    """Parse the flags, run the steps and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEMO / "model")
    parser.add_argument("--bundle", type=Path, help="of the model in float32; default: it is exported")
    parser.add_argument("--objectives", nargs="+", default=["dpo", "kto", "orpo"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file to write the figures to as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = arguments.bundle or Path(folder, "bundle")
        if arguments.bundle is None:
            export(arguments.model, bundle, "--target-modules", "all-linear", "--adapter", "lora")
        figures = bench(arguments, bundle, Path(folder))
    content = {**figures, "settings": vars(arguments), "machine": environment()}
    text = json.dumps(content, indent=2, default=str)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)


def bench(arguments: argparse.Namespace, bundle: Path, folder: Path) -> dict[str, Any]:
    """Return all figures."""
    figures: dict[str, dict[str, float]] = {}
    prge_figures: dict[str, StepFigures] = {}
    for name in arguments.objectives:
        prge_figures[name], trl_figures = run_both(
            name, arguments.model, bundle, folder, arguments.steps, arguments.threads
        )
        for figure, value in {
            "over_trl_seconds": prge_figures[name].step / trl_figures.step,
            "over_trl_memory": prge_figures[name].memory / trl_figures.memory,
            "loss_difference_trl": loss_difference(prge_figures[name], trl_figures),
            "seconds": prge_figures[name].step,
            "memory_mb": prge_figures[name].memory,
        }.items():
            figures.setdefault(figure, {})[name] = value
    if "dpo" not in prge_figures:
        return figures
    rows = rows_of("completion", ROWS["completion"] * arguments.steps)
    plain, _ = engine_steps("completion", bundle, folder / "completion", rows, arguments.threads)
    return {"dpo_step_over_completion_step": prge_figures["dpo"].step / plain.step, **figures}


def run_both(
    objective: str, model: Path, bundle: Path, folder: Path, steps: int, threads: int = 1
) -> tuple[StepFigures, StepFigures]:
    """Run the same steps in the engine and with TRL."""
    rows = rows_of(objective, ROWS[objective] * steps)
    prge_figures, order = engine_steps(objective, bundle, folder / objective, rows, threads)
    ordered_rows = [rows[number - 1] for number in order]
    if objective == "kto":
        index_of = {number: index for index, number in enumerate(order)}
        # The completion of the preceding row in the file.
        ordered_rows = [
            {**row, "other": index_of[(n - 2) % len(rows) + 1]}
            for row, n in zip(ordered_rows, order, strict=True)
        ]
    return prge_figures, trl_steps(
        objective, model, bundle / "adapter", folder / objective, ordered_rows, threads
    )


def loss_difference(first: StepFigures, second: StepFigures) -> float:
    """Return the largest relative difference between two sequences of losses."""
    return float(np.abs(np.array(first.losses) / np.array(second.losses) - 1).max())


def rows_of(objective: str, count: int) -> list[dict[str, Any]]:
    """Return the demo's texts, each with the right mood preferred to the wrong one."""
    task = load_task(str(DEMO / "task.yaml"))
    examples: list[dict[str, Any]] = []
    for number, row in enumerate(read_rows(DEMO / "train.jsonl")[:count]):
        prompt, words, label = (
            task.prompt(row.fields),
            task.candidates(row.fields),
            task.label(row.fields),
        )
        right, wrong = (f"{words[each]} there." for each in (label, 1 - label))
        rows: dict[str, dict[str, Any]] = {
            "orpo": {"prompt": "", "chosen": prompt + right, "rejected": prompt + wrong},
            "kto": {"prompt": prompt, "completion": wrong if number % 3 else right, "label": number % 3 == 0},
            "completion": {"prompt": prompt, "completion": right},
        }
        examples.append(rows.get(objective, {"prompt": prompt, "chosen": right, "rejected": wrong}))
    return examples


def engine_steps(
    objective: str, bundle: Path, folder: Path, rows: Sequence[dict[str, Any]], threads: int
) -> tuple[StepFigures, list[int]]:
    """Run steps with `prge run`; return them and the row numbers in the order of training."""
    folder.mkdir(parents=True)
    data, out = folder / "rows.jsonl", folder / "run"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = {
        **{"bundle": bundle, "train": data, "out": out, "threads": threads, "objective": objective},
        **{"steps": len(rows) // ROWS[objective], "batch-size": ROWS[objective]},
        **{
            "optimizer": "sgd",
            "learning-rate": RATES.get(objective, RATE),
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
        },
        **({} if objective == "completion" else {"beta": BETA}),
    }
    arguments = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    memory = _run_watched(verb_command("run", *arguments, "--quiet"), None)[1]
    metrics = [record for record in read_metrics(out) if record["event"] == "step"]
    with Journal(out / JOURNAL, writable=False) as journal:
        steps = [step for number in range(journal.steps) if (step := journal.step(number)) is not None]
    seconds = [each["engine_seconds"] + each["host_seconds"] for each in metrics]
    figures = StepFigures([step["loss"] for step in steps], seconds, memory)
    return figures, [row for step in steps for row in step["rows"]]


def trl_steps(
    objective: str, model: Path, adapter: Path, folder: Path, rows: list[dict[str, Any]], threads: int
) -> StepFigures:
    """Run steps with TRL's trainer in a process of its own."""
    settings = folder / "trl.json"
    content = {
        **{"objective": objective, "model": str(model), "adapter": str(adapter), "rows": rows, "beta": BETA},
        **{
            "batch_size": ROWS[objective],
            "learning_rate": RATES.get(objective, RATE),
            "out": str(folder / "trl"),
        },
    }
    settings.write_text(json.dumps(content), encoding="utf-8")
    script = Path(__file__).with_name("trl_steps.py")
    output, memory = _run_watched([sys.executable, str(script), str(settings)], str(threads))
    result = json.loads(output.splitlines()[-1])
    return StepFigures(result["losses"], result["seconds"], memory)


def _run_watched(command: Sequence[str], threads: str | None) -> tuple[str, float]:
    """Run a command; return its output and the peak memory of it and its children in MB."""
    extra_variables = {"OMP_NUM_THREADS": threads} if threads else {}
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **extra_variables}
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as child,
        watch_memory(child.pid) as peak,
    ):
        output = child.communicate()[0]
    if child.returncode:
        raise SystemExit(f"{command[0]} ended with code {child.returncode}")
    return output, peak.anonymous_mb
