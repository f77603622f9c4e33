"""`prge generate`, with a numpy model instead of the engine."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from device_runner import generate as verb
from device_runner.session.generation import read_adapter
from prge.cli.main import main
from prge.formats.peft import read_peft, scaled_lora_a
from tests.device_runner.numpy_device import Device
from tests.device_runner.numpy_model import TEMPLATE, NumpyModel

MESSAGES = [{"role": "user", "content": "the film was"}]


@pytest.fixture
def numpy_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NumpyModel:
    numpy_model = NumpyModel(tmp_path / "bundle", TEMPLATE)
    numpy_model.replaces(monkeypatch, verb)
    return numpy_model


class VerbOutput:
    """A verb's output and exit code."""

    def __init__(self, capsys: pytest.CaptureFixture[str], arguments: list[object]) -> None:
        self.code = main(["generate", *map(str, arguments)])
        self.out, self.err = capsys.readouterr()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def generate(numpy_model: NumpyModel, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> VerbOutput:
        return VerbOutput(capsys, ["--bundle", numpy_model.folder, "--max-tokens", 16, *arguments])

    return call


def test_one_prompt_is_continued_and_the_speed_is_reported(numpy_model: NumpyModel, generate: Any) -> None:
    output = generate("--prompt", "the film")
    expected = numpy_model.answers("the film")
    assert output.out.removesuffix("\n") == expected.text.removesuffix("\n")
    assert f"{expected.prompt_tokens} prompt tokens" in output.err
    assert "16 tokens" in output.err and "ended by length" in output.err
    assert "use --chat to apply it to the prompt" in output.err


def test_text_is_written_as_it_is_generated(
    numpy_model: NumpyModel, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[str] = []
    monkeypatch.setattr(verb, "write_text", lambda stream, text: chunks.append(text))
    generate("--prompt", "the film")
    assert len(chunks) > 4
    assert "".join(chunks).startswith(numpy_model.answers("the film").text)


def test_a_prompt_from_standard_input(
    numpy_model: NumpyModel, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the film\n"))
    assert generate("--prompt", "-").out == generate("--prompt", "the film").out


def test_chat_puts_prompts_and_messages_into_the_template(
    numpy_model: NumpyModel, generate: Any, tmp_path: Path
) -> None:
    expected = numpy_model.answers(MESSAGES).text
    assert generate("--prompt", "the film was", "--chat").out.startswith(expected)
    path = tmp_path / "messages.json"
    for content in (MESSAGES, {"messages": MESSAGES}):
        path.write_text(json.dumps(content))
        assert generate("--messages", path).out.startswith(expected)
    system = [{"role": "system", "content": "a dog"}, *MESSAGES]
    assert generate("--messages", path, "--system", "a dog").out.startswith(numpy_model.answers(system).text)
    path.write_text(json.dumps(system))
    assert generate("--messages", path, "--system", "a cat").out.startswith(numpy_model.answers(system).text)


def test_several_prompts_are_completed_in_one_batch_and_written_in_order(
    numpy_model: NumpyModel, generate: Any
) -> None:
    output = generate("--prompt", "the film", "a dog", "--prompt", "the town")
    texts = [numpy_model.answers(text).text for text in ("the film", "a dog", "the town")]
    assert output.out == "".join(f"--- {number}\n{text}\n" for number, text in enumerate(texts, 1))
    assert "3 answers" in output.err
    (engine,) = numpy_model.engines
    assert max(map(len, engine.calls[-8:])) == 3


def test_every_adapter_answers_every_prompt(numpy_model: NumpyModel, generate: Any, tmp_path: Path) -> None:
    tuned = numpy_model.write_adapter(tmp_path / "tuned")
    output = generate(
        "--adapter", tuned, "base", "--adapter", f"again={tuned}", "--json", "--prompt", "the film", "a dog"
    )
    names = [(line["row"], line["adapter"]) for line in output.lines]
    assert names == [(row, name) for row in (1, 2) for name in (str(tuned), "base", "again")]
    adapter = read_peft(tuned, numpy_model.bundle.chain.modules)
    for line, text in zip(output.lines[::3], ("the film", "a dog"), strict=True):
        assert line["text"] == numpy_model.answers(text, adapter).text
    for line, text in zip(output.lines[1::3], ("the film", "a dog"), strict=True):
        assert line["text"] == numpy_model.answers(text).text
    assert output.lines[0]["text"] == output.lines[2]["text"] != output.lines[1]["text"]


def test_a_line_of_json_has_text_tokens_and_speed(numpy_model: NumpyModel, generate: Any) -> None:
    (line,) = generate("--json", "--prompt", "the film").lines
    expected = numpy_model.answers("the film")
    assert line["prefill_tokens_per_second"] > 0 and line["tokens_per_second"] > 0
    del line["prefill_tokens_per_second"], line["tokens_per_second"]
    assert line == {
        "row": 1,
        "adapter": "bundle",
        "text": expected.text,
        "tokens": list(expected.tokens),
        "reason": "length",
        "prompt_tokens": expected.prompt_tokens,
        "cut_tokens": 0,
    }


def test_rows_are_answered_by_their_task_prompt_messages_or_text(
    numpy_model: NumpyModel, generate: Any, tmp_path: Path
) -> None:
    rows = [
        {"prompt": "the film", "completion": " was bad"},
        {"text": "a dog"},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "good"}]},
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = generate("--data", data, "--json").lines
    expected = [numpy_model.answers(text).text for text in ("the film", "a dog")]
    assert [line["text"] for line in lines] == [*expected, numpy_model.answers(MESSAGES).text]
    assert [line["row"] for line in generate("--data", data, "--start", 1, "--limit", 1, "--json").lines] == [
        2
    ]
    task = tmp_path / "task.yaml"
    task.write_text('name: films\ntemplate: "the {film}"\ncolumns: {answers: film}\n')
    (tmp_path / "films.jsonl").write_text('{"film": "film"}\n')
    (line,) = generate("--data", tmp_path / "films.jsonl", "--task", task, "--json").lines
    assert line["text"] == expected[0]


def test_forms_of_rows_are_reported_and_become_prompts(
    numpy_model: NumpyModel, generate: Any, tmp_path: Path
) -> None:
    rows = [
        {"instruction": MESSAGES[-1]["content"], "output": "b", "id": 1},
        {
            "conversations": [
                {"from": "human", "value": MESSAGES[-1]["content"]},
                {"from": "gpt", "value": "b"},
            ]
        },
    ]
    (tmp_path / "test.json").write_text(json.dumps(rows))
    output = generate("--data", tmp_path, "--json")
    expected = numpy_model.answers([{"role": "user", "content": MESSAGES[-1]["content"]}]).text
    assert [line["text"] for line in output.lines] == [expected] * 2
    assert "test.json: 1 rows (Alpaca), columns: instruction; not read: output, id" in output.err
    assert "test.json: 1 rows (ShareGPT), columns: conversations" in output.err
    (tmp_path / "test.json").write_text('[{"question": "the film"}]')
    (line,) = generate("--data", tmp_path, "--columns", "prompt=question", "--json").lines
    assert line["text"] == numpy_model.answers("the film").text


def test_a_chat_template_is_given_tools_variables_and_a_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = (
        "{{ strftime_now('%Y-%m-%d') }} {{ style }} {{ tools | tojson }}"
        "{% for m in messages %}|{{ m.role }}:{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}|assistant:{% endif %}"
    )
    numpy_model = NumpyModel(tmp_path / "given", source)
    numpy_model.replaces(monkeypatch, verb)
    message, tools = {"role": "user", "content": "Hi"}, [{"name": "weather"}]
    prompt = f"2026-11-27 brief {json.dumps(tools)}|user:Hi|assistant:"
    files = {
        "messages": {"messages": [message], "tools": tools, "chat_template_kwargs": {"style": "brief"}},
        "data": {"prompt": [message], "tools": tools, "style": "brief", "system": "Be kind.", "id": 3},
    }
    for flag, content in files.items():
        (tmp_path / f"{flag}.jsonl").write_text(json.dumps(content) + "\n")
        arguments = [
            f"--bundle={numpy_model.folder}",
            f"--{flag}={tmp_path / flag}.jsonl",
            "--date=2026-11-27",
        ]
        output = VerbOutput(capsys, [*arguments, "--json", "--max-tokens=16"])
        expected = prompt.replace("|user", "|system:Be kind.|user") if flag == "data" else prompt
        literal = NumpyModel(tmp_path / f"literal-{flag}", f"{{% raw %}}{expected}{{% endraw %}}")
        assert output.lines[0]["text"] == literal.answers([message]).text
        assert output.lines[0]["prompt_tokens"] == len(literal.tokenizer.encode(expected))
    assert "(prompt and completion), columns: prompt, tools, style, system; not read: id" in output.err
    arguments = [f"--bundle={numpy_model.folder}", "--chat", "--prompt", "Hi", "--date=2026-11-27", "--json"]
    variables = json.dumps({"style": "brief", "tools": tools})
    output = VerbOutput(capsys, [*arguments, f"--chat-template-kwargs={variables}", "--max-tokens=16"])
    assert output.lines[0]["prompt_tokens"] == len(literal.tokenizer.encode(prompt))
    output = VerbOutput(capsys, [*arguments, "--chat-template-kwargs=[1]"])
    assert output.code == 2 and "chat_template_kwargs must be a mapping of names to values" in output.err


def test_rows_without_a_prompt_are_all_named(generate: Any, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a"}\n{"label": 1}\n{"messages": [{"role": "assistant", "content": "a"}]}\n')
    output = generate("--data", data)
    assert output.code == 2
    assert "row 2: its columns are label; known are pairs: chosen, rejected; messages" in output.err
    assert "row 3: messages must be a list of at least one message" in output.err


def test_a_prompt_that_is_too_long_names_both_lengths_or_is_cut(
    numpy_model: NumpyModel, generate: Any
) -> None:
    long = " ".join(["dog"] * 500)
    length = len(numpy_model.tokenizer.encode(long))
    output = generate("--prompt", "a cat", long)
    assert output.code == 2
    assert f"row 2: it has {length} tokens, the context is 400 for prompt and answer together" in output.err
    lines = generate("--prompt", long, "--overflow", "truncate", "--json").lines
    assert (lines[0]["prompt_tokens"], lines[0]["cut_tokens"]) == (384, length - 384)


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ([], "--prompt or --messages or --data is missing"),
        (["--prompt", "a", "--data", "b.jsonl"], "--prompt and --data: give one of them"),
        (["--data", "b.jsonl", "--chat"], "--chat requires --prompt"),
        (["--prompt", "a", "--task", "sst2"], "--task requires --data"),
        (["--prompt", "a", "--system", "b"], "--system requires --chat"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature is -1.0, must be at least 0"),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens is 0, must be at least 1"),
        (["--prompt", "a", "--adapter", "nowhere"], "nowhere holds no trained adapter"),
        (["--prompt", "a", "--adapter", "base", "base"], "'base' is the name of 2"),
        (["--prompt", ""], "it is empty: nothing predicts the answer"),
        (["--messages", "nowhere.json"], "nowhere.json can't be answered"),
    ],
)
def test_unusable_arguments_are_an_error(generate: Any, arguments: list[str], output: str) -> None:
    done = generate(*arguments)
    assert done.code == 2
    assert output in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("content", "output"),
    [
        ('[{"role": "assistant", "content": "a"}]', "the last message is the assistant's"),
        ("{", "not JSON"),
    ],
)
def test_messages_that_cannot_be_answered_are_refused_with_the_reason(
    generate: Any, tmp_path: Path, content: str, output: str
) -> None:
    (tmp_path / "messages.json").write_text(content)
    done = generate("--messages", tmp_path / "messages.json")
    assert done.code == 2
    assert output in done.err


