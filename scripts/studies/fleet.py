"""Ways to train a fleet, held against each other: bytes, rounds, seconds, quality; and noise against quality.

    python scripts/studies/fleet.py --encoder MINILM --sst2 SST2 --out results [--tasks questions sst2]

MINILM is a model's folder or hub id, SST2 a folder with train.tsv, dev.tsv and test-labeled.tsv. The rows of
six classes are those of questions.py. 100 simulated devices hold 3,000 rows, dealt out by Dirichlet 0.3; a
round asks ten, which take five steps of four examples. The classification head is fitted on 64 other rows, 60
of the questions, and stays. Adapters are in the two upper blocks. Rates were chosen on development rows with
seed 42, and the best step of each run too; test rows are read once a run. Calls the verbs export, fleet
simulate, run and replay as a user would and prints JSON; a run that is there is not made again.
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
from verbs import evaluations, prge, summarize

from prge.accounting import epsilon_of

DEVICES, HEAD = 100, {"questions": 60, "sst2": 64}
FLEET: dict[str, Any] = {
    "devices": DEVICES,
    "partition": "dirichlet:0.3",
    "local_steps": 5,
    "evaluate_every": 2,
}
ROUNDS = {"scalars": 80, "adapters": 20}
SCALARS: dict[str, Any] = {"estimator": "tangent", "rounds": ROUNDS["scalars"], "evaluate_every": 8}
ADAPTERS: dict[str, Any] = {"estimator": "exact", "rounds": ROUNDS["adapters"]}
ARMS: Mapping[str, dict[str, Any]] = {
    "scalars, q 4": {**SCALARS, "queries": 4},
    "scalars, q 16": {**SCALARS, "queries": 16, "rounds": 40},
    "FedAvg": ADAPTERS,
    "FedAdam": {**ADAPTERS, "average": "fedadam"},
    "FedAvg, largest 1 %": {**ADAPTERS, "largest": 0.01},
}
ONE_PLACE: dict[str, Any] = {"estimator": "exact", "steps": 200, "batch_size": 20, "beta2": 0.98}
# Tried with seed 42; the best by loss of development rows is taken for all seeds, or the first is.
RATES: Mapping[str, Sequence[float]] = {
    "scalars, q 4": (3e-4, 1e-3),
    "scalars, q 16": (3e-4, 1e-3),
    "FedAvg": (1e-2, 3e-3),
    "FedAdam": (3e-3,),
    "FedAvg, largest 1 %": (1e-2, 3e-3),
    "one place": (3e-3, 1e-3),
}
EPSILONS = (1.0, 4.0, 8.0)
PRIVATE: Mapping[str, dict[str, Any]] = {
    "scalars": {**SCALARS, "queries": 4, "share_directions": True, "rounds": 10, "evaluate_every": 2},
    "adapters": {**ADAPTERS, "rounds": 10},
}
PRIVATE_RATES = {"scalars": 3e-4, "adapters": 3e-4}


def main() -> None:
    """Read the flags, make every run, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encoder", required=True, help="folder or hub id")
    parser.add_argument("--sst2", type=Path, help="folder with the SST-2 files; needed by its task alone")
    parser.add_argument("--out", type=Path, required=True, help="folder for rows, bundle and runs")
    parser.add_argument("--tasks", nargs="+", default=["questions", "sst2"], choices=sorted(HEAD))
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2025])
    parser.add_argument("--first-rates", action="store_true", help="search no rates: take those of `RATES`")
    parser.add_argument("--arms", nargs="+", default=[*ARMS, "one place", "private"])
    arguments = parser.parse_args()

    bundle = arguments.out / "bundle"
    if not bundle.exists():
        prge("export", model=arguments.encoder, out=bundle, adapt_layers="top:2")
    results = {}
    for name in arguments.tasks:
        study = Study(arguments.out / name, bundle, name, rows_of(arguments, name), not arguments.first_rates)
        results[name] = {arm: study.arm(arm, arguments.seeds) for arm in arguments.arms if arm != "private"}
        if "private" in arguments.arms:
            results[name]["private"] = study.private(arguments.seeds)
    print(json.dumps(results, indent=2))


def rows_of(arguments: argparse.Namespace, name: str) -> dict[str, Path]:
    """Files of a task: those that the devices hold, the server's, and test rows."""
    folder, count = arguments.out / name, HEAD[name]
    folder.mkdir(parents=True, exist_ok=True)
    if name == "questions":
        made = make_questions({"dev": 300, "test": 600, "train": 3000 + count})
        lines = {split: [json.dumps(row) for row in rows] for split, rows in made.items()}
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
        lines = {"train": whole[: 3000 + count], "dev": lines["dev"][1:301], "test": lines["test"][1:601]}
        files = {split: folder / f"{split}.tsv" for split in ("head", "train", "dev", "test")}
    lines["head"], lines["train"] = lines["train"][:count], lines["train"][count:]
    for split, file in files.items():
        content = ([header] if name == "sst2" else []) + lines[split]
        file.write_text("\n".join(content) + "\n", encoding="utf-8")
    return files


