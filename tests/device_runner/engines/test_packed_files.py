"""Packed files are complete, correct, of one block, and never required."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from device_runner.engines import packed_files
from device_runner.engines.child_check import check_in_child
from device_runner.engines.errors import EngineRefusalError
from device_runner.engines.native.runtime import Arena, Program, WeightsFile, without_threads
from device_runner.engines.packed_files import HashedFile, PackedFiles, folder_bytes, remove_files
from prge.engine import Array
from prge.errors import BundleError
from tests.compilers import needs_compiler
from tests.device_runner.engines.blocks import METHODS, LoweredBlocks, make_inputs, make_outputs, sha256
from tests.refusals import raises

pytestmark = needs_compiler
PROBES = {name: make_inputs(name) for name in METHODS}


@pytest.fixture(scope="module", params=["fp32", "8da4w"])
def lowered(
    request: pytest.FixtureRequest, make_blocks: Callable[[str, bool], LoweredBlocks]
) -> LoweredBlocks:
    """Return blocks of each scheme, with dynamic shapes."""
    return make_blocks(request.param, True)


@pytest.fixture(scope="module")
def fp32(make_blocks: Callable[[str, bool], LoweredBlocks]) -> LoweredBlocks:
    """Return blocks whose packed weights are as large as the originals."""
    return make_blocks("fp32", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of packed files."""
    return tmp_path / "packed"


class PackedBlocks:
    """The packed files of one process, as a chain of two blocks uses them; `messages` are its reports."""

    def __init__(self, lowered: LoweredBlocks, folder: Path) -> None:
        self.lowered = lowered
        self.messages: list[str] = []
        self.files = PackedFiles(self.messages.append, folder)

    def open(self, block: int) -> WeightsFile:
        """Open a block's weights."""
        program, weights = (
            HashedFile(p, sha256(p)) for p in (self.lowered.program, self.lowered.weights[block])
        )
        return self.files.open(program, weights, PROBES)

    def assert_right(self) -> list[Path | None]:
        """Compare both blocks with PyTorch; returns their packed files."""
        program = Program(self.lowered.program)
        arena = Arena(max(map(program.arena_bytes, METHODS)))
        opened = [self.open(block) for block in range(2)]
        methods = [
            {name: program.load(name, weights=weights, arena=arena) for name in METHODS} for weights in opened
        ]
        for shape in self.lowered.shapes:
            for name in METHODS:
                for block in range(2):
                    inputs, outputs = make_inputs(name, *shape), make_outputs(name, *shape)
                    methods[block][name].run(inputs, outputs)
                    self.lowered.assert_right(block, name, inputs, outputs)
        return [weights.packed for weights in opened]


def packed_of(folder: Path) -> list[Path]:
    """Return the packed files themselves."""
    return sorted(path for path in folder.iterdir() if path.suffix == "" and path.name != "lock")


def test_two_blocks_of_one_type_have_a_file_each_which_a_second_start_reuses(
    lowered: LoweredBlocks, folder: Path
) -> None:
    first = PackedBlocks(lowered, folder)
    paths = first.assert_right()
    assert len(set(paths)) == 2 and set(paths) == set(packed_of(folder))
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != "lock"}
    second = PackedBlocks(lowered, folder)
    assert second.assert_right() == first.assert_right() == paths
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != "lock"}
    assert first.messages == second.messages == []


