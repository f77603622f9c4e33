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
import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from questions import make_questions
from verbs import evaluations, made, parser_of, prge, report, scored, summarize

from prge.learning.accounting import epsilon_of
from prge.verbs.starting import json_of

DEVICES, ROWS, HEAD = 100, 3000, {"questions": 60, "sst2": 400}
Settings = Mapping[str, Any]
ADAPTERS: Mapping[str, Settings] = {
    "questions": {"adapt_layers": "top:2"},
    # What docs/notes/sst2.md found to be worth its numbers.
    "sst2": {"target_modules": r"encoder\.layer\.2\.attention\.self\.value"},
}
FLEET: Settings = {"devices": DEVICES, "schedule": "cosine"}
UNEVEN: Settings = {**FLEET, "partition": "dirichlet:0.3", "per_round": 10}
SCALARS: Settings = {**UNEVEN, "estimator": "tangent", "local_steps": 1, "examples": 20, "clip": 0.1}
CHANGES: Settings = {**UNEVEN, "estimator": "exact", "local_steps": 5, "examples": 4, "rounds": 20}
ARMS: dict[str, Settings] = {
    "scalars, q 4": {**SCALARS, "queries": 4, "rounds": 80, "evaluate_every": 8},
    "scalars, q 16": {**SCALARS, "queries": 16, "rounds": 40, "evaluate_every": 4},
    "FedAvg": {**CHANGES, "evaluate_every": 2},
}
ONE_PLACE: Settings = {
    **{"estimator": "exact", "steps": 200, "batch_size": 20, "evaluate_every": 20},
    **{"beta2": 0.98, "schedule": "cosine"},
}
# Tried with seed 42, with noise at the largest epsilon; the best by loss of development rows is taken for all
# seeds, or the first is.
TRIED: Mapping[str, Sequence[Settings]] = {
    **{arm: ({"learning_rate": 4e-2}, {"learning_rate": 1e-2}) for arm in ARMS if arm.startswith("scalars")},
    "FedAvg": ({"learning_rate": 1e-2}, {"learning_rate": 3e-2}),
    "one place": ({"learning_rate": 1e-2}, {"learning_rate": 3e-2}),
    "private scalars": ({"learning_rate": 1e-2}, {"learning_rate": 4e-2}),
    "private changes": ({"learning_rate": 10.0}, {"learning_rate": 3.0}),
}
EPSILONS = (1.0, 4.0, 8.0)
PRIVATE: Settings = {
    **{**FLEET, "per_round": DEVICES, "partition": "even", "rounds": 8, "local_steps": 1},
    **{"examples": ROWS // DEVICES, "clip": 0.1, "evaluate_every": 1},
}
PRIVATE_ARMS: dict[str, Settings] = {
    "private scalars": {**PRIVATE, "queries": 16, "share_directions": True},
    "private changes": {**PRIVATE, "estimator": "exact", "optimizer": "sgd"},
}


def main() -> None:
    """Read the flags, make every run, print JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--encoder", required=True, help="folder or hub id")
    parser.add_argument("--sst2", type=Path, help="folder with the SST-2 files; needed by its task alone")
    parser.add_argument("--tasks", nargs="+", default=["questions", "sst2"], choices=sorted(HEAD))
    parser.add_argument("--first-rates", action="store_true", help="search no rates: take those named first")
    parser.add_argument("--arms", nargs="+", default=[*ARMS, "one place", *PRIVATE_ARMS])
    arguments = parser.parse_args()

    results = {}
    for name in arguments.tasks:
        study = Study(arguments.out / name, name, arguments.encoder, rows_of(arguments, name))
        searches = not arguments.first_rates
        results[name] = {arm: study.arm(arm, arguments.seeds, searches) for arm in arguments.arms}
    report(results, arguments.out)


def rows_of(arguments: argparse.Namespace, name: str) -> dict[str, Path]:
    """Files of a task: those that the devices hold, the server's, and test rows."""
    folder, count = arguments.out / name, HEAD[name]
    folder.mkdir(parents=True, exist_ok=True)
    if name == "questions":
        drawn = make_questions({"dev": 300, "test": 600, "train": ROWS + count})
        lines = {split: [json.dumps(row) for row in rows] for split, rows in drawn.items()}
        files = {split: folder / f"{split}.jsonl" for split in ("head", "train", "dev", "test")}
    else:
        lines = {
            split: (arguments.sst2 / f"{file}.tsv").read_text(encoding="utf-8").splitlines()
            for split, file in (("train", "train"), ("dev", "dev"), ("test", "test-labeled"))
        }
        header = lines["train"][0]
        # The training file has phrases of sentences too; most are a few words.
        whole = [line for line in lines["train"][1:] if len(line.split()) > 5]
        random.Random(1).shuffle(whole)
        lines = {"train": whole[: ROWS + count], "dev": lines["dev"][1:301], "test": lines["test"][1:601]}
        files = {split: folder / f"{split}.tsv" for split in ("head", "train", "dev", "test")}
    lines["head"], lines["train"] = lines["train"][:count], lines["train"][count:]
    for split, file in files.items():
        content = ([header] if name == "sst2" else []) + lines[split]
        file.write_text("\n".join(content) + "\n", encoding="utf-8")
    return files


class Study:
    """The runs of one task."""

    def __init__(self, folder: Path, name: str, encoder: str, files: Mapping[str, Path]) -> None:
        self.folder, self.bundle, self.files = folder, folder / "bundle", files
        self.task = {"questions": "trec", "sst2": "sst2"}[name]
        own = {"init": "eva", "init_rows": files["head"], "init_task": self.task}
        made("export", self.bundle, model=encoder, rank=1, **ADAPTERS[name], **own)

    def arm(self, arm: str, seeds: Sequence[int], searches: bool) -> dict[str, Any]:
        """A way to train, with the settings that are best for the first seed."""
        tried = TRIED[arm] if searches else TRIED[arm][:1]
        noise = self._noise(max(EPSILONS)) if arm in PRIVATE_ARMS else {}
        found = [self._run(arm, {**each, **noise}, seeds[0], test=False) for each in tried if len(tried) > 1]
        best = tried[min(range(len(found)), key=lambda at: float(found[at]["best_dev_loss"]), default=0)]
        if arm not in PRIVATE_ARMS:
            runs = [self._run(arm, best, seed) for seed in seeds]
            return {"settings": best, **summarize(runs, [name for name in runs[0] if name != "curve"])}
        table = {}
        for epsilon in EPSILONS:
            runs = [self._run(arm, {**best, **self._noise(epsilon)}, seed) for seed in seeds]
            names = ("after_accuracy", "after_loss", "best_dev_loss", "privacy_epsilon")
            table[f"epsilon {epsilon:g}"] = summarize(runs, names)
        return {"settings": best, **table}

    def _noise(self, epsilon: float) -> Settings:
        """Every row takes part once a round, so that all of epsilon is spent in the last."""
        return {"noise": noise_for(epsilon, PRIVATE["rounds"]), "most_privacy_epsilon": epsilon}

    def _run(self, arm: str, settings: Settings, seed: int, test: bool = True) -> dict[str, Any]:
        words = [arm.replace(",", ""), *(f"{value:g}" for value in settings.values()), str(seed)]
        name = "-".join([*words, "dev"] if not test else words).replace(" ", "-")
        plan = {**settings, "seed": seed}
        if arm == "one place":
            return self._one_place(name, {**ONE_PLACE, **plan})
        return self._simulate(name, {**(ARMS | PRIVATE_ARMS)[arm], **plan}, test)

    def _simulate(self, name: str, plan: Settings, test: bool = True) -> dict[str, Any]:
        out, found = self.folder / name, self.folder / f"{name}.json"
        if not found.exists():
            shutil.rmtree(out, ignore_errors=True)
            given = {**self._of(("train", "dev", "test") if test else ("train", "dev")), "threads": 1}
            prge("fleet", "simulate", **plan, **given, head_rows=self.files["head"], out=out, json=found)
        figures = json_of(found)
        curve = [entry for entry in figures["curve"] if entry["evaluation"]]
        best = min(curve, key=lambda entry: float(entry["evaluation"]["loss"]))

        def until(last: Mapping[str, Any], name: str) -> float:
            return sum(float(entry[name]) for entry in figures["curve"] if entry["number"] <= last["number"])

        facts = {
            "best_dev_loss": best["evaluation"]["loss"],
            "best_dev_accuracy": max(entry["evaluation"]["accuracy"] for entry in curve),
            "rounds_to_best": best["number"] + 1,
            "kilobytes_up_to_best": until(best, "bytes_up") / 1000,
            "kilobytes_down_to_best": until(best, "bytes_down") / 1000,
            "device_seconds_to_best": until(best, "device_seconds") * plan["per_round"],
            "bytes_up_per_device_step": figures["bytes_up_per_device_step"],
            "privacy_epsilon": figures["privacy_epsilon"],
            "curve": [
                {
                    "round": entry["number"] + 1,
                    "loss": entry["evaluation"]["loss"],
                    "accuracy": entry["evaluation"]["accuracy"],
                    "up": until(entry, "bytes_up"),
                    "down": until(entry, "bytes_down"),
                }
                for entry in curve
            ],
        }
        for when in ("before", "after") if test else ():
            facts |= {f"{when}_{key}": figures[when][key] for key in ("accuracy", "loss")}
        return facts

    def _one_place(self, name: str, plan: Settings) -> dict[str, Any]:
        """All rows on one machine, from the fleet's start, over as many examples as with changes."""
        # The fleet's start: the bundle's adapter with the head that the server fits.
        head = {**self._of(("train",)), "train": self.files["head"], "keep_gradients": True}
        fitted = made("run", self.folder / "head", steps=1, head_folds=0, **head)
        start = made("replay", self.folder / "start", fitted, step=0)
        run = made("run", self.folder / name, **plan, **self._of(("train", "dev")), adapter=start, threads=1)
        same = {"bundle": self.bundle, "task": self.task}
        test = scored(self.folder / f"{name}.json", data=self.files["test"], adapter=run, **same)
        found = evaluations(run)
        return {
            "best_dev_loss": min(record["loss"] for record in found),
            "best_dev_accuracy": max(record["accuracy"] for record in found),
            "after_accuracy": test["accuracy"],
            "after_loss": test["loss"],
        }

    def _of(self, splits: Sequence[str]) -> dict[str, Any]:
        return {"bundle": self.bundle, "task": self.task, **{split: self.files[split] for split in splits}}


def noise_for(epsilon: float, times: int, delta: float = 1e-5) -> float:
    """The least noise with which so many passes over a device's rows stay below epsilon, on 1 %."""
    low, high = 0.1, 100.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if epsilon_of([(middle, times)], delta) > epsilon else (low, middle)
    return round(high, 3)


if __name__ == "__main__":
    main()
