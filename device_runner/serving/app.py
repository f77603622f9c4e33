"""The server's routes, from requests to the worker's sequences and from text to responses; and the page.

    body, bounded -> parsed request -> prompts -> worker -> events of each completion -> JSON, or a stream

The sequences of a client that disconnects are cancelled, whenever it disconnects.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from device_runner.serving.access import FILES, HEALTH, PAGES, PAUSED, Access, AccessControl, refusal
from device_runner.serving.feedback import Feedback
from device_runner.serving.learning import OnlineLearner
from device_runner.serving.models import MAX_CHARACTERS, Models
from device_runner.serving.page.runs import Runs
from device_runner.serving.page.static import INDEX, page_file
from device_runner.serving.protocol import (
    Answer,
    Json,
    ParsedRequest,
    Reply,
    RequestError,
    format_usage,
    read_chat,
    read_completion,
    read_feedback_request,
    read_version,
)
from device_runner.serving.tool_calls import CallFormat
from device_runner.serving.worker import BusyError, EventHandler, GenerationEvent, Worker
from device_runner.session.generation import print_note
from device_runner.session.pauses import Pauses
from prge.errors import DataError, PrgeError
from prge.generation.loop import Completion, Sharing, Ticket

# Limits on the bytes of a body: for everything but the prompts, per token of the context, and in total.
BYTES_BESIDES_PROMPTS = 64 << 10
BYTES_PER_TOKEN = 256
MAX_BYTES = 4 << 20
# Limit on all bodies together; each may always have `BYTES_BESIDES_PROMPTS`.
MAX_HELD = 16 * MAX_BYTES
# Seconds for a client to send its body.
SECONDS = 60.0


def make_app(
    models: Models,
    worker: Worker,
    access: Access,
    feedback: Feedback | None = None,
    learning: OnlineLearner | None = None,
    runs: Runs | None = None,
    about: Json | None = None,
    pauses: Pauses | None = None,
) -> Starlette:
    """Return the server as an ASGI application.

    Args:
        models: adapters and prompts.
        worker: the thread that generates.
        access: who may send requests.
        feedback: stores the clients' feedback; by default none is stored.
        learning: trains on the feedback.
        runs: the runs to show on the page.
        about: description of the models for the page.
        pauses: the conditions for work; no completion is begun while they are not met.
    """
    server = _Server(models, worker, access, feedback or Feedback(), learning, pauses or Pauses(()))
    description = {**(about or {}), **server.description, "runs": runs is not None}
    routes = [
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/feedback", server.store_feedback, methods=["POST"]),
        Route("/v1/adapters", server.list_adapters, methods=["GET"]),
        Route("/v1/adapters/back", server.revert, methods=["POST"]),
        Route("/v1/models", server.list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", server.one_model, methods=["GET"]),
        Route(HEALTH, server.health, methods=["GET"]),
    ]
    return _assembled([*routes, *_page_routes(description, runs)], access)


def make_watch_app(runs: Runs, access: Access) -> Starlette:
    """Return only the page, for watching runs, as an ASGI application."""
    return _assembled(_page_routes({"object": "about", "talks": False, "runs": True}, runs), access)


def _assembled(routes: list[Route], access: Access) -> Starlette:
    handlers = {
        RequestError: _refuse,
        PrgeError: _refuse_failed,
        HTTPException: _refuse_http,
        ClientDisconnect: _client_gone,
        Exception: _fail,
    }
    access_control = Middleware(AccessControl, access=access)
    app = Starlette(routes=routes, middleware=[access_control], exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


def _page_routes(description: Json, runs: Runs | None) -> list[Route]:
    """Return the routes of the page, of its description of the server, and of runs if there are any."""

    async def page(request: Request) -> Response:
        return await asyncio.to_thread(page_file, INDEX)

    async def file(request: Request) -> Response:
        return await asyncio.to_thread(page_file, request.path_params["name"])

    async def about(request: Request) -> Response:
        return JSONResponse(description)

    routes = [Route(path, page, methods=["GET"]) for path in PAGES]
    routes += [Route(f"{FILES}{{name}}", file, methods=["GET"]), Route("/v1/about", about, methods=["GET"])]
    if runs is None:
        return routes

    async def list_runs(request: Request) -> Response:
        return JSONResponse(await runs.list_runs())

    async def events(request: Request) -> Response:
        query = request.query_params
        return _Stream(*await runs.follow(query.get("run", ""), query.get("language", "")))

    async def stop(request: Request) -> Response:
        run = request.query_params.get("run", "")
        await runs.stop(run)
        return JSONResponse({"object": "run", "run": run, "stopping": True})

    routes += [
        Route("/v1/runs", list_runs, methods=["GET"]),
        Route("/v1/runs/events", events, methods=["GET"]),
    ]
    return [*routes, Route("/v1/runs/stop", stop, methods=["POST"])]


_T = TypeVar("_T")
Events = asyncio.Queue[tuple[int, GenerationEvent]]
Ended = Callable[[int, Ticket], Awaitable[tuple[Completion, Answer]]]
# Returns the part of a completion's text that can be sent; of one that has ended if there is an answer.
Shown = Callable[[str, Answer | None], str]


class _Server:
    def __init__(
        self,
        models: Models,
        worker: Worker,
        access: Access,
        feedback: Feedback,
        learning: OnlineLearner | None,
        pauses: Pauses,
    ) -> None:
        self.models = models
        self.worker = worker
        self.access = access
        self.feedback = feedback
        self._learning = learning
        self.pauses = pauses
        self.max_bytes = min(MAX_BYTES, BYTES_BESIDES_PROMPTS + BYTES_PER_TOKEN * worker.context)
        self.begun = int(time.time())
        # Bytes of bodies that are being read or turned into prompts.
        self.held = 0

    @property
    def description(self) -> Json:
        """Description of the server for the page."""
        return {
            "object": "about",
            "talks": True,
            "chats": self.models.has_template,
            "context": self.worker.context,
            "feedback": self.feedback.is_enabled,
            "learns": self._learning is not None,
        }

    async def health(self, request: Request) -> Response:
        """Report whether the worker runs, and whether storing feedback and learning work.

        Only the log names causes.
        """
        parts: Json = {}
        if self.feedback.is_enabled:
            parts["feedback"] = "failing" if self.feedback.problem else "ok"
        if self._learning is not None:
            parts["learning"] = "failing" if self._learning.problem else "ok"
        if not self.worker.alive:
            return JSONResponse({"status": "down", **parts}, 503)
        return JSONResponse({"status": "degraded" if "failing" in parts.values() else "ok", **parts})

    async def list_models(self, request: Request) -> Response:
        """Return the names of all models."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.models.names]})

    async def one_model(self, request: Request) -> Response:
        """Return one model by its name."""
        name = request.path_params["name"]
        self.models.adapter(name)
        return JSONResponse(self._model(name))

    async def chat(self, request: Request) -> Response:
        """Return the assistant's next message."""
        return await self._answer(request, read_chat)

    async def completions(self, request: Request) -> Response:
        """Return the continuation of a text."""
        return await self._answer(request, read_completion)

    async def store_feedback(self, request: Request) -> Response:
        """Store a client's feedback on a completion."""
        async with self._body(request) as body:
            most = MAX_CHARACTERS * self.worker.context
            feedback_request = await self.models.run_in_parser(lambda: read_feedback_request(body, most))
        client = request.client.host if request.client is not None else ""
        await self.feedback.store(feedback_request, client)
        return JSONResponse({"id": feedback_request.id, "object": "feedback", "kept": True})

    async def list_adapters(self, request: Request) -> Response:
        """Return the learned adapters."""
        return JSONResponse({"object": "list", "data": self.learning.history()})

    async def revert(self, request: Request) -> Response:
        """Serve the adapter that was served before the version that the client names."""
        learning = self.learning
        async with self._body(request) as body:
            version = await self.models.run_in_parser(lambda: read_version(body))
        current = await asyncio.wrap_future(learning.storage.submit(learning.revert, version))
        return JSONResponse({"object": "adapter", "current": current})

    @property
    def learning(self) -> OnlineLearner:
        """The learner; raises RequestError if the server does not learn."""
        if self._learning is None:
            raise RequestError(404, "the server does not learn: it was started without --learn FOLDER")
        return self._learning

    def _model(self, name: str) -> Json:
        return {"id": name, "object": "model", "created": self.begun, "owned_by": "prge"}

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """Yield a request's body; refuses it as soon as it is known to be too large.

        What a client sends after that is discarded.
        """
        body = bytearray()

        async def read() -> None:
            if int(request.headers.get("content-length", "0")[:20]) > self.max_bytes:
                raise too_large
            async for part in request.stream():
                body.extend(part)
                self.held += len(part)
                if len(body) > self.max_bytes:
                    raise too_large
                if self.held > MAX_HELD and len(body) > BYTES_BESIDES_PROMPTS:
                    raise _busy_error("there are too many large requests: try again later")

        too_large = RequestError(413, f"the body has more than {self.max_bytes} bytes")
        try:
            await asyncio.wait_for(read(), SECONDS)
            yield bytes(body)
        except asyncio.TimeoutError:
            raise RequestError(408, f"the body did not arrive within {SECONDS:.0f} seconds") from None
        finally:
            self.held -= len(body)

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        """Pause learning inside the block, and until the event loop continues."""
        if self._learning is None:
            yield
            return
        self._learning.pause(True)
        try:
            yield
        finally:
            # By then the worker has the requests, and pauses learning itself.
            asyncio.get_running_loop().call_soon(self._learning.pause, False)

    def _sharing(self, request: Request, parsed: ParsedRequest) -> Sharing:
        """Return the requests with which a request shares cached prompts.

        These are requests of the same API key (without keys, of the same address) that name the same cache
        key. Without keys and cache key, only requests of the same conversation.
        """
        key = self.access.find_key(request.headers)
        client = request.client.host if request.client is not None else ""
        named = ("address", client) if key is None else ("key", key)
        group = hashlib.sha256(json.dumps([*named, *parsed.cache_key]).encode()).hexdigest()
        if key is not None or parsed.cache_key:
            return Sharing(group)
        previous_answers = tuple(
            str(each["content"]) for each in parsed.messages if each["role"] == "assistant"
        )
        return Sharing(group, True, previous_answers, whole_answer=parsed.has_calls)

    async def _answer(self, request: Request, read: Callable[[bytes], ParsedRequest]) -> Response:
        # Reading sensors may take a moment.
        if why := await asyncio.to_thread(self.pauses.reason_to_wait, print_note):
            raise RequestError(503, f"paused, {why}", error_type="server_error", code=PAUSED)
        async with self._body(request) as body:
            preparing = self.models.requests(body, read, self.worker.context)
            with self._pausing():
                parsed, requests = await _unless_gone(request, preparing)
        sharing = self._sharing(request, parsed)
        requests = [replace(each, sharing=sharing) for each in requests]
        loop = asyncio.get_running_loop()
        events: Events = asyncio.Queue()

        def make_handler(index: int) -> EventHandler:
            def handle(event: GenerationEvent) -> None:
                with suppress(RuntimeError):  # the event loop has ended, and the server with it
                    loop.call_soon_threadsafe(events.put_nowait, (index, event))

            return handle

        try:
            if not self.worker.alive:
                raise RequestError(503, "the server is shutting down", error_type="server_error")
            jobs = self.worker.submit([(each, make_handler(index)) for index, each in enumerate(requests)])
        except BusyError as busy:
            raise _busy_error(str(busy)) from None
        except DataError as error:
            raise RequestError(400, str(error)) from None

        def cancel() -> None:
            self.worker.cancel(jobs)

        reply = Reply(parsed)

        async def ended(index: int, ticket: Ticket) -> tuple[Completion, Answer]:
            answer = ticket.wait()
            if parsed.max_tokens == 0:
                logprobs = answer.logprobs[: answer.prompt_tokens - 1]
                answer = replace(answer, text="", tokens=(), reason="length", logprobs=logprobs)
            # Rows of feedback hold a text that follows messages of texts.
            elif self.feedback.is_enabled and answer.reason != "cancelled" and not parsed.has_calls:
                record = self.models.answer_record(reply.id, parsed, requests[index], index, answer.text)
                self.feedback.remember(parsed, index, record)
            return answer, await self.models.answer(parsed, index, requests[index], answer)

        if parsed.stream:
            shown = partial(_text_to_send, parsed, self.models.call_format)
            return _Stream(_stream_events(reply, events, len(jobs), parsed.count, ended, shown), cancel)
        try:
            return await _unless_gone(
                request, _complete_response(reply, events, len(jobs), parsed.count, ended)
            )
        finally:
            cancel()


