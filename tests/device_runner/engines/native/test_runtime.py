"""One program runs with the weights of any block of its type, at any shape, in shared memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from device_runner.engines.base import BoundCall, Store
from device_runner.engines.child_check import check_in_child
from device_runner.engines.errors import EngineRefusalError
from device_runner.engines.native.build import stock_package
from device_runner.engines.native.runtime import (
    Arena,
    Method,
    Program,
    WeightsFile,
    backend_sha256,
    bind_calls,
    without_threads,
)
from prge.engine import Array
from prge.errors import PrgeError
from prge.formats.bundle import file_sha256
from server_export.lower.program import write_program
from tests.compilers import needs_compiler
from tests.device_runner.engines.blocks import (
    MAX_ROWS,
    MAX_TOKENS,
    METHODS,
    WIDTH,
    LoweredBlocks,
    compute_outputs,
    make_inputs,
    make_outputs,
)
from tests.refusals import raises

pytestmark = needs_compiler


@pytest.fixture(scope="module", params=["fp32", "8da4w"])
def scheme(request: pytest.FixtureRequest) -> str:
    """Return the weights' quantization scheme."""
    return str(request.param)


@pytest.fixture(scope="module", params=[False, True], ids=["static", "dynamic"])
def lowered(
    request: pytest.FixtureRequest, scheme: str, make_blocks: Callable[[str, bool], LoweredBlocks]
) -> LoweredBlocks:
    """Return blocks of each scheme, with static and dynamic shapes."""
    return make_blocks(scheme, request.param)


@pytest.fixture(scope="module")
def dynamic(make_blocks: Callable[[str, bool], LoweredBlocks]) -> LoweredBlocks:
    """Return blocks with dynamic shapes."""
    return make_blocks("fp32", True)


def loaded(
    lowered: LoweredBlocks, arena: Arena | None = None, packed: list[Path] | None = None
) -> list[dict[str, Method]]:
    """Load the methods of both blocks."""
    program = Program(lowered.program)
    files = [
        WeightsFile(path, packed[index] if packed else None) for index, path in enumerate(lowered.weights)
    ]
    return [{name: program.load(name, weights=weights, arena=arena) for name in METHODS} for weights in files]


def arena_for(lowered: LoweredBlocks) -> Arena:
    """Return an arena for all methods."""
    program = Program(lowered.program)
    return Arena(max(map(program.arena_bytes, program.methods)))


def pack(lowered: LoweredBlocks, folder: Path) -> list[Path]:
    """Write the packed files of both blocks."""
    program, paths = Program(lowered.program), [folder / "0", folder / "1"]
    for weights, path in zip(lowered.weights, paths, strict=True):
        packing = WeightsFile(weights, path, packing=True)
        methods = [program.load(name, weights=packing) for name in METHODS]
        del methods, packing
    return paths


def test_both_blocks_of_one_type_compute_correctly_however_they_are_loaded(
    lowered: LoweredBlocks, tmp_path: Path
) -> None:
    alone = compute_outputs(lowered, loaded(lowered))
    assert compute_outputs(lowered, loaded(lowered, arena_for(lowered))) == alone
    packed = pack(lowered, tmp_path)
    before = [path.read_bytes() for path in packed]
    first = loaded(lowered, arena_for(lowered), packed)
    assert compute_outputs(lowered, first) == alone
    again = loaded(lowered, arena_for(lowered), packed)
    del first
    assert compute_outputs(lowered, again) == alone
    assert [path.read_bytes() for path in packed] == before


def test_methods_stay_when_their_weights_are_released(lowered: LoweredBlocks, tmp_path: Path) -> None:
    def resident(path: Path) -> int:
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        result = [
            next(line for line in lines if line.startswith("Rss:")) for each in lines if str(path) in each
        ]
        assert result
        return sum(int(line.split()[1]) for line in result)

    program, (packed, _) = Program(lowered.program), pack(lowered, tmp_path)
    weights = WeightsFile(lowered.weights[0], packed)
    methods = {name: program.load(name, weights=weights) for name in METHODS}
    before = compute_outputs(lowered, [methods])
    assert resident(packed) > 0
    assert weights.release_pages()
    assert resident(packed) == 0
    assert compute_outputs(lowered, [methods]) == before
    assert weights.release_pages() and resident(packed) == 0
    methods["again"] = program.load(METHODS[0], weights=weights)
    assert compute_outputs(lowered, [methods]) == before
    assert weights.release_pages() and resident(packed) == 0
    methods.clear()
    assert not weights.release_pages()
    assert not WeightsFile(lowered.weights[0]).release_pages()


