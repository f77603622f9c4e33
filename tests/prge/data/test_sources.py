"""Sources of rows: files, folders, data sets of the hub."""

from __future__ import annotations

import csv
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prge.data.forms.task import load_task
from prge.data.readers.files import Row, row_location
from prge.data.sources import find_row_file, is_hub_name, parse_columns, read_source, sources_with_part
from prge.errors import ConfigError, DataError
from prge.formats.bundle import file_sha256
from tests.refusals import raises

Write = Callable[[str, "str | bytes"], Path]
ROOT = Path(__file__).resolve().parents[3]


def test_a_file(write: Write) -> None:
    path = write("a.jsonl", '{"text": "one"}\n')
    source = read_source(path)
    assert source.rows == [Row(1, {"text": "one"})]
    assert (source.name, source.sha256) == (str(path), file_sha256(path))


def test_a_folder_has_a_file_for_each_part(write: Write) -> None:
    for name in ("train.jsonl", "valid.jsonl"):
        write(name, f'{{"text": "{name}"}}\n')
    folder = write("test.csv", "text\ntest.csv\n").parent
    for part, name in (("train", "train.jsonl"), ("dev", "valid.jsonl"), ("test", "test.csv")):
        source = read_source(folder, part)  # type: ignore[arg-type]
        assert source.rows == [Row(1, {"text": name})]
        assert source.name == str(folder / name)


@pytest.mark.parametrize("name", ["valid.json", "validation.tsv", "dev.csv", "val.parquet"])
def test_names_of_development_rows(write: Write, name: str) -> None:
    path = write(name, "")
    assert find_row_file(path.parent, "dev") == path


def test_a_folder_without_one_matching_file_is_refused(write: Write, tmp_path: Path) -> None:
    with raises(DataError, "part-missing", containing="test"):
        read_source(tmp_path, "test")
    write("dev.jsonl", "")
    write("valid.jsonl", "")
    with raises(DataError, "part-missing", containing="valid.jsonl, dev.jsonl"):
        read_source(tmp_path, "dev")


def test_columns_are_renamed(write: Write) -> None:
    path = write("a.jsonl", '{"question": "q", "answer": "a", "prompt": "p"}\n')
    source = read_source(path, columns=["prompt=question", "completion=answer"])
    assert source.rows == [Row(1, {"prompt": "q", "completion": "a"})]
    assert source.renamed == {"prompt": "question", "completion": "answer"}


def test_several_files_are_one_source_whose_rows_name_their_file(write: Write) -> None:
    first = write("a.jsonl", '{"text": "one"}\n\n{"text": "two"}\n')
    second = write("b.csv", "text\nthree\nfour\n")
    source = read_source((first, second))
    assert [row.fields["text"] for row in source.rows] == ["one", "two", "three", "four"]
    assert len({row.number for row in source.rows}) == 4
    assert [f"row {row.number}" for row in source.rows] == [
        f"row 1 of {first}", f"row 3 of {first}", f"row 1 of {second}", f"row 2 of {second}",
    ]  # fmt: skip
    assert source.name == f"{first} and {second}"
    assert row_location(source.rows[2].number) == {"file": str(second), "row": 1}
    assert row_location(3) == {"row": 3}
    number = source.rows[1].number
    assert json.loads(json.dumps(number)) == number
    assert str(pickle.loads(pickle.dumps(number))) == str(number)
    # The hash covers all files in order.
    digests = {read_source(paths).sha256 for paths in ((first, second), (second, first), (first,), (second,))}
    assert len(digests) == 4 and file_sha256(first) in digests
    second.write_text("text\nthree\nFour\n")
    assert read_source((first, second)).sha256 not in digests


def test_unreadable_missing_and_repeated_files_are_refused(write: Write, tmp_path: Path) -> None:
    good, bad = write("good.jsonl", '{"text": "one"}\n'), write("bad.jsonl", '{"text": "two"}\n{"text": }\n')
    with pytest.raises(DataError) as caught:
        read_source((good, bad))
    assert caught.value.problems == [f"{bad}: row 2: not JSON: Expecting value at character 10"]
    broken: list[str] = []
    assert len(read_source((bad, good), broken=broken).rows) == 2 and len(broken) == 1
    with raises(DataError, "file-twice", containing=str(good)):
        read_source((good, bad, good))
    for word in ("imdb", "a" * 5000, "a\0"):
        with raises(DataError, "file-missing", containing=word[:1]):
            read_source((good, Path(word)))
    write("my rows.jsonl", '{"text": "one"}\n')
    with raises(DataError, "file-missing", containing=str(tmp_path / "my")):
        read_source((tmp_path / "my", Path("rows.jsonl")))


