"""Compare training steps of prge and other trainers on one machine: seconds and memory of the same step.

    python scripts/bench/peers.py --json peers.json [--models smollm2-135m qwen2.5-0.5b] [--blas LIBRARY]

A model is a trial of prge/training/trials.py, as `prge android bench` runs it on a phone: its shape with
random weights, batch, tokens, rank and layers. All methods train both matrices of LoRA. They take steps in
turns, each in a process of its own; ratios are medians over rounds. The methods are

    prge-int4, prge-fp32           exact steps of a bundle with default memory
    mlx-4bit, mlx-bf16, mlx-fp32   mlx-lm's LoRA on MLX's CPU backend, in an environment of its own in prge's
                                   cache; mlx-4bit has float32 activations, which are faster; with --blas
                                   also mlx-fp32-blas, which uses that library (OpenBLAS) instead of the
                                   reference BLAS of MLX's wheel
    peft-bf16, peft-fp32           PyTorch with PEFT and AdamW
    executorch                     ExecuTorch's training module: the joint program in float32 on XNNPACK, SGD

Prints JSON by model: `methods` with seconds, anonymous_mb and peak_rss_mb, or the reason why there are none,
such as a step that takes longer than --limit; and `prge_over_mlx_seconds`, `prge_over_mlx_memory`
(anonymous), `prge_over_mlx_peak` and the same for peft and executorch, by prge's weights and then the
other's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from processes import Server, start_process
from reports import make_parser, measure_in_turns, median, report_models
from timing import export

from prge.system.user_cache import cache_path
from prge.training.trials import TRIALS, Trial
from server_export.checkpoint.random_models import CONFIGURATIONS

STEPS = Path(__file__).with_name("peer_steps.py")
PRGE_BUNDLES = {"prge-int4": "8da4w", "prge-fp32": "fp32"}
MLX = ("mlx-4bit", "mlx-bf16", "mlx-fp32")
BLAS, EXECUTORCH = "mlx-fp32-blas", "executorch"
METHODS = (*PRGE_BUNDLES, *MLX, BLAS, "peft-bf16", "peft-fp32", EXECUTORCH)
# Multiples of a step's limit that a first step and the export of ExecuTorch's program may take.
_FIRST, _EXPORT = 3, 5
_PACKAGES = ("mlx[cpu]", "mlx-lm")


class LackingError(Exception):
    """A method is unavailable on this machine; the message says why."""


def bench(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Measure all methods on one trial."""
    trial = TRIALS[model]
    sizes = {"batch": trial.batch, "tokens": trial.tokens, "rank": trial.rank, "layers": trial.layers}
    vocabulary_size = CONFIGURATIONS[trial.shape]["vocab_size"]
    trial_json = json.dumps({**sizes, "threads": arguments.threads, "vocabulary": vocabulary_size})
    (folder / "trial.json").write_text(trial_json, encoding="utf-8")
    figures_by_method: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        steps: dict[str, Server] = {}
        for method in arguments.methods:
            try:
                command, variables = command_of(method, folder, trial, arguments)
                steps[method] = stack.enter_context(start_process(command, variables))
                # MLX compiles in the first step.
                for limit in (_FIRST * arguments.limit, arguments.limit):
                    steps[method].take_step(limit)
            except (LackingError, TimeoutError, ChildProcessError, BrokenPipeError) as error:
                if method in steps:
                    steps.pop(method).process.kill()
                long = f"a step takes longer than {arguments.limit} s, or the first one {_FIRST} times that"
                figures_by_method[method] = {
                    "reason": long if isinstance(error, TimeoutError) else str(error)
                }
                print(f"{method}: {figures_by_method[method]['reason']}", file=sys.stderr)
        turns: dict[str, Callable[[], tuple[float, float]]] = {**steps}
        rounds = measure_in_turns(turns, arguments.repeats)
        seconds = [{name: each[0] for name, each in taken.items()} for taken in rounds]
        for name, step in steps.items():
            figures_by_method[name] = {"seconds": median(seconds, name), **asdict(step.memory())}
            figures_by_method[name]["losses"] = [taken[name][1] for taken in rounds]
    return {"trial": asdict(trial), "methods": figures_by_method, **ratios(seconds, figures_by_method)}


