"""What a server serves: one bundle under several names, an adapter to each, and prompts for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from device_runner.serving.protocol import Asked, RequestError
from prge.adapter import Adapter
from prge.errors import BundleError, DataError
from prge.generation.loop import GenerationSettings, Request
from prge.generation.prompts import Prompt, Prompts
from prge.rows.tokenizer import Tokenizer


class Models:
    """Adapters by the names that clients call them, and the prompts of what clients say.

    Args:
        adapters: by name.
        tokenizer: of this object alone: several threads can't share one.

    Raises:
        BundleError: the tokenizer's chat template is damaged.
        DataError: it has one, and jinja2 isn't installed.
    """

    def __init__(self, adapters: Mapping[str, Adapter], tokenizer: Tokenizer) -> None:
        self._adapters = dict(adapters)
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._prompts = Prompts(tokenizer)
        _ = self._prompts.chat  # its process is forked while this one has no other thread

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may ask for."""
        return tuple(self._adapters)

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

    def requests(
        self, body: bytes, read: Callable[[bytes], Asked], context: int
    ) -> tuple[Asked, list[Request]]:
        """What a body asks for, and the answers to make for it; raises RequestError.

        Args:
            body: of a request.
            read: understands it.
            context: most tokens of prompt and answer together.
        """
        # One at a time: neither a tokenizer nor the memory is for many.
        with self._lock:
            return self._requests(read(body), context)

    def _requests(self, asked: Asked, context: int) -> tuple[Asked, list[Request]]:
        adapter = self.adapter(asked.model)
        requests = []
        for prompt in self._prompts_of(asked):
            tokens = len(prompt.tokens)
            if tokens >= context:
                raise RequestError(
                    400,
                    f"there are {tokens} tokens to answer, the context is {context} for prompt and "
                    "answer together",
                    param="messages" if asked.is_chat else "prompt",
                    code="context_length_exceeded",
                )
            most = context - tokens if asked.most is None else min(asked.most, context)
            settings = GenerationSettings(most, asked.stop, asked.choice)
            requests += [Request(prompt, adapter, settings)] * asked.count
        return asked, requests

    def _prompts_of(self, asked: Asked) -> list[Prompt]:
        try:
            if asked.is_chat:
                return [self._prompts.of_messages(asked.messages)]
            return [
                self._prompts.of_text(each) if isinstance(each, str) else Prompt(each)
                for each in asked.prompts
            ]
        except DataError as error:
            raise RequestError(400, str(error)) from None
        except BundleError as error:
            # The template's process has ended with these messages; others get another one.
            self._prompts = Prompts(self._tokenizer)
            raise RequestError(400, error.what) from None
