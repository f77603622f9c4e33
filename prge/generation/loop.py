"""The decoding loop: continuous batching of requests, in rounds that generate one token for every completion.

    submit -> waiting -> prefill in chunks -> one token per round -> finished; its sequence stays open, idle

If a new request's tokens begin like those of an idle sequence, the sequence is rewound to the common prefix
and only the rest is computed: the next turn of a conversation. Otherwise a common prefix is copied from any
open sequence, as of completions of the same prompt, or of prompts with the same system message. Because the
time that this saves reveals earlier prompts, requests say with which others they share a prefix; see
`Sharing`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from threading import Event, Lock
from typing import Any, Literal

from prge.cli.bounds import bound_problems
from prge.data.tokenization.inputs import check_token_ids, is_valid_unicode
from prge.data.tokenization.tokenizer import Tokenizer
from prge.engine import FloatArray, common_prefix
from prge.errors import ConfigError, DataError, PrgeError, format_value
from prge.formats.adapter import Adapter
from prge.generation.constraints import BeginConstraint, TokenConstraint
from prge.generation.drafts import PromptLookup
from prge.generation.generator import GenerationEngine
from prge.generation.logprobs import TokenLogprob, token_logprob
from prge.generation.prompts import Prompt
from prge.generation.sampling import SamplingSettings, TokenSampler
from prge.generation.text_stream import TextStream

Reason = Literal["stop", "length", "context", "cancelled"]
Overflow = Literal["error", "truncate"]
Draft = Literal["off", "lookup"]

# A client that repeats this many tokens of a completion, or this many characters of its end, has seen it.
_REPEATED_TOKENS, _REPEATED_CHARACTERS = 8, 16
# Maximum number of prompt tokens in a round, so that other completions continue during a long prefill.
MAX_PREFILL_TOKENS = 256
# The same for a prompt whose log-probabilities are computed: its logits take vocabulary x 4 bytes per token.
MAX_SCORED_TOKENS = 32
# Minimum number of common tokens that are copied from another sequence.
MIN_COPIED = 8


@dataclass(frozen=True)
class GenerationSettings:
    """Parameters of a completion.

    Raises:
        ConfigError: a parameter has the wrong type or is out of bounds.
    """

    max_tokens: int = 128
    """Maximum number of tokens of the completion."""
    stop: tuple[str, ...] = ()
    """Words that end the completion and aren't part of it; the name of a control token ends it at that
    token."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    """Parameters of sampling."""
    overflow: Overflow = "error"
    """If the prompt is longer than the context: `error`, or `truncate` its beginning, so that the completion
    has room; the prompt keeps at least half of the context."""
    draft: Draft = "off"
    """`lookup`: speculative decoding while there is only one completion, which advances by several tokens at
    once where it repeats its prompt or itself. The tokens are the same as without drafts, up to the rounding
    of another program."""

    def __post_init__(self) -> None:
        problems = []
        if type(self.max_tokens) is not int:
            problems.append(f"--max-tokens is {format_value(self.max_tokens)}, must be a whole number")
        if not all(isinstance(word, str) and word and is_valid_unicode(word) for word in self.stop):
            problems.append(f"--stop is {format_value(self.stop)}, must be words in UTF-8 that aren't empty")
        problems = problems or bound_problems(self)
        if problems:
            raise ConfigError("Invalid generation parameters:", problems, code="settings-unusable")

    def facts(self) -> dict[str, Any]:
        """Return the parameters by name, as a row of feedback stores them."""
        return {"max_tokens": self.max_tokens, "stop": list(self.stop), **asdict(self.sampling)}


@dataclass(frozen=True)
class Sharing:
    """Which earlier requests a request may share computed prefixes with: those of the same group."""

    group: str = ""
    """Name of the group."""
    needs_answer: bool = False
    """Share only if the request repeats the earlier completion, as the next turn of its conversation does."""
    answers: tuple[str, ...] = ()
    """Earlier completions as the request has them; they may have other tokens, or lack their reasoning
    part."""
    whole_answer: bool = False
    """Whether the request must repeat the earlier completion to its end, because the beginning can be
    guessed, as that of a call of a tool."""


@dataclass(frozen=True)
class Request:
    """A request for a completion; the adapter's values must not change until it has ended."""

    prompt: Prompt
    adapter: Adapter
    settings: GenerationSettings = field(default_factory=GenerationSettings)
    sharing: Sharing = field(default_factory=Sharing)
    constraint: BeginConstraint | None = None
    """Restricts the tokens of the completion; None: all tokens are allowed."""
    logprobs: int | None = None
    """Report the log-probability of each token, and this number of most likely ones; None: don't."""
    prompt_logprobs: bool = False
    """Report the log-probabilities of the prompt's tokens, too. The whole prompt is computed."""


