"""What a server remembers of its answers, so that clients may rate or correct them, and the file of that."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from device_runner.serving.protocol import Asked, Judgement, RequestError
from prge.errors import RunError
from prge.rows.feedback import Answered, Fields, append_feedback

# Of the newest answers: how many are remembered, and characters of them and of what was asked together.
MOST_ANSWERS = 1000
MOST_CHARACTERS = 4 << 20
# What an answer, or a message, takes beside its characters.
_CHARACTERS_EACH = 400

_Key = tuple[str, int]


class Feedback:
    """Answers that feedback may be given on, and where it goes; used by one thread.

    Args:
        path: file of rows; None keeps and remembers nothing.
        tell: called once a failure of the file, until it can be written again.
        kept: called with every row that was kept.
    """

    def __init__(
        self,
        path: Path | None,
        tell: Callable[[str], object] = lambda text: None,
        kept: Callable[[Fields], object] = lambda row: None,
    ) -> None:
        self._path = path
        self._tell = tell
        self._kept = kept
        self._fails = False
        # None: it was judged.
        self._answers: OrderedDict[_Key, tuple[Answered | None, int]] = OrderedDict()
        self._characters = 0

    @property
    def keeps(self) -> bool:
        """Whether feedback is kept."""
        return self._path is not None

    def remember(self, asked: Asked, number: int, answered: Answered) -> None:
        """Keep an answer in mind, by its number in its request; the oldest ones are forgotten for it.

        An answer to tokens isn't: rows hold texts.
        """
        if not self.keeps or not (asked.messages or isinstance(answered.asked["prompt"], str)):
            return
        sizes = [len(str(message["content"])) + _CHARACTERS_EACH for message in asked.messages]
        size = _CHARACTERS_EACH + len(answered.answer) + sum(sizes or [len(answered.asked["prompt"])])
        self._put((answered.id, number), answered, size)

    def answered(self, judgement: Judgement) -> Answered:
        """The answer that a client says something of; raises RequestError."""
        if self._path is None:
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

    def take(self, judgement: Judgement) -> None:
        """Keep what a client says of an answer; raises RequestError."""
        answered, path = self.answered(judgement), self._path
        assert path is not None
        try:
            row = answered.judged(judgement.rating, judgement.correction)
        except ValueError as error:
            raise RequestError(400, str(error)) from None
        try:
            append_feedback(path, [row])
        except RunError as error:
            if not self._fails:
                self._tell(f"feedback can't be kept: {error}")
            self._fails = True
            raise RequestError(503, f"feedback can't be kept: {error.what}", kind="server_error") from None
        self._fails = False
        self._put((judgement.id, judgement.index), None, _CHARACTERS_EACH)
        self._kept(row)

    def _put(self, key: _Key, answered: Answered | None, size: int) -> None:
        self._characters += size - self._answers.pop(key, (None, 0))[1]
        self._answers[key] = answered, size
        while len(self._answers) > MOST_ANSWERS or self._characters > MOST_CHARACTERS:
            self._characters -= self._answers.popitem(last=False)[1][1]
