"""Delegates made in two processes: the same file as made in one, whatever becomes of the second."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

pytest.importorskip("executorch")

import torch
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir import EdgeCompileConfig, to_edge
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from hypothesis import given
from hypothesis import strategies as st

from server_export.lower import delegation
from server_export.lower.delegation import Results, copy_without_weights, halves, in_two_processes
from server_export.lower.lowering import lower
from server_export.lower.method_graphs import export_programs
from tests.server_export.programs import build

torch.set_num_threads(1)

needs_fork = pytest.mark.skipif(not delegation._can_fork(), reason="needs Linux and a second core")


def result(**weights: bytes) -> PreprocessResult:
    store = NamedDataStore()
    for key, data in weights.items():
        store.add_named_data(key, data)
    return PreprocessResult(b"graph", data_store_output=store.get_named_data_store_output())


def weights_of(results: Results) -> dict[str, dict[str, bytes]]:
    return {method: dict(delegation._buffers(delegates[0])) for method, delegates in results.items()}


def made_beside(work: Callable[[], Results], made_here: Results) -> Results | None:
    with delegation._second_process(work) as receive:
        return receive(made_here)


@pytest.mark.export
@needs_fork
def test_file_is_the_same_from_one_process_and_from_two(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = export_programs(build("llama", estimator="tangent", quantize="8da4w"))
    assert len(programs) > 1
    preprocess, here = XnnpackBackend.preprocess, []

    def counted(*arguments: object) -> PreprocessResult:
        here.append(arguments)
        return preprocess(*arguments)

    monkeypatch.setattr(XnnpackBackend, "preprocess", staticmethod(counted))
    monkeypatch.setattr(delegation, "_WORTH_A_PROCESS", 0)
    two, made_beside_the_second = lower(programs).buffer, len(here)
    here.clear()
    monkeypatch.setattr(delegation, "_can_fork", lambda: False)
    assert lower(programs).buffer == two
    assert 0 < made_beside_the_second < len(here)


@pytest.mark.export
@needs_fork
def test_what_a_killed_process_leaves_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = export_programs(build("llama", estimator="tangent"))
    expected = lower(programs).buffer
    parent, preprocess, here = os.getpid(), XnnpackBackend.preprocess, []

    def killed(*arguments: object) -> PreprocessResult:
        if os.getpid() != parent:
            os._exit(9)
        here.append(arguments)
        return preprocess(*arguments)

    monkeypatch.setattr(delegation, "_WORTH_A_PROCESS", 0)
    monkeypatch.setattr(XnnpackBackend, "preprocess", staticmethod(killed))
    assert lower(programs).buffer == expected
    assert len(here) > len(programs)


@needs_fork
def test_weights_are_those_that_are_known_or_come_as_they_were_written() -> None:
    known = {"forward": [result(a=b"aaaa", b=b"bb")]}
    results = made_beside(lambda: {"score": [result(b=b"bb", c=b"ccc")], "short": [result(a=b"aaaa")]}, known)
    assert results is not None
    assert weights_of(results) == {"score": {"b": b"bb", "c": b"ccc"}, "short": {"a": b"aaaa"}}
    assert weights_of(results)["score"]["b"] is weights_of(known)["forward"]["b"]


@needs_fork
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_process_that_fails_answers_and_prints_nothing(
    error: type[BaseException] | None, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Results:
        if error is None:
            os._exit(1)
        raise error("of the second process")

    assert made_beside(fail, {}) is None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("has_its_own", [False, True])
def test_executorch_is_as_it_was_when_the_context_ends(
    has_its_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("preprocess_multimethod", "copy_exported_program_for_preprocess")
    if has_its_own:
        monkeypatch.setattr(XnnpackBackend, names[0], classmethod(lambda *_: {}))
    before = dict(vars(XnnpackBackend))
    with pytest.raises(KeyboardInterrupt), in_two_processes():
        assert XnnpackBackend.preprocess_multimethod is delegation.make_delegates
        raise KeyboardInterrupt
    assert dict(vars(XnnpackBackend)) == before
    assert all(hasattr(XnnpackBackend, name) for name in names)


def test_copy_of_a_program_shares_its_weights() -> None:
    layer = torch.nn.Linear(4, 3)
    exported = torch.export.export(layer, (torch.zeros(2, 4),))
    program = to_edge(exported, compile_config=EdgeCompileConfig(_check_ir_validity=False)).exported_program()
    copied = copy_without_weights(program, [CompileSpec("any", b"")])
    assert copied.graph_module is not program.graph_module
    assert copied.state_dict.keys() == program.state_dict.keys()
    assert all(copied.state_dict[name] is weight for name, weight in program.state_dict.items())


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 1000), min_size=1))
def test_halves_hold_all_and_differ_by_one_member_at_most(sizes: dict[str, int]) -> None:
    larger, smaller = halves(sizes)
    assert sorted([*larger, *smaller]) == sorted(sizes)
    difference = sum(map(sizes.__getitem__, larger)) - sum(map(sizes.__getitem__, smaller))
    assert 0 <= difference <= max(sizes.values())
