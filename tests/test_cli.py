"""The command line: verbs, help without heavy imports, and errors as messages with exit code 2."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prge import __version__
from prge.cli.main import VERB_GROUPS, VERBS, Verb, main
from prge.errors import RunError
from prge.system.packages import install_extra_command
from tests.bundles import PROGRAM, make_bundle

HEAVY = {"torch", "executorch", "transformers", "torchao", "peft"}


def prge(*arguments: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a child process."""
    command = [sys.executable, "-m", "prge.cli.main", *arguments]
    return subprocess.run(command, text=True, timeout=60, check=False, **streams)


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Call a verb that fails, and return its message."""

    def call(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        message = capsys.readouterr().err
        assert message.startswith("prge") and "Traceback" not in message
        return message

    return call


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["-h"], ["help"]):
        assert main(arguments) == 0
        text = capsys.readouterr().out
        assert all(f"\n  {name} " in text and verb.help in text for name, verb in VERBS.items())


def test_verbs_are_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    groups = capsys.readouterr().out.split("\n\n")[2:-1]
    assert [text.partition(":\n")[0] for text in groups] == [*VERB_GROUPS]
    listed = [[line.split()[0] for line in text.splitlines()[1:]] for text in groups]
    assert listed == [[*verbs] for verbs in VERB_GROUPS.values()]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"prge {__version__}\n"


def test_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exprot"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "prge: error: There is no verb 'exprot' of prge.",
        "  Did you mean `prge export`?",
    ]
    assert main(["zzz"]) == 2
    assert "`prge --help` lists the verbs" in capsys.readouterr().err
    assert main(["train"]) == 2
    assert "Did you mean `prge tune`?" in capsys.readouterr().err


def test_help_of_a_verb_imports_nothing_heavy() -> None:
    code = f"""
import sys
from prge.cli.main import VERBS, main
for verb in VERBS:
    assert main([verb, "--help"]) == 0
    assert not {HEAVY!r} & set(sys.modules), verb
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert [f"usage: prge {verb}" in done.stdout for verb in VERBS] == [True] * len(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_unknown_flag_of_a_verb_is_an_error_with_code_2(verb: str, fails: Callable[..., str]) -> None:
    message = fails(verb, "--no-such-flag")
    assert message.startswith(f"prge {verb}: error:") and "--no-such-flag" in message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("nonsense", "There is no verb 'nonsense' of prge"),
        ("inspect", "--bundle is missing"),
        ("inspect nowhere", "nowhere is not a bundle"),
        ("inspect damaged", "has 0 bytes, the manifest says 512"),
        ("report nowhere", "nowhere is not a run"),
        ("report empty --out x.svg", "nothing measured yet"),
        ("inspect --config bad.yaml", "json must be true or false, not 'much'"),
        ("report empty --out x.bmp", "must end in .html or .svg"),
    ],
)
def test_errors_end_with_code_2_and_no_traceback(
    arguments: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[..., str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (make_bundle(tmp_path / "damaged") / PROGRAM).write_bytes(b"")
    (tmp_path / "bad.yaml").write_text("runz: 3\njson: much\n", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    assert expected in fails(*arguments.split())


def test_debug_keeps_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRGE_DEBUG", "1")
    with pytest.raises(RunError):
        main(["report", "nowhere"])


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    child = prge("inspect", str(make_bundle(tmp_path / "bundle")), stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (child.returncode, child.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("arguments", [["inspect"], ["--help"], ["inspect", "--help"]])
def test_output_that_can_not_be_written_is_an_error(tmp_path: Path, arguments: list[str]) -> None:
    bundle = [str(make_bundle(tmp_path / "bundle"))] if arguments == ["inspect"] else []
    with open("/dev/full", "w") as full:
        child = prge(*arguments, *bundle, stdout=full, stderr=subprocess.PIPE)
    assert child.returncode == 2
    assert child.stderr.endswith(": No space left on device\n")
    assert "Traceback" not in child.stderr and "Exception ignored" not in child.stderr


def test_closed_standard_files_change_no_exit_code(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    for arguments, code in ((["inspect", str(bundle)], 0), (["inspect", "nowhere"], 2)):
        assert prge(*arguments, preexec_fn=lambda: os.closerange(0, 3)).returncode == code


def _raising(error: BaseException) -> Callable[[list[str]], int]:
    def work(argv: list[str]) -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (RunError("in use", remedy="wait"), 2, "prge inspect: error: in use\n  wait\n"),
        (KeyboardInterrupt(), 130, "prge inspect: interrupted\n"),
        (FileNotFoundError(2, "No such file", "x.pte"), 2, "prge inspect: error: x.pte: No such file\n"),
        (
            OSError(28, "No space left on device"),
            2,
            "prge inspect: error: a write: No space left on device\n",
        ),
        (
            MemoryError("7 TiB"),
            2,
            "prge inspect: error: There is not enough memory: 7 TiB\n"
            "  Close other programs, give more memory, or use a smaller model or fewer rows.\n",
        ),
        (SystemExit(0), 0, ""),
        (SystemExit(None), 0, ""),
        (SystemExit(3), 3, ""),
        (SystemExit("stopped"), 1, "prge inspect: stopped\n"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch.nn"),
            2,
            "prge inspect: error: The package torch is not installed.\n"
            f"  {install_extra_command('')}\n  `prge doctor` shows what is missing.\n",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes_and_messages_of_exceptions(
    error: BaseException,
    code: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("PRGE_DEBUG", raising=False)
    monkeypatch.setattr("device_runner.inspect_bundle.main", _raising(error))
    assert main(["inspect"]) == code
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("error", [ValueError("a mistake of ours"), OSError("library"), ImportError("cycle")])
def test_defects_keep_their_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("device_runner.inspect_bundle.main", _raising(error))
    with pytest.raises(type(error)):
        main(["inspect"])


def test_the_report_of_a_defect_has_no_values_of_flags() -> None:
    code = (
        "import sys; from prge.cli import main as cli; import device_runner.inspect_bundle as module; "
        "module.main = lambda argv: {}['a defect']; "
        "sys.argv[1:] = ['inspect', '--bundle', '/secret', '--json=secret', '--not a flag', '--json']; "
        "sys.exit(cli.main())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PRGE_DEBUG"}
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, env=environment
    )
    assert (child.returncode, child.stdout) == (1, "")
    *lines, last = child.stderr.splitlines()
    assert lines[0].startswith("Traceback") and lines[-1] == "KeyError: 'a defect'"
    assert last == (
        f"prge inspect: This is a defect of prge {__version__}: please report it with the traceback above "
        "and the command `prge inspect --bundle --json`"
    )


def test_interruption_in_a_child_process_is_130(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from prge.cli import main as cli; "
        "import device_runner.inspect_bundle as module; "
        # A shell starts background jobs with the signal ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "module.main = lambda argv: os.kill(os.getpid(), signal.SIGINT) or 0; sys.exit(cli.main(['inspect']))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert child.returncode == 130
    assert child.stderr == "prge inspect: interrupted\n"


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_a_verb_has_its_module_and_an_extra_of_the_package(verb: Verb) -> None:
    main_function = importlib.import_module(verb.module).main
    assert list(inspect.signature(main_function).parameters) == ["argv"]
    assert verb.extra in {"", *(importlib.metadata.metadata("prge").get_all("Provides-Extra") or [])}
