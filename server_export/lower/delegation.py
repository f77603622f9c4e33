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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir.backend.backend_details import PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram

# Operators that are worth a second process, which takes a tenth of a second to begin.
_WORTH_A_PROCESS = 500

Results: TypeAlias = dict[str, list[PreprocessResult]]


@contextmanager
def in_two_processes() -> Iterator[None]:
    """Let ExecuTorch make XNNPACK's delegates as here while the context lasts.

    with in_two_processes():
        manager.to_backend(partitioner)
    """
    ours = {
        "copy_exported_program_for_preprocess": copy_without_weights,
        "preprocess_multimethod": make_delegates,
    }
    theirs = {name: vars(XnnpackBackend)[name] for name in ours if name in vars(XnnpackBackend)}
    for name, function in ours.items():
        setattr(XnnpackBackend, name, function)  # called of the class: nothing is bound
    try:
        yield
    finally:
        for name in ours:
            delattr(XnnpackBackend, name)  # what it inherits shows again
        for name, function in theirs.items():
            setattr(XnnpackBackend, name, function)


def copy_without_weights(program: ExportedProgram, specs: Sequence[CompileSpec]) -> ExportedProgram:
    """A program whose graph may be changed; its weights, which are only read, are not copied."""
    constants = (*program.state_dict.values(), *program.constants.values())
    kept = {id(constant): constant for constant in constants if isinstance(constant, torch.Tensor)}
    return copy.deepcopy(program, kept)


def make_delegates(
    programs: Mapping[str, list[ExportedProgram]], specs: Mapping[str, list[list[CompileSpec]]]
) -> Results:
    """The delegates of all methods, by method and in order."""

    def delegates(methods: Iterable[str]) -> Results:
        return {
            method: list(map(XnnpackBackend.preprocess, programs[method], specs[method]))
            for method in methods
        }

    sizes = {method: sum(len(part.graph.nodes) for part in parts) for method, parts in programs.items()}
    here, there = halves(sizes)
    if sum(sizes[method] for method in there) < _WORTH_A_PROCESS or not _can_fork():
        return delegates(programs)
    with _second_process(lambda: delegates(there)) as receive:
        made_here = delegates(here)
        made_there = receive(made_here)
    results = made_here | (delegates(there) if made_there is None else made_there)
    return {method: results[method] for method in programs}


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

    Yields a function that waits for its results and reads them, but for the weights that the results made
    here have too. It returns None if the process failed: the work is then to be done here.
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

        def receive(made_here: Results) -> Results | None:
            try:
                results, sizes = receiver.recv()
            except EOFError:
                return None
            return _with_weights(results, sizes, weights, made_here)

        try:
            yield receive
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


def _with_weights(results: Results, sizes: list[list[int]], weights: Path, made_here: Results) -> Results:
    """Results with their weights: those made here under the same key, a digest, or else as written."""
    buffers = {key: data for result in _all(made_here) for key, data in _buffers(result)}
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
