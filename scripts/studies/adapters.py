"""What `prge tune` should adapt and start from: layers, rank, `lora_a`, what is trained, number of steps.

    python scripts/studies/adapters.py --story-model BABYLLAMA --encoder MINILM --texts wikitext.json \
        --sst2 SST2_FOLDER --out results --tasks completions texts --variants qv-8-eva-fa all-16-random-lora

A variant is layers, rank, start and what is trained; `-x3` behind it gives three times as many steps;
`default` is what `prge tune` does by itself. Each is a whole `prge tune`, with a search of the learning rate
of its own. Development rows choose the rate, the step and, by their loss, the variant. `--test` reads the
test rows, once for each tuning.

Prints JSON, by task and variant: losses (and accuracies) of development and test rows, steps and rates,
processor seconds of all of `prge tune`, seconds of its final run, memory.
"""

from __future__ import annotations

import argparse
import json
import resource
from typing import Any

from tune import TASKS, told, tune, with_data
from verbs import parser_of, report, scored, summarize, trained

from prge.verbs.starting import json_of

LAYERS = {"all": ["all-linear"], "qv": ["q_proj", "v_proj"], "qv of encoders": ["query", "value"]}
ADAPTERS = {"fa": "lora-fa", "lora": "lora"}


def main() -> None:
    """Read the flags, tune, print JSON."""
    parser = with_data(parser_of(__doc__, seeds=(42,)))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--variants", nargs="+", default=["qv-8-eva-fa"])
    parser.add_argument("--test", action="store_true", help="score test rows too")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    report({name: study(arguments, name) for name in arguments.tasks}, arguments.out)


def study(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """All variants with every seed."""
    words = told(arguments, name)
    tables = {}
    for variant in arguments.variants:
        runs = [tuned(arguments, words, name, variant, seed) for seed in arguments.seeds]
        tables[variant] = summarize(runs, [each for each in runs[0] if each != "seed"])
    return tables


def tuned(
    arguments: argparse.Namespace, words: dict[str, Any], name: str, variant: str, seed: int
) -> dict[str, Any]:
    """Figures of one tuning, which knows nothing of test rows."""
    out = arguments.out / name / f"{variant}-{seed}"
    out.parent.mkdir(parents=True, exist_ok=True)
    common = {"seed": seed, "threads": arguments.threads}
    known = {flag: value for flag, value in words.items() if flag != "test"}
    cost = out.with_name(f"{out.name}-seconds.json")
    chosen = flags_of(arguments, words, name, variant, seed)
    before = _processor_seconds()
    found = tune(out, **known, **common, **chosen)
    if not cost.exists():
        cost.write_text(json.dumps(_processor_seconds() - before), encoding="utf-8")
    figures = {"seed": seed, **_figures("dev", found["score_after"])}
    if arguments.test:
        rows = {"data": words["test"], "task": words.get("task"), "threads": arguments.threads}
        same = {"bundle": out / "bundle", **rows}
        scores = scored(out.with_name(f"{out.name}-test.json"), adapter=out / "run", **same)
        figures |= _figures("test", scores)
    return {
        **figures,
        "rate": found["chosen"]["learning_rate"]["value"],
        "steps": found["chosen"]["steps"]["value"],
        "best_step": found["final_step"],
        "seconds": json_of(cost),
        "final_seconds": trained(out / "run")["seconds"],
        "peak_mb": found["peak_mb"],
    }


def flags_of(
    arguments: argparse.Namespace, words: dict[str, Any], name: str, variant: str, seed: int
) -> dict[str, Any]:
    """A variant as flags of `prge tune`."""
    if variant == "default":
        return {}
    layers, rank, init, kind, *longer = variant.split("-")
    where = f"{layers} of encoders" if layers == "qv" and words["model"] == arguments.encoder else layers
    flags = {"target_modules": LAYERS[where], "rank": int(rank), "init": init, "adapter": ADAPTERS[kind]}
    if longer:
        usual = tuned(arguments, words, name, "-".join([layers, rank, init, kind]), seed)
        flags["steps"] = int(longer[0].removeprefix("x")) * usual["steps"]
    return flags


def _figures(rows: str, scores: dict[str, Any]) -> dict[str, Any]:
    return {f"{rows}_{name}": scores[name] for name in ("loss", "accuracy") if scores.get(name) is not None}


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