@dataclass(frozen=True)
class Completion:
    """The result of a request."""

    text: str
    """The generated text."""
    tokens: tuple[int, ...]
    """The generated tokens, without the one that ended the completion."""
    reason: Reason
    """Why it ended. `stop`: an end token or a stop word; `length`: max_tokens; `context`: the context is
    full; or `cancelled`."""
    prompt_tokens: int
    """Number of tokens of the prompt."""
    fed_tokens: int
    """Prompt tokens that were computed; the others were shared with an earlier request."""
    cut_tokens: int
    """Prompt tokens that were left out; see `overflow`."""
    prefill_seconds: float
    """Seconds that the engine took for the prompt."""
    steps: int
    """Number of tokens after the first one, including the one that ended the completion."""
    decode_seconds: float
    """Seconds that the engine took for these tokens, together with those of other completions."""
    drafted: int = 0
    """How many of these tokens came from accepted drafts."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities, if requested: of the prompt's tokens after the first one if these were requested,
    of `tokens`, and of the token that ended the completion."""
    end: int | None = None
    """The token that ended the completion; None if no token did."""

    @property
    def all_tokens(self) -> tuple[int, ...]:
        """The generated tokens, with the one that ended the completion."""
        return self.tokens if self.end is None else (*self.tokens, self.end)

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Speed of prefill in prompt tokens per second; None if no token was computed."""
        return self.fed_tokens / self.prefill_seconds if self.prefill_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of decoding in tokens per second; None if no token was generated after the first one."""
        return self.steps / self.decode_seconds if self.decode_seconds else None


class Ticket:
    """A submitted request.

    Attributes:
        request: the request.
        tokens: tokens of the prompt, possibly truncated.
        answer: the completion, once it has ended.
        error: the error, if the engine failed.
        cancelled: whether the request was cancelled.
    """

    def __init__(
        self,
        request: Request,
        tokens: Sequence[int],
        on_text: Callable[[str], object] | None,
        on_end: Callable[[Ticket], object] | None,
    ) -> None:
        self.request = request
        self.tokens = tuple(tokens)
        self.answer: Completion | None = None
        self.error: PrgeError | None = None
        self.cancelled = False
        self._on_text, self._on_end = on_text, on_end
        self._ended = Event()

    def wait(self, seconds: float | None = None) -> Completion:
        """Wait until another thread has finished the request; return its completion.

        Raises:
            TimeoutError: the request isn't finished after `seconds`.
            PrgeError: the request failed.
        """
        if not self._ended.wait(seconds):
            raise TimeoutError(f"the request did not finish within {seconds} seconds")
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return self.answer

    def send_text(self, text: str) -> None:
        """Pass a part of the text to the request's callback."""
        if self._on_text is not None and text:
            self._on_text(text)

    def end(self) -> None:
        """Wake waiting threads and call the request's callback, after `answer` or `error` is set."""
        self._ended.set()
        if self._on_end is not None:
            self._on_end(self)


@dataclass
class _OpenSequence:
    """An open sequence of the engine.

    Attributes:
        number: number of the sequence in the engine.
        adapter: adapter of the sequence.
        group: name of the requests that may share it.
        tokens: the tokens that it holds.
        prompt_length: number of these tokens that are the prompt of the latest request.
        text: text of the latest completion.
    """

    number: int
    adapter: Adapter
    group: str
    tokens: list[int] = field(default_factory=list)
    prompt_length: int = 0
    text: str = ""

    def shared_length(self, tokens: Sequence[int], sharing: Sharing) -> int:
        """Return the length of the common prefix with another prompt, or 0 if the two may not share it."""
        if self.group != sharing.group:
            return 0
        common = common_prefix(self.tokens, tokens)
        if not sharing.needs_answer or any(_repeats(answer, self.text) for answer in sharing.answers):
            return common
        completion_length = len(self.tokens) - self.prompt_length
        # Half of a long completion is enough: a client may send it back with other tokens near its end.
        enough = completion_length if sharing.whole_answer else completion_length // 2
        needed = max(enough, min(completion_length, _REPEATED_TOKENS), 1)
        return common if common - self.prompt_length >= needed else 0


