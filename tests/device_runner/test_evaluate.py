"""`prge eval` of generated answers: how they are generated, and from which prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from device_runner.evaluate import run, write_answers
from device_runner.session.settings import EvaluateSettings
from prge.data.example_building import build_examples
from prge.data.forms.task import Generate, parse_task
from prge.data.readers.files import Row
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import ConfigError, DataError
from prge.generation.loop import GenerationSettings, Generator, Request
from prge.generation.prompts import Prompts
from prge.objectives.examples import Example
from tests.bundles import make_spec
from tests.numpy_generation_engine import NumpyGenerationEngine, make_adapter
from tests.prge.data.tiny_tokenizers import byte_level_backend
from tests.refusals import raises

TOKENIZER = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, prepend_bos=True)
QUESTION = {"name": "q", "template": "{q}\nAnswer:", "columns": {"answers": "a"}, "metric": "rouge_l"}
SPEC = make_spec(sequence_length=64, vocabulary_size=1000)


def examples(*questions: str) -> list[Example]:
    task = parse_task({**QUESTION, "generate": {}}, "q")
    rows = [Row(number, {"q": text, "a": ["a dog", "dog"]}) for number, text in enumerate(questions, 1)]
    return build_examples(rows, TOKENIZER, SPEC, task, training=False)[0]


def texts(result: Sequence[Any]) -> list[str]:
    return [answer.text for answer in result]


def test_a_prompt_is_the_question_without_its_answer() -> None:
    questions = ["the film", "on mat"]
    result = write_answers(
        Generator(NumpyGenerationEngine(), TOKENIZER),
        examples(*questions),
        make_adapter(1),
        Generate(9, ()),
        "error",
    )
    prompts = [Prompts(TOKENIZER).encode_text(f"{text}\nAnswer:") for text in questions]
    settings = GenerationSettings(9)
    direct = Generator(NumpyGenerationEngine(), TOKENIZER).generate(
        [Request(prompt, make_adapter(1), settings) for prompt in prompts]
    )
    assert texts(result) == texts(direct) and len(result[0].tokens) == 9


def test_an_answer_ends_before_a_stop_text() -> None:
    generator = Generator(NumpyGenerationEngine(), TOKENIZER)
    questions = examples("the film")
    (whole,) = write_answers(generator, questions, make_adapter(), Generate(20, ()), "truncate")
    stop = whole.text[len(whole.text) // 2 :][:3]
    (cut,) = write_answers(generator, questions, make_adapter(), Generate(20, (stop,)), "truncate")
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_a_question_that_leaves_no_room_loses_its_beginning_or_is_refused() -> None:
    questions = examples("the film was good " * 6)
    context = len(questions[0].prompt)
    for overflow, cut in (("truncate", 8),):
        generator = Generator(NumpyGenerationEngine(context=context), TOKENIZER)
        (result,) = write_answers(generator, questions, make_adapter(), Generate(8), overflow)
        assert result.cut_tokens == cut and result.prompt_tokens == context - cut
    with raises(DataError, "prompt-too-long"):
        write_answers(generator, questions, make_adapter(), Generate(8), "error")


def test_a_question_with_its_answer_is_one_row() -> None:
    with raises(ConfigError, "settings-unusable", containing="--overflow"):
        run(EvaluateSettings(bundle=Path("bundle"), data=Path("data"), task="squad", overflow="split"))
