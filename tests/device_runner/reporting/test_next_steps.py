"""Commands after a run name paths of this machine, and placeholders for paths of another one."""

from __future__ import annotations

from pathlib import Path

from device_runner.reporting.next_steps import next_steps


def commands(settings: dict[str, object], tmp_path: Path) -> str:
    return "\n".join(step.command for step in next_steps(tmp_path / "run", settings, True, writes=True))


def test_commands_name_bundle_and_task_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").touch()
    text = commands({"bundle": tmp_path, "task": str(tmp_path / "task.yaml")}, tmp_path)
    assert text.count(f"--bundle {tmp_path} ") == 3 and f"--task {tmp_path}/task.yaml" in text


def test_commands_have_placeholders_for_paths_of_a_phone(tmp_path: Path) -> None:
    there = "/data/local/tmp/prge"
    text = commands({"bundle": f"{there}/bundles/1", "task": f"{there}/data/1-task.yaml"}, tmp_path)
    assert text.count("--bundle BUNDLE") == 3 and "--task TASK" in text and there not in text


def test_commands_name_a_task_of_prge(tmp_path: Path) -> None:
    assert "--task sst2" in commands({"bundle": None, "task": "sst2"}, tmp_path)
