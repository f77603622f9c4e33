"""An everyday task on SmolLM2-135M-Instruct: free-text notes become JSON that an app can read.

tune on 200 notes -> ask the model before and after about 40 unseen notes -> a table with both answers
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
# Fixed, since a search takes as long again; the loss on development rows falls until the last step.
TRAINING = "--epochs 3 --batch-size 8 --learning-rate 0.002".split()
SHOWN, MAX_TOKENS = 3, 48


def notes_demo(out: Path) -> dict[str, Any]:
    """Tune SmolLM2, ask it before and after, and return the figures of the table.

    Raises:
        PrgeError: a step failed; its message is on the terminal.
    """
    model = smollm2.ensure_model_file()
    out.mkdir(parents=True, exist_ok=True)
    begin, tuned = time.perf_counter(), out / "tuned"
    print("\n1/2  tune it with one command", flush=True)
    rows = ["--data", TRAIN, "--dev", DEV, "--test", TEST]
    run_verb("tune", "--model", model, *rows, *TRAINING, "--out", tuned, "--json", out / "tuned.json")
    print("\n2/2  ask it about unseen notes, before and after", flush=True)
    chats = [row.fields["messages"] for row in read_rows(TEST)]
    return {
        "notes": [chat[0]["content"] for chat in chats],
        "wanted": [chat[1]["content"] for chat in chats],
        "answers": _answers(tuned),
        "train": read_json(tuned / "run" / "run.json")["train"],
        "seconds": time.perf_counter() - begin,
    }


def _answers(tuned: Path) -> dict[str, list[str]]:
    """Return the answers to the test notes by the original and by the tuned model."""
    arguments = ["generate", tuned, "--adapter", "base", f"tuned={tuned}", "--data", TEST]
    output = output_of(*arguments, "--json", "--max-tokens", MAX_TOKENS)
    records = [json.loads(line) for line in output.splitlines()]
    return {
        name: [str(each["text"]).strip() for each in records if each["adapter"] == adapter]
        for name, adapter in (("before", "base"), ("after", "tuned"))
    }


def notes_table(figures: dict[str, Any], out: Path) -> str:
    """Format the figures: some notes with both answers, the share of right answers, seconds and memory."""
    before, after = figures["answers"]["before"], figures["answers"]["after"]
    lines = [""]
    for note, old, new in list(zip(figures["notes"], before, after, strict=True))[:SHOWN]:
        lines += [note, f"  before: {_one_line(old)}", f"  after:  {_one_line(new)}", ""]
    shares = [_share(each, figures["wanted"]) for each in (before, after)]
    train = figures["train"]
    return "\n".join(
        [
            *lines,
            f"of {len(before)} unseen notes exactly right: {shares[0]:.0%} -> {shares[1]:.0%}",
            f"training: {train['steps']:,} steps, {train['forward_passes']:,} forward passes, "
            f"{train['seconds']:.0f} s, {(train['memory']['peak_bytes'] or 0) / 1e6:.0f} MB",
            f"total seconds: {figures['seconds']:.1f}",
            f"report:   {out / 'tuned' / 'report.html'}",
            f"talk to it: prge chat {out / 'tuned'}",
        ]
    )


def _one_line(answer: str, max_length: int = 100) -> str:
    text = " ".join(answer.split())
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def _share(answers: list[str], wanted: list[str]) -> float:
    return sum(answer == right for answer, right in zip(answers, wanted, strict=True)) / len(wanted)
