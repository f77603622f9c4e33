"""Damaged files of a chain are reported before a step, and only files of the manifest are used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from device_runner.engines import packed_files
from prge.errors import BundleError, PrgeError
from prge.formats.bundle import TABLES, open_bundle
from prge.formats.signatures import BACKWARD, FORWARD
from prge.model_spec import LARGEST_SIZE
from tests.bundles import read_manifest, rehash, write_manifest
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import POSITIONS, bits, call_of, computed, opened
from tests.refusals import raises

pytestmark = needs_compiler

BLOCK, OTHER, EMBEDDING, HEAD = (f"weights/{name}.ptd" for name in ("000", "001", "embedding", "head-00"))
PROGRAM = "programs/block.pte"
ENGINES = ["native", "torch"]
# Possible messages of the engine about a file that isn't the program's.
LOADING = ("program-refused", "program-of-other-version", "program-aborts")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/prge/packed"


@pytest.fixture(autouse=True)
def native_engine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the native engine once for all tests."""
    from device_runner.engines.native import runtime

    runtime.prepare()


@pytest.fixture
def folder(make_chain: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a copy of a decoder's bundle to damage."""
    return Path(shutil.copytree(make_chain("llama") / "bundle", tmp_path / "bundle"))


def exchange(folder: Path, one: str, other: str) -> None:
    first, second = (folder / one).read_bytes(), (folder / other).read_bytes()
    (folder / one).write_bytes(second)
    (folder / other).write_bytes(first)


def flip(path: Path, share: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * share)] ^= 1
    path.write_bytes(content)


def answer(folder: Path, engine: str = "native") -> bytes:
    """Return the outputs of a fixed call."""
    bundle = open_bundle(folder)
    return opened(bundle, FORWARD, engine).engine.forward(call_of(bundle.chain.model, 32)).tobytes()


def gradient(folder: Path) -> bytes:
    """Return outputs and gradient of a fixed call."""
    bundle = open_bundle(folder)
    return b"".join(bits(computed(opened(bundle, BACKWARD).engine, BACKWARD, call_of(bundle.chain.model, 2))))


def refused(folder: Path, *codes: str, containing: str, engine: str = "native") -> None:
    with raises(BundleError, *codes, containing=containing) as error:
        answer(folder, engine)
    assert error.value.remedy


# Files that differ from the manifest


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", [BLOCK, EMBEDDING, HEAD])
def test_a_changed_weights_file_is_detected_with_and_without_a_packed_file(
    folder: Path, engine: str, name: str
) -> None:
    """The engine maps packed weights and reads the others from the weights file."""
    before, whole = answer(folder, engine), (folder / name).read_bytes()
    for share in (0.3, 0.9):
        flip(folder / name, share)
        refused(folder, "bundle-file-hash", containing=Path(name).name, engine=engine)
        (folder / name).write_bytes(whole)
    assert answer(folder, engine) == before


def test_a_weights_file_that_was_compared_is_not_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = answer(folder)
    monkeypatch.setattr(packed_files, "file_sha256", lambda path: pytest.fail(f"{path} was read"))
    assert answer(folder) == before
    monkeypatch.undo()


# Bundles with correct hashes


def test_blocks_of_one_type_in_another_order_are_another_model(folder: Path) -> None:
    """Only the hashes differ, and a run compares the manifest's hash."""
    before, identity = answer(folder), open_bundle(folder).sha256
    exchange(folder, BLOCK, OTHER)
    rehash(folder)
    assert answer(folder) != before and open_bundle(folder).sha256 != identity


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("other", [HEAD, EMBEDDING, PROGRAM, TABLES])
def test_a_weights_file_of_another_type_is_refused(folder: Path, engine: str, other: str) -> None:
    shutil.copy(folder / other, folder / BLOCK)
    rehash(folder)
    refused(folder, *LOADING, containing="000.ptd", engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["programs/head.pte", "programs/embedding.pte"])
def test_a_program_of_another_type_is_refused(folder: Path, engine: str, name: str) -> None:
    shutil.copy(folder / name, folder / PROGRAM)
    rehash(folder)
    refused(folder, "program-of-other-signature", containing="block.pte", engine=engine)


def test_a_program_that_lacks_a_method_is_refused(folder: Path) -> None:
    shutil.copy(folder / "programs/embedding.pte", folder / "programs/head.pte")
    rehash(folder)
    refused(folder, "program-of-other-signature", containing="jvp")


