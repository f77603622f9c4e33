"""A server's newest completions, for clients to rate or correct, and the file that stores their feedback."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from device_runner.serving.protocol import FeedbackRequest, ParsedRequest, RequestError
from prge.data.feedback_examples import FeedbackExamples, UnlearnableError
from prge.data.readers.feedback import AnswerRecord, Fields, append_feedback, row_bytes
from prge.errors import RunError, as_clause

# Limits of the memory of completions: their number, and characters of them and their prompts together.
MAX_ANSWERS = 1000
MAX_CHARACTERS = 4 << 20
# Overhead of a completion or a message, counted as characters.
_CHARACTERS_EACH = 400
# Bytes of feedback that a client may send per hour.
MAX_OF_CLIENT = 16 << 20
_HOUR = 3600.0
# Seconds to wait for another process to release the file's lock, and between two attempts.
SECONDS_TO_LOCK = 5.0
_SECONDS_BETWEEN = 0.02

_Key = tuple[str, int]


@dataclass(frozen=True)
class FeedbackFile:
    """Where feedback is stored.

    Attributes:
        path: the path of the file.
        examples: builds a row's examples, to refuse rows that can't be trained on.
        storage: its one thread is the only one that uses `examples` and the file.
        max_bytes: largest size of the file.
    """

    path: Path
    examples: FeedbackExamples
    storage: Executor
    max_bytes: int


class Feedback:
    """Completions that clients may give feedback on; used by the event loop, which never waits for storage.

    Args:
        file: stores rows; None: no feedback is accepted.
        log: called once when the file fails, and again only after it could be written.
        on_stored: called with every row that was stored.
    """

    def __init__(
        self,
        file: FeedbackFile | None = None,
        log: Callable[[str], object] = lambda text: None,
        on_stored: Callable[[Fields], object] = lambda row: None,
    ) -> None:
        self._file = file
        self._log = log
        self._on_stored = on_stored
        self.problem = ""
        """Why the last feedback could not be stored; empty if nothing is wrong."""
        self._ends = threading.Event()
        # None: feedback was given, or is being stored.
        self._answers: OrderedDict[_Key, tuple[AnswerRecord | None, int]] = OrderedDict()
        self._characters = 0
        # Used by the storage thread: bytes of each client since the hour began.
        self._hour, self._bytes = time.monotonic(), Counter[str]()

    @property
    def is_enabled(self) -> bool:
        """Whether feedback is stored."""
        return self._file is not None

    def close(self) -> None:
        """Stop waiting for the file's lock."""
        self._ends.set()

    def remember(self, parsed: ParsedRequest, number: int, answer_record: AnswerRecord) -> None:
        """Remember a completion by its index in its response; the oldest ones are forgotten.

        Completions of token prompts are not remembered, because rows hold text.
        """
        if not self.is_enabled or not (
            parsed.messages or isinstance(answer_record.prompt_fields["prompt"], str)
        ):
            return
        self._put((answer_record.id, number), answer_record, _size(answer_record))

    def answer_record(self, feedback_request: FeedbackRequest) -> AnswerRecord:
        """Return the completion that a client's feedback is about; raises RequestError."""
        if not self.is_enabled:
            raise RequestError(404, "feedback is not stored: the server was started without --feedback FILE")
        key = feedback_request.id, feedback_request.index
        if key not in self._answers:
            raise RequestError(
                404,
                f"there is no completion {feedback_request.id!r} with index {feedback_request.index} in the "
                f"newest {MAX_ANSWERS} of text or message prompts",
                param="id",
                code="answer_not_found",
            )
        answer_record, _ = self._answers[key]
        if answer_record is None:
            raise RequestError(
                409,
                f"feedback on {feedback_request.id!r} was already given",
                param="id",
                code="feedback_given",
            )
        return answer_record

    async def store(self, feedback_request: FeedbackRequest, client: str) -> None:
        """Store a client's feedback on a completion.

        Args:
            feedback_request: the feedback.
            client: address of the client, which quotas count by.

        Raises:
            RequestError: the feedback can't be trained on, or can't be stored.
        """
        answer_record, file = self.answer_record(feedback_request), self._file
        assert file is not None
        try:
            row = answer_record.to_feedback(feedback_request.rating, feedback_request.correction)
        except ValueError as error:
            raise RequestError(400, str(error)) from None
        key, deadline = (feedback_request.id, feedback_request.index), time.monotonic() + SECONDS_TO_LOCK
        # Feedback on the same completion that arrives meanwhile is refused.
        self._put(key, None, _CHARACTERS_EACH)
        try:
            await asyncio.wrap_future(file.storage.submit(self._keep, file, row, client, deadline))
        except BaseException as error:
            self._put(key, answer_record, _size(answer_record))
            if isinstance(error, RequestError) and error.status == 507:
                self._fail(str(error))
            if not isinstance(error, RunError):
                raise
            self._fail(str(error))
            what = f"feedback can't be stored: {as_clause(error.what)}"
            raise RequestError(503, what, error_type="server_error") from None
        self.problem = ""
        self._on_stored(row)

    def _fail(self, problem: str) -> None:
        if not self.problem:
            self._log(f"feedback can't be stored: {problem}")
        self.problem = problem

    def _keep(self, file: FeedbackFile, row: Fields, client: str, deadline: float) -> None:
        """Append a row, in the storage's thread; raises RequestError or RunError."""
        try:
            file.examples.build(row)
        except UnlearnableError as error:
            raise RequestError(400, error.what, code="not_learnable") from None
        size = row_bytes(row)
        self._check_quotas(file, size, client)

        def wait() -> None:
            if self._ends.wait(_SECONDS_BETWEEN) or time.monotonic() > deadline:
                raise RunError(
                    f"{file.path} can't be written: another process holds its lock.", code="file-in-use"
                )

        append_feedback(file.path, [row], wait)
        self._bytes[client] += size

    def _check_quotas(self, file: FeedbackFile, size: int, client: str) -> None:
        """Raise RequestError if a row exceeds its client's quota or the file's size."""
        try:
            size_now = file.path.stat().st_size
        except OSError:  # appending reports what is wrong
            size_now = 0
        if size_now + size > file.max_bytes:
            raise RequestError(
                507,
                f"the server stores at most {file.max_bytes} bytes of feedback, has {size_now}: its owner "
                "can remove rows with `prge rows forget`, or raise --feedback-limit",
                error_type="server_error",
                code="feedback_full",
            )
        now = time.monotonic()
        if now - self._hour > _HOUR:
            self._hour, self._bytes = now, Counter()
        if self._bytes[client] + size > MAX_OF_CLIENT:
            seconds = int(self._hour + _HOUR - now) + 1
            raise RequestError(
                429,
                f"a client may send {MAX_OF_CLIENT} bytes of feedback per hour: wait {seconds} seconds",
                error_type="rate_limit_error",
                code="feedback_quota",
                retry_after=seconds,
            )

    def _put(self, key: _Key, answer_record: AnswerRecord | None, size: int) -> None:
        self._characters += size - self._answers.pop(key, (None, 0))[1]
        self._answers[key] = answer_record, size
        while len(self._answers) > MAX_ANSWERS or self._characters > MAX_CHARACTERS:
            self._characters -= self._answers.popitem(last=False)[1][1]


def _size(answer_record: AnswerRecord) -> int:
    """Return the approximate number of characters of a completion and its prompt."""
    messages = answer_record.prompt_fields.get("messages")
    texts = (
        [str(each["content"]) for each in messages] if messages else [answer_record.prompt_fields["prompt"]]
    )
    each = _CHARACTERS_EACH * len(messages or ())
    return _CHARACTERS_EACH + len(answer_record.answer) + each + sum(map(len, texts))