@dataclass
class _ActiveRequest:
    """A request that is being computed.

    Attributes:
        ticket: the request.
        sequence: its sequence in the engine.
        prompt_rest: tokens of the prompt that the sequence doesn't hold yet.
        sampler: samples the tokens of the completion.
        stream: decodes them into text.
        ends: tokens that end the completion.
        tokens: tokens of the completion.
        constraint: restricts the tokens of the completion; None: all are allowed.
        logprobs: log-probabilities of tokens, if requested.
        lookup: drafts tokens; None without speculative decoding.
    """

    ticket: Ticket
    sequence: _OpenSequence
    prompt_rest: list[int]
    sampler: TokenSampler
    stream: TextStream
    ends: frozenset[int]
    constraint: TokenConstraint | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    fed: int = 0
    prefill_seconds: float = 0.0
    steps: int = 0
    decode_seconds: float = 0.0
    drafted: int = 0
    end: int | None = None
    lookup: PromptLookup | None = None


class Generator:
    """Generates completions of requests with an engine, as many at once as the engine has slots.

    One thread calls `work`, `generate` and `close`; any thread may call `submit` and `cancel`. Callbacks run
    in the thread that calls `work`, after each round. If a callback raises, the next round continues with the
    callbacks that are left.
    """

    def __init__(self, engine: GenerationEngine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._lock = Lock()
        self._waiting: deque[Ticket] = deque()
        self._active: list[_ActiveRequest] = []
        # In order of their latest use.
        self._idle: list[_OpenSequence] = []
        self._callbacks: deque[Callable[[], None]] = deque()

    def submit(
        self,
        request: Request,
        on_text: Callable[[str], object] | None = None,
        on_end: Callable[[Ticket], object] | None = None,
    ) -> Ticket:
        """Add a request to the queue.

        Args:
            request: the request.
            on_text: called with every part of the generated text.
            on_end: called when the request has ended.

        Raises:
            DataError: the prompt is empty, has tokens that the model lacks, or leaves no room in the context.
        """
        ticket = Ticket(request, self._prompt_tokens(request), on_text, on_end)
        with self._lock:
            self._waiting.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request before the next round, with the text generated so far; no effect if it has ended."""
        ticket.cancelled = True

    def work(self) -> bool:
        """Run one round: start waiting requests, prefill prompts, generate one token for each completion.

        Returns:
            Whether there are unfinished requests.
        """
        for active in [active for active in self._active if active.ticket.cancelled]:
            self._finish(active, "cancelled")
        self._start_waiting()
        decoding = [active for active in self._active if not active.prompt_rest]
        self._prefill()
        if draft := self._draft(decoding):
            self._verify(decoding[0], draft)
        elif decoding:
            self._decode(decoding)
        while self._callbacks:
            self._callbacks.popleft()()
        with self._lock:
            return bool(self._active or self._waiting)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate the completions of requests, in their order.

        Raises:
            DataError: a prompt is invalid, see `submit`; no completion is generated.
            EngineError: the engine failed for one of them.
        """
        for request in requests:
            self._prompt_tokens(request)
        tickets = [self.submit(request) for request in requests]
        while not all(ticket.answer or ticket.error for ticket in tickets):
            self.work()
        return [ticket.wait() for ticket in tickets]

    def close(self) -> None:
        """Close all idle sequences."""
        for sequence in self._idle:
            self.engine.close(sequence.number)
        self._idle = []

    def _prompt_tokens(self, request: Request) -> tuple[int, ...]:
        """Return the prompt's tokens, truncated if the settings say so; raises DataError, see `submit`."""
        context, what = self.engine.context, "the prompt can't be used"
        tokens = check_token_ids(request.prompt.tokens, self.engine.vocabulary_size)
        if not tokens:
            raise DataError(
                what, ["it is empty: nothing predicts the answer"], remedy="Give a text.", code="prompt-empty"
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
                remedy="Shorten it, open the model with a longer context, or set overflow to truncate.",
                code="prompt-too-long",
            )
        return tokens

    def _start_waiting(self) -> None:
        """Start waiting requests while there are free slots."""
        while True:
            with self._lock:
                while self._waiting and self._waiting[0].cancelled:
                    self._end(self._waiting.popleft(), Completion("", (), "cancelled", 0, 0, 0, 0.0, 0, 0.0))
                if not self._waiting or len(self._active) >= self.engine.slots:
                    return
                ticket = self._waiting.popleft()
            try:
                constraint = None if ticket.request.constraint is None else ticket.request.constraint()
                sequence = self._open_sequence(ticket)
            except PrgeError as error:
                self._fail(ticket, error)
                continue
            sequence.prompt_length = len(ticket.tokens)
            request, prompt = ticket.request, ticket.request.prompt
            control_ids = {word: self.tokenizer.control_id(word) for word in request.settings.stop}
            ends = {token for token in control_ids.values() if token is not None}
            self._active.append(
                _ActiveRequest(
                    ticket,
                    sequence,
                    list(ticket.tokens[len(sequence.tokens) :]),
                    TokenSampler(request.settings.sampling),
                    TextStream(
                        self.tokenizer,
                        [*prompt.stop, *(word for word, token in control_ids.items() if token is None)],
                        ticket.tokens if prompt.continues else None,
                        prompt.shown,
                    ),
                    self.tokenizer.stop_ids | prompt.ends | ends,
                    constraint,
                    lookup=PromptLookup(ticket.tokens) if request.settings.draft == "lookup" else None,
                )
            )

    def _open_sequence(self, ticket: Ticket) -> _OpenSequence:
        """Return a sequence for a request: the idle one with the longest shared prefix, or a new one."""
        adapter, tokens, sharing = ticket.request.adapter, ticket.tokens, ticket.request.sharing
        # The last token is always computed: the completion's first token is sampled from its logits.
        shared = [
            (sequence.shared_length(tokens[:-1], sharing), sequence)
            for sequence in self._idle
            if sequence.adapter is adapter and not ticket.request.prompt_logprobs
        ]
        common, best = max(shared, key=lambda pair: pair[0], default=(0, None))
        # A short common prefix means another conversation, whose sequence would be lost.
        if best is not None and common and 2 * common >= min(len(best.tokens), len(tokens)):
            self._idle.remove(best)
            if common < len(best.tokens):
                self.engine.rewind(best.number, common)
                del best.tokens[self.engine.length(best.number) :]
            return best
        if len(self._idle) + len(self._active) >= self.engine.slots:
            self.engine.close(self._idle.pop(0).number)
        return _OpenSequence(self.engine.open(adapter), adapter, sharing.group)

    def _prefill(self) -> None:
        """Compute up to MAX_PREFILL_TOKENS prompt tokens, oldest requests first; sample the first tokens."""
        left = MAX_PREFILL_TOKENS
        for active in [active for active in self._active if active.prompt_rest]:
            self._copy_prefix(active)
            size = min(left, MAX_SCORED_TOKENS) if active.ticket.request.prompt_logprobs else left
            chunk, active.prompt_rest = active.prompt_rest[:size], active.prompt_rest[size:]
            start = time.perf_counter()
            try:
                logits = self._feed(active, chunk)
            except PrgeError as error:
                self._drop(active, error)
                continue
            active.prefill_seconds += time.perf_counter() - start
            active.fed += len(chunk)
            active.sequence.tokens += chunk
            if not active.prompt_rest:
                self._sample(active, logits)
            left -= len(chunk)
            if not left:
                return

    def _copy_prefix(self, active: _ActiveRequest) -> None:
        """Begin an empty sequence with the longest prefix that another sequence shares with its prompt."""
        sequence, request = active.sequence, active.ticket.request
        if sequence.tokens or request.prompt_logprobs:
            return
        # The last token is always computed; see `_open_sequence`.
        tokens = active.ticket.tokens[:-1]
        shared = [
            (other.shared_length(tokens, request.sharing), other)
            for other in (*(each.sequence for each in self._active), *self._idle)
            if other.adapter is sequence.adapter
        ]
        common, best = max(shared, key=lambda pair: pair[0])
        if common >= MIN_COPIED:
            self.engine.copy(best.number, sequence.number, common)
            sequence.tokens = [*tokens[: self.engine.length(sequence.number)]]
            active.prompt_rest = [*active.ticket.tokens[len(sequence.tokens) :]]

    def _feed(self, active: _ActiveRequest, chunk: Sequence[int]) -> FloatArray:
        """Append tokens of a prompt, with their log-probabilities if requested; return the last logits."""
        request = active.ticket.request
        if not request.prompt_logprobs:
            return self.engine.feed(active.sequence.number, chunk)
        rows: list[FloatArray] = [*self.engine.check(active.sequence.number, chunk)]
        # The last row of the prompt predicts the completion's first token.
        pairs = zip(rows, [*chunk[1:], *active.prompt_rest[:1]], strict=False)
        active.logprobs += [token_logprob(row, token, request.logprobs or 0) for row, token in pairs]
        return rows[-1]

    def _decode(self, decoding: Sequence[_ActiveRequest]) -> None:
        """Generate one token for each of these completions."""
        start = time.perf_counter()
        try:
            logits = self.engine.step({active.sequence.number: active.tokens[-1] for active in decoding})
        except PrgeError as error:
            for active in decoding:
                self._drop(active, error)
            return
        seconds = time.perf_counter() - start
        for active in decoding:
            active.sequence.tokens.append(active.tokens[-1])
            active.steps += 1
            active.decode_seconds += seconds
            self._sample(active, logits[active.sequence.number])

    def _draft(self, decoding: Sequence[_ActiveRequest]) -> list[int]:
        """Return a draft of the next tokens if there is only one completion; else an empty list."""
        if len(decoding) != 1 or (active := decoding[0]).lookup is None:
            return []
        # Verifying n drafted tokens generates n + 1.
        context_left = self.engine.context - len(active.sequence.tokens) - 1
        tokens_left = active.ticket.request.settings.max_tokens - len(active.tokens)
        most = min(context_left, tokens_left, self.engine.max_checked) - 1
        return active.lookup.draft(most) if most > 0 else []

    def _verify(self, active: _ActiveRequest, draft: list[int]) -> None:
        """Generate the tokens of a draft up to the first one that is wrong, and the token after them."""
        number, held, tokens = active.sequence.number, active.sequence.tokens, [active.tokens[-1], *draft]
        start = time.perf_counter()
        try:
            logits = self.engine.check(number, tokens)
        except PrgeError as error:
            self._drop(active, error)
            return
        active.decode_seconds += time.perf_counter() - start
        for index, token in enumerate(tokens):
            held.append(token)
            active.steps += 1
            active.drafted += index > 0
            if not self._sample(active, logits[index]) or active.tokens[-1:] != tokens[index + 1 : index + 2]:
                break
        if active.ticket.error is None:
            self.engine.rewind(number, len(held))
        if active.lookup is not None:
            active.lookup.note(len(draft), index)

    def _sample(self, active: _ActiveRequest, logits: FloatArray) -> bool:
        """Sample the next token of a completion, and send its text; finish a completion that ends.

        Returns:
            Whether the completion continues.
        """
        constraint, request = active.constraint, active.ticket.request
        try:
            allowed = None if constraint is None else constraint.allowed(active.ends)
            token = active.sampler.sample(logits, active.sequence.tokens, allowed)
            if constraint is not None and token not in active.ends:
                constraint.accept(token)
        except PrgeError as error:
            self._drop(active, error)
            return False
        if request.logprobs is not None:
            active.logprobs.append(token_logprob(logits, token, request.logprobs))
        if token in active.ends:
            active.end = token
            self._finish(active, "stop")
            return False
        active.tokens.append(token)
        if active.lookup is not None:
            active.lookup.push(token)
        self._send_text(active, active.stream.push(token))
        if active.stream.stopped or (constraint is not None and constraint.is_finished):
            self._finish(active, "stop")
        elif len(active.tokens) >= request.settings.max_tokens:
            self._finish(active, "length")
        elif len(active.sequence.tokens) + 1 >= self.engine.context:
            self._finish(active, "context")
        else:
            return True
        return False

    def _finish(self, active: _ActiveRequest, reason: Reason) -> None:
        """End a completion; its sequence becomes idle."""
        self._send_text(active, active.stream.finish())
        self._active.remove(active)
        active.sequence.text = active.stream.text
        self._idle.append(active.sequence)
        completion = Completion(
            active.stream.text,
            tuple(active.tokens),
            reason,
            len(active.ticket.tokens),
            active.fed,
            len(active.ticket.request.prompt.tokens) - len(active.ticket.tokens),
            active.prefill_seconds,
            active.steps,
            active.decode_seconds,
            active.drafted,
            tuple(active.logprobs),
            active.end,
        )
        self._end(active.ticket, completion)

    def _drop(self, active: _ActiveRequest, error: PrgeError) -> None:
        """End a request for which the engine failed, and close its sequence, whose state is unknown."""
        self._active.remove(active)
        self.engine.close(active.sequence.number)
        self._fail(active.ticket, error)

    def _send_text(self, active: _ActiveRequest, text: str) -> None:
        self._callbacks.append(lambda: active.ticket.send_text(text))

    def _end(self, ticket: Ticket, completion: Completion) -> None:
        ticket.answer = completion
        self._callbacks.append(ticket.end)

    def _fail(self, ticket: Ticket, error: PrgeError) -> None:
        ticket.error = error
        self._callbacks.append(ticket.end)


def _repeats(text: str, completion: str) -> bool:
    """Return whether a text is a completion, or a sufficiently long end of it."""
    text, completion = text.strip(), completion.strip()
    is_end = len(text) >= _REPEATED_CHARACTERS and completion.endswith(text)
    return text != "" and (text == completion or is_end)