def test_pages_of_a_packed_file_that_still_exists_are_released(
    dynamic: LoweredBlocks, tmp_path: Path
) -> None:
    """The backend maps a file once per process; unloading the last method unmaps it."""
    program, (packed, _) = Program(dynamic.program), pack(dynamic, tmp_path)
    one, other = (WeightsFile(dynamic.weights[0], packed) for _ in range(2))
    method = program.load(METHODS[0], weights=other)
    (position,) = mapped(packed)
    assert one.release_pages()
    del method
    assert mapped(packed) == []
    begin, end = (int(each, 16) for each in position.split("-"))
    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype, libc.munmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
    # The system uses the requested address if it is free.
    rights, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    assert libc.mmap(begin, end - begin, rights, flags, -1, 0) == begin
    try:
        ctypes.memset(begin, 7, end - begin)
        assert not one.release_pages()
        assert ctypes.string_at(begin, end - begin) == b"\7" * (end - begin)
    finally:
        libc.munmap(begin, end - begin)


def mapped(path: Path) -> list[str]:
    """Return where this process has mapped a file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[0] for line in lines if line.endswith(str(path))]


def test_packed_weights_are_mapped_by_several_processes_at_once(
    dynamic: LoweredBlocks, tmp_path: Path
) -> None:
    """The engine alone would let only one process use the file."""
    packed = pack(dynamic, tmp_path)
    alone = compute_outputs(dynamic, loaded(dynamic))

    def in_another_process() -> None:
        without_threads()
        there = loaded(dynamic, None, packed)
        maps = Path("/proc/self/maps").read_text()
        assert all(str(path) in maps for path in packed), maps
        if compute_outputs(dynamic, there) != alone:
            raise EngineRefusalError("the answers differ")

    reading, writing = os.pipe()
    holder = os.fork()
    if holder == 0:
        held = loaded(dynamic, None, packed)
        os.write(writing, bytes([len(held)]))
        signal.pause()
    try:
        assert os.read(reading, 1) == b"\2"
        check_in_child(dynamic.program, in_another_process)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.close(reading)
        os.close(writing)


def test_outputs_are_filled_from_their_beginning_however_large_they_are(dynamic: LoweredBlocks) -> None:
    """The engine writes directly into memory for the largest output; otherwise the output is copied."""
    method = loaded(dynamic)[0]["score"]
    inputs = make_inputs("score", 2, 5)
    large = np.full(MAX_ROWS * MAX_TOKENS * WIDTH, np.nan, np.float32)
    small = np.full(2 * 5 * WIDTH, np.nan, np.float32)
    assert method.run(inputs, [large]) == method.run(inputs, [small]) == [(2, 5, WIDTH)]
    assert large[: small.size].tobytes() == small.tobytes()
    assert np.isnan(large[small.size :]).all()


def test_read_only_inputs_are_accepted_and_read_only_outputs_refused(dynamic: LoweredBlocks) -> None:
    method = loaded(dynamic)[0]["score"]
    inputs, outputs = make_inputs("score", 2, 3), make_outputs("score", 2, 3)
    inputs[0].flags.writeable = False
    method.run(inputs, outputs)
    dynamic.assert_right(0, "score", inputs, outputs)
    outputs[0].flags.writeable = False
    with pytest.raises(EngineRefusalError, match="output 0 is float32"):
        method.run(inputs, outputs)


def test_a_block_reads_the_hidden_states_of_the_previous_block(dynamic: LoweredBlocks) -> None:
    first, second = (methods["score"] for methods in loaded(dynamic, arena_for(dynamic)))
    state, mask, lora_b = make_inputs("score", 3, 4)
    between, last = make_outputs("score", 3, 4)[0], make_outputs("score", 3, 4)[0]
    first.run([state, mask, lora_b], [between])
    second.run([between, mask, lora_b], [last])
    want = dynamic.expected(
        1, "score", [dynamic.expected(0, "score", [state, mask, lora_b])[0], mask, lora_b]
    )
    np.testing.assert_allclose(last, want[0], rtol=1e-5, atol=1e-5)


def test_a_sequence_of_calls_reads_the_current_arrays(dynamic: LoweredBlocks) -> None:
    blocks = loaded(dynamic, arena_for(dynamic))
    inputs, outputs = make_inputs("score", 2, 5), [make_outputs("score", 2, 5) for _ in blocks]
    lora = inputs[1:]
    sources = [inputs[0], outputs[0][0]]
    compute = bind_calls(
        [
            (methods["score"], BoundCall([source, *lora], output))
            for methods, source, output in zip(blocks, sources, outputs, strict=True)
        ]
    )
    expected = []
    for state in (inputs[0].copy(), 2 * inputs[0]):
        one, two = make_outputs("score", 2, 5), make_outputs("score", 2, 5)
        blocks[0]["score"].run([state, *lora], one)
        blocks[1]["score"].run([one[0], *lora], two)
        expected.append(two[0].tobytes())
    del blocks
    compute()
    assert outputs[1][0].tobytes() == expected[0]
    inputs[0] *= 2
    compute()
    assert outputs[1][0].tobytes() == expected[1]


def test_a_repeated_call_reads_its_inputs_again(lowered: LoweredBlocks) -> None:
    method, others = loaded(lowered)[0]["score"], make_inputs("score", seed=1)
    inputs, outputs, moved = make_inputs("score"), make_outputs("score"), make_outputs("score")
    method.run(inputs, outputs)
    for array, other in zip(inputs, others, strict=True):
        array[:] = other
    for target in (outputs, moved, outputs):
        target[0][:] = np.nan
        method.run(inputs, target)
        lowered.assert_right(0, "score", others, target)


def test_a_repeated_call_of_a_method_that_copies_its_inputs_reads_them_again(
    dynamic: LoweredBlocks, tmp_path: Path
) -> None:
    write_program(tmp_path / "program.pte", {"forward": (nn.Tanh().eval(), (torch.zeros(2, 3),))})
    method = Program(tmp_path / "program.pte").load("forward", WeightsFile(dynamic.weights[0]))
    array, output = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    for _ in range(2):
        array += 1
        method.run([array], [output])
        np.testing.assert_allclose(output, np.tanh(array), rtol=1e-5)


def test_a_call_stores_outputs_at_the_current_position_of_each_row(dynamic: LoweredBlocks) -> None:
    heads, width, inputs = 5, WIDTH, make_inputs("score", 2, 5)
    (output,) = outputs = make_outputs("score", 2, 5)
    cache, expected = (np.zeros((3, heads, 7, width), np.float32) for _ in range(2))
    positions = np.zeros(2, np.int64)
    call = BoundCall(inputs, outputs, [Store(output, cache, positions)])
    compute = bind_calls([(loaded(dynamic)[0]["score"], call)])
    for first, second in ((6, 0), (2, 3)):
        positions[:] = first, second
        inputs[0] *= 1.5
        compute()
        expected[0, :, first], expected[1, :, second] = output
        assert cache.tobytes() == expected.tobytes()


def test_a_sequence_of_calls_with_an_array_that_does_not_fit_is_refused(dynamic: LoweredBlocks) -> None:
    method = loaded(dynamic)[0]["score"]
    with pytest.raises(EngineRefusalError):
        bind_calls([(method, BoundCall([], make_outputs("score", 2, 5)))])


def test_memory_that_no_call_touches_is_not_taken(dynamic: LoweredBlocks) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    arena = Arena(1 << 36)
    compute_outputs(dynamic, loaded(dynamic, arena))
    assert resident() - before < 1 << 26


def test_methods_outlive_their_programs_and_weights_files(dynamic: LoweredBlocks) -> None:
    blocks = loaded(dynamic, arena_for(dynamic))
    assert len(compute_outputs(dynamic, blocks)) == len(dynamic.shapes) * 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda inputs, outputs: (inputs[:2], outputs), "3 inputs and 1 outputs, not 2 and 1"),
        (lambda inputs, outputs: (inputs, []), "3 inputs and 1 outputs, not 3 and 0"),
        (lambda inputs, outputs: ([inputs[0][0], *inputs[1:]], outputs), "input 0 is float32"),
        (lambda inputs, outputs: ([inputs[0].astype("f8"), *inputs[1:]], outputs), "input 0 is float64"),
        (lambda inputs, outputs: ([inputs[0][:, ::2], *inputs[1:]], outputs), "contiguous"),
        (lambda inputs, outputs: (inputs, [outputs[0].astype("f8")]), "output 0 is float64"),
    ],
)  # fmt: skip
def test_arrays_that_dont_fit_are_refused_and_the_method_stays_usable(
    dynamic: LoweredBlocks,
    change: Callable[[list[Array], list[Array]], tuple[list[Array], list[Array]]],
    message: str,
) -> None:
    blocks = loaded(dynamic)
    with pytest.raises(EngineRefusalError, match=message):
        blocks[0]["score"].run(*change(make_inputs("score"), make_outputs("score")))
    compute_outputs(dynamic, blocks)


def test_sizes_beyond_the_bound_are_refused(dynamic: LoweredBlocks) -> None:
    """One axis is too large, even if the total number of elements isn't."""
    blocks = loaded(dynamic)
    state, mask, lora_b = make_inputs("score", MAX_ROWS + 1, 2)
    for unfitting in (state, np.empty((0, 2, WIDTH), np.float32)):
        with pytest.raises(EngineRefusalError) as caught:
            blocks[0]["score"].run([unfitting, mask, lora_b], make_outputs("score"))
        assert f"input 0 has size {len(unfitting)} in axis 0, must be in 1 to {MAX_ROWS}" in caught.value.log
    with pytest.raises(EngineRefusalError) as caught:
        blocks[0]["score"].run(make_inputs("score", 2, 3), [np.empty((2, 2, WIDTH), np.float32)])
    assert "output 0 takes 768 bytes, there is room for 512" in caught.value.log
    compute_outputs(dynamic, blocks)


