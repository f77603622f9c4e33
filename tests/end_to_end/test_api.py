"""`import prge`: the code of its documentation runs, and its functions accept what the verbs accept."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import prge
from tests.refusals import raises

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_the_code_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "server_export").symlink_to(REPOSITORY / "server_export")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(
        r"```python\n(.*?)```", (REPOSITORY / "docs/get-started/python.md").read_text(), re.DOTALL
    ):
        capsys.readouterr()
        exec(block, names)
    output = capsys.readouterr().out
    assert "run(): 'lr' is not a setting of this verb; use learning_rate" in output
    assert "--out is missing: a path" in output
    run, tuned = names["run"], names["tuned"]
    assert isinstance(run, prge.Run) and isinstance(tuned, prge.Tuned)
    assert run.before and run.best and run.best["loss"] < run.before["loss"]
    assert (run.adapter / "adapter_model.safetensors").is_file()
    assert (tuned.adapter / "adapter_config.json").is_file()
    assert (tmp_path / "curves.svg").read_text(encoding="utf-8").startswith("<svg")
    assert prge.open_bundle(tuned.bundle).sha256 == prge.open_bundle("bundle").sha256


def test_modules_are_imported_when_they_are_used() -> None:
    code = "import sys, prge; print(sorted(name for name in sys.modules if name.startswith('prge.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="has no attribute 'tunes'"):
        prge.tunes  # type: ignore[attr-defined]  # noqa: B018


def test_bad_settings_are_errors_of_prge() -> None:
    with raises(prge.PrgeError, "settings-unusable", containing="--steps is 0"):
        prge.run(bundle=Path("b"), train=Path("t"), out=Path("o"), steps=0)
    with raises(prge.PrgeError, "settings-unusable", containing="quantize"):
        prge.export(model="m", out=Path("o"), quantize=8)  # type: ignore[arg-type]
    with raises(prge.PrgeError, "not-a-bundle", containing="nowhere"):
        prge.load("nowhere")
