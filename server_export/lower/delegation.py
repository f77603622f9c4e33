"""XNNPACK's delegates of several methods, made in two processes.

ExecuTorch makes one delegate after another, in Python that spends its time on every operator of every method.
The methods of a program don't wait for each other, so half of the operators go to a second process. What
XNNPACK does to a method stays its own.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from executorch.backends.xnnpack import xnnpack_preprocess
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram

# Operators that are worth a second process, which takes a tenth of a second to begin.
_WORTH_A_PROCESS = 500

Results: TypeAlias = dict[str, list[PreprocessResult]]


class XnnpackBackend(BackendDetails):
    """The preprocessing of XNNPACK's backend; ExecuTorch takes the last class of a backend's name."""

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """One delegate."""
        return xnnpack_preprocess.XnnpackBackend.preprocess(edge_program, compile_specs)

    @classmethod
    def copy_exported_program_for_preprocess(
        cls, edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> ExportedProgram:
        """A graph that may be changed; the weights, which are only read, are not copied."""
        constants = (*edge_program.state_dict.values(), *edge_program.constants.values())
        kept = {id(constant): constant for constant in constants if isinstance(constant, torch.Tensor)}
        return copy.deepcopy(edge_program, kept)

    @classmethod
    def preprocess_multimethod(
        cls,
        edge_programs: dict[str, list[ExportedProgram]],
        compile_specs: dict[str, list[list[CompileSpec]]],
    ) -> Results:
        """The delegates of all methods."""

        def delegates(methods: Iterable[str]) -> Results:
            return {
                method: list(map(cls.preprocess, edge_programs[method], compile_specs[method]))
                for method in methods
            }

        sizes = {
            method: sum(len(program.graph.nodes) for program in programs)
            for method, programs in edge_programs.items()
        }
        here, there = halves(sizes)
        if sum(sizes[method] for method in there) < _WORTH_A_PROCESS or not _can_fork():
            return delegates(edge_programs)
        with _second_process(lambda: delegates(there)) as answers:
            results = delegates(here)
            more = answers(results)
        results |= delegates(there) if more is None else more
        return {method: results[method] for method in edge_programs}


def halves(sizes: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Names in two groups of about the same size, the larger one first."""
    groups: tuple[list[str], list[str]] = [], []
    totals = [0, 0]
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        lighter = totals.index(min(totals))
        groups[lighter].append(name)
        totals[lighter] += sizes[name]
    return groups if totals[0] >= totals[1] else (groups[1], groups[0])


def _can_fork() -> bool:
    """Whether a second process can begin with what this one has in memory, and has a core to run on."""
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


@contextmanager
def _second_process(work: Callable[[], Results]) -> Iterator[Callable[[Results], Results | None]]:
    """Run `work` in a fork of this process.

    Yields a function that waits for its results and reads them, but for the weights that are known already
    from other results. It answers None if the process failed: the work is then to be done here.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder, receiver:
        weights = Path(folder, "weights")
        process = context.Process(target=_send, args=(work, weights, sender), daemon=True)
        with warnings.catch_warnings():
            # Of threads that a fork doesn't have: torch's only wait, and the fork works with one of its own.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        sender.close()

        def answers(known: Results) -> Results | None:
            try:
                results, sizes = receiver.recv()
            except EOFError:
                return None
            return _with_weights(results, sizes, weights, known)

        try:
            yield answers
        finally:
            process.terminate()
            process.join()


def _send(work: Callable[[], Results], weights: Path, sender: Connection) -> None:
    """Do the work, write the weights one after another, and send results without them, and their sizes."""
    torch.set_num_threads(1)
    sizes = []
    try:
        results = work()
        with weights.open("wb") as stream:
            for result in _all(results):
                sizes.append([stream.write(bytes(buffer)) for buffer in result.data_store_output.buffers])
                result.data_store_output = replace(result.data_store_output, buffers=[])
        sender.send((results, sizes))
    except (Exception, KeyboardInterrupt):
        return  # The first process does the work again, and tells what is wrong with it.


def _with_weights(results: Results, sizes: list[list[int]], weights: Path, known: Results) -> Results:
    """Results with their weights: those that others have under the same key, a digest, or as written."""
    buffers = {key: data for result in _all(known) for key, data in _buffers(result)}
    with weights.open("rb") as stream:
        offset = 0
        for result, lengths in zip(_all(results), sizes, strict=True):
            store = result.data_store_output
            keys = {entry.buffer_index: key for key, entry in store.pte_data.items()}
            for index, length in enumerate(lengths):
                data = buffers.get(keys.get(index, ""))
                if data is None:
                    stream.seek(offset)
                    data = stream.read(length)
                store.buffers.append(data)
                offset += length
    return results


def _all(results: Results) -> Iterator[PreprocessResult]:
    for delegates in results.values():
        yield from delegates


def _buffers(result: PreprocessResult) -> Iterator[tuple[str, Any]]:
    store = result.data_store_output
    for key, entry in store.pte_data.items():
        yield key, store.buffers[entry.buffer_index]
