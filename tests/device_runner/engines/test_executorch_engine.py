"""Both engines on a small hand-made program: same numbers, clear refusals, no crash."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prge.bundle import Bundle, file_sha256, manifest_sha256, open_bundle
from prge.contract import AdaptedModule, Contract
from prge.errors import BundleError, EngineError

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from device_runner.engines.choice import Backend  # noqa: E402
from device_runner.engines.executorch_engine import ExecutorchEngine  # noqa: E402
from prge.run_folder import run_lock  # noqa: E402
from tests.compilers import needs_compiler  # noqa: E402

pytestmark = pytest.mark.export
ROOT = Path(__file__).parents[3]
WIDTH, RANK, VOCABULARY = 8, 2, 16
CONTRACT = Contract(
    kind="stack",
    readout="logprobs",
    copies=2,
    batch_size=2,
    sequence_length=6,
    positions=3,
    width=0,
    vocabulary_size=VOCABULARY,
    label_tokens=(),
    modules=(AdaptedModule("head", rank=RANK, in_features=WIDTH, out_features=VOCABULARY),),
)


class Toy(torch.nn.Module):
    """Embedding and one adapted linear layer with the inputs of a P-RGE program."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.copies = copies
        self.embedding = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator))
        self.weight = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator))
        self.lora_a = torch.nn.Parameter(torch.randn(RANK, WIDTH, generator=generator))

    def forward(self, tokens: Any, positions: Any, targets: Any, lora_b: Any) -> Any:
        states = torch.nn.functional.embedding(tokens, self.embedding)
        reduced = torch.nn.functional.linear(states, self.lora_a).reshape(self.copies, -1, RANK)
        logits = torch.nn.functional.linear(states, self.weight)
        logits = logits + torch.bmm(reduced, lora_b).reshape(logits.shape)
        answers = torch.log_softmax(logits, -1)
        answers = answers.gather(1, positions.unsqueeze(-1).expand(-1, -1, VOCABULARY))
        return answers.gather(2, targets.unsqueeze(-1)).squeeze(-1)


def random_inputs(contract: Contract, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    limits = {"tokens": VOCABULARY, "positions": contract.sequence_length, "targets": VOCABULARY}
    return {
        spec.name: generator.integers(0, limits[spec.name], spec.shape)
        if spec.name in limits
        else generator.standard_normal(spec.shape).astype(np.float32)
        for spec in contract.inputs
    }


@lru_cache
def toy_program(contract: Contract, scoring: Contract | None = None) -> bytes:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    exported = {}
    for method, of_method in (("forward", contract), ("score", scoring)):
        if of_method is not None:
            example = tuple(torch.from_numpy(array) for array in random_inputs(of_method).values())
            exported[method] = torch.export.export(Toy(of_method.copies).eval(), example)
    return bytes(
        to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch().buffer
    )


def write_bundle(folder: Path, program: bytes, contract: Contract) -> Bundle:
    """A bundle whose hashes are right whatever the program's bytes are."""
    folder.mkdir(parents=True)
    path = folder / "program.pte"
    path.write_bytes(program)
    manifest: dict[str, Any] = {
        "format": 1,
        "contract": contract.to_json(),
        "files": {"program.pte": {"sha256": file_sha256(path), "bytes": len(program)}},
    }
    manifest["manifest_sha256"] = manifest_sha256(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return open_bundle(folder)


@pytest.fixture(scope="session")
def toy_bytes() -> bytes:
    return toy_program(CONTRACT)


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_compiler)])
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(request.param)


@pytest.fixture
def bundle(tmp_path: Path, toy_bytes: bytes) -> Bundle:
    return write_bundle(tmp_path / "bundle", toy_bytes, CONTRACT)


def expected(inputs: dict[str, np.ndarray], copies: int = 2) -> np.ndarray:
    with torch.no_grad():
        return Toy(copies)(*(torch.from_numpy(array) for array in inputs.values())).numpy()


