"""Feedback that clients give: what is refused when it is sent, quotas, and a file that others hold."""

from __future__ import annotations

import asyncio
import fcntl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from device_runner.serving import feedback as module
from device_runner.serving.feedback import Feedback, FeedbackFile
from device_runner.serving.protocol import Asked, Judgement, RequestError
from prge.rows.readers.feedback import Answered, read_feedback
from prge.text.choice import ChoiceSettings
from tests.prge.rows.test_feedback_examples import make_examples

Make = Callable[..., Feedback]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "feedback.jsonl"


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def make(path: Path, told: list[str]) -> Iterator[Make]:
    """Makes what keeps feedback, which remembers an answer to each of some prompts."""
    with ThreadPoolExecutor(1) as storage:

        def made(*answers: str, most_bytes: int = 1 << 20, prompt: str = "a dog") -> Feedback:
            file = FeedbackFile(path, make_examples(), storage, most_bytes)
            feedback = Feedback(file, told.append)
            asked = Asked("m", (), (prompt,), 1, (), ChoiceSettings(), 1, False, False)
            for number, answer in enumerate(answers):
                feedback.remember(asked, 0, Answered(str(number), "m", "", {"prompt": prompt}, answer, {}))
            return feedback

        yield made


def take(feedback: Feedback, id: str, client: str = "here", **judged: Any) -> tuple[int, str]:
    """The status and the message that a client gets."""
    judgement = Judgement(id, 0, judged.get("rating"), judged.get("correction"))
    try:
        asyncio.run(feedback.take(judgement, client))
    except RequestError as error:
        return error.status, str(error)
    return 200, ""


def test_what_cannot_be_learnt_is_refused_and_may_be_corrected(make: Make, path: Path) -> None:
    feedback = make("")
    for rating in ("good", "bad"):
        status, message = take(feedback, "0", rating=rating)
        assert status == 400 and "can't be learnt: its completion is empty" in message
    assert not path.exists() and not feedback.problem
    assert take(feedback, "0", correction="a cat") == (200, "")
    assert take(feedback, "0", correction="a cow")[0] == 409
    assert [row["correction"] for row in read_feedback(path)] == ["a cat"]


def test_of_two_judgements_at_once_one_is_taken(make: Make, path: Path) -> None:
    feedback = make(" b")

    async def both() -> list[Any]:
        judgements = [Judgement("0", 0, rating, None) for rating in ("good", "bad")]
        return await asyncio.gather(*(feedback.take(each, "") for each in judgements), return_exceptions=True)

    first, second = asyncio.run(both())
    assert first is None and isinstance(second, RequestError) and second.status == 409
    assert [row["rating"] for row in read_feedback(path)] == ["good"]


def test_a_client_may_give_some_bytes_an_hour_and_others_go_on(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feedback = make(*[" b"] * 20, prompt="word " * 100)
    monkeypatch.setattr(module, "MOST_OF_CLIENT", 1500)
    found = [take(feedback, str(number), rating="good") for number in range(5)]
    assert [status for status, _ in found] == [200, 200, 429, 429, 429] and "go on in 3600" in found[2][1]
    assert path.stat().st_size <= 1500
    assert take(feedback, "5", "there", rating="good")[0] == 200
    assert take(feedback, "4", rating="good")[0] == 429
    now = time.monotonic() + 3601
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert take(feedback, "4", rating="good") == (200, "")


def test_a_file_has_a_limit_and_takes_more_once_there_is_room(
    make: Make, path: Path, told: list[str]
) -> None:
    feedback = make(*[" b"] * 9, most_bytes=500)
    statuses = [take(feedback, str(number), rating="good")[0] for number in range(9)]
    assert set(statuses) == {200, 507} and path.stat().st_size <= 500
    status, message = take(feedback, "8", rating="good")
    assert status == 507 and "prge rows forget" in message and "--feedback-limit" in message
    assert feedback.problem and len(told) == 1
    path.write_bytes(b"")
    assert take(feedback, "8", rating="good") == (200, "") and not feedback.problem


def test_a_lock_that_another_holds_is_waited_for_and_holds_up_nothing_else(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feedback = make(" b", " c")
    monkeypatch.setattr(module, "SECONDS_TO_LOCK", 0.5)
    longest = 0.0

    async def taken() -> None:
        """Feedback beside a clock of the event loop."""
        nonlocal longest
        taking = asyncio.ensure_future(feedback.take(Judgement("0", 0, "good", None), ""))
        while not taking.done():
            begin = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - begin)
        await taking

    with path.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        begin = time.monotonic()
        with pytest.raises(RequestError) as error:
            asyncio.run(taken())
        assert error.value.status == 503 and 0.4 < time.monotonic() - begin < 5 and longest < 0.4
        assert feedback.problem
        Thread(target=lambda: (time.sleep(0.1), fcntl.flock(stream, fcntl.LOCK_UN))).start()
        assert take(feedback, "0", rating="good") == (200, "") and not feedback.problem
        # Who ends waits no longer.
        fcntl.flock(stream, fcntl.LOCK_EX)
        monkeypatch.setattr(module, "SECONDS_TO_LOCK", 60.0)
        Thread(target=lambda: (time.sleep(0.1), feedback.close())).start()
        begin = time.monotonic()
        assert take(feedback, "1", rating="good")[0] == 503 and time.monotonic() - begin < 5
