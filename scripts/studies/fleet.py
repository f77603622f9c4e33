"""Ways to train a fleet, held against each other: bytes, rounds, seconds, quality; and noise against quality.

    python scripts/studies/fleet.py --encoder MINILM --sst2 SST2 --out results [--tasks questions sst2]

MINILM is a model's folder or hub id, SST2 a folder with train.tsv, dev.tsv and test-labeled.tsv. The rows of
six classes are those of questions.py. 100 simulated devices hold 3,000 rows, dealt out by Dirichlet 0.3; a
round asks ten, which take 20 examples each. The server has 400 other rows of SST-2, 60 of the questions: on
them the classification head is fitted, which stays, and `lora_a` of the adapters, of rank 1.
Rates were chosen on development rows with seed 42, and the best step of each run too; test rows are read once
a run. With noise every device takes part in every round, with all of its rows.

Calls the verbs export, fleet simulate, run and replay as a user would and prints JSON; a run that is there is
not made again.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from questions import make_questions
from verbs import evaluations, made, parser_of, prge, report, scored, summarize, write_rows

from prge.learning.accounting import epsilon_of
from prge.rows.readers.files import read_rows
from prge.verbs.starting import json_of

DEVICES, ROWS, DELTA, HEAD = 100, 3000, 1e-5, {"questions": 60, "sst2": 400}
Settings = Mapping[str, Any]
ADAPTERS: Mapping[str, Settings] = {
    "questions": {"adapt_layers": "top:2"},
    # Few parameters that see much of the gradient: the first principal direction of one layer.
    "sst2": {"target_modules": r"encoder\.layer\.2\.attention\.self\.value"},
}
FLEET: Settings = {"devices": DEVICES, "schedule": "cosine"}
UNEVEN: Settings = {**FLEET, "partition": "dirichlet:0.3", "per_round": 10}
SCALARS: Settings = {**UNEVEN, "estimator": "tangent", "local_steps": 1, "examples": 20, "clip": 0.1}
CHANGES: Settings = {**UNEVEN, "estimator": "exact", "local_steps": 5, "examples": 4, "rounds": 20}
PRIVATE: Settings = {
    **{**FLEET, "per_round": DEVICES, "partition": "even", "rounds": 8, "local_steps": 1},
    **{"examples": ROWS // DEVICES, "clip": 0.1, "evaluate_every": 1},
}
ONE_PLACE: Settings = {
    **{"estimator": "exact", "steps": 200, "batch_size": 20, "evaluate_every": 20},
    **{"beta2": 0.98, "schedule": "cosine"},
}
# Settings, and the rates that are tried with the first seed, with noise at the largest epsilon.
ARMS: Mapping[str, tuple[Settings, Sequence[float]]] = {
    "scalars, q 4": ({**SCALARS, "queries": 4, "rounds": 80, "evaluate_every": 8}, (4e-2, 1e-2)),
    "scalars, q 16": ({**SCALARS, "queries": 16, "rounds": 40, "evaluate_every": 4}, (4e-2, 1e-2)),
    "FedAvg": ({**CHANGES, "evaluate_every": 2}, (1e-2, 3e-2)),
    "one place": (ONE_PLACE, (1e-2, 3e-2)),
    "private scalars": ({**PRIVATE, "queries": 16, "share_directions": True}, (1e-2, 4e-2)),
    "private changes": ({**PRIVATE, "estimator": "exact", "optimizer": "sgd"}, (10.0, 3.0)),
}
EPSILONS = (8.0, 4.0, 1.0)


def main() -> None:
    """Read the flags, make every run, print JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--encoder", required=True, help="folder or hub id")
    parser.add_argument("--sst2", type=Path, help="folder with the SST-2 files; needed by its task alone")
    parser.add_argument("--tasks", nargs="+", default=["questions", "sst2"], choices=sorted(HEAD))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    arguments = parser.parse_args()
    results = {}
    for name in arguments.tasks:
        study = Study(arguments.out / name, name, arguments.encoder, rows_of(arguments, name))
        results[name] = {arm: study.arm(arm, arguments.seeds) for arm in arguments.arms}
    report(results, arguments.out)


def rows_of(arguments: argparse.Namespace, name: str) -> dict[str, Path]:
    """Files of a task: those that the devices hold, the server's, and test rows."""
    folder, count = arguments.out / name, HEAD[name]
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[Any]]
    if name == "questions":
        rows = {**make_questions({"dev": 300, "test": 600, "train": ROWS + count})}
    else:
        train, dev, test = (
            [dict(row.fields) for row in read_rows(arguments.sst2 / f"{file}.tsv")]
            for file in ("train", "dev", "test-labeled")
        )
        # The training file has phrases of sentences too; most are a few words.
        whole = [row for row in train if len(row["sentence"].split()) > 4]
        random.Random(1).shuffle(whole)
        rows = {"dev": dev[:300], "test": test[:600], "train": whole[: ROWS + count]}
    rows["head"], rows["train"] = rows["train"][:count], rows["train"][count:]
    return {split: write_rows(folder / f"{split}.jsonl", each) for split, each in rows.items()}


