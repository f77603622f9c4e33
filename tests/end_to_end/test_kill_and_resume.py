"""A run killed by SIGKILL at any instant and resumed ends in the same bits as one that was never killed.

A parent process that has imported everything forks the runs, so that every kill costs no second import: real
processes, real signals, the real engine, real files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prge.journal import Journal

KILLS = {
    "bundle tangent": 20,
    "bundle antithetic": 6,
    "bundle one-sided": 6,
    "bundle exact": 10,
    "upper exact": 10,
}

PARENT = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from executorch.extension.pybindings import _C
from device_runner.run import run
from device_runner.session.settings import RunSettings

workshop, bundle, folder, kills = *map(Path, sys.argv[1:4]), int(sys.argv[4])
estimator = sys.argv[5]
settings = dict(
    bundle=bundle, train=workshop / "train.jsonl", dev=workshop / "dev.jsonl",
    task=str(workshop / "task.yaml"), steps=60, evaluate_every=10, checkpoint_every=7, learning_rate=0.02,
    threads=1, quiet=True, estimator=estimator,
    trunk_cache_bytes=1 << 20 if bundle.name == "upper" else 0,
)

def start(**changes):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(RunSettings(**{**settings, **changes}))
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    return child

begin = time.perf_counter()
_, status = os.waitpid(start(out=folder / "whole"), 0)
assert status == 0, status
whole = time.perf_counter() - begin

chance = random.Random(0)
killed = 0
out = folder / "killed"
while True:
    resume = out if (out / "config.yaml").is_file() else None
    child = start(out=out, resume=resume)
    if killed < kills:
        time.sleep(chance.uniform(0, 0.35) * whole)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
            continue
        assert status == 0, status
        # It was done before the kill came: begin again, so that the number of kills is reached.
        import shutil
        shutil.rmtree(out)
        continue
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    break
print(killed)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.export
@pytest.mark.parametrize("kind", KILLS)
def test_killed_many_times_it_ends_in_the_same_bits(
    workshop: Path, upper_bundle: Path, tmp_path: Path, kind: str
) -> None:
    name, _, estimator = kind.partition(" ")
    words = (workshop, workshop / name, tmp_path, KILLS[kind], estimator)
    command = [sys.executable, "-c", PARENT, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == KILLS[kind]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for name in ("final/adapter_model.safetensors", "journal.jsonl"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    newest = sorted((whole / "checkpoints").iterdir())[-1].name
    for name in ("optimizer.safetensors", "state.json", "adapter_model.safetensors"):
        there, here = (folder / "checkpoints" / newest / name for folder in (whole, killed))
        assert here.read_bytes() == there.read_bytes(), name
    assert json.loads((killed / "run.json").read_text())["run"]["status"] == "completed"
    # Every step is in the metrics exactly once.
    steps = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps if record["event"] == "step"] == list(range(1, 61))
    assert not [name for name in os.listdir(killed) if "partial" in name]
    with Journal(killed / "journal.jsonl") as journal:
        assert journal.steps == 60
