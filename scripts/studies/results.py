"""Compare training methods on a pretrained language model by MeZO's protocol, and write docs/results.md.

    python scripts/studies/results.py --data DATA --json docs/results.json --page docs/results.md

DATA has a folder for each data set: sst2 with train.tsv and dev.tsv; rte, wic, wsc, copa and multirc with
SuperGLUE's train.jsonl and val.jsonl; wikitext with wikitext_1000.json, a list of texts. The study's parts:

    speed    scripts/bench/step.py: perturbations in parallel and one after the other, by batch and length
    memory   `prge compare` for a few steps, with methods that train all weights
    compare  `prge compare` for each task, frozen weights and adapted layers: all methods get the same rows,
             forward passes (a backward pass counts as two) and number of learning rates to try
    answers  `prge generate` with the adapters of the task `style`, whose answers are scored by rule

Then everything that exists is reported; `--parts` without a name only reports. What is finished is kept: the
same command continues the study, and parts can be selected. All comparisons get their first seed before one
gets its second. Runs that --json has and --out lacks stay in it, so that several machines can share a study:
give each its own tasks, methods or seeds. `--passes`, `--trials` and `--threads` are fixed once a comparison
has begun.

One core needs about 1 ms a token and pass. With 8,000 passes (250 steps of P-RGE with 4 queries, 166 of
backpropagation), given rates and one seed, a method of the engine needs 4 minutes on COPA and 5 on SST-2,
more than half of it for development rows; backpropagation in PyTorch twice as long. `--trials
3` also searches for the rates, around the given ones. The speed part needs half an hour, the memory part and
the answers less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from result_page import METHODS, write_page
from result_rows import STYLE, TASKS, TEXTS, write_task
from style import BEFORE, make_rows, shares
from verbs import answers, make_parser, smollm2, spread

from prge.cli.subprocesses import exit_code_of, read_json, write_verb_config
from prge.system.atomic import write_file
from server_export.evidence.compare.outcome import judge, to_json

SEEDS = (42, 1337, 2025)
BASES = {"int4": "8da4w", "fp32": "fp32"}
LAYERS = {"query-value": ["q_proj", "v_proj"], "all-linear": ["all-linear"]}
COMPARED = tuple(name for name in METHODS if name not in ("backprop-full", "mezo"))
# All linear layers are adapted for these alone, with int4 weights.
LAYER_TASKS, LAYER_METHODS = ("sst2", STYLE), ("p-rge", "exact", "backprop-lora-fa", "backprop-lora")
MEMORY_TASKS = ("sst2", "rte")
FIXED: dict[str, Any] = {"rank": 8, "batch_size": 16, "sequence_length": 768}
# Learning rates, chosen on the development rows of SST-2 with int4 weights.
RATES = {
    **dict.fromkeys(("p-rge-q1", "p-rge", "p-rge-q16", "fzoo", "tangent"), 0.015),
    "exact": 0.00333,
    **dict.fromkeys(("backprop-lora-fa", "backprop-lora-fa-bf16", "backprop-lora"), 0.00333),
}
# Runs with different values of these are not of one comparison.
SHARED_SETTINGS = (
    *("budget", "budget_value", "search_trials", "optimizer", "lr_scheduler_type"),
    *("quantize", "target_modules", "rank", "lora_alpha", "batch_size", "sequence_length"),
)
# Settings of a comparison of memory: a few steps, and few rows to score.
SHORT = {"budget": "steps", "budget_value": 4, "evaluation_growth": 1e3, "dev_limit": 16, "test_limit": 16}
GROWTH = 2.2  # of passes from evaluation to evaluation
SHAPES = ((1, 64), (4, 64), (1, 256))
SCRIPTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Plan:
    """A comparison of methods: its task, frozen weights and adapted layers, and whether only of memory."""

    task: str
    base: str
    layers: str = "query-value"
    is_memory: bool = False

    @property
    def name(self) -> str:
        """The name of the comparison and of its folder."""
        return ("memory-" if self.is_memory else "") + f"{self.task}-{self.base}-{self.layers}"

    def folder(self, out: Path) -> Path:
        """Return the folder of the comparison in the folder of a study."""
        return out.resolve() / "comparisons" / self.name

    def result(self, out: Path) -> dict[str, Any]:
        """Return the stored result, empty if there is none."""
        path = self.folder(out) / "result.json"
        return read_json(path) if path.is_file() else {}

    def methods(self, chosen: Iterable[str]) -> list[str]:
        """Return those of the chosen methods that the comparison has."""
        if self.is_memory:
            return [*METHODS]
        return [name for name in chosen if self.layers != "all-linear" or name in LAYER_METHODS]


def make_plans(tasks: Iterable[str] = TASKS, bases: Iterable[str] = BASES) -> list[Plan]:
    """Return the comparisons of the given tasks and frozen weights, the first to run first."""
    plans = [Plan(task, base) for base in bases for task in tasks]
    plans += [Plan(task, "int4", "all-linear") for task in LAYER_TASKS if Plan(task, "int4") in plans]
    return [*(replace(plan, is_memory=True) for plan in plans if plan.task in MEMORY_TASKS), *plans]


def main() -> None:
    """Parse the flags, run the selected parts and report what exists."""
    parser = make_parser(__doc__, SEEDS, Path("results"))
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the data sets")
    parser.add_argument("--model", help="folder, GGUF file or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--passes", type=int, default=8_000, help="forward passes of a run")
    parser.add_argument("--trials", type=int, default=1, help="learning rates to try; 1: those of SST-2")
    parser.add_argument("--threads", type=int, default=1)
    for flag, choices in {"tasks": [*TASKS], "bases": [*BASES], "methods": [*COMPARED]}.items():
        parser.add_argument(f"--{flag}", nargs="+", choices=choices, default=choices)
    parts = ["speed", "memory", "compare", "answers"]
    parser.add_argument("--parts", nargs="*", choices=parts, default=parts, help="none: only report")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    parser.add_argument("--page", type=Path, help="page to write the results into, between two marks")
    arguments = parser.parse_args()
    unfinished = {*run_parts(arguments, make_plans(arguments.tasks, arguments.bases))}
    results = collect(arguments.out, arguments.json)
    if arguments.json:
        write_file(arguments.json, (json.dumps(results, indent=1) + "\n").encode())
    if arguments.page:
        write_page(results, arguments.page)
    if unfinished:
        raise SystemExit(f"not finished: {', '.join(sorted(unfinished))}; see the messages above")


def run_parts(arguments: argparse.Namespace, plans: Sequence[Plan]) -> Iterator[str]:
    """Run the selected parts and yield the names of comparisons that could not be finished."""
    if "speed" in arguments.parts:
        measure_speed(arguments.out / "speed", arguments.threads)
    chosen = [plan for plan in plans if ("memory" if plan.is_memory else "compare") in arguments.parts]
    for count in range(1, len(arguments.seeds) + 1):
        for plan in chosen:
            if not compare(arguments, plan, SEEDS[:1] if plan.is_memory else arguments.seeds[:count]):
                yield plan.name
    for plan in plans:
        if "answers" in arguments.parts and plan.task == STYLE:
            generate(plan.folder(arguments.out), plan.result(arguments.out), arguments.threads)


def is_complete(result: Mapping[str, Any], methods: Iterable[str], seeds: Iterable[int]) -> bool:
    """Return whether a stored result has runs of all methods and seeds; a method that failed needs none."""
    stored, wanted = result.get("methods", {}), {*seeds}
    return all(
        name in stored
        and (stored[name]["failures"] or wanted <= {run["seed"] for run in stored[name]["runs"]})
        for name in methods
    )


def compare(arguments: argparse.Namespace, plan: Plan, seeds: Sequence[int]) -> bool:
    """Run what a comparison lacks, and return whether it is complete."""
    methods, result = plan.methods(arguments.methods), plan.result(arguments.out)
    if is_complete(result, methods, seeds):
        return True
    # Methods and seeds of earlier calls stay in the result.
    every_method = [*dict.fromkeys([*result.get("methods", {}), *methods])]
    every_seed = [*dict.fromkeys([*result.get("settings", {}).get("seeds", []), *seeds])]
    settings = {**settings_of(arguments, plan), "methods": every_method, "seeds": every_seed}
    print(f"{plan.name}: {' '.join(methods)}, seeds {' '.join(map(str, seeds))}", file=sys.stderr, flush=True)
    file = plan.folder(arguments.out).with_suffix(".yaml")
    exit_code_of(*write_verb_config("compare", settings, file), stdout=sys.stderr)
    return is_complete(plan.result(arguments.out), methods, seeds)


def settings_of(arguments: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Return the settings of `prge compare` for a comparison, without methods and seeds."""
    rows = write_task(plan.task, arguments.data, arguments.out.resolve() / "rows" / plan.task)
    settings: dict[str, Any] = {
        **FIXED,
        **{"out": plan.folder(arguments.out), "model": arguments.model or smollm2()},
        **{"data": str(rows), "task": None if plan.task in (STYLE, TEXTS) else plan.task},
        **{"quantize": BASES[plan.base], "target_modules": LAYERS[plan.layers], "threads": arguments.threads},
    }
    if plan.is_memory:
        return {**settings, **SHORT, "search_trials": 1}
    budget = {"budget_value": arguments.passes * TASKS[plan.task].passes, "evaluation_growth": GROWTH}
    return {**settings, **budget, "search_trials": arguments.trials, "learning_rates": RATES}