def test_a_file_holds_the_weights_of_all_methods(fp32: LoweredBlocks, folder: Path) -> None:
    """The first method that is loaded doesn't use all weights."""
    PackedBlocks(fp32, folder).assert_right()
    values, page = fp32.eager[0]["score"].state_dict(), resource.getpagesize()
    # Each weight starts on its own page and has room for a bias.
    pages = sum(values[f"{name}.weight"].nbytes // page + 1 for name in ("up", "gate", "down"))
    sizes = [path.stat().st_size for path in packed_of(folder)]
    assert len(sizes) == 2 and min(sizes) > pages * page


def test_the_name_of_a_packed_file_depends_on_program_weights_engine_and_processor(
    fp32: LoweredBlocks, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(program: Path = fp32.program, weights: Path = fp32.weights[0]) -> Path | None:
        messages: list[str] = []
        files = PackedFiles(messages.append, folder)
        return files.open(
            HashedFile(program, sha256(program)), HashedFile(weights, sha256(weights)), {}
        ).packed

    longer = tmp_path / "longer.pte"
    longer.write_bytes(fp32.program.read_bytes() + b"\0")
    names = [name(), name(program=longer), name(weights=fp32.weights[1])]
    with monkeypatch.context() as another:
        another.setattr(packed_files, "platform", SimpleNamespace(machine=lambda: "another"))
        names.append(name())
    with monkeypatch.context() as another:
        another.setattr(packed_files, "backend_sha256", lambda: "another")
        names.append(name())
    assert None not in names and len(set(names)) == 5 and name() == names[0]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def _exchange(path: Path) -> None:
    """Exchange a packed file with the other block's, with their checksums."""
    other = next(each for each in packed_of(path.parent) if each != path)
    for suffix in ("", ".checksum"):
        first, second = (Path(f"{each}{suffix}") for each in (path, other))
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        _flip,
        _exchange,
        lambda path: os.truncate(path, path.stat().st_size - 100),
        lambda path: os.truncate(path, 0),
        lambda path: path.unlink(),
        lambda path: Path(f"{path}.checksum").unlink(),
        lambda path: Path(f"{path}.checksum").write_bytes(b"\xff"),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
    ],
    ids=["flipped", "exchanged", "truncated", "empty", "gone", "no checksum", "other checksum", "zeros"],
)  # fmt: skip
def test_a_damaged_file_is_written_again(
    lowered: LoweredBlocks, folder: Path, damage: Callable[[Path], object]
) -> None:
    PackedBlocks(lowered, folder).assert_right()
    whole = {path: path.read_bytes() for path in packed_of(folder)}
    damage(packed_of(folder)[0])
    use = PackedBlocks(lowered, folder)
    assert set(use.assert_right()) == set(whole) and use.messages == []
    assert {path: path.read_bytes() for path in packed_of(folder)} == whole


def in_a_child(lowered: LoweredBlocks, attempt: Callable[[], object]) -> None:
    """Run in a child, because limits of a process last until it ends."""

    def work() -> None:
        without_threads()
        attempt()

    check_in_child(lowered.program, work)


@pytest.mark.parametrize("is_known", [True, False], ids=["asking before", "while packing"])
def test_without_storage_the_weights_stay_in_memory_with_one_report(
    fp32: LoweredBlocks, folder: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """A limit on the size of files simulates a full disk."""
    if not is_known:
        monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)

    def attempt() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
        use = PackedBlocks(fp32, folder)
        assert use.assert_right() == [None, None]
        (messages,) = use.messages
        assert messages.startswith("weights stay in memory instead of packed files: "), messages
        assert ("File too large" if is_known else "ftruncate") in messages, messages
        assert packed_of(folder) == [] and folder_bytes(folder) == 0

    in_a_child(fp32, attempt)


def test_a_folder_that_cant_be_written_does_no_harm(fp32: LoweredBlocks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    use = PackedBlocks(fp32, tmp_path / "file" / "packed")
    assert use.assert_right() == [None, None]
    assert len(use.messages) == 1 and "file/packed can't be written: Not a directory" in use.messages[0]


def test_a_path_that_is_too_long_for_the_engine_does_no_harm(fp32: LoweredBlocks, tmp_path: Path) -> None:
    use = PackedBlocks(fp32, tmp_path / ("long" * 30) / ("longer" * 20))
    assert use.assert_right() == [None, None] and len(use.messages) == 1


@pytest.mark.parametrize("end", [os.abort, lambda: os.kill(os.getpid(), signal.SIGBUS), lambda: 1 / 0])
def test_an_engine_that_dies_while_it_packs_does_no_harm(
    fp32: LoweredBlocks, folder: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[], object]
) -> None:
    """An unforeseen full disk causes SIGBUS."""
    monkeypatch.setattr(packed_files, "without_threads", end)  # as the process that packs begins
    use = PackedBlocks(fp32, folder)
    assert use.assert_right() == [None, None]
    assert len(use.messages) == 1 and folder_bytes(folder) == 0


class RandomOutputs(Program):
    """A program whose methods return other outputs every time."""

    def load(self, method: str, weights: WeightsFile, arena: Arena | None = None) -> Any:
        """See Program.load."""
        loaded = super().load(method, weights, arena)

        def run(inputs: Sequence[Array], outputs: Sequence[Array]) -> list[tuple[int, ...]]:
            shapes = loaded.run(inputs, outputs)
            for output in outputs:
                output[...] = np.frombuffer(os.urandom(1), np.uint8)
            return shapes

        return SimpleNamespace(run=run)