def test_the_parts_of_several_folders_and_of_json_files(write: Write, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for part in ("train", "valid"):
            write(f"{name}/{part}.jsonl", f'{{"text": "{part} of {name}"}}\n')
    folders = (tmp_path / "a", tmp_path / "b")
    rows = read_source(folders, "dev").rows
    assert [row.fields["text"] for row in rows] == ["valid of a", "valid of b"]
    parts = write("parts.json", '{"train": [{"text": "one"}], "test": [{"text": "two"}]}')
    only = write("only.json", '{"data": [{"text": "one"}]}')
    assert sources_with_part(folders, "dev") == folders
    assert sources_with_part((*folders, parts), "test") == parts == sources_with_part(parts, "test")
    assert sources_with_part(parts, "dev") is None is sources_with_part(only, "test")
    assert read_source(parts, "test").rows == [Row(1, {"text": "two"})]


MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
AS_JSON = json.dumps(MESSAGES)


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"messages": AS_JSON}, {"messages": MESSAGES}),
        ({"conversations": '[{"from": "gpt"}]'}, {"conversations": [{"from": "gpt"}]}),
        ({"prompt": AS_JSON, "completion": AS_JSON}, {"prompt": MESSAGES, "completion": MESSAGES}),
        (
            {"prompt": AS_JSON, "chosen": AS_JSON, "rejected": AS_JSON},
            {"prompt": MESSAGES, "chosen": MESSAGES, "rejected": MESSAGES},
        ),
        # A completion that is JSON stays text if the prompt is no JSON.
        ({"prompt": "A chat:", "completion": AS_JSON}, {"prompt": "A chat:", "completion": AS_JSON}),
        ({"prompt": "[1]", "completion": "[2]"}, {"prompt": "[1]", "completion": "[2]"}),
        ({"text": AS_JSON}, {"text": AS_JSON}),
    ],
)  # fmt: skip
def test_messages_may_be_json_texts(tmp_path: Path, fields: dict[str, str], read: dict[str, object]) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fields)
        writer.writeheader()
        writer.writerow(fields)
    assert read_source(path).rows == [Row(1, read)]
    assert read_source(path, task=load_task("sst2")).rows == [Row(1, fields)]


def test_messages_that_are_no_json_are_refused(write: Write) -> None:
    path = write(
        "a.csv", 'messages\n"[{\'role\': \'user\', \'content\': \'Hi\'}]"\n"[{""role"": ""user""}]"\n'
    )
    with raises(DataError, "rows-unreadable", containing="row 1"):
        read_source(path)
    broken: list[str] = []
    assert read_source(path, broken=broken).rows == [Row(2, {"messages": [{"role": "user"}]})]
    assert len(broken) == 1


@pytest.mark.parametrize(
    ("columns", "task", "named"),
    [
        (["promt=prompt"], None, "prompt=prompt?"),
        (["promt=question"], None, "prompt=question?"),
        (["question=prompt"], None, "prompt=question?"),
        (["input_text=question"], None, "'input_text'"),
        (["sentense=question"], "sst2", "sentence=question?"),
        (["prompt=question"], "sst2", "'prompt'"),
    ],
)
def test_unknown_names_of_columns_are_refused(
    write: Write, columns: list[str], task: str | None, named: str
) -> None:
    path = write("a.jsonl", '{"question": "q", "prompt": "p", "completion": "c"}\n')
    with raises(ConfigError, "columns-unusable", containing=named) as caught:
        read_source(path, columns=columns, task=load_task(task) if task else None)
    assert "NAME is one of" in caught.value.remedy


