"""A job of everyday use on SmolLM2-135M-Instruct: notes in people's words become JSON that an app can read.

tune on 200 notes -> ask the model before and after about 40 notes that it never saw -> a table, side by side
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import smollm2

from prge.cli.subprocesses import output_of, read_json, run_verb
from prge.data.readers.files import read_rows

NOTES = Path(__file__).with_name("notes_data")
TRAIN, DEV, TEST = (NOTES / f"{part}.jsonl" for part in ("train", "dev", "test"))
# Given, since a search takes as long again; the loss on development rows falls until the last step.
TRAINING = "--epochs 3 --batch-size 8 --learning-rate 0.002".split()
SHOWN, MOST_TOKENS = 3, 48


def notes_demo(out: Path) -> dict[str, Any]:
    """Tune SmolLM2 and ask it before and after; returns the figures of the table.

    Raises:
        PrgeError: a step failed; its own message is on the terminal.
    """
    model = smollm2.ensure_model_file()
    out.mkdir(parents=True, exist_ok=True)
    begin, tuned = time.perf_counter(), out / "tuned"
    print("\n1/2  tune it with one command", flush=True)
    rows = ["--data", TRAIN, "--dev", DEV, "--test", TEST]
    run_verb("tune", "--model", model, *rows, *TRAINING, "--out", tuned, "--json", out / "tuned.json")
    print("\n2/2  ask it about notes that it never saw, before and after", flush=True)
    chats = [row.fields["messages"] for row in read_rows(TEST)]
    return {
        "notes": [chat[0]["content"] for chat in chats],
        "wanted": [chat[1]["content"] for chat in chats],
        "answers": _answers(tuned),
        "train": read_json(tuned / "run" / "run.json")["train"],
        "seconds": time.perf_counter() - begin,
    }


def _answers(tuned: Path) -> dict[str, list[str]]:
    """The answers to the test notes by the model as it was, and by the tuned one."""
    words = ["generate", tuned, "--adapter", "base", f"tuned={tuned}", "--data", TEST]
    output = output_of(*words, "--json", "--max-tokens", MOST_TOKENS)
    records = [json.loads(line) for line in output.splitlines()]
    return {
        name: [str(each["text"]).strip() for each in records if each["adapter"] == adapter]
        for name, adapter in (("before", "base"), ("after", "tuned"))
    }


def notes_table(figures: dict[str, Any], out: Path) -> str:
    """The figures as text: some notes with both answers, the share of right answers, seconds and memory."""
    before, after = figures["answers"]["before"], figures["answers"]["after"]
    lines = [""]
    for note, old, new in list(zip(figures["notes"], before, after, strict=True))[:SHOWN]:
        lines += [note, f"  before: {_one_line(old)}", f"  after:  {_one_line(new)}", ""]
    shares = [_share(each, figures["wanted"]) for each in (before, after)]
    train = figures["train"]
    return "\n".join(
        [
            *lines,
            f"of {len(before)} new notes right to the letter: {shares[0]:.0%} -> {shares[1]:.0%}",
            f"training: {train['steps']:,} steps, {train['rows']:,} rows, {train['seconds']:.0f} s, "
            f"{(train['memory']['peak_bytes'] or 0) / 1e6:.0f} MB",
            f"seconds in all: {figures['seconds']:.1f}",
            f"report:   {out / 'tuned' / 'report.html'}",
            f"talk to it: prge chat {out / 'tuned'}",
        ]
    )


def _one_line(answer: str, most: int = 100) -> str:
    text = " ".join(answer.split())
    return text if len(text) <= most else text[: most - 3] + "..."


def _share(answers: list[str], wanted: list[str]) -> float:
    return sum(answer == right for answer, right in zip(answers, wanted, strict=True)) / len(wanted)
