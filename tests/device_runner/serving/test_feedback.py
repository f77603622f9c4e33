"""Tests of clients' feedback: what is refused at once, quotas, and a locked file."""

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
from device_runner.serving.protocol import FeedbackRequest, ParsedRequest, RequestError
from prge.data.readers.feedback import AnswerRecord, read_feedback
from prge.generation.sampling import SamplingSettings
from tests.prge.data.test_feedback_examples import make_examples

Make = Callable[..., Feedback]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "feedback.jsonl"


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def make(path: Path, messages: list[str]) -> Iterator[Make]:
    """Return a Feedback that remembers a completion for each of some prompts."""
    with ThreadPoolExecutor(1) as storage:

        def make_feedback(*answers: str, max_bytes: int = 1 << 20, prompt: str = "a dog") -> Feedback:
            file = FeedbackFile(path, make_examples(), storage, max_bytes)
            feedback = Feedback(file, messages.append)
            parsed = ParsedRequest("m", (), (prompt,), 1, (), SamplingSettings(), 1, False, False)
            for number, answer in enumerate(answers):
                feedback.remember(
                    parsed, 0, AnswerRecord(str(number), "m", "", {"prompt": prompt}, answer, {})
                )
            return feedback

        yield make_feedback


def store(feedback: Feedback, id: str, client: str = "here", **judged: Any) -> tuple[int, str]:
    """Return the status and the message that a client receives."""
    judgement = FeedbackRequest(id, 0, judged.get("rating"), judged.get("correction"))
    try:
        asyncio.run(feedback.store(judgement, client))
    except RequestError as error:
        return error.status, str(error)
    return 200, ""


def test_unusable_feedback_is_refused_and_may_be_corrected(make: Make, path: Path) -> None:
    feedback = make("")
    for rating in ("good", "bad"):
        status, message = store(feedback, "0", rating=rating)
        assert status == 400 and "its completion is empty" in message
    assert not path.exists() and not feedback.problem
    assert store(feedback, "0", correction="a cat") == (200, "")
    assert store(feedback, "0", correction="a cow")[0] == 409
    assert [row["correction"] for row in read_feedback(path)] == ["a cat"]


def test_of_two_simultaneous_judgements_one_is_accepted(make: Make, path: Path) -> None:
    feedback = make(" b")

    async def both() -> list[Any]:
        judgements = [FeedbackRequest("0", 0, rating, None) for rating in ("good", "bad")]
        return await asyncio.gather(
            *(feedback.store(each, "") for each in judgements), return_exceptions=True
        )

    first, second = asyncio.run(both())
    assert first is None and isinstance(second, RequestError) and second.status == 409
    assert [row["rating"] for row in read_feedback(path)] == ["good"]


def test_a_client_has_an_hourly_quota_of_its_own(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feedback = make(*[" b"] * 20, prompt="word " * 100)
    monkeypatch.setattr(module, "MAX_OF_CLIENT", 1500)
    result = [store(feedback, str(number), rating="good") for number in range(5)]
    assert [status for status, _ in result] == [200, 200, 429, 429, 429] and "wait 3600 seconds" in result[2][
        1
    ]
    assert path.stat().st_size <= 1500
    assert store(feedback, "5", "there", rating="good")[0] == 200
    assert store(feedback, "4", rating="good")[0] == 429
    now = time.monotonic() + 3601
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert store(feedback, "4", rating="good") == (200, "")


def test_a_file_has_a_size_limit(make: Make, path: Path, messages: list[str]) -> None:
    feedback = make(*[" b"] * 9, max_bytes=500)
    statuses = [store(feedback, str(number), rating="good")[0] for number in range(9)]
    assert set(statuses) == {200, 507} and path.stat().st_size <= 500
    status, message = store(feedback, "8", rating="good")
    assert status == 507 and "prge rows forget" in message and "--feedback-limit" in message
    assert feedback.problem and len(messages) == 1
    path.write_bytes(b"")
    assert store(feedback, "8", rating="good") == (200, "") and not feedback.problem


def test_waiting_for_a_lock_delays_nothing_else(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feedback = make(" b", " c")
    monkeypatch.setattr(module, "SECONDS_TO_LOCK", 0.5)
    longest = 0.0

    async def store_and_measure() -> None:
        """Send feedback while the event loop's latency is measured."""
        nonlocal longest
        storing = asyncio.ensure_future(feedback.store(FeedbackRequest("0", 0, "good", None), ""))
        while not storing.done():
            begin = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - begin)
        await storing

    with path.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        begin = time.monotonic()
        with pytest.raises(RequestError) as error:
            asyncio.run(store_and_measure())
        assert error.value.status == 503 and 0.4 < time.monotonic() - begin < 5 and longest < 0.4
        assert feedback.problem
        Thread(target=lambda: (time.sleep(0.1), fcntl.flock(stream, fcntl.LOCK_UN))).start()
        assert store(feedback, "0", rating="good") == (200, "") and not feedback.problem
        # After `close`, nothing waits for the lock.
        fcntl.flock(stream, fcntl.LOCK_EX)
        monkeypatch.setattr(module, "SECONDS_TO_LOCK", 60.0)
        Thread(target=lambda: (time.sleep(0.1), feedback.close())).start()
        begin = time.monotonic()
        assert store(feedback, "1", rating="good")[0] == 503 and time.monotonic() - begin < 5