def test_a_missing_column_is_refused(write: Write) -> None:
    path = write("a.jsonl", '{"question": "q"}\n')
    with raises(DataError, "column-missing", containing="'query'"):
        read_source(path, columns=["prompt=query"])


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        (["prompt"], "'prompt'"),
        (["=a"], "'=a'"),
        (["a=b", "a=c"], "'a'"),
        (["a=c", "b=c"], "'c'"),
    ],
)
def test_columns_without_both_names_are_refused(columns: list[str], named: str) -> None:
    with raises(ConfigError, "columns-unusable", containing=named):
        parse_columns(columns)
    assert parse_columns(["a=b=c"]) == {"a": "b=c"}


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("imdb", True),
        ("nyu-mll/glue:sst2", True),
        ("rows.jsonl", False),
        ("data/rows.parquet", False),
        ("../glue", False),
        ("/data/glue", False),
        ("a/b/c", False),
    ],
)
def test_names_of_data_sets(name: str, is_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name(Path(name)) is is_one
    if is_one and ":" not in name:
        Path(name).mkdir(parents=True)
        assert not is_hub_name(Path(name))


def test_a_data_set_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises(DataError, "package-missing", containing="datasets"):
        read_source("nobody/nothing")


# A stand-in for the package datasets, if it isn't installed; huggingface_hub is.
STAND_IN = """
class DownloadConfig:
    def __init__(self, max_retries):
        assert max_retries == 0

def get_dataset_split_names(name, configuration, download_config):
    return ["train", "validation"]

def load_dataset(name, configuration, split, download_config):
    return [{"sentence": f"{name} {configuration} {split}", "label": 1}]
"""


def ask(tmp_path: Path, code: str, **environment: str) -> tuple[str, float]:
    """Return the output of a process with a fake `datasets`, and its duration in seconds."""
    (tmp_path / "datasets.py").write_text(STAND_IN)
    code = f"from prge.errors import DataError\nfrom prge.data.sources import read_source\n{code}"
    paths = f"{tmp_path}:{ROOT}"
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **environment},
        check=True,
    )
    return done.stdout, time.perf_counter() - begin


PRINT_ERROR = """
try:
    read_source("nyu-mll/glue:sst2", "{part}")
except DataError as error:
    print(error)
"""


def test_an_unreachable_hub_is_reported_at_once(tmp_path: Path) -> None:
    message, seconds = ask(tmp_path, PRINT_ERROR.format(part="train"), HF_ENDPOINT="http://127.0.0.1:9")
    assert "the data set could not be loaded" in message and "HF_HUB_OFFLINE=1" in message
    assert seconds < 15


def test_offline_only_the_cache_is_read(tmp_path: Path) -> None:
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    code = "source = read_source('nyu-mll/glue:sst2', 'dev')\nprint(source.name, source.rows)"
    message, _ = ask(tmp_path, code, **offline)
    assert message.startswith("nyu-mll/glue:sst2 (validation) [Row(number=1")
    assert "nyu-mll/glue sst2 validation" in message
    message, _ = ask(tmp_path, PRINT_ERROR.format(part="test"), **offline)
    assert "it has no test rows: its splits are train, validation" in message


# A data set in the library's cache, as if it had been loaded from the hub before.
CACHED = """
import json, pathlib, shutil
import datasets

files = {}
for split, words in (("train", ["one", "two"]), ("validation", ["three"])):
    files[split] = f"{split}.jsonl"
    lines = [json.dumps({"sentence": word, "label": 1}) + "\\n" for word in words]
    pathlib.Path(files[split]).write_text("".join(lines))
datasets.load_dataset("json", data_files=files)
cache = pathlib.Path(datasets.config.HF_DATASETS_CACHE)
(made,) = cache.glob("json/*/*/*/")
place = cache / "someone___words" / "default" / "0.0.0" / made.name
shutil.copytree(made, place)
for path in place.glob("json-*"):
    path.rename(path.with_name(path.name.replace("json-", "words-")))
facts = place / "dataset_info.json"
facts.write_text(facts.read_text().replace('"dataset_name": "json"', '"dataset_name": "words"'))
"""


def test_the_librarys_own_cache_is_read_offline(tmp_path: Path) -> None:
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}

    def output_of(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **offline},
            check=True,
        )
        return done.stdout

    output_of(CACHED)
    ask = "from prge.data.sources import read_source\nsource = read_source({!r}, {!r})\n"
    print_rows = "print(source.name, [row.fields for row in source.rows])"
    assert output_of(ask.format("someone/words", "train") + print_rows) == (
        "someone/words (train) [{'sentence': 'one', 'label': 1}, {'sentence': 'two', 'label': 1}]\n"
    )
    assert output_of(ask.format("someone/words:default", "dev") + print_rows) == (
        "someone/words:default (validation) [{'sentence': 'three', 'label': 1}]\n"
    )
