"""Exact steps block by block against other ways to a gradient: seconds and memory of a step.

    python scripts/bench/exact.py --models smollm2-135m tinyllama-1.1b --json exact.json
    python scripts/bench/exact.py --monolith CHECKOUT --json exact.json

A model has random weights. All methods take steps on random rows in turns, each in a process of its own;
ratios are medians over rounds. They are

    blocks, least        exact steps of a bundle, with all weights loaded and with those of one block
    tangent, prge        the same bundle's tangents and differences, with `--queries`
    joint                exact steps of one program, by CHECKOUT: a working tree of a commit that makes these,
                         such as 6c5eaad
    pytorch-TYPE[-checkpointing]
                         PyTorch with PEFT: LoRA of the same rank on the same layers, AdamW
    limit                matrix products alone: forward, computed again, and back

Prints JSON by model: `blocks_over_METHOD`, `exact_over_limit`, `load_share` of a step that loads all weights,
`load_share_cold` with files that the system has forgotten, `recomputation_share`, the products of the second
forward pass in a step, and by method `seconds`, `anonymous_mb` and
`peak_rss_mb`. `blocks_over_pytorch` is against the faster type with checkpointing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chain import monolith
from processes import Server, forget, serving
from products import Call, Products, load_products
from reports import circumstances, parser_of, report
from timing import ROOT, export, least_memory, timed_step

from server_export.model.random_models import CONFIGURATIONS, save_random_model

ENGINE: dict[str, Any] = {
    "blocks": "exact",
    "least": "exact",
    "tangent": "tangent",
    "prge": "antithetic",
}
PYTORCH = [f"pytorch-{kind}{more}" for kind in ("fp32", "bf16") for more in ("", "-checkpointing")]
ADAPTED, RANK = ("q_proj", "v_proj"), 8


def engine_step(method: str, bundle: Path, arguments: argparse.Namespace) -> Callable[[], float]:
    """A step of a bundle; gives its loss."""
    step = timed_step(
        bundle,
        ENGINE[method],
        arguments.batch_size,
        arguments.seq_len,
        arguments.threads,
        arguments.queries,
        memory=least_memory(bundle) if method == "least" else None,
    )
    return lambda: step()[1].loss


def pytorch_step(method: str, model: Path, arguments: argparse.Namespace) -> Callable[[], float]:
    """A step of PyTorch and PEFT; gives its loss."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(arguments.threads)
    dtype = torch.bfloat16 if "bf16" in method else torch.float32
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    tuned = get_peft_model(base, LoraConfig(r=RANK, target_modules=[*ADAPTED]))
    tuned.train()
    if "checkpointing" in method:
        tuned.enable_input_require_grads()
        tuned.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(parameter for parameter in tuned.parameters() if parameter.requires_grad)
    torch.manual_seed(0)
    tokens = torch.randint(0, base.config.vocab_size, (arguments.batch_size, arguments.seq_len))

    def step() -> float:
        loss = tuned(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return step


def serve(method: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Take a step for every line of the standard input."""
    make = engine_step if method in ENGINE else pytorch_step
    step = make(method, folder / ("bundle" if method in ENGINE else "model"), arguments)
    for _ in sys.stdin:
        begin = time.perf_counter()
        loss = step()
        print(time.perf_counter() - begin, loss, flush=True)


def bench(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """All methods on one model."""
    save_random_model(folder / "model", model, arguments.layers)
    length = ["--sequence-length", str(arguments.seq_len), "--rank", str(RANK)]
    scheme = ["--quantize", arguments.quantize]
    export(folder / "model", folder / "bundle", *scheme, *length, "--target-modules", *ADAPTED)
    environment = {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        steps: dict[str, Server] = {}
        for method in arguments.methods:
            command = [sys.executable, __file__, *sys.argv[1:], "--serve", method, str(folder)]
            steps[method] = stack.enter_context(serving(command, environment, ROOT))
            steps[method]()
        if arguments.monolith is not None and model in arguments.joint_models:
            sizes = [arguments.batch_size, arguments.seq_len, arguments.threads]
            checkout = arguments.monolith.resolve()
            one = (checkout, folder / "model", folder / "one", arguments.quantize, "exact", sizes)
            steps["joint"] = stack.enter_context(monolith(*one))
            steps["joint"]()
        limit = Limit(model, arguments, folder)
        taken = rounds(steps, limit, arguments.repeats)
        figures = ratios(taken, [*steps])
        figures["methods"] = {
            name: {"seconds": statistics.median(t[name] for t in taken), **asdict(step.memory())}
            for name, step in steps.items()
        }
    if "least" in arguments.methods:
        command = [sys.executable, __file__, *sys.argv[1:], "--serve", "least", str(folder)]
        with serving(command, environment, ROOT) as step:
            cold = cold_seconds(step, folder / "cache", arguments.repeats)
        figures["load_share_cold"] = 1 - figures["methods"]["blocks"]["seconds"] / cold
    return {**figures, "limit_seconds": statistics.median(t["limit"] for t in taken)}


class Limit:
    """The matrix products of an exact step: those of its forward pass twice, and those of the way back."""

    def __init__(self, model: str, arguments: argparse.Namespace, folder: Path) -> None:
        def load(is_back: bool) -> Products:
            place = folder / f"limit-{is_back}"
            place.mkdir()
            call = Call(1, arguments.batch_size, arguments.seq_len, is_back=is_back)
            return load_products(model, arguments.layers, arguments.quantize, call, ADAPTED, RANK, place)

        self._forward, self._back = load(False), load(True)

    def __call__(self) -> dict[str, float]:
        """Seconds of all, and of the second forward pass among them."""
        first, again = self._forward(), self._forward()
        return {"limit": first + again + self._back(), "recomputation": again}


def rounds(steps: Mapping[str, Server], limit: Limit, repeats: int) -> list[dict[str, float]]:
    """Seconds by method, of rounds in which all take turns; every other round begins with the last one."""
    taken = []
    for number in range(repeats):
        found = {}
        for name in steps if number % 2 else reversed([*steps]):
            found[name] = steps[name]()[0]
        taken.append({**found, **limit()})
    return taken


def ratios(taken: list[dict[str, float]], methods: list[str]) -> dict[str, Any]:
    """Medians over rounds."""
    if "blocks" not in methods:
        return {}
    others = [name for name in methods if name != "blocks"]
    figures = {
        f"blocks_over_{name}": statistics.median(t["blocks"] / t[name] for t in taken)
        for name in (*others, "limit")
    }
    checkpointing = [name for name in others if name.endswith("-checkpointing")]
    if checkpointing:
        figures["blocks_over_pytorch"] = max(figures[f"blocks_over_{name}"] for name in checkpointing)
    if "least" in methods:
        figures["load_share"] = 1 - figures["blocks_over_least"]
    figures["recomputation_share"] = statistics.median(t["recomputation"] / t["blocks"] for t in taken)
    return {**figures, "exact_over_limit": figures.pop("blocks_over_limit")}


def cold_seconds(step: Server, cache: Path, repeats: int) -> float:
    """Of a step that finds no weights in memory; no other process may map them."""
    step()
    seconds = []
    for _ in range(repeats):
        forget(cache)
        seconds.append(step()[0])
    return statistics.median(seconds)


def main() -> None:
    """Read the flags, measure, print JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=CONFIGURATIONS, default=["smollm2-135m"])
    parser.add_argument("--methods", nargs="+", choices=[*ENGINE, *PYTORCH], default=[*ENGINE, *PYTORCH])
    parser.add_argument("--monolith", type=Path, help="checkout that makes one program of the whole model")
    parser.add_argument("--joint-models", nargs="+", choices=CONFIGURATIONS, default=[*CONFIGURATIONS])
    parser.add_argument("--quantize", default="8da4w")
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where models and bundles are made for a while")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve[0], Path(arguments.serve[1]), arguments)
        return
    figures = {}
    for model in arguments.models:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            figures[model] = bench(arguments, model, Path(folder))
        print(model, figures[model], file=sys.stderr)
    report({**figures, **circumstances(arguments)}, arguments.json)


if __name__ == "__main__":
    main()
