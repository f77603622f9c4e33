"""A device as a Flower ClientApp: a message with a task comes, a message with an answer goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

# Of a message, as a Flower ConfigRecord takes them.
Fields = Mapping[str, Any]
TASK, ANSWER = "task", "answer"


def client_app(answer: Callable[[Fields], Fields]) -> ClientApp:
    """The app that gives what `answer` makes of each task; it refuses by an answer, it doesn't raise."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        fields = answer(fields_of(message, TASK))
        return Message(RecordDict({ANSWER: ConfigRecord(dict(fields))}), reply_to=message)

    return app


def fields_of(message: Message, name: str) -> Fields:
    """The fields of a message's record; none where it has no such record."""
    record = message.content.get(name) if message.has_content() else None
    return dict(record) if isinstance(record, ConfigRecord) else {}
