"""The thread that asks the engine: how much it takes in, and what happens to that at its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from queue import Queue

import pytest

from device_runner.serving.worker import BusyError, Told, Worker
from prge.engine import FloatArray
from prge.errors import DataError, EngineError
from prge.rows.tokenization.tokenizer import Tokenizer
from prge.text.loop import GenerationSettings, Generator, Request, Ticket
from prge.text.prompts import Prompt
from tests.prge.rows.tiny_tokenizers import byte_level_backend
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
        with pytest.raises(BusyError, match="at most 3 answers"):
            worker.submit([(request(), told.put)] * 2)
        with pytest.raises(DataError, match="it is empty"):
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
    with pytest.raises(EngineError, match="the server ends"):
        ended(told)[1].wait(0)


def test_a_mistake_ends_it_and_is_not_hidden() -> None:
    told: Queue[Told] = Queue()
    with pytest.raises(ZeroDivisionError), Worker(Generator(Broken(), TOKENIZER), 3) as worker:
        worker.submit([(request(), told.put)])
        with pytest.raises(EngineError, match="the server ends"):
            ended(told)[1].wait(0)
        assert not worker.alive


class Digging:
    """Something to do beside answers, which counts its spadefuls and is told to look after each."""

    seconds = 0.01

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.dug = self.checked = 0
        self.is_done = False

    def work(self) -> bool:
        while not self.is_done:
            self.dug += 1
            time.sleep(0.001)
            assert self.worker is not None
            self.worker.give_way()
        return False

    def check(self) -> None:
        self.checked += 1


def test_what_is_done_beside_answers_gives_way_to_them() -> None:
    told: Queue[Told] = Queue()
    digging = Digging()
    worker = digging.worker = Worker(Generator(NumpySpeaker(), TOKENIZER), 4, digging)
    with worker:
        for tokens in ((1, 5), (1, 9)):
            before = digging.dug
            worker.submit([(request(*tokens), told.put)])
            text, _ = ended(told)
            # The spadeful that it was at, and not one while the answer was made.
            assert digging.dug <= before + 3
            (alone,) = Generator(NumpySpeaker(), TOKENIZER).generate([request(*tokens)])
            assert alone.text == text
        begun = digging.dug
        while digging.dug < begun + 5:
            time.sleep(0.001)
    # It ended on the way, with the server.
    assert not digging.is_done and digging.checked in (digging.dug, digging.dug - 1)
    assert not worker.alive


class Storing(Digging):
    """Something to do that waits for the storage, once."""

    def __init__(self) -> None:
        super().__init__()
        self.storage, self.stored = threading.Event(), list[int]()

    def work(self) -> bool:
        if self.is_done:
            return False
        self.is_done = True
        assert self.worker is not None
        self.stored.append(self.worker.apart(lambda: 7 if self.storage.wait(10) else 0))
        return True


def test_answers_are_made_while_the_storage_is_waited_for() -> None:
    told: Queue[Told] = Queue()
    storing = Storing()
    worker = storing.worker = Worker(Generator(NumpySpeaker(), TOKENIZER), 4, storing)
    with worker:
        worker.submit([(request(), told.put)])
        assert ended(told)[1].answer is not None and not storing.stored
        storing.storage.set()
        while not storing.stored:
            time.sleep(0.001)
    assert storing.stored == [7]
    # At the end what was begun is stored.
    ending = Storing()
    worker = ending.worker = Worker(Generator(NumpySpeaker(), TOKENIZER), 4, ending)
    with worker:
        while not ending.is_done:
            time.sleep(0.001)
        threading.Timer(0.1, ending.storage.set).start()
    assert ending.storage.is_set()


def test_giving_way_beside_nothing_does_nothing() -> None:
    Worker(Generator(NumpySpeaker(), TOKENIZER), 4).give_way()
