"""Generation with a real engine: scored answers of an evaluation, samples of a run, and a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prge.data.metrics import exact_match, rouge_l, token_f1
from tests.verbs import REPOSITORY, prge
from tests.workshop import write_rows

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def run(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that learns to write the next two words after a word, with samples during training."""
    folder = tmp_path_factory.mktemp("answers")
    words = ["aa", "bb", "cc", "dd"]
    rows = [{"q": f"{one} ?", "answers": [f"{words[i - 3]} {words[i - 2]}"]} for i, one in enumerate(words)]
    write_rows(folder / "rows.jsonl", rows)
    (folder / "task.yaml").write_text(
        'name: next\ntemplate: "{q}"\ncolumns: {answers: answers}\nmetric: f1_answer\n'
        "generate: {max_tokens: 6}\n"
    )
    (folder / "prompts.txt").write_text("aa ?\nbb ?\n")
    prge(
        "run", "--bundle", workshop / "bundle", "--train", folder / "rows.jsonl", "--task",
        folder / "task.yaml", "--out", folder / "run", "--steps", 200, "--learning-rate", 0.03,
        "--lr-scheduler-type", "cosine", "--estimator", "exact", "--sample-every", 100,
        "--sample-prompts", folder / "prompts.txt",
    )  # fmt: skip
    return folder / "run"


def evaluation(workshop: Path, run: Path, *arguments: object) -> dict[str, Any]:
    folder = run.parent
    prge(
        "eval", "--bundle", workshop / "bundle", "--data", folder / "rows.jsonl", "--task",
        folder / "task.yaml", "--json", folder / "eval.json", "--predictions", folder / "predictions.jsonl",
        *arguments,
    )  # fmt: skip
    result: dict[str, Any] = json.loads((folder / "eval.json").read_text())
    return result


def test_the_model_writes_the_learnt_answers(workshop: Path, run: Path) -> None:
    before, after = evaluation(workshop, run), evaluation(workshop, run, "--adapter", run)
    assert before["exact_match"] < 0.5 < 0.9 < after["exact_match"] <= after["f1"] <= 1
    rows = [json.loads(line) for line in (run.parent / "rows.jsonl").read_text().splitlines()]
    result = [
        json.loads(line)["text"] for line in (run.parent / "predictions.jsonl").read_text().splitlines()
    ]
    for name, measure in (("exact_match", exact_match), ("f1", token_f1)):
        values = [measure(text, row["answers"]) for text, row in zip(result, rows, strict=True)]
        assert after[name] == pytest.approx(sum(values) / len(values))


def test_another_metric_of_texts(workshop: Path, run: Path, tmp_path: Path) -> None:
    task = (run.parent / "task.yaml").read_text().replace("f1_answer", "rouge_l")
    (tmp_path / "task.yaml").write_text(task)
    result = evaluation(workshop, run, "--adapter", run, "--task", tmp_path / "task.yaml", "--limit", 1)
    text = json.loads((run.parent / "predictions.jsonl").read_text())["text"]
    assert result["rouge_l"] == pytest.approx(rouge_l(text, ["bb cc"]))
    assert "f1" not in result and result["examples"] == 1


def test_a_run_writes_samples(workshop: Path, run: Path) -> None:
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    steps = [(each["step"], each["prompt"]) for each in samples]
    assert steps == [(step, prompt) for step in (0, 100, 200) for prompt in ("aa ?", "bb ?")]
    output = json.loads((run / "run.json").read_text())["train"]["samples"]
    assert output == {"before": samples[:2], "after": samples[-2:]}
    assert samples[-2]["text"].split() == ["bb", "cc"] != samples[0]["text"].split()
    assert "step 100: 'aa ?' -> " in (run / "log.txt").read_text()


@pytest.fixture(scope="module")
def server(workshop: Path, run: Path) -> Iterator[str]:
    """Yield the address of a server of the bundle and the run."""
    (run.parent / "chat.jinja").write_text(TEMPLATE)
    arguments = ["serve", workshop / "bundle", "--adapter", run, "--port", 0, "--slots", 4, "--chat-template",
             run.parent / "chat.jinja"]  # fmt: skip
    command = [sys.executable, "-m", "prge.cli.main", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "models: bundle, base, run\n"
            yield process.stdout.readline().split()[2].rstrip(";")
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_server_generates_with_the_requested_adapter(server: str, run: Path) -> None:
    import openai

    client = openai.OpenAI(base_url=server, api_key="none", max_retries=0)

    def complete(model: str) -> str:
        whole = client.completions.create(model=model, prompt="aa ?", max_tokens=64, temperature=0)
        events = client.completions.create(
            model=model, prompt="aa ?", max_tokens=64, temperature=0, stream=True
        )
        text: str = whole.choices[0].text
        assert "".join(event.choices[0].text for event in events) == text
        return text

    samples = [json.loads(line)["text"] for line in (run / "samples.jsonl").read_text().splitlines()]
    length = len(complete("run"))
    assert complete("run") == samples[-2][:length] and complete("bundle") == complete("base")
    assert samples[0].startswith(complete("base")) or complete("base").startswith(samples[0])
    chat = client.chat.completions.create(
        model="run", messages=[{"role": "user", "content": "aa ?"}], max_tokens=3, temperature=0
    )
    assert chat.choices[0].message.role == "assistant" and chat.usage.completion_tokens <= 3
