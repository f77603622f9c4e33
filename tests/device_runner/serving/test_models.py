"""Requests as the models of a server see them: chat templates without tools, and a missing package."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from device_runner.serving.models import Models
from device_runner.serving.protocol import RequestError, read_chat
from prge.data.tokenization.tokenizer import Tokenizer
from tests.device_runner.serving.child import TEMPLATE
from tests.numpy_generation_engine import make_adapter
from tests.prge.data.tiny_tokenizers import byte_level_backend

TOOLS = [{"type": "function", "function": {"name": "weather"}}]
CHAT: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "Hello"}]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "rain"}


def refused(template: str, **more: Any) -> Any:
    tokenizer = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, chat_template=template)
    models = Models({"base": make_adapter()}, tokenizer)
    with pytest.raises(RequestError) as caught:
        asyncio.run(models.requests(json.dumps({**CHAT, **more}).encode(), read_chat, 500))
    assert caught.value.status == 400
    return caught.value.body["error"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{{ messages[0].content }}<tool_call>",
        "{{ tools }}{{ messages[0].content }}",
        "{{ tools }}<tool_call><function=",
    ],
)
def test_a_template_without_tools_refuses_them(template: str) -> None:
    error = refused(template, tools=TOOLS)
    assert error["param"] == "tools" and error["code"] == "unsupported_parameter"
    assert "chat template has no tools" in error["message"]
    assert refused(template, messages=[*CHAT["messages"], RESULT])["param"] == "messages"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"grammar": "start: /a/"}, "grammar"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
    ],
)
def test_without_its_package_a_format_is_refused(
    more: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    error = refused(TEMPLATE, **more)
    assert error["param"] == param and "pip install" in error["message"] and "llguidance" in error["message"]
