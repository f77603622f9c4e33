"""Control tokens that are written in rows, and the ends of texts, compared with transformers.

The oracles are transformers' tokenizers: of a text, of a text whose control tokens are characters, and of one
that never heard of some control tokens, for chats whose messages have these written in them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from prge.data.example_building import build_examples
from prge.data.forms.feedback_rows import rows_from_feedback
from prge.data.options import BuildOptions
from prge.data.readers.files import Row
from prge.data.row_report import DataReport
from prge.data.tokenization.chat import ChatTemplate
from prge.data.tokenization.control_tokens import MessageTexts
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import DataError
from prge.generation.prompts import Prompts
from prge.objectives.examples import Example
from server_export.checkpoint.tokenization import device_tokenizer
from tests.bundles import make_spec
from tests.prge.data.chat_templates import CHATML
from tests.prge.data.tiny_tokenizers import byte_fallback_backend, byte_level_backend, prefixed_backend
from tests.refusals import raises

MODEL = make_spec(sequence_length=4000, vocabulary_size=100_000)
TURNS = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def metaspace_backend() -> Backend:
    """Return a SentencePiece-like tokenizer that prepends a space to a text's first word only."""
    backend = prefixed_backend()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return backend


BACKENDS = {
    "byte level": byte_level_backend,
    "prefixed": prefixed_backend,
    "byte fallback": byte_fallback_backend,
    "metaspace": metaspace_backend,
}


def transformers_tokenizer(backend: Backend) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def make_device_tokenizer(backend: Backend, **given: Any) -> Tokenizer:
    return Tokenizer(backend, bos_id=backend.token_to_id("<s>"), eos_id=backend.token_to_id("</s>"), **given)


def built(
    tokenizer: Tokenizer, *fields: Mapping[str, Any], **options: Any
) -> tuple[list[Example], DataReport]:
    rows = [Row(number, each) for number, each in enumerate(fields, 1)]
    return build_examples(rows, tokenizer, MODEL, options=BuildOptions(**options))


def tokens_of(example: Example) -> list[int]:
    [sequence] = example.sequences
    return [*sequence.tokens]


def targets_of(example: Example) -> list[int]:
    return [target.token for target in example.sequences[0].targets]


def ids_of(reference: Any, text: str, **options: Any) -> list[int]:
    """Return transformers' ids of a text, without special tokens around it."""
    result: list[int] = reference(text, add_special_tokens=False, **options).input_ids
    return result


@pytest.mark.parametrize("text", ["a cat</s>", "<s>a cat</s> and</s> a dog", "</s>", "cat <s>"])
@pytest.mark.parametrize("variant", BACKENDS)
def test_a_text_has_the_tokens_of_transformers(variant: str, text: str) -> None:
    reference, own_tokenizer = (
        transformers_tokenizer(BACKENDS[variant]()),
        make_device_tokenizer(BACKENDS[variant]()),
    )
    eos = reference.eos_token_id
    [example], report = built(own_tokenizer, {"text": text + " on a mat"})
    assert tokens_of(example) == [*ids_of(reference, text + " on a mat"), eos]
    [example], report = built(
        own_tokenizer, {"text": text + " on a mat"}, control_tokens="text", append_eos=False
    )
    assert tokens_of(example) == ids_of(reference, text + " on a mat", split_special_tokens=True)
    assert eos not in tokens_of(example)
    assert "read as the characters that they are: 1 row (1), " in report.summary()


@pytest.mark.parametrize("variant", BACKENDS)
def test_a_pair_has_the_tokens_of_transformers(variant: str) -> None:
    reference, own_tokenizer = (
        transformers_tokenizer(BACKENDS[variant]()),
        make_device_tokenizer(BACKENDS[variant]()),
    )
    prompt, completion = "<s>a</s> cat", " on</s> a mat</s>"
    read, text = (
        ids_of(reference, prompt + completion, split_special_tokens=split) for split in (False, True)
    )
    before, spelled = (ids_of(reference, prompt, split_special_tokens=split) for split in (False, True))
    eos = reference.eos_token_id
    [example], _ = built(own_tokenizer, {"prompt": prompt, "completion": completion})
    assert (tokens_of(example), targets_of(example)) == (read, read[len(before) :])
    [example], _ = built(own_tokenizer, {"prompt": prompt, "completion": completion}, control_tokens="text")
    assert (tokens_of(example), targets_of(example)) == ([*text, eos], [*text[len(spelled) :], eos])
    [example], report = built(
        own_tokenizer, {"prompt": prompt, "completion": completion}, control_tokens="prompt"
    )
    assert targets_of(example) == [*text[len(spelled) :], eos]
    assert tokens_of(example)[: len(before)] == before
    assert "in prompts alone" in report.summary()


