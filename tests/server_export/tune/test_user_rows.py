"""The rows that a user names: files and columns, unusable rows, and splitting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prge.cli.field_types import Paths
from prge.data.readers.feedback import AnswerRecord, append_feedback
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import ConfigError, DataError
from server_export.tune.settings import TuneSettings
from server_export.tune.user_rows import UserRows
from tests.bundles import make_spec
from tests.prge.data.chat_templates import CHATML
from tests.prge.data.tiny_tokenizers import byte_level_backend
from tests.refusals import raises

SPEC = make_spec(sequence_length=40, width=8, vocabulary_size=1000)
TOKENIZER = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2)
CHAT = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, chat_template=CHATML)


def write(path: Path, *rows: Mapping[str, Any] | str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def pair(number: int, completion: str = " b") -> dict[str, str]:
    return {"prompt": f"p{number}", "completion": completion}


def tune(data: Paths, **given: Any) -> TuneSettings:
    return TuneSettings(data=data, out=Path("out"), model="model", **given)


def test_a_folder_has_development_and_test_rows_too(tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        write(tmp_path / "mlx" / f"{name}.jsonl", {"text": f"a {name}"})
    rows = UserRows(tune(tmp_path / "mlx"))
    parts = rows.split(TOKENIZER, SPEC)
    assert {part: [row.fields for row in rows_of_part] for part, rows_of_part in parts.items()} == {
        "train": [{"text": "a train"}],
        "dev": [{"text": "a valid"}],
        "test": [{"text": "a test"}],
    }
    assert any(note.startswith("dev: 1 rows from ") for note in rows.notes)


def test_several_files_are_checked_and_split_as_one(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for index, file in enumerate(files):
        write(file, *(pair(20 * index + number) for number in range(20)))
    parts = UserRows(tune((files[0], files[1]))).split(TOKENIZER, SPEC)
    assert sorted(
        int(row.fields["prompt"][1:]) for rows_of_part in parts.values() for row in rows_of_part
    ) == [*range(40)]
    write(files[0], pair(1), "{}", pair(2))
    write(files[1], pair(3), pair(4, ""), "{")
    with raises(DataError, "rows-unusable") as caught:
        UserRows(tune((files[0], files[1]))).check(TOKENIZER, SPEC)
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == [
        str(files[1]), f"row 2 of {files[0]}", f"row 2 of {files[1]}",
    ]  # fmt: skip


def test_parts_of_a_json_file_are_used_like_those_of_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    path.write_text(json.dumps({part: [{"text": f"a {part}"}] for part in ("train", "validation", "test")}))
    parts = UserRows(tune(path)).split(TOKENIZER, SPEC)
    assert {part: [row.fields["text"] for row in rows_of_part] for part, rows_of_part in parts.items()} == {
        "train": ["a train"], "dev": ["a validation"], "test": ["a test"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("objective", "columns", "note_end"),
    [
        ("auto", {"prompt", "completion", "label"}, "20 corrections, 1 good, 1 bad; rated answers"),
        ("completion", {"prompt", "completion"}, "completions, bad ratings left out"),
        ("dpo", {"prompt", "chosen", "rejected"}, "pairs, 2 ratings left out"),
    ],
)
def test_rows_of_feedback_are_used(tmp_path: Path, objective: Any, columns: set[str], note_end: str) -> None:
    answers = [AnswerRecord(str(n), "m", "", {"prompt": f"p{n}"}, " b", {}) for n in range(22)]
    corrections = [each.to_feedback(correction=" c") for each in answers[2:]]
    append_feedback(
        tmp_path / "a.jsonl", [answers[0].to_feedback("good"), answers[1].to_feedback("bad"), *corrections]
    )
    rows = UserRows(tune(tmp_path / "a.jsonl", objective=objective))
    parts = rows.split(TOKENIZER, SPEC)
    columns |= {"control_tokens"}
    assert all(row.fields.keys() == columns for part in parts.values() for row in part)
    numbers = [row.number for part in parts.values() for row in part]
    assert len({*numbers}) == len(numbers)
    assert any(note.endswith(note_end) for note in rows.notes)


def test_only_the_columns_of_the_form_are_kept(tmp_path: Path) -> None:
    """Readers of the written rows then recognize the form that the user chose."""
    lines = [{"story": f"text {n % 20}", "prompt": "p", "completion": "c", "id": n} for n in range(40)]
    rows = UserRows(tune(write(tmp_path / "a.jsonl", *lines), columns=("text=story",)))
    parts = rows.split(TOKENIZER, SPEC)
    train, dev = parts["train"], parts["dev"]
    assert len(train) + len(dev) == 40 and dev
    assert all(row.fields.keys() == {"text"} for row in [*train, *dev])
    assert not {row.fields["text"] for row in train} & {row.fields["text"] for row in dev}


def test_unknown_columns_are_refused(tmp_path: Path) -> None:
    with raises(DataError, "form-unknown", containing="question"):
        UserRows(tune(write(tmp_path / "a.jsonl", {"question": "a"})))


def test_the_name_of_a_data_set_is_not_a_path() -> None:
    assert tune(Path("nyu-mll/glue:sst2")).resolved().data == Path("nyu-mll/glue:sst2")


def broken(folder: Path) -> Path:
    """Write a file whose lines 2, 4 and 6 can't be used: no JSON, no completion, a number as prompt."""
    odd = ["{oops", pair(4, ""), {"prompt": 6, "completion": " b"}]
    lines = [each for n in range(3) for each in (pair(n), odd[n])]
    return write(folder / "a.jsonl", *lines, *(pair(n) for n in range(10, 20)))


