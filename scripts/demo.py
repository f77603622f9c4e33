"""The whole path on a tiny model that comes with the package, each step a command of its own.

tune, killed on the way -> resume -> two estimators more -> write -> correct 40 answers
-> a table, a picture

With --model smollm2: a pretrained model learns a job of everyday use (notes_demo.py).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from notes_demo import notes_demo, notes_table

from prge.cli.subprocesses import output_of, read_json, run_verb, started
from prge.data.forms.task import load_task
from prge.data.readers.feedback import AnswerRecord, append_feedback
from prge.data.readers.files import Row, read_rows
from prge.errors import PrgeError

DATA = Path(__file__).resolve().parents[1] / "server_export" / "demo_data"
MODEL, TASK = DATA / "model", DATA / "task.yaml"
TRAIN, DEV, TEST = (DATA / f"{part}.jsonl" for part in ("train", "dev", "test"))

# One bundle for all three estimators.
EXPORT = "--target-modules o_proj down_proj --init random --roles stack tangent back prefill decode".split()
# On the bundle of `prge tune`, whose own run takes exact gradients.
METHODS = {"p-rge": "antithetic", "tangent": "tangent"}
FORWARD = """--queries 8 --batch-size 2 --steps 200 --learning-rate 0.03
    --schedule cosine --evaluate-every 100""".split()
# Candidates are compared with each other. To write the right one, the model learns it as a text, and its end.
WRITING = """--estimator exact --steps 300 --learning-rate 0.01 --evaluate-every 0 --sample-every 0
    --batch-size 4 --optimizer adam --schedule cosine""".split()
# A user who wants other words corrects so many answers; so many others are asked before and after.
BETTER = {"terrible": "awful", "great": "lovely"}
CORRECTED, ASKED = 40, 100
CORRECTING = (
    """--estimator exact --epochs 20 --learning-rate 0.01 --evaluate-every 0 --batch-size 4""".split()
)
_STEPS_BEFORE_THE_KILL = 40


def main() -> int:
    """Run every step into a folder; print accuracies, and of every method rows, seconds, memory."""
    parser = argparse.ArgumentParser(prog="demo.sh", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for all that is made")
    parser.add_argument(
        "--model",
        choices=["embedded", "smollm2"],
        default="embedded",
        help="embedded: the tiny Llama of the repository; smollm2: SmolLM2-135M-Instruct (downloads 93 MB)",
    )
    settings = parser.parse_args()
    out = settings.out
    if out.exists() and any(out.iterdir()):
        parser.error(f"{out} is not empty: remove it, or give another folder with --out")
    try:
        if settings.model == "smollm2":
            print(notes_table(notes_demo(out), out))
        else:
            print(_table(demo(out), out))
    except PrgeError as error:
        print(f"demo.sh: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def demo(out: Path) -> dict[str, Any]:
    """Run every step; returns the figures of the table.

    Raises:
        PrgeError: a step failed; its own message is on the terminal.
    """
    out.mkdir(parents=True, exist_ok=True)
    begin, tuned = time.perf_counter(), out / "tuned"
    task = ["--task", TASK]
    print("\n1/5  tune it with one command; it is killed on the way, and goes on", flush=True)
    rows = ["--data", TRAIN, "--dev", DEV, "--test", TEST, *task]
    killed_on_the_way(tuned / "run", "tune", "--model", MODEL, *EXPORT, *rows, "--out", tuned)
    run_verb("tune", "--resume", tuned, "--json", out / "tuned.json")
    found = read_json(out / "tuned.json")
    print("\n2/5  train it twice more on its bundle, with forward passes alone", flush=True)
    methods = {}
    for name, estimator in METHODS.items():
        data = ["--bundle", tuned / "bundle", "--train", TRAIN, "--dev", DEV, *task, "--out", out / name]
        run_verb("run", *data, "--estimator", estimator, *FORWARD)
        score = out / f"{name}.json"
        run_verb("eval", tuned / "bundle", "--data", TEST, *task, "--adapter", out / name, "--json", score)
        methods[name] = _figures(out / name, read_json(score))
    methods["exact"] = _figures(tuned / "run", found["score_after"])
    print("\n3/5  teach it to write its answer, and ask it before and after", flush=True)
    samples = _written(out, tuned / "bundle")
    print(f"\n4/5  correct {CORRECTED} of its answers, and learn from that", flush=True)
    corrected = _corrected(out, tuned / "bundle")
    print("\n5/5  draw the curves", flush=True)
    run_verb("report", *(out / name for name in METHODS), tuned / "run", "--out", out / "report.html")
    return {
        "accuracy_before": found["score_before"]["accuracy"],
        "methods": methods,
        "samples": samples,
        "corrected": corrected,
        "seconds": time.perf_counter() - begin,
    }


def _figures(run: Path, score: dict[str, Any]) -> dict[str, Any]:
    """What a finished run cost, and what its adapter scores."""
    train = read_json(run / "run.json")["train"]
    return {
        "accuracy": score["accuracy"],
        "peak_mb": (train["memory"]["peak_bytes"] or 0) / 1e6,
        **{name: train[name] for name in ("rows", "seconds", "steps")},
    }


def _written(out: Path, bundle: Path) -> dict[str, Any]:
    """What the model writes after a text of each class that it never saw, before and after a run."""
    task = load_task(str(TASK))
    rows = [row.fields for row in read_rows(TRAIN)]
    answers = [
        {"prompt": task.prompt(row), "completion": task.candidates(row)[task.label(row)]} for row in rows
    ]
    unseen = {task.label(row.fields): row.fields for row in read_rows(TEST)}
    prompts = [{"prompt": task.prompt(row)} for row in unseen.values()]
    for name, lines in (("answers", answers), ("prompts", prompts)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = ["--train", out / "answers.jsonl", "--sample-prompts", out / "prompts.jsonl"]
    run_verb("run", "--bundle", bundle, *data, *WRITING, "--out", out / "writing")
    samples: dict[str, Any] = read_json(out / "writing" / "run.json")["train"]["samples"]
    return samples


def _corrected(out: Path, bundle: Path) -> dict[str, float]:
    """Share of answers to texts that nobody corrected that are as a user wants them, before and after."""
    task, feedback = load_task(str(TASK)), out / "feedback.jsonl"
    wrong = read_rows(TRAIN)[:CORRECTED]
    for row, answer in zip(wrong, _answers(out, bundle, "writing", wrong), strict=True):
        asked = {"prompt": task.prompt(row.fields)}
        said = AnswerRecord(f"answer-{row.number}", "writing", "", asked, answer, {"temperature": 0})
        append_feedback(feedback, [said.to_feedback(correction=_better(row))])
    data = ["--bundle", bundle, "--adapter", out / "writing", "--train", feedback]
    run_verb("run", *data, *CORRECTING, "--out", out / "corrected")
    others = read_rows(TEST)[:ASKED]
    shares = {}
    for name, adapter in (("before", "writing"), ("after", "corrected")):
        answers = _answers(out, bundle, adapter, others)
        right = [answer.strip() == _better(row) for row, answer in zip(others, answers, strict=True)]
        shares[name] = sum(right) / len(right)
    return shares


def _better(row: Row) -> str:
    """What a user would rather read after a text."""
    task = load_task(str(TASK))
    return BETTER[task.candidates(row.fields)[task.label(row.fields)].strip()]


def _answers(out: Path, bundle: Path, adapter: str, rows: Sequence[Row]) -> list[str]:
    """What an adapter of a bundle writes after texts."""
    task, prompts = load_task(str(TASK)), out / "asked.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": task.prompt(row.fields)}) + "\n" for row in rows))
    words = ["generate", "--bundle", bundle, "--adapter", out / adapter, "--data", prompts]
    said = output_of(*words, "--json", "--max-tokens", 6)
    return [str(json.loads(line)["text"]) for line in said.splitlines()]


def killed_on_the_way(run: Path, *words: object, output: TextIO = sys.stdout) -> None:
    """Start a verb and kill it, and with it all that it started, as a phone would, a few steps into a run."""
    print("$ prge " + " ".join(map(str, words)), file=output, flush=True)
    journal = run / "journal.jsonl"
    with started(*words, stdout=output) as process:
        while process.poll() is None:
            if journal.is_file() and journal.read_bytes().count(b'"kind":"step"') >= _STEPS_BEFORE_THE_KILL:
                process.kill()
                break
            time.sleep(0.02)
    if process.returncode != -signal.SIGKILL:
        raise PrgeError(f"`prge {words[0]}` ended with code {process.returncode}", remedy="see above")
    print(f"killed process {process.pid} and its children with SIGKILL", file=output)


def _table(figures: dict[str, Any], out: Path) -> str:
    lines = [
        "",
        f"before    {figures['accuracy_before']:>47.1%} of test rows right",
        "",
        f"{'':<10}{'steps':>9}{'rows':>10}{'seconds':>10}{'memory':>10}{'accuracy':>10}",
    ]
    for name, found in figures["methods"].items():
        memory = f"{found['peak_mb']:.0f} MB"
        lines.append(
            f"{name:<10}{found['steps']:>9,}{found['rows']:>10,}{found['seconds']:>10.1f}{memory:>10}"
            f"{found['accuracy']:>10.1%}"
        )
    for before, after in zip(*figures["samples"].values(), strict=True):
        lines += [
            "",
            before["prompt"],
            f"  before: {before['text'].strip()}",
            f"  after:  {after['text'].strip()}",
        ]
    shares = " -> ".join(f"{share:.0%}" for share in figures["corrected"].values())
    lines += [
        "",
        f"{CORRECTED} answers corrected; of {ASKED} others as the user wants them: {shares}",
        "",
        f"seconds in all: {figures['seconds']:.1f}",
        f"report:   {out / 'report.html'}",
        f"report:   {out / 'tuned' / 'report.html'}",
        f"adapter:  {out / 'tuned' / 'adapter'} (loads with peft.PeftModel.from_pretrained)",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
