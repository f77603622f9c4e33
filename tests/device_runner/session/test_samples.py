"""Samples of a run: prompts, steps, and that a resumed run writes none of them twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from device_runner.session.samples import SamplePrompt, Samples, TextAnswerer, read_prompts
from device_runner.session.settings import RunSettings
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import DataError
from prge.formats.run_folder import SAMPLES
from prge.generation.loop import GenerationSettings, Generator, Request
from prge.generation.prompts import Prompts
from prge.training.checkpoint import TrainingState
from prge.training.monitor import RunMonitor
from prge.training.optimizers import make_optimizer
from tests.numpy_generation_engine import NumpyGenerationEngine, make_adapter
from tests.prge.data.tiny_tokenizers import byte_level_backend
from tests.refusals import raises

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
TOKENIZER = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, prepend_bos=True, chat_template=TEMPLATE)


def write(folder: Path, name: str, content: str) -> Path:
    (folder / name).write_text(content, encoding="utf-8")
    return folder / name


def test_prompts_of_a_text_file_are_its_lines(tmp_path: Path) -> None:
    result = read_prompts(write(tmp_path, "prompts.txt", "the film\n\n a dog"), Prompts(TOKENIZER))
    assert [each.source for each in result] == ["the film", " a dog"]
    assert result[0].prompt == Prompts(TOKENIZER).encode_text("the film")


def test_prompts_of_rows_are_texts_or_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi!"}]
    rows = [{"prompt": "line\nbreak"}, {"messages": messages}]
    path = write(tmp_path, "prompts.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    result = read_prompts(path, Prompts(TOKENIZER))
    assert [each.source for each in result] == ["line\nbreak", messages]
    assert TOKENIZER.decode(result[1].prompt.tokens).startswith("[user]Hi!")


@pytest.mark.parametrize(
    ("name", "content", "value"),
    [
        ("a.txt", "\n\n", "a.txt"),
        ("a.jsonl", '{"prompt": 3}\n{"text": "a"}\n{"messages": []}\n', "prompt"),
        ("a.jsonl", '{"text": "a"}\n', "prompt"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}\n', "message 1"),
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": "a"}]}\n', "row 1"),
    ],
)
def test_unusable_prompts_are_refused(tmp_path: Path, name: str, content: str, value: str) -> None:
    with raises(DataError, "prompts-unusable", containing=value):
        read_prompts(write(tmp_path, name, content), Prompts(TOKENIZER))


def test_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"messages": [{"role": "user", "content": "a"}]}\n')
    with raises(DataError, "prompts-unusable", containing="row 1"):
        read_prompts(path, Prompts(Tokenizer(byte_level_backend())))


class Run:
    """A run that takes samples; its adapter changes with every step."""

    def __init__(self, folder: Path, prompts: list[SamplePrompt], every: int, step: int = 0) -> None:
        settings = RunSettings(bundle=folder, train=folder, out=folder / "run", steps=10, quiet=True)
        self.monitor = RunMonitor(settings, step, lambda step: step, lambda: ({}, {}))
        adapter = make_adapter()
        self.state = TrainingState(adapter, make_optimizer("sgd", adapter.size))
        self.generator = Generator(NumpyGenerationEngine(slots=2), TOKENIZER)
        self.go_to(step)
        self.samples = Samples(TextAnswerer(prompts, self.generator), self.state, every, self.monitor)

    def go_to(self, step: int) -> None:
        self.state.progress.step = step
        self.state.adapter.values[:] = make_adapter(step).values

    def take_steps(self, last: int) -> None:
        for step in range(self.state.step, last):
            self.go_to(step + 1)
            self.samples.on_step({"type": "step", "step": step, "loss": 1.0, "learning_rate": 1.0}, None)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Run]:
    prompts = [SamplePrompt(text, Prompts(TOKENIZER).encode_text(text)) for text in ("the film", "a dog")]
    return lambda **given: Run(tmp_path, prompts, **{"every": 2, **given})


def written(run: Run) -> list[dict[str, Any]]:
    lines = (run.monitor.settings.out / SAMPLES).read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_samples_before_during_and_after(start: Callable[..., Run]) -> None:
    run = start()
    run.take_steps(5)
    run.samples.take()
    records = written(run)
    assert [(each["step"], each["prompt"]) for each in records] == [
        (step, prompt) for step in (0, 2, 4, 5) for prompt in ("the film", "a dog")
    ]
    prompt = Prompts(TOKENIZER).encode_text("a dog")
    request = Request(prompt, make_adapter(4), GenerationSettings(64, overflow="truncate"))
    assert records[5]["text"] == Generator(NumpyGenerationEngine(), TOKENIZER).generate([request])[0].text
    assert records[1]["text"] != records[5]["text"]
    assert run.samples.summary() == {"before": records[:2], "after": records[-2:]}
    assert "step 4: 'the film' -> " in (run.monitor.settings.out / "log.txt").read_text()
    assert run.generator.engine.open_count == 0  # type: ignore[attr-defined]


def test_samples_during_training_can_be_disabled(start: Callable[..., Run]) -> None:
    run = start(every=0)
    run.take_steps(5)
    assert {each["step"] for each in written(run)} == {0}


@pytest.mark.parametrize("lost", [0, 1, 20, 200])
def test_a_resumed_run_has_the_samples_of_an_uninterrupted_run(start: Callable[..., Run], lost: int) -> None:
    run = start()
    run.take_steps(6)
    run.samples.take()
    path = run.monitor.settings.out / SAMPLES
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - lost])
    # From the checkpoint of step 3, through steps in the journal.
    again = start(step=3)
    again.take_steps(6)
    again.samples.take()
    assert path.read_bytes() == whole
    assert again.samples.summary() == run.samples.summary()
    if not lost:
        assert again.generator.engine.calls == []  # type: ignore[attr-defined]