@pytest.mark.parametrize("check", [True, False])
def test_a_forward_gives_what_torch_gives(backend: Backend, bundle: Bundle, check: bool) -> None:
    engine = backend.engine.load(bundle, check=check)
    assert engine.contract == CONTRACT and engine.threads >= 1
    for seed in range(3):
        inputs = random_inputs(CONTRACT, seed)
        outputs = engine.forward(inputs)
        assert list(outputs) == ["logprobs"]
        assert outputs["logprobs"].dtype == np.float32 and outputs["logprobs"].shape == (4, 3)
        np.testing.assert_allclose(outputs["logprobs"], expected(inputs), atol=1e-5)
    assert engine.calls == 3 and engine.seconds > 0


def test_later_forwards_dont_change_earlier_answers(backend: Backend, bundle: Bundle) -> None:
    engine = backend.engine.load(bundle, check=False)
    first = engine.forward(random_inputs(CONTRACT, 0))["logprobs"]
    kept = first.copy()
    engine.forward(random_inputs(CONTRACT, 1))
    assert np.array_equal(first, kept)


def test_the_same_inputs_give_the_same_bits(backend: Backend, bundle: Bundle) -> None:
    engine = backend.engine.load(bundle, check=False)
    answers = [engine.forward(random_inputs(CONTRACT))["logprobs"].tobytes() for _ in range(3)]
    other = backend.engine.load(bundle, check=True)
    assert {*answers, other.forward(random_inputs(CONTRACT))["logprobs"].tobytes()} == {answers[0]}


def test_what_is_written_to_an_adapter_between_forwards_is_seen(backend: Backend, bundle: Bundle) -> None:
    engine, inputs = backend.engine.load(bundle), random_inputs(CONTRACT)
    engine.forward(inputs)
    inputs["lora_b.head"][:] += 1.0
    assert np.allclose(engine.forward(inputs)["logprobs"], expected(inputs), atol=1e-5)
    others = {**inputs, "lora_b.head": inputs["lora_b.head"] * -0.5}
    assert np.allclose(engine.forward(others)["logprobs"], expected(others), atol=1e-5)
    assert np.allclose(engine.forward(inputs)["logprobs"], expected(inputs), atol=1e-5)


def test_a_read_only_adapter_is_read_at_every_forward(backend: Backend, bundle: Bundle) -> None:
    engine, inputs = backend.engine.load(bundle), random_inputs(CONTRACT)
    written = inputs["lora_b.head"]
    seen = written.view()
    seen.flags.writeable = False
    for _ in range(2):
        written += 1.0
        found = engine.forward({**inputs, "lora_b.head": seen})["logprobs"]
        assert np.allclose(found, expected(inputs), atol=1e-5)


def test_any_order_layout_and_read_only_arrays_are_taken(
    backend: Backend, bundle: Bundle, recwarn: pytest.WarningsRecorder
) -> None:
    engine = backend.engine.load(bundle, check=False)
    inputs = random_inputs(CONTRACT)
    want = engine.forward(inputs)["logprobs"]
    strange = {name: np.asfortranarray(array) for name, array in reversed(inputs.items())}
    strange["tokens"].flags.writeable = False
    assert np.array_equal(engine.forward(strange)["logprobs"], want)
    assert not [warning for warning in recwarn if "writable" in str(warning.message)]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", None, r"tokens is missing.*\n.*int64 \[4, 6\]"),
        ("tokens", np.zeros((4, 6), np.int32), r"tokens is int32 \[4, 6\], must be int64 \[4, 6\]"),
        ("targets", np.zeros((4, 4), np.int64), r"targets is int64 \[4, 4\], must be int64 \[4, 3\]"),
        ("lora_b.head", np.zeros((2, 2, 16)), r"lora_b.head is float64 \[2, 2, 16\], must be float32"),
        ("lora_b.head", np.zeros((1, 2, 16), np.float32), r"must be float32 \[2, 2, 16\]"),
        ("positions", [[0]], r"positions is a list, must be a numpy array"),
        ("tokens", np.full((4, 6), 16), r"tokens holds 16, must be in 0 to 15"),
        ("tokens", np.full((4, 6), -1), r"tokens holds -1, must be in 0 to 15"),
        ("positions", np.full((4, 3), 6), r"positions holds 6, must be in 0 to 5"),
        ("targets", np.full((4, 3), 99), r"targets holds 99, must be in 0 to 15"),
        ("extra", np.zeros(1), r"no input extra"),
    ],
)
def test_a_wrong_input_is_named(
    backend: Backend, bundle: Bundle, name: str, value: Any, message: str
) -> None:
    engine = backend.engine.load(bundle, check=False)
    good = random_inputs(CONTRACT)
    bad = {**good, name: value}
    if value is None:
        del bad[name]
    with pytest.raises(EngineError, match=message):
        engine.forward(bad)
    np.testing.assert_allclose(engine.forward(good)["logprobs"], expected(good), atol=1e-5)
    assert engine.calls == 1


