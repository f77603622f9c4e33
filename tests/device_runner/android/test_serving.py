"""`prge android serve`: through the real adb and a real adb daemon, and what is refused before."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prge.formats.documents import parse_yaml
from prge.formats.stored_settings import is_signed_file, key_path
from prge.formats.tune_folder import resolve_bundle
from tests.bundles import make_bundle
from tests.device_runner.android.daemons import Daemon, end_jobs
from tests.device_runner.android.fake_adb import FakePhone
from tests.device_runner.android.test_command import tuning_of

PORT = 8123


class Server:
    """A server of `prge android serve`, and its client."""

    def __init__(self, daemon: Daemon, phone: Path, arguments: list[object]) -> None:
        self.daemon, self.phone, self.arguments = daemon, phone, arguments
        self.key = ""
        self.name = "server"

    def serve(self, *more: object, check: int = 0) -> str:
        """Run the command that starts the server, and return its output or error."""
        done = self.daemon.prge("serve", *self.arguments, *more, "--folder", self.phone, check=check)
        if "shown this once: " in done.stdout:
            self.key = done.stdout.split("shown this once: ")[1].split()[0]
        return done.stdout if check == 0 else done.stderr

    def ask(self, path: str, body: Any = None, key: str | None = None, port: int = PORT) -> tuple[int, Any]:
        """Send a request, and return status and body; status 0 if nobody listens."""
        return self.daemon.ask(port, path, self.key if key is None else key, body)

    def complete(self, prompt: str = "The film") -> str:
        """Return a completion of the model."""
        status, answer = self.ask("/v1/completions", {"model": "base", "prompt": prompt, "max_tokens": 2})
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    @property
    def job(self) -> Path:
        return self.phone / "jobs" / self.name

    def kill(self) -> None:
        """Kill the server, as a phone does if it is out of memory."""
        os.kill(int((self.job / "pid").read_text()), signal.SIGKILL)

    def kill_and_wait(self) -> None:
        """Kill the server, and wait until it listens again."""
        begun = self.listened()
        self.kill()
        self.wait(lambda: self.listened() > begun)

    def console(self) -> str:
        return (self.job / "console.txt").read_text()

    def wait(self, is_over: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not is_over():
            assert time.monotonic() < deadline, self.console()
            time.sleep(0.1)

    def listened(self) -> int:
        """Return how often the server began to listen."""
        return self.console().count("listening at")

    def status(self) -> str:
        return self.daemon.prge("status", self.name, "--folder", self.phone).stdout


@pytest.fixture
def server(daemon: Daemon, phone: Path, forward_bundle: Path) -> Iterator[Server]:
    arguments = ["--bundle", forward_bundle, "--port", PORT, "--threads", 1, "--memory", "400MB"]
    served = Server(daemon, phone, arguments)
    yield served
    daemon.adb("forward", "--remove-all")
    daemon.prge("stop", served.name, "--now", "--folder", phone, check=None)
    end_jobs(phone)
    daemon.prge("clean", served.name, "--folder", phone, check=None)


@pytest.mark.whole
def test_a_server_answers_clients_with_the_key(server: Server) -> None:
    output = server.serve()
    assert "server: running\n" in output and f"http://127.0.0.1:{PORT}/v1 on this computer" in output
    assert len(server.key) >= 32 and len(server.complete()) > 0
    assert [model["id"] for model in server.ask("/v1/models")[1]["data"]] == ["my bundle", "base"]
    # Apps of the phone get only these paths without the key.
    for path in ("/health", "/", "/page/app.js"):
        assert server.ask(path, key="")[0] == 200
    for path in ("/v1/models", "/v1/feedback", "/v1/adapters", "/v1/chat/completions", "/nothing"):
        assert server.ask(path, key="")[0] == server.ask(path, key=server.key[:-1])[0] == 401
    key = server.job / "key"
    assert key.stat().st_mode & 0o777 == 0o600 and key.read_text() == server.key
    # The key is in no list of processes, in no log, and in no file that apps can open.
    listed = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in listed if server.key.encode() in line]
    files = [path for name in ("jobs", "runs", "tmp", "data") for path in (server.phone / name).rglob("*")]
    others = [path for path in files if path.is_file() and path != key]
    assert not [path for path in others if server.key.encode() in path.read_bytes()]
    assert server.job.stat().st_mode & 0o077 == 0 and server.job.parent.stat().st_mode & 0o077 == 0
    assert parse_yaml((server.job / "settings.yaml").read_text())["memory"] == 400_000_000
    assert server.status() == f"server: running, http://127.0.0.1:{PORT}/v1\n"
    assert "listening at" in server.daemon.prge("logs", "server", "--folder", server.phone).stdout
    stopped = server.daemon.prge("stop", "server", "--folder", server.phone).stdout
    assert stopped == "server: ended\n" and server.ask("/health")[0] == 0
    assert server.daemon.adb("forward", "--list").stdout.strip() == ""
    # A second stop does nothing; a new start has another key, --resume the last one.
    assert server.daemon.prge("stop", "server", "--folder", server.phone).stdout == "server: ended\n"
    before = server.key
    server.serve()
    assert server.key != before and server.complete()
    server.daemon.prge("stop", "server", "--folder", server.phone)
    again = ["serve", "--resume", "server", "--folder", server.phone]
    assert "key" not in server.daemon.prge(*again).stdout and server.complete()
    missing = server.daemon.prge("serve", "--resume", "nobody", "--folder", server.phone, check=2).stderr
    assert "has no server 'nobody'" in missing
    assert "server is a server" in server.daemon.prge(
        "run", "--resume", "server", "--folder", server.phone, check=2
    ).stderr  # fmt: skip


@pytest.mark.whole
def test_a_server_that_is_killed_restarts_and_a_crash_loop_ends(server: Server) -> None:
    server.serve()
    process = server.job / "pid"
    first = process.read_text()
    server.kill_and_wait()
    assert process.read_text() != first and server.complete()
    assert server.status() == f"server: running, restarts 1, http://127.0.0.1:{PORT}/v1\n"
    for count in range(2, 6):
        server.kill_and_wait()
        assert (server.job / "restarts").read_text() == f"{count}\n"
    server.kill()
    server.wait(lambda: (server.job / "rc").is_file())
    assert server.status() == "server: killed with code 137, restarts 5\n"
    assert "Killed" not in server.serve() and server.complete()
    # If it is stopped while it waits to be restarted, it doesn't restart.
    server.kill()
    server.wait(lambda: "started again" in server.console().splitlines()[-1])
    output = server.daemon.prge("stop", "server", "--folder", server.phone).stdout
    # It ends by itself or by one of the signals, before or after the restart.
    assert output.startswith(
        ("server: ended", "server: killed with code 137", "server: killed with code 143")
    )
    time.sleep(2)
    assert server.ask("/health")[0] == 0 and "running" not in server.status()


@pytest.mark.whole
def test_a_server_survives_adb_and_restarts_after_the_phone_was_off(server: Server) -> None:
    server.serve()
    pid = (server.job / "pid").read_text()
    server.daemon.adb("kill-server")
    server.daemon.kill()
    assert server.ask("/health")[0] == 0 and Path(f"/proc/{pid.strip()}").exists()
    server.daemon.start()
    assert server.status() == "server: running, not forwarded: prge android serve --resume server\n"
    output = server.serve()
    assert "key" not in output and server.complete() and (server.job / "pid").read_text() == pid
    # As if the phone was off: no process is left, and the boot id differs.
    keeper = Path(f"/proc/{pid.strip()}/stat").read_text().rpartition(")")[2].split()[1]
    os.kill(int(keeper), signal.SIGKILL)
    os.kill(int(pid), signal.SIGKILL)
    (server.job / "boot").write_text("another\n")
    server.daemon.adb("forward", "--remove-all")
    assert server.status() == "server: killed\n"
    assert "key" not in server.serve() and server.complete()


@pytest.mark.whole
def test_ports_and_names_that_are_in_use_are_refused(server: Server, tmp_path: Path) -> None:
    holder = server.daemon.network.start(
        [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", PORT],
        stdout=-3, stderr=-3, cwd=tmp_path,
    )  # fmt: skip
    try:
        server.wait(lambda: server.ask("/")[0] == 200)
        output = server.serve(check=2)
        assert f"Cannot forward port {PORT} of this computer" in output and "--computer-port" in output
        assert not (server.job / "key").exists()
        free = server.serve("--computer-port", 0)
        port = int(free.split("127.0.0.1:")[1].split("/")[0])
        assert port != PORT and server.ask("/v1/models", port=port)[0] == 200
        assert f"http://127.0.0.1:{PORT}/v1 on the phone" in free
    finally:
        holder.kill()
        holder.wait()
    assert "is running" in server.serve("--slots", 2, "--computer-port", 0, check=2)
    other = server.serve("--name", "other", "--computer-port", port, check=2)
    assert "other: ended with code 2" in other and "Address already in use" in other
    # The port that is forwarded to the first server stays.
    assert server.ask("/v1/models", port=port)[0] == 200
    (server.phone / "runs/mine").mkdir(parents=True, exist_ok=True)
    (server.phone / "runs/mine/journal.jsonl").write_text("{}\n")
    assert "mine is a run" in server.serve("--name", "mine", check=2)


@pytest.mark.whole
def test_a_server_learns_and_rows_are_pulled_only_on_request(server: Server, tmp_path: Path) -> None:
    server.serve("--learn", "--learn-every", 3, "--learn-epochs", 2)
    for number in range(3):
        body = {"model": "my bundle", "prompt": f"Question {number}", "max_tokens": 2}
        _, answer = server.ask("/v1/completions", body)
        judged = {"id": answer["id"], "correction": " a secret word"}
        assert server.ask("/v1/feedback", judged)[1]["kept"]
    adapters = server.phone / "runs/server/adapters.jsonl"
    server.wait(lambda: adapters.read_text().count('"judged"') == 1, 60)
    pull = ["pull", "server", "--out", tmp_path / "here", "--folder", server.phone]
    server.daemon.prge(*pull)
    names = {str(path.relative_to(tmp_path / "here")) for path in (tmp_path / "here").rglob("*")}
    assert "adapters.jsonl" in names and "feedback.jsonl" not in names and "run.lock" not in names
    files = [path for path in (tmp_path / "here").rglob("*") if path.is_file()]
    assert not [path for path in files if b"secret word" in path.read_bytes()]
    server.daemon.prge(*pull, "--rows")
    assert (tmp_path / "here/feedback.jsonl").read_text().count("secret word") == 3


@pytest.fixture
def fake(tmp_path: Path) -> FakePhone:
    """Return a phone whose servers listen at once and do nothing."""
    phone = FakePhone(tmp_path / "fake")
    run = phone.folder / "runtime" / "run.sh"
    run.write_text("#!/bin/sh\ncat \"$5\" >&2\necho 'listening at nowhere'\nexec sleep 30\n")
    return phone


@pytest.fixture
def stopped(fake: FakePhone) -> Iterator[FakePhone]:
    yield fake
    end_jobs(fake.folder)


def settings_of(phone: FakePhone, name: str = "server") -> dict[str, Any]:
    return dict(parse_yaml((phone.folder / "jobs" / name / "settings.yaml").read_text()))


def test_adapters_and_files_are_sent(stopped: FakePhone, tmp_path: Path) -> None:
    peft = tmp_path / "mine"
    peft.mkdir()
    (peft / "adapter_config.json").write_text("{}")
    (stopped.folder / "runs/first").mkdir(parents=True)
    (tmp_path / "chat.jinja").write_text("x")
    bundle = make_bundle(tmp_path / "bundle")
    arguments = ["--bundle", bundle, "--adapter", f"{peft}/", f"two={peft}", "first", "base", "--port", 9000]
    arguments += ["--chat-template", tmp_path / "chat.jinja", "--pause-above-celsius", 41, "--feedback"]
    output = stopped.prge("serve", *arguments).stdout
    assert "server: running" in output
    settings = settings_of(stopped)
    sent, second, first, base = settings["adapter"]
    assert sent.startswith("mine=") and Path(sent[5:], "adapter_config.json").is_file()
    assert second == f"two={sent[5:]}" and base == "base"
    assert first == f"first={stopped.folder}/runs/first"
    assert (settings["model_name"], settings["port"], settings["pause_above_celsius"]) == ("bundle", 9000, 41)
    assert Path(settings["chat_template"]).read_text() == "x" and Path(settings["bundle"]).is_dir()
    assert settings["feedback"] == f"{stopped.folder}/runs/server/feedback.jsonl"
    assert (stopped.folder / "jobs/server/key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "fake" / "adb.forwarded").read_text() == "tcp:9000 tcp:9000\n"


@pytest.mark.parametrize("learns", [False, True])
def test_rows_of_a_tuning_are_sent_only_to_a_server_that_learns(
    stopped: FakePhone, tmp_path: Path, learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = tuning_of(tmp_path / "tuned")
    (tuning / "rows").mkdir()
    (tuning / "rows/train.jsonl").write_text("{}\n")
    (tuning / "rows/test.jsonl").write_text("{}\n")
    (tuning / "run/config.yaml").write_text("{}")
    stopped.prge("serve", tuning, *(["--learn"] if learns else []))
    settings = settings_of(stopped)
    there = Path(settings["bundle"])
    names = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    rows = {"rows/train.jsonl", "run/config.yaml", "run/journal.jsonl"} if learns else set()
    assert names == {"config.yaml", "tune.json", "run/final/adapter_config.json", *rows}
    assert Path(parse_yaml((there / "config.yaml").read_text())["bundle"]).is_dir()
    # The phone's prge accepts the settings, which are signed with its key; the key stays the same.
    monkeypatch.setenv("XDG_CONFIG_HOME", f"{stopped.folder}/config")
    assert is_signed_file(there / "config.yaml") and resolve_bundle(there).is_dir()
    assert key_path().stat().st_mode & 0o777 == 0o600
    before = key_path().read_bytes()
    stopped.prge("serve", tuning, *(["--learn"] if learns else []))
    assert key_path().read_bytes() == before
    assert settings["model_name"] == "tuned"
    assert settings.get("learn") == (f"{stopped.folder}/runs/server" if learns else None)


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (("--when", "charging"), "--when needs --learn"),
        (("--learn", "--when", "full"), "--when has 'full', must be charging"),
        (("--port", "0"), "--port is 0"),
        (("--port", "70000"), "--port is 70000, must be at most 65535"),
        (("--computer-port", "70000"), "--computer-port is 70000"),
        (("--pause-below-battery", "101"), "--pause-below-battery is 101"),
        (("--host", "0.0.0.0"), "--host is not a flag of this verb"),
        (("--api-key-file", "x"), "--api-key-file is not a flag of this verb"),
        (("--name", "../x"), "can't be the name of a run"),
        (("--adapter", "nobody"), "no run of that name on fake"),
    ],
)
def test_unusable_settings_are_refused(
    fake: FakePhone, tmp_path: Path, arguments: tuple[str, ...], output: str
) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    assert output in fake.prge("serve", "--bundle", bundle, *arguments, code=2).stderr
    assert not (fake.folder / "jobs").exists() or not list((fake.folder / "jobs").glob("*/key"))


def test_the_browser_is_opened_at_the_page(
    stopped: FakePhone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >"{tmp_path}/opened"\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    stopped.prge("serve", "--bundle", make_bundle(tmp_path / "bundle"), "--open")
    deadline = time.monotonic() + 10
    while not (tmp_path / "opened").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (tmp_path / "opened").read_text() == "http://127.0.0.1:8000/\n"
