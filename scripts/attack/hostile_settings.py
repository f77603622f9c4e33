"""Run folders of strangers whose settings name files of this user, which must not be read or written."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from random import Random

import yaml
from child import Child
from damaged_files import LIMITS
from outcome import Case, Findings, Verdict, judge
from tables import random_entry
from workshop import Bench


def attack_with_settings(bench: Bench, random: Random, folder: Path) -> Findings:
    """Read a stranger's run folder, whose settings name a file of this user, with a verb."""
    private, run = folder / "private", folder / "run"
    private.mkdir()
    shutil.copytree(bench.original("decoder", random.choice(["finished", "unfinished"])), run)
    settings = yaml.safe_load((run / "config.yaml").read_bytes())
    name = random.choice(["train", "dev", "task", "bundle", "adapter", "sample_prompts", "heads_of", "out"])
    target = {
        "task": bench.workshop.folder / "task.yaml",
        "bundle": bench.workshop.bundle("decoder") / "manifest.json",
        "adapter": bench.workshop.bundle("decoder") / "adapter" / "adapter_config.json",
    }.get(name, bench.workshop.folder / "train.jsonl")
    secret = Path(shutil.copy(target, private))
    target_path = private if name in ("bundle", "adapter", "out") else secret
    (run / "link").symlink_to(target_path)
    mutation, path = random_entry(
        random,
        {
            "absolute": target_path,
            "relative": Path("..", target_path.relative_to(folder)),
            "through the folder": run / ".." / target_path.relative_to(folder),
            "a link": run / "link",
            "of the process": Path("/proc/self/cwd", "..", target_path.relative_to(folder)),
        },
    )
    settings[name] = [str(path)] if name in ("train", "dev") else str(path)
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    verb = random.choice(["resume", "resume", "replay", "report", "eval"])
    if verb == "resume":
        arguments: list[object] = ["run", "--resume", run]
    elif verb == "eval":
        data = ["--data", bench.workshop.folder / "dev.jsonl", "--task", bench.workshop.folder / "task.yaml"]
        arguments = ["eval", "--bundle", bench.workshop.bundle("decoder"), *data, "--adapter", run]
    else:
        arguments = [verb, run, "--out", folder / "new"]
    # The access time is so old that even with relatime, the next read updates it.
    os.utime(secret, (1, 1))
    before = sorted(private.iterdir())
    result = Child(arguments, LIMITS, run).wait()
    verdict = judge(result) or Verdict.ACCEPTED
    if secret.stat().st_atime != 1 or sorted(private.iterdir()) != before:
        verdict = Verdict.FOLLOWED
    return [Case.of(f"{verb}: {name} is {mutation}", verdict, result)], Counter()
