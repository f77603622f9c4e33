"""Invalid texts and token ids, through every input that accepts texts or token ids.

A text is refused with a clear error, or used unchanged; a token id is in the vocabulary, or refused. Nothing
ends with a traceback, or with the status 500.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import prge
from device_runner import chat, generate
from device_runner.session import generation as session
from device_runner.session.samples import read_prompts
from prge.cli.main import main
from prge.data.example_building import load_examples
from prge.data.feedback_examples import FeedbackExamples, UnlearnableError
from prge.data.options import BuildOptions
from prge.errors import DataError, PrgeError, format_value
from prge.generation.loop import GenerationSettings
from prge.generation.prompts import Prompts
from tests.device_runner.numpy_model import TEMPLATE, NumpyModel
from tests.device_runner.serving.test_server import Child, served
from tests.refusals import raises

# Invalid UTF-8 of a command line as Python represents it, and as JSON may escape it.
SURROGATES = ["\udcff", "a\ud800b", "\udc00\ud800"]
ODD_TEXTS = ["\x00", "\ufffe\uffff", "\u202e\x1b[2J", "\U0010ffff", "e" + "\u0301" * 40]
NOT_UTF8 = [b"\xff\xfe film", b"a\xed\xa0\x80", b"\x80", b"\xc3"]
NO_IDS = [-1, 420, 2**31, 2**32, 2**63, 2**64, -(2**63), True, 1.0, 1.5, "1", None, [1], {}]


@pytest.fixture
def numpy_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NumpyModel:
    numpy_model = NumpyModel(tmp_path / "bundle", TEMPLATE)
    numpy_model.replaces(monkeypatch, generate, chat, session)
    return numpy_model


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(
    numpy_model: NumpyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Run a verb with bytes as standard input; return exit code, output and messages."""

    def call(verb: str, *arguments: object, given: bytes = b"") -> tuple[int, str, str]:
        # As a terminal of this machine decodes them.
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given), "utf-8"))
        settings = ["--bundle", numpy_model.folder, "--max-tokens", 4, "--temperature", 0]
        code = main([verb, *map(str, [*settings, *arguments])])
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("text", SURROGATES)
def test_arguments_that_are_not_utf8_are_refused(call: Call, text: str) -> None:
    for arguments in (
        ["--prompt", text],
        ["--prompt", text, "--chat"],
        ["--prompt", "a", "--chat", "--system", text],
        ["--prompt", "a", "--stop", text],
        ["--prompt", "a", "--chat", "--chat-template-kwargs", json.dumps({"a": text}, ensure_ascii=False)],
        ["--prompt", "a", "--chat", "--chat-template-kwargs", json.dumps({"a": text})],
    ):
        code, _, err = call("generate", *arguments)
        assert code == 2 and ("UTF-8" in err or "escape pair" in err), arguments
    for arguments in (["--stop", text], ["--chat-template-kwargs", json.dumps({"a": text})]):
        assert call("chat", *arguments, given=b"hello\n")[0] == 2
    # The conversation continues, though no message can be answered.
    code, out, err = call("chat", "--system", text, given=b"hello\n")
    assert (code, out) == (0, "") and "half of a surrogate pair" in err


@pytest.mark.parametrize("text", ODD_TEXTS[1:])
def test_unusual_arguments_are_texts(numpy_model: NumpyModel, call: Call, text: str) -> None:
    assert call("generate", "--prompt", text)[:2] == (0, numpy_model.answers(text, max_tokens=4).text + "\n")


@pytest.mark.parametrize("content", NOT_UTF8)
def test_standard_input_that_is_not_utf8_is_refused(
    numpy_model: NumpyModel, call: Call, content: bytes
) -> None:
    code, _, err = call("generate", "--prompt", "-", given=content)
    assert code == 2 and "standard input is not UTF-8" in err and "byte " in err
    code, out, err = call("chat", given=content + b"\nthe film was\n")
    answer = numpy_model.answers([{"role": "user", "content": "the film was"}], max_tokens=4)
    assert (code, out) == (0, answer.text + "\n") and "the line is not UTF-8" in err


