"""Rows of feedback that can't be learnt, and odd ones that can."""

from __future__ import annotations

import json
from typing import Any

# Refuses the content `raise`, loops for `loop`, and knows two roles.
HOSTILE_TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'raise' %}{{ raise_exception('no') }}{% endif %}"
    "{% if m.content == 'loop' %}{% for a in range(90000) %}{% for b in range(90000) %}"
    "{% endfor %}{% endfor %}{% endif %}"
    "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('who is that') }}{% endif %}"
    "{{ m.content }} {% endfor %}"
)


def said(content: Any, **more: Any) -> dict[str, Any]:
    """A row of feedback on a conversation, which somebody wrote into the file."""
    asked = {"messages": [{"role": "user", "content": content}]}
    return {"id": "h", **asked, "answer": "b", "correction": "d", **more}


def asked(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"id": "h", "prompt": prompt, "answer": " b", "rating": "good", **more}


HOSTILE = {
    "empty answer": asked("a", answer=""),
    "bad empty answer": asked("a", answer="", rating="bad"),
    "template raises": said("raise"),
    "answer raises": said("a", correction="raise"),
    "template loops": said("loop"),
    "odd role": said("a", messages=[{"role": "pirate", "content": "a"}]),
    "null role": said("a", messages=[{"role": None, "content": "a"}]),
    "null content": said(None),
    "nested content": said([{"type": "text", "text": ["a"]}]),
    "no messages": said("a", messages=[]),
    "null messages": said("a", messages=None),
    "messages are a text": said("a", messages="hello"),
    "kwargs that are taken": said("a", chat_template_kwargs={"messages": []}),
    "kwargs of numbers": said("a", chat_template_kwargs=[1, 2]),
    "kwargs that break the template": said("raise", chat_template_kwargs={"raise_exception": 1}),
    "tools that are none": said("a", chat_template_kwargs={"tools": 5}),
    "control tokens": asked("a", control_tokens="maybe"),
    "nested control tokens": asked("a", control_tokens={"a": [None]}),
    "lone surrogate": asked("a\ud800"),
    "surrogate answer": asked("a", answer="\udfff"),
    "null prompt": asked(None),
    "huge number": asked(10**400),
    "answer is a number": asked("a", answer=1e308),
    "nested rating": asked("a", rating=["good"]),
    "empty correction": asked("a", correction=""),
    "null correction": asked("a", correction=None),
    "no feedback": {"text": "a"},
    "a list": [1],
    "deep": {"prompt": "a", "answer": "b", "rating": "good", "id": json.loads("[" * 60 + "]" * 60)},
}
# They can be learnt, and fail no round.
ODD = {
    "NUL": asked("a\0", answer="\0"),
    "escapes": asked("\x1b[2J", answer="\x07"),
    "control tokens": asked("<s></s>", answer="</s><s>", control_tokens="all"),
    "control tokens of chats": said("<s></s>", correction="</s>"),
    "too long prompt": asked("word " * 5000),
    "too long answer": asked("a", answer="word " * 5000),
    "too long chat": said("word " * 5000),
    "empty prompt": asked(""),
    "unread kwargs": said("a", chat_template_kwargs={"x": {"y": [None, 1e308]}}),
    "kwargs of functions": said("a", chat_template_kwargs={"raise_exception": 1, "range": {}}),
    "other columns": asked("a", weight=-1e308, label="x", messages_=None, id={"a": 1}, time=None),
}
