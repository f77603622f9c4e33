"""What a server serves: one bundle under several names, an adapter to each, and prompts for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from device_runner.serving.protocol import Asked, RequestError
from prge.data.readers.feedback import AnswerRecord, Fields, adapter_digest, conversation_fields
from prge.data.tokenization.control_tokens import RenderedText
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import BundleError, DataError
from prge.formats.adapter import Adapter
from prge.generation.loop import GenerationSettings, Request
from prge.generation.prompts import Prompt, Prompts

# Of a prompt, for each token of the context: longer texts aren't given to the template or the tokenizer.
MOST_CHARACTERS = 32

_T = TypeVar("_T")


class Models:
    """Adapters by the names that clients call them, and the prompts of what clients say.

    Bodies and texts are read by one thread and templates rendered by another, one request at a time: neither
    tokenizers nor memory are for many. What waits there is forgotten with the client that leaves.

    Args:
        adapters: by name.
        tokenizer: of this object alone.
        variables: that the chat template is given where a request doesn't name them.

    Raises:
        BundleError: the tokenizer's chat template is damaged.
        DataError: it has one, and jinja2 isn't installed.
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
        self._prompts = Prompts(tokenizer)
        _ = self._prompts.chat  # its process is forked while this one has no other thread
        self._texts, self._templates = (ThreadPoolExecutor(1, name) for name in ("texts", "templates"))

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may ask for."""
        return tuple(self._adapters)

    @property
    def has_template(self) -> bool:
        """Whether messages can be made a prompt."""
        return self._tokenizer.chat_template is not None

    def adapter(self, name: str) -> Adapter:
        """The adapter of a name; raises RequestError."""
        if name not in self._adapters:
            raise RequestError(
                404,
                f"there is no model {name!r}; there are {', '.join(self._adapters)}",
                param="model",
                code="model_not_found",
            )
        return self._adapters[name]

    def replace(self, name: str, adapter: Adapter) -> None:
        """Serve another adapter by a name; answers in the making go on with theirs."""
        self._adapters[name] = adapter

    def answered(self, id: str, asked: Asked, request: Request, number: int, text: str) -> AnswerRecord:
        """An answer to the request of a number, as feedback needs it."""
        made: Fields = conversation_fields(asked.messages, {**self._variables, **asked.variables})
        if not asked.is_chat:
            made = {"prompt": asked.prompts[number // asked.count]}
        digest = self._digests.get(request.adapter) or adapter_digest(request.adapter)
        self._digests[request.adapter] = digest
        return AnswerRecord(id, asked.model, digest, made, text, request.settings.facts())

    async def apart(self, work: Callable[[], _T]) -> _T:
        """What `work` gives, done by the thread that reads."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, work)

    async def requests(
        self, body: bytes, read: Callable[[bytes], Asked], context: int
    ) -> tuple[Asked, list[Request]]:
        """What a body asks for, and the answers to make for it; raises RequestError.

        Args:
            body: of a request.
            read: understands it.
            context: most tokens of prompt and answer together.
        """
        loop = asyncio.get_running_loop()
        asked = await loop.run_in_executor(self._texts, self._read, body, read, context)
        rendered = self._prompts, RenderedText("", True)
        if asked.is_chat:
            rendered = await loop.run_in_executor(self._templates, self._rendered, asked)
        return asked, await loop.run_in_executor(self._texts, self._requests, asked, *rendered, context)

    def _read(self, body: bytes, read: Callable[[bytes], Asked], context: int) -> Asked:
        asked = read(body)
        self.adapter(asked.model)
        texts = [str(message["content"]) for message in asked.messages]
        sizes = [len(each) if isinstance(each, str) else 0 for each in asked.prompts]
        longest = max([sum(map(len, texts)), *sizes])
        if longest > MOST_CHARACTERS * context:
            raise _too_long(asked, f"{longest} characters", context)
        if len(texts) > context:
            raise _too_long(asked, f"{len(texts)} messages", context)
        return asked

    def _rendered(self, asked: Asked) -> tuple[Prompts, RenderedText]:
        with self._refusing():
            variables = {**self._variables, **asked.variables}
            return self._prompts, self._prompts.render(asked.messages, variables)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """A RequestError for what the chat template refuses."""
        try:
            yield
        except DataError as error:
            raise RequestError(400, str(error)) from None
        except BundleError as error:
            # The template's process has ended with these messages; others get another one.
            self._prompts = Prompts(self._tokenizer)
            raise RequestError(400, error.what) from None

    def _requests(
        self, asked: Asked, prompts: Prompts, rendered: RenderedText, context: int
    ) -> list[Request]:
        adapter = self.adapter(asked.model)
        requests = []
        for prompt in _prompts_of(asked, prompts, rendered, context):
            tokens = len(prompt.tokens)
            if tokens >= context:
                raise _too_long(asked, f"at least {tokens} tokens", context)
            most = context - tokens if asked.most is None else min(asked.most, context)
            settings = GenerationSettings(most, asked.stop, asked.sampling, draft="lookup")
            requests += [Request(prompt, adapter, settings)] * asked.count
        return requests


def _prompts_of(asked: Asked, prompts: Prompts, rendered: RenderedText, context: int) -> list[Prompt]:
    try:
        if asked.is_chat:
            return [prompts.encode_rendered(rendered, most=context)]
        return [
            prompts.encode_text(each, most=context) if isinstance(each, str) else Prompt(each)
            for each in asked.prompts
        ]
    except DataError as error:
        raise RequestError(400, str(error)) from None


def _too_long(asked: Asked, found: str, context: int) -> RequestError:
    return RequestError(
        400,
        f"there are {found} to answer, the context is {context} tokens for prompt and answer together",
        param="messages" if asked.is_chat else "prompt",
        code="context_length_exceeded",
    )