def test_standard_input_may_have_unusual_texts(numpy_model: NumpyModel, call: Call) -> None:
    for text in ODD_TEXTS:
        expected = numpy_model.answers(text, max_tokens=4).text
        assert call("generate", "--prompt", "-", given=text.encode() + b"\r\n")[:2] == (0, expected + "\n")


@pytest.mark.parametrize(
    "content",
    [
        b'[{"role": "user", "content": "\\ud800"}]',
        b'[{"role": "user", "content": "\xff"}]',
        b'[{"role": "user", "content": "a", "tool": "\\udfff"}]',
        b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"\\udc00": 1}}',
        b'[{"role": "user", "content": 7}]',
        b"[" * 5000,
    ],
)
def test_files_of_messages(call: Call, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "messages.json"
    path.write_bytes(content)
    code, _, err = call("generate", "--messages", path)
    assert code == 2 and str(path) in err


def json_of(value: object) -> bytes:
    return json.dumps(value).encode()


def rows_of_a_format(folder: Path, text: str | bytes) -> Iterator[Path]:
    """Yield files of rows in every format and form, with a text that is not UTF-8."""
    raw = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    files = {
        "a.csv": b"text\n" + raw + b"\n",
        "b.tsv": b"text\n" + raw + b"\n",
        "c.jsonl": b'{"text": "' + raw + b'"}\n',
        "d.json": b'[{"prompt": "a", "completion": "' + raw + b'"}]',
    }
    if isinstance(text, str):
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]
        turns = [{"from": "human", "value": text}, {"from": "gpt", "value": "a"}]
        files |= {
            "e.jsonl": json_of({"text": text}),
            "f.jsonl": json_of({"messages": messages}),
            "g.jsonl": json_of({"messages": [{**messages[0], "content": "a"}, messages[1]], "tools": [text]}),
            "h.jsonl": json_of({"conversations": turns}),
            "i.jsonl": json_of({"prompt": "a", "chosen": text, "rejected": "b"}),
            "j.jsonl": json_of({"instruction": "a", "output": text}),
            "k.csv": b"messages\n" + b'"' + json_of(messages).replace(b'"', b'""') + b'"\n',
        }
    for name, content in files.items():
        (folder / name).write_bytes(content)
        yield folder / name
    values = pyarrow.array([raw])
    text_column = pyarrow.StringArray.from_buffers(1, *values.buffers()[1:])
    parquet.write_table(pyarrow.table({"text": text_column}), folder / "l.parquet")
    yield folder / "l.parquet"
    parquet.write_table(pyarrow.table({"text": values}), folder / "m.parquet")
    yield folder / "m.parquet"
    message = {"role": ["user", "assistant"], "content": [raw, b"a"]}
    column = pyarrow.array(
        [[dict(zip(message, pair, strict=True)) for pair in zip(*message.values(), strict=True)]]
    )
    parquet.write_table(pyarrow.table({"messages": column}), folder / "n.parquet")
    yield folder / "n.parquet"


@pytest.mark.parametrize("text", [*SURROGATES, *NOT_UTF8])
def test_rows_that_are_not_utf8_are_refused(
    numpy_model: NumpyModel, call: Call, tmp_path: Path, text: str | bytes
) -> None:
    model = numpy_model.bundle.chain.model
    for path in rows_of_a_format(tmp_path, text):
        with pytest.raises(DataError):
            load_examples(path, numpy_model.tokenizer, model, options=BuildOptions(objective="auto"))
        assert call("generate", "--data", path)[0] == 2, path
        with pytest.raises(DataError):
            read_prompts(path, Prompts(numpy_model.tokenizer))


