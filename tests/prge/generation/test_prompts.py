"""Prompts: texts and conversations as tokens."""

from __future__ import annotations

import pytest

from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import DataError
from prge.generation.prompts import Prompts
from tests.prge.data.tiny_tokenizers import byte_level_backend
from tests.refusals import raises

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "the film was bad"}]


def make_tokenizer(template: str | None = None) -> Tokenizer:
    return Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, prepend_bos=True, chat_template=template)


def test_a_prompt_text_begins_like_the_models_texts_and_is_continued() -> None:
    prompt = Prompts(make_tokenizer()).encode_text("the film</s>")
    assert (prompt.tokens[0], prompt.tokens[-1]) == (1, 2)
    assert prompt.continues
    assert 2 not in Prompts(make_tokenizer(), control_tokens="text").encode_text("the film</s>").tokens


def test_messages_end_where_the_assistant_begins_and_the_template_determines_its_end() -> None:
    tokenizer = make_tokenizer(TEMPLATE)
    prompt = Prompts(tokenizer).encode_messages(MESSAGES)
    assert tokenizer.decode(prompt.tokens) == (
        "<|im_start|>user\nthe film was bad<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not prompt.continues
    assert prompt.ends == {4}  # <|im_end|>


def test_an_end_of_turn_without_control_tokens_is_a_stop_word() -> None:
    template = "{% for message in messages %}{{ message.content }}\nUser: {% endfor %}"
    prompt = Prompts(make_tokenizer(template)).encode_messages(MESSAGES)
    assert prompt.stop == ("\nUser:",) and not prompt.ends


@pytest.mark.parametrize(
    "template",
    ["{{ messages[-1].content }}:", "{{ raise_exception('no system') if messages | length > 1 }}Hi"],
)
def test_a_template_without_an_end_of_turn_has_none(template: str) -> None:
    assert Prompts(make_tokenizer(template)).encode_messages(MESSAGES).ends == frozenset()


def test_messages_need_a_template() -> None:
    prompts = Prompts(make_tokenizer())
    assert prompts.chat is None
    with raises(DataError, "chat-template-missing"):
        prompts.encode_messages(MESSAGES)
