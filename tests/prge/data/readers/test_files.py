"""Reading rows of files: formats, quoting, encodings, errors with row numbers, selections."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prge.data.columns import RowError, get_text
from prge.data.forms.task import Template
from prge.data.readers import parquet
from prge.data.readers.files import Row, Selection, json_fields, read_rows, select_rows
from prge.errors import ConfigError, DataError
from tests.refusals import raises

Write = Callable[[str, "str | bytes"], Path]


def test_jsonl_rows_keep_their_line_numbers(write: Write) -> None:
    path = write("a.jsonl", '{"text": "one"}\n\n{"text": "two\u2028lines", "label": 1}\r\n')
    assert read_rows(path) == [Row(1, {"text": "one"}), Row(3, {"text": "two\u2028lines", "label": 1})]


def test_json_is_a_list_of_rows_or_of_texts(write: Write) -> None:
    path = write("a.json", '\n[{"text": "one"},\n {"text": "two"}]')
    assert read_rows(path) == [Row(1, {"text": "one"}), Row(2, {"text": "two"})]
    assert read_rows(write("b.json", '["one", "two"]')) == read_rows(path)


def test_jsonl_may_have_the_extension_json(write: Write) -> None:
    assert read_rows(write("a.json", '{"text": "one"}\n{"text": "two"}\n'))[1] == Row(2, {"text": "two"})


def test_files_that_expand_to_too_many_rows_are_refused(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of two bytes in a file take hundreds of bytes in memory."""
    monkeypatch.setattr(parquet, "MIN_BYTES", 0)
    with raises(DataError, "file-expands", containing="202"):
        read_rows(write("a.csv", "a\n" + "b\n" * 100))
    assert len(read_rows(write("b.csv", "text\n" + "four\n" * 100))) == 100


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    turns, day = [{"role": "user", "content": "Hi"}], datetime.date(2024, 1, 2)
    table = pyarrow.table(
        {"messages": [turns, None], "n": [1, 2], "day": [day, None], "b": [0.5, float("nan")]}
    )
    parquet.write_table(table, path)
    assert read_rows(path) == [Row(1, {"messages": turns, "n": 1, "day": day, "b": 0.5}), Row(2, {"n": 2})]
    path.write_bytes(b"PAR1 no table")
    with raises(DataError, "parquet-damaged", containing=str(path)):
        read_rows(path)


@pytest.mark.parametrize(
    ("value", "variant", "message"),
    [
        (b"\x89PNG\r\n", "binary", "bytes"),
        (datetime.datetime(2024, 1, 2), "timestamp[s]", "datetime"),
        (Decimal("1.50"), "decimal128(4, 2)", "Decimal"),
        ([("a", "b")], "map<string, string>", "list"),
        ({"bytes": b"\xff", "path": "a.png"}, "struct<bytes: binary, path: string>", "dict"),
        (5, "int64", "int"),
        (True, "bool", "bool"),
        (2.5, "double", "float"),
    ],
)
def test_values_that_are_no_text_are_refused_with_row_and_column(
    tmp_path: Path, value: object, variant: str, message: str
) -> None:
    import pyarrow
    from pyarrow import parquet

    types = {
        "binary": pyarrow.binary(),
        "timestamp[s]": pyarrow.timestamp("s"),
        "decimal128(4, 2)": pyarrow.decimal128(4, 2),
        "map<string, string>": pyarrow.map_(pyarrow.string(), pyarrow.string()),
        "struct<bytes: binary, path: string>": pyarrow.struct(
            {"bytes": pyarrow.binary(), "path": pyarrow.string()}
        ),
        "int64": pyarrow.int64(),
        "bool": pyarrow.bool_(),
        "double": pyarrow.float64(),
    }
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": pyarrow.array([value], types[variant])}), path)
    (row,) = read_rows(path)
    with raises(RowError, "column-not-text", containing=message):
        get_text(row.fields, "text")
    if variant not in ("int64", "bool", "double"):
        with raises(RowError, "column-not-text", containing="text"):
            Template.parse("{text}").render(row.fields)


