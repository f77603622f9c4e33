"""What a server remembers of its answers, so that clients may rate or correct them, and the file of that."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from device_runner.serving.protocol import Asked, Judgement, RequestError
from prge.errors import RunError
from prge.rows.feedback_examples import FeedbackExamples, UnlearnableError
from prge.rows.readers.feedback import Answered, Fields, append_feedback, size_of

# Of the newest answers: how many are remembered, and characters of them and of what was asked together.
MOST_ANSWERS = 1000
MOST_CHARACTERS = 4 << 20
# What an answer, or a message, takes beside its characters.
_CHARACTERS_EACH = 400
# Bytes of feedback that a client may give in an hour.
MOST_OF_CLIENT = 16 << 20
_HOUR = 3600.0
# Until another process gives the file's lock back, and between two looks at that.
SECONDS_TO_LOCK = 5.0
_SECONDS_BETWEEN = 0.02

_Key = tuple[str, int]


@dataclass(frozen=True)
class FeedbackFile:
    """Where feedback goes.

    `examples` builds the examples of a row, to refuse one that can't be learnt. Both it and the file are used
    by the one thread of `storage` alone. `most_bytes` is the size that the file may have.
    """

    path: Path
    examples: FeedbackExamples
    storage: Executor
    most_bytes: int


class Feedback:
    """Answers that feedback may be given on; used by the event loop's thread, which never waits for storage.

    Args:
        file: takes rows; None keeps and remembers nothing.
        tell: called once a failure of the file, until it can be written again.
        kept: called with every row that was kept.
    """

    def __init__(
        self,
        file: FeedbackFile | None = None,
        tell: Callable[[str], object] = lambda text: None,
        kept: Callable[[Fields], object] = lambda row: None,
    ) -> None:
        self._file = file
        self._tell = tell
        self._kept = kept
        self.problem = ""
        """Why the last feedback couldn't be kept; empty if nothing is wrong."""
        self._ends = threading.Event()
        # None: it was judged, or is being judged.
        self._answers: OrderedDict[_Key, tuple[Answered | None, int]] = OrderedDict()
        self._characters = 0
        # Of the storage's thread: bytes of each client since an hour began.
        self._hour, self._bytes = time.monotonic(), Counter[str]()

    @property
    def keeps(self) -> bool:
        """Whether feedback is kept."""
        return self._file is not None

    def close(self) -> None:
        """Wait no longer for the file's lock."""
        self._ends.set()

    def remember(self, asked: Asked, number: int, answered: Answered) -> None:
        """Keep an answer in mind, by its number in its request; the oldest ones are forgotten for it.

        An answer to tokens isn't: rows hold texts.
        """
        if not self.keeps or not (asked.messages or isinstance(answered.asked["prompt"], str)):
            return
        self._put((answered.id, number), answered, _size(answered))

    def answered(self, judgement: Judgement) -> Answered:
        """The answer that a client says something of; raises RequestError."""
        if not self.keeps:
            raise RequestError(404, "no feedback is kept: the server was started without --feedback FILE")
        key = judgement.id, judgement.index
        if key not in self._answers:
            raise RequestError(
                404,
                f"there is no answer {judgement.id!r} with the index {judgement.index} among the newest "
                f"{MOST_ANSWERS} to texts or messages",
                param="id",
                code="answer_not_found",
            )
        answered, _ = self._answers[key]
        if answered is None:
            raise RequestError(
                409, f"feedback on {judgement.id!r} was given before", param="id", code="feedback_given"
            )
        return answered

    async def take(self, judgement: Judgement, client: str) -> None:
        """Keep what a client says of an answer.

        Args:
            judgement: of the client.
            client: its address, which quotas count by.

        Raises:
            RequestError: it can't be learnt, or can't be kept.
        """
        answered, file = self.answered(judgement), self._file
        assert file is not None
        try:
            row = answered.judged(judgement.rating, judgement.correction)
        except ValueError as error:
            raise RequestError(400, str(error)) from None
        key, deadline = (judgement.id, judgement.index), time.monotonic() + SECONDS_TO_LOCK
        # A second judgement that comes meanwhile is too late.
        self._put(key, None, _CHARACTERS_EACH)
        try:
            await asyncio.wrap_future(file.storage.submit(self._keep, file, row, client, deadline))
        except BaseException as error:
            self._put(key, answered, _size(answered))
            if isinstance(error, RequestError) and error.status == 507:
                self._fail(str(error))
            if not isinstance(error, RunError):
                raise
            self._fail(str(error))
            what = f"feedback can't be kept: {error.what}"
            raise RequestError(503, what, kind="server_error") from None
        self.problem = ""
        self._kept(row)

    def _fail(self, problem: str) -> None:
        if not self.problem:
            self._tell(f"feedback can't be kept: {problem}")
        self.problem = problem

    def _keep(self, file: FeedbackFile, row: Fields, client: str, deadline: float) -> None:
        """Append a row, in the storage's thread; raises RequestError or RunError."""
        try:
            file.examples.of(row)
        except UnlearnableError as error:
            raise RequestError(400, error.what, code="not_learnable") from None
        size = size_of(row)
        self._check_quotas(file, size, client)

        def wait() -> None:
            if self._ends.wait(_SECONDS_BETWEEN) or time.monotonic() > deadline:
                raise RunError(
                    f"{file.path} can't be written: another process holds its lock", code="file-in-use"
                )

        append_feedback(file.path, [row], wait)
        self._bytes[client] += size

    def _check_quotas(self, file: FeedbackFile, size: int, client: str) -> None:
        """Raise RequestError where a row is more than its client, or all of them, may give."""
        try:
            there = file.path.stat().st_size
        except OSError:  # appending tells what is wrong with it
            there = 0
        if there + size > file.most_bytes:
            raise RequestError(
                507,
                f"the server keeps {file.most_bytes} bytes of feedback, and has {there}: its owner may "
                "remove rows with `prge rows forget`, or raise --feedback-limit",
                kind="server_error",
                code="feedback_full",
            )
        now = time.monotonic()
        if now - self._hour > _HOUR:
            self._hour, self._bytes = now, Counter()
        if self._bytes[client] + size > MOST_OF_CLIENT:
            seconds = int(self._hour + _HOUR - now) + 1
            raise RequestError(
                429,
                f"a client may give {MOST_OF_CLIENT} bytes of feedback an hour: go on in {seconds} seconds",
                kind="rate_limit_error",
                code="feedback_quota",
                retry_after=seconds,
            )

    def _put(self, key: _Key, answered: Answered | None, size: int) -> None:
        self._characters += size - self._answers.pop(key, (None, 0))[1]
        self._answers[key] = answered, size
        while len(self._answers) > MOST_ANSWERS or self._characters > MOST_CHARACTERS:
            self._characters -= self._answers.popitem(last=False)[1][1]


def _size(answered: Answered) -> int:
    """Approximate number of characters of an answer and its prompt."""
    messages = answered.asked.get("messages")
    texts = [str(each["content"]) for each in messages] if messages else [answered.asked["prompt"]]
    each = _CHARACTERS_EACH * len(messages or ())
    return _CHARACTERS_EACH + len(answered.answer) + each + sum(map(len, texts))
