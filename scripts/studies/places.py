"""What `--adapt-layers auto` gives: exact gradients with adapters where it puts them, everywhere, and on top.

    python scripts/studies/places.py --out results.json
    python scripts/studies/places.py --model MODEL --train train.jsonl --test test.jsonl --out results.json

Without a model it is the demo's task. Every way has principal directions of the training rows as `lora_a`,
and takes the rate, of some, that is best on development rows with the first seed; the best step on
development rows is scored on the test rows, once for a seed. Gradients are those of an exact run in float32,
by autograd on the whole model, so that nothing is exported. `top:k` has the largest k within the time that
auto may take; `top:k, more` as many trained numbers as all layers, in higher ranks; `all linear` as many in
all linear layers. Auto chooses among all linear layers, or the usual ones. Prints JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from prge.adapter import Adapter, adapter_size
from prge.checkpoint import TrainingState
from prge.contract import AdaptedModule, Contract
from prge.costs import work_of
from prge.engine import Array
from prge.evaluation import score
from prge.exact import Exact, answer_slopes
from prge.examples import Example
from prge.journal import Journal
from prge.optimizers import Adam
from prge.rows.example_building import BuildOptions, build_examples
from prge.rows.readers import read_rows
from prge.rows.task import Task, load_task
from prge.sampling import Sampler
from prge.training import AdapterLearner, TrainingSettings, train
from server_export.model.blocks import in_top_blocks
from server_export.model.chain import Chain, build_chain
from server_export.model.contributions import contributions, gradient_norms
from server_export.model.eva import principal_directions, tokens_of, with_directions
from server_export.model.files import find_files
from server_export.model.loading import load_model, outline_model
from server_export.model.lora_fa import CallInputs, insert_lora
from server_export.model.outline import outline_of
from server_export.model.places import CALL_ROWS, Limits, every_place, find_places
from server_export.model.start import StartAdapter, start_adapter
from server_export.model.tokenization import load_tokenizer, on_device
from server_export.settings import ExportConfig, PrependBos

DEMO = Path(__file__).resolve().parents[2] / "server_export" / "demo_data"
INIT_TOKENS, EVALUATIONS, DEV_ROWS = 16_384, 8, 128


@dataclass
class Study:
    """A model with its rows, and what all ways share."""

    model: str
    task: Task | None
    length: int
    batch: int
    steps: int
    time: float

    def __post_init__(self) -> None:
        self.config = ExportConfig(model=self.model, out=Path("unused"), sequence_length=self.length)
        self.outline = outline_model(self.model)
        self.model_in_memory = load_model(self.model).model.requires_grad_(False)
        vocabulary = self.outline.model.get_input_embeddings().weight.shape[0]
        self.everywhere = start_adapter(self.config, self.outline, False)
        self.costs = outline_of(self.everywhere, self.length)
        begin: PrependBos = "auto" if self.task else "always"
        self.tokenizer = on_device(load_tokenizer(self.model), begin, vocabulary)
        sizes = (1, 1024, self.length, self.length - 1, self.costs.width, vocabulary)
        self.contract = Contract("stack", "logprobs", *sizes, (), self.costs.modules)

    def examples(self, path: Path) -> list[Example]:
        """Rows of a file; texts are split."""
        options = BuildOptions("truncate" if self.task else "split")
        rows = read_rows(path)
        return build_examples(rows, self.tokenizer, self.contract, self.task, options)[0]

    def chain(self, start: StartAdapter) -> Chain:
        """The model with an adapter."""
        outline = replace(self.outline, model=copy.deepcopy(self.outline.model))
        return build_chain(outline, find_files(self.model), start.scaled_lora_a(), longest=self.length)

    def step(
        self, examples: Sequence[Example], rows: int, kind: str, modules: Sequence[AdaptedModule]
    ) -> Contract:
        """The contract of a call."""
        sequences = [sequence for example in examples for sequence in example.sequences]
        tokens = max(len(sequence.tokens) for sequence in sequences)
        slots = max(len(sequence.slots) for sequence in sequences)
        own: dict[str, Any] = {"kind": kind, "batch_size": rows, "modules": tuple(modules)}
        return replace(self.contract, **own, sequence_length=tokens, positions=slots)

    def ways(self, examples: Sequence[Example]) -> dict[str, tuple[StartAdapter, dict[str, Any]]]:
        """Adapters by name, with what is said of them."""
        start = every_place(self.config, self.outline, False)
        chain = self.chain(start)
        found = principal_directions(
            start, chain, tokens_of(examples, INIT_TOKENS), 2 * start.rank * self.costs.blocks
        )
        even = with_directions(start, found, dict.fromkeys(start.lora_a, start.rank))
        chain = replace(chain, lora_a=even.scaled_lora_a())
        norms = gradient_norms(chain, self.contract, examples, self.tokenizer.pad_id, "mean")
        shares = {name: each.shares[: 2 * start.rank].tolist() for name, each in found.items()}
        every = contributions(norms, shares)
        call = self.step(examples, CALL_ROWS, "exact", chain.modules)
        whole = work_of(self.costs, call).operations
        limits = Limits(self.time, None, adapter_size(self.costs.modules))

        def made(ranks: dict[str, int]) -> tuple[StartAdapter, dict[str, Any]]:
            adapter = with_directions(start.only(list(ranks)), found, ranks)
            time = work_of(outline_of(adapter, self.length), call).operations / whole
            numbers = sum(b.numel() for b in adapter.lora_b.values())
            return adapter, {"time": time, "numbers": numbers, "ranks": ranks}

        def shared(names: Sequence[str]) -> int:
            """The rank of layers that train as many numbers as the usual ones."""
            return max(limits.numbers // sum(len(start.lora_b[name]) for name in names), 1)

        usual, linear = list(self.everywhere.lora_a), list(start.lora_a)
        ways = {"all layers": made(dict.fromkeys(usual, start.rank))}
        ways["all layers, all linear"] = made(dict.fromkeys(linear, shared(linear)))
        for k in range(1, self.costs.blocks):
            config = replace(self.config, adapt_layers=f"top:{k}")
            names = list(start_adapter(config, self.outline, False).lora_a)
            top = made(dict.fromkeys(names, start.rank))
            if top[1]["time"] <= self.time:
                ways["top:k"] = top
                ways["top:k, more"] = made(dict.fromkeys(names, start.rank * len(usual) // len(names)))
                linear = in_top_blocks(self.outline.model, list(start.lora_a), f"top:{k}")
                ways["top:k, all linear"] = made(dict.fromkeys(linear, shared(linear)))
        for search in ("greedy", "evolutionary"):
            places = find_places(every, start, self.costs, call, limits, search)
            ways[f"auto, {search}"] = made(dict(places.ranks))
        places = find_places(
            {name: every[name] for name in usual}, start.only(usual), self.costs, call, limits
        )
        ways["auto, usual layers"] = made(dict(places.ranks))
        places = find_places(every, start, self.costs, call, replace(limits, time=1.0))
        ways["auto, all the time"] = made(dict(places.ranks))
        return ways


class WholeModel:
    """An engine of transformers' own model and autograd, for stack calls of one copy and exact calls."""

    def __init__(self, study: Study, start: StartAdapter, contract: Contract) -> None:
        self._inputs = CallInputs()
        self._model = copy.deepcopy(study.model_in_memory)
        self.modules = insert_lora(self._model, start.scaled_lora_a(), 1.0, self._inputs)
        self.contract = replace(contract, modules=self.modules)

    def called(self, contract: Contract) -> WholeModel:
        """The same for other calls."""
        other = copy.copy(self)
        other.contract = replace(contract, modules=self.modules)
        return other

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See prge.engine.Engine."""
        exact = self.contract.is_exact
        shapes = {module.name: (1, module.rank, module.out_features) for module in self.modules}
        own = {
            module.name: torch.from_numpy(inputs[module.input_name]).reshape(shapes[module.name]).clone()
            for module in self.modules
        }
        self._inputs.lora_b = {name: value.requires_grad_(exact) for name, value in own.items()}
        length = int(inputs["positions"].max()) + 1
        positions, targets = (torch.from_numpy(inputs[name]) for name in ("positions", "targets"))
        with torch.set_grad_enabled(exact):
            logits = self._model(input_ids=torch.from_numpy(inputs["tokens"][:, :length])).logits
            asked = logits.gather(1, positions[..., None].expand(-1, -1, logits.shape[-1]))
            logprobs = torch.log_softmax(asked, -1).gather(-1, targets[..., None])[..., 0]
        answers = {"logprobs": logprobs.detach().numpy()}
        if exact:
            slopes = torch.from_numpy(answer_slopes(self.contract, answers["logprobs"], inputs))
            found = torch.autograd.grad(logprobs, list(own.values()), slopes)
            answers |= {f"gradient.{name}": each[0].numpy() for name, each in zip(own, found, strict=True)}
        return answers


class Evaluating:
    """Scores development rows on the way of a run; implements prge.training.Observer."""

    def __init__(self, engine: WholeModel, state: TrainingState, study: Study, dev: list[Example]) -> None:
        self._engine, self._state, self._study, self._dev = engine, state, study, dev
        self.found: list[tuple[float, Adapter]] = []
        self.seconds: list[float] = []

    def on_step(self, record: Mapping[str, Any], measurement: Any) -> None:
        """Note a step's time, and every so often the loss of development rows with the adapter."""
        self.seconds.append(measurement.engine_seconds)
        if len(self.seconds) % (self._study.steps // EVALUATIONS) == 0:
            adapter = self._state.adapter.copy()
            loss = score(self._engine, adapter, self._dev, pad=self._study.tokenizer.pad_id).loss
            self.found.append((loss, adapter))

    def on_evaluation(self, record: Mapping[str, Any], fresh: bool) -> None:
        """Nothing: `on_step` does it."""


def run(
    study: Study, model: WholeModel, train_rows: list[Example], dev: list[Example], seed: int, rate: float
) -> tuple[float, Adapter, float]:
    """Loss of the best step on development rows, its adapter, and milliseconds a step."""
    scoring = model.called(study.step(dev, 32, "stack", model.modules))
    engine = model.called(study.step(train_rows, study.batch, "exact", model.modules))
    state = TrainingState(Adapter.zeros(model.modules), Adam(adapter_size(model.modules)))
    settings = TrainingSettings(steps=study.steps, seed=seed)
    watching = Evaluating(scoring, state, study, dev)
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal(Path(folder, "journal.jsonl")) as journal,
    ):
        learner = AdapterLearner(
            engine=engine,
            sampler=Sampler(train_rows, engine.contract, seed, pad=study.tokenizer.pad_id),
            estimator=Exact(),
            learning_rates=lambda step: {"learning_rate": rate * cosine(step / study.steps)},
            state=state,
            settings=settings,
            journal=journal,
            keep=lambda state: None,
        )
        train(learner, settings, watching)
    loss, adapter = min(watching.found, key=lambda each: each[0])
    return loss, adapter, 1000 * statistics.median(watching.seconds)


