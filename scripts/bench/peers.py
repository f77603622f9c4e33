"""Steps by prge and by other trainers on one machine: seconds and memory of the same step.

    python scripts/bench/peers.py --json peers.json [--models smollm2-135m qwen2.5-0.5b] [--blas LIBRARY]

A model is a trial of prge/training/trials.py, as `prge android bench` takes it on a phone: its shape with
random weights, batch, tokens, rank and layers. All train both matrices of LoRA. Methods take steps in turns,
each in a process of its own; ratios are medians over rounds. They are

    prge-int4, prge-fp32           exact steps of a bundle, by default memory
    mlx-4bit, mlx-bf16, mlx-fp32   mlx-lm's LoRA on MLX's processor backend, from an environment of its own,
                                   which is made in prge's cache; activations of mlx-4bit are float32, with
                                   which it is faster; with --blas also mlx-fp32-blas, which has
                                   that library (OpenBLAS) in the place of its wheel's reference BLAS
    peft-bf16, peft-fp32           PyTorch with PEFT and AdamW
    executorch                     ExecuTorch's training module: the joint program in float32 on XNNPACK, SGD

Prints JSON by model: `methods` with seconds, anonymous_mb and peak_rss_mb, or the reason why there are none,
such as a step that takes longer than --limit; and `prge_over_mlx_seconds`, `prge_over_mlx_memory`
(anonymous), `prge_over_mlx_peak` and the same of peft and executorch, by our weights and then theirs.
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

from processes import Server, answering
from reports import in_turns, median, parser_of, report_models
from timing import export

from prge.system.user_cache import cache_path
from prge.training.trials import TRIALS, Trial
from server_export.checkpoint.random_models import CONFIGURATIONS

STEPS = Path(__file__).with_name("peer_steps.py")
OURS = {"prge-int4": "8da4w", "prge-fp32": "fp32"}
MLX = ("mlx-4bit", "mlx-bf16", "mlx-fp32")
BLAS, EXECUTORCH = "mlx-fp32-blas", "executorch"
METHODS = (*OURS, *MLX, BLAS, "peft-bf16", "peft-fp32", EXECUTORCH)
# How often the limit of a step a first step may take, and making ExecuTorch's program.
_FIRST, _EXPORT = 3, 5
_PACKAGES = ("mlx[cpu]", "mlx-lm")


class LackingError(Exception):
    """Why a method can't be had here."""


