"""A real engine writes JSON of a schema and calls of tools, with OpenAI's client; its scores are right."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.tiny_models import SHALLOW, save_model
from tests.verbs import REPOSITORY, prge
from tests.workshop import FolderBuilder, export, write_rows

pytestmark = pytest.mark.whole

TEMPLATE = "{% if tools %}{{ tools[0].function.name }}{# <tool_call> #}{% endif %}{{ messages[0].content }} "
ROLES = ("--roles", "forward", "prefill", "decode")
BOOLEAN = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
QUESTION: dict[str, Any] = {"model": "bundle", "messages": [{"role": "user", "content": "aa ?"}]}


@pytest.fixture(scope="module")
def model(made_once: FolderBuilder) -> Path:
    """Return a folder with `model` and `bundle`, whose context is long enough for calls."""

    def make(folder: Path) -> None:
        save_model(folder / "model", "llama", max_position_embeddings=256, **SHALLOW["llama"])
        export(folder / "model", folder / "bundle", "--context", 256, *ROLES)

    return made_once("long", make)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a server of the bundle."""
    template = tmp_path_factory.mktemp("formats") / "chat.jinja"
    template.write_text(TEMPLATE)
    arguments = ["serve", model / "bundle", "--port", 0, "--threads", 1, "--chat-template", template]
    command = [sys.executable, "-m", "prge.cli.main", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield next(line for line in process.stdout if "listening" in line).split()[2].rstrip(";")
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.fixture
def client(server: str) -> Any:
    return openai.OpenAI(base_url=server, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def llguidance() -> None:
    pytest.importorskip("llguidance", reason="the package llguidance is not installed")


@pytest.mark.usefixtures("llguidance")
def test_json_and_a_call_of_a_tool(client: Any) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": BOOLEAN}}
    answer = client.chat.completions.create(**QUESTION, response_format=response_format)
    assert json.loads(answer.choices[0].message.content).keys() == {"a"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": BOOLEAN}}]
    answer = client.chat.completions.create(**QUESTION, tools=tools, tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "f" and json.loads(call.function.arguments).keys() == {"a"}
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.usefixtures("llguidance")
def test_generate_follows_a_schema_and_a_grammar(model: Path, tmp_path: Path) -> None:
    arguments = ["generate", model / "bundle", "--prompt", "aa ?", "--threads", 1]
    (tmp_path / "schema.json").write_text(json.dumps(BOOLEAN))
    output = prge(*arguments, "--json-schema", tmp_path / "schema.json").stdout
    assert json.loads(output).keys() == {"a"}
    (tmp_path / "grammar.gbnf").write_text('root ::= "yes" | "no"\n')
    assert prge(*arguments, "--grammar", tmp_path / "grammar.gbnf").stdout in ("yes\n", "no\n")
    for flag, content in (("--json-schema", '{"type": "thing"}'), ("--json-schema", "{"), ("--grammar", "(")):
        (tmp_path / "wrong").write_text(content)
        refused = prge(*arguments, flag, tmp_path / "wrong", check=False)
        assert refused.returncode == 2 and "can't be used" in refused.stderr
        assert "Traceback" not in refused.stderr
    both = ["--json-schema", tmp_path / "schema.json", "--grammar", tmp_path / "grammar.gbnf"]
    assert prge(*arguments, *both, check=False).returncode == 2


def test_the_scores_of_a_prompt_are_those_of_an_evaluation(client: Any, model: Path, tmp_path: Path) -> None:
    text = "aa bb cc dd aa bb cc?"
    row = write_rows(tmp_path / "row.jsonl", [{"prompt": text[:9], "completion": text[9:]}])
    output = tmp_path / "result.json"
    prge("eval", model / "bundle", "--data", row, "--json", output, "--threads", 1, "--no-append-eos")
    loss = json.loads(output.read_text())["loss"]
    scored = client.completions.create(model="bundle", prompt=text, echo=True, logprobs=0, max_tokens=0)
    logprobs = scored.choices[0].logprobs
    after = [
        value
        for value, offset in zip(logprobs.token_logprobs, logprobs.text_offset, strict=True)
        if offset >= 9
    ]
    assert -sum(after) / len(after) == pytest.approx(loss, rel=1e-3)


def test_lm_evaluation_harness_scores_a_task(server: str, model: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("the package lm_eval is not installed")
    rows = [{"text": "aa bb", "label": 0}, {"text": "cc dd", "label": 1}]
    write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "letters.yaml").write_text(
        f"task: letters\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {tmp_path}/rows.jsonl}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{text}} ?'\ndoc_to_target: label\n"
        "doc_to_choice: ['no', 'yes']\nmetric_list: [{metric: acc}]\n"
    )
    facts = [f"base_url={server}/completions", f"tokenizer={model / 'model'}", "max_length=60"]
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "letters"),
        *("--include_path", tmp_path, "--output_path", tmp_path / "results.json"),
        *("--model_args", ",".join(["model=bundle", *facts])),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (results,) = tmp_path.glob("results*.json")
    assert json.loads(results.read_text())["results"]["letters"]["acc,none"] in (0.0, 0.5, 1.0)