def test_an_adapter_of_another_bundle_is_refused(
    numpy_model: NumpyModel, generate: Any, tmp_path: Path
) -> None:
    folder = numpy_model.write_adapter(tmp_path / "other")
    (folder / "hashes.json").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 5}))
    output = generate("--prompt", "a", "--adapter", folder)
    assert output.code == 2
    assert "the adapter says rank 5" in output.err


def test_an_adapter_with_another_lora_a_generates_too(
    numpy_model: NumpyModel, generate: Any, tmp_path: Path
) -> None:
    other = NumpyModel(tmp_path / "other")
    path = other.folder / "adapter/adapter_model.safetensors"
    save_file({name: array + 1 for name, array in load_file(path).items()}, path, {"format": "pt"})
    foreign = other.write_adapter(tmp_path / "foreign")
    assert generate("--prompt", "a", "--adapter", foreign).code == 0
    _, adapter = read_adapter(numpy_model.bundle, str(foreign))
    own = scaled_lora_a(numpy_model.bundle.adapter)
    assert adapter.lora_a is not None and adapter.lora_a.keys() == own.keys()
    assert all((adapter.lora_a[name] > matrix).all() for name, matrix in own.items())


def test_an_encoder_cannot_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = Device(encoder=True).write_bundle(tmp_path / "encoder")
    assert main(["generate", "--bundle", str(bundle), "--prompt", "a"]) == 2
    assert "can't generate text: its readout is pooled" in capsys.readouterr().err