def test_values_without_a_json_type_in_messages_are_refused(numpy_model: NumpyModel, tmp_path: Path) -> None:
    """The values are dates, durations and bytes within messages, and templates take JSON."""
    import datetime

    for extra in (datetime.date(2024, 1, 2), datetime.timedelta(1), b"\xff"):
        messages = [
            {"role": "user", "content": "a", "x": extra},
            {"role": "assistant", "content": "b", "x": extra},
        ]
        path = tmp_path / "a.parquet"
        parquet.write_table(pyarrow.table({"messages": [messages]}), path)
        with raises(DataError, "not-json", containing=format_value(extra)):
            load_examples(path, numpy_model.tokenizer, numpy_model.bundle.chain.model)


@pytest.mark.parametrize("text", SURROGATES)
def test_feedback_that_is_not_utf8_is_refused(numpy_model: NumpyModel, text: str) -> None:
    examples = FeedbackExamples(numpy_model.tokenizer, numpy_model.bundle.chain.model)
    messages = [{"role": "user", "content": text}]
    for row in (
        {"prompt": "a", "answer": "b", "correction": text},
        {"prompt": text, "answer": "b", "rating": "good"},
        {"messages": messages, "answer": "b", "rating": "good"},
        {"messages": messages, "answer": "b", "rating": "bad"},
        {"messages": [{**messages[0], "content": "a"}], "answer": text, "rating": "good"},
    ):
        with raises(UnlearnableError, "half-character", "feedback-unsound"):
            examples.build(row)
    examples.build({"prompt": "a", "answer": "b", "correction": " c"})


def test_python_functions_refuse_invalid_texts_and_ids(numpy_model: NumpyModel) -> None:
    model = prge.load(numpy_model.folder)
    expected = numpy_model.answers("the film", max_tokens=4)
    ids = [1, *numpy_model.tokenizer.encode("the film")] if numpy_model.tokenizer.begin else []
    ids = ids or numpy_model.tokenizer.encode("the film")
    for prompt in (
        "the film",
        np.str_("the film"),
        ids,
        tuple(ids),
        np.array(ids),
        [np.int32(each) for each in ids],
    ):
        assert model.generate(prompt, max_tokens=np.int64(4)).tokens == expected.tokens
    conversation = [{"role": "user", "content": "the film"}]
    for messages in (conversation, tuple(conversation), [{**conversation[0], "n": np.int64(3)}]):
        assert (
            model.generate(messages, max_tokens=4).tokens
            == numpy_model.answers(conversation, max_tokens=4).tokens
        )
    bad: list[Any] = [
        *SURROGATES,
        b"film",
        7,
        None,
        {"role": "user"},
        [],
        np.array(1.5),
        np.array([1.5]),
        {1, 2},
    ]
    bad += [[each] for each in NO_IDS] + [[1, each] for each in NO_IDS]
    bad += [
        np.array([2**63], np.uint64),
        np.array([True]),
        [conversation[0], "a"],
        [{"role": "user", "content": {1}}],
    ]
    bad += [[{"role": "user", "content": text}] for text in (*SURROGATES, b"a", 7, None)]
    bad += [
        [{"role": "user", "content": "a", "x": object()}],
        [{"role": text, "content": "a"} for text in SURROGATES],
    ]
    for prompt in bad:
        with pytest.raises(PrgeError):
            model.generate(prompt, max_tokens=4)
    for settings in (
        {"stop": ["\udcff"]},
        {"stop": [b"a"]},
        {"max_tokens": 1.0},
        {"max_tokens": True},
        {"seed": 2**64},
    ):
        with pytest.raises(PrgeError):
            model.generate("a", **settings)
    with pytest.raises(PrgeError):
        GenerationSettings(stop=("\ud800",))


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with served(feedback=tmp_path_factory.mktemp("feedback") / "rows.jsonl") as server:
        yield server
        assert server.health()


