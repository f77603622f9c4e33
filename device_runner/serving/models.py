"""What a server serves: one bundle with several adapters by name, and the prompts of requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from device_runner.serving.answers import make_answer
from device_runner.serving.call_formats import find_format
from device_runner.serving.protocol import Answer, ParsedRequest, RequestError
from device_runner.session.grammars import Grammars, JsonOf
from prge.data.readers.feedback import AnswerRecord, Fields, adapter_digest, conversation_fields
from prge.data.tokenization.control_tokens import RenderedText
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import BundleError, DataError
from prge.formats.adapter import Adapter
from prge.generation.constraints import BeginConstraint
from prge.generation.loop import Completion, GenerationSettings, Request
from prge.generation.prompts import Prompt, Prompts

# Characters of a prompt per token of the context; longer prompts do not reach the template or the tokenizer.
MAX_CHARACTERS = 32

_T = TypeVar("_T")


class Models:
    """The adapters by their model names, and the conversion of requests into prompts.

    One thread parses bodies and tokenizes, another one renders templates, one request at a time, because
    neither tokenizers nor memory allow many. A request that waits there is dropped if its client disconnects.

    Args:
        adapters: the adapters by name.
        tokenizer: used by this object only.
        variables: default variables of the chat template, which a request can override.

    Raises:
        BundleError: the tokenizer's chat template is damaged.
        DataError: there is a chat template, but jinja2 is not installed.
    """

    def __init__(
        self,
        adapters: Mapping[str, Adapter],
        tokenizer: Tokenizer,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._variables = variables or {}
        self._adapters = dict(adapters)
        self._digests: WeakKeyDictionary[Adapter, str] = WeakKeyDictionary()
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer)
        self._prompts = Prompts(tokenizer)
        chat = self._prompts.chat  # forks its process while this one has no other thread
        self.call_format = find_format(tokenizer.chat_template or "")
        """How the model writes calls of tools; None if the chat template can't describe tools, or its format
        is unknown."""
        if chat is None or "tools" not in chat.variables:
            self.call_format = None
        self._parser_thread, self._template_thread = (
            ThreadPoolExecutor(1, name) for name in ("texts", "templates")
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models."""
        return tuple(self._adapters)

    @property
    def has_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return self._tokenizer.chat_template is not None

    def adapter(self, name: str) -> Adapter:
        """Return the adapter of a model; raises RequestError if there is none."""
        if name not in self._adapters:
            raise RequestError(
                404,
                f"there is no model {name!r}; available models: {', '.join(self._adapters)}",
                param="model",
                code="model_not_found",
            )
        return self._adapters[name]

    def replace(self, name: str, adapter: Adapter) -> None:
        """Serve another adapter under a name; completions in progress continue with the old one."""
        self._adapters[name] = adapter

    def answer_record(
        self, id: str, parsed: ParsedRequest, request: Request, number: int, text: str
    ) -> AnswerRecord:
        """Return a completion as feedback needs it; `number` is the index of its request."""
        prompt_fields: Fields = conversation_fields(parsed.messages, {**self._variables, **parsed.variables})
        if not parsed.is_chat:
            prompt_fields = {"prompt": parsed.prompts[number // parsed.count]}
        digest = self._digests.get(request.adapter) or adapter_digest(request.adapter)
        self._digests[request.adapter] = digest
        return AnswerRecord(id, parsed.model, digest, prompt_fields, text, request.settings.facts())

    async def answer(
        self, parsed: ParsedRequest, index: int, request: Request, completion: Completion
    ) -> Answer:
        """Return a completion as its response has it; `index` is the completion's in the response."""

        def make() -> Answer:
            prompt = request.prompt.tokens
            return make_answer(parsed, index, completion, prompt, self._tokenizer, self.call_format)

        # Only these use the tokenizer.
        uses_tokenizer = parsed.logprobs is not None or parsed.echo
        return await self.run_in_parser(make) if uses_tokenizer else make()

    async def run_in_parser(self, work: Callable[[], _T]) -> _T:
        """Run `work` in the parsing thread, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._parser_thread, work)

    async def requests(
        self, body: bytes, read: Callable[[bytes], ParsedRequest], context: int
    ) -> tuple[ParsedRequest, list[Request]]:
        """Parse a body, and return it with the generation requests for its completions.

        Args:
            body: the body of a request.
            read: parses the body.
            context: maximum number of tokens of prompt and completion together.

        Raises:
            RequestError: the request can't be answered.
        """
        loop = asyncio.get_running_loop()
        parsed = await loop.run_in_executor(self._parser_thread, self._read, body, read, context)
        rendered = self._prompts, RenderedText("", True)
        if parsed.is_chat:
            rendered = await loop.run_in_executor(self._template_thread, self._render, parsed)
        return parsed, await loop.run_in_executor(
            self._parser_thread, self._requests, parsed, *rendered, context
        )

    def _read(self, body: bytes, read: Callable[[bytes], ParsedRequest], context: int) -> ParsedRequest:
        parsed = read(body)
        self.adapter(parsed.model)
        if parsed.has_calls and self.call_format is None:
            raise RequestError(
                400,
                "the model's chat template has no tools, or writes their calls in a format that this server "
                "can't read",
                param="tools" if parsed.tools else "messages",
                code="unsupported_parameter",
            )
        texts = [str(message["content"]) for message in parsed.messages]
        calls = [message["tool_calls"] for message in parsed.messages if "tool_calls" in message]
        texts += [json.dumps(each, ensure_ascii=False) for each in (*calls, *parsed.tools)]
        sizes = [len(each) if isinstance(each, str) else 0 for each in parsed.prompts]
        longest = max([sum(map(len, texts)), *sizes])
        if longest > MAX_CHARACTERS * context:
            raise _too_long_error(parsed, f"{longest} characters", context)
        if len(parsed.messages) > context:
            raise _too_long_error(parsed, f"{len(parsed.messages)} messages", context)
        return parsed

    def _render(self, parsed: ParsedRequest) -> tuple[Prompts, RenderedText]:
        with self._refusing():
            tools = [{"type": "function", "function": tool} for tool in parsed.tools]
            variables = {**self._variables, **parsed.variables, **({"tools": tools} if tools else {})}
            return self._prompts, self._prompts.render(parsed.messages, variables)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raise a RequestError for what the chat template refuses."""
        try:
            yield
        except DataError as error:
            raise RequestError(400, str(error)) from None
        except BundleError as error:
            # The template's process has ended because of these messages; start another one for the next
            # requests.
            self._prompts = Prompts(self._tokenizer)
            raise RequestError(400, error.what) from None

    def _requests(
        self, parsed: ParsedRequest, prompts: Prompts, rendered: RenderedText, context: int
    ) -> list[Request]:
        adapter, constraint = self.adapter(parsed.model), self._constraint(parsed)
        requests = []
        for prompt in _make_prompts(parsed, prompts, rendered, context):
            prompt = self._with_calls(parsed, prompt)
            tokens = len(prompt.tokens)
            if tokens >= context:
                raise _too_long_error(parsed, f"at least {tokens} tokens", context)
            most = context - tokens if parsed.max_tokens is None else min(parsed.max_tokens, context)
            # The logits after a prompt give a token, which `_Server` removes if the client wants none.
            settings = GenerationSettings(max(most, 1), parsed.stop, parsed.sampling, draft="lookup")
            request = Request(
                prompt,
                adapter,
                settings,
                constraint=constraint,
                logprobs=parsed.logprobs,
                prompt_logprobs=parsed.echo and parsed.logprobs is not None,
            )
            requests += [request] * parsed.count
        return requests

    def _constraint(self, parsed: ParsedRequest) -> BeginConstraint | None:
        """Return the constraint on the completions of a request; raises RequestError if it is refused."""
        param = "tools"
        try:
            if parsed.required and self.call_format is not None:
                return self._grammars.sequence(self.call_format.call_of(parsed.required))
            param = "response_format"
            if parsed.schema is not None:
                return self._grammars.sequence([JsonOf(parsed.schema)])
            param = "grammar"
            return self._grammars.grammar(parsed.grammar) if parsed.grammar else None
        except DataError as error:
            raise RequestError(400, str(error), param=param) from None
        except BundleError as error:
            raise RequestError(400, error.what, param=param, code="unsupported_parameter") from None

    def _with_calls(self, parsed: ParsedRequest, prompt: Prompt) -> Prompt:
        """Return a prompt of a request with tools: calls are readable, and a required one begins."""
        if not parsed.tools or self.call_format is None:
            return prompt
        call_format, control_id = self.call_format, self._tokenizer.control_id
        marks = map(control_id, (call_format.begin, *call_format.marks, *call_format.control))
        head = self._tokenizer.encode(call_format.head, control=True) if parsed.required else ()
        shown = frozenset(token for token in marks if token is not None)
        return replace(prompt, tokens=(*prompt.tokens, *head), shown=shown)


def _make_prompts(
    parsed: ParsedRequest, prompts: Prompts, rendered: RenderedText, context: int
) -> list[Prompt]:
    try:
        if parsed.is_chat:
            return [prompts.encode_rendered(rendered, max_tokens=context)]
        return [
            prompts.encode_text(each, max_tokens=context) if isinstance(each, str) else Prompt(each)
            for each in parsed.prompts
        ]
    except DataError as error:
        raise RequestError(400, str(error)) from None


def _too_long_error(parsed: ParsedRequest, size: str, context: int) -> RequestError:
    return RequestError(
        400,
        f"the prompt has {size}; the context is {context} tokens for prompt and completion together",
        param="messages" if parsed.is_chat else "prompt",
        code="context_length_exceeded",
    )
