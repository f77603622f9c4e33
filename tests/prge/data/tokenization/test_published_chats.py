"""Chats of published templates have the same tokens, targets and losses as in transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from os.path import commonprefix
from typing import Any

import pytest

from prge.data.example_building import build_examples
from prge.data.options import BuildOptions
from prge.data.readers.files import Row
from prge.data.row_report import DataReport
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import DataError
from prge.objectives.examples import Example
from tests.bundles import make_spec
from tests.prge.data import chat_templates
from tests.prge.data.published_templates import backend_for, published, transformers_tokenizer
from tests.refusals import raises

OWN = {
    name: getattr(chat_templates, name)
    for name in (
        "CHATML",
        "HEADERS",
        "TURNS",
        "THINKS",
        "ENDS_WITH_EOS",
        "FOLDS_SYSTEM",
        "OF_PARTS",
        "TAGGED",
    )
}
_FIRST = ("qwen2_5", "qwen3", "qwen3_5_think", "phi3_5", "gptoss", "llama3_2", "lfm2")
_OTHERS = (
    *("qwen3_instruct_2507", "qwen3_5_nothink", "phi3", "llama3", "llama3_1", "lfm2_2_5", "gemma", "gemma3"),
    *("gemma4", "deepseekv3", "glm4moe", "cohere2", "nemotron_3_nano", "smolvlm"),
)
PUBLISHED = [*_FIRST, *(pytest.param(name, marks=pytest.mark.whole) for name in _OTHERS)]
TAGGED = (
    "TAGGED",
    "qwen3_training",
    "llama3_training",
    "gptoss_training",
    "qwen2_5_training",
    "phi3_training",
)
# Templates that render a turn differently once a question follows.
SEVERAL = {"THINKS", "ENDS_WITH_EOS", "qwen3", "qwen3_5_think", "qwen3_5_nothink", "phi3", "phi3_5", "gptoss"}
# Templates that read contents only as parts.
OF_PARTS = {"OF_PARTS", "smolvlm"}


def make_message(role: str, content: Any, **further: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **further}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "description": "Its name."}},
            "required": ["town"],
        },
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"town": "Bonn"}}}
TWO_TURNS = [
    make_message("user", "Hi there"),
    make_message("assistant", "Yo."),
    make_message("user", "Bye"),
    make_message("assistant", "See you."),
]
GREETS = [make_message("assistant", "Welcome!"), *TWO_TURNS[:2]]
USES_TOOLS = [
    make_message("user", "Is it warm in Bonn?"),
    make_message("assistant", "I will look.", tool_calls=[CALL]),
    make_message("tool", "21 degrees", tool_call_id="c1", name="weather"),
    make_message("assistant", "Yes, 21 degrees."),
]
NULL_CONTENT = [USES_TOOLS[0], make_message("assistant", None, tool_calls=[CALL]), *USES_TOOLS[2:]]
CHATS: dict[str, dict[str, Any]] = {
    "two turns": {"messages": TWO_TURNS},
    "assistant first": {"messages": GREETS},
    "system": {"messages": [make_message("system", "Be brief."), *TWO_TURNS]},
    "tools": {"messages": USES_TOOLS, "tools": [WEATHER]},
    "null content": {"messages": NULL_CONTENT, "tools": [WEATHER]},
}
# Text before the first word of an assistant's turn that begins a conversation.
GENERATION_PROMPTS = (
    *("<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|assistant|>\n"),
    *(
        "<|start|>assistant<|end|>\n\n",
        "<|start|>assistant",
        "<|turn>model\n",
        "<｜Assistant｜>",
        "<|assistant|>",
    ),
    *("<start_of_turn>model\n", "<|END_OF_TURN_TOKEN|>", "assistant:"),
)
OWN_PROMPTS = {
    "glm4moe": "<|assistant|>",
    "nemotron_3_nano": "<|im_start|>assistant\n<think>",
    "smolvlm": "Assistant:",
    "FOLDS_SYSTEM": "[/INST]",
}


@cache
def source_of(name: str) -> str:
    source = OWN.get(name) or published(name)
    if source is None:
        pytest.skip(f"TRL, which has the template {name}, isn't installed")
    return source


def built(source: str, *rows: Mapping[str, Any], **options: Any) -> tuple[list[Example], DataReport]:
    tokenizer = Tokenizer(backend_for(source), bos_id=1, eos_id=2, pad_id=0, chat_template=source)
    model = make_spec(sequence_length=4000, vocabulary_size=2000)
    numbered = [Row(number, fields) for number, fields in enumerate(rows, 1)]
    chosen = BuildOptions("error", **options)
    return build_examples(numbered, tokenizer, model, options=chosen)


@dataclass(frozen=True)
class Turn:
    """A turn encoded by transformers: tokens up to its end, and the number of tokens before it."""

    tokens: list[int]
    prompt: int
    is_whole: bool
    """Whether all of the generation prompt comes before it."""


def turns_of(name: str, messages: Sequence[Any], **kwargs: Any) -> list[Turn | None]:
    """Return the assistant's turns by transformers; None for a turn that the template refuses to end with."""
    tokenizer = transformers_tokenizer(source_of(name))
    render = partial(tokenizer.apply_chat_template, tokenize=False, **kwargs)
    result: list[Turn | None] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            text = render(messages[: index + 1])
        except Exception:  # of jinja2, of many classes
            result.append(None)
            continue
        header = next(each for each in (OWN_PROMPTS.get(name), *GENERATION_PROMPTS) if each and each in text)
        answer = text[text.rindex(header) + len(header) :]
        # Only the template's own text comes before the first word of a conversation.
        prompt = render(messages[:index], add_generation_prompt=True) if index else text[: -len(answer)]
        common = commonprefix([prompt, text])  # noqa: RUF071 (texts, not paths)
        if len(prompt) - len(common) > len("<think>\n\n"):
            # A model sees the prompt as it is rendered before the answer, even if that changes later.
            common, text = prompt, prompt + answer
        tokens, before = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (text, common))
        result.append(Turn(tokens, len(before), index == 0 or common == prompt))
    return result