REQUEST = {"model": "base", "prompt": "the film", "max_tokens": 3, "temperature": 0}
CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}


def test_requests_with_invalid_ids_are_refused(child: Child) -> None:
    for each in NO_IDS:
        for prompt in ([each], [5, each], [[5], [each]]):
            if prompt in (["1"], [[1]]):  # a list of texts, and one of prompts
                continue
            status, answer = child.ask({**REQUEST, "prompt": prompt})
            assert status == 400 and "prompt" in answer["error"]["message"], prompt
        for name in ("max_tokens", "n", "top_k", "stop", "model", "logit_bias", "stream_options"):
            status, answer = child.ask({**REQUEST, name: each})
            assert status in (200, 400, 404), (name, each)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "seed", "user"):
            assert child.ask({**REQUEST, name: each})[0] in (200, 400), (name, each)
        for name in ("chat_template_kwargs", "messages", "max_completion_tokens"):
            assert child.ask({**CHAT, name: each}, "/v1/chat/completions")[0] in (200, 400), (name, each)
        for name in ("id", "index", "rating", "correction"):
            row = {"id": "a", "rating": "good", name: each}
            assert child.ask(row, "/v1/feedback")[0] in (400, 404), (name, each)
        assert child.ask({"version": each}, "/v1/adapters/back")[0] in (400, 404, 409)
    assert child.ask({**REQUEST, "prompt": [5, 419 - 1]})[0] == 200


@pytest.mark.parametrize("content", [*NOT_UTF8, b"\\ud800", b"\\udfff\\ud800"])
def test_requests_with_invalid_texts_are_refused(child: Child, content: bytes) -> None:
    text = b'"' + content + b'"'
    bodies = {
        "/v1/completions": [
            b'{"model": "base", "prompt": %s}' % text,
            b'{"model": "base", "prompt": [%s]}' % text,
            b'{"model": "base", "prompt": "a", "stop": %s}' % text,
            b'{"model": %s, "prompt": "a"}' % text,
            b'{"model": "base", "prompt": "a", %s: 1}' % text,
            b'{"model": "base", "prompt": "a", "user": %s}' % text,
            content,
        ],
        "/v1/chat/completions": [
            b'{"model": "base", "messages": [{"role": "user", "content": %s}]}' % text,
            b'{"model": "base", "messages": [{"role": %s, "content": "a"}]}' % text,
            b'{"model": "base", "messages": [{"role": "user", "content": [{"type": "text", "text": %s}]}]}'
            % text,
            b'{"model": "base", "messages": [{"role": "user", "content": "a"}], '
            b'"chat_template_kwargs": {"a": %s}}' % text,
        ],
        "/v1/feedback": [b'{"id": %s, "rating": "good"}' % text, b'{"id": "a", "correction": %s}' % text],
        "/v1/adapters/back": [b'{"version": %s}' % text],
    }
    for path, each in bodies.items():
        for body in each:
            status, answer = child.ask(body, path)
            assert status in (400, 404) and answer["error"]["message"], body


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_requests_with_unusual_texts_are_answered(child: Child, text: str) -> None:
    assert child.ask({**REQUEST, "prompt": text, "stop": [text]})[0] == 200
    status, answer = child.ask(
        {**CHAT, "messages": [{"role": "user", "content": text}]}, "/v1/chat/completions"
    )
    assert status == 200
    status, response = child.ask({"id": answer["id"], "correction": f"{text}!"}, "/v1/feedback")
    assert status == 200, response


@pytest.mark.parametrize("path", ["/v1/models/%ff", "/v1/models/%00", "/v1/models/%ed%a0%80", "/%ff%00"])
def test_paths_that_are_not_texts_are_refused(child: Child, path: str) -> None:
    import http.client
    from contextlib import closing

    with closing(http.client.HTTPConnection(child.host, child.port, timeout=30)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 404 and json.loads(answer.read())["error"]