def test_all_unusable_rows_are_listed_at_once_by_their_lines(tmp_path: Path) -> None:
    path = broken(tmp_path)
    with raises(DataError, "rows-unusable", containing=str(path)) as caught:
        UserRows(tune(path)).check(TOKENIZER, SPEC)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["row 2", "row 4", "row 6"]
    assert "--on-bad-row skip" in caught.value.remedy


def test_unusable_rows_are_skipped_and_listed(tmp_path: Path) -> None:
    path = broken(tmp_path)
    rows = UserRows(tune(path, on_bad_row="skip"))
    for _ in range(2):  # again, as for another first token
        rows.check(TOKENIZER, SPEC)
    assert [note.startswith("left out") for note in rows.notes].count(True) == 1
    parts = rows.split(TOKENIZER, SPEC)
    numbers = sorted(row.number for rows_of_part in parts.values() for row in rows_of_part)
    assert numbers == [1, 3, 5, *range(7, 17)]
    assert f"left out 3 rows of {path}:" in rows.notes
    assert "  row 4: its completion is empty: there is nothing to learn from" in rows.notes


def test_development_rows_are_checked_too(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", pair(1), pair(2))
    dev = write(tmp_path / "dev.jsonl", pair(3), pair(4, ""))
    with raises(DataError, "rows-unusable", containing=str(dev)) as caught:
        UserRows(tune(train, dev=dev)).check(TOKENIZER, SPEC)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["row 2"]


def test_long_chats_are_listed_by_their_lines_and_lose_nothing(tmp_path: Path) -> None:
    turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    lines = [{"messages": turn * (12 if n == 7 else 1)} for n in range(1, 11)]
    rows, program = (
        UserRows(tune(write(tmp_path / "a.jsonl", *lines))),
        replace(SPEC, sequence_length=60),
    )
    assert rows.chat == "needs" and rows.check(CHAT, program) > 60
    rows.split(CHAT, program)
    assert any("split between turns into several examples: 1 row (7)" in note for note in rows.notes)


def test_target_tokens_that_would_be_lost_are_an_error_before_the_export(tmp_path: Path) -> None:
    long = pair(1, " word" * 60)
    rows = UserRows(tune(write(tmp_path / "a.jsonl", long, pair(2))))
    rows.check(TOKENIZER, SPEC)
    with raises(DataError, "targets-dropped"):
        rows.split(TOKENIZER, SPEC)
    for settings in ({"overflow": "split"}, {"max_dropped": 1.0}):
        UserRows(tune(tmp_path / "a.jsonl", **settings)).split(TOKENIZER, SPEC)


def test_an_encoder_needs_rows_of_every_class(tmp_path: Path) -> None:
    lines = [{"sentence": f"film {n}", "label": 0} for n in range(6)]
    rows = UserRows(tune(write(tmp_path / "a.jsonl", *lines), task="sst2"))
    encoder = replace(SPEC, readout="pooled")
    rows.check(TOKENIZER, encoder)
    with raises(DataError, "class-without-rows"):
        rows.split(TOKENIZER, encoder)


def test_settings_of_another_objective_are_refused_before_the_export(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", *map(pair, range(12)))
    with raises(ConfigError, "setting-of-other-objective", containing="--beta"):
        UserRows(tune(data, beta=0.3)).check(TOKENIZER, SPEC)
    pairs = [{"prompt": f"p{n}", "chosen": " yes", "rejected": " no"} for n in range(12)]
    data = write(tmp_path / "pairs.jsonl", *pairs)
    with raises(ConfigError, "setting-of-other-objective", containing="--loss-normalisation token"):
        UserRows(tune(data, loss_normalisation="token")).check(TOKENIZER, SPEC)
