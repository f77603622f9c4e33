"""Whatever is wrong, the user learns what happened, what was seen and what to do; code 2, no traceback."""

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

from device_runner.engines.chain_engine import ChainEngine
from prge.cli import main
from prge.files.bundle import file_sha256, manifest_sha256
from prge.files.journal import Journal
from prge.files.signatures import BACK
from tests.tiers import rest
from tests.verbs import REPOSITORY

Run = Callable[..., str]


@pytest.fixture
def fails(run_words: list[object], capsys: pytest.CaptureFixture[str]) -> Run:
    """Call `prge run` with some words changed; answers the message of its failure."""

    def run(*words: object) -> str:
        assert main(["run", *map(str, run_words), *map(str, words)]) == 2
        message = capsys.readouterr().err
        assert message.startswith("prge run: error: ")
        assert "Traceback" not in message
        return message

    return run


@pytest.fixture
def bundle(workshop: Path, tmp_path: Path) -> Path:
    """A copy of the bundle to damage."""
    return Path(shutil.copytree(workshop / "bundle", tmp_path / "bundle"))


def rehash(bundle: Path) -> None:
    """Make the manifest agree with the files, as somebody who means harm would."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        entry["sha256"], entry["bytes"] = file_sha256(bundle / name), (bundle / name).stat().st_size
    manifest["manifest_sha256"] = manifest_sha256(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def flip(path: Path, position: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "bit-flipped": lambda path: flip(path, path.stat().st_size // 2),
}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("programs/block.pte", "missing"),
        ("weights/000.ptd", "bit-flipped"),
        ("manifest.json", "empty"),
        ("tables.safetensors", "truncated"),
        ("adapter/adapter_model.safetensors", "bit-flipped"),
        ("tokenizer/tokenizer.json", "missing"),
    ],
)
def test_damaged_file_of_a_bundle(fails: Run, bundle: Path, name: str, damage: str) -> None:
    DAMAGE[damage](bundle / name)
    message = fails("--bundle", bundle)
    assert Path(name).name in message
    assert "again" in message or "give the folder" in message


def in_a_process(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prge.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)


@pytest.mark.parametrize("kind", ["random", "text", "header kept"])
def test_a_program_that_would_take_the_process_along(
    run_words: list[object], bundle: Path, kind: str
) -> None:
    """Its hashes are right, so only the engine can tell, and it may abort: in a child."""
    program = bundle / "programs/block.pte"
    noise = np.random.default_rng(0).bytes(program.stat().st_size)
    content = {
        "random": noise,
        "text": b"no program " * 1000,
        "header kept": program.read_bytes()[:512] + noise[512:],
    }[kind]
    program.write_bytes(content)
    rehash(bundle)
    done = in_a_process("run", *run_words, "--bundle", bundle)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and "block.pte" in done.stderr


def _adapter(workshop: Path, folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    shutil.copytree(workshop / "bundle/adapter", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    change(config, tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_adapter_with_other_frozen_matrices(fails: Run, workshop: Path, tmp_path: Path) -> None:
    def other(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        name = next(name for name in tensors if "lora_A" in name)
        tensors[name] = tensors[name] + 1

    message = fails("--adapter", _adapter(workshop, tmp_path / "frozen", other))
    assert "differs from the one inside the bundle" in message


def test_tokenizer_of_another_model(fails: Run, bundle: Path) -> None:
    path = bundle / "tokenizer/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: (i + 100_000 if i > 3 else i) for token, i in vocabulary.items()}
    path.write_text(json.dumps(tokenizer))
    rehash(bundle)
    assert "tokenizer" in fails("--bundle", bundle)


ROWS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "no JSON": (b'{"text": "aa", "label": 0}\n{"text": "bb", \n\n[1]\n', ("row 2", "row 4")),
    "no column": (b'{"sentence": "aa", "label": 0}\n', ("'text'", "sentence")),
    "another label": (b'{"text": "aa", "label": 0}\n{"text": "bb", "label": "maybe"}\n', ("row 2", "maybe")),
    "another encoding": ('{"text": "caf\u00e9", "label": 0}\n'.encode("latin-1"), ("UTF-8",)),
    "none": (b"", ("no rows",)),
    "too long": (b'{"text": "aa", "label": 0}\n{"text": "%s", "label": 1}\n' % (b"b" * 99), ("row 2", "32")),
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_cant_be_used(fails: Run, tmp_path: Path, kind: str) -> None:
    content, told = ROWS[kind]
    (tmp_path / "rows.jsonl").write_bytes(content)
    message = fails("--train", tmp_path / "rows.jsonl", "--overflow", "error")
    assert all(part in message for part in told)


def test_every_problem_of_a_settings_file_at_once(fails: Run, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("learnin_rate: 1\nsteps: many\noptimizer: adagrad\n")
    message = fails("--config", tmp_path / "run.yaml", "--colour", "red")
    for part in ("learnin_rate", "learning_rate", "steps", "'many'", "adagrad", "--colour"):
        assert part in message


def test_settings_that_contradict_each_other(fails: Run) -> None:
    message = fails("--estimator", "tangent", "--copies", 2, "--warmup", 99, "--epsilon", 0)
    assert all(part in message for part in ("--copies", "--warmup is 99", "--epsilon is 0"))


def test_loss_that_is_not_finite(run_words: list[object], tmp_path: Path) -> None:
    done = in_a_process("run", *run_words, "--learning-rate", "1e30", "--optimizer", "sgd")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "the loss is" in done.stderr
    assert json.loads((tmp_path / "run/run.json").read_text())["run"]["status"] == "diverged"
    assert list((tmp_path / "run/checkpoints").glob("step-*"))


def test_answers_that_are_no_numbers_are_no_result(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def huge(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors.update(
            {name: array + np.float32(1e38) for name, array in tensors.items() if "lora_B" in name}
        )

    words = [
        "--bundle",
        workshop / "bundle",
        "--data",
        workshop / "dev.jsonl",
        "--task",
        workshop / "task.yaml",
    ]
    adapter = _adapter(workshop, tmp_path / "huge", huge)
    (adapter / "hashes.json").unlink(missing_ok=True)
    assert (
        main(["eval", *map(str, words), "--adapter", str(adapter), "--json", str(tmp_path / "eval.json")])
        == 2
    )
    assert "the loss of these rows is nan" in capsys.readouterr().err
    assert not (tmp_path / "eval.json").exists()


def refused_without_space(limit: int, words: list[object]) -> str:
    """What `prge run` says where a limit on the size of files stands for a full disk."""
    done = subprocess.run(
        [sys.executable, "-m", "prge.cli", "run", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_no_space_left(run_words: list[object], tmp_path: Path) -> None:
    """What was learnt before is kept and goes on."""
    assert "can't be written" in refused_without_space(6000, [*run_words, "--steps", 100])
    again = in_a_process("run", "--resume", tmp_path / "run")
    assert again.returncode == 0, again.stderr


def test_no_space_left_for_the_states_of_an_exact_step(
    run_words: list[object], workshop: Path, tmp_path: Path
) -> None:
    """They lie in a file above `--memory`. The run goes on where there is room for them."""
    largest = max(path.stat().st_size for path in (workshop / "bundle/weights").iterdir())
    words = ["--batch-size", 256, "--memory", largest, "--evaluate-every", 0]
    done = in_a_process("run", *map(str, [*run_words, *words, "--steps", 2, "--quiet"]))
    assert done.returncode == 0, done.stderr
    whole = (tmp_path / "run/final/adapter_model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "run")
    said = refused_without_space(largest, [*run_words, *words, "--steps", 2])
    assert f"{tmp_path / 'run'} can't be written" in said
    assert b'"kind":"step"' not in (tmp_path / "run/journal.jsonl").read_bytes()
    again = in_a_process("run", "--resume", tmp_path / "run")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "run/final/adapter_model.safetensors").read_bytes() == whole


def test_memory_that_no_block_fits_into_begins_no_run(
    fails: Run, run_words: list[object], tmp_path: Path
) -> None:
    message = fails("--memory", 1000)
    assert "--memory is 1000 bytes, the largest block has" in message
    assert not (tmp_path / "run/config.yaml").exists()
    needed = message.split("give at least ")[1].split(",")[0]
    assert main(["run", *map(str, run_words), "--steps", "1", "--memory", needed, "--quiet"]) == 0


def test_a_gradient_that_is_not_finite(
    fails: Run, run_words: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter, the optimizer and the journal stay those of the step before."""
    run, calls = ChainEngine._run, 0

    def broken(self: ChainEngine, number: int, role: str, part: Any) -> Any:
        nonlocal calls
        calls += (number, role) == (1, BACK)
        found = run(self, number, role, part)
        if role == BACK and calls == 6:
            found["slope"][0, 0, 0] = np.inf
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ChainEngine, "_run", broken)
        message = fails("--quiet")
    assert "step 5: the loss is" in message and "derivatives are not finite" in message
    with Journal(tmp_path / "run/journal.jsonl", writable=False) as journal:
        assert journal.steps == 5
    assert main(["run", "--resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert main(["run", *map(str, run_words), "--out", str(tmp_path / "whole"), "--quiet"]) == 0
    for name in ("journal.jsonl", "final/adapter_model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def _full() -> None:
    for number in (1, 2):
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)


def _unread() -> None:
    reading, writing = os.pipe()
    for number in (1, 2):
        os.dup2(writing, number)
    os.close(reading)


@pytest.mark.parametrize(
    "refuse", [lambda: os.closerange(0, 3), _full, _unread], ids=["closed", "full", "unread"]
)
def test_standard_files_that_refuse_end_no_run(
    run_words: list[object], tmp_path: Path, refuse: Callable[[], None]
) -> None:
    command = [sys.executable, "-m", "prge.cli", "run", *map(str, run_words), "--keep-gradients"]
    assert subprocess.run(command, cwd=REPOSITORY, preexec_fn=refuse, check=False).returncode == 0
    assert (tmp_path / "run/final/adapter_model.safetensors").is_file()
    assert in_a_process("replay", tmp_path / "run", "--out", tmp_path / "replayed").returncode == 0


@pytest.mark.parametrize("megabytes", [150, *rest(140, 160, 170)])
def test_memory_that_runs_out_is_said_as_that(run_words: list[object], megabytes: int) -> None:
    """How much is too little depends on the machine; what is said then doesn't."""
    limit = megabytes << 20
    done = subprocess.run(
        [sys.executable, "-m", "prge.cli", "run", *map(str, run_words)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 0 or (done.returncode == 2 and "memory" in done.stderr), done.stderr
    assert "Traceback" not in done.stderr and "damaged" not in done.stderr


@pytest.mark.parametrize("name", ["grün", "-x"])
def test_names_of_folders_that_are_not_plain(run_words: list[object], tmp_path: Path, name: str) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONPATH": str(REPOSITORY)}
    for words in (["run", *map(str, run_words), f"--out={name}"], ["run", "--resume", f"./{name}"]):
        done = subprocess.run(
            [sys.executable, "-m", "prge.cli", *words],
            capture_output=True,
            cwd=tmp_path,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode() == f"{name}/final\n"


@pytest.mark.parametrize("scheme", ["8w", "4w", "int8wo"])
def test_weight_only_quantization_is_refused(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], scheme: str
) -> None:
    words = ["export", "--model", workshop / "model", "--out", tmp_path / "out", "--quantize", scheme]
    assert main([*map(str, words)]) == 2
    assert "drops their scales" in capsys.readouterr().err
