"""Compare training steps of prge and other trainers on one machine: seconds and memory of the same step.

    python scripts/bench/peers.py --json peers.json [--models smollm2-135m qwen2.5-0.5b] [--blas LIBRARY]
    python scripts/bench/peers.py --peer qvac --threads 1 --repeats 24 --json qvac.json [--texts FILE]

A model is a trial of prge/training/trials.py, as `prge android bench` runs it on a phone: its shape with
random weights, batch, tokens, rank and layers. `smollm2` is SmolLM2-135M-Instruct (scripts/smollm2.py) with
1 row of 256 tokens of --texts, by default the demo's notes; each of 8 rows in turns. --shape, such as 4x64,
is another batch. All methods train both matrices of LoRA, with the same alpha and learning rate, on the same
rows. They take steps in turns, each in a process of its own; ratios are medians over rounds. --peer
selects the methods of one trainer with those of prge and PEFT. The methods are

    prge-int4, prge-fp32           exact steps of a bundle with default memory
    mlx-4bit, mlx-bf16, mlx-fp32   mlx-lm's LoRA on MLX's CPU backend, in an environment of its own in prge's
                                   cache; mlx-4bit has float32 activations, which are faster; with --blas
                                   also mlx-fp32-blas, which uses that library (OpenBLAS) instead of the
                                   reference BLAS of MLX's wheel
    peft-bf16, peft-fp32           PyTorch with PEFT and AdamW
    executorch                     ExecuTorch's training module: the joint program in float32 on XNNPACK, SGD
    qvac-f32, qvac-q8_0, qvac-q4_0 QVAC Fabric's LoRA trainer, a fork of llama.cpp; its prebuilt library is
                                   downloaded to prge's cache (qvac.py). It needs a GGUF file: only `smollm2`
                                   has one. It has no batches: qvac_steps.py joins the rows of a step

Prints JSON by model: `methods` with seconds, tokens_per_second, anonymous_mb, peak_rss_mb, the `losses` of
all steps, and their means over the first and the last pass through the rows; or the reason why there are
none, such as a step that takes longer than --limit; and `prge_over_mlx_seconds`, `prge_over_mlx_memory`
(anonymous), `prge_over_mlx_peak` and the same for peft, executorch and qvac, by prge's weights and then the
other's. QVAC's threads wait for one another in loops: on a busy machine, only one thread is comparable.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import qvac
from processes import LackingError, Server, run_command, start_process
from qvac_steps import ROW_TOKENS
from reports import make_parser, measure_in_turns, median, parse_shape, report_models
from timing import export, random_model

from prge.system.user_cache import cache_path
from prge.training.trials import TRIALS, Trial
from server_export.checkpoint.random_models import CONFIGURATIONS

STEPS = Path(__file__).with_name("peer_steps.py")
QVAC_STEPS = Path(__file__).with_name("qvac_steps.py")
SMOLLM2 = Path(__file__).parents[1] / "smollm2.py"
PRGE_BUNDLES = {"prge-int4": "8da4w", "prge-fp32": "fp32"}
MLX = ("mlx-4bit", "mlx-bf16", "mlx-fp32")
BLAS, EXECUTORCH = "mlx-fp32-blas", "executorch"
PEFT = ("peft-bf16", "peft-fp32")
QVAC = ("qvac-f32", "qvac-q8_0", "qvac-q4_0")
METHODS = (*PRGE_BUNDLES, *MLX, BLAS, *PEFT, EXECUTORCH, *QVAC)
PEERS = ("mlx", "peft", EXECUTORCH, "qvac")
# Models of GGUF files, and their trials.
PRETRAINED = {"smollm2": Trial("smollm2-135m", 1, ROW_TOKENS)}
TEXTS = Path(__file__).parents[1] / "notes_data" / "train.jsonl"
# LoRA alpha, as in `prge export`, and batches of a text.
_ALPHA, _BATCHES = 16, 8
_MODEL, _GGUF, _ROWS = "model", "model.gguf", "rows.json"
# Multiples of a step's limit that a first step and the export of ExecuTorch's program may take.
_FIRST, _EXPORT = 3, 5
_PACKAGES = ("mlx[cpu]", "mlx-lm")


def bench(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Measure all methods on one trial."""
    trial = {**TRIALS, **PRETRAINED}[model]
    if arguments.shape:
        trial = replace(trial, **dict(zip(("batch", "tokens"), arguments.shape, strict=True)))
    sizes = {"batch": trial.batch, "tokens": trial.tokens, "rank": trial.rank, "layers": trial.layers}
    trial_json = json.dumps({**sizes, "threads": arguments.threads, "alpha": _ALPHA})
    (folder / "trial.json").write_text(trial_json, encoding="utf-8")
    batches = make_batches(trial, folder, arguments.texts)
    (folder / _ROWS).write_text(json.dumps(batches), encoding="utf-8")
    figures_by_method: dict[str, dict[str, Any]] = {}
    losses: dict[str, list[float]] = {}
    with ExitStack() as stack:
        steps: dict[str, Server] = {}

        def step(method: str, limit: float | None = None) -> float:
            seconds, loss = steps[method].take_step(limit)
            losses.setdefault(method, []).append(loss)
            return seconds

        for method in arguments.methods:
            try:
                command, variables = command_of(method, folder, trial, arguments)
                steps[method] = stack.enter_context(start_process(command, variables))
                # MLX compiles in the first step.
                for limit in (_FIRST * arguments.limit, arguments.limit):
                    step(method, limit)
            except (LackingError, TimeoutError, ChildProcessError, BrokenPipeError) as error:
                if method in steps:
                    steps.pop(method).process.kill()
                long = f"a step takes longer than {arguments.limit} s, or the first one {_FIRST} times that"
                figures_by_method[method] = {
                    "reason": long if isinstance(error, TimeoutError) else str(error)
                }
                print(f"{method}: {figures_by_method[method]['reason']}", file=sys.stderr)
        timed_steps = {method: partial(step, method) for method in steps}
        seconds = measure_in_turns(timed_steps, arguments.repeats)
        for method, server in steps.items():
            figures_by_method[method] = {
                "seconds": median(seconds, method),
                "tokens_per_second": trial.batch * trial.tokens / median(seconds, method),
                **asdict(server.memory()),
                "first_loss": statistics.fmean(losses[method][: len(batches)]),
                "last_loss": statistics.fmean(losses[method][-len(batches) :]),
                "losses": losses[method],
            }
    return {"trial": asdict(trial), "methods": figures_by_method, **ratios(seconds, figures_by_method)}


