"""The whole workflow on an included tiny model, with one command for each step.

tune, killed before its end -> resume -> two more estimators -> write answers -> correct 40 answers
-> learn from a reward alone -> a table and a chart

With --model smollm2, a pretrained model learns an everyday task (notes_demo.py).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
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
EXPORT = "--target-modules o_proj down_proj --init random --roles forward jvp backward prefill decode".split()
# These use the bundle of `prge tune`, whose own run has exact gradients.
METHODS = {"p-rge": "antithetic", "tangent": "tangent"}
FORWARD = """--queries 8 --batch-size 2 --steps 200 --learning-rate 0.03
    --lr-scheduler-type cosine --eval-steps 100""".split()
# Candidates are only compared. To write the right one, the model trains on it as text, including its end.
WRITING = """--estimator exact --steps 300 --learning-rate 0.01 --eval-steps 0 --sample-every 0
    --batch-size 4 --optimizer adam --lr-scheduler-type cosine""".split()
# A user with other preferences corrects some answers; answers to other texts are compared before and after.
BETTER = {"terrible": "awful", "great": "lovely"}
CORRECTED, COMPARED = 40, 100
CORRECTING = """--estimator exact --epochs 20 --learning-rate 0.01 --eval-steps 0 --batch-size 4""".split()
# Rows teach two words for each mood; one row in four has the word that a reward later asks for.
RARER, ONE_IN = {"terrible": "sad", "great": "happy"}, 4
TWO_WORDS = """--estimator exact --steps 150 --learning-rate 0.01 --eval-steps 0 --sample-every 0
    --batch-size 4 --optimizer adam --lr-scheduler-type cosine""".split()
REWARD = "rewards: [{rule: match, column: wanted}]\n"
REWARDED = """--objective es --queries 8 --batch-size 4 --steps 24 --learning-rate 0.03
    --max-completion-length 4 --dev-limit 50 --eval-steps 12""".split()
_STEPS_BEFORE_THE_KILL = 40


def main() -> int:
    """Run every step in a folder; print accuracy, forward passes, seconds and memory of every method."""
    parser = argparse.ArgumentParser(prog="demo.sh", description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="folder for all results; default: demo-output or demo-smollm2"
    )
    parser.add_argument(
        "--model",
        choices=["embedded", "smollm2"],
        default="embedded",
        help="embedded: the tiny Llama of the repository; smollm2: SmolLM2-135M-Instruct (downloads 98 MB)",
    )
    settings = parser.parse_args()
    out = settings.out or Path("demo-output" if settings.model == "embedded" else "demo-smollm2")
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
    """Run every step and return the figures of the table.

    Raises:
        PrgeError: a step failed; its message is on the terminal.
    """
    out.mkdir(parents=True, exist_ok=True)
    begin, tuned = time.perf_counter(), out / "tuned"
    task = ["--task", TASK]
    print("\n1/6  tune it with one command; the run is killed and resumed", flush=True)
    rows = ["--data", TRAIN, "--dev", DEV, "--test", TEST, *task]
    run_and_kill(tuned / "run", "tune", "--model", MODEL, *EXPORT, *rows, "--out", tuned)
    run_verb("tune", "--resume", tuned, "--json", out / "tuned.json")
    figures_of_tune = read_json(out / "tuned.json")
    print("\n2/6  train it twice more on the same bundle, with forward passes only", flush=True)
    methods = {}
    for name, estimator in METHODS.items():
        data = ["--bundle", tuned / "bundle", "--train", TRAIN, "--dev", DEV, *task, "--out", out / name]
        run_verb("run", *data, "--estimator", estimator, *FORWARD)
        score = out / f"{name}.json"
        run_verb("eval", tuned / "bundle", "--data", TEST, *task, "--adapter", out / name, "--json", score)
        methods[name] = _figures(out / name, read_json(score))
    methods["exact"] = _figures(tuned / "run", figures_of_tune["score_after"])
    print("\n3/6  train it to write its answer, and compare before and after", flush=True)
    samples = _compare_writing(out, tuned / "bundle")
    print(f"\n4/6  correct {CORRECTED} of its answers, and train on the corrections", flush=True)
    corrected = _train_on_corrections(out, tuned / "bundle")
    print("\n5/6  learn from a reward alone: a rule asks for the rarer of two words", flush=True)
    rewarded = learn_from_reward(out, tuned / "bundle")
    print("\n6/6  draw the curves", flush=True)
    run_verb("report", *(out / name for name in METHODS), tuned / "run", "--out", out / "report.html")
    return {
        "accuracy_before": figures_of_tune["score_before"]["accuracy"],
        "methods": methods,
        "samples": samples,
        "corrected": corrected,
        "rewarded": rewarded,
        "seconds": time.perf_counter() - begin,
    }


def _figures(run: Path, score: dict[str, Any]) -> dict[str, Any]:
    """Return the cost of a finished run and the score of its adapter."""
    train = read_json(run / "run.json")["train"]
    return {
        "accuracy": score["accuracy"],
        "peak_mb": (train["memory"]["peak_bytes"] or 0) / 1e6,
        **{name: train[name] for name in ("forward_passes", "seconds", "steps")},
    }


def _compare_writing(out: Path, bundle: Path) -> dict[str, Any]:
    """Train the model to write answers; return samples for an unseen text of each class, before and after."""
    task = load_task(str(TASK))
    rows = [row.fields for row in read_rows(TRAIN)]
    answers = [
        {"prompt": task.prompt(row), "completion": task.candidates(row)[task.label(row)]} for row in rows
    ]
    unseen = {task.label(row.fields): row.fields for row in read_rows(TEST)}
    prompts = [{"prompt": task.prompt(row)} for row in unseen.values()]
    for name, lines in (("answers", answers), ("prompts", prompts)):
        _write_rows(out / f"{name}.jsonl", lines)
    data = ["--train", out / "answers.jsonl", "--sample-prompts", out / "prompts.jsonl"]
    run_verb("run", "--bundle", bundle, *data, *WRITING, "--out", out / "writing")
    samples: dict[str, Any] = read_json(out / "writing" / "run.json")["train"]["samples"]
    return samples


def _train_on_corrections(out: Path, bundle: Path) -> dict[str, float]:
    """Train on corrections; return the share of wanted answers to other texts, before and after."""
    task, feedback = load_task(str(TASK)), out / "feedback.jsonl"
    rows_to_correct = read_rows(TRAIN)[:CORRECTED]
    for row, answer in zip(rows_to_correct, _answers(out, bundle, "writing", rows_to_correct), strict=True):
        prompt = {"prompt": task.prompt(row.fields)}
        record = AnswerRecord(f"answer-{row.number}", "writing", "", prompt, answer, {"temperature": 0})
        append_feedback(feedback, [record.to_feedback(correction=_wanted_answer(row))])
    data = ["--bundle", bundle, "--adapter", out / "writing", "--train", feedback]
    run_verb("run", *data, *CORRECTING, "--out", out / "corrected")
    unseen_rows = read_rows(TEST)[:COMPARED]
    shares = {}
    for name, adapter in (("before", "writing"), ("after", "corrected")):
        answers = _answers(out, bundle, adapter, unseen_rows)
        right = [
            answer.strip() == _wanted_answer(row) for row, answer in zip(unseen_rows, answers, strict=True)
        ]
        shares[name] = sum(right) / len(right)
    return shares


def learn_from_reward(out: Path, bundle: Path) -> dict[str, float]:
    """Teach the model two words for each mood, and then the rarer one by a reward, without answers.

    Returns the share of development prompts that it answers with that word, before and after.
    """
    train, dev = _moods(TRAIN), _moods(DEV)
    answers = [
        {"prompt": prompt, "completion": f" {word if number % ONE_IN else RARER[word]}"}
        for number, (prompt, word) in enumerate(train)
    ]
    _write_rows(out / "two-words.jsonl", answers)
    for name, rows in (("train", train), ("dev", dev)):
        wanted = [{"prompt": prompt, "wanted": RARER[word]} for prompt, word in rows]
        _write_rows(out / f"wanted-{name}.jsonl", wanted)
    answers_data = ["--train", out / "two-words.jsonl", "--out", out / "two-words"]
    run_verb("run", "--bundle", bundle, *answers_data, *TWO_WORDS)
    (out / "reward.yaml").write_text(REWARD, encoding="utf-8")
    prompts_data = ["--train", out / "wanted-train.jsonl", "--dev", out / "wanted-dev.jsonl"]
    start = ["--bundle", bundle, "--adapter", out / "two-words", "--reward", out / "reward.yaml"]
    run_verb("run", *start, *prompts_data, *REWARDED, "--out", out / "rewarded")
    evaluations = read_json(out / "rewarded" / "run.json")["train"]
    return {"before": evaluations["before"]["solved"], "after": evaluations["best"]["solved"]}


def _moods(path: Path) -> list[tuple[str, str]]:
    """Return the prompts of the task's rows, and the words for their moods."""
    task = load_task(str(TASK))
    rows = [row.fields for row in read_rows(path)]
    return [(task.prompt(row), task.candidates(row)[task.label(row)].strip()) for row in rows]


