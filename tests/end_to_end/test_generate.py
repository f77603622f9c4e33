"""Completions of a bundle and of its trained adapter in the engine equal those of transformers and PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prge.cli.main import main
from tests.device_runner.android.fake_adb import FakePhone
from tests.server_export.adapters import trained_adapter
from tests.verbs import prge
from tests.workshop import write_rows

PROMPTS = ("aa bb", "cc dd ?", "bb")
END = 2
STORIES = ("Once upon a time", "The little dog was very happy, because", "Lily said:")


@pytest.fixture(scope="module")
def trained(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose adapter is far from its start."""
    run = tmp_path_factory.mktemp("trained") / "run"
    prge(
        "run", "--bundle", workshop / "bundle", "--train", workshop / "train.jsonl", "--task",
        workshop / "task.yaml", "--out", run, "--steps", 8, "--learning-rate", 0.3,
    )  # fmt: skip
    return run


def expected(
    model: Path, adapter: Path | None, prompts: tuple[str, ...], max_tokens: int = 12
) -> list[list[int]]:
    """Return greedy tokens of transformers without the end-of-sequence token, with an adapter by PEFT."""
    import peft
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        loaded = peft.PeftModel.from_pretrained(loaded, str(adapter))
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = loaded.generate(
            input_ids=ids,
            attention_mask=ids * 0 + 1,
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append([token for token in out[0, ids.shape[1] :].tolist() if token != END])
    return answers


def texts_of(model: Path, prompts: tuple[str, ...], answers: list[list[int]]) -> list[str]:
    """Decode each completion after its prompt with transformers' tokenizer."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    texts = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = tokenizer(prompt).input_ids
        before, whole = (tokenizer.decode(each, skip_special_tokens=True) for each in (ids, ids + answer))
        texts.append(whole.removeprefix(before))
    return texts


def lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def test_a_run_and_its_published_adapter_complete_texts_like_peft(
    workshop: Path, trained: Path, tmp_path: Path
) -> None:
    published = tmp_path / "published"
    prge(
        "publish", trained, "--bundle", workshop / "bundle", "--model", workshop / "model", "--out", published
    )
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    done = prge(
        "generate", "--bundle", workshop / "bundle", "--adapter", trained, f"published={published}", "base",
        "--data", rows, "--max-tokens", 12, "--json",
    )  # fmt: skip
    result: dict[str, list[list[int]]] = {}
    for line in lines(done.stdout):
        result.setdefault(line["adapter"], []).append(line["tokens"])
    tuned, base = (expected(workshop / "model", each, PROMPTS) for each in (trained / "final", None))
    assert result[str(trained)] == result["published"] == tuned
    assert result["base"] == base != tuned


@pytest.mark.whole
@pytest.mark.parametrize("name", ["demo", "stories260K", "babyllama"])
def test_trained_models_complete_texts_like_the_merged_model(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base = (
        Path(__file__).parents[2] / "server_export/demo_data/model"
        if name == "demo"
        else request.getfixturevalue("shared") / "models" / name
    )
    trained = trained_adapter(base, tmp_path / "trained", size=0.02)
    bundle, merged = tmp_path / "bundle", tmp_path / "merged"
    roles = ["--roles", "prefill", "decode"]
    prge("export", "--model", base, "--start-adapter", trained, "--out", bundle, *roles)
    arguments = ["publish", trained, "--model", base, "--format", "merged", "--out", merged]
    assert main([*map(str, arguments)]) == 0
    done = prge("generate", "--bundle", bundle, "--prompt", *STORIES, "--max-tokens", 60, "--json")
    result = lines(done.stdout)
    tokens = expected(merged, None, STORIES, 60)
    assert [line["tokens"] for line in result] == tokens
    assert [line["text"] for line in result] == texts_of(merged, STORIES, tokens)
    assert tokens != expected(base, None, STORIES, 60), "the adapter changes nothing"


def test_a_conversation_through_a_pipe(workshop: Path, trained: Path) -> None:
    arguments = ["--bundle", workshop / "bundle", "--max-tokens", 6, "--temperature", 0]
    inputs = f"aa bb\n/reset\n/adapter {trained}\naa bb\n"
    done = prge("chat", *arguments, input=inputs)
    alone = [
        prge("generate", *arguments, "--prompt", "aa bb", *adapter).stdout
        for adapter in ([], ["--adapter", trained])
    ]
    assert done.stdout == "".join(alone)
    assert "the model has no chat template" in done.stderr


def test_a_run_on_a_phone_generates_there(workshop: Path, trained: Path, tmp_path: Path) -> None:
    phone = FakePhone(tmp_path / "fake")
    runs = phone.folder / "runs"
    runs.mkdir()
    (runs / "first").symlink_to(trained)
    (phone.folder / "jobs" / "first").mkdir(parents=True)
    here = prge(
        "generate",
        "--bundle",
        workshop / "bundle",
        "--adapter",
        trained,
        "--prompt",
        "aa bb",
        "--max-tokens",
        6,
    ).stdout
    assert phone.prge("generate", "first", "--prompt", "aa bb", "--max-tokens", 6).stdout == here
    arguments = ["first", "--max-tokens", 6, "--temperature", 0]
    assert phone.prge("chat", *arguments, stdin="aa bb\n").stdout == here
