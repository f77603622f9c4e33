"""Inputs of attacks: tiny models, their bundles of every type, rows and a task, created once and reused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from child import Child, run_prge

from prge.cli.subprocesses import output_of
from prge.data.readers.feedback import AnswerRecord
from tests.gguf_files import write_gguf
from tests.tiny_models import make_model, make_tokenizer, save_model

REPOSITORY = Path(__file__).resolve().parents[2]
CHAT = "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}"
TASK = """name: letters
template: "{text} ?"
label_words: {0: " no", 1: " yes"}
columns: {label: label}
metric: accuracy
"""

Value = TypeVar("Value")
# The model that is a single file.
GGUF = "gguf"
STEPS, MIN_STEPS = 12, 4
_SHAPES = ["--rank", "2", "--sequence-length", "32"]
# Model and arguments of the export, by type of bundle.
BUNDLE_TYPES: dict[str, tuple[str, list[str]]] = {
    "decoder": ("llama", _SHAPES),
    "quantized": ("llama", [*_SHAPES, "--quantize", "8da4w", "--roles", "jvp", "backward"]),
    "upper": ("llama", [*_SHAPES, "--adapt-layers", "top:1"]),
    "encoder": ("bert", ["--sequence-length", "16"]),
}


@dataclass(frozen=True)
class Workshop:
    """Folder of models, bundles, rows and a task.

    It holds `models/`, `bundles/`, `train.jsonl`, `dev.jsonl`, `chat.jsonl`, `feedback.jsonl`, `task.yaml`.
    """

    folder: Path

    def bundle(self, bundle_type: str) -> Path:
        """Return the bundle of a type."""
        return self.folder / "bundles" / bundle_type

    def model(self, name: str) -> Path:
        """Return a model that bundles were exported from."""
        return self.folder / "models" / name

    @property
    def bundle_types(self) -> list[str]:
        """Types of bundles that exist."""
        return [bundle_type for bundle_type in BUNDLE_TYPES if self.bundle(bundle_type).is_dir()]

    @property
    def rows(self) -> list[str]:
        """Arguments for the rows of a run."""
        train, dev, task = (self.folder / name for name in ("train.jsonl", "dev.jsonl", "task.yaml"))
        return ["--train", str(train), "--dev", str(dev), "--task", str(task)]


@dataclass
class Bench:
    """Undamaged originals of runs for one process, and cached results."""

    workshop: Workshop
    folder: Path
    results: dict[Any, Any] = field(default_factory=dict)
    closers: list[Callable[[], object]] = field(default_factory=list)

    def once(self, key: object, make: Callable[[], Value]) -> Value:
        """Return the value of a key, which the first call makes."""
        if key not in self.results:
            self.results[key] = make()
        value: Value = self.results[key]
        return value

    def close(self) -> None:
        """Close everything that was started."""
        for close in self.closers:
            close()

    def original(self, bundle_type: str, name: str) -> Path:
        """Return the original of an item that a case copies: a bundle, run, adapter, model, rows or task."""
        if name == "bundle":
            return self.workshop.bundle(bundle_type)
        if name == "gguf":
            return self.workshop.model(GGUF)
        if name == "model":
            return self.workshop.model(BUNDLE_TYPES[bundle_type][0])
        if name.endswith((".jsonl", ".yaml")):
            return self.workshop.folder / name
        if not (self.folder / bundle_type / "unfinished").is_dir():
            self._prepare(bundle_type)
        return self.folder / bundle_type / ("finished/final" if name == "adapter" else name)

    def _prepare(self, bundle_type: str) -> None:
        """Create a finished run, and the same run killed before its end."""
        out = self.folder / bundle_type
        shutil.rmtree(out, ignore_errors=True)
        arguments = [
            "run",
            "--bundle",
            self.workshop.bundle(bundle_type),
            *self.workshop.rows,
            "--select",
            "loss",
        ]
        arguments += ["--keep-gradients"]
        arguments += ["--trunk-cache-bytes", 1 << 20] if bundle_type == "upper" else []
        arguments += [
            "--steps",
            STEPS,
            "--eval-steps",
            4,
            "--save-steps",
            3,
            "--learning-rate",
            "0.01",
        ]
        arguments += ["--divergence-ratio", 1000, "--threads", 1, "--quiet", "--out"]
        result = run_prge([*arguments, out / "finished"])
        if result.code:
            raise RuntimeError(result.output)
        for _ in range(50):
            shutil.rmtree(out / "unfinished", ignore_errors=True)
            child = Child([*arguments, out / "unfinished"])
            while count_steps(out / "unfinished") < MIN_STEPS and not child.has_ended(0.0005):
                continue
            child.signal(signal.SIGKILL)
            child.wait()
            if MIN_STEPS <= count_steps(out / "unfinished") < STEPS:
                return
        raise RuntimeError("no run could be killed before its end")


def mount_disk(folder: Path, size: int) -> bool:
    """Mount a tmpfs of `size` bytes at a folder; return False without permission."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