@contextmanager
def open_model(name: str, layers: int | None = None) -> Iterator[Path]:
    """Yield a temporary folder with `model`: a random one, or a pretrained one with its GGUF file."""
    if name not in PRETRAINED:
        with random_model(name, layers) as folder:
            yield folder
        return
    from server_export.checkpoint.loading import load_model
    from server_export.checkpoint.tokenization import load_tokenizer

    if layers is not None:
        raise SystemExit("error: --layers is for random weights")
    printed = subprocess.run([sys.executable, SMOLLM2], stdout=subprocess.PIPE, text=True, check=False)
    if printed.returncode:
        raise SystemExit(printed.returncode)
    path = Path(printed.stdout.strip())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.symlink(path, folder / _GGUF)
        model: Any = load_model(str(path)).model
        for part in (model, load_tokenizer(str(path))):
            part.save_pretrained(folder / _MODEL)
        yield folder


def make_batches(trial: Trial, folder: Path, texts: Path) -> list[list[list[int]]]:
    """Return rows of tokens for some steps, each with the token after it: of texts, or a random batch."""
    if (folder / _GGUF).exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / _MODEL / "tokenizer.json"))
        token_ids = tokenizer.encode(read_text(texts), add_special_tokens=False).ids
        batches = _BATCHES
    else:
        vocabulary_size = CONFIGURATIONS[trial.shape]["vocab_size"]
        count = trial.batch * trial.tokens + 1
        token_ids = np.random.default_rng(0).integers(0, vocabulary_size, count).tolist()
        batches = 1
    return cut_batches(token_ids, batches, trial.batch, trial.tokens)


def read_text(path: Path) -> str:
    """Return a file's text; of a .jsonl file of messages, their contents by line."""
    if path.suffix != ".jsonl":
        return path.read_text(encoding="utf-8")
    messages = [each["messages"] for each in map(json.loads, path.read_text(encoding="utf-8").splitlines())]
    return "\n".join(message["content"] for each in messages for message in each)