def test_bytes_of_parquet_that_are_utf8_are_texts(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    texts = ["Row 0", "caf\u00e9 \u65e5\u672c"]
    turns = [[{"role": b"user", "content": text.encode()}] for text in texts]
    column = pyarrow.array([text.encode() for text in texts], pyarrow.binary())
    parquet.write_table(pyarrow.table({"text": column, "messages": turns}), path)
    assert [row.fields["text"] for row in read_rows(path)] == texts
    assert [row.fields["messages"][0]["content"] for row in read_rows(path)] == texts


def test_values_without_a_json_type_are_not_written(tmp_path: Path) -> None:
    fields = {
        "a": 1,
        "b": [{"c": "d"}],
        "day": datetime.date(2024, 1, 2),
        "inf": float("inf"),
        "x": [b"\xff"],
    }
    assert json_fields(fields) == {"a": 1, "b": [{"c": "d"}]}


LAYOUTS = {
    "pretty.json": '[\n  {\n    "text": "one"\n  },\n  {\n    "text": "two"\n  }\n]\n',
    "pretty.jsonl": '[\n  {\n    "text": "one"\n  },\n  {\n    "text": "two"\n  }\n]\n',
    "line.jsonl": '[{"text": "one"}, {"text": "two"}]\n',
    "jq.jsonl": '{\n  "text": "one"\n}\n{\n  "text": "two"\n}\n',
    "data.json": '{"version": "1.0", "data": [{"text": "one"}, {"text": "two"}]}',
    "pretty-data.jsonl": '{\n "data": [\n  {"text": "one"},\n  {"text": "two"}\n ]\n}',
    "train.json": '{"train": [{"text": "one"}, {"text": "two"}]}',
    "parts.json": '{"train": [{"text": "one"}, {"text": "two"}], "test": [{"text": "three"}]}',
    "columns.json": '{"text": ["one", "two"]}',
    "index.json": '{"text": {"0": "one", "1": "two"}}',
    "split.json": '{"columns": ["text"], "index": [0, 1], "data": [["one"], ["two"]]}',
    "nulls.jsonl": '{"text": "one", "messages": null}\n{"text": "two", "messages": null}\n',
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_json(write: Write, name: str) -> None:
    assert read_rows(write(name, LAYOUTS[name])) == [Row(1, {"text": "one"}), Row(2, {"text": "two"})]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]},
        {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
        {"text": "one", "data": "two"},
        {"question": "q", "choices": ["a", "b"]},
    ],
)
def test_a_file_of_one_row_is_one_row(write: Write, fields: dict[str, Any]) -> None:
    for name, indent in (("a.jsonl", None), ("a.json", 2)):
        assert read_rows(write(name, json.dumps(fields, indent=indent))) == [Row(1, fields)]


def test_parts_of_a_json_file(write: Write) -> None:
    path = write("a.json", '{"train": [{"text": "one"}], "validation": [{"text": "two"}]}')
    assert read_rows(path, part="dev") == [Row(1, {"text": "two"})]
    with raises(DataError, "rows-unreadable", containing="validation"):
        read_rows(path, part="test")


