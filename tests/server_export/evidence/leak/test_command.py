"""`prge leak` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prge.errors import ConfigError, DataError
from prge.verbs.settings import parse_settings
from server_export.evidence.leak.command import leak, main
from server_export.evidence.leak.settings import LeakSettings
from tests.refusals import raises
from tests.tiny_models import save_model

FEW = "--samples 16 --guesses 200 --matching-steps 5 --limit 1 --seeds 1 2".split()


def read(words: str) -> LeakSettings:
    return parse_settings(LeakSettings, words.split(), "prge leak")


def told(_: str) -> None:
    """Nobody reads it."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with `model`, `rows.jsonl` of texts and `visits.jsonl` of a task."""
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
    words = f"--model {folder / 'model'} --rows {folder / 'rows.jsonl'} --lengths 3 2 --steps 2 --noise 0 4"
    out = f"--json {folder / 'leak.json'} --out {folder / 'leak.svg'}"
    assert main([*words.split(), *out.split(), *FEW]) == 0
    found = json.loads((folder / "leak.json").read_text(encoding="utf-8"))
    assert {"recovered_exact", "recovered_top", "recovered_scalars", "recovered_prior"} <= found.keys()
    cases = [(line["report"], line["length"], line["noise"]) for line in found["table"]]
    each = [(3, 0), (2, 0), (3, 4)]
    assert cases == [(report, *case) for report in ("exact", "top", "scalars") for case in each]
    noisy = {line["report"]: line["epsilon"] for line in found["table"] if line["noise"]}
    assert noisy["exact"] > 0
    assert noisy["scalars"] > noisy["exact"]
    assert noisy["top"] is None
    assert all(
        line["tokens"]["least"] <= line["tokens"]["mean"] <= line["tokens"]["most"] for line in found["table"]
    )
    picture = (folder / "leak.svg").read_text(encoding="utf-8")
    assert picture.startswith("<svg ")
    assert all(name in picture for name in ("exact", "top", "scalars", "without a report", "unknown tokens"))
    assert "not safe" in capsys.readouterr().out


def test_labels_of_a_task_are_attacked(folder: Path) -> None:
    words = f"--model {folder / 'model'} --rows {folder / 'rows.jsonl'} --task {folder / 'task.yaml'}"
    found = leak(read(f"{words} --lengths 1 --ranks 16 --reports exact {' '.join(FEW)}"), told)
    assert found["table"][0]["label"]["mean"] == 1
    assert found["recovered_exact"] == 1


def test_layers_that_keep_their_weights_transposed_are_attacked(folder: Path) -> None:
    save_model(folder / "gpt2", "gpt2")
    words = f"--model {folder / 'gpt2'} --rows {folder / 'rows.jsonl'} --lengths 2 --reports exact"
    found = leak(read(f"{words} {' '.join(FEW)}"), told)
    assert found["recovered_exact"] > found["recovered_prior"]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--rows rows.jsonl", "--model"),
        ("--preset demo --lengths", "--lengths"),
        ("--preset demo --bundle b", "--target-modules"),
        ("--model m --rows r --bundle b --ranks 4 8", "--ranks"),
        ("--preset demo --out picture.txt", "--out is picture.txt"),
        ("--preset demo --top-share 2", "--top-share is 2"),
    ],
)
def test_settings_that_cannot_be(words: str, value: str) -> None:
    with raises(ConfigError, "settings-unusable", saying=value):
        read(words)


def test_too_few_rows(folder: Path) -> None:
    settings = LeakSettings(model=str(folder / "model"), rows=folder / "rows.jsonl", lengths=[40])
    with raises(DataError, "rows-too-few", saying="40"):
        leak(settings, told)


def test_an_encoder_is_refused(folder: Path) -> None:
    save_model(folder / "encoder", "bert")
    settings = LeakSettings(model=str(folder / "encoder"), rows=folder / "rows.jsonl")
    with raises(ConfigError, "encoder-not-attacked", saying="encoder"):
        leak(settings, told)


def test_each_list_is_varied_alone() -> None:
    settings = read("--preset demo --lengths 8 4 --steps 10 1 --batches 1 2 --noise 0")
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
    found = json.loads((tmp_path / "leak.json").read_text(encoding="utf-8"))
    assert found["recovered_exact"] > 0.9
    assert found["recovered_prior"] < 0.5
    assert found["recovered_scalars"] > found["recovered_prior"]
    noisy = next(line for line in found["table"] if line["report"] == "exact" and line["noise"] == 10)
    assert abs(noisy["tokens"]["mean"] - found["recovered_prior"]) < 0.15
