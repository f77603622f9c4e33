"""Declared rewards: each rule on completions that it accepts and refuses, and files that are none."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from prge.errors import ConfigError, RewardError
from prge.rewards.opening import open_reward
from prge.rewards.rules import RULES, UNITS, read_rules
from tests.refusals import raises

SCHEMA = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
ROW = {"prompt": "p", "answer": "Paris", "total": "it is 1,200.5"}


def rules(path: Path, *entries: Any) -> Any:
    path.write_text(yaml.safe_dump({"rewards": list(entries)}), encoding="utf-8")
    return read_rules(path)


def test_rules_that_never_return_are_an_error_in_time(tmp_path: Path) -> None:
    reward = replace(rules(tmp_path / "rules.yaml", {"rule": "regex", "pattern": "(a+)+"}), seconds=0.2)
    assert reward("", "a" * 20, {}) == 1
    start = time.monotonic()
    with raises(RewardError, "reward-too-slow", containing="0.2 seconds"):
        reward("", "a" * 60 + "!", {})
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("entry", "accepted", "refused"),
    [
        ({"rule": "match"}, " Paris\n", "paris"),
        ({"rule": "match", "ignore_case": True}, "PARIS", "Paris."),
        ({"rule": "regex", "pattern": r"\d+"}, "42", "42 cows"),
        ({"rule": "regex", "pattern": r"\d+", "search": True}, "42 cows", "cows"),
        ({"rule": "json"}, ' {"a": [1]} ', "{'a': 1}"),
        ({"rule": "json", "schema": SCHEMA}, '{"name": "Ada"}', '{"name": 1}'),
        ({"rule": "length", "at_most": 3}, "one two three", "one two three four"),
        ({"rule": "length", "at_most": 0}, " ", "one"),
        ({"rule": "length", "unit": "sentences", "at_least": 2, "at_most": 2}, "One. Two!", "One... two"),
        ({"rule": "length", "unit": "characters", "at_least": 4}, "four", "  for "),
        ({"rule": "contains", "words": ["cow", "hat"]}, "The COW has a hat", "the cow"),
        ({"rule": "contains", "column": "answer"}, "It is Paris.", "It is Rome."),
        ({"rule": "avoids", "words": [","]}, "no commas", "well, some"),
        ({"rule": "number", "column": "total"}, "so 3 + 4 = 1200.50", "1200 then 7"),
        ({"rule": "number", "column": "total", "tolerance": 1}, "1,201", "1202"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_rule_accepts_and_refuses(tmp_path: Path, entry: Any, accepted: str, refused: str) -> None:
    if "schema" in entry:
        pytest.importorskip("jsonschema")
    reward = rules(tmp_path / "reward.yaml", entry)
    assert [reward("p", text, ROW) for text in (accepted, refused)] == [1.0, 0.0]


def test_a_reward_is_the_weighted_mean_of_its_rules(tmp_path: Path) -> None:
    short, polite = {"rule": "length", "at_most": 3}, {"rule": "contains", "words": ["please"], "weight": 3}
    reward = rules(tmp_path / "reward.yaml", short, polite)
    texts = ["yes please", "now", "you may please come in", "no and no and no"]
    assert [reward("p", text, {}) for text in texts] == [1.0, 0.25, 0.75, 0.0]


def test_every_rule_is_tested() -> None:
    assert [*RULES] == ["match", "regex", "json", "length", "contains", "avoids", "number"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"rule": "poem"}, "rule is 'poem', must be one of match"),
        ("match", "rule is 'match'"),
        ({"rule": ["match"]}, "rule is ['match'], must be one of match"),
        ({"rule": "regex"}, "it has no pattern"),
        ({"rule": "regex", "pattern": "("}, "pattern '('"),
        ({"rule": "length", "unit": "lines"}, "unit is 'lines', must be one of words"),
        ({"rule": "length", "at_most": "few"}, "at_most is 'few', must be a whole number"),
        ({"rule": "length", "most": 3}, "most is not one of its keys unit, at_least, at_most"),
        ({"rule": "json", "weight": 0}, "weight is 0, must be a number above 0"),
    ],
)
def test_a_file_that_is_no_reward_is_refused(tmp_path: Path, entry: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rules(tmp_path / "reward.yaml", {"rule": "json"}, entry)
    assert "rule 2: " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize("schema", [{"type": "objekt"}, [], "object", {"$schema": 5}, {"$schema": [5]}])
def test_a_schema_that_is_none_is_refused(tmp_path: Path, schema: Any) -> None:
    pytest.importorskip("jsonschema")
    with raises(ConfigError, "reward-unusable", containing="schema is"):
        rules(tmp_path / "reward.yaml", {"rule": "json", "schema": schema or [1]})


@pytest.mark.parametrize("reference", ["#/definitions/x", "#", "https://example.com/schema.json"])
def test_a_reference_that_leads_nowhere_is_an_error(tmp_path: Path, reference: str) -> None:
    pytest.importorskip("jsonschema")
    reward = rules(tmp_path / "reward.yaml", {"rule": "json", "schema": {"$ref": reference}})
    with raises(RewardError, "schema-reference", containing="refers to"):
        reward("p", "{}", {})


@pytest.mark.parametrize("text", ["One. Two!", "One... two", "?!", "", "no end", " . a . ", "a.b?c!d"])
def test_sentences_are_texts_up_to_their_marks(text: str) -> None:
    assert UNITS["sentences"](text) == len(re.findall(r"[^.!?]*[^\s.!?][^.!?]*[.!?]+", text.strip()))


def test_sentences_of_a_long_text_without_marks_are_counted_fast(tmp_path: Path) -> None:
    rule = {"rule": "length", "unit": "sentences", "at_most": 2}
    assert replace(rules(tmp_path / "reward.yaml", rule), seconds=1.0)("p", "word " * 2_000, {}) == 1


@pytest.mark.parametrize("text", ["[]", "rewards: {}", "rewards: []", "other: []", "rewards: [", "\x00"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "reward.yaml"
    path.write_text(text, encoding="utf-8")
    with raises(ConfigError, "reward-unusable", containing=str(path)):
        open_reward(str(path))


def test_a_missing_column_is_an_error(tmp_path: Path) -> None:
    reward = rules(tmp_path / "reward.yaml", {"rule": "match", "column": "solution"})
    with raises(RewardError, "column-missing", containing="prompt, answer, total"):
        reward("p", "x", ROW)
    number = rules(tmp_path / "reward.yaml", {"rule": "number", "column": "answer"})
    with raises(RewardError, "column-without-number", containing="'Paris'"):
        number("p", "x", ROW)
