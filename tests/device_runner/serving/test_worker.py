"""The thread that asks the engine: how much it takes in, and what happens to that at its end."""

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
from device_runner.serving.worker import BusyError, Told, Worker
from prge.engine import FloatArray
from prge.errors import DataError, EngineError
from prge.rows.tokenization.tokenizer import Tokenizer
from prge.text.loop import GenerationSettings, Generator, Request, Ticket
from prge.text.prompts import Prompt
from tests.prge.rows.tiny_tokenizers import byte_level_backend
from tests.refusals import raises
from tests.speakers import NumpySpeaker, make_adapter

TOKENIZER = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, prepend_bos=True)


def request(*tokens: int, most: int = 5) -> Request:
    return Request(Prompt(tokens or (1, 5)), make_adapter(), GenerationSettings(most))


class Broken(NumpySpeaker):
    """A speaker with a mistake in it."""

    def step(self, tokens: Mapping[int, int]) -> dict[int, FloatArray]:
        raise ZeroDivisionError("a mistake")


def ended(told: Queue[Told]) -> tuple[str, Ticket]:
    """All pieces of an answer's text, and its ticket."""
    text = ""
    while isinstance(piece := told.get(timeout=10), str):
        text += piece
    return text, piece


def test_texts_and_the_ticket_are_told_in_order() -> None:
    told: Queue[Told] = Queue()
    with Worker(Generator(NumpySpeaker(), TOKENIZER), 4) as worker:
        for tokens in ((1, 5), (1, 9)):
            worker.submit([(request(*tokens), told.put)])
            text, ticket = ended(told)
            assert ticket.wait(0).text == text
            (alone,) = Generator(NumpySpeaker(), TOKENIZER).generate([request(*tokens)])
            assert alone.text == text


def test_it_takes_all_answers_of_a_request_or_none() -> None:
    told: Queue[Told] = Queue()
    worker = Worker(Generator(NumpySpeaker(context=4000), TOKENIZER), 3)
    with worker:
        tickets = worker.submit([(request(most=3000), told.put)] * 2)
        with pytest.raises(BusyError, match="3"):
            worker.submit([(request(), told.put)] * 2)
        with raises(DataError, "prompt-empty"):
            worker.submit([(Request(Prompt(()), make_adapter()), told.put)])
        worker.cancel(tickets)
        assert {ended(told)[1].wait(0).reason for _ in tickets} == {"cancelled"}
        worker.submit([(request(), told.put)] * 3)
        assert {ended(told)[1].wait(0).reason for _ in range(3)} == {"length"}
    assert not worker.alive
    with pytest.raises(BusyError):
        worker.submit([(request(), told.put)])


def test_at_its_end_nobody_waits_any_more() -> None:
    told: Queue[Told] = Queue()
    with Worker(Generator(NumpySpeaker(context=4000), TOKENIZER), 3) as worker:
        worker.submit([(request(most=3000), told.put)])
    with raises(EngineError, "server-ends"):
        ended(told)[1].wait(0)


def test_a_mistake_ends_it_and_is_not_hidden() -> None:
    told: Queue[Told] = Queue()
    with pytest.raises(ZeroDivisionError), Worker(Generator(Broken(), TOKENIZER), 3) as worker:
        worker.submit([(request(), told.put)])
        with raises(EngineError, "server-ends"):
            ended(told)[1].wait(0)
        assert not worker.alive


def test_it_tells_when_the_first_answer_begins_and_the_last_one_has_ended() -> None:
    seen: list[bool] = []
    told: Queue[Told] = Queue()
    with Worker(Generator(NumpySpeaker(context=4000), TOKENIZER), 4, seen.append) as worker:
        first = worker.submit([(request(most=3000), told.put)])
        second = worker.submit([(request(most=3000), told.put)])
        worker.cancel(first)
        assert ended(told)[1] in first and seen == [True]
        worker.cancel(second)
        assert ended(told)[1] in second and seen == [True, False]
        with raises(DataError, "prompt-empty"):
            worker.submit([(Request(Prompt(()), make_adapter()), told.put)])
        assert seen == [True, False]
        worker.submit([(request(), told.put)])
        ended(told)
        assert seen == [True, False] * 2


def test_what_learns_waits_from_a_request_to_the_end_of_its_answer() -> None:
    seen: list[int] = []
    learning: Any = SimpleNamespace(problem="", pause=lambda is_answering: seen.append(is_answering or -1))
    models = Models({"base": make_adapter()}, TOKENIZER)
    with Worker(Generator(NumpySpeaker(), TOKENIZER), 4, learning.pause) as worker:
        client = TestClient(make_app(models, worker, Access(), learning=learning), "http://localhost")
        for prompt, status in (("a", 200), ("word " * 1000, 400), ("b", 200)):
            asked = {"model": "base", "prompt": prompt, "max_tokens": 3}
            assert client.post("/v1/completions", json=asked).status_code == status
    waits = list(accumulate(seen))
    # Of an answer, twice, until the worker has it, and then once.
    assert waits == [1, 2, 1, 0, 1, 0, 1, 2, 1, 0]