class Study:
    """The runs of one task."""

    def __init__(
        self, folder: Path, bundle: Path, name: str, files: Mapping[str, Path], searches: bool
    ) -> None:
        self.folder = folder
        self.bundle = bundle
        self.files = files
        self.searches = searches
        self.task = {"questions": "trec", "sst2": "sst2"}[name]

    def arm(self, arm: str, seeds: Sequence[int]) -> dict[str, Any]:
        """A way to train, at its best rate of the first seed."""
        rates = RATES[arm] if self.searches else RATES[arm][:1]
        tried = {rate: self._run(arm, rate, seeds[0], test=False) for rate in rates if len(rates) > 1}
        rate = min(rates, key=lambda rate: float(tried[rate]["best_dev_loss"]) if tried else 0.0)
        runs = [self._run(arm, rate, seed) for seed in seeds]
        return {"rate": rate, **summarize(runs, [name for name in runs[0] if name != "curve"])}

    def _run(self, arm: str, rate: float, seed: int, test: bool = True) -> dict[str, Any]:
        name = f"{arm.replace(' ', '-').replace(',', '')}-{rate:g}-{seed}" + ("" if test else "-dev")
        if arm == "one place":
            return self._one_place(name, rate, seed)
        return self._simulate(name, {**ARMS[arm], "learning_rate": rate, "seed": seed}, test)

    def private(self, seeds: Sequence[int]) -> dict[str, Any]:
        """Quality by epsilon, with the noise that a device of the mean size spends all of it by."""
        table = {}
        rows = sum(1 for _ in self.files["train"].open()) / DEVICES
        for arm, plan in PRIVATE.items():
            taken = plan["rounds"] * 10 / DEVICES * FLEET["local_steps"] * 4
            for epsilon in EPSILONS:
                noise = noise_for(epsilon, times=-(-int(taken) // int(rows)))
                flags = {**plan, "noise": noise, "clip": 1.0, "most_epsilon": epsilon}
                runs = [
                    self._simulate(
                        f"private-{arm}-{epsilon:g}-{seed}",
                        {**flags, "learning_rate": PRIVATE_RATES[arm], "seed": seed},
                    )
                    for seed in seeds
                ]
                names = ("after_accuracy", "after_loss", "best_dev_loss", "epsilon")
                table[f"{arm}, epsilon {epsilon:g}"] = {"noise": noise, **summarize(runs, names)}
        return table

    def _simulate(self, name: str, plan: Mapping[str, Any], test: bool = True) -> dict[str, Any]:
        found = self.folder / f"{name}.json"
        if not found.exists():
            shutil.rmtree(self.folder / name, ignore_errors=True)
            prge(
                "fleet",
                "simulate",
                **{**FLEET, **plan},
                **self._common(test),
                head_rows=self.files["head"],
                out=self.folder / name,
                json=found,
            )
        figures = json.loads(found.read_text(encoding="utf-8"))
        curve = [entry for entry in figures["curve"] if entry["evaluation"]]
        best = min(curve, key=lambda entry: entry["evaluation"]["loss"])
        until = [entry for entry in figures["curve"] if entry["number"] <= best["number"]]
        facts = {
            "best_dev_loss": best["evaluation"]["loss"],
            "best_dev_accuracy": max(entry["evaluation"]["accuracy"] for entry in curve),
            "rounds_to_best": best["number"] + 1,
            "kilobytes_up_to_best": sum(entry["bytes_up"] for entry in until) / 1000,
            "kilobytes_down_to_best": sum(entry["bytes_down"] for entry in until) / 1000,
            "device_seconds_to_best": sum(entry["device_seconds"] * 10 for entry in until),
            "bytes_up_per_device_step": figures["bytes_up_per_device_step"],
            "epsilon": figures["epsilon"],
            "curve": [
                {
                    "round": entry["number"] + 1,
                    "loss": entry["evaluation"]["loss"],
                    "accuracy": entry["evaluation"]["accuracy"],
                    "up": sum(each["bytes_up"] for each in figures["curve"][: entry["number"] + 1]),
                    "down": sum(each["bytes_down"] for each in figures["curve"][: entry["number"] + 1]),
                }
                for entry in curve
            ],
        }
        for when in ("before", "after") if test else ():
            facts |= {f"{when}_{key}": figures[when][key] for key in ("accuracy", "loss")}
        return facts

    def _one_place(self, name: str, rate: float, seed: int) -> dict[str, Any]:
        """All rows on one machine, from the fleet's start, over as many examples as with adapters."""
        run, test = self.folder / name, self.folder / f"{name}.json"
        if not test.exists():
            prge(
                "run",
                **ONE_PLACE,
                **self._of(("train", "dev")),
                adapter=self._start(),
                out=run,
                seed=seed,
                learning_rate=rate,
                evaluate_every=20,
                threads=1,
            )
            prge("eval", bundle=self.bundle, task=self.task, data=self.files["test"], adapter=run, json=test)
        scored = json.loads(test.read_text(encoding="utf-8"))
        found = evaluations(run)
        return {
            "best_dev_loss": min(record["loss"] for record in found),
            "best_dev_accuracy": max(record["accuracy"] for record in found),
            "after_accuracy": scored["accuracy"],
            "after_loss": scored["loss"],
        }

    def _start(self) -> Path:
        """The bundle's adapter with the head that the server fits."""
        start = self.folder / "start"
        if not start.exists():
            run = self.folder / "head"
            prge(
                "run",
                bundle=self.bundle,
                train=self.files["head"],
                task=self.task,
                out=run,
                steps=1,
                head_folds=0,
                keep_gradients=True,
            )
            prge("replay", run, step=0, out=start)
        return start

    def _common(self, test: bool) -> dict[str, Any]:
        return {**self._of(("train", "dev", "test") if test else ("train", "dev")), "threads": 1}

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