def targets_of(example: Example) -> tuple[list[int], set[int]]:
    """Return the tokens of an example, and the positions of its targets."""
    (sequence,) = example.sequences
    tokens = list(sequence.tokens)
    assert all(tokens[each.position + 1] == each.token for each in sequence.targets)
    return tokens, {each.position + 1 for each in sequence.targets}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", [*(name for name in OWN if name not in TAGGED), *PUBLISHED])
def test_tokens_and_targets_are_those_of_transformers(name: str, chat: str) -> None:
    source, fields = source_of(name), CHATS[chat]
    variables = {"tools": fields["tools"]} if "tools" in fields else {}
    messages = fields["messages"]
    if name in OF_PARTS:
        messages = [
            {**each, "content": each["content"] and [{"type": "text", "text": each["content"]}]}
            for each in messages
        ]
    expected = turns_of(name, messages, **variables)
    if expected[-1] is None:
        with raises(DataError, "messages-refused"):
            built(source, fields)
        return
    turns = [turn for turn in expected if turn is not None]
    examples, report = built(source, fields)
    result = [targets_of(each) for each in examples]
    for turn in turns:
        own = [positions for each, positions in result if each[: len(turn.tokens)] == turn.tokens]
        assert any(set(range(turn.prompt, len(turn.tokens))) <= positions for positions in own)
    assert sum(report.targets) == sum(len(turn.tokens) - turn.prompt for turn in turns)
    text = report.summary()
    assert ("refuses as the last one, not trained on: 1 row" in text) == (len(turns) < len(expected))
    assert ("with a part of the generation prompt" in text) == (not all(turn.is_whole for turn in turns))
    assert ("once others follow, split into several examples: 1 row (1)" in text) == (len(examples) > 1)
    if chat == "two turns":
        assert len(examples) == (2 if name in SEVERAL else 1)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TAGGED)