def measure_speed(folder: Path, threads: int) -> None:
    """Measure steps with perturbations in parallel and one after the other, for shapes not measured yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for batch, length in SHAPES:
        path, partial = folder / f"{batch}x{length}.json", folder / "partial"
        if not path.is_file():
            flags = f"--batch-size {batch} --seq-len {length} --threads {threads} --repeats 5 --json".split()
            subprocess.run(
                [sys.executable, SCRIPTS / "bench" / "step.py", *flags, partial],
                check=True,
                stdout=sys.stderr,
            )
            partial.rename(path)


def generate(folder: Path, result: Mapping[str, Any], threads: int) -> None:
    """Score the answers to test prompts by the model of a comparison with the adapters of its engine runs."""
    methods = {name: each for name, each in result.get("methods", {}).items() if each["family"] == "engine"}
    names = [f"{name}-{run['seed']}" for name, each in methods.items() for run in each["runs"]]
    path, rows = folder / "answers.json", make_rows()["test"]
    if names and not (path.is_file() and read_json(path).keys() == {BEFORE, *names}):
        adapters = [BEFORE, *(f"{name}={folder / 'runs' / name / 'run'}" for name in names)]
        data = folder / "data" / "test.jsonl"
        texts = answers(bundle=folder / "bundle", adapter=adapters, data=data, threads=threads)
        scores = {name: shares([each["text"] for each in texts[name]], rows) for name in (BEFORE, *names)}
        write_file(path, json.dumps(scores).encode())


def collect(out: Path, earlier: Path | None = None) -> dict[str, Any]:
    """Return all figures of a study's folder, and those of runs in an earlier file that the folder lacks."""
    figures = read_json(earlier) if earlier and earlier.is_file() else {"comparisons": {}, "speed": {}}
    comparisons = {}
    for plan in make_plans():
        before, new = figures["comparisons"].get(plan.name, {}), plan.result(out)
        answers = plan.folder(out) / "answers.json"
        scores = {**before.get("scores", {}), **(read_json(answers) if answers.is_file() else {})}
        if result := join_runs(plan.name, before.get("result", {}), new):
            comparison = summarize(plan, result, scores)
            comparisons[plan.name] = {**comparison, "scores": scores, "result": without_paths(result)}
    files = {f"{batch}x{length}": out / "speed" / f"{batch}x{length}.json" for batch, length in SHAPES}
    schemes = {shape: read_json(path)["schemes"] for shape, path in files.items() if path.is_file()}
    speed = {shape: {base: each[BASES[base]] for base in BASES} for shape, each in schemes.items()}
    speed = {**figures["speed"], **speed}
    return {"comparisons": comparisons, "speed": speed, "not_run": [*not_run(comparisons)]}