def test_an_arena_that_is_too_small_is_refused(dynamic: LoweredBlocks) -> None:
    program = Program(dynamic.program)
    with pytest.raises(EngineRefusalError) as caught:
        program.load("score", weights=WeightsFile(dynamic.weights[0]), arena=Arena(1000))
    assert f"needs {program.arena_bytes('score')} bytes of an arena that has 1000" in caught.value.log


def damaged(content: bytes) -> dict[str, bytes]:
    """Yield damaged weights files."""
    inside = content.find(b"FH01")
    return {
        "empty": b"",
        "header cut": content[:20],
        "tables cut": content[:200],
        "weights cut": content[: len(content) // 2],
        "one byte cut": content[:-1],
        "no magic": content.replace(b"FH01", b"FH77"),
        "zeros": bytes(len(content)),
        "text": b"not a weights file " * 400,
        **{
            f"flipped at {position}": content[:position]
            + bytes([content[position] ^ 0xFF])
            + content[position + 1 :]
            for position in (0, 4, *range(inside, inside + 40, 5))
        },
    }


def test_a_damaged_weights_file_gives_an_error_and_no_abort(dynamic: LoweredBlocks, tmp_path: Path) -> None:
    """If the header is still valid, comparing the file's hash detects the damage."""
    content = dynamic.weights[0].read_bytes()
    path = tmp_path / "damaged.ptd"
    program = Program(dynamic.program)

    def attempt() -> None:
        without_threads()
        for name in METHODS:
            program.load(name, weights=WeightsFile(path))

    accepted = []
    for name, changed in damaged(content).items():
        path.write_bytes(changed)
        try:
            check_in_child(path, attempt)
        except PrgeError as error:
            assert "abort" not in error.what and "SIG" not in error.what, (name, error.what)
        else:
            accepted.append(name)
    assert not [name for name in accepted if "flipped" not in name], accepted
    path.unlink()
    with pytest.raises(EngineRefusalError) as caught:
        WeightsFile(path)
    assert f"{path}: No such file" in caught.value.log


def test_weights_of_another_type_are_refused(
    make_blocks: Callable[[str, bool], LoweredBlocks], dynamic: LoweredBlocks, tmp_path: Path
) -> None:
    program = Program(dynamic.program)
    other = make_blocks("8da4w", True).weights[0]
    for weights in (WeightsFile(other), WeightsFile(other, pack(dynamic, tmp_path)[0])):
        with pytest.raises(EngineRefusalError) as caught:
            program.load("score", weights=weights)
        assert "flock" not in caught.value.log
    compute_outputs(dynamic, loaded(dynamic))


def test_weights_that_cannot_be_packed_are_refused(dynamic: LoweredBlocks, tmp_path: Path) -> None:
    """The engine would keep such weights in memory, and leave an incomplete file."""

    def attempt(limit: int) -> None:
        without_threads()
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        pack(dynamic, tmp_path)

    for limit in (1 << 12, 1 << 14, 1 << 15):
        with raises(PrgeError, "program-refused", containing=str(dynamic.program)):
            check_in_child(dynamic.program, lambda limit=limit: attempt(limit))  # type: ignore[misc]
    check_in_child(dynamic.program, lambda: attempt(1 << 20))


def test_a_packed_file_that_is_missing_locked_or_of_too_long_a_name_is_refused(
    dynamic: LoweredBlocks, tmp_path: Path
) -> None:
    import fcntl

    weights = dynamic.weights[0]
    with pytest.raises(EngineRefusalError):
        WeightsFile(weights, tmp_path / "missing")
    with pytest.raises(EngineRefusalError):
        WeightsFile(weights, tmp_path / ("long" * 64), packing=True)
    packed = pack(dynamic, tmp_path)[0]
    with packed.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(EngineRefusalError):
            WeightsFile(weights, packed)
    WeightsFile(weights, packed)


def test_the_engine_build_is_known_by_its_library() -> None:
    assert backend_sha256() == file_sha256(stock_package() / "lib" / "libexecutorch_backend_xnnpack.so")
