"""`prge leak` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prge.cli.settings import parse_settings
from prge.errors import ConfigError, DataError
from server_export.evidence.leak.command import leak, main
from server_export.evidence.leak.settings import LeakSettings
from tests.refusals import raises
from tests.tiny_models import save_model

FEW = "--samples 16 --guesses 200 --matching-steps 5 --limit 1 --seeds 1 2".split()


def parse(arguments: str) -> LeakSettings:
    return parse_settings(LeakSettings, arguments.split(), "prge leak")


def output(_: str) -> None:
    """Discard a line of output."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with `model`, `rows.jsonl` of texts and `task.yaml`."""
    save_model(tmp_path / "model", "llama")
    lines = [
        json.dumps({"text": f"some {word} here", "label": index % 2}) for index, word in enumerate("abcd")
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "task.yaml").write_text(
        'name: letters\ntemplate: "{text} ?"\nlabel_words: {0: " no", 1: " yes"}\ncolumns: {label: label}\n'
        "metric: accuracy\n",
        encoding="utf-8",
    )
    return tmp_path


def test_figures_and_picture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        f"--model {folder / 'model'} --rows {folder / 'rows.jsonl'} --lengths 3 2 --steps 2 --noise 0 4"
    )
    out = f"--json {folder / 'leak.json'} --out {folder / 'leak.svg'}"
    assert main([*arguments.split(), *out.split(), *FEW]) == 0
    result = json.loads((folder / "leak.json").read_text(encoding="utf-8"))
    assert {"recovered_exact", "recovered_top", "recovered_scalars", "recovered_prior"} <= result.keys()
    cases = [(line["report"], line["length"], line["noise"]) for line in result["table"]]
    each = [(3, 0), (2, 0), (3, 4)]
    assert cases == [(report, *case) for report in ("exact", "top", "scalars") for case in each]
    noisy = {line["report"]: line["epsilon"] for line in result["table"] if line["noise"]}
    assert noisy["exact"] > 0
    assert noisy["scalars"] > noisy["exact"]
    assert noisy["top"] is None
    assert all(
        line["tokens"]["least"] <= line["tokens"]["mean"] <= line["tokens"]["most"]
        for line in result["table"]
    )
    picture = (folder / "leak.svg").read_text(encoding="utf-8")
    assert picture.startswith("<svg ")
    assert all(name in picture for name in ("exact", "top", "scalars", "without a report", "unknown tokens"))
    assert "not safe" in capsys.readouterr().out


def test_labels_of_a_task_are_attacked(folder: Path) -> None:
    arguments = f"--model {folder / 'model'} --rows {folder / 'rows.jsonl'} --task {folder / 'task.yaml'}"
    result = leak(parse(f"{arguments} --lengths 1 --ranks 16 --reports exact {' '.join(FEW)}"), output)
    assert result["table"][0]["label"]["mean"] == 1
    assert result["recovered_exact"] == 1


def test_layers_that_keep_their_weights_transposed_are_attacked(folder: Path) -> None:
    save_model(folder / "gpt2", "gpt2")
    arguments = f"--model {folder / 'gpt2'} --rows {folder / 'rows.jsonl'} --lengths 2 --reports exact"
    result = leak(parse(f"{arguments} {' '.join(FEW)}"), output)
    assert result["recovered_exact"] > result["recovered_prior"]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("--rows rows.jsonl", "--model"),
        ("--preset demo --lengths", "--lengths"),
        ("--preset demo --bundle b", "--target-modules"),
        ("--model m --rows r --bundle b --ranks 4 8", "--ranks"),
        ("--preset demo --out picture.txt", "--out is picture.txt"),
        ("--preset demo --top-share 2", "--top-share is 2"),
    ],
)
def test_impossible_settings_are_refused(arguments: str, value: str) -> None:
    with raises(ConfigError, "settings-unusable", containing=value):
        parse(arguments)


def test_too_few_rows_are_refused(folder: Path) -> None:
    settings = LeakSettings(model=str(folder / "model"), rows=folder / "rows.jsonl", lengths=[40])
    with raises(DataError, "rows-too-few", containing="40"):
        leak(settings, output)


def test_an_encoder_is_refused(folder: Path) -> None:
    save_model(folder / "encoder", "bert")
    settings = LeakSettings(model=str(folder / "encoder"), rows=folder / "rows.jsonl")
    with raises(ConfigError, "encoder-not-attacked", containing="encoder"):
        leak(settings, output)


def test_each_list_is_varied_alone() -> None:
    settings = parse("--preset demo --lengths 8 4 --steps 10 1 --batches 1 2 --noise 0")
    cases = [(case.report, case.length, case.steps, case.batch) for case in settings.cases()]
    assert [case[1:] for case in cases if case[0] == "exact"] == [(8, 1, 1), (4, 1, 1), (8, 1, 2)]
    assert [case[1:] for case in cases if case[0] == "scalars"] == [
        (8, 10, 1),
        (4, 10, 1),
        (8, 10, 2),
        (8, 1, 1),
    ]


@pytest.mark.whole
def test_the_demo_leaks(tmp_path: Path) -> None:
    fewer = ["--lengths", "8", "--steps", "10", "--seeds", "42", "1337"]
    assert main(["--preset", "demo", *fewer, "--json", str(tmp_path / "leak.json")]) == 0
    result = json.loads((tmp_path / "leak.json").read_text(encoding="utf-8"))
    assert result["recovered_exact"] > 0.9
    assert result["recovered_prior"] < 0.5
    assert result["recovered_scalars"] > result["recovered_prior"]
    noisy = next(line for line in result["table"] if line["report"] == "exact" and line["noise"] == 10)
    assert abs(noisy["tokens"]["mean"] - result["recovered_prior"]) < 0.15