def test_generation_tags_determine_the_targets(name: str, chat: str) -> None:
    source, fields = source_of(name), CHATS[chat]
    variables = {"tools": fields["tools"]} if "tools" in fields else {}
    try:
        result = transformers_tokenizer(source).apply_chat_template(
            fields["messages"], return_dict=True, return_assistant_tokens_mask=True, **variables
        )
    except Exception:  # of jinja2, of many classes
        with raises(DataError, "messages-refused"):
            built(source, fields)
        return
    [example], _ = built(source, fields)
    tokens, positions = targets_of(example)
    assert positions == {
        position for position, is_target in enumerate(result["assistant_masks"]) if is_target
    }
    assert tokens == result["input_ids"][: max(positions) + 1]


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}])
@pytest.mark.parametrize(
    "name", ["CHATML", "THINKS", "TAGGED", "qwen3", "phi3_5", "gptoss", "llama3_2", "lfm2"]
)
def test_excluded_turns_are_context(name: str, flag: dict[str, Any]) -> None:
    source = source_of(name)
    for number in (1, 3):
        messages = [{**each, **(flag if index == number else {})} for index, each in enumerate(TWO_TURNS)]
        [example], _ = built(source, {"messages": messages})
        tokens, positions = targets_of(example)
        turn = turns_of(name, TWO_TURNS if number == 1 else TWO_TURNS[:2])[-1]
        assert turn is not None and tokens == turn.tokens[: max(positions) + 1]
        end = len(turn.tokens) - (name == "TAGGED")  # this template's tag excludes the last line break
        assert positions == {*range(turn.prompt, end)}


@pytest.mark.parametrize(
    "name", ["CHATML", "qwen3", "qwen3_5_think", "phi3", "phi3_5", "gptoss", "llama3_2", "lfm2"]
)
def test_losses_are_those_that_transformers_computes(name: str) -> None:
    """Compares the cross-entropy of a small Llama per turn, with labels -100 on the prompt."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    source = source_of(name)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2000, max_position_embeddings=4000, **sizes)).eval()
    chat = CHATS["system"]
    [*turns] = (turn for turn in turns_of(name, chat["messages"]) if turn is not None)
    expected, sizes_of = [], []
    for turn in turns:
        ids = torch.tensor([turn.tokens])
        labels = ids.clone()
        labels[:, : turn.prompt] = -100
        with torch.no_grad():
            expected.append(float(model(ids, labels=labels).loss))
        sizes_of.append(len(turn.tokens) - turn.prompt)
    examples, _ = built(source, chat)
    result = []
    for example in examples:
        (sequence,) = example.sequences
        with torch.no_grad():
            logprobs = model(torch.tensor([sequence.tokens])).logits[0].log_softmax(-1)
        result.append(
            -sum(each.weight * float(logprobs[each.position, each.token]) for each in sequence.targets)
        )
    if len(examples) == 1:  # all tokens have equal weight then
        expected = [sum(loss * size for loss, size in zip(expected, sizes_of, strict=True)) / sum(sizes_of)]
    assert result == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["CHATML", "THINKS", "qwen3", "phi3_5", "gptoss", "llama3_2"])
@pytest.mark.parametrize("form", ["lists", "text completion", "text prompt"])
def test_prompts_and_completions_may_be_messages(name: str, form: str) -> None:
    messages = TWO_TURNS if form != "text prompt" else TWO_TURNS[2:]
    row: dict[str, Any] = {"prompt": messages[:-1], "completion": messages[-1:]}
    if form == "text completion":
        row["completion"] = messages[-1]["content"]
    if form == "text prompt":
        row["prompt"] = messages[0]["content"]
    [example], report = built(source_of(name), row)
    tokens, positions = targets_of(example)
    turn = turns_of(name, messages)[-1]
    assert turn is not None and tokens == turn.tokens
    assert positions == {*range(turn.prompt, len(turn.tokens))}
    assert report.summary().startswith("the data (prompt and completion): 1 rows, 1 examples")


@pytest.mark.parametrize(
    "name", ["CHATML", "THINKS", "qwen3", "qwen3_5_think", "phi3_5", "gptoss", "llama3_2"]
)
@pytest.mark.parametrize("whole", [True, False])
def test_answers_of_pairs_are_targets_after_their_prompt(name: str, whole: bool) -> None:
    prompt, better, worse = TWO_TURNS[:3], TWO_TURNS[3:], [make_message("assistant", "No, stay.")]
    row: dict[str, Any] = {"prompt": prompt, "chosen": better, "rejected": worse}
    if whole:
        row = {"chosen": [*prompt, *better], "rejected": [*prompt, *worse]}
    [example], _ = built(source_of(name), {**row, "system": "Be brief."}, objective="auto")
    for sequence, answer in zip(example.sequences, (better, worse), strict=True):
        turn = turns_of(name, [make_message("system", "Be brief."), *prompt, *answer])[-1]
        assert turn is not None and list(sequence.tokens) == turn.tokens
        assert [each.position + 1 for each in sequence.targets] == [*range(turn.prompt, len(turn.tokens))]