def test_a_file_that_changes_outputs_is_not_kept(
    fp32: LoweredBlocks, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_files, "Program", RandomOutputs)
    use = PackedBlocks(fp32, folder)
    assert use.assert_right() == [None, None]
    assert "its outputs change" in use.messages[0] and folder_bytes(folder) == 0


def test_a_process_that_was_killed_while_it_packed_leaves_no_files(
    fp32: LoweredBlocks, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        (path,) = folder.glob("*.partial")
        path.write_bytes(b"half")
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)

    process = os.fork()
    if process == 0:
        monkeypatch.setattr(packed_files, "without_threads", die)
        PackedBlocks(fp32, folder).open(0)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
    assert [path.read_bytes() for path in folder.glob("*.partial")] == [b"half"]
    use = PackedBlocks(fp32, folder)
    assert None not in use.assert_right() and use.messages == []
    assert list(folder.glob("*.partial")) == []


def test_simultaneous_processes_write_a_file_once(
    fp32: LoweredBlocks, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "made"

    def use() -> None:
        def slow() -> None:
            with log.open("a") as stream:
                stream.write("one\n")
            time.sleep(0.3)
            without_threads()

        monkeypatch.setattr(packed_files, "without_threads", slow)
        result = PackedBlocks(fp32, folder)
        if None in result.assert_right() or result.messages:
            raise EngineRefusalError(f"{result.messages}")

    failures: list[BaseException] = []

    def in_a_process() -> None:
        try:
            in_a_child(fp32, use)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=in_a_process) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and log.read_text() == "one\n" * 2


def test_a_process_that_waits_too_long_continues_without(
    fp32: LoweredBlocks, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_files, "WAIT_SECONDS", 0.1)
    folder.mkdir()
    with (folder / "lock").open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        use = PackedBlocks(fp32, folder)
        assert use.assert_right() == [None, None]
    assert len(use.messages) == 1 and "another process is making packed files" in use.messages[0]
    assert None not in PackedBlocks(fp32, folder).assert_right()


def test_weights_with_a_wrong_hash_are_an_error(fp32: LoweredBlocks, folder: Path, tmp_path: Path) -> None:
    program = HashedFile(fp32.program, sha256(fp32.program))
    content = bytearray(fp32.weights[0].read_bytes())
    content[-1] ^= 1
    (tmp_path / "flipped.ptd").write_bytes(content)
    for path in (fp32.weights[1], tmp_path / "flipped.ptd"):
        weights = HashedFile(path, sha256(fp32.weights[0]))
        with raises(BundleError, "bundle-file-hash", containing=str(path)):
            PackedFiles(pytest.fail, folder).open(program, weights, PROBES)
    with raises(BundleError, "file-unreadable", containing=str(tmp_path / "missing.ptd")):
        PackedFiles(pytest.fail, folder).open(program, HashedFile(tmp_path / "missing.ptd", "0"), PROBES)


def test_the_cache_reports_its_size_and_can_be_emptied_while_it_is_used(
    fp32: LoweredBlocks, folder: Path
) -> None:
    assert folder_bytes(folder) == remove_files(folder) == 0
    use = PackedBlocks(fp32, folder)
    program = Program(fp32.program)
    method = program.load("score", weights=use.open(0))
    use.open(1)
    size = folder_bytes(folder)
    assert size > sum(path.stat().st_size for path in packed_of(folder)) > 1 << 15
    assert remove_files(folder) == size and folder_bytes(folder) == 0
    inputs, outputs = make_inputs("score"), make_outputs("score")
    method.run(inputs, outputs)
    fp32.assert_right(0, "score", inputs, outputs)
    assert use.open(0).packed is None and len(use.messages) == 1
    assert None not in PackedBlocks(fp32, folder).assert_right()


def test_probes_reach_every_output(fp32: LoweredBlocks) -> None:
    """If probes didn't reach all outputs, comparing outputs would prove little."""
    for name, inputs in PROBES.items():
        for value in fp32.expected(0, name, inputs):
            assert np.count_nonzero(value) == value.size
