"""The files that are sent for a run on a phone, and the settings of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from device_runner.android import remote
from device_runner.android.command import REMOTE
from device_runner.android.jobs import JobFlags
from device_runner.android.push import send_rows
from device_runner.android.remote import RemoteCall
from device_runner.session.settings import RunSettings


class Phone:
    """Records the files that are sent to it."""

    def __init__(self) -> None:
        self.sent: list[Path] = []
        self.contents: list[bytes] = []

    def send_file(self, path: Path) -> str:
        self.sent.append(path)
        self.contents.append(path.read_bytes())
        return f"/phone/data/{path.name}"

    def path(self, *parts: str) -> str:
        return "/".join(["/phone", *parts])

    def require_this_driver(self) -> None:
        """Accept any driver."""


def test_rows_task_and_prompts_are_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote, "send_bundle", lambda phone, folder: "/phone/bundle")
    files = {name: tmp_path / name for name in ("train.jsonl", "dev.jsonl", "task.yaml", "prompts.txt")}
    for path in files.values():
        path.touch()
    phone: Any = Phone()
    monkeypatch.setattr(JobFlags, "phone", lambda self: phone)
    settings = RunSettings(
        bundle=tmp_path, train=files["train.jsonl"], dev=files["dev.jsonl"], task=str(files["task.yaml"]),
        sample_prompts=files["prompts.txt"], out=Path("mine"), steps=7,
    )  # fmt: skip
    call = RemoteCall(REMOTE["run"], JobFlags(out=Path("mine")), settings, {"out": "/phone/runs/mine"})
    sent = call.send_inputs()
    assert set(phone.sent) == set(files.values())
    assert {
        name: str(sent[name]) for name in ("bundle", "train", "dev", "task", "sample_prompts", "out")
    } == {
        "bundle": "/phone/bundle",
        "train": "/phone/data/train.jsonl",
        "dev": "/phone/data/dev.jsonl",
        "task": "/phone/data/task.yaml",
        "sample_prompts": "/phone/data/prompts.txt",
        "out": "/phone/runs/mine",
    }
    assert sent["steps"] == 7 and sent["adapter"] is None


def test_files_of_a_folder_are_sent(tmp_path: Path) -> None:
    for name in ("train.jsonl", "valid.csv"):
        (tmp_path / name).touch()
    phone: Any = Phone()
    assert send_rows(phone, tmp_path, "train") == Path("/phone/data/train.jsonl")
    assert send_rows(phone, tmp_path, "dev") == Path("/phone/data/valid.csv")


def test_files_that_only_a_library_can_read_are_sent_as_jsonl(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "train.parquet")
    phone: Any = Phone()
    assert send_rows(phone, tmp_path / "train.parquet", "train") == Path("/phone/data/train.jsonl")
    assert phone.contents == [b'{"text": "one"}\n{"text": "two"}\n']