@pytest.mark.parametrize("variant", BACKENDS)
def test_a_text_that_begins_with_the_begin_token_has_one(variant: str) -> None:
    own_tokenizer = make_device_tokenizer(BACKENDS[variant](), prepend_bos=True)
    for fields in ({"text": "<s>a cat"}, {"prompt": "<s>a", "completion": " cat"}):
        [with_it], _ = built(own_tokenizer, fields)
        without = {name: text.removeprefix("<s>") for name, text in fields.items()}
        assert tokens_of(with_it).count(1) == tokens_of(built(own_tokenizer, without)[0][0]).count(1) == 1
        assert tokens_of(built(own_tokenizer, fields, control_tokens="text")[0][0]).count(1) == 1
    assert Prompts(own_tokenizer).encode_text("<s>a cat").tokens.count(1) == 1


def test_a_text_that_ends_with_the_end_token_has_one() -> None:
    own_tokenizer = make_device_tokenizer(byte_level_backend())
    for fields in ({"text": "a cat</s>"}, {"prompt": "a", "completion": " cat</s>"}):
        [example], _ = built(own_tokenizer, fields)
        assert tokens_of(example).count(2) == 1 and targets_of(example)[-1] == 2
        [example], _ = built(own_tokenizer, fields, control_tokens="text")
        assert targets_of(example)[-1] == 2 and len(tokens_of(example)) > 3


@pytest.mark.parametrize("fields", [{"text": "a cat"}, {"prompt": "a", "completion": " cat"}])
def test_the_end_is_trained_on_unless_it_is_disabled(fields: dict[str, str]) -> None:
    own_tokenizer = make_device_tokenizer(byte_level_backend())
    [example], _ = built(own_tokenizer, fields)
    assert targets_of(example)[-1] == 2
    [example], _ = built(own_tokenizer, fields, append_eos=False)
    assert 2 not in tokens_of(example)


def test_the_end_of_a_long_text_is_in_its_last_window() -> None:
    own_tokenizer = make_device_tokenizer(byte_level_backend())
    text = "a cat on a mat and a dog was bad"
    whole = ids_of(transformers_tokenizer(byte_level_backend()), text)
    model = make_spec(sequence_length=5, vocabulary_size=1000)
    converted, _ = build_examples(
        [Row(1, {"text": text})], own_tokenizer, model, options=BuildOptions("auto")
    )
    assert [token for each in converted for token in targets_of(each)] == [*whole[1:], 2]
    assert [2 in tokens_of(each) for each in converted] == [False] * (len(converted) - 1) + [True]
    cut, _ = build_examples([Row(1, {"text": text})], own_tokenizer, model, options=BuildOptions("truncate"))
    assert [targets_of(each) for each in cut] == [whole[1:5]]


@pytest.mark.parametrize("overflow", ["auto", "error", "truncate", "split"])
def test_a_text_that_fills_the_bundle_is_whole_without_its_end(overflow: Any) -> None:
    own_tokenizer = make_device_tokenizer(byte_level_backend())
    whole = ids_of(transformers_tokenizer(byte_level_backend()), "a cat on a mat")
    model = make_spec(sequence_length=len(whole), vocabulary_size=1000)
    options = BuildOptions(overflow)
    [example], report = build_examples(
        [Row(1, {"text": "a cat on a mat"})], own_tokenizer, model, options=options
    )
    assert tokens_of(example) == whole
    assert (
        "texts that fill the bundle, trained on without an end-of-sequence token: 1 row (1)"
        in report.summary()
    )


# Chats


# The template writes </s>; messages contain <s>, which the template never writes.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WRITTEN = ["<s>", " a cat", " on a mat", "<s><s>", "\n", "  ", "<", "s>", "12345", "Grüße", "\ufdd0"]


@cache
def chat_prompts(variant: str) -> Prompts:
    return Prompts(make_device_tokenizer(BACKENDS[variant](), chat_template=TEMPLATE))


@cache
def without_begin(variant: str) -> Any:
    """Return a transformers tokenizer with the same ids that reads <s> as three characters."""
    from transformers import PreTrainedTokenizerFast

    content = json.loads(BACKENDS[variant]().to_str())
    content["added_tokens"] = [each for each in content["added_tokens"] if each["content"] != "<s>"]
    return PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(json.dumps(content)), eos_token="</s>")


@pytest.mark.parametrize("variant", BACKENDS)
@given(contents=st.lists(st.lists(st.sampled_from(WRITTEN), max_size=8).map("".join), min_size=1, max_size=3))
@settings(max_examples=20)
def test_control_tokens_of_messages_are_text_and_those_of_the_template_are_not(
    variant: str, contents: list[str]
) -> None:
    text = "".join(f"user: {each.strip()}</s>" for each in contents) + "assistant: "
    prompt = chat_prompts(variant).encode_messages([{"role": "user", "content": each} for each in contents])
    assert [*prompt.tokens] == ids_of(without_begin(variant), text)


def test_targets_of_a_chat_end_where_the_template_ends_a_turn() -> None:
    own_tokenizer = make_device_tokenizer(byte_level_backend(), chat_template=CHATML)
    messages = [
        {"role": "user", "content": "What is <|im_end|>?"},
        {"role": "assistant", "content": "It is <|im_end|>."},
    ]
    [example], report = built(own_tokenizer, {"messages": messages})
    reference = transformers_tokenizer(byte_level_backend())
    contents = ids_of(reference, "It is <|im_end|>.", split_special_tokens=True)
    assert targets_of(example) == [*contents, 4, *ids_of(reference, "\n")]
    assert (
        "control tokens written in messages, read as the characters that they are: 1 row (1), "
        "<|im_end|> 2 times; --control-tokens all reads them as control tokens" in report.summary()
    )
    [example], report = built(own_tokenizer, {"messages": messages}, control_tokens="all")
    text = ChatTemplate(CHATML, SPECIAL).render(messages)
    assert tokens_of(example) == ids_of(reference, text)
    assert "control tokens written in messages, read as control tokens: 1 row (1)" in report.summary()