def change(folder: Path, edit: Callable[[Any], object]) -> None:
    manifest = read_manifest(folder)
    edit(manifest["chain"])
    write_manifest(folder, manifest)


def exchange_saved(program: dict[str, Any]) -> None:
    """Exchange the names of two residuals of different widths."""
    names = program["methods"]["forward_save"]["outputs"]
    names[1:] = reversed(names[1:])


def forget(method: dict[str, Any], direction: str, name: str) -> None:
    """Remove an input or output by name."""
    position = method[f"{direction}s"].index(name)
    for listed in (f"{direction}s", f"{direction}_specs"):
        method.get(listed, [])[position : position + 1] = []


def forget_saved(program: dict[str, Any]) -> None:
    """Remove a residual from outputs and inputs."""
    name = program["methods"]["forward_save"]["outputs"][-1]
    forget(program["methods"]["forward_save"], "output", name)
    forget(program["methods"]["backward_saved"], "input", name)


def without_specs(chain: dict[str, Any]) -> None:
    """Return a manifest without specs, as in earlier versions."""
    for program in chain["programs"]:
        for method in program["methods"].values():
            del method["input_specs"], method["output_specs"]


def test_a_manifest_has_specs_of_all_methods_and_a_manifest_without_specs_opens(folder: Path) -> None:
    chain = open_bundle(folder).chain
    assert all(method.has_specs for program in chain.programs for method in program.methods.values())
    before, learned = answer(folder), gradient(folder)
    change(folder, without_specs)
    assert not open_bundle(folder).chain.programs[0].methods[FORWARD].has_specs
    assert answer(folder) == before == answer(folder, "torch") and gradient(folder) == learned


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(
    ("edit", "value"),
    [
        (lambda c: c["bounds"].update(copies=9), "int64 [9, 4, 16]"),
        (lambda c: c["bounds"].update(states=64), "float32 [1, 64, 64]"),
        (lambda c: c["blocks"][1]["modules"].reverse(), "float32 [8, 2,"),
        (lambda c: c["modules"][0].update(rank=3), "float32 [8, 3, 64]"),
        (lambda c: c["blocks"][1]["tables"].reverse(), "table.0 of forward is float32 [1, 16, 16]"),
        (lambda c: forget(c["programs"][1]["methods"]["forward"], "input", "lora_b.1"), "forward"),
        (lambda c: exchange_saved(c["programs"][1]), "backward_saved"),
        (lambda c: forget_saved(c["programs"][1]), "9 outputs"),
    ],
)
def test_a_manifest_with_shapes_that_differ_from_the_programs_is_refused(
    folder: Path, edit: Callable[[Any], object], value: str, older: bool
) -> None:
    if older:
        change(folder, without_specs)
    change(folder, edit)
    refused(folder, "program-of-other-signature", containing=value)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "spec",
    [
        "int64 [8, 4, 16, 64]",
        "float32 [8, 4, 16, 32]",
        "float32 [8, 4, 16, 64, 1]",
    ],
)
def test_specs_that_differ_from_the_programs_are_refused(folder: Path, engine: str, spec: str) -> None:
    def change_spec(chain: dict[str, Any]) -> None:
        chain["programs"][1]["methods"]["forward"]["input_specs"][0] = spec

    change(folder, change_spec)
    refused(folder, "program-of-other-signature", containing=spec, engine=engine)


def shards(chain: dict[str, Any], count: int) -> None:
    """Give a chain's head this many shards, repeating the first ones if necessary."""
    blocks = chain["blocks"]
    end = len(blocks) - 4
    chain["blocks"] = blocks[:end] + [blocks[end + number % 4] for number in range(count)]


@pytest.mark.parametrize(
    ("count", "code", "value"),
    [
        (5, "chain-not-runnable", "5"),
        (3, "chain-not-runnable", "3"),
        (8, "chain-not-runnable", "3 and 7"),
        (2, "program-of-other-signature", "float32 [16, 1, 64]"),
    ],
)
def test_a_head_with_another_number_of_shards_is_refused(
    folder: Path, count: int, code: str, value: str
) -> None:
    change(folder, lambda chain: shards(chain, count))
    with raises(BundleError, code, containing=value):
        gradient(folder)


