"""`prge serve`: access rules, which are checked before a model is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_runner import serve
from device_runner.serving.listen_settings import read_api_keys
from device_runner.serving.settings import ServeSettings
from device_runner.session.generation import adapters_by_name
from prge.errors import BundleError, ConfigError
from tests.numpy_generation_engine import make_adapter
from tests.refusals import raises

EMPTY = ["", " ", "\n", "\t \r\n"]


def refused(*arguments: object, code: str = "settings-unusable") -> str:
    with raises(ConfigError, code) as caught:
        serve.main(["--bundle", "nothing", *map(str, arguments)])
    return str(caught.value)


@pytest.mark.parametrize("key", EMPTY)
def test_an_empty_key_is_refused(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(key)
    assert str(tmp_path / "key") in refused("--api-key-file", tmp_path / "key", code="api-key-unusable")
    monkeypatch.setenv("PRGE_API_KEY", key)
    assert "PRGE_API_KEY" in refused(code="api-key-unusable")


@pytest.mark.parametrize("key", ["two words", "schlüssel", "a\nb c", "\0"])
def test_a_key_that_no_header_can_carry_is_refused(key: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(key)
    assert str(tmp_path / "key") in refused("--api-key-file", tmp_path / "key", code="api-key-unusable")


def test_a_key_comes_from_a_file_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(tmp_path) in refused("--api-key-file", tmp_path, code="file-unreadable")
    (tmp_path / "key").write_text("x" * 5000)
    assert "4096" in refused("--api-key-file", tmp_path / "key", code="file-unreadable")
    (tmp_path / "key").write_text("of-the-file\n")
    monkeypatch.setenv("PRGE_API_KEY", " of-the-environment\n")
    assert read_api_keys(tmp_path / "key") == ("of-the-file",)
    assert read_api_keys(None) == ("of-the-environment",)
    monkeypatch.delenv("PRGE_API_KEY")
    assert read_api_keys(None) == ()
    (tmp_path / "key").write_text("one\r\n\n  two \n")
    assert read_api_keys(tmp_path / "key") == ("one", "two")


@pytest.mark.parametrize("arguments", [["--api-key", ""], ["--api-key="], ["--api_key=secret"]])
def test_a_key_on_the_command_line_is_refused(arguments: list[str]) -> None:
    result = refused(*arguments, code="api-key-in-command")
    assert "--api-key-file" in result and "PRGE_API_KEY" in result and "secret" not in result


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "0"])
def test_other_machines_may_connect_with_a_key_or_on_request(host: str) -> None:
    settings = ServeSettings(Path("nothing"), host=host)
    with raises(ConfigError, "settings-unusable", containing=f"--host {host}"):
        settings.access((), True)
    settings.access(("secret",), True)
    ServeSettings(Path("nothing"), host=host, insecure=True).access((), True)
    with raises(ConfigError, "settings-unusable", containing="--insecure"):
        ServeSettings(Path("nothing"), insecure=True).access(("secret",), True)


def test_flags_of_learning_need_the_flag_learn(tmp_path: Path) -> None:
    result = refused("--replay", 0.1, "--kept", "rows.jsonl", "--when", "charging")
    assert all(flag in result for flag in ("--replay", "--kept", "--when"))
    result = refused("--learn", tmp_path, "--feedback", "feedback.jsonl", "--learn-every", 2)
    assert "--feedback" in result and "--learn-every" in result
    assert "--learn-objective needs --learn" in refused("--learn-objective", "kto")


def test_this_machine_needs_no_key() -> None:
    ServeSettings(Path("nothing")).access((), False)
    with raises(BundleError, "not-a-bundle"):
        serve.main(["--bundle", "nothing"])


def test_names_of_models_are_escaped_for_json() -> None:
    adapter = make_adapter()
    assert list(adapters_by_name([("first", adapter), ("b\udcff", adapter)])) == ["first", "b\\udcff"]


def test_a_key_file_that_others_can_read_causes_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key"
    path.write_text("secret\n")
    for mode in (0o600, 0o400):
        path.chmod(mode)
        assert read_api_keys(path) == ("secret",) and capsys.readouterr().err == ""
    for mode in (0o644, 0o640):
        path.chmod(mode)
        assert read_api_keys(path) == ("secret",)
        message = capsys.readouterr().err
        assert f"whose mode is {mode:04o}: chmod 600 {path}" in message and "secret" not in message