def cosine(part: float) -> float:
    """A schedule that falls from 1 to 0."""
    return (1 + math.cos(math.pi * part)) / 2


def main() -> None:
    """Read the flags, run every way, rate and seed, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id; default: the demo's, with its rows")
    parser.add_argument("--train", type=Path, help="rows; 128 examples are for development")
    parser.add_argument("--test", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="file for the results")
    parser.add_argument("--time", type=float, default=0.7, help="share of the time that auto may take")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2025])
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-3, 1e-2, 3e-2])
    parser.add_argument("--ways", nargs="+", help="some of the ways; default: all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.model:
        study = Study(arguments.model, None, 64, 8, arguments.steps, arguments.time)
        rows = study.examples(arguments.train)
        dev, train_rows = rows[:DEV_ROWS], rows[DEV_ROWS:]
        test = study.examples(arguments.test)
    else:
        task = load_task(DEMO / "task.yaml")
        study = Study(str(DEMO / "model"), task, 32, 4, arguments.steps, arguments.time)
        train_rows, dev, test = (study.examples(DEMO / f"{name}.jsonl") for name in ("train", "dev", "test"))
    print(f"{len(train_rows)} training, {len(dev)} development, {len(test)} test examples", flush=True)
    results: dict[str, Any] = {}
    for name, (start, said) in study.ways(train_rows).items():
        if arguments.ways and name not in arguments.ways:
            continue
        model, first = WholeModel(study, start, study.contract), arguments.seeds[0]
        tried = {rate: run(study, model, train_rows, dev, first, rate) for rate in arguments.rates}
        rate = min(tried, key=lambda each: tried[each][0])
        scoring = model.called(study.step(test, 32, "stack", model.modules))
        runs = []
        for seed in arguments.seeds:
            found = tried[rate] if seed == first else run(study, model, train_rows, dev, seed, rate)
            tested = score(scoring, found[1], test, pad=study.tokenizer.pad_id).loss
            runs.append({"seed": seed, "dev": found[0], "test": tested, "milliseconds": found[2]})
        by_rate = {str(each): tried[each][0] for each in tried}
        results[name] = {"learning_rate": rate, "dev_by_rate": by_rate, "runs": runs, **said}
        mean = statistics.mean(each["test"] for each in runs)
        print(f"{name:<20} test {mean:.4f}  rate {rate:g}  time {said['time']:.2f}", flush=True)
        arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