def command_of(
    method: str, folder: Path, trial: Trial, arguments: argparse.Namespace
) -> tuple[Sequence[object], Mapping[str, str]]:
    """Return the command of a method and its environment variables; raises LackingError."""
    threads = str(arguments.threads)
    variables = {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": threads}
    if method.startswith("mlx"):
        if method == BLAS:
            if arguments.blas is None:
                raise LackingError("no --blas names an OpenBLAS; Debian: apt install libopenblas0-pthread")
            library_variables = {
                "LD_PRELOAD": str(arguments.blas),
                "LD_LIBRARY_PATH": str(arguments.blas.parent),
            }
            variables |= {**library_variables, "OPENBLAS_NUM_THREADS": threads}
        return [mlx_python(), STEPS, method.removesuffix("-blas"), folder], variables
    command = [sys.executable, STEPS, method, folder]
    if method in PRGE_BUNDLES:
        flags = ["--quantize", PRGE_BUNDLES[method], "--rank", trial.rank, "--adapter", "lora"]
        flags += ["--roles", "forward", "backward"]
        layers = [trial.layers] if isinstance(trial.layers, str) else trial.layers
        export(
            folder / "model", folder / method.removeprefix("prge-"), *flags, "--target-modules", *layers,
            "--sequence-length", trial.tokens,
        )  # fmt: skip
        variables["OMP_NUM_THREADS"] = "1"
    elif method == EXECUTORCH:
        result = _run([*command[:2], "executorch-export", folder], _EXPORT * arguments.limit)
        if result.returncode:
            raise LackingError(f"its program can't be made: {_last_line(result.stderr)}")
    return command, variables


def mlx_python() -> Path:
    """Return the Python of an environment with mlx-lm in prge's cache; raises LackingError."""
    environment = cache_path("mlx")
    python = environment / "bin" / "python"
    if not python.is_file():
        environment.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for command in (
            [sys.executable, "-m", "venv", environment],
            [python, "-m", "pip", "install", "--quiet", *_PACKAGES],
        ):
            result = _run(command)
            if result.returncode:
                raise LackingError(f"mlx can't be installed: {_last_line(result.stderr)}")
    result = _run([python, "-c", "import mlx.core, mlx_lm"])
    if result.returncode:
        raise LackingError(f"mlx in {environment} can't be imported: {_last_line(result.stderr)}")
    return python


def ratios(
    seconds: Sequence[Mapping[str, float]], figures_by_method: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return ratios of prge over other trainers, by trainer and figure: time, anonymous memory and peak."""
    measured_methods = [name for name, figures in figures_by_method.items() if "seconds" in figures]
    figures: dict[str, dict[str, dict[str, float]]] = {
        f"prge_over_{trainer}_{figure}": {
            prge_method.removeprefix("prge-"): {}
            for prge_method in measured_methods
            if prge_method in PRGE_BUNDLES
        }
        for trainer in ("mlx", "peft", EXECUTORCH)
        for figure in ("seconds", "memory", "peak")
    }
    for prge_method, other_method in itertools.product(measured_methods, measured_methods):
        if prge_method not in PRGE_BUNDLES or other_method in PRGE_BUNDLES:
            continue
        trainer, _, weights = other_method.partition("-")
        pair = figures_by_method[prge_method], figures_by_method[other_method]
        anonymous, peak = (pair[0][name] / pair[1][name] for name in ("anonymous_mb", "peak_rss_mb"))
        values = {
            "seconds": median(seconds, prge_method, over=other_method),
            "memory": anonymous,
            "peak": peak,
        }
        for figure, value in values.items():
            by_weights = figures[f"prge_over_{trainer}_{figure}"][prge_method.removeprefix("prge-")]
            by_weights[weights or "fp32"] = value
    return figures


def _run(command: Sequence[object], limit: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command; raises LackingError if it takes more than `limit` seconds."""
    command_line = [*map(str, command)]
    out, errors = subprocess.DEVNULL, subprocess.PIPE
    try:
        return subprocess.run(command_line, stdout=out, stderr=errors, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        raise LackingError(f"its program isn't made within {limit:.0f} seconds") from None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1]


def main() -> None:
    """Parse the flags, measure and print JSON."""
    parser = make_parser(__doc__, threads=2, repeats=5, limit=120)
    steps = [name for name, trial in TRIALS.items() if not trial.written]
    parser.add_argument("--models", nargs="+", choices=steps, default=["smollm2-135m"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--blas", type=Path, help="libopenblas.so.0, for mlx-fp32-blas")
    report_models(parser.parse_args(), bench)


if __name__ == "__main__":
    main()