def _usage(answers: Mapping[int, Completion], each: int) -> Json:
    """Return the token counts of a request with `each` completions per prompt."""
    completions = [answers[index] for index in sorted(answers)]
    prompts = [completions[first : first + each] for first in range(0, len(completions), each)]
    # Further completions of a prompt reuse what was computed for the first one.
    cached = sum(min(answer.prompt_tokens - answer.fed_tokens for answer in prompt) for prompt in prompts)
    tokens = sum(prompt[0].prompt_tokens for prompt in prompts)
    return format_usage(tokens, sum(len(answer.tokens) for answer in completions), cached)


def _text_to_send(
    parsed: ParsedRequest, call_format: CallFormat | None, text: str, answer: Answer | None
) -> str:
    """Return the text of a completion that surely isn't part of a call; `answer`: of one that has ended."""
    if not parsed.tools or call_format is None or (answer is not None and not answer.calls):
        return text
    if parsed.required:
        return ""
    return call_format.text_before(text) if answer is None else call_format.text_around(text)


async def _complete_response(reply: Reply, events: Events, count: int, each: int, ended: Ended) -> Response:
    tickets: dict[int, Ticket] = {}
    while len(tickets) < count:
        index, event = await events.get()
        if not isinstance(event, str):
            event.wait()  # an error ends the response at once
            tickets[index] = event
    pairs = [await ended(index, tickets[index]) for index in range(count)]
    usage = _usage(dict(enumerate(completion for completion, _ in pairs)), each)
    return JSONResponse(reply.whole([answer for _, answer in pairs], usage))