def _wanted_answer(row: Row) -> str:
    """Return the answer that a user prefers for a text."""
    task = load_task(str(TASK))
    return BETTER[task.candidates(row.fields)[task.label(row.fields)].strip()]


def _answers(out: Path, bundle: Path, adapter: str, rows: Sequence[Row]) -> list[str]:
    """Return the answers of an adapter to texts."""
    task, prompts = load_task(str(TASK)), out / "unseen-prompts.jsonl"
    _write_rows(prompts, [{"prompt": task.prompt(row.fields)} for row in rows])
    arguments = ["generate", "--bundle", bundle, "--adapter", out / adapter, "--data", prompts]
    output = output_of(*arguments, "--json", "--max-tokens", 6)
    return [str(json.loads(line)["text"]) for line in output.splitlines()]


def _write_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_and_kill(run: Path, *arguments: object, output: TextIO = sys.stdout) -> None:
    """Start a verb and kill it with its children a few steps into a run, as a phone would."""
    print("$ prge " + " ".join(map(str, arguments)), file=output, flush=True)
    journal = run / "journal.jsonl"
    with started(*arguments, stdout=output) as process:
        while process.poll() is None:
            if journal.is_file() and journal.read_bytes().count(b'"type":"step"') >= _STEPS_BEFORE_THE_KILL:
                process.kill()
                break
            time.sleep(0.02)
    if process.returncode != -signal.SIGKILL:
        raise PrgeError(f"`prge {arguments[0]}` ended with code {process.returncode}", remedy="see above")
    print(f"killed process {process.pid} and its children with SIGKILL", file=output)


