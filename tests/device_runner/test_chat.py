"""`prge chat`: a conversation through a pipe, with a numpy model instead of the engine."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from device_runner import chat as verb
from prge.cli.main import main
from prge.errors import DataError
from prge.formats.adapter import Adapter
from prge.formats.peft import read_peft
from prge.generation.prompts import Prompts
from tests.device_runner.numpy_model import TEMPLATE, NumpyModel
from tests.numpy_generation_engine import NumpyGenerationEngine
from tests.refusals import raises
from tests.terminals import Terminal

Talk = Any


@pytest.fixture
def numpy_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NumpyModel:
    numpy_model = NumpyModel(tmp_path / "bundle", TEMPLATE)
    numpy_model.replaces(monkeypatch, verb)
    return numpy_model


@pytest.fixture
def talk(
    numpy_model: NumpyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Talk:
    """Chat greedily; returns standard output. `talk.err` has the notes."""

    def call(*lines: str, flags: tuple[object, ...] = ()) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        arguments = ["--bundle", numpy_model.folder, "--temperature", 0, "--max-tokens", 16, *flags]
        assert main(["chat", *map(str, arguments)]) == 0
        out, call.err = capsys.readouterr()  # type: ignore[attr-defined]
        return out

    return call


def conversation(
    numpy_model: NumpyModel, *lines: str, adapters: tuple[Adapter | None, ...] = (), system: str | None = None
) -> list[str]:
    """Return the expected answers: every turn computed anew from all messages before it."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    for number, line in enumerate(lines):
        messages.append({"role": "user", "content": line})
        adapter = adapters[number] if adapters else None
        answers.append(numpy_model.answers(messages, adapter).text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def written(answers: list[str]) -> str:
    return "".join(f"{answer}\n" for answer in answers)


def test_every_answer_depends_on_all_earlier_turns(numpy_model: NumpyModel, talk: Talk) -> None:
    lines = ("the film was bad", "a dog", "Yes")
    assert talk(*lines) == written(conversation(numpy_model, *lines))


def test_a_turn_reads_only_what_is_new(numpy_model: NumpyModel, talk: Talk) -> None:
    lines = ["the film was bad", "a dog"]
    talk(*lines)
    (answer,) = conversation(numpy_model, lines[0])
    turns = [("user", lines[0]), ("assistant", answer), ("user", lines[1])]
    messages = [{"role": role, "content": content} for role, content in turns]
    prompts = Prompts(numpy_model.tokenizer)
    first, second = (len(prompts.encode_messages(each).tokens) for each in (messages[:1], messages))
    fed = [len(call) for call in numpy_model.engines[0].calls if len(call) > 1]
    assert fed[0] == first
    assert fed[1] <= second - first


def test_the_system_message_comes_first(numpy_model: NumpyModel, talk: Talk) -> None:
    expected = conversation(numpy_model, "a dog", "a cat", system="the town")
    assert talk("a dog", "a cat", flags=("--system", "the town")) == written(expected)


def test_reset_forgets_the_conversation(numpy_model: NumpyModel, talk: Talk) -> None:
    (alone,) = conversation(numpy_model, "a dog")
    assert talk("a dog", "/reset", "a dog") == written([alone, alone])


def test_adapters_take_turns_in_one_conversation(numpy_model: NumpyModel, talk: Talk, tmp_path: Path) -> None:
    tuned = numpy_model.write_adapter(tmp_path / "tuned")
    other = numpy_model.write_adapter(tmp_path / "other", 2)
    one, two = (read_peft(folder, numpy_model.bundle.chain.modules) for folder in (tuned, other))
    lines = ("a dog", "a cat", "the film", "Yes")
    out = talk(
        lines[0],
        "/base",
        lines[1],
        f"/adapter {other}",
        lines[2],
        "/adapter first",
        lines[3],
        "/adapter",
        flags=("--adapter", f"first={tuned}"),
    )
    assert out == written(conversation(numpy_model, *lines, adapters=(one, None, two, one)))
    assert f"first (speaks), base, {other}" in talk.err


def test_a_path_without_an_adapter_changes_nothing(
    numpy_model: NumpyModel, talk: Talk, tmp_path: Path
) -> None:
    assert talk("/adapter nowhere", "a dog") == written(conversation(numpy_model, "a dog"))
    assert "error: nowhere holds no trained adapter" in talk.err


def test_quit_and_the_end_of_the_input_end_the_chat(numpy_model: NumpyModel, talk: Talk) -> None:
    assert talk("a dog", "/quit", "a cat") == written(conversation(numpy_model, "a dog"))
    assert talk() == ""


def test_ratings_of_answers_are_saved(numpy_model: NumpyModel, talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"
    first, second = conversation(numpy_model, "a dog", "a cat")
    out = talk(
        *(
            "/good",
            "a dog",
            "/good",
            "/bad",
            "a cat",
            "/better",
            f"/better {second}",
            "/better a cow",
            "the town",
        ),
        flags=("--feedback", path),
    )
    assert talk.err.count("there is no answer") == 2
    assert "the correction is empty" in talk.err and "rate it good instead" in talk.err
    good, row = (json.loads(line) for line in path.read_text().splitlines())
    question = {"role": "user", "content": "a dog"}
    assert (good["messages"], good["answer"], good["rating"]) == ([question], first, "good")
    assert (row["answer"], row["correction"], row["model"]) == (second, "a cow", "bundle")
    assert row["messages"][1:] == [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "a cat"},
    ]
    # The conversation continues from the correction.
    messages = [*row["messages"], {"role": "assistant", "content": "a cow"}]
    third = numpy_model.answers([*messages, {"role": "user", "content": "the town"}]).text
    assert out == written([first, second, third])


def test_without_the_flag_no_feedback_is_saved(talk: Talk) -> None:
    talk("a dog", "/good")
    assert "feedback is not saved: start with --feedback FILE" in talk.err


def test_a_file_of_other_rows_accepts_no_feedback(numpy_model: NumpyModel, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n')
    with raises(DataError, "feedback-foreign", containing=str(path)):
        verb.main(["--bundle", str(numpy_model.folder), "--feedback", str(path)])
    assert path.read_text() == '{"text": "a"}\n'


def test_help_and_unknown_commands_list_all_commands(talk: Talk) -> None:
    assert talk("/help") == ""
    assert "/adapter NAME|PATH" in talk.err
    assert talk("/rest") == ""
    assert "unknown command /rest" in talk.err and "/reset" in talk.err


def test_two_slashes_stand_for_one_and_empty_lines_are_ignored(numpy_model: NumpyModel, talk: Talk) -> None:
    assert talk("//reset", "", "  ") == written(conversation(numpy_model, "/reset"))


def test_the_oldest_turns_are_dropped_when_the_context_is_full(numpy_model: NumpyModel, talk: Talk) -> None:
    numpy_model.context = 120
    lines = [f"the film was {word}" for word in ("bad", "good", "great", "terrible", "bad")]
    out = talk(*lines, flags=("--system", "the town"))
    assert "turns that no longer fit the context of 120 tokens" in talk.err
    assert len(out.splitlines()) >= len(lines)
    assert max(engine.context for engine in numpy_model.engines) == 120
    out = talk(*lines, flags=("--overflow", "error"))
    assert "the context is 120 for prompt and answer together" in talk.err


def test_without_a_template_the_text_of_all_lines_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numpy_model = NumpyModel(tmp_path / "plain")
    numpy_model.replaces(monkeypatch, verb)
    monkeypatch.setattr("sys.stdin", io.StringIO("the film\na dog\n"))
    arguments = ["--bundle", str(numpy_model.folder), "--temperature", "0", "--max-tokens", "16"]
    assert main(["chat", *arguments]) == 0
    out, err = capsys.readouterr()
    first = numpy_model.answers("the film").text
    assert out == written([first, numpy_model.answers(f"the film{first}\na dog").text])
    assert "the model has no chat template" in err


def test_interrupting_ends_the_answer_and_not_the_conversation(
    numpy_model: NumpyModel, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = conversation(numpy_model, "a dog")
    steps = 0
    step = NumpyGenerationEngine.step

    def interrupted(self: NumpyGenerationEngine, tokens: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, tokens)

    monkeypatch.setattr(NumpyGenerationEngine, "step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    first, *_ = out = talk("a dog", "/reset", "a dog").split("\n")
    assert whole.startswith(first) and len(first) < len(whole)
    assert "\n".join(out[1:]).startswith(whole)
    assert signal.getsignal(signal.SIGINT) is before


def test_in_a_terminal_ctrl_c_at_the_prompt_changes_nothing_and_ctrl_d_ends(
    numpy_model: NumpyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    undecodable = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    inputs: list[BaseException | type[BaseException] | str] = [KeyboardInterrupt, undecodable, "\udcff"]
    inputs += ["a dog", EOFError]
    shown: list[str] = []

    def read(prompt: str) -> str:
        shown.append(prompt)
        line = inputs.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", read)
    assert (
        main(["chat", "--bundle", str(numpy_model.folder), "--temperature", "0", "--max-tokens", "16"]) == 0
    )
    out, err = capsys.readouterr()
    assert out == written(conversation(numpy_model, "a dog")) + "\n"
    assert shown == ["bundle> "] * 5
    assert "/quit or Ctrl-D quits" in err
    assert "the line is not UTF-8" in err and "half of a surrogate pair" in err
