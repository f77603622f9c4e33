"""The chat template of an export: exact loss masks and ends of answers with any tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prge.data.example_building import build_examples
from prge.data.readers.files import Row
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import ConfigError
from prge.generation.prompts import Prompts
from server_export.checkpoint.chat_templates import PLAIN, plain_template, set_chat_template
from server_export.checkpoint.tokenization import device_tokenizer
from server_export.settings import PrependBos
from tests.bundles import make_spec
from tests.prge.data.chat_templates import CHATML
from tests.prge.data.tiny_tokenizers import byte_fallback_backend, byte_level_backend, prefixed_backend
from tests.refusals import raises
from tests.tiny_models import make_tokenizer

SIZE = 1000
SPEC = make_spec(sequence_length=4096, vocabulary_size=SIZE)


def word_backend() -> Backend:
    """Return a tokenizer that knows a few words, separated by spaces."""
    words = ["<unk>", "<s>", "</s>", "User", "Assistant", ":", "yes", "no"]
    backend = Backend(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


BACKENDS: dict[str, Callable[[], Backend]] = {
    "byte level": byte_level_backend,
    "prefixed": prefixed_backend,
    "byte fallback": byte_fallback_backend,
    "near-character": lambda: make_tokenizer().backend_tokenizer,
    "words": word_backend,
}
TEXTS = st.text("abcdefgh YesNo.?!1:\n", max_size=30).filter(lambda text: text.strip())


@cache
def tokenizer_of(tokenizer_name: str, ends: bool = True, prepend_bos: PrependBos = "never") -> Tokenizer:
    """Return the tokenizer with the plain template as a device loads it."""
    special = {"bos_token": "<s>"} | ({"eos_token": "</s>"} if ends else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=BACKENDS[tokenizer_name](), **special)
    set_chat_template(tokenizer, PLAIN, prepend_bos)
    return device_tokenizer(tokenizer, prepend_bos, SIZE)


@cache
def prompts_of(tokenizer: Tokenizer) -> Prompts:
    return Prompts(tokenizer)


@pytest.fixture(autouse=True, scope="module")
def end_child_processes() -> Iterator[None]:
    """End the child processes of the shared templates."""
    yield
    prompts_of.cache_clear()


def conversation(*texts: str) -> list[dict[str, str]]:
    return [
        {"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)
    ]


def tokens_and_targets(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation, and the positions of those that are trained."""
    (example,), report = build_examples([Row(1, {"messages": messages})], tokenizer, SPEC)
    assert not report.notes
    (sequence,) = example.sequences
    return list(sequence.tokens), [target.position + 1 for target in sequence.targets]


@pytest.mark.parametrize("ends", [True, False], ids=["end token", "no end token"])
@pytest.mark.parametrize("tokenizer_name", BACKENDS)
@given(question=TEXTS, answer=TEXTS, more=TEXTS)
@settings(max_examples=15)
def test_only_the_answers_and_their_ends_are_targets(
    tokenizer_name: str, ends: bool, question: str, answer: str, more: str
) -> None:
    tokenizer = tokenizer_of(tokenizer_name, ends)
    tokens, targets = tokens_and_targets(tokenizer, conversation(question, answer, more, answer))
    for turn in (conversation(question), conversation(question, answer, more)):
        # The prompt of an answer is the same in generation as in training.
        prompt = list(prompts_of(tokenizer).encode_messages(turn).tokens)
        assert tokens[: len(prompt)] == prompt and len(prompt) in targets
        assert len(prompt) - 1 not in targets
    parts = [target for target in targets if target - 1 not in targets]
    assert len(parts) == 2
    if ends:
        assert [tokens[target] for target in targets].count(tokenizer.eos_id) >= 2
        assert tokens[-1] == tokenizer.eos_id and len(tokens) - 1 in targets


@pytest.mark.parametrize("tokenizer_name", BACKENDS)
def test_generation_stops_at_the_trained_end_of_an_answer(tokenizer_name: str) -> None:
    prompt = Prompts(tokenizer_of(tokenizer_name)).encode_messages(conversation("no"))
    assert prompt.ends == {tokenizer_of(tokenizer_name).eos_id} and not prompt.stop
    line = "\n" if tokenizer_name in ("byte level", "prefixed", "byte fallback") else " "
    prompt = Prompts(tokenizer_of(tokenizer_name, ends=False)).encode_messages(conversation("no"))
    assert not prompt.ends and prompt.stop == (f"{line}User:",)


def test_the_plain_template_renders_roles_and_ends() -> None:
    tokenizer = tokenizer_of("byte level", prepend_bos="always")
    chat = Prompts(tokenizer).chat
    assert chat is not None
    messages = [{"role": "system", "content": "Be kind."}, *conversation(" a\n", "b ", "c")]
    rendered = "<s>System: Be kind.\nUser: a\nAssistant: b</s>\nUser: c"
    assert chat.render(messages) == rendered
    assert chat.render(messages, add_generation_prompt=True) == f"{rendered}\nAssistant:"
    without = Prompts(tokenizer_of("byte level", ends=False)).chat
    assert without is not None
    assert without.render(messages[1:]) == "User: a\nAssistant: b\nUser: c"


def test_transformers_renders_the_same_text() -> None:
    tokenizer: Any = make_tokenizer()
    set_chat_template(tokenizer, PLAIN, "always")
    chat = Prompts(device_tokenizer(tokenizer, "always", SIZE)).chat
    assert chat is not None
    messages = conversation("a", "b", "c")
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.render(messages, add_generation_prompt=True) == expected


def test_a_tokenizer_keeps_its_template_unless_one_is_set(tmp_path: Path) -> None:
    tokenizer: Any = make_tokenizer()
    tokenizer.chat_template = CHATML
    set_chat_template(tokenizer, None, "auto")
    assert tokenizer.chat_template == CHATML
    set_chat_template(tokenizer, PLAIN, "auto")
    assert tokenizer.chat_template == plain_template(tokenizer, "auto")
    (tmp_path / "chat.jinja").write_text(CHATML)
    set_chat_template(tokenizer, str(tmp_path / "chat.jinja"), "auto")
    assert tokenizer.chat_template == CHATML


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for message in messages %}", "can't be read: Unexpected end of template"),
        ("{{ raise_exception('never') }}", "refuses the messages; never"),
        ("{{ messages[0].content }}", "the rendered text lacks the message"),
        (
            "{{ range(messages | length) | list }}",
            "the beginning of message 2 can't be found in the rendered text",
        ),
        ("{{ 'x' * (messages | length) }}", "the rendered text lacks the message"),
    ],
)
def test_a_file_that_renders_no_conversation_is_refused(source: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(source)
    with raises(ConfigError, "chat-template-unusable", containing="chat.jinja") as refused:
        set_chat_template(make_tokenizer(), str(tmp_path / "chat.jinja"), "auto")
    assert why in refused.value.problems[0]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "chat-template-unreadable", containing="none.jinja"):
        set_chat_template(make_tokenizer(), str(tmp_path / "none.jinja"), "auto")