def test_roles_and_tools_of_a_client_write_no_control_tokens() -> None:
    own_tokenizer = make_device_tokenizer(byte_level_backend())
    messages = [{"role": "user<|im_end|>", "content": "a", "calls": [{"<|im_end|>": ["<|im_start|>"]}]}]
    texts = MessageTexts(own_tokenizer, "special", messages)
    template = ChatTemplate("<|im_start|>{{ messages | tojson }}<|im_end|>", SPECIAL)
    rendered = texts.restore(template.render(texts.protect(messages)))
    assert rendered.text == template.render(messages)
    assert own_tokenizer.ids(rendered.text, control=rendered.control).tolist().count(4) == 1
    assert texts.written == {"<|im_end|>": 2, "<|im_start|>": 1}


def test_positions_in_restored_texts() -> None:
    own_tokenizer = make_device_tokenizer(byte_level_backend())
    messages = [{"content": "ab<|im_end|>cd</s>e"}]
    texts = MessageTexts(own_tokenizer, "special", messages)
    rendered = ">" + texts.protect(messages)[0]["content"] + "</s>!"
    result = texts.restore(rendered)
    assert result.text == ">ab<|im_end|>cd</s>e</s>!"
    assert result.control == [len(">ab<|im_end|>cd</s>e")]
    for part in ("ab", "cd", "e", "!"):
        end = rendered.rindex(part) + len(part)
        assert result.text[: result.position(end)].endswith(part)


# Reports of written control tokens


def test_control_tokens_are_counted_by_row_and_by_name() -> None:
    own_tokenizer = make_device_tokenizer(byte_level_backend())
    _, report = built(own_tokenizer, {"text": TURNS}, {"text": "a cat"}, {"text": "a</s>"})
    assert report.events() == [
        "control tokens written in texts, read as control tokens: 2 rows (1, 3), <|im_start|> 2 times, "
        "<|im_end|> 2 times, </s> 1 times; --control-tokens text reads them as characters"
    ]
    assert list(report.counts()["control_tokens"].values()) == [5]


def test_a_row_may_set_how_control_tokens_are_read() -> None:
    own_tokenizer = make_device_tokenizer(byte_level_backend())
    row = {"prompt": "a</s>", "completion": " b</s> cat"}
    (first, second, third), _ = built(
        own_tokenizer, row, {**row, "control_tokens": "text"}, {**row, "control_tokens": "prompt"}
    )
    assert [tokens_of(each).count(2) for each in (first, second, third)] == [3, 1, 2]
    with raises(DataError, "control-tokens-unknown", containing="'no'"):
        built(own_tokenizer, {**row, "control_tokens": "no"})


def test_control_tokens_of_feedback() -> None:
    own_tokenizer = make_device_tokenizer(byte_level_backend())
    feedback = {"prompt": "a</s> cat", "answer": " on</s>", "rating": "good"}
    rows, _ = rows_from_feedback([Row(1, feedback), Row(2, {**feedback, "control_tokens": "text"})])
    converted, _ = build_examples(rows, own_tokenizer, MODEL)
    assert [tokens_of(each).count(2) for each in converted] == [2, 1]
    assert all(targets_of(each).count(2) == 1 for each in converted)


# A published tokenizer


@pytest.fixture(scope="module")
def published(smollm2: Path) -> Any:
    """Return SmolLM2's tokenizer in transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("fields", "targets"),
    [
        ({"text": TURNS}, None),
        ({"text": "Ann has a ball."}, None),
        ({"prompt": "Hi:", "completion": " yo<|endoftext|>"}, 4),
        ({"instruction": "Say yo.", "output": "yo"}, None),
    ],
)
def test_rows_have_the_tokens_of_transformers_with_smollm2(
    published: Any, fields: dict[str, str], targets: int | None
) -> None:
    reference = published
    own_tokenizer = device_tokenizer(reference, "auto", len(reference))
    [example], _ = built(own_tokenizer, fields)
    if "text" in fields:
        expected = ids_of(reference, fields["text"])
        assert tokens_of(example) == [*expected, reference.eos_token_id]
        assert len(targets_of(example)) == len(expected)
    elif "prompt" in fields:
        expected = ids_of(reference, fields["prompt"] + fields["completion"])
        assert tokens_of(example) == [*expected, reference.eos_token_id]
        assert len(targets_of(example)) == targets
    else:
        messages = [
            {"role": "user", "content": fields["instruction"]},
            {"role": "assistant", "content": fields["output"]},
        ]
        result = reference.apply_chat_template(messages, return_dict=True)["input_ids"]
        assert tokens_of(example) == result[: len(tokens_of(example))]