async def _stream_events(
    reply: Reply, events: Events, count: int, each: int, ended: Ended, shown: Shown
) -> AsyncIterator[str]:
    for index in range(count):
        for chunk in reply.begin(index):
            yield _event(chunk)
    texts, sent = [""] * count, [0] * count
    completions: dict[int, Completion] = {}
    while len(completions) < count:
        index, event = await events.get()
        if isinstance(event, str):
            texts[index] += event
            text = shown(texts[index], None)
        else:
            try:
                completions[index], answer = await ended(index, event)
            except PrgeError as error:
                # The status was already sent.
                yield _event(_failure_error(error).body)
                return
            text = shown(texts[index], answer)
        if len(text) > sent[index]:
            yield _event(reply.text_event(index, text[sent[index] :]))
            sent[index] = len(text)
        if index in completions:
            if answer.calls:
                yield _event(reply.calls_event(index, answer.calls))
            yield _event(reply.end(index, answer))
    for chunk in reply.usage(_usage(completions, each)):
        yield _event(chunk)
    yield "data: [DONE]\n\n"


def _event(content: Json) -> str:
    # JSON has no line breaks, which would end an event, and is ASCII, so that no reader finds other line
    # breaks.
    return f"data: {json.dumps(content)}\n\n"


class _Stream(StreamingResponse):
    """A stream of events whose sequences end with it, even if it never began."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """Return the result of `work`; raises ClientDisconnect if the client disconnects before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def _busy_error(why: str) -> RequestError:
    return RequestError(429, why, error_type="rate_limit_error", code="rate_limit_exceeded")


def _failure_error(error: PrgeError) -> RequestError:
    if error.code == "grammar-without-token":
        return RequestError(400, error.what)  # the client's format, which can't be followed
    return RequestError(500, error.what, error_type="server_error")


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return refusal(error)


async def _refuse_failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, PrgeError)
    failure = _failure_error(error)
    return JSONResponse(failure.body, failure.status)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client is gone


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(RequestError(error.status_code, what).body, error.status_code, error.headers)


async def _fail(request: Request, error: Exception) -> Response:
    return JSONResponse(RequestError(500, "internal server error", error_type="server_error").body, 500)