def without_paths(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a comparison without folders and the command of the machine."""
    names = {name: Path(result["settings"][name] or "").name for name in ("out", "model", "data")}
    return {**result, "command": "", "settings": {**result["settings"], **names}}


def join_runs(name: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the runs of two results of the same comparison.

    If both have a run, or have a method with different learning rates, the second result counts.
    """
    if not (first and second):
        return {**(first or second)}
    for setting in SHARED_SETTINGS:
        values = [each["settings"].get(setting) for each in (first, second)]
        if values[0] != values[1]:
            raise SystemExit(
                f"{name}: {setting} is {values[1]} in --out and {values[0]} in --json: choose another --json"
            )
    methods = {**first["methods"], **second["methods"]}
    for method in first["methods"].keys() & second["methods"].keys():
        both = [each["methods"][method] for each in (first, second)]
        if both[0]["learning_rate"] == both[1]["learning_rate"]:
            runs = {run["seed"]: run for each in both for run in each["runs"]}
            methods[method] = {**both[1], "runs": [runs[seed] for seed in sorted(runs)]}
    return {**second, "methods": methods}


def not_run(comparisons: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each comparison of the whole study that lacks seeds, and one for those without any."""
    without_any = []
    for plan in (plan for plan in make_plans() if not plan.is_memory):
        present = comparisons.get(plan.name, {}).get("methods", {})
        missing: dict[int, list[str]] = {}
        for name in plan.methods(COMPARED):
            count = len(SEEDS) - len(present.get(name, {"seeds": ()})["seeds"])
            missing.setdefault(count, []).append(METHODS[name])
        title = f"{TASKS[plan.task].title}, {plan.base}, {plan.layers}"
        if missing.keys() == {len(SEEDS)}:
            without_any.append(title)
        elif texts := [f"{n} of {len(SEEDS)} for {'; '.join(missing[n])}" for n in sorted(missing) if n]:
            yield f"{title}. Missing seeds: {'. '.join(texts)}."
    if without_any:
        yield f"No method has a seed: {'; '.join(without_any)}."


def summarize(
    plan: Plan, result: Mapping[str, Any], scores: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Return the figures of a comparison by method: means and ranges, and curves as far as all runs go.

    Args:
        plan: the comparison.
        result: its result, which has runs by method.
        scores: scores of the answers by run, such as `p-rge-42`.
    """
    figures = to_json(result, judge(result))
    for name, method in figures["methods"].items():
        runs = result["methods"][name]["runs"]
        method["seeds"] = [run["seed"] for run in runs]
        method["curve"] = [
            {axis: statistics.mean(point[axis] for point in points) for axis in ("forward_passes", "seconds")}
            | {name: spread(point.get(name) for point in points) for name in ("loss", "accuracy")}
            for points in zip(*(run["curve"] for run in runs), strict=False)
        ]
        method["step_seconds"] = spread(run["curve"][-1]["seconds"] / run["steps"] for run in runs)
        method["perplexity"] = spread(run["test"].get("perplexity") for run in runs)
    settings = {name: result["settings"][name] for name in ("budget_value", "search_trials", "threads")}
    comparison = {**vars(plan), **figures, **settings, "rows": result["row_counts"], "answers": {}}
    by_method: dict[str, list[Mapping[str, float]]] = {}
    for adapter, each in scores.items():
        by_method.setdefault(adapter.rpartition("-")[0] or adapter, []).append(each)
    for name, seeds in by_method.items():
        comparison["answers"][name] = {key: spread(each[key] for each in seeds) for key in seeds[0]}
    return comparison


if __name__ == "__main__":
    main()
