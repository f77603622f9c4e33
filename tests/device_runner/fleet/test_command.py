"""Tests of what the verbs of `prge fleet` check before they start anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prge.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["srve"], "There is no verb 'srve' of prge fleet.\n  Did you mean `prge fleet serve`?"),
        (["serve", "--bundle", "b", "--out", "o"], "give --keys or --insecure, and not both"),
        (
            ["serve", "--bundle", "b", "--out", "o", "--insecure", "--keys", "k"],
            "give --keys or --insecure, and not both",
        ),
        (["serve", "--resume", "nowhere"], "nowhere is not a run: it has no serve.yaml"),
        (["status", "nowhere"], "nowhere does not contain a fleet"),
        (["join", "--server", "h:1", "--folder", "d", "--insecure"], "--bundle is missing: a path"),
        (
            ["join", "--server", "h:1", "--folder", "d", "--bundle", "b", "--train", "t"],
            "give --keys or --insecure, and not both",
        ),
    ],
)
def test_missing_settings_are_reported(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fleet", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_fleet_of_an_earlier_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agreement = {"name": "old", "plan": {"directions": "common", "most_epsilon": 0.0}, "bundle": "b" * 64}
    (tmp_path / "agreement.json").write_text(json.dumps(agreement))
    (tmp_path / "serve.yaml").write_text("directions: common\n")
    (tmp_path / "journal.jsonl").touch()
    for arguments in (["serve", "--resume", str(tmp_path)], ["status", str(tmp_path)]):
        assert main(["fleet", *arguments]) == 2
        output = capsys.readouterr().err
        assert "version of prge" in output and "Use the version that started the fleet" in output


def test_keys_are_made_and_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cryptography")
    assert main(["fleet", "keys", str(tmp_path / "keys"), "--devices", "one"]) == 0
    output = capsys.readouterr().out
    assert f"{tmp_path}/keys/server: for the server; its certificate is valid until 2" in output
    assert f"{tmp_path}/keys/devices/one: move it to the device one, and keep no copy" in output
    assert main(["fleet", "keys", str(tmp_path / "keys"), "--devices", "two"]) == 0
    assert "copy it to the server and restart the server" in capsys.readouterr().out