def enlarge_disk(folder: Path) -> None:
    """Enlarge a mounted tmpfs to 64 MiB."""
    subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)


def unmount_disk(folder: Path) -> None:
    """Unmount a tmpfs, even while a process has files open there."""
    subprocess.run(["umount", "-l", str(folder)], check=True)


def count_steps(run: Path) -> int:
    """Return the number of steps in a run's journal."""
    journal = run / "journal.jsonl"
    return journal.read_bytes().count(b'{"type":"step"') if journal.is_file() else 0


def open_workshop(folder: Path, bundle_types: Sequence[str] = tuple(BUNDLE_TYPES)) -> Workshop:
    """Create what doesn't exist yet; raises PrgeError if an export fails."""
    workshop = Workshop(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder)
    for name in ("llama", "bert"):
        if not workshop.model(name).is_dir() and any(
            BUNDLE_TYPES[bundle_type][0] == name for bundle_type in bundle_types
        ):
            save_model(workshop.model(name), name)
            (workshop.model(name) / "chat_template.jinja").write_text(CHAT)
    if not workshop.model(GGUF).is_dir():
        workshop.model(GGUF).mkdir(parents=True)
        write_gguf(
            workshop.model(GGUF) / "tiny.gguf", make_model("llama"), make_tokenizer(), "Q8_0", template=CHAT
        )
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda bundle_type: _export(workshop, bundle_type), bundle_types))
    return workshop


def write_rows(folder: Path) -> None:
    """Write labelled rows, their task, conversations and feedback."""
    words = ["aa", "bb", "cc", "dd"]
    rows = [{"text": f"{words[i % 4]} {words[i // 4 % 4]}", "label": i % 4 // 2} for i in range(40)]
    for name, part in (("train.jsonl", rows[:24]), ("dev.jsonl", rows[24:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    conversations = [
        [{"role": "user", "content": "aa"}, {"role": "assistant", "content": word}] for word in words
    ]
    (folder / "chat.jsonl").write_text(
        "".join(json.dumps({"messages": each}) + "\n" for each in conversations)
    )
    (folder / "task.yaml").write_text(TASK)
    answers = [AnswerRecord(str(n), "m", "", {"prompt": word}, " no", {}) for n, word in enumerate(words)]
    feedback = [answer.to_feedback(correction=" yes") for answer in answers]
    (folder / "feedback.jsonl").write_text("".join(json.dumps(row) + "\n" for row in feedback))


def _export(workshop: Workshop, bundle_type: str) -> None:
    if not workshop.bundle(bundle_type).is_dir():
        model, arguments = BUNDLE_TYPES[bundle_type]
        paths = ["--model", workshop.model(model), "--out", workshop.bundle(bundle_type)]
        output_of("export", *paths, "--target-modules", "all-linear", *arguments)
