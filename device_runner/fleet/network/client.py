"""A device as a Flower ClientApp: a message with a task comes, a message with an answer goes."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

_RECORD, _CONTENT = "fleet", "content"


def client_app(answer: Callable[[bytes], bytes]) -> ClientApp:
    """The app that sends what `answer` makes of each task; see `messages`."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(packed(answer(unpacked(message))), reply_to=message)

    return app


def packed(content: bytes) -> RecordDict:
    """Bytes as the content of Flower's messages."""
    return RecordDict({_RECORD: ConfigRecord({_CONTENT: content})})


def unpacked(message: Message) -> bytes:
    """Inverse of `packed`; no bytes where the message has none of ours."""
    record = message.content.get(_RECORD) if message.has_content() else None
    content = record.get(_CONTENT) if isinstance(record, ConfigRecord) else None
    return content if isinstance(content, bytes) else b""
