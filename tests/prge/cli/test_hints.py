"""Names of other tools: errors say which setting or verb of prge to use, for all of them at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_runner.serving.settings import ServeSettings
from device_runner.session.generation import ChatSettings, GenerateSettings
from device_runner.session.settings import RunSettings
from prge.cli import hints as habits
from prge.cli.bounds import flag
from prge.cli.hints import suggest_setting
from prge.cli.main import VERBS, main
from prge.cli.settings import Settings, parse_settings
from prge.errors import ConfigError
from prge.formats.documents import read_yaml
from server_export.publishing.settings import PublishConfig
from server_export.settings import ExportConfig
from server_export.tune.settings import TuneSettings

SETTINGS = (
    *(TuneSettings, ExportConfig, PublishConfig),
    *(RunSettings, GenerateSettings, ChatSettings, ServeSettings),
)


def problems(settings_type: type[Settings], *arguments: str, positional: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_settings(settings_type, arguments, "prge", positional)
    return caught.value.problems


@pytest.mark.parametrize(
    ("word", "actual"),
    [
        ("--lr", "--learning-rate"),
        ("--dataset", "--data"),
        ("--train_file", "--data"),
        ("--output_dir", "--out"),
        ("-o", "--out"),
        ("--model_name_or_path", "--model"),
        ("--num_train_epochs", "--epochs"),
        ("--num-train-epochs", "--epochs"),
        ("--per_device_train_batch_size", "--batch-size"),
        ("--max_seq_length", "--sequence-length"),
        ("--lora_r", "--rank"),
        ("--iters", "--steps"),
        ("--num-layers", "--adapt-layers"),
        ("--load_in_4bit", "--quantize 8da4w"),
        ("--LR", "--learning-rate"),
    ],
)
def test_a_flag_of_another_tool_names_that_of_the_verb(word: str, actual: str) -> None:
    message = problems(TuneSettings, word, "1", "--data", "d", "--model", "m", "--out", "o")
    assert message == [f"{word} is not a flag of this verb; use {actual}"]


@pytest.mark.parametrize(
    ("settings_type", "word", "message"),
    [
        (RunSettings, "--dataset", "; use --train"),
        (RunSettings, "--gradient_accumulation_steps", ": --batch-size counts the examples of an"),
        (RunSettings, "--lora_r", "; other verbs call it --rank"),
        (ExportConfig, "--lora_rank", "; use --rank"),
        (PublishConfig, "--push-to-hub", "; use --push"),
        (RunSettings, "--push-to-hub", ": `prge publish RUN --out FOLDER --push OWNER/NAME` does that"),
        (TuneSettings, "--bf16", ": adapters are float32; --quantize of `prge tune` and"),
        (TuneSettings, "--max_seq_lenght", "; did you mean --sequence-length?"),
        (TuneSettings, "--lerning_rate", "; did you mean --learning-rate?"),
        (ChatSettings, "--max_new_tokens", "; use --max-tokens"),
        (RunSettings, "--model", ": this verb takes a --bundle, which `prge export` makes from"),
        (TuneSettings, "--zzzzz", ""),
    ],
)
def test_hints_depend_on_the_verb(settings_type: type[RunSettings], word: str, message: str) -> None:
    (first, *_) = problems(settings_type, word, "3")
    assert first.startswith(f"{word} is not a flag of this verb{message}")


def test_all_problems_are_reported_once_with_missing_settings() -> None:
    arguments = "--lr 1e-4 --dataset rows.jsonl --num_train_epochs 3 --modle m --foo --seed many"
    assert problems(TuneSettings, *arguments.split(), positional=("data",)) == [
        "--lr is not a flag of this verb; use --learning-rate",
        "--dataset is not a flag of this verb; use --data",
        "--num_train_epochs is not a flag of this verb; use --epochs",
        "--modle is not a flag of this verb; did you mean --model?",
        "--foo is not a flag of this verb",
        "--seed must be a whole number, not 'many'",
        "--out is missing: a path",
    ]


def test_a_missing_alternative_is_reported_with_required_settings() -> None:
    assert problems(TuneSettings) == [
        "--data is missing: a path or a list of paths",
        "--out is missing: a path",
        "--model or --bundle is missing",
    ]
    both = problems(TuneSettings, "--data", "d", "--out", "o", "--model", "m", "--bundle", "b")
    assert both == ["--model and --bundle: give one of them"]


def test_keys_of_a_file_get_hints(tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yaml"
    file.write_text("base_model: m\nlora_r: 8\nsequence_len: 512\n", encoding="utf-8")
    message = problems(TuneSettings, "--config", str(file), "--data", "d", "--out", "o")
    assert message == [
        f"{file}: 'base_model' is not a setting of this verb; use model",
        f"{file}: 'lora_r' is not a setting of this verb; use rank",
        f"{file}: 'sequence_len' is not a setting of this verb; use sequence_length",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--data", "https://example.com/a.jsonl"],
            "--data is a URL, 'https://example.com/a.jsonl': prge doesn't",
        ),
        (["--data", "https://huggingface.co/datasets/a/b-c/tree/main"], "give the hub's name, a/b-c"),
        (
            ["--model", "https://huggingface.co/a/b"],
            "--model is a URL, 'https://huggingface.co/a/b': give the hub",
        ),
        (["--data", "file:///x/rows.jsonl"], "give the path, /x/rows.jsonl"),
        (["--task", "https://huggingface.co/a/b"], "prge doesn't read from URLs; download it"),
        (["--dev", "s3://bucket/a.jsonl"], "--dev is a URL, 's3://bucket/a.jsonl'"),
    ],
)
def test_a_url_is_quoted_as_it_was_typed(arguments: list[str], message: str) -> None:
    values = {"--data": "d", "--model": "m", "--out": "o", arguments[0]: arguments[1]}
    (problem,) = problems(TuneSettings, *(word for pair in values.items() for word in pair))
    assert message in problem


def test_a_misspelt_help_is_an_error_and_shows_no_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(TuneSettings, "--halp")[0] == "--halp is not a flag of this verb; did you mean --help?"
    assert capsys.readouterr().out == ""


def test_the_tables_name_only_settings_and_hide_none() -> None:
    tables = read_yaml(Path(habits.__file__).with_suffix(".yaml"))
    assert tables.keys() == {"renamed", "settings", "messages", "verbs"}
    actual = {word.partition("=")[0] for words in tables["settings"] for word in words.split()}
    actual |= tables["renamed"].keys()
    assert not [
        name
        for name in actual
        if not any(name in settings_type.__dataclass_fields__ for settings_type in SETTINGS)
    ]
    assert tables["verbs"].keys() <= VERBS.keys()
    expected = {
        name: [word for words in table.values() for word in words.split()] for name, table in tables.items()
    }
    unknown = [*expected["renamed"], *expected["settings"], *expected["messages"]]
    assert all(suggest_setting(name, actual, flag)[1] for name in unknown)
    assert not set(expected["renamed"]) & {*actual, *expected["settings"], *expected["messages"]}
    assert all(len(names) == len(set(names)) for names in expected.values())
    assert not set(expected["verbs"]) & VERBS.keys()


def test_a_newcomer_sees_the_hint_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--lr", "1e-4", "--dataset", "rows.jsonl", "--push-to-hub"]) == 2
    out, message = capsys.readouterr()
    assert out == "" and "Traceback" not in message
    assert message.startswith("prge tune: error: 5 settings can't be used:\n  - --lr is not a flag")
