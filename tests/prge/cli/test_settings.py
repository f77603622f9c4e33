"""Settings: one dataclass defines flags, YAML keys and help, and all problems are reported at once."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from prge.cli.field_types import Bytes, Paths
from prge.cli.help import field_help
from prge.cli.inputs import RewardInput
from prge.cli.outputs import OutputFile, OutputFolder
from prge.cli.settings import (
    parse_settings,
    read_settings,
    read_stored,
    settings_from_mapping,
    settings_to_yaml,
    with_absolute_paths,
)
from prge.errors import ConfigError, RunError
from prge.formats.stored_settings import write_settings
from tests.refusals import raises


@dataclass(frozen=True)
class Sample:
    """Has a field of every type that verbs use."""

    bundle: Path
    """Folder of the bundle."""
    learning_rate: float = 1e-3
    """Step size, 100% of it."""
    queries: int | None = None
    """Directions a step."""
    estimator: Literal["antithetic", "one-sided"] = "antithetic"
    """How scalars become a gradient."""
    label_words: tuple[str, ...] = ()
    """Words of the classes."""
    overwrite: bool = False
    """Replace what is there."""
    out: Path | None = None
    """Where to write."""
    targets: str | list[str] | None = None
    """Modules, or one expression."""
    name: str = "x"
    shift: float = 0.0
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    rows: Paths | None = None
    """Rows, in one file or several."""

    def __post_init__(self) -> None:
        if self.queries == 13:
            raise ConfigError("no luck:", ["--queries is 13"], code="no-luck")


def parse(*arguments: str, positional: tuple[str, ...] = ()) -> Sample:
    return parse_settings(Sample, arguments, "prge sample", positional)


def problems(*arguments: str, positional: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(*arguments, positional=positional)
    return caught.value.problems


def test_flags_of_every_type() -> None:
    settings = parse(
        *("--bundle", "b", "--learning-rate=1e-2", "--queries", "4", "--estimator", "one-sided"),
        *("--label-words", " terrible", " great", "--overwrite", "--out", "o", "--name", "123"),
        *("--columns", "{text: sentence}"),
    )
    assert settings == Sample(
        bundle=Path("b"),
        learning_rate=0.01,
        queries=4,
        estimator="one-sided",
        label_words=(" terrible", " great"),
        overwrite=True,
        out=Path("o"),
        name="123",
        columns={"text": "sentence"},
    )


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--learning_rate", "0.5"], "learning_rate", 0.5),
        (["--shift", "-0.5"], "shift", -0.5),
        (["--shift", "-.5"], "shift", -0.5),
        (["--queries", "null"], "queries", None),
        (["--overwrite", "false"], "overwrite", False),
        (["--overwrite=true"], "overwrite", True),
        (["--name", "--", "b"], "name", None),
        (["--name=--odd"], "name", "--odd"),
        (["--name="], "name", ""),
        (["--label-words", "a,b", "1"], "label_words", ("a,b", "1")),
        (["--label-words=one"], "label_words", ("one",)),
        (["--name", "a", "--name", "b"], "name", "b"),
        (["--overwrite", "--no-overwrite"], "overwrite", False),
        (["--rows", "a"], "rows", Path("a")),
        (["--rows", "a", "b"], "rows", (Path("a"), Path("b"))),
        (["--rows", "a", "--rows=b"], "rows", (Path("a"), Path("b"))),
        (["--rows", "null"], "rows", None),
        (["--targets", "a", "b"], "targets", ["a", "b"]),
        (["--targets", "null"], "targets", ["null"]),
    ],
)
def test_flags_have_several_spellings(arguments: list[str], key: str, value: Any) -> None:
    if value is None and key == "name":
        assert problems("--bundle", "b", *arguments)[0] == "--name needs a value: a text"
    else:
        assert getattr(parse("--bundle", "b", *arguments), key) == value


def test_a_list_may_come_after_several_flags() -> None:
    assert parse("--bundle", "b", "--label-words", "a", "b", "--label-words=c").label_words == ("a", "b", "c")


def test_positional_fields() -> None:
    assert parse("b", "--overwrite", positional=("bundle",)).bundle == Path("b")
    assert parse("--bundle", "b", positional=("bundle",)).bundle == Path("b")
    settings = parse("b", "x", "y", positional=("bundle", "label_words"))
    assert settings.label_words == ("x", "y")
    assert problems("b", "c", positional=("bundle",)) == [f"'c' {ALONE}"]


ALONE = "stands alone: which flag does it belong to?"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # A word after a flag with one value is not taken as the bundle if the bundle is given.
        (["--bundle", "b", "--out", "o", "c"], [f"'c' {ALONE} Quote values with spaces: --out 'o c'"]),
        (["--bundle", "b", "--name", "Once", "upon", "a", "--queries", "3"], [
            f"'upon' {ALONE} Quote values with spaces: --name 'Once upon a'", f"'a' {ALONE}",
        ]),
        (["b", "--queries", "3", "4"], [f"'4' {ALONE}"]),
        (["--bundle=b", "--", "c"], [f"'c' {ALONE}"]),
        (["--bundle=b", "--overwrite", "c"], [f"'c' {ALONE}"]),
        (["--bundle=b", "--label-words=a", "c"], [f"'c' {ALONE}"]),
        (["b", "--rows"], ["--rows needs a value: a path or a list of paths or null"]),
        (["b", "--label-words", "--overwrite"], ["--label-words needs a value: a list of texts"]),
    ],
)  # fmt: skip
def test_no_argument_of_a_command_line_is_ignored(arguments: list[str], message: list[str]) -> None:
    result = problems(*arguments, positional=("bundle",))
    assert [problem for problem in result if "must be" not in problem] == message


def test_a_repeated_flag_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        parse("--bundle", "b", "--queries", "3", "--queries", "4", "--overwrite", "--no-overwrite").queries
        == 4
    )
    assert capsys.readouterr().err.splitlines() == [
        "prge sample: --queries is given 2 times, the last one counts: '3', '4'",
        "prge sample: --overwrite is given 2 times, the last one counts: True, False",
    ]
    parse("--bundle", "b", "--name", "a", "--name", "a", "--label-words", "a", "--label-words", "b")
    assert capsys.readouterr().err == ""


def test_a_list_that_took_the_value_of_another_setting_is_reported(tmp_path: Path) -> None:
    arguments = ["--rows", "a.jsonl", str(tmp_path)]
    (problem,) = problems(*arguments, positional=("bundle",))
    assert problem == f"--bundle is missing: a path; --rows took {str(tmp_path)!r} as well"
    for word in ("b", "b" * 5000, "b\0"):
        message = problems("--label-words", "a", word, positional=("bundle",))
        assert message == ["--bundle is missing: a path"]


def test_several_files_are_given_in_yaml_and_in_python(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("bundle: b\nrows: [x.jsonl, y.jsonl]\n", encoding="utf-8")
    expected = Sample(Path("b"), rows=(Path("x.jsonl"), Path("y.jsonl")))
    assert parse("--config", str(path)) == expected
    assert (
        settings_from_mapping(Sample, {"bundle": "b", "rows": ["x.jsonl", Path("y.jsonl")]}, "run()")
        == expected
    )
    assert settings_from_mapping(Sample, {"bundle": "b", "rows": ["x.jsonl"]}, "run()").rows == Path(
        "x.jsonl"
    )
    assert parse("--config", str(path), "--rows", "z").rows == Path("z")
    whole = with_absolute_paths(expected)
    assert whole.rows == (Path("x.jsonl").resolve(), Path("y.jsonl").resolve())
    path.write_text(settings_to_yaml(whole), encoding="utf-8")
    assert read_settings(Sample, path, "prge sample") == whole
    path.write_text("bundle: b\nrows: []\n", encoding="utf-8")
    assert "rows must be a path or a list of paths or null, not []" in problems("--config", str(path))[0]
    path.write_text("bundle: [a, b]\n", encoding="utf-8")
    assert "bundle must be a path, not ['a', 'b']" in problems("--config", str(path))[0]


def test_a_setting_that_is_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("bundle: a\nrows: x.jsonl\nrows: y.jsonl\n", encoding="utf-8")
    assert problems("--config", str(path))[0] == f"{path} can't be read: it has the key 'rows' twice"


def test_flags_win_over_files_and_later_files_over_earlier(tmp_path: Path) -> None:
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("bundle: b\nlearning_rate: 1e-2\nqueries: 2\nlabel_words: [a, b]\n", encoding="utf-8")
    second.write_text("queries: 3\n", encoding="utf-8")
    settings = parse("--learning-rate", "0.5", "--config", str(first), f"--config={second}")
    assert settings == Sample(bundle=Path("b"), learning_rate=0.5, queries=3, label_words=("a", "b"))


def test_all_problems_of_file_and_flags_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "learning-rate: 1\nqueries: many\nestimator: both\nlabel_words: good\noverwrite: 3\nlerning_rate: 2",
        encoding="utf-8",
    )
    message = problems("--config", str(path), "--quieries", "3", "--learning-rate", "fast", "--name")
    assert message == [
        "--quieries is not a flag of this verb; did you mean --queries?",
        "--name needs a value: a text",
        f"{path}: 'learning-rate' is not a setting of this verb; did you mean learning_rate?",
        f"{path}: 'lerning_rate' is not a setting of this verb; did you mean learning_rate?",
        f"{path}: queries must be a whole number or null, not 'many'",
        f"{path}: estimator must be one of antithetic, one-sided, not 'both'",
        f"{path}: label_words must be a list of texts, not 'good'",
        f"{path}: overwrite must be true or false, not 3",
        "--learning-rate must be a number, not 'fast'",
        "--bundle is missing: a path",
    ]


def test_message_names_the_verb(tmp_path: Path) -> None:
    with raises(ConfigError, "settings-unusable", containing="`prge sample --help`"):
        parse("--bundle", "b", "--queries", "1.5")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n- b\n", "holds a list, not a mapping of settings"),
        (b"a: [1\n", "can't be read: not YAML: line 2, column 1"),
        (b"queries: " + b"[" * 50_000, "can't be read: it has more than 32 levels"),
        (b"queries: 2020-99-99\n", "must be a whole number or null, not '2020-99-99'"),
        (b"queries: " + b"a" * 5000, "must be a whole number or null, not 'aaaa"),
        (b"learning_rate: true\n", "learning_rate must be a number, not True"),
        (b"name: no\n", "name must be a text, not False"),
        (b"label_words: [a, 1]\n", "label_words must be a list of texts, not ['a', 1]"),
        (b"queries: 2.5\n", "queries must be a whole number or null, not 2.5"),
        (b"targets: 3\n", "targets must be a text or a list of texts or null, not 3"),
        (b"bundle: null\n", "bundle must be a path, not None"),
        (b"bundle: ''\n", "bundle must be a path, not ''"),
        (b"3: x\n", "3 is not a setting"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    (problem,) = problems("--config", str(path), *([] if b"bundle" in content else ["--bundle", "b"]))
    assert problem.startswith(str(path))
    assert message in problem


def test_a_missing_file_and_a_missing_file_name_are_reported(tmp_path: Path) -> None:
    assert "can't be read: No such file" in problems("--config", str(tmp_path / "no"), "--bundle", "b")[0]
    assert problems("--bundle", "b", "--config") == ["--config needs a value: a path"]


def test_checks_across_fields_are_the_dataclass_own() -> None:
    with raises(ConfigError, "no-luck", containing="13"):
        parse("--bundle", "b", "--queries", "13")


@dataclass(frozen=True)
class Everywhere:
    """Settings of all types that name paths."""

    STORED: ClassVar = "config.yaml"

    out: OutputFolder
    rows: Paths | None = None
    bundle: Path | None = None
    json: OutputFile | None = None
    task: str | None = None
    words: list[str] = field(default_factory=list)
    resume: Path | None = None


@dataclass(frozen=True)
class Rewarded:
    """Settings with a reward."""

    STORED: ClassVar = "config.yaml"

    out: OutputFolder
    reward: RewardInput | None = None
    resume: Path | None = None


def test_code_of_a_foreign_folder_is_refused_wherever_it_is(tmp_path: Path) -> None:
    """The function of a reward runs with the user's rights; rules in YAML do not."""
    config, arguments = tmp_path / "config.yaml", ["--resume", str(tmp_path)]
    for word in (f"{tmp_path}/reward.py:score", f"{tmp_path}/reward.py", "/etc/reward.yaml"):
        config.write_text(f"reward: {word}\n")
        with raises(ConfigError, "path-outside", containing=word) as caught:
            parse_settings(Rewarded, arguments, "prge")
        assert "or code" in caught.value.what
        parse_settings(Rewarded, [*arguments, "--reward", word], "prge")
    config.write_text(f"reward: {tmp_path}/reward.yaml\n")
    assert parse_settings(Rewarded, arguments, "prge").reward == f"{tmp_path}/reward.yaml"


