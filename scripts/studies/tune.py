"""How far `prge tune` with its defaults is from the best learning rate of a full grid.

    python scripts/studies/tune.py --model BABYLLAMA --data wikitext.json --out results

Tasks: the demo's (candidates), prompts with completions in a manner (style.py), and texts (wikitext.py); the
first has its own model, the others take MODEL. For each task and seed `prge tune` is told the model and the
rows alone. Then the same run, by its own settings, is made with every rate of the grid; the best on
development rows is scored on the test rows, which all read once for a seed. Prints JSON: losses of the test
rows `before`, by `prge tune` (`tuned`) and by the `grid`; `regret`, the second less the third; the rates; and
`times`, how many times as long as its final run `prge tune` took.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

import style
import wikitext
from verbs import prge, summarize

DEMO = Path(__file__).resolve().parents[2] / "server_export" / "demo_data"
GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
FIGURES = ("before", "tuned", "grid", "regret", "times")


def main() -> None:
    """Read the flags, run every task and seed, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or hub id of a small story model")
    parser.add_argument("--data", type=Path, help="JSON list of passages; without it there are no texts")
    parser.add_argument("--out", type=Path, required=True, help="folder for rows and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2025])
    parser.add_argument("--tasks", nargs="+", help="of all")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = {
        name: study(arguments, name, words)
        for name, words in tasks(arguments).items()
        if arguments.tasks is None or name in arguments.tasks
    }
    print(json.dumps(results, indent=2))


def tasks(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What `prge tune` is told of each task."""
    files = {name: DEMO / f"{name}.jsonl" for name in ("train", "dev", "test")}
    found = {"candidates": told(DEMO / "model", files) | {"task": DEMO / "task.yaml"}}
    rows = style.make_rows()
    files = {name: style.write(arguments.out / f"style-{name}.jsonl", rows[name]) for name in rows}
    found["completions"] = told(arguments.model, files)
    if arguments.data is not None:
        found["texts"] = told(arguments.model, wikitext.split(arguments.data, arguments.out))
    return found


def told(model: object, files: dict[str, Path]) -> dict[str, Any]:
    """The flags of a task without settings."""
    return {"model": model, "data": files["train"], "dev": files["dev"], "test": files["test"]}


def study(arguments: argparse.Namespace, name: str, words: dict[str, Any]) -> dict[str, Any]:
    """`prge tune` and the grid, with every seed."""
    return summarize([compare(arguments, name, words, seed) for seed in arguments.seeds], FIGURES)


def compare(arguments: argparse.Namespace, name: str, words: dict[str, Any], seed: int) -> dict[str, Any]:
    """Losses of the test rows by both, and what they took."""
    out = arguments.out / f"{name}-{seed}"
    tuned, result = out / "tuned", out / "tuned.json"
    if not result.exists():
        prge("tune", **words, out=tuned, seed=seed, threads=arguments.threads, json=result)
    found = json.loads(result.read_text(encoding="utf-8"))
    begin = time.perf_counter()
    losses = {rate: development_loss(tuned, out / f"{rate:g}", rate) for rate in GRID}
    seconds = time.perf_counter() - begin
    best = min(losses, key=losses.__getitem__)
    scored = out / "grid.json"
    test = {"bundle": tuned / "bundle", "data": tuned / "rows" / "test.jsonl", "json": scored}
    prge("eval", adapter=out / f"{best:g}", task=words.get("task"), **test)
    loss = json.loads(scored.read_text(encoding="utf-8"))["loss"]
    final = json.loads((tuned / "run" / "run.json").read_text(encoding="utf-8"))["train"]["seconds"]
    return {
        "seed": seed,
        "before": found["score_before"]["loss"],
        "tuned": found["score_after"]["loss"],
        "grid": loss,
        "regret": found["score_after"]["loss"] - loss,
        "rate": found["chosen"]["learning_rate"]["value"],
        "best_rate": best,
        "times": found["seconds"] / final,
        "grid_seconds": seconds,
    }


def development_loss(tuned: Path, run: Path, rate: float) -> float:
    """Loss of development rows at the best step of the run with another rate; infinite if it diverged."""
    if not (run / "final").exists():
        try:
            config = tuned / "run" / "config.yaml"
            prge("run", config=config, out=run, learning_rate=rate)
        except subprocess.CalledProcessError:  # it diverged
            return math.inf
    found = json.loads((run / "run.json").read_text(encoding="utf-8"))
    return float(found["train"]["best"]["loss"])


if __name__ == "__main__":
    main()
