"""Rows of prompts, whose completions a reward scores: reading, splitting, and the files of a tuning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import ConfigError, DataError
from server_export.tune.prompt_rows import PromptFiles, PromptRows
from server_export.tune.settings import TuneSettings
from tests.bundles import make_spec
from tests.prge.data.chat_templates import CHATML
from tests.prge.data.tiny_tokenizers import byte_level_backend
from tests.refusals import raises
from tests.workshop import write_rows

SPEC = make_spec(sequence_length=40, width=8, vocabulary_size=1000)
TOKENIZER = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2)
CHAT = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, chat_template=CHATML)
LENGTH = 16


def tune(data: Path, **given: Any) -> TuneSettings:
    settings = {"reward": "reward.yaml", "max_completion_length": LENGTH, **given}
    return TuneSettings(data=data, out=data.parent / "out", model="model", **settings)


def prompts(folder: Path, *rows: Mapping[str, Any]) -> Path:
    """Write twenty prompts with an answer that only a reward reads, and further rows."""
    usual = [{"prompt": f"p{number}", "answer": number} for number in range(20)]
    return write_rows(folder / "rows.jsonl", [*usual, *map(dict, rows)])


def test_prompts_keep_all_columns_and_lose_a_part_for_development(tmp_path: Path) -> None:
    rows = PromptRows(tune(prompts(tmp_path)))
    assert rows.chat == "" and rows.is_generative
    longest = len(TOKENIZER.encode("p10"))
    assert rows.check(TOKENIZER, SPEC) == longest + LENGTH
    parts = rows.split(TOKENIZER, SPEC)
    assert {row.fields["answer"] for part in parts.values() for row in part} == {*range(20)}
    assert len(parts["train"]) + len(parts["dev"]) == 20 and parts["dev"]


def test_messages_without_an_answer_are_prompts(tmp_path: Path) -> None:
    turns = [{"messages": [{"role": "user", "content": f"q{number}"}]} for number in range(12)]
    settings = tune(write_rows(tmp_path / "rows.jsonl", turns))
    rows = PromptRows(settings)
    assert rows.chat and rows.check(CHAT, SPEC) > LENGTH
    files = PromptFiles.of(settings)
    files.write(rows.split(CHAT, replace(SPEC, sequence_length=100)))
    assert files.has_messages and files.is_generative and not files.has_candidates
    line = json.loads(files.write_prompts(CHAT).read_text().splitlines()[0])
    assert line["messages"][-1]["role"] == "user"


def test_unusable_prompts_are_listed_or_left_out(tmp_path: Path) -> None:
    path = prompts(tmp_path, {"prompt": 5}, {"prompt": ""})
    with raises(DataError, "rows-unusable") as caught:
        PromptRows(tune(path)).check(TOKENIZER, SPEC)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["row 21", "row 22"]
    rows = PromptRows(tune(path, on_bad_row="skip"))
    rows.check(TOKENIZER, SPEC)
    assert sum(map(len, rows.split(TOKENIZER, SPEC).values())) == 20


def test_prompts_that_leave_no_room_for_a_completion_are_refused(tmp_path: Path) -> None:
    rows = PromptRows(tune(prompts(tmp_path, {"prompt": "p" * 30})))
    rows.check(TOKENIZER, SPEC)
    with raises(DataError, "rows-unusable", containing="row 21: its prompt has"):
        rows.split(TOKENIZER, SPEC)


@pytest.mark.parametrize(("objective", "completions"), [("auto", 8), ("es", 1)])
def test_facts_count_the_completions_of_a_step(tmp_path: Path, objective: Any, completions: int) -> None:
    settings = tune(prompts(tmp_path), objective=objective)
    files, rows = PromptFiles.of(settings), PromptRows(settings)
    rows.check(TOKENIZER, SPEC)
    files.write(rows.split(TOKENIZER, SPEC))
    facts = files.facts(TOKENIZER, SPEC, "auto")
    assert (
        facts.widest == completions
        and facts.completed
        and facts.objective == ("grpo" if completions > 1 else "es")
    )
    assert facts.longest == len(TOKENIZER.encode("p10")) + LENGTH
    assert facts.targets == facts.rows * completions * LENGTH


def test_settings_of_another_objective_are_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "setting-of-other-objective", containing="--gamma"):
        PromptRows(tune(prompts(tmp_path), gamma=3.0)).check(TOKENIZER, SPEC)
