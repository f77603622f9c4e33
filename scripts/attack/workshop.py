"""What is attacked: tiny models, their bundles of every kind, rows and a task; made once and reused."""

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

from child import Child, prge_ends

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

Made = TypeVar("Made")
# The model that is one file.
GGUF = "gguf"
STEPS, LEAST_STEPS = 12, 4
_SHAPES = ["--rank", "2", "--sequence-length", "32"]
# Model and words of the export, by kind of bundle.
KINDS: dict[str, tuple[str, list[str]]] = {
    "decoder": ("llama", _SHAPES),
    "quantized": ("llama", [*_SHAPES, "--quantize", "8da4w", "--roles", "jvp", "backward"]),
    "upper": ("llama", [*_SHAPES, "--adapt-layers", "top:1"]),
    "encoder": ("bert", ["--sequence-length", "16"]),
}


@dataclass(frozen=True)
class Workshop:
    """A folder with `models/`, `bundles/`, `train.jsonl`, `dev.jsonl`, `chat.jsonl`, `feedback.jsonl`
    and `task.yaml`."""

    folder: Path

    def bundle(self, kind: str) -> Path:
        """The bundle of a kind."""
        return self.folder / "bundles" / kind

    def model(self, name: str) -> Path:
        """The model that bundles were exported from."""
        return self.folder / "models" / name

    @property
    def kinds(self) -> list[str]:
        """Kinds of bundle that there are."""
        return [kind for kind in KINDS if self.bundle(kind).is_dir()]

    @property
    def rows(self) -> list[str]:
        """Words for the rows of a run."""
        train, dev, task = (self.folder / name for name in ("train.jsonl", "dev.jsonl", "task.yaml"))
        return ["--train", str(train), "--dev", str(dev), "--task", str(task)]


@dataclass
class Bench:
    """Undamaged originals of runs for one process, and what was found of them."""

    workshop: Workshop
    folder: Path
    results: dict[Any, Any] = field(default_factory=dict)
    closers: list[Callable[[], object]] = field(default_factory=list)

    def once(self, key: object, make: Callable[[], Made]) -> Made:
        """What was made under that key, made unless it was before."""
        if key not in self.results:
            self.results[key] = make()
        made: Made = self.results[key]
        return made

    def close(self) -> None:
        """End what was started for it."""
        for close in self.closers:
            close()

    def original(self, kind: str, name: str) -> Path:
        """The `bundle`, `finished` or `unfinished` run, `adapter`, model, rows or task that a case copies."""
        if name == "bundle":
            return self.workshop.bundle(kind)
        if name == "gguf":
            return self.workshop.model(GGUF)
        if name == "model":
            return self.workshop.model(KINDS[kind][0])
        if name.endswith((".jsonl", ".yaml")):
            return self.workshop.folder / name
        if not (self.folder / kind / "unfinished").is_dir():
            self._prepare(kind)
        return self.folder / kind / ("finished/final" if name == "adapter" else name)

    def _prepare(self, kind: str) -> None:
        """A finished run, and the same one killed on its way."""
        out = self.folder / kind
        shutil.rmtree(out, ignore_errors=True)
        words = ["run", "--bundle", self.workshop.bundle(kind), *self.workshop.rows, "--select", "loss"]
        words += ["--keep-gradients"]
        words += ["--trunk-cache-bytes", 1 << 20] if kind == "upper" else []
        words += ["--steps", STEPS, "--evaluate-every", 4, "--checkpoint-every", 3, "--learning-rate", "0.01"]
        words += ["--divergence-ratio", 1000, "--threads", 1, "--quiet", "--out"]
        ended = prge_ends([*words, out / "finished"])
        if ended.code:
            raise RuntimeError(ended.output)
        for _ in range(50):
            shutil.rmtree(out / "unfinished", ignore_errors=True)
            child = Child([*words, out / "unfinished"])
            while steps_of(out / "unfinished") < LEAST_STEPS and not child.has_ended(0.0005):
                continue
            child.signal(signal.SIGKILL)
            child.wait()
            if LEAST_STEPS <= steps_of(out / "unfinished") < STEPS:
                return
        raise RuntimeError("no run could be killed on its way")


def mount_disk(folder: Path, size: int) -> bool:
    """Mount a tmpfs of so many bytes at a folder; False where that isn't allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


def enlarge_disk(folder: Path) -> None:
    """Give a mounted tmpfs 64 MiB."""
    subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)


def unmount_disk(folder: Path) -> None:
    """Unmount it, even while a process has files open there."""
    subprocess.run(["umount", "-l", str(folder)], check=True)


def steps_of(run: Path) -> int:
    """Steps in a run's journal."""
    journal = run / "journal.jsonl"
    return journal.read_bytes().count(b'{"kind":"step"') if journal.is_file() else 0


def open_workshop(folder: Path, kinds: Sequence[str] = tuple(KINDS)) -> Workshop:
    """Make what isn't there yet; raises PrgeError if an export fails."""
    workshop = Workshop(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder)
    for name in ("llama", "bert"):
        if not workshop.model(name).is_dir() and any(KINDS[kind][0] == name for kind in kinds):
            save_model(workshop.model(name), name)
            (workshop.model(name) / "chat_template.jinja").write_text(CHAT)
    if not workshop.model(GGUF).is_dir():
        workshop.model(GGUF).mkdir(parents=True)
        write_gguf(
            workshop.model(GGUF) / "tiny.gguf", make_model("llama"), make_tokenizer(), "Q8_0", template=CHAT
        )
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda kind: _export(workshop, kind), kinds))
    return workshop


def write_rows(folder: Path) -> None:
    """Rows of labelled texts, their task, conversations, and feedback."""
    words = ["aa", "bb", "cc", "dd"]
    rows = [{"text": f"{words[i % 4]} {words[i // 4 % 4]}", "label": i % 4 // 2} for i in range(40)]
    for name, part in (("train.jsonl", rows[:24]), ("dev.jsonl", rows[24:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    asked = [[{"role": "user", "content": "aa"}, {"role": "assistant", "content": word}] for word in words]
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in asked))
    (folder / "task.yaml").write_text(TASK)
    answers = [AnswerRecord(str(n), "m", "", {"prompt": word}, " no", {}) for n, word in enumerate(words)]
    judged = [answer.to_feedback(correction=" yes") for answer in answers]
    (folder / "feedback.jsonl").write_text("".join(json.dumps(row) + "\n" for row in judged))


def _export(workshop: Workshop, kind: str) -> None:
    if not workshop.bundle(kind).is_dir():
        model, words = KINDS[kind]
        where = ["--model", workshop.model(model), "--out", workshop.bundle(kind)]
        output_of("export", *where, "--target-modules", "all-linear", *words)
