"""Tests of the engine's thread: the limit of its queue, and what happens to requests at its end."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from device_runner.serving.access import Access
from device_runner.serving.app import make_app
from device_runner.serving.models import Models
from device_runner.serving.worker import BusyError, GenerationEvent, Worker
from prge.data.tokenization.tokenizer import Tokenizer
from prge.engine import FloatArray
from prge.errors import DataError, EngineError
from prge.generation.loop import GenerationSettings, Generator, Request, Ticket
from prge.generation.prompts import Prompt
from tests.numpy_generation_engine import NumpyGenerationEngine, make_adapter
from tests.prge.data.tiny_tokenizers import byte_level_backend
from tests.refusals import raises

TOKENIZER = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, prepend_bos=True)


def request(*tokens: int, max_tokens: int = 5) -> Request:
    return Request(Prompt(tokens or (1, 5)), make_adapter(), GenerationSettings(max_tokens))


class Broken(NumpyGenerationEngine):
    """A generation engine with a defect."""

    def step(self, tokens: Mapping[int, int]) -> dict[int, FloatArray]:
        raise ZeroDivisionError("a mistake")


def ended(output: Queue[GenerationEvent]) -> tuple[str, Ticket]:
    """Return a completion's whole text, and its ticket."""
    text = ""
    while isinstance(event := output.get(timeout=10), str):
        text += event
    return text, event


def test_text_and_the_ticket_arrive_in_order() -> None:
    output: Queue[GenerationEvent] = Queue()
    with Worker(Generator(NumpyGenerationEngine(), TOKENIZER), 4) as worker:
        for tokens in ((1, 5), (1, 9)):
            worker.submit([(request(*tokens), output.put)])
            text, ticket = ended(output)
            assert ticket.wait(0).text == text
            (alone,) = Generator(NumpyGenerationEngine(), TOKENIZER).generate([request(*tokens)])
            assert alone.text == text


def test_all_completions_of_a_request_are_accepted_or_none() -> None:
    output: Queue[GenerationEvent] = Queue()
    worker = Worker(Generator(NumpyGenerationEngine(context=4000), TOKENIZER), 3)
    with worker:
        tickets = worker.submit([(request(max_tokens=3000), output.put)] * 2)
        with pytest.raises(BusyError, match="3"):
            worker.submit([(request(), output.put)] * 2)
        with raises(DataError, "prompt-empty"):
            worker.submit([(Request(Prompt(()), make_adapter()), output.put)])
        worker.cancel(tickets)
        assert {ended(output)[1].wait(0).reason for _ in tickets} == {"cancelled"}
        worker.submit([(request(), output.put)] * 3)
        assert {ended(output)[1].wait(0).reason for _ in range(3)} == {"length"}
    assert not worker.alive
    with pytest.raises(BusyError):
        worker.submit([(request(), output.put)])


def test_all_tickets_end_with_the_worker() -> None:
    output: Queue[GenerationEvent] = Queue()
    with Worker(Generator(NumpyGenerationEngine(context=4000), TOKENIZER), 3) as worker:
        worker.submit([(request(max_tokens=3000), output.put)])
    with raises(EngineError, "server-ends"):
        ended(output)[1].wait(0)


def test_an_unexpected_error_ends_the_worker_and_is_raised() -> None:
    output: Queue[GenerationEvent] = Queue()
    with pytest.raises(ZeroDivisionError), Worker(Generator(Broken(), TOKENIZER), 3) as worker:
        worker.submit([(request(), output.put)])
        with raises(EngineError, "server-ends"):
            ended(output)[1].wait(0)
        assert not worker.alive


def test_a_worker_reports_when_it_becomes_busy_and_idle() -> None:
    states: list[bool] = []
    output: Queue[GenerationEvent] = Queue()
    with Worker(Generator(NumpyGenerationEngine(context=4000), TOKENIZER), 4, states.append) as worker:
        first = worker.submit([(request(max_tokens=3000), output.put)])
        second = worker.submit([(request(max_tokens=3000), output.put)])
        worker.cancel(first)
        assert ended(output)[1] in first and states == [True]
        worker.cancel(second)
        assert ended(output)[1] in second and states == [True, False]
        with raises(DataError, "prompt-empty"):
            worker.submit([(Request(Prompt(()), make_adapter()), output.put)])
        assert states == [True, False]
        worker.submit([(request(), output.put)])
        ended(output)
        assert states == [True, False] * 2


def test_learning_is_paused_from_a_request_to_its_completion() -> None:
    changes: list[int] = []
    learning: Any = SimpleNamespace(problem="", pause=lambda is_answering: changes.append(is_answering or -1))
    models = Models({"base": make_adapter()}, TOKENIZER)
    with Worker(Generator(NumpyGenerationEngine(), TOKENIZER), 4, learning.pause) as worker:
        client = TestClient(make_app(models, worker, Access(), learning=learning), "http://localhost")
        for prompt, status in (("a", 200), ("word " * 1000, 400), ("b", 200)):
            parsed = {"model": "base", "prompt": prompt, "max_tokens": 3}
            assert client.post("/v1/completions", json=parsed).status_code == status
    waits = list(accumulate(changes))
    # Paused twice until the worker has the request, and then once.
    assert waits == [1, 2, 1, 0, 1, 0, 1, 2, 1, 0]
