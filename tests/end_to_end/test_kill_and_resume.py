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

from device_runner.engines.packed_files import cache_files
from prge.formats.journal import Journal
from tests.compilers import needs_compiler
from tests.tiers import second_tier
from tests.workshop import bits

KILLS = {
    "bundle tangent": 20,
    "bundle antithetic": 6,
    "bundle fzoo": 6,
    "bundle exact": 10,
    "upper exact": 10,
    "lora exact": 6,
    "lora tangent": 4,
    "chunked exact": 6,
    "chunked tangent": 4,
    "bundle es": 6,
    "bundle grpo": 6,
}

# Instants of an exact run, and the ones (from 0) before which successive processes are killed.
INSTANTS = {
    "backward": (0, 1, 2, 3, 4, 5, 7, 8),
    "backward_saved": (0, 3, 5, 8, 13),
    "loading": (1, 3, 4, 5),
    "released": (1, 4, 6, 9, 14, 3, 8),
    "packing": (1, 1, 2, 3),
    "packed": (0, 1, 2, 1, 3),
    "dropping gradients": (0, 0, 1, 0),
}

_START = """
import os, random, shutil, signal, sys, time
from pathlib import Path
import torch
from executorch.extension.pybindings import _C
from device_runner.run import run
from device_runner.session.settings import RunSettings

workshop, bundle, folder = map(Path, sys.argv[1:4])
settings = dict(
    bundle=bundle, train=workshop / "train.jsonl", dev=workshop / "dev.jsonl",
    task=str(workshop / "task.yaml"), learning_rate=0.02, threads=1, quiet=True,
)

def start(before=lambda: None, **changes):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            before()
            run(RunSettings(**{**settings, **changes}))
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    return child

def resumed(out):
    return out if (out / "config.yaml").is_file() else None
"""

BY_CHANCE = (
    _START
    + """
kills = int(sys.argv[4])
settings |= dict(
    steps=60, eval_steps=10, save_steps=7, estimator=sys.argv[5],
    trunk_cache_bytes=1 << 20 if bundle.name == "upper" else 0,
)
if sys.argv[5] == "tangent":
    settings |= dict(sample_prompts=folder / "prompts.txt", sample_every=5)
    (folder / "prompts.txt").write_text("aa bb\\ncc\\n")
if sys.argv[5] in ("es", "grpo"):
    (folder / "reward.py").write_text("def reward(prompt, completion, row): return completion.count('a') / 9")
    settings |= dict(
        steps=24, estimator=None, objective=sys.argv[5], reward=str(folder / "reward.py"), task=None,
        max_completion_length=8,
    )
if sys.argv[5] == "grpo":
    settings |= dict(num_generations=4, num_iterations=3, beta=0.1)
begin = time.perf_counter()
_, status = os.waitpid(start(out=folder / "whole"), 0)
assert status == 0, status
whole = time.perf_counter() - begin

chance = random.Random(0)
killed = 0
out = folder / "killed"
while True:
    child = start(out=out, resume=resumed(out))
    if killed < kills:
        time.sleep(chance.uniform(0, 0.35) * whole)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
            continue
        assert status == 0, status
        # The run ended before the kill: start again until the number of kills is reached.
        shutil.rmtree(out)
        continue
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    break
print(killed)
"""
)

AT_INSTANTS = (
    _START
    + """
from device_runner.engines import packed_files
from device_runner.engines.blocks import Blocks
from device_runner.engines.native.build import library
from device_runner.engines.native.runtime import WeightsFile
from device_runner import run as run_verb
from prge.formats import journal
from prge.training.costs import Budget

# Owner and name of a function, and its calls that matter.
INSTANTS = {
    "backward": (Blocks, "run", lambda self, number, role, *_: role == "backward"),
    "backward_saved": (Blocks, "run", lambda self, number, role, *_: role in ("backward", "backward_saved")),
    "loading": (Blocks, "method", lambda *_: True),
    "released": (WeightsFile, "release_pages", lambda *_: True),
    "packing": (packed_files.PackedFiles, "open", lambda *_: True),
    "packed": (packed_files, "write_file", lambda *_: True),
    "dropping gradients": (journal, "write_file", lambda *_: True),
}
owner, name, is_meant = INSTANTS[sys.argv[4]]
counts = list(map(int, sys.argv[5:]))
loaded = [path.stat().st_size for path in (bundle / "weights").iterdir()]
settings |= dict(
    steps=9, eval_steps=4, save_steps=100, estimator="exact", engine="native", memory=1 << 40
)
# Memory for residuals of successive processes: none, for all, for the head alone, for some blocks.
BUDGETS = [sum(loaded) + left for left in (0, 1 << 30, 10_000, 60_000, 100_000)]
os.environ["PRGE_NATIVE_LIBRARY"] = str(library())

def prepare(out, count, budget):
    run_verb.step_budget = lambda *_, **__: Budget(limit=1 << 40, loaded=budget, predicted=1 << 40)
    os.environ["XDG_CACHE_HOME"] = str(out.with_name(f"cache of {out.name}"))
    function, left = getattr(owner, name), count

    def counted(*arguments):
        nonlocal left
        if left is not None and is_meant(*arguments):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    setattr(owner, name, counted)

for out, kills in ((folder / "whole", []), (folder / "killed", counts)):
    for turn, count in enumerate((*kills, None)):
        budget = BUDGETS[turn % len(BUDGETS)] if sys.argv[4] == "backward_saved" else max(loaded)
        child = start(lambda: prepare(out, count, budget), out=out, resume=resumed(out))
        _, status = os.waitpid(child, 0)
        assert status == (0 if count is None else signal.SIGKILL), (count, status)
"""
)


