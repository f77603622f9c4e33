"""Rows of feedback that can't be trained on, and unusual ones that can."""

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


def chat_feedback(content: Any, **more: Any) -> dict[str, Any]:
    """Return a row of feedback on a conversation, as somebody could write it into the file."""
    prompt_feedback = {"messages": [{"role": "user", "content": content}]}
    return {"id": "h", **prompt_feedback, "answer": "b", "correction": "d", **more}


def prompt_feedback(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"id": "h", "prompt": prompt, "answer": " b", "rating": "good", **more}


HOSTILE_FEEDBACK = {
    "empty answer": prompt_feedback("a", answer=""),
    "bad empty answer": prompt_feedback("a", answer="", rating="bad"),
    "template raises": chat_feedback("raise"),
    "answer raises": chat_feedback("a", correction="raise"),
    "template loops": chat_feedback("loop"),
    "odd role": chat_feedback("a", messages=[{"role": "pirate", "content": "a"}]),
    "null role": chat_feedback("a", messages=[{"role": None, "content": "a"}]),
    "null content": chat_feedback(None),
    "nested content": chat_feedback([{"type": "text", "text": ["a"]}]),
    "no messages": chat_feedback("a", messages=[]),
    "null messages": chat_feedback("a", messages=None),
    "messages are a text": chat_feedback("a", messages="hello"),
    "kwargs that are taken": chat_feedback("a", chat_template_kwargs={"messages": []}),
    "kwargs of numbers": chat_feedback("a", chat_template_kwargs=[1, 2]),
    "kwargs that break the template": chat_feedback("raise", chat_template_kwargs={"raise_exception": 1}),
    "tools that are a number": chat_feedback("a", chat_template_kwargs={"tools": 5}),
    "control tokens": prompt_feedback("a", control_tokens="maybe"),
    "nested control tokens": prompt_feedback("a", control_tokens={"a": [None]}),
    "lone surrogate": prompt_feedback("a\ud800"),
    "surrogate answer": prompt_feedback("a", answer="\udfff"),
    "null prompt": prompt_feedback(None),
    "huge number": prompt_feedback(10**400),
    "answer is a number": prompt_feedback("a", answer=1e308),
    "nested rating": prompt_feedback("a", rating=["good"]),
    "empty correction": prompt_feedback("a", correction=""),
    "null correction": prompt_feedback("a", correction=None),
    "no feedback": {"text": "a"},
    "a list": [1],
    "deep": {"prompt": "a", "answer": "b", "rating": "good", "id": json.loads("[" * 60 + "]" * 60)},
}
# These can be trained on and fail no round.
UNUSUAL_FEEDBACK = {
    "NUL": prompt_feedback("a\0", answer="\0"),
    "escapes": prompt_feedback("\x1b[2J", answer="\x07"),
    "control tokens": prompt_feedback("<s></s>", answer="</s><s>", control_tokens="all"),
    "control tokens of chats": chat_feedback("<s></s>", correction="</s>"),
    "too long prompt": prompt_feedback("word " * 5000),
    "too long answer": prompt_feedback("a", answer="word " * 5000),
    "too long chat": chat_feedback("word " * 5000),
    "empty prompt": prompt_feedback(""),
    "unread kwargs": chat_feedback("a", chat_template_kwargs={"x": {"y": [None, 1e308]}}),
    "kwargs of functions": chat_feedback("a", chat_template_kwargs={"raise_exception": 1, "range": {}}),
    "other columns": prompt_feedback("a", weight=-1e308, label="x", messages_=None, id={"a": 1}, time=None),
}