def test_pandas_layouts_are_those_that_pandas_reads(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame({"text": ["one", "two"], "label": [0, 1]})
    rows = [Row(1, {"text": "one", "label": 0}), Row(2, {"text": "two", "label": 1})]
    for orient in ("columns", "records", "split"):
        frame.to_json(tmp_path / "a.json", orient=orient)
        assert read_rows(tmp_path / "a.json") == rows, orient
    frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    assert read_rows(tmp_path / "a.jsonl") == rows
    frame.to_csv(tmp_path / "a.csv")
    assert read_rows(tmp_path / "a.csv")[1].fields == {"Unnamed: 0": "1", "text": "two", "label": "1"}
    assert list(pandas.read_csv(tmp_path / "a.csv").columns) == [*read_rows(tmp_path / "a.csv")[0].fields]


def test_parquet_without_its_library(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with raises(DataError, "package-missing", containing="pyarrow"):
        read_rows(write("a.parquet", b"PAR1"))


def test_csv_with_quotes_and_line_breaks(write: Write) -> None:
    path = write("a.csv", 'text,label\r\n"a ""quoted"", text\nof two lines",1\r\n\r\nplain,0\r\n')
    assert read_rows(path) == [
        Row(1, {"text": 'a "quoted", text\nof two lines', "label": "1"}),
        Row(2, {"text": "plain", "label": "0"}),
    ]


def test_tsv_without_quotes_in_its_header_is_read_as_it_is(write: Write) -> None:
    path = write("a.tsv", 'sentence\tlabel\n"open quote\t1\nit \'s "fine" \t0\n')
    assert [row.fields["sentence"] for row in read_rows(path)] == ['"open quote', 'it \'s "fine" ']


def test_tsv_with_quotes_in_its_header_is_quoted(write: Write) -> None:
    path = write("a.tsv", '"sentence"\t"label"\n"a\tb ""c"""\t"1"\n')
    assert read_rows(path) == [Row(1, {"sentence": 'a\tb "c"', "label": "1"})]


def test_byte_order_mark_is_not_part_of_the_first_column(write: Write) -> None:
    assert read_rows(write("a.csv", b"\xef\xbb\xbftext\nhi\n")) == [Row(1, {"text": "hi"})]
    assert read_rows(write("a.jsonl", b'\xef\xbb\xbf{"text": "hi"}')) == [Row(1, {"text": "hi"})]


def test_long_fields(write: Write) -> None:
    assert len(read_rows(write("a.csv", "text\n" + "a" * 200_000 + "\n"))[0].fields["text"]) == 200_000


@pytest.mark.parametrize(
    ("name", "content", "problems"),
    [
        (
            "a.jsonl",
            '{"text": "one"}\n{"text": \n[1]\n"x"\n{"text": "\\ud800"}\n',
            [
                "row 2: not JSON: Expecting value at character 10",
                "row 3: is a JSON list, must be an object with columns",
                "row 4: is a JSON string, must be an object with columns",
                "row 5: it has half of a \\u escape pair",
            ],
        ),
        (
            "numbers.jsonl",
            '{"a": NaN}\n{"a": 1e999}\n{"a": ' + "9" * 5000 + "}\n",
            [
                "row 1: it has NaN, which JSON does not allow",
                "row 2: it has '1e999', which is not a finite number",
                "row 3: it has a number of 5000 digits",
            ],
        ),
        ("deep.jsonl", "[" * 200_000 + "\n", ["row 1: it has more than 32 levels"]),
        (
            "a.tsv",
            "text\tlabel\nfine\t1\nno label\n\nc\t1\tmore\n",
            [
                "row 2 (line 3): has 1 fields, the header names 2: text, label",
                "row 3 (line 5): has 3 fields, the header names 2: text, label",
            ],
        ),
        ("a.csv", 'text\nfine\n"never closed\n', ["row 2 (line 3): not csv: unexpected end of data"]),
        (
            "twice.csv",
            "text,text,\na,b,c\n",
            ["line 1: the header repeats columns: 'text'"],
        ),
        ("empty.jsonl", "", ["it has no rows"]),
        ("header.csv", "text,label\n", ["it has no rows"]),
        ("latin.csv", "text\nfine\ncaf\xe9\n".encode("latin-1"), ["line 3, byte 13 of the file: 0xe9"]),
        ("bom.csv", b"\xef\xbb\xbftext\n\xff", ["line 2, byte 8 of the file: 0xff"]),
        ("wide.csv", "text\nfine\n".encode("utf-16"), ["byte 0: it begins as a UTF-16 file"]),
        (
            "a.json",
            '[{"text": "one"}, 2, null]',
            ["row 2: is a JSON number, must", "row 3: is a JSON null, must"],
        ),
        ("b.json", '[{"text": "one"}', ["row 1: not JSON: Expecting ',' delimiter at character 17"]),
        ("d.jsonl", '[\n {"text": "one"},\n', ["not JSON: Expecting value at line 3, character 1"]),
        ("e.jsonl", '{"text": one}\n{"text": "two"}\n', ["row 1: not JSON: Expecting value at character 10"]),
        ("f.json", '{"columns": ["a"], "data": [[1, 2]]}', ["each list under data must have 1 values"]),
        ("c.json", "[]", ["it has no rows"]),
        (
            "a.txt",
            "",
            ["its name ends in '.txt'; known formats are .jsonl, .ndjson, .json, .csv, .tsv, .parquet"],
        ),
    ],
)
def test_problems_name_their_rows(write: Write, name: str, content: str | bytes, problems: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        read_rows(write(name, content))
    assert len(caught.value.problems) == len(problems)
    for message, expected in zip(caught.value.problems, problems, strict=True):
        assert message.startswith(expected)


def test_many_problems_are_counted(write: Write) -> None:
    with pytest.raises(DataError) as caught:
        read_rows(write("a.jsonl", "x\n" * 57))
    lines = str(caught.value).splitlines()
    assert lines[1].startswith("  - row 1: ")
    assert lines[-2] == "  - ... and 17 more (57 in all)"
    assert len(lines) == 1 + 41 + 1


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with raises(DataError, "file-missing"):
        read_rows(tmp_path / "a.jsonl")


def test_selection_in_file_order() -> None:
    assert select_rows(range(10), Selection(start=2, limit=3)) == [2, 3, 4]
    assert select_rows(range(4), Selection(start=2)) == [2, 3]


def test_shuffle_is_the_same_everywhere() -> None:
    # Philox 4x64-10 is fixed by its paper (doi 10.1145/2063384.2063405), so this order is too.
    assert select_rows(range(10), Selection(shuffle_seed=42)) == [7, 1, 6, 4, 3, 5, 9, 0, 2, 8]


@given(st.integers(1, 300), st.integers(0, 2**64 - 1), st.integers(1, 299))
def test_ranges_of_one_shuffle_share_no_row(count: int, seed: int, cut: int) -> None:
    train = select_rows(range(count), Selection(0, cut, seed))
    rest = select_rows(range(count), Selection(cut, None, seed)) if cut < count else []
    assert sorted([*train, *rest]) == list(range(count))


def test_a_selection_without_rows_is_refused() -> None:
    with raises(DataError, "selection-empty", containing="3"):
        select_rows([1, 2, 3], Selection(start=3))


def test_invalid_selections() -> None:
    with pytest.raises(ConfigError) as caught:
        Selection(start=-1, limit=0, shuffle_seed=-1)
    assert len(caught.value.problems) == 3


def test_all_of_sst2_is_read(shared: Path) -> None:
    path = shared / "data" / "sst2" / "train.tsv"
    rows = read_rows(path)
    assert len(rows) == 67_349
    assert {row.fields["label"] for row in rows} == {"0", "1"}
    assert rows[0] == Row(1, {"sentence": "hide new secretions from the parental units ", "label": "0"})
    assert rows[-1].number == 67_349


@pytest.mark.timeout(20)
def test_a_table_of_very_many_columns_is_read_in_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    header = "\t".join(f"c{number}" for number in range(100_000))
    path.write_text(f"{header}\n" + "a\n" * 1000)
    with raises(DataError, "rows-unreadable", containing="100000"):
        read_rows(path)