def _table(figures: dict[str, Any], out: Path) -> str:
    lines = [
        "",
        f"before    {figures['accuracy_before']:>47.1%} of test rows correct",
        "",
        f"{'':<10}{'steps':>9}{'passes':>10}{'seconds':>10}{'memory':>10}{'accuracy':>10}",
    ]
    for name, method in figures["methods"].items():
        memory = f"{method['peak_mb']:.0f} MB"
        lines.append(
            f"{name:<10}{method['steps']:>9,}{method['forward_passes']:>10,}{method['seconds']:>10.1f}"
            f"{memory:>10}{method['accuracy']:>10.1%}"
        )
    for before, after in zip(*figures["samples"].values(), strict=True):
        lines += [
            "",
            before["prompt"],
            f"  before: {before['text'].strip()}",
            f"  after:  {after['text'].strip()}",
        ]
    shares = " -> ".join(f"{share:.0%}" for share in figures["corrected"].values())
    solved = " -> ".join(f"{share:.0%}" for share in figures["rewarded"].values())
    lines += [
        "",
        f"{CORRECTED} answers corrected; wanted answers among {COMPARED} others: {shares}",
        f"reward alone: {solved} of development prompts solved",
        "",
        f"total seconds: {figures['seconds']:.1f}",
        f"report:   {out / 'report.html'}",
        f"report:   {out / 'tuned' / 'report.html'}",
        f"adapter:  {out / 'tuned' / 'adapter'} (loads with peft.PeftModel.from_pretrained)",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
