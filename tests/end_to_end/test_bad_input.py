"""Bad input ends with exit code 2 and a message of cause, value and remedy, never a traceback."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from prge.cli.main import main
from tests.bundles import rehash
from tests.tiers import second_tier
from tests.verbs import REPOSITORY, prge

Run = Callable[..., str]


@pytest.fixture
def fails(run_arguments: list[object], capsys: pytest.CaptureFixture[str]) -> Run:
    """Call `prge run` with some arguments changed, and return its error message."""

    def run(*arguments: object) -> str:
        assert main(["run", *map(str, run_arguments), *map(str, arguments)]) == 2
        message = capsys.readouterr().err
        assert "Traceback" not in message
        # A note on repeated flags may precede the error.
        notes, error, text = message.rpartition("prge run: error: ")
        assert error and all("the last one counts" in line for line in notes.splitlines())
        return error + text

    return run


@pytest.fixture
def bundle(workshop: Path, tmp_path: Path) -> Path:
    """Return a copy of the bundle to damage."""
    return Path(shutil.copytree(workshop / "bundle", tmp_path / "bundle"))


@pytest.mark.parametrize("verb", ["run", "eval"])
def test_a_flipped_bit_of_a_bundle_is_reported(
    fails: Run, bundle: Path, workshop: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    path = bundle / "weights/000.ptd"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    arguments = ["--data", str(workshop / "dev.jsonl"), "--task", str(workshop / "task.yaml")]
    if verb == "run":
        message = fails("--bundle", bundle)
    else:
        assert main(["eval", "--bundle", str(bundle), *arguments]) == 2
        message = capsys.readouterr().err
    assert message.startswith(f"prge {verb}: error: ") and "Traceback" not in message
    assert "000.ptd is not the file" in message and "again" in message


@pytest.mark.parametrize("variant", ["random", "text", "header kept"])
def test_a_program_that_could_crash_the_process_is_reported(fails: Run, bundle: Path, variant: str) -> None:
    """The hashes are valid, so only the engine detects the damage, and it may abort: it runs in a child."""
    program = bundle / "programs/block.pte"
    noise = np.random.default_rng(0).bytes(program.stat().st_size)
    content = {
        "random": noise,
        "text": b"no program " * 1000,
        "header kept": program.read_bytes()[:512] + noise[512:],
    }[variant]
    program.write_bytes(content)
    rehash(bundle)
    assert "block.pte" in fails("--bundle", bundle)


def _adapter(workshop: Path, folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    shutil.copytree(workshop / "bundle/adapter", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    change(config, tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_with_other_frozen_matrices_is_refused(fails: Run, workshop: Path, tmp_path: Path) -> None:
    def other(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        name = next(name for name in tensors if "lora_A" in name)
        tensors[name] = tensors[name] + 1

    message = fails("--adapter", _adapter(workshop, tmp_path / "frozen", other))
    assert "differs from the one inside the bundle" in message


def test_unusable_rows_are_refused(fails: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "aa", "label": 0}\n{"text": "bb", \n\n[1]\n')
    message = fails("--train", tmp_path / "rows.jsonl")
    assert "row 2" in message and "row 4" in message


def test_all_problems_of_a_settings_file_are_reported_at_once(fails: Run, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("learnin_rate: 1\nsteps: many\noptimizer: adagrad\n")
    message = fails("--config", tmp_path / "run.yaml", "--colour", "red")
    for part in ("learnin_rate", "learning_rate", "steps", "'many'", "adagrad", "--colour"):
        assert part in message


def test_contradictory_settings_are_refused(fails: Run) -> None:
    message = fails("--estimator", "exact", "--queries", 2, "--warmup-steps", 99, "--epsilon", 0)
    assert all(part in message for part in ("--queries", "--warmup-steps is 99", "--epsilon is 0"))


def test_a_loss_that_is_not_finite_ends_a_run(fails: Run, tmp_path: Path) -> None:
    assert "the loss is" in fails("--learning-rate", "1e30", "--optimizer", "sgd", "--quiet")
    assert json.loads((tmp_path / "run/run.json").read_text())["run"]["status"] == "diverged"
    assert list((tmp_path / "run/checkpoints").glob("step-*"))


def test_an_evaluation_with_outputs_that_are_not_finite_is_an_error(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def huge(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors.update(
            {name: array + np.float32(1e38) for name, array in tensors.items() if "lora_B" in name}
        )

    adapter = _adapter(workshop, tmp_path / "huge", huge)
    (adapter / "hashes.json").unlink(missing_ok=True)
    rows = ["--data", workshop / "dev.jsonl", "--task", workshop / "task.yaml"]
    arguments = [
        "--bundle", workshop / "bundle", "--adapter", adapter, *rows, "--json", tmp_path / "eval.json",
    ]  # fmt: skip
    assert main(["eval", *map(str, arguments)]) == 2
    assert "The loss of these rows is nan" in capsys.readouterr().err
    assert not (tmp_path / "eval.json").exists()


def run_in_child(*arguments: object, limit: int = resource.RLIM_INFINITY, code: int = 0) -> str:
    """Run `prge run` in its own process; a limit on file sizes simulates a full disk."""
    done = subprocess.run(
        [sys.executable, "-m", "prge.cli.main", "run", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_full_disk_ends_a_run_with_a_message(run_arguments: list[object], tmp_path: Path) -> None:
    """A full disk keeps earlier progress, and the run can be resumed."""
    assert "can't be written" in run_in_child(*run_arguments, "--steps", 100, limit=6000, code=2)
    prge("run", "--resume", tmp_path / "run")


@pytest.mark.whole
def test_a_disk_without_room_for_activation_checkpoints_ends_a_run(workshop: Path, tmp_path: Path) -> None:
    """Hidden states beyond `--memory` go to a file; the run continues if there is room for it."""
    # KTO compares the examples of a step, so all of their activations are kept at once.
    rated = [{"prompt": "aa aa ?", "completion": " yes", "label": number % 2 == 0} for number in range(24)]
    (tmp_path / "rated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rated))
    arguments = [
        "--bundle", workshop / "bundle", "--train", tmp_path / "rated.jsonl", "--objective", "kto",
        "--out", tmp_path / "run", "--batch-size", 1024, "--steps", 2, "--learning-rate", 0.01,
    ]  # fmt: skip
    # The process of the tests needs more memory than one that runs a single verb.
    output_of_refusal = run_in_child(*arguments, "--memory", 1, code=2)
    arguments += ["--memory", output_of_refusal.split("needs at least ")[1].split("\n")[0].replace(" ", "")]
    run_in_child(*arguments)
    whole = (tmp_path / "run/final/adapter_model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "run")
    largest = max(path.stat().st_size for path in (workshop / "bundle/weights").iterdir())
    output = run_in_child(*arguments, limit=largest, code=2)
    assert f"{tmp_path / 'run'} can't be written" in output
    assert b'"type":"step"' not in (tmp_path / "run/journal.jsonl").read_bytes()
    run_in_child("--resume", tmp_path / "run")
    assert (tmp_path / "run/final/adapter_model.safetensors").read_bytes() == whole


def test_memory_that_no_block_fits_into_is_refused(
    fails: Run, run_arguments: list[object], tmp_path: Path
) -> None:
    message = fails("--memory", 1000)
    assert "--memory 1000 bytes is too little:" in message
    assert not (tmp_path / "run").exists()
    needed = message.split("needs at least ")[1].split("\n")[0].replace(" ", "").replace(",", "")
    assert main(["run", *map(str, run_arguments), "--steps", "1", "--memory", needed, "--quiet"]) == 0


def test_closed_standard_streams_do_not_end_a_run(run_arguments: list[object], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prge.cli.main", "run", *map(str, run_arguments), "--keep-gradients"]
    closed = subprocess.run(command, cwd=REPOSITORY, preexec_fn=lambda: os.closerange(0, 3), check=False)
    assert closed.returncode == 0
    prge("replay", tmp_path / "run", "--out", tmp_path / "replayed")


@pytest.mark.parametrize("megabytes", [150, *second_tier(140, 160, 170)])
def test_running_out_of_memory_is_reported_as_such(run_arguments: list[object], megabytes: int) -> None:
    """Python, numpy and the engine need more address space than this; where it runs out differs."""
    limit = megabytes << 20
    done = subprocess.run(
        [sys.executable, "-m", "prge.cli.main", "run", *map(str, run_arguments)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 2 and "here is not enough memory" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "damaged" not in done.stderr


def test_a_folder_name_beyond_ascii_is_accepted(run_arguments: list[object], tmp_path: Path) -> None:
    environment, name = {**os.environ, "LC_ALL": "C", "PYTHONPATH": str(REPOSITORY)}, "grün"
    for arguments in (["run", *map(str, run_arguments), f"--out={name}"], ["run", "--resume", f"./{name}"]):
        done = subprocess.run(
            [sys.executable, "-m", "prge.cli.main", *arguments],
            capture_output=True,
            cwd=tmp_path,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode() == f"{name}/final\n"
