"""Many answers at once: requests come and go between rounds, every round gives each answer a token.

    submit -> waiting -> fed piece by piece -> a token a round -> ended; its sequence stays open, idle

An idle sequence whose tokens begin as a new request's do is rewound to where they part, and only what is new
is computed: the next turn of a conversation, or rows that share their beginning. How fast that is tells what
somebody has asked before, so requests say with whom they share: see `Sharing`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from threading import Event, Lock
from typing import Any, Literal

from prge.engine import FloatArray
from prge.errors import ConfigError, DataError, PrgeError, shown
from prge.files.adapter import Adapter
from prge.rows.tokenization.inputs import checked_ids, is_text
from prge.rows.tokenization.tokenizer import Tokenizer
from prge.text.choice import Choice, ChoiceSettings
from prge.text.decoding import TextStream
from prge.text.drafts import Lookup
from prge.text.prompts import Prompt
from prge.text.speaker import Speaker
from prge.verbs.bounds import bound_problems

Reason = Literal["stop", "length", "context", "cancelled"]
Overflow = Literal["error", "truncate"]
Draft = Literal["off", "lookup"]

# Tokens of an answer, and characters of its end, that only who has seen it can repeat.
_REPEATED_TOKENS, _REPEATED_CHARACTERS = 8, 16
# Prompt tokens of one round, so that answers go on and can be cancelled while a long prompt is read.
FED_AT_ONCE = 256


@dataclass(frozen=True)
class GenerationSettings:
    """How an answer is made; raises ConfigError for what can't be."""

    max_tokens: int = 128
    """Most tokens of the answer."""
    stop: tuple[str, ...] = ()
    """Words that the answer ends before; a control token's name ends it at that token."""
    choice: ChoiceSettings = field(default_factory=ChoiceSettings)
    """How each token is chosen."""
    overflow: Overflow = "error"
    """What is longer than the context: `error`, or `truncate` the prompt's beginning, so that the answer has
    room; half of the context stays the prompt's."""
    draft: Draft = "off"
    """`lookup`: an answer that is made alone goes on by several tokens at once where it repeats its prompt or
    itself. They are those that would have been chosen one by one, but for the rounding of another program."""

    def __post_init__(self) -> None:
        problems = []
        if type(self.max_tokens) is not int:
            problems.append(f"--max-tokens is {shown(self.max_tokens)}, must be a whole number")
        if not all(isinstance(word, str) and word and is_text(word) for word in self.stop):
            problems.append(f"--stop is {shown(self.stop)}, must be words in UTF-8 that aren't empty")
        problems = problems or bound_problems(self)
        if problems:
            raise ConfigError("no text can be generated so:", problems, code="settings-unusable")

    def facts(self) -> dict[str, Any]:
        """What an answer followed from beside its prompt, as a row of feedback has it."""
        return {"max_tokens": self.max_tokens, "stop": list(self.stop), **asdict(self.choice)}


@dataclass(frozen=True)
class Sharing:
    """Which requests go on from what was computed for earlier ones: those of one group."""

    group: str = ""
    needs_answer: bool = False
    """Only those that repeat the answer of the earlier one, as the next turn of its conversation does."""
    answers: tuple[str, ...] = ()
    """Earlier answers as the request has them: not always of the same tokens, or without their thoughts."""


@dataclass(frozen=True)
class Request:
    """An answer that somebody wants, from an adapter that doesn't change meanwhile."""

    prompt: Prompt
    adapter: Adapter
    settings: GenerationSettings = field(default_factory=GenerationSettings)
    sharing: Sharing = field(default_factory=Sharing)


@dataclass(frozen=True)
class Answer:
    """What became of a request."""

    text: str
    tokens: tuple[int, ...]
    """All tokens that were chosen, without the one that ended the answer."""
    reason: Reason
    """`stop`: an end token or a stop word; `length`: max_tokens; `context`: no room; or `cancelled`."""
    prompt_tokens: int
    fed_tokens: int
    """Tokens of the prompt that were computed; the others were there from an earlier request."""
    cut_tokens: int
    """Tokens of the prompt that were left out, see `overflow`."""
    prefill_seconds: float
    """Time of the engine for the prompt."""
    steps: int
    """Tokens after the first one, with the one that ended the answer."""
    decode_seconds: float
    """Time of the engine for these, others' answers with them."""
    drafted: int = 0
    """How many of them came from drafts, without calls of their own."""

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens computed in a second; None if none was timed."""
        return self.fed_tokens / self.prefill_seconds if self.prefill_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of this answer in a second; None if there was the first one at most."""
        return self.steps / self.decode_seconds if self.decode_seconds else None


