"""Compare ways to train a fleet: bytes, rounds, seconds and quality, and noise against quality.

    python scripts/studies/fleet.py --encoder MINILM --sst2 SST2 --out results [--tasks questions sst2]

MINILM is a model's folder or hub id, SST2 a folder with train.tsv, dev.tsv and test-labeled.tsv. The rows of
six classes come from questions.py. 100 simulated devices hold 3,000 rows, distributed by Dirichlet 0.3; a
round asks ten, which train on 20 examples each. The server has 400 other rows of SST-2, or 60 of the
questions: it fits the classification head on them, which stays fixed, and `lora_a` of the adapters of rank 1.
Rates and the best step of each run were chosen on development rows with seed 42; test rows are read once per
run. With noise every device takes part in every round with all of its rows.

Calls the verbs export, fleet simulate, run and replay as a user would and prints JSON; existing runs are
reused.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from questions import make_questions
from verbs import evaluate, evaluations, make_once, make_parser, prge, report, summarize, write_rows

from prge.cli.subprocesses import read_json
from prge.data.readers.files import read_rows
from prge.training.privacy_accounting import epsilon_of

DEVICES, ROWS, DELTA, HEAD = 100, 3000, 1e-5, {"questions": 60, "sst2": 400}
Settings = Mapping[str, Any]
ADAPTERS: Mapping[str, Settings] = {
    "questions": {"adapt_layers": "top:2"},
    # Few parameters with much of the gradient: the first principal direction of one layer.
    "sst2": {"target_modules": r"encoder\.layer\.2\.attention\.self\.value"},
}
FLEET: Settings = {"devices": DEVICES, "lr_scheduler_type": "cosine"}
UNEVEN: Settings = {**FLEET, "partition": "dirichlet:0.3", "per_round": 10}
PROJECTED_GRADIENTS: Settings = {
    **UNEVEN,
    "estimator": "tangent",
    "local_steps": 1,
    "examples": 20,
    "max_grad_norm": 0.1,
}
CHANGES: Settings = {**UNEVEN, "estimator": "exact", "local_steps": 5, "examples": 4, "rounds": 20}
PRIVATE: Settings = {
    **{**FLEET, "per_round": DEVICES, "partition": "even", "rounds": 8, "local_steps": 1},
    **{"examples": ROWS // DEVICES, "max_grad_norm": 0.1, "eval_steps": 1},
}
ONE_MACHINE: Settings = {
    **{"estimator": "exact", "steps": 200, "batch_size": 20, "eval_steps": 20},
    **{"adam_beta2": 0.98, "lr_scheduler_type": "cosine"},
}
# Settings, and the rates to try with the first seed; with noise at the largest epsilon.
ARMS: Mapping[str, tuple[Settings, Sequence[float]]] = {
    "scalars, q 4": ({**PROJECTED_GRADIENTS, "queries": 4, "rounds": 80, "eval_steps": 8}, (4e-2, 1e-2)),
    "scalars, q 16": (
        {**PROJECTED_GRADIENTS, "queries": 16, "rounds": 40, "eval_steps": 4},
        (4e-2, 1e-2),
    ),
    "FedAvg": ({**CHANGES, "eval_steps": 2}, (1e-2, 3e-2)),
    "one place": (ONE_MACHINE, (1e-2, 3e-2)),
    "private scalars": ({**PRIVATE, "queries": 16, "share_directions": True}, (1e-2, 4e-2)),
    "private changes": ({**PRIVATE, "estimator": "exact", "optimizer": "sgd"}, (10.0, 3.0)),
}
EPSILONS = (8.0, 4.0, 1.0)


def main() -> None:
    """Parse the flags, make every run and print JSON."""
    parser = make_parser(__doc__)
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
    """Return the files of a task: rows of the devices, of the server, and test rows."""
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
        # The training file also has phrases of sentences, mostly of a few words.
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
        initialization = {"init": "eva", "init_rows": files["head"], "init_task": self.task}
        make_once("export", self.bundle, model=encoder, rank=1, **ADAPTERS[name], **initialization)

    def arm(self, arm: str, seeds: Sequence[int]) -> dict[str, Any]:
        """Run an arm at the rate that is best for the first seed."""
        plan, rates = ARMS[arm]
        noises: list[Settings] = (
            [noise(epsilon) for epsilon in EPSILONS] if arm.startswith("private") else [{}]
        )
        losses_by_rate: dict[float, float] = {}
        for rate in rates:
            figures = self._run(arm, {**plan, **noises[0], "learning_rate": rate}, seeds[0], test=False)
            losses_by_rate[rate] = float(figures["best_dev_loss"])
        best = {**plan, "learning_rate": min(losses_by_rate, key=lambda rate: losses_by_rate[rate])}
        tables = []
        for each in noises:
            runs = [self._run(arm, {**best, **each}, seed) for seed in seeds]
            tables.append({"noise": each, **summarize(runs, runs[0])})
        return {"settings": best, "runs": tables}

    def _run(self, arm: str, plan: Settings, seed: int, test: bool = True) -> dict[str, Any]:
        name_parts = [
            arm.replace(", ", "-"),
            f"{plan['learning_rate']:g}",
            f"{plan.get('noise', 0):g}",
            str(seed),
        ]
        name = "-".join(name_parts if test else [*name_parts, "dev"]).replace(" ", "-")
        train = self._train_on_one_machine if arm == "one place" else self._simulate
        return train(name, {**plan, "seed": seed}, test)

    def _simulate(self, name: str, plan: Settings, test: bool) -> dict[str, Any]:
        out, result_file = self.folder / name, self.folder / f"{name}.json"
        if not result_file.exists():
            shutil.rmtree(out, ignore_errors=True)
            flags = {**self._of(("train", "dev", "test") if test else ("train", "dev")), "threads": 1}
            prge(
                "fleet", "simulate", **plan, **flags, head_rows=self.files["head"], out=out, json=result_file
            )
        figures = read_json(result_file)
        losses = [entry["evaluation"]["loss"] for entry in figures["curve"] if entry["evaluation"]]
        names = ("bytes_up", "bytes_down", "bytes_up_per_device_step", "privacy_epsilon")
        facts = {"best_dev_loss": min(losses), **{name: figures[name] for name in names}}
        for when in ("before", "after") if test else ():
            facts |= {f"{when}_{key}": figures[when][key] for key in ("accuracy", "loss")}
        return facts

    def _train_on_one_machine(self, name: str, plan: Settings, test: bool) -> dict[str, Any]:
        """Train all rows on one machine from the fleet's start, over as many examples as with FedAvg."""
        # The fleet starts with the bundle's adapter and the head that the server fits.
        head = {**self._of(("train",)), "train": self.files["head"], "keep_gradients": True}
        fitted = make_once("run", self.folder / "head", steps=1, head_folds=0, **head)
        start = make_once("replay", self.folder / "start", fitted, step=0)
        run = make_once(
            "run", self.folder / name, **plan, **self._of(("train", "dev")), adapter=start, threads=1
        )
        facts = {"best_dev_loss": min(record["loss"] for record in evaluations(run))}
        if test:
            rows = {"data": self.files["test"], **self._of(())}
            scores = evaluate(self.folder / f"{name}.json", adapter=run, **rows)
            facts |= {f"after_{key}": scores[key] for key in ("accuracy", "loss")}
        return facts

    def _of(self, splits: Sequence[str]) -> dict[str, Any]:
        return {"bundle": self.bundle, "task": self.task, **{split: self.files[split] for split in splits}}


def noise(epsilon: float) -> Settings:
    """Return the least noise, within 1 %, that keeps a plan's passes over a device's rows below epsilon."""
    low, high = 0.1, 100.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        is_low = epsilon_of([(middle, PRIVATE["rounds"])], DELTA) > epsilon
        low, high = (middle, high) if is_low else (low, middle)
    return {"noise": round(high, 3), "most_privacy_epsilon": epsilon}


if __name__ == "__main__":
    main()
