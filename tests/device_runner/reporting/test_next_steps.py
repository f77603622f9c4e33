"""What one can type after a run: paths of this machine, and words for those of another one."""

from __future__ import annotations

from pathlib import Path

from device_runner.reporting.next_steps import next_steps


def commands(settings: dict[str, object], tmp_path: Path) -> str:
    return "\n".join(step.command for step in next_steps(tmp_path / "run", settings, True, writes=True))


def test_bundle_and_task_of_this_machine_are_named(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").touch()
    told = commands({"bundle": tmp_path, "task": str(tmp_path / "task.yaml")}, tmp_path)
    assert told.count(f"--bundle {tmp_path} ") == 3 and f"--task {tmp_path}/task.yaml" in told


def test_those_of_a_phone_are_the_users_to_fill_in(tmp_path: Path) -> None:
    there = "/data/local/tmp/prge"
    told = commands({"bundle": f"{there}/bundles/1", "task": f"{there}/data/1-task.yaml"}, tmp_path)
    assert told.count("--bundle BUNDLE") == 3 and "--task TASK" in told and there not in told


def test_a_task_has_a_name_on_every_machine(tmp_path: Path) -> None:
    assert "--task sst2" in commands({"bundle": None, "task": "sst2"}, tmp_path)