class Ticket:
    """A submitted request: `answer` is there once it has ended, or `error` if the engine failed."""

    def __init__(
        self,
        request: Request,
        tokens: Sequence[int],
        on_text: Callable[[str], object] | None,
        on_end: Callable[[Ticket], object] | None,
    ) -> None:
        self.request = request
        self.tokens = tuple(tokens)
        self.answer: Answer | None = None
        self.error: PrgeError | None = None
        self.cancelled = False
        self._on_text, self._on_end = on_text, on_end
        self._ended = Event()

    def wait(self, seconds: float | None = None) -> Answer:
        """The answer, once another thread has worked for it; raises its error, or TimeoutError."""
        if not self._ended.wait(seconds):
            raise TimeoutError(f"no answer within {seconds} seconds")
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return self.answer

    def tell(self, text: str) -> None:
        """Hand over a piece of the answer."""
        if self._on_text is not None and text:
            self._on_text(text)

    def end(self) -> None:
        """Let who waits know that the answer or the error is there."""
        self._ended.set()
        if self._on_end is not None:
            self._on_end(self)


@dataclass
class _Open:
    """A sequence of the speaker, the tokens that it holds, and of the latest request how many of them are its
    prompt, and the answer's text."""

    number: int
    adapter: Adapter
    group: str
    held: list[int] = field(default_factory=list)
    prompt: int = 0
    text: str = ""

    def common(self, tokens: Sequence[int], sharing: Sharing) -> int:
        """How many tokens another prompt begins with alike, if it may go on from these; else 0."""
        if self.group != sharing.group:
            return 0
        common = _common(self.held, tokens)
        if not sharing.needs_answer or any(_repeats(each, self.text) for each in sharing.answers):
            return common
        answer = len(self.held) - self.prompt
        # Of a long answer half will do: what a client sends back need not have the same tokens to the end.
        needed = max(answer // 2, min(answer, _REPEATED_TOKENS), 1)
        return common if common - self.prompt >= needed else 0


@dataclass
class _Answering:
    """An answer in the making: tokens of the prompt that the sequence lacks, then tokens of the answer."""

    ticket: Ticket
    open: _Open
    rest: list[int]
    choice: Choice
    stream: TextStream
    ends: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    fed: int = 0
    prefill_seconds: float = 0.0
    steps: int = 0
    decode_seconds: float = 0.0
    drafted: int = 0
    lookup: Lookup | None = None


class Generator:
    """Answers requests with a speaker, as many at once as it has slots.

    One thread calls `work`, `generate` and `close`; any may submit and cancel. Callbacks are called by the
    thread that works, after a round; the round after one that raises goes on where it was.
    """

    def __init__(self, speaker: Speaker, tokenizer: Tokenizer) -> None:
        self.speaker = speaker
        self.tokenizer = tokenizer
        self._lock = Lock()
        self._waiting: deque[Ticket] = deque()
        self._answering: list[_Answering] = []
        # The one that was used last is last.
        self._idle: list[_Open] = []
        self._told: deque[Callable[[], None]] = deque()

    def submit(
        self,
        request: Request,
        on_text: Callable[[str], object] | None = None,
        on_end: Callable[[Ticket], object] | None = None,
    ) -> Ticket:
        """Let a request wait for its turn; `on_text` is called with every piece of text, `on_end` at last.

        Raises:
            DataError: the prompt is empty, not of this model, or leaves no room in the context.
        """
        ticket = Ticket(request, self._fitted(request), on_text, on_end)
        with self._lock:
            self._waiting.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End an answer before the next round, with what there is of it; one that has ended stays."""
        ticket.cancelled = True

    def work(self) -> bool:
        """One round: take in what waits, feed prompts, a token for every answer; False with nothing left."""
        for answering in [each for each in self._answering if each.ticket.cancelled]:
            self._finish(answering, "cancelled")
        self._take_in()
        speaking = [each for each in self._answering if not each.rest]
        self._feed()
        if draft := self._draft(speaking):
            self._check(speaking[0], draft)
        elif speaking:
            self._step(speaking)
        while self._told:
            self._told.popleft()()
        with self._lock:
            return bool(self._answering or self._waiting)

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Answers to requests, in their order.

        Raises:
            DataError: a prompt can't be taken, see `submit`; nothing is generated then.
            EngineError: the engine failed at one of them.
        """
        for request in requests:
            self._fitted(request)
        tickets = [self.submit(request) for request in requests]
        while not all(ticket.answer or ticket.error for ticket in tickets):
            self.work()
        return [ticket.wait() for ticket in tickets]

    def close(self) -> None:
        """Forget all idle sequences."""
        for each in self._idle:
            self.speaker.close(each.number)
        self._idle = []

    def _fitted(self, request: Request) -> tuple[int, ...]:
        """The prompt's tokens, cut if that was asked for; raises DataError."""
        context, what = self.speaker.context, "the prompt can't be used"
        tokens = checked_ids(request.prompt.tokens, self.speaker.vocabulary_size)
        if not tokens:
            raise DataError(
                what, ["it is empty: nothing predicts the answer"], remedy="give a text", code="prompt-empty"
            )
        if request.settings.overflow == "truncate":
            room = context - min(request.settings.max_tokens, context // 2)
            begin = self.tokenizer.begin
            begin = begin if tokens[: len(begin)] == begin and len(begin) < room else ()
            if len(tokens) > room:
                return (*begin, *tokens[len(tokens) - room + len(begin) :])
        elif len(tokens) >= context:
            raise DataError(
                what,
                [f"it has {len(tokens)} tokens, the context is {context} for prompt and answer together"],
                remedy="shorten it, open the model with a longer context, or set overflow to truncate",
                code="prompt-too-long",
            )
        return tokens

    def _take_in(self) -> None:
        """Begin answers for requests that wait, as far as there are slots."""
        while True:
            with self._lock:
                while self._waiting and self._waiting[0].cancelled:
                    self._end(self._waiting.popleft(), Answer("", (), "cancelled", 0, 0, 0, 0.0, 0, 0.0))
                if not self._waiting or len(self._answering) >= self.speaker.slots:
                    return
                ticket = self._waiting.popleft()
            try:
                opened = self._opened(ticket)
            except PrgeError as error:
                self._fail(ticket, error)
                continue
            opened.prompt = len(ticket.tokens)
            request, prompt = ticket.request, ticket.request.prompt
            names = {word: self.tokenizer.control_id(word) for word in request.settings.stop}
            ends = {token for token in names.values() if token is not None}
            self._answering.append(
                _Answering(
                    ticket,
                    opened,
                    list(ticket.tokens[len(opened.held) :]),
                    Choice(request.settings.choice),
                    TextStream(
                        self.tokenizer,
                        [*prompt.stop, *(word for word, token in names.items() if token is None)],
                        ticket.tokens if prompt.continues else None,
                    ),
                    self.tokenizer.stop_ids | prompt.ends | ends,
                    lookup=Lookup(ticket.tokens) if request.settings.draft == "lookup" else None,
                )
            )

    def _opened(self, ticket: Ticket) -> _Open:
        """A sequence for a ticket, which holds as much of its prompt as an idle one does."""
        adapter, tokens, sharing = ticket.request.adapter, ticket.tokens, ticket.request.sharing
        # One token at least is fed: its logits are the answer's first.
        shared = [(each.common(tokens[:-1], sharing), each) for each in self._idle if each.adapter is adapter]
        common, best = max(shared, key=lambda pair: pair[0], default=(0, None))
        # What has little in common is another conversation, which would be lost.
        if best is not None and common and 2 * common >= min(len(best.held), len(tokens)):
            self._idle.remove(best)
            if common < len(best.held):
                self.speaker.rewind(best.number, common)
                del best.held[self.speaker.length(best.number) :]
            return best
        if len(self._idle) + len(self._answering) >= self.speaker.slots:
            self.speaker.close(self._idle.pop(0).number)
        return _Open(self.speaker.open(adapter), adapter, sharing.group)

    def _feed(self) -> None:
        """Feed prompts, the oldest first, and choose the first token of those that are whole."""
        left = FED_AT_ONCE
        for each in [each for each in self._answering if each.rest]:
            part, each.rest = each.rest[:left], each.rest[left:]
            start = time.perf_counter()
            try:
                logits = self.speaker.feed(each.open.number, part)
            except PrgeError as error:
                self._drop(each, error)
                continue
            each.prefill_seconds += time.perf_counter() - start
            each.fed += len(part)
            each.open.held += part
            if not each.rest:
                self._choose(each, logits)
            left -= len(part)
            if not left:
                return

    def _step(self, speaking: Sequence[_Answering]) -> None:
        start = time.perf_counter()
        try:
            logits = self.speaker.step({each.open.number: each.tokens[-1] for each in speaking})
        except PrgeError as error:
            for each in speaking:
                self._drop(each, error)
            return
        seconds = time.perf_counter() - start
        for each in speaking:
            each.open.held.append(each.tokens[-1])
            each.steps += 1
            each.decode_seconds += seconds
            self._choose(each, logits[each.open.number])

    def _draft(self, speaking: Sequence[_Answering]) -> list[int]:
        """What an answer that is made alone may go on with behind its last token."""
        if len(speaking) != 1 or (each := speaking[0]).lookup is None:
            return []
        # Of room for n tokens the last one needs no draft.
        room = self.speaker.context - len(each.open.held) - 1, each.ticket.request.settings.max_tokens
        most = min(room[0], room[1] - len(each.tokens), self.speaker.most_checked) - 1
        return each.lookup.draft(most) if most > 0 else []

    def _check(self, each: _Answering, draft: list[int]) -> None:
        """Choose as many tokens as a draft is right, and the one behind them."""
        number, held, tokens = each.open.number, each.open.held, [each.tokens[-1], *draft]
        start = time.perf_counter()
        try:
            logits = self.speaker.check(number, tokens)
        except PrgeError as error:
            self._drop(each, error)
            return
        each.decode_seconds += time.perf_counter() - start
        for place, token in enumerate(tokens):
            held.append(token)
            each.steps += 1
            each.drafted += place > 0
            if not self._choose(each, logits[place]) or each.tokens[-1:] != tokens[place + 1 : place + 2]:
                break
        if each.ticket.error is None:
            self.speaker.rewind(number, len(held))
        if each.lookup is not None:
            each.lookup.note(len(draft), place)

    def _choose(self, each: _Answering, logits: FloatArray) -> bool:
        """Choose the token that follows what a sequence holds, tell its text, and end what has ended.

        Returns:
            Whether the answer goes on.
        """
        try:
            token = each.choice.choose(logits, each.open.held)
        except PrgeError as error:
            self._drop(each, error)
            return False
        if token in each.ends:
            self._finish(each, "stop")
            return False
        each.tokens.append(token)
        if each.lookup is not None:
            each.lookup.push(token)
        self._tell(each, each.stream.push(token))
        if each.stream.stopped:
            self._finish(each, "stop")
        elif len(each.tokens) >= each.ticket.request.settings.max_tokens:
            self._finish(each, "length")
        elif len(each.open.held) + 1 >= self.speaker.context:
            self._finish(each, "context")
        else:
            return True
        return False

    def _finish(self, each: _Answering, reason: Reason) -> None:
        self._tell(each, each.stream.finish())
        self._answering.remove(each)
        each.open.text = each.stream.text
        self._idle.append(each.open)
        answer = Answer(
            each.stream.text,
            tuple(each.tokens),
            reason,
            len(each.ticket.tokens),
            each.fed,
            len(each.ticket.request.prompt.tokens) - len(each.ticket.tokens),
            each.prefill_seconds,
            each.steps,
            each.decode_seconds,
            each.drafted,
        )
        self._end(each.ticket, answer)

    def _drop(self, each: _Answering, error: PrgeError) -> None:
        """End an answer that the engine failed at; nobody knows what its sequence holds."""
        self._answering.remove(each)
        self.speaker.close(each.open.number)
        self._fail(each.ticket, error)

    def _tell(self, each: _Answering, text: str) -> None:
        self._told.append(lambda: each.ticket.tell(text))

    def _end(self, ticket: Ticket, answer: Answer) -> None:
        ticket.answer = answer
        self._told.append(ticket.end)

    def _fail(self, ticket: Ticket, error: PrgeError) -> None:
        ticket.error = error
        self._told.append(ticket.end)


def _repeats(said: str, answer: str) -> bool:
    """Whether a text is an answer, or its end, which comes after its thoughts."""
    said, answer = said.strip(), answer.strip()
    is_end = len(said) >= _REPEATED_CHARACTERS and answer.endswith(said)
    return said != "" and (said == answer or is_end)


def _common(held: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    pairs = enumerate(zip(held, tokens, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(held), len(tokens)))
