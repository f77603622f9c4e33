"""Chat templates: texts equal those of transformers, and the assistant's text is located."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prge.data.tokenization.chat import SECONDS, ChatTemplate, Rendering, check_messages
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import BundleError, DataError
from tests.prge.data.chat_templates import CHATML, EVERYTHING, HEADERS, TURNS
from tests.prge.data.tiny_tokenizers import byte_level_backend
from tests.refusals import raises

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


def written_in(result: Rendering) -> list[str]:
    return [result.text[start:end] for start, end in result.spans]


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("conversation", sorted(CONVERSATIONS))
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_same_text_as_transformers(name: str, conversation: str, add_generation_prompt: bool) -> None:
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), **SPECIAL)
    messages = CONVERSATIONS[conversation]
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    if (name, conversation) == ("turns", "system"):
        with raises(DataError, "messages-refused", containing="no system role"):
            template.render(messages, add_generation_prompt=add_generation_prompt)
        return
    expected = tokenizer.apply_chat_template(
        messages,
        chat_template=TEMPLATES[name],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
    )
    assert template.render(messages, add_generation_prompt=add_generation_prompt) == expected


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("chatml", ["Grüße!\n\n1 + 1 = 2.<|im_end|>\n", "Bye<|im_end|>\n"]),
        ("headers", ["Grüße!\n\n1 + 1 = 2.</s>", "Bye</s>"]),
        ("turns", ["Grüße!\n\n1 + 1 = 2.<end_of_turn>\n", "Bye<end_of_turn>\n"]),
    ],
)
def test_assistant_spans(name: str, written: list[str]) -> None:
    [result] = ChatTemplate(TEMPLATES[name], SPECIAL).renderings(CONVERSATIONS["two turns"])
    assert written_in(result) == written
    assert result.turns == (1, 3) and result.is_exact and not result.is_tagged


def test_turn_that_does_not_begin_with_the_generation_prompt() -> None:
    template = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'")
    [result] = ChatTemplate(template, SPECIAL).renderings(CONVERSATIONS["answer"])
    assert not result.is_exact
    assert written_in(result) == ["Grüße!\n\n1 + 1 = 2.<|im_end|>\n"]


def test_a_template_that_rewrites_earlier_turns_gives_a_text_for_each() -> None:
    template = "{% for m in messages %}{{ m.content if loop.last else 'earlier' }}|{% endfor %}"
    messages = CONVERSATIONS["two turns"]
    first, second = ChatTemplate(template, SPECIAL).renderings(messages)
    # The text before an answer is the prompt that the model sees before it answers.
    assert (first.text, first.turns) == (f"{messages[0]['content']}|Grüße!\n\n1 + 1 = 2.|", (1,))
    assert (second.text, second.turns) == (f"earlier|earlier|{messages[2]['content']}|Bye|", (3,))
    assert [written_in(each)[0] for each in (first, second)] == ["Grüße!\n\n1 + 1 = 2.|", "Bye|"]


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


def test_invalid_template() -> None:
    with raises(BundleError, "chat-template-damaged"):
        ChatTemplate("{% for %}", SPECIAL)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages must be a list of at least one message"),
        ([], "messages must be a list of at least one message"),
        ([{"content": "Hi"}], "message 1 has no role"),
        ([USER, {"role": "assistant", "content": None}], "message 2 (assistant) has no text as content"),
        (
            [USER, {"role": "assistant", "content": [{"type": "image"}]}],
            "message 2 (assistant) has a part of the type 'image': only text is supported",
        ),
        ([SYSTEM, USER], "no message has the role 'assistant': there is nothing to learn from"),
    ],
)
def test_messages_that_can_not_be_used(messages: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_messages(messages)
    assert message in str(caught.value)


def test_messages_without_an_answer_are_a_prompt() -> None:
    assert check_messages([SYSTEM, USER], answered=False) == [SYSTEM, USER]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_same_tokens_as_transformers(name: str) -> None:
    import transformers

    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), **SPECIAL)
    messages = CONVERSATIONS["two turns"]
    tokenizer = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, prepend_bos=True)
    rendered = ChatTemplate(TEMPLATES[name], SPECIAL).render(messages)
    expected = reference.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=True)[
        "input_ids"
    ]
    assert tokenizer.encode(rendered, control=True) == expected


@pytest.mark.parametrize(
    ("source", "values"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", ["seconds"]),
        ("{{ lipsum(100000) }}", ["seconds", "characters"]),
        ("{{ messages | tojson(indent=10**9) }}", ["MiB"]),
        ("{{ 'a' * 10**9 }}", ["MiB"]),
        (
            "{% set n = namespace(t='a') %}{% for a in range(99) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
            ["MiB"],
        ),
        ("{{ 'a' * 9000000 }}", ["9000000"]),
        ("{{ '%99999999d' % 1 }}", ["characters", "MiB"]),
        ("{{ 9 ** (9 ** 9) }}", ["seconds"]),
    ],
)
def test_a_template_that_loops_or_grows_is_stopped(source: str, values: list[str]) -> None:
    with measured_children() as took, raises(BundleError, "chat-template-unbounded") as caught:
        ChatTemplate(source, SPECIAL).render(CONVERSATIONS["answer"])
    assert any(value in str(caught.value) for value in values)
    assert took.seconds < SECONDS + 2


def test_template_that_writes_half_of_a_character() -> None:
    with raises(BundleError, "half-character"):
        ChatTemplate("{{ '\\ud800' }}", SPECIAL).render(CONVERSATIONS["answer"])


@pytest.mark.parametrize(
    "source",
    [
        "x" * 20_000_000,
        "{{ " + "(" * 400_000 + "1" + ")" * 400_000 + " }}",
        "{% if 1 %}" * 90_000 + "{% endif %}" * 50_000,
        "{{ " + "-" * 900_000 + "1 }}",
        "{{ [" * 200_000,
    ],
)
def test_template_that_is_large_or_nests_is_refused(source: str) -> None:
    with raises(BundleError, "chat-template-too-large", "chat-template-damaged", "chat-template-unbounded"):
        ChatTemplate(source, SPECIAL)


def children() -> set[str]:
    """Return the child processes that were not waited for; earlier tests may have left some."""
    result = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                result.add(path.parent.name)
    return result


def test_a_child_that_crossed_a_bound_leaves_no_process() -> None:
    before = children()
    template = ChatTemplate("{{ 'a' * 10**9 if messages | length > 1 else 'b' }}", SPECIAL)
    assert template.render(CONVERSATIONS["question"]) == "b"
    for _ in range(2):
        with pytest.raises(BundleError):
            template.render(CONVERSATIONS["answer"])
    assert children() <= before


def test_an_unused_template_ends_its_child() -> None:
    before = children()
    template = ChatTemplate(CHATML, SPECIAL)
    assert len(children() - before) == 1
    del template
    gc.collect()
    assert children() <= before


def test_a_long_conversation_gets_the_memory_that_it_needs() -> None:
    messages = [USER, {"role": "assistant", "content": "Gr\u00fc\u00dfe! \U0001f600 " * 500_000}]
    [result] = ChatTemplate(CHATML, SPECIAL).renderings(messages)
    assert result.is_exact and len(result.spans) == 1 and len(result.text) > 4_000_000


@dataclass
class CpuTime:
    seconds: float = 0.0


@contextmanager
def measured_children() -> Iterator[CpuTime]:
    """Measure the CPU seconds of children that end in the block."""
    took, before = CpuTime(), sum(os.times()[2:4])
    try:
        yield took
    finally:
        took.seconds = sum(os.times()[2:4]) - before