def bench(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """All methods on one trial."""
    trial = TRIALS[model]
    sizes = {"batch": trial.batch, "tokens": trial.tokens, "rank": trial.rank, "layers": trial.layers}
    words = CONFIGURATIONS[trial.shape]["vocab_size"]
    told = json.dumps({**sizes, "threads": arguments.threads, "vocabulary": words})
    (folder / "trial.json").write_text(told, encoding="utf-8")
    found: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        steps: dict[str, Server] = {}
        for method in arguments.methods:
            try:
                command, variables = command_of(method, folder, trial, arguments)
                steps[method] = stack.enter_context(answering(command, variables))
                # The first step compiles what MLX fuses.
                for most in (_FIRST * arguments.limit, arguments.limit):
                    steps[method].answer(most)
            except (LackingError, TimeoutError, ChildProcessError, BrokenPipeError) as error:
                if method in steps:
                    steps.pop(method).process.kill()
                long = f"a step takes longer than {arguments.limit} s, or the first one {_FIRST} times that"
                found[method] = {"reason": long if isinstance(error, TimeoutError) else str(error)}
                print(f"{method}: {found[method]['reason']}", file=sys.stderr)
        turns: dict[str, Callable[[], tuple[float, float]]] = {**steps}
        rounds = in_turns(turns, arguments.repeats)
        seconds = [{name: each[0] for name, each in taken.items()} for taken in rounds]
        for name, step in steps.items():
            found[name] = {"seconds": median(seconds, name), **asdict(step.memory())}
            found[name]["losses"] = [taken[name][1] for taken in rounds]
    return {"trial": asdict(trial), "methods": found, **ratios(seconds, found)}


def command_of(
    method: str, folder: Path, trial: Trial, arguments: argparse.Namespace
) -> tuple[Sequence[object], Mapping[str, str]]:
    """What starts a method's process, and the variables that it needs; raises LackingError."""
    threads = str(arguments.threads)
    variables = {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": threads}
    if method.startswith("mlx"):
        if method == BLAS:
            if arguments.blas is None:
                raise LackingError("no --blas names an OpenBLAS; Debian: apt install libopenblas0-pthread")
            beside = {"LD_PRELOAD": str(arguments.blas), "LD_LIBRARY_PATH": str(arguments.blas.parent)}
            variables |= {**beside, "OPENBLAS_NUM_THREADS": threads}
        return [mlx_python(), STEPS, method.removesuffix("-blas"), folder], variables
    own = [sys.executable, STEPS, method, folder]
    if method in OURS:
        flags = ["--quantize", OURS[method], "--rank", trial.rank, "--adapter", "lora"]
        flags += ["--roles", "forward", "backward"]
        layers = [trial.layers] if isinstance(trial.layers, str) else trial.layers
        export(
            folder / "model", folder / method.removeprefix("prge-"), *flags, "--target-modules", *layers,
            "--sequence-length", trial.tokens,
        )  # fmt: skip
        variables["OMP_NUM_THREADS"] = "1"
    elif method == EXECUTORCH:
        done = _run([*own[:2], "executorch-export", folder], _EXPORT * arguments.limit)
        if done.returncode:
            raise LackingError(f"its program can't be made: {_last(done.stderr)}")
    return own, variables


def mlx_python() -> Path:
    """Python of an environment that has mlx-lm, made in prge's cache; raises LackingError."""
    place = cache_path("mlx")
    python = place / "bin" / "python"
    if not python.is_file():
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for command in (
            [sys.executable, "-m", "venv", place],
            [python, "-m", "pip", "install", "--quiet", *_PACKAGES],
        ):
            done = _run(command)
            if done.returncode:
                raise LackingError(f"mlx can't be installed: {_last(done.stderr)}")
    done = _run([python, "-c", "import mlx.core, mlx_lm"])
    if done.returncode:
        raise LackingError(f"mlx in {place} can't be imported: {_last(done.stderr)}")
    return python


def ratios(
    seconds: Sequence[Mapping[str, float]], found: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Ours over theirs, by trainer and figure: time, anonymous memory and peak."""
    measured = [name for name, figures in found.items() if "seconds" in figures]
    figures: dict[str, dict[str, dict[str, float]]] = {
        f"prge_over_{trainer}_{figure}": {our.removeprefix("prge-"): {} for our in measured if our in OURS}
        for trainer in ("mlx", "peft", EXECUTORCH)
        for figure in ("seconds", "memory", "peak")
    }
    for our, their in itertools.product(measured, measured):
        if our not in OURS or their in OURS:
            continue
        trainer, _, weights = their.partition("-")
        both = found[our], found[their]
        anonymous, peak = (both[0][name] / both[1][name] for name in ("anonymous_mb", "peak_rss_mb"))
        told = {"seconds": median(seconds, our, over=their), "memory": anonymous, "peak": peak}
        for figure, value in told.items():
            by_ours = figures[f"prge_over_{trainer}_{figure}"][our.removeprefix("prge-")]
            by_ours[weights or "fp32"] = value
    return figures


def _run(command: Sequence[object], most: float | None = None) -> subprocess.CompletedProcess[str]:
    """A command that has ended; raises LackingError if it takes more than so many seconds."""
    words = [*map(str, command)]
    out, errors = subprocess.DEVNULL, subprocess.PIPE
    try:
        return subprocess.run(words, stdout=out, stderr=errors, text=True, check=False, timeout=most)
    except subprocess.TimeoutExpired:
        raise LackingError(f"its program isn't made within {most:.0f} seconds") from None


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1]


def main() -> None:
    """Read the flags, measure, print JSON."""
    parser = parser_of(__doc__, threads=2, repeats=5, limit=120)
    steps = [name for name, trial in TRIALS.items() if not trial.written]
    parser.add_argument("--models", nargs="+", choices=steps, default=["smollm2-135m"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--blas", type=Path, help="libopenblas.so.0, for mlx-fp32-blas")
    report_models(parser.parse_args(), bench)


if __name__ == "__main__":
    main()