def test_outside_paths_in_settings_of_a_foreign_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All outside paths are reported at once, with what to type; inside paths and the user's own are used."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_text("")
    folder = tmp_path / "run"
    folder.mkdir()
    config = folder / "config.yaml"
    arguments = ["--resume", str(folder)]
    inside = (
        f"rows: [{folder}/a, run/b]\nbundle: {folder}\njson: {folder}/out.json\ntask: sst2\nwords: [/a]\n"
    )
    config.write_text(inside)
    result = parse_settings(Everywhere, arguments, "prge")
    assert result.rows == (folder / "a", Path("run/b")) and result.json == folder / "out.json"
    outside = (
        f"rows: [{folder}/a, ../x]\nbundle: ~/b\njson: new.json\ntask: secret\nout: /etc\nresume: /etc\n"
    )
    config.write_text(outside)
    with pytest.raises(ConfigError) as caught:
        parse_settings(Everywhere, arguments, "prge")
    assert caught.value.problems == [
        f"rows: '{folder}/a', '../x'",
        "bundle: '~/b'",
        "json: 'new.json'",
        "task: 'secret'",
    ]
    again = ["--rows", f"{folder}/a", "../x", "--bundle", "~/b", "--json", "new.json", "--task", "secret"]
    assert caught.value.remedy.endswith(f"give them again: {shlex.join(again)}")
    settings = parse_settings(Everywhere, [*arguments, *again], "prge")
    assert settings.out == folder and settings.resume == folder
    with pytest.raises(ConfigError) as caught:
        parse_settings(Everywhere, [*arguments, *again[:3], *again[5:]], "prge")
    assert caught.value.problems == ["bundle: '~/b'"]
    with pytest.raises(ConfigError):
        settings_from_mapping(Everywhere, {"resume": folder}, "tune()")
    with pytest.raises(ConfigError) as caught:
        read_stored(Everywhere, config, "prge", {"out", "rows", "bundle", "json", "resume"}, "do so")
    assert caught.value.problems == ["task: 'secret'"] and caught.value.remedy == "do so"
    write_settings(config, outside)
    assert parse_settings(Everywhere, arguments, "prge") == settings
    config.write_text("rows: &a /etc/passwd\nbundle: *a\n")
    with raises(ConfigError, "settings-unusable", containing="*a"):
        parse_settings(Everywhere, arguments, "prge")
    config.write_text("rows: {a: /etc/passwd}\nbundle: 3\njson: [[/etc/passwd]]\n")
    with raises(ConfigError, "settings-unusable", containing="bundle"):
        parse_settings(Everywhere, arguments, "prge")


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Settings that verbs share."""

    threads: int | None = None
    """How many."""


@dataclass(frozen=True)
class Stored(Shared):
    """Has presets, and can be resumed."""

    STORED: ClassVar = "config.yaml"
    PRESETS: ClassVar = Path()

    out: Path
    resume: Path | None = None
    preset: str | None = None
    steps: int = 10


def test_resume_reads_the_settings_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("out: elsewhere\nsteps: 3\nthreads: 2\n", encoding="utf-8")
    expected = Stored(tmp_path, resume=tmp_path, steps=4, threads=2)  # `out` of the file is not used
    assert parse_settings(Stored, ["--resume", str(tmp_path), "--steps", "4"], "prge") == expected
    assert settings_from_mapping(Stored, {"resume": tmp_path, "steps": 4}, "run") == expected
    with raises(RunError, "not-a-run", containing="nowhere"):
        parse_settings(Stored, ["--resume=nowhere"], "prge")


@dataclass(frozen=True)
class Kept(Shared):
    """Settings that are stored in a folder once it was used."""

    KEPT: ClassVar = "own.yaml"

    folder: Path
    """Where they are."""
    rows: Path
    """What is needed at first."""


def test_a_folder_that_was_used_has_settings(tmp_path: Path) -> None:
    with raises(ConfigError, "settings-unusable", containing="--rows"):
        parse_settings(Kept, ["--folder", str(tmp_path)], "prge")
    write_settings(tmp_path / "own.yaml", "rows: there\nthreads: 2\n")
    result = parse_settings(Kept, ["--folder", str(tmp_path), "--threads", "3"], "prge")
    assert result == Kept(tmp_path, Path("there"), threads=3)


def test_a_preset_comes_before_all_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stored, "PRESETS", tmp_path)
    (tmp_path / "large.yaml").write_text("steps: 99\nthreads: 2\n", encoding="utf-8")
    arguments = ["--out", "o", "--steps", "4", "--preset", "large"]
    assert parse_settings(Stored, arguments, "prge") == Stored(Path("o"), preset="large", steps=4, threads=2)
    with raises(ConfigError, "settings-unusable", containing="large"):
        parse_settings(Stored, ["--preset", "larg"], "prge")
    with pytest.raises(ConfigError) as caught:
        parse_settings(Stored, ["--preset", "small", "--steps", "many"], "prge")
    assert caught.value.problems == [
        "--preset is 'small', must be one of large",
        "--steps must be a whole number, not 'many'",
        "--out is missing: a path",
    ]


def test_shared_settings_are_a_group_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(Stored, ["--help"], "prge stored")
    message = capsys.readouterr().out
    assert message.startswith("usage: prge stored [flags]\n\nHas presets, and can be resumed.\n\nsettings:\n")
    assert "\nSettings that verbs share:\n  --threads N                 How many.\n" in message


def test_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("", encoding="utf-8")
    assert parse("--config", str(path), "--bundle", "b") == Sample(Path("b"))


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--nonsense", "--help", positional=("bundle",))
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "usage: prge sample BUNDLE [flags]" in text
    assert "Step size, 100% of it. (default: 0.001)" in text
    assert "Folder of the bundle. (required)" in text
    assert "--estimator {antithetic,one-sided}" in text


def test_help_of_fields_includes_those_of_a_base() -> None:
    @dataclass(frozen=True)
    class Larger(Sample):
        steps: int = 3
        """How long."""

    helps = field_help(Larger)
    assert (helps["steps"], helps["out"]) == ("How long.", "Where to write.")


def test_the_output_of_print_config_is_a_settings_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--bundle", "b", "--label-words", " a", "b", "--queries", "3"]
    with pytest.raises(SystemExit) as caught:
        parse(*arguments, "--print-config")
    assert caught.value.code == 0
    path = tmp_path / "config.yaml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert "# Where to write." in path.read_text(encoding="utf-8")
    assert read_settings(Sample, path, "prge sample") == parse(*arguments)


@hypothesis_settings(max_examples=40)
@given(
    st.builds(
        Sample,
        bundle=st.text("abc/. é", min_size=1).map(Path),
        learning_rate=st.floats(1e-30, 1e30),
        shift=st.floats(allow_nan=False, allow_infinity=False),
        queries=st.none() | st.integers(14, 1 << 20),
        estimator=st.sampled_from(["antithetic", "one-sided"]),
        label_words=st.lists(st.text(max_size=5)).map(tuple),
        overwrite=st.booleans(),
        targets=st.none() | st.just(".*proj") | st.lists(st.text(max_size=5)),
        out=st.none() | st.just(Path("o")),
        rows=st.none() | st.just(Path("r")) | st.just((Path("r"), Path("s"))),
        name=st.text(),
        columns=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    )
)
def test_yaml_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, settings: Sample) -> None:
    path = tmp_path_factory.getbasetemp() / "settings.yaml"
    path.write_bytes(settings_to_yaml(settings).encode())
    assert list(yaml.safe_load(path.read_bytes())) == [item.name for item in dataclasses.fields(Sample)]
    assert read_settings(Sample, path, "prge sample") == settings


@dataclass(frozen=True)
class Bounded:
    """Has a number of bytes."""

    memory: Bytes | None = None
    """What may be held."""


@pytest.mark.parametrize(
    ("text", "count"),
    [("512", 512), ("200MB", 200_000_000), ("1.5 GB", 1_500_000_000), ("64KiB", 65536), ("2kb", 2000)],
)
def test_bytes_may_have_a_unit(text: str, count: int) -> None:
    assert parse_settings(Bounded, ["--memory", text], "prge").memory == count


@pytest.mark.parametrize("text", ["1.5", "MB", "2 TB", "-1MB", "many", ""])
def test_invalid_numbers_of_bytes(text: str) -> None:
    with raises(ConfigError, "settings-unusable", containing="--memory"):
        parse_settings(Bounded, [f"--memory={text}"], "prge")