def cut_batches(token_ids: Sequence[int], batches: int, rows: int, tokens: int) -> list[list[list[int]]]:
    """Return successive rows of `tokens` tokens, each with the token after it, by batch.

    Raises:
        SystemExit: there are too few tokens.
    """
    needed = batches * rows * tokens + 1
    if len(token_ids) < needed:
        raise SystemExit(f"error: the texts have {len(token_ids)} tokens; {needed} are needed")
    starts = [row * tokens for row in range(batches * rows)]
    all_rows = [[*token_ids[start : start + tokens + 1]] for start in starts]
    return [all_rows[first : first + rows] for first in range(0, len(all_rows), rows)]


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
    if method in QVAC:
        return qvac_command(method, folder, trial), variables
    command = [sys.executable, STEPS, method, folder]
    if method in PRGE_BUNDLES:
        flags = ["--quantize", PRGE_BUNDLES[method], "--rank", trial.rank, "--lora-alpha", _ALPHA]
        flags += ["--adapter", "lora", "--roles", "forward", "backward"]
        layers = [trial.layers] if isinstance(trial.layers, str) else trial.layers
        source = folder / _GGUF if (folder / _GGUF).exists() else folder / _MODEL
        export(
            source, folder / method.removeprefix("prge-"), *flags, "--target-modules", *layers,
            "--sequence-length", trial.tokens,
        )  # fmt: skip
        variables["OMP_NUM_THREADS"] = "1"
    elif method == EXECUTORCH:
        try:
            run_command([*command[:2], "executorch-export", folder], _EXPORT * arguments.limit)
        except LackingError as error:
            raise LackingError(f"its program can't be made: {_last_line(error)}") from None
    return command, variables


def qvac_command(method: str, folder: Path, trial: Trial) -> Sequence[object]:
    """Return the command of QVAC Fabric's steps and write its model; raises LackingError."""
    if not (folder / _GGUF).exists():
        raise LackingError("qvac needs a GGUF file: select --models smollm2")
    if trial.batch * trial.tokens % ROW_TOKENS:
        raise LackingError(f"qvac needs a multiple of {ROW_TOKENS} tokens in a step")
    library = qvac.library_path()
    converted = folder / f"{method}.gguf"
    qvac.convert(folder / _GGUF, converted, method.removeprefix("qvac-"))
    return [sys.executable, QVAC_STEPS, library, converted, folder]


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
            try:
                run_command(command)
            except LackingError as error:
                raise LackingError(f"mlx can't be installed: {_last_line(error)}") from None
    try:
        run_command([python, "-c", "import mlx.core, mlx_lm"])
    except LackingError as error:
        raise LackingError(f"mlx in {environment} can't be imported: {_last_line(error)}") from None
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
        for trainer in PEERS
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


def _last_line(error: LackingError) -> str:
    return str(error).splitlines()[-1]


def methods_of(peer: str) -> list[str]:
    """Return the methods of prge, PEFT and one other trainer."""
    return [each for each in METHODS if each.partition("-")[0] in ("prge", "peft", peer)]


def main() -> None:
    """Parse the flags, measure and print JSON."""
    parser = make_parser(__doc__, threads=2, repeats=5, limit=120)
    steps = [name for name, trial in TRIALS.items() if not trial.written]
    parser.add_argument(
        "--models",
        nargs="+",
        choices=[*steps, *PRETRAINED],
        help="default: smollm2-135m, or smollm2 for qvac",
    )
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    selection.add_argument("--peer", choices=PEERS, help="compare prge and PEFT with this trainer")
    parser.add_argument("--shape", type=parse_shape, help="rows and tokens of a step, such as 4x64")
    parser.add_argument("--texts", type=Path, default=TEXTS, help="text to train a pretrained model on")
    parser.add_argument("--blas", type=Path, help="libopenblas.so.0, for mlx-fp32-blas")
    arguments = parser.parse_args()
    if arguments.peer:
        arguments.methods = methods_of(arguments.peer)
    arguments.models = arguments.models or ["smollm2" if arguments.peer == "qvac" else "smollm2-135m"]
    report_models(arguments, bench, open_model)


if __name__ == "__main__":
    main()
