"""Chat templates render as transformers renders them; what the assistant wrote is found again."""

from __future__ import annotations

from typing import Any

import pytest

from prge.errors import BundleError, DataError
from prge.rows.chat import ChatTemplate, check_messages
from prge.rows.tokenizer import Tokenizer
from tests.prge.rows.chat_templates import CHATML, EVERYTHING, HEADERS, TURNS
from tests.prge.rows.tiny_tokenizers import byte_level_backend

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "turns": TURNS, "everything": EVERYTHING}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

USER = {"role": "user", "content": " Hi <b>there</b> & 'you' \n"}
REPLY = {"role": "assistant", "content": "Grüße!\n\n1 + 1 = 2."}
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "answer": [USER, REPLY],
    "two turns": [USER, REPLY, {"role": "user", "content": ""}, {"role": "assistant", "content": "Bye"}],
    "system": [SYSTEM, USER, REPLY],
}


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("conversation", sorted(CONVERSATIONS))
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_same_text_as_transformers(name: str, conversation: str, add_generation_prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), **SPECIAL)
    messages = CONVERSATIONS[conversation]
    mine = ChatTemplate(TEMPLATES[name], SPECIAL)
    if (name, conversation) == ("turns", "system"):
        with pytest.raises(DataError, match="the chat template refuses the messages\n  - no system role"):
            mine.render(messages, add_generation_prompt=add_generation_prompt)
        return
    theirs = tokenizer.apply_chat_template(
        messages,
        chat_template=TEMPLATES[name],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
    )
    assert mine.render(messages, add_generation_prompt=add_generation_prompt) == theirs


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("chatml", ["Grüße!\n\n1 + 1 = 2.<|im_end|>\n", "Bye<|im_end|>\n"]),
        ("headers", ["Grüße!\n\n1 + 1 = 2.</s>", "Bye</s>"]),
        ("turns", ["Grüße!\n\n1 + 1 = 2.<end_of_turn>\n", "Bye<end_of_turn>\n"]),
    ],
)
def test_assistant_spans(name: str, written: list[str]) -> None:
    text, spans, exact = ChatTemplate(TEMPLATES[name], SPECIAL).assistant_spans(CONVERSATIONS["two turns"])
    assert [text[start:end] for start, end in spans] == written
    assert exact


def test_turn_that_does_not_begin_with_the_generation_prompt() -> None:
    template = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'")
    text, spans, exact = ChatTemplate(template, SPECIAL).assistant_spans(CONVERSATIONS["answer"])
    assert not exact
    assert [text[start:end] for start, end in spans] == [
        "<|im_start|>assistant\nGrüße!\n\n1 + 1 = 2.<|im_end|>\n"
    ]


def test_template_that_rewrites_earlier_turns() -> None:
    template = "{% for m in messages %}{{ m.content if loop.last else 'earlier' }}|{% endfor %}"
    with pytest.raises(DataError, match="it renders message 2 otherwise when more messages follow"):
        ChatTemplate(template, SPECIAL).assistant_spans(CONVERSATIONS["two turns"])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10**9) | list }}",
        "{{ messages[7].content.x.y }}",
    ],
)
def test_template_is_kept_in_its_sandbox(attack: str) -> None:
    with pytest.raises(DataError):
        ChatTemplate(attack, SPECIAL).render(CONVERSATIONS["answer"])


def test_template_that_is_none() -> None:
    with pytest.raises(BundleError, match="the bundle's chat template can't be read"):
        ChatTemplate("{% for %}", SPECIAL)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages must be a list of at least one message"),
        ([], "messages must be a list of at least one message"),
        ([{"content": "Hi"}], "message 1 has no role"),
        ([USER, {"role": "assistant", "content": None}], "message 2 (assistant) has no content that is text"),
        (
            [USER, {"role": "assistant", "content": [{"type": "image"}]}],
            "message 2 (assistant) has no content",
        ),
        ([SYSTEM, USER], "no message has the role 'assistant': there is nothing to learn from"),
    ],
)
def test_messages_that_can_not_be_used(messages: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_messages(messages)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_same_tokens_as_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), **SPECIAL)
    messages = CONVERSATIONS["two turns"]
    mine = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, prepend_bos=True)
    rendered = ChatTemplate(TEMPLATES[name], SPECIAL).render(messages)
    wanted = theirs.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=True)["input_ids"]
    assert mine.encode(rendered, control=True) == wanted
