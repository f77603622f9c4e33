"""A server with a real engine that trains on its clients' feedback, is killed, and resumes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.verbs import REPOSITORY
from tests.workshop import write_rows

PROMPTS = ["aa ?", "bb ?", "cc ?", "dd ?"]
SETTINGS = ("--learn-every", 4, "--learn-epochs", 150, "--learning-rate", 0.05, "--replay", 0.2)


@contextmanager
def serving(bundle: Path, learn: Path, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """Start a server that trains in a folder, and return OpenAI's client of it."""
    command = [
        sys.executable, "-m", "prge.cli.main", "serve", bundle, "--learn", learn, *SETTINGS, *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command_and_port = [*map(str, command), "--port", "0", "--threads", "1"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": environment}
    with (
        (learn.parent / "log").open("w") as log,
        subprocess.Popen(command_and_port, stderr=log, **options) as process,
    ):
        try:
            assert process.stdout is not None
            url = next(line for line in process.stdout if "listening" in line).split()[2].rstrip(";")
            yield process, openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
        finally:
            process.kill()


def history(client: Any) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = client.get("/adapters", cast_to=object)["data"]
    return result


def ask(client: Any, prompt: str) -> tuple[str, str]:
    answer = client.completions.create(model="bundle", prompt=prompt, temperature=0, max_tokens=6)
    return answer.id, answer.choices[0].text


def log_probability(client: Any, text: str) -> float:
    """Return the log-probability of a text."""
    arguments: dict[str, Any] = {"max_tokens": 0, "echo": True, "logprobs": 1}
    (choice,) = client.completions.create(model="bundle", prompt=text, **arguments).choices
    return float(sum(each for each in choice.logprobs.token_logprobs if each is not None))


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def learners(process: subprocess.Popen[str]) -> list[int]:
    """Return the ids of a server's training processes."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    numbers = [int(number) for path in tasks for number in path.read_text().split()]
    return [each for each in numbers if b"round_process" in Path(f"/proc/{each}/cmdline").read_bytes()]


def results(learn: Path) -> dict[str, bytes]:
    result = learn.glob("rounds/*/final/adapter_model.safetensors")
    return {path.parts[-3]: path.read_bytes() for path in result}


@pytest.mark.whole
def test_a_server_answers_as_it_was_corrected(workshop: Path, tmp_path: Path) -> None:
    bundle, learn = workshop / "bundle", tmp_path / "learn"
    kept = write_rows(
        tmp_path / "kept.jsonl", [{"prompt": f"{word} !", "completion": " ee"} for word in "abcdef"]
    )
    arguments = "--kept", kept, "--may-lose", 100
    with serving(bundle, learn, *arguments) as (process, client):
        assert [each["status"] for each in history(client)] == ["start"]
        for prompt in PROMPTS:
            id, text = ask(client, prompt)
            assert text.strip() != "bb cc"
            client.post("/feedback", body={"id": id, "correction": "bb cc"}, cast_to=object)
        with pytest.raises(openai.ConflictError) as caught:
            client.post("/feedback", body={"id": id, "rating": "good"}, cast_to=object)
        assert caught.value.code == "feedback_given"
        # Completions continue during training; then the server is killed.
        journal = learn / "rounds/0001/journal.jsonl"
        until(lambda: journal.is_file() and journal.read_bytes().count(b'"type":"step"') >= 5)
        assert ask(client, "ee ?")[0].startswith("cmpl-")
        assert history(client)[-1]["status"] == "learning"
        process.send_signal(signal.SIGKILL)
    with serving(bundle, learn, *arguments) as (_, client):
        until(lambda: history(client)[-1]["status"] != "learning")
        start, learnt = history(client)
        assert learnt["status"] == "served" and learnt["current"] and not start["current"]
        assert learnt["held_back"]["after"] < learnt["held_back"]["before"]
        assert [ask(client, prompt)[1].strip() for prompt in PROMPTS[:2]] == ["bb cc"] * 2
        id, _ = ask(client, PROMPTS[0])
        client.post("/feedback", body={"id": id, "rating": "good"}, cast_to=object)
        rows = [json.loads(line) for line in (learn / "feedback.jsonl").read_text().splitlines()]
        assert rows[-1]["adapter"] != rows[0]["adapter"] and rows[-1]["rating"] == "good"
        # One request rolls the adapter back.
        assert client.post("/adapters/back", body={"version": 1}, cast_to=object)["current"] == 0
        assert ask(client, PROMPTS[0])[1].strip() != "bb cc"
        with pytest.raises(openai.ConflictError):
            client.post("/adapters/back", body={"version": 1}, cast_to=object)
        assert history(client)[0]["current"]
    # Train on the same rows in another folder, without a kill.
    other = tmp_path / "other"
    other.mkdir()
    content = (learn / "feedback.jsonl").read_text().splitlines(keepends=True)
    (other / "feedback.jsonl").write_text("".join(content[:4]))
    with serving(bundle, other, *arguments) as (_, client):
        until(lambda: len(history(client)) == 2 and history(client)[-1]["status"] != "learning")
    assert results(other) == results(learn) and len(results(other)) == 1


@pytest.mark.whole
def test_answers_that_were_rated_bad_become_less_likely(workshop: Path, tmp_path: Path) -> None:
    bundle, learn = workshop / "bundle", tmp_path / "learn"
    with serving(bundle, learn, "--learn-objective", "kto") as (_, client):
        answers = [ask(client, prompt) for prompt in PROMPTS]
        texts = [prompt + text for prompt, (_, text) in zip(PROMPTS, answers, strict=True)]
        before = [log_probability(client, text) for text in texts]
        for id, _ in answers:
            client.post("/feedback", body={"id": id, "rating": "bad"}, cast_to=object)
        until(lambda: history(client)[-1]["status"] not in ("start", "learning"))
        learnt = history(client)[-1]
        assert learnt["status"] == "served" and learnt["current"]
        after = [log_probability(client, text) for text in texts]
        assert all(now < start for now, start in zip(after, before, strict=True))
        assert all(ask(client, prompt)[1] != text for prompt, (_, text) in zip(PROMPTS, answers, strict=True))


@pytest.mark.whole
@pytest.mark.parametrize("engine", ["native", "torch"])
def test_completions_during_steps_are_those_without_steps(
    workshop: Path, tmp_path: Path, engine: str
) -> None:
    bundle, learn = workshop / "bundle", tmp_path / "learn"
    with serving(bundle, learn, "--engine", engine, "--memory", "600MB") as (_, client):
        alone = [ask(client, prompt)[1] for prompt in PROMPTS]
        ids = [ask(client, prompt)[0] for prompt in PROMPTS]
        for id in ids:
            client.post("/feedback", body={"id": id, "correction": "bb cc"}, cast_to=object)
        until(lambda: history(client)[-1]["status"] == "learning")
        request_count = 0
        while history(client)[-1]["status"] == "learning":
            result = [ask(client, prompt)[1] for prompt in PROMPTS]
            if history(client)[-1]["status"] == "learning":
                assert result == alone
                request_count += 1
            time.sleep(0.05)
        assert request_count


@pytest.mark.whole
def test_both_processes_stay_within_a_memory_limit(workshop: Path, tmp_path: Path) -> None:
    bundle, learn = workshop / "bundle", tmp_path / "learn"
    with pytest.raises(RuntimeError, match="StopIteration"), serving(bundle, learn, "--memory", "20MB"):
        pass
    output = (tmp_path / "log").read_text()
    match = re.search(r"a server that learns needs at least (\d+) MB", output)
    assert match, output
    with serving(bundle, learn, "--memory", f"{match[1]}MB") as (process, client):
        for prompt in PROMPTS:
            id, _ = ask(client, prompt)
            client.post("/feedback", body={"id": id, "correction": "bb cc"}, cast_to=object)
        until(lambda: history(client)[-1]["status"] not in ("start", "learning"))
        assert not learners(process)  # and frees the memory
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert f"MB at most, of the {match[1]} MB of --memory" in (tmp_path / "log").read_text()


@pytest.mark.whole
def test_a_child_that_is_killed_alone_is_started_again(workshop: Path, tmp_path: Path) -> None:
    bundle, learn = workshop / "bundle", tmp_path / "learn"
    with serving(bundle, learn) as (process, client):
        for prompt in PROMPTS:
            id, _ = ask(client, prompt)
            client.post("/feedback", body={"id": id, "correction": "bb cc"}, cast_to=object)
        journal = learn / "rounds/0001/journal.jsonl"
        until(lambda: journal.is_file() and journal.read_bytes().count(b'"type":"step"') >= 5)
        [child] = learners(process)
        os.kill(child, signal.SIGKILL)
        url = str(client.base_url).replace("/v1/", "/health")
        until(lambda: json.load(urllib.request.urlopen(url))["status"] == "degraded")
        assert "The learning process was ended by SIGKILL" in (tmp_path / "log").read_text()
        until(lambda: history(client)[-1]["status"] == "served")
        until(lambda: json.load(urllib.request.urlopen(url))["status"] == "ok")