def test_blocks_with_hidden_states_of_different_widths_are_refused(folder: Path) -> None:
    """A head in place of a block takes hidden states and outputs none."""
    from device_runner.engines.shapes import MethodShapes, block_problems
    from device_runner.engines.tables import Tables

    chain = open_bundle(folder).chain
    shapes = MethodShapes(chain, Tables(open_bundle(folder), chain))
    widths, saved = shapes.widths, shapes.residuals
    assert widths == [(0, 64), (64, 64), (64, 64), *[(64, 0)] * 4]
    assert not any([*block_problems(chain, shapes, n)] for n in range(7))
    widths[1] = (64, 32)
    problems = [*block_problems(chain, shapes, 2)]
    assert problems[0] == "it takes states of width 64, the previous block has 32"
    widths[1] = (64, 64)
    for width in (0, LARGEST_SIZE + 1):
        saved[2]["residual.0"] = width
        problems = [*block_problems(chain, shapes, 2)]
        assert "its residuals have the widths" in problems[0] and str(width) in problems[0]
        assert any("input residual.0 of backward_saved is float32" in problem for problem in problems)


@pytest.mark.parametrize(
    ("damage", "code", "value"),
    [
        (lambda tensors: {}, "table-missing", TABLES),
        (
            lambda tensors: {n: a[:5] for n, a in tensors.items()},
            "table-of-other-length",
            str(POSITIONS),
        ),
        (lambda tensors: {n: a.astype(np.float64) for n, a in tensors.items()}, "table-missing", TABLES),
        (
            lambda tensors: {n: np.ascontiguousarray(a[:, :3]) for n, a in tensors.items()},
            "program-of-other-signature",
            "float32 [1, 16",
        ),
    ],
)
def test_tables_that_dont_fit_are_refused(
    folder: Path, damage: Callable[[dict[str, Any]], dict[str, Any]], code: str, value: str
) -> None:
    tensors = safetensors.numpy.load_file(folder / TABLES)
    safetensors.numpy.save_file(damage(tensors) or {"x": np.zeros(1, np.float32)}, folder / TABLES)
    rehash(folder)
    refused(folder, code, containing=value)


@pytest.mark.parametrize("content", [b"", b"no tables", b"\xff" * 100])
def test_an_invalid_tables_file_is_refused(folder: Path, content: bytes) -> None:
    (folder / TABLES).write_bytes(content)
    rehash(folder)
    refused(folder, "file-unreadable", containing=Path(TABLES).name)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", [PROGRAM, BLOCK, HEAD])
def test_content_that_may_crash_the_engine_only_ends_a_child(folder: Path, engine: str, name: str) -> None:
    """Half of a file is noise with a correct hash; some of these files still load."""
    content, whole = (folder / name).read_bytes(), answer(folder, engine)
    for seed in range(3):
        noise = np.random.default_rng(seed).bytes(len(content) // 4)
        start = [len(content) // 4, len(content) // 2, 64][seed]
        (folder / name).write_bytes(content[:start] + noise + content[start + len(noise) :])
        rehash(folder)
        try:
            result = answer(folder, engine)
        except PrgeError as error:
            assert error.remedy
        else:
            assert len(result) == len(whole)


# Packed files


def packed_of(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.suffix == "" and path.name != "lock")


def test_a_packed_file_of_the_backward_pass_is_written_again_wherever_it_is_damaged(
    folder: Path, cache: Path
) -> None:
    """Damage of transposed weights, which only the backward pass reads, must be detected."""
    before = gradient(folder)
    whole = {path: path.read_bytes() for path in packed_of(cache)}
    for share in (0.02, 0.35, 0.65, 0.98):
        for path in filter(whole.get, whole):
            flip(path, share)
        assert gradient(folder) == before
        assert {path: path.read_bytes() for path in packed_of(cache)} == whole


def test_packed_files_that_disappear_end_no_call(folder: Path, cache: Path) -> None:
    """With memory for one block's weights each block is mapped again in every call, in both directions."""
    bundle = open_bundle(folder)
    largest = max(bundle.file(block.weights).stat().st_size for block in bundle.chain.blocks)
    engine, call = opened(bundle, BACKWARD, loaded=largest).engine, call_of(bundle.chain.model, 2)
    before = bits(computed(engine, BACKWARD, call))
    assert packed_files.remove_files(cache)
    assert bits(computed(engine, BACKWARD, call)) == before


# The command line