class Study:
    """The runs of one task."""

    def __init__(self, folder: Path, name: str, encoder: str, files: Mapping[str, Path]) -> None:
        self.folder, self.bundle, self.files = folder, folder / "bundle", files
        self.task = {"questions": "trec", "sst2": "sst2"}[name]
        own = {"init": "eva", "init_rows": files["head"], "init_task": self.task}
        made("export", self.bundle, model=encoder, rank=1, **ADAPTERS[name], **own)

    def arm(self, arm: str, seeds: Sequence[int]) -> dict[str, Any]:
        """A way to train, at the rate that is best for the first seed."""
        plan, rates = ARMS[arm]
        noises: list[Settings] = (
            [noise(epsilon) for epsilon in EPSILONS] if arm.startswith("private") else [{}]
        )
        tried: dict[float, float] = {}
        for rate in rates:
            found = self._run(arm, {**plan, **noises[0], "learning_rate": rate}, seeds[0], test=False)
            tried[rate] = float(found["best_dev_loss"])
        best = {**plan, "learning_rate": min(tried, key=lambda rate: tried[rate])}
        tables = []
        for each in noises:
            runs = [self._run(arm, {**best, **each}, seed) for seed in seeds]
            tables.append({"noise": each, **summarize(runs, runs[0])})
        return {"settings": best, "runs": tables}

    def _run(self, arm: str, plan: Settings, seed: int, test: bool = True) -> dict[str, Any]:
        words = [arm.replace(", ", "-"), f"{plan['learning_rate']:g}", f"{plan.get('noise', 0):g}", str(seed)]
        name = "-".join(words if test else [*words, "dev"]).replace(" ", "-")
        train = self._one_place if arm == "one place" else self._simulate
        return train(name, {**plan, "seed": seed}, test)

    def _simulate(self, name: str, plan: Settings, test: bool) -> dict[str, Any]:
        out, found = self.folder / name, self.folder / f"{name}.json"
        if not found.exists():
            shutil.rmtree(out, ignore_errors=True)
            given = {**self._of(("train", "dev", "test") if test else ("train", "dev")), "threads": 1}
            prge("fleet", "simulate", **plan, **given, head_rows=self.files["head"], out=out, json=found)
        figures = json_of(found)
        losses = [entry["evaluation"]["loss"] for entry in figures["curve"] if entry["evaluation"]]
        told = ("bytes_up", "bytes_down", "bytes_up_per_device_step", "privacy_epsilon")
        facts = {"best_dev_loss": min(losses), **{name: figures[name] for name in told}}
        for when in ("before", "after") if test else ():
            facts |= {f"{when}_{key}": figures[when][key] for key in ("accuracy", "loss")}
        return facts

    def _one_place(self, name: str, plan: Settings, test: bool) -> dict[str, Any]:
        """All rows on one machine, from the fleet's start, over as many examples as with changes."""
        # The fleet's start: the bundle's adapter with the head that the server fits.
        head = {**self._of(("train",)), "train": self.files["head"], "keep_gradients": True}
        fitted = made("run", self.folder / "head", steps=1, head_folds=0, **head)
        start = made("replay", self.folder / "start", fitted, step=0)
        run = made("run", self.folder / name, **plan, **self._of(("train", "dev")), adapter=start, threads=1)
        facts = {"best_dev_loss": min(record["loss"] for record in evaluations(run))}
        if test:
            rows = {"data": self.files["test"], **self._of(())}
            found = scored(self.folder / f"{name}.json", adapter=run, **rows)
            facts |= {f"after_{key}": found[key] for key in ("accuracy", "loss")}
        return facts

    def _of(self, splits: Sequence[str]) -> dict[str, Any]:
        return {"bundle": self.bundle, "task": self.task, **{split: self.files[split] for split in splits}}


def noise(epsilon: float) -> Settings:
    """The least noise with which a plan's passes over a device's rows stay below epsilon, on 1 %."""
    low, high = 0.1, 100.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        is_low = epsilon_of([(middle, PRIVATE["rounds"])], DELTA) > epsilon
        low, high = (middle, high) if is_low else (low, middle)
    return {"noise": round(high, 3), "most_privacy_epsilon": epsilon}


if __name__ == "__main__":
    main()