def in_a_parent(script: str, *arguments: object) -> str:
    """Run code in a process that forks the runs, and return its output."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_ended_alike(whole: Path, killed: Path, steps: int) -> None:
    """Check that two runs have the same adapter, journal, checkpoint and metrics."""
    assert bits(killed) == bits(whole)
    newest = sorted((whole / "checkpoints").iterdir())[-1].name
    for name in ("optimizer.safetensors", "state.json", "adapter_model.safetensors"):
        there, here = (folder / "checkpoints" / newest / name for folder in (whole, killed))
        assert here.read_bytes() == there.read_bytes(), name
    assert json.loads((killed / "run.json").read_text())["run"]["status"] == "completed"
    # Every step is in the metrics exactly once.
    records = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["event"] == "step"] == list(range(1, steps + 1))
    assert not [name for name in os.listdir(killed) if "partial" in name]
    with Journal(killed / "journal.jsonl") as journal:
        assert journal.steps == steps


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case", ["bundle tangent", *second_tier(*(case for case in KILLS if case != "bundle tangent"))]
)
def test_a_run_killed_many_times_ends_with_the_same_bits(
    workshop: Path, tmp_path: Path, case: str, request: pytest.FixtureRequest
) -> None:
    name, _, estimator = case.partition(" ")
    bundle = workshop / "bundle" if name == "bundle" else request.getfixturevalue(f"{name}_bundle")
    killed = in_a_parent(BY_CHANCE, workshop, bundle, tmp_path, KILLS[case], estimator)
    assert int(killed) == KILLS[case]
    steps = 24 if estimator in ("es", "grpo") else 60
    assert_ended_alike(tmp_path / "whole", tmp_path / "killed", steps)
    if estimator == "tangent":
        samples = [(tmp_path / name / "samples.jsonl").read_bytes() for name in ("whole", "killed")]
        assert samples[0] == samples[1] and samples[0].count(b"\n") == 2 * (60 // 5 + 1)


def lines_of(folder: Path) -> list[str]:
    """Return the logs of both runs."""
    return [
        line for name in ("whole", "killed") for line in (folder / name / "log.txt").read_text().splitlines()
    ]


@pytest.mark.timeout(600)
@needs_compiler
@pytest.mark.parametrize(
    "instant", ["backward", *second_tier(*(instant for instant in INSTANTS if instant != "backward"))]
)
def test_an_exact_run_killed_between_blocks_ends_with_the_same_bits(
    workshop: Path, tmp_path: Path, instant: str
) -> None:
    """Kill during the backward pass with one block loaded or with another budget each time, while files are
    packed, and before gradients are dropped.
    """
    in_a_parent(AT_INSTANTS, workshop, workshop / "bundle", tmp_path, instant, *INSTANTS[instant])
    assert_ended_alike(tmp_path / "whole", tmp_path / "killed", steps=9)
    assert b'"gradient"' not in (tmp_path / "killed/journal.jsonl").read_bytes()
    output = {line.split("activations: ")[1] for line in lines_of(tmp_path) if "activations: " in line}
    assert (len(output) >= 4) == (instant == "backward_saved")
    caches = [tmp_path / f"cache of {name}/prge/packed" for name in ("whole", "killed")]
    packed = [
        {path.name: path.read_bytes() for path in cache_files(cache) if path.suffix != ".weights"}
        for cache in caches
    ]
    assert packed[0] == packed[1] and len(packed[0]) == 2 * len([*(workshop / "bundle/weights").iterdir()])