def test_a_failing_kernel_is_told_in_words(
    backend: Backend, bundle: Bundle, capfd: pytest.CaptureFixture[str]
) -> None:
    wide = replace(CONTRACT, vocabulary_size=1000)
    engine = backend.engine.load(Bundle(bundle.folder, wide, bundle.manifest), check=False)
    with pytest.raises(
        EngineError, match=r"an argument is invalid \(ExecuTorch 0x12\); the engine says: .*999"
    ):
        engine.forward({**random_inputs(CONTRACT), "tokens": np.full((4, 6), 999)})
    engine.forward(random_inputs(CONTRACT))
    assert "cpp:" not in capfd.readouterr().err


def test_loading_is_silent(backend: Backend, bundle: Bundle) -> None:
    code = textwrap.dedent(f"""
        from prge.bundle import open_bundle
        from device_runner.engines.choice import Backend
        print(Backend({backend.name!r}).engine.load(open_bundle({str(bundle.folder)!r}), threads=1).threads)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_the_driver_imports_no_compiler_stack(bundle: Bundle) -> None:
    code = textwrap.dedent(f"""
        import sys
        from prge.bundle import open_bundle
        import device_runner.engines.executorch_engine as module
        assert "torch" not in sys.modules
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        bundle = open_bundle({str(bundle.folder)!r})
        import numpy as np
        inputs = {{spec.name: np.zeros(spec.shape, spec.dtype) for spec in bundle.contract.inputs}}
        module.ExecutorchEngine.load(bundle).forward(inputs)
        unwanted = "executorch.exir executorch.runtime transformers torch._dynamo torchao sympy".split()
        assert not set(unwanted) & set(sys.modules), set(unwanted) & set(sys.modules)
    """)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_threads_are_one_number_for_all_engines_in_use(backend: Backend, bundle: Bundle) -> None:
    code = textwrap.dedent(f"""
        from prge.bundle import open_bundle
        from prge.errors import EngineError
        from device_runner.engines.choice import Backend
        import numpy as np
        backend = Backend({backend.name!r})
        bundle = open_bundle({str(bundle.folder)!r})
        inputs = {{spec.name: np.zeros(spec.shape, spec.dtype) for spec in bundle.contract.inputs}}
        first = backend.engine.load(bundle, threads=3)
        first.forward(inputs)
        second = backend.engine.load(bundle, threads=3)
        third = backend.engine.load(bundle)
        assert first.threads == second.threads == third.threads == 3
        for engine in (first, second, third):
            engine.forward(inputs)
        try:
            backend.engine.load(bundle, threads=1)
        except EngineError as error:
            print(error)
        del first, second, third, engine
        for threads in (1, 4, 2) * 20:
            engine = backend.engine.load(bundle, threads=threads, check=threads == 4)
            assert engine.threads == threads
            engine.forward(inputs)
            del engine
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "loaded with 3 threads, this one asks for 1" in done.stdout


@pytest.mark.parametrize("threads", [0, -2])
def test_a_number_of_threads_that_cant_be_is_refused(backend: Backend, bundle: Bundle, threads: int) -> None:
    with pytest.raises(EngineError, match="at least 1"):
        backend.engine.load(bundle, threads=threads, check=False)


def test_each_method_of_a_program_is_loaded_by_itself(backend: Backend, tmp_path: Path) -> None:
    """In a process of its own: what checks a method must come before an engine runs."""
    scoring = replace(CONTRACT, copies=1, batch_size=5)
    folder = write_bundle(tmp_path / "bundle", toy_program(CONTRACT, scoring), CONTRACT).folder
    inputs = {"step": random_inputs(CONTRACT), "score": random_inputs(scoring)}
    for name, arrays in inputs.items():
        np.savez(tmp_path / name, **arrays)
    code = textwrap.dedent(f"""
        from dataclasses import replace
        from pathlib import Path
        import numpy as np
        from device_runner.engines.choice import Backend
        from device_runner.engines.programs import open_programs
        from prge.bundle import open_bundle
        from prge.errors import BundleError
        backend = Backend({backend.name!r})
        bundle = open_bundle({str(folder)!r})
        bundle = replace(bundle, scoring=replace(bundle.contract, copies=1, batch_size=5))
        folder = Path({str(tmp_path)!r})
        try:
            wrong = replace(bundle, scoring=replace(bundle.scoring, batch_size=6))
            open_programs(wrong, engine=backend.name).score.forward({{}})
        except BundleError as error:
            print(error)
        for keep in (False, True):
            programs = open_programs(bundle, 2, keep, backend.name)
            assert programs.threads == 2
            for number, name in enumerate(("step", "score", "score", "step")):
                outputs = getattr(programs, name).forward(dict(np.load(folder / f"{{name}}.npz")))
                np.save(folder / f"{{name}}{{keep}}{{number}}.npy", outputs["logprobs"])
            del programs
        engine = backend.engine.load(bundle, method=bundle.score_method)
        assert engine.contract == bundle.scoring
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "input tokens is int64 [5, 6], not int64 [6, 6]" in done.stdout
    assert done.stderr == ""
    for keep in (False, True):
        for number, name in enumerate(("step", "score", "score", "step")):
            found = np.load(tmp_path / f"{name}{keep}{number}.npy")
            want = expected(inputs[name], CONTRACT.copies if name == "step" else 1)
            np.testing.assert_allclose(found, want, atol=1e-5)


def refuse(backend: Backend, folder: Path, program: bytes, match: str | None = None) -> BundleError:
    with pytest.raises(BundleError, match=match) as caught:
        backend.engine.load(write_bundle(folder, program, CONTRACT))
    return caught.value


def test_random_bytes_dont_end_the_driver(backend: Backend, tmp_path: Path) -> None:
    for seed in range(4):
        noise = np.random.default_rng(seed).bytes(5000)
        error = refuse(backend, tmp_path / str(seed), noise)
        assert error.remedy


def test_an_abort_of_the_engine_names_its_signal(tmp_path: Path, toy_bytes: bytes) -> None:
    # The engine logs the file's identifier, and the log's bytes must be UTF-8 or the process ends.
    damaged = toy_bytes[:4] + b"\xff\xfe\xfd\xfc" + toy_bytes[8:]
    refuse(
        Backend("torch"), tmp_path / "bundle", damaged, match=r"the engine aborts on this program \(SIGABRT\)"
    )


@pytest.mark.parametrize(
    ("keep", "match"),
    [
        (0.0, "bytes|damaged|invalid"),
        (0.001, None),
        (0.5, "damaged or of another format"),
        (0.99, "damaged or of"),
    ],
)
def test_a_truncated_program_is_refused(
    backend: Backend, tmp_path: Path, toy_bytes: bytes, keep: float, match: str | None
) -> None:
    refuse(backend, tmp_path / "bundle", toy_bytes[: int(len(toy_bytes) * keep)], match)


def test_zeros_are_refused(backend: Backend, tmp_path: Path) -> None:
    refuse(
        backend, tmp_path / "bundle", bytes(5000), match=r"damaged or of another format \(ExecuTorch 0x23\)"
    )


def test_flipped_bytes_never_end_the_driver(backend: Backend, tmp_path: Path, toy_bytes: bytes) -> None:
    """Whatever the engine makes of damaged tables, the driver gets an error or an engine."""
    generator = np.random.default_rng(3)
    refused = 0
    for case in range(25):
        damaged = bytearray(toy_bytes)
        for place in generator.integers(40, 2500, 3):
            damaged[place] ^= int(generator.integers(1, 256))
        try:
            backend.engine.load(write_bundle(tmp_path / str(case), bytes(damaged), CONTRACT))
        except (BundleError, EngineError):
            refused += 1
    assert refused > 5


def test_a_program_of_another_bundle_is_refused(backend: Backend, tmp_path: Path, toy_bytes: bytes) -> None:
    other = replace(CONTRACT, copies=4, positions=2)
    for check in (True, False):
        wrong = write_bundle(tmp_path / str(check), toy_bytes, other)
        with pytest.raises(BundleError) as caught:
            backend.engine.load(wrong, check=check)
        assert "input tokens is int64 [4, 6], not int64 [8, 6]" in str(caught.value)
        assert "input lora_b.head is float32 [2, 2, 16], not float32 [4, 2, 16]" in str(caught.value)
        assert "output logprobs is float32 [4, 3], not float32 [8, 2]" in str(caught.value)


def test_another_number_of_modules_is_refused(backend: Backend, tmp_path: Path, toy_bytes: bytes) -> None:
    other = replace(CONTRACT, modules=(*CONTRACT.modules, AdaptedModule("more", 2, 8, 16)))
    with pytest.raises(BundleError, match="it has 4 inputs, the contract 5"):
        backend.engine.load(write_bundle(tmp_path / "bundle", toy_bytes, other))


def test_a_program_that_is_gone_is_told(backend: Backend, bundle: Bundle) -> None:
    shutil.move(bundle.program, bundle.folder / "elsewhere")
    with pytest.raises(
        BundleError, match=r"can't be opened \(ExecuTorch 0x22\); the engine says: .*No such file"
    ):
        backend.engine.load(bundle)


def test_a_child_that_hangs_is_ended(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    import device_runner.engines.child_check
    import device_runner.engines.executorch_engine as module

    monkeypatch.setattr(device_runner.engines.child_check, "CHECK_SECONDS", 0.2)
    monkeypatch.setattr(module, "Program", lambda *_: __import__("time").sleep(60))
    with pytest.raises(BundleError, match="hangs"):
        ExecutorchEngine.load(bundle)


def test_a_child_holds_no_lock_of_a_parent_that_was_killed(bundle: Bundle, tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import os, signal, time
        from pathlib import Path
        import device_runner.engines.executorch_engine as module
        from prge.run_folder import run_lock
        from prge.bundle import open_bundle
        bundle = open_bundle({str(bundle.folder)!r})
        def open_program(*_):
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(20)
        module.Program = open_program
        with run_lock(Path({str(tmp_path / "run")!r})):
            module.ExecutorchEngine.check_method(bundle, "forward")
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with run_lock(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()


def test_an_interrupt_while_the_runtime_is_imported_is_no_missing_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import device_runner.engines.torch_runtime as module

    def interrupted(name: str) -> None:
        # As an extension module of pybind11 answers.
        raise ImportError("initialization failed") from KeyboardInterrupt()

    monkeypatch.setattr(module.importlib, "import_module", interrupted)
    module.runtime.cache_clear()
    try:
        with pytest.raises(KeyboardInterrupt):
            module.runtime()
    finally:
        module.runtime.cache_clear()


def test_a_missing_runtime_is_told(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    import device_runner.engines.torch_runtime as module

    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(module.importlib, "import_module", absent)
    module.runtime.cache_clear()
    try:
        with pytest.raises(EngineError, match=r"can't be imported.*\n.*pip install executorch"):
            ExecutorchEngine.load(bundle)
    finally:
        module.runtime.cache_clear()
