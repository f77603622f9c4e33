"""Tests that foreign web pages and greedy clients can do nothing to a server with runs."""

from __future__ import annotations

import http.client
import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from device_runner.serving.page.runs import MAX_STREAMS
from tests.device_runner.reporting.run_folders import write_run
from tests.device_runner.serving.page.browsing import Served, active_run, served


def send_request(server: Served, method: str, path: str, body: str | None = None, **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
    return connection.getresponse()


def test_fifty_streams_at_once_are_bounded(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    with served(runs=tmp_path) as server:
        opened = [send_request(server, "GET", "/v1/runs/events?run=run") for _ in range(50)]
        statuses = [answer.status for answer in opened]
        assert statuses.count(200) == MAX_STREAMS and statuses.count(429) == 50 - MAX_STREAMS
        assert opened[0].readline().startswith(b"data: {")
        assert send_request(server, "GET", "/v1/models").status == 200
        for answer in opened:
            answer.close()
        assert any(send_request(server, "GET", "/v1/runs/events?run=run").status == 200 for _ in range(100))


OUTSIDE = [
    "../secret",
    "%2e%2e/secret",
    "..%5csecret",
    "/etc",
    "run/../../secret",
    "run%00",
    "",
    "run&run=../secret",
]


def test_no_path_leads_out_of_the_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "secret")
    write_run(tmp_path / "runs" / "run")
    with served(runs=tmp_path / "runs") as server:
        for path in OUTSIDE:
            for method, target in (("GET", "events"), ("POST", "stop")):
                answer = send_request(
                    server, method, f"/v1/runs/{target}?run={path}", Content_Type="application/json"
                )
                assert answer.status == 404, (target, path)


def test_a_key_in_a_url_has_no_effect_and_is_not_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with served(runs=tmp_path, key="secret") as server:
        for path in (
            "/v1/about?key=secret",
            "/v1/models?api_key=secret",
            "/v1/runs?Authorization=Bearer%20secret",
        ):
            answer = send_request(server, "GET", path)
            assert answer.status == 401 and b"secret" not in answer.read()
        assert send_request(server, "GET", "/?key=secret").status == 200
        assert (
            send_request(server, "GET", "/v1/none?key=secret", Authorization="Bearer secret")
            .read()
            .count(b"secret")
            == 0
        )
    assert "secret" not in "".join(capfd.readouterr())


EVIL = """<!doctype html><title>begun</title><iframe src="{url}/training"></iframe>
<iframe src="{url}/v1/runs/events?run=run"></iframe><img src="{url}/v1/runs/events?run=run">
<script src="{url}/page/api.js" type="module"></script>
<form method="post" enctype="text/plain" action="{url}/v1/runs/stop?run=run" target="frame">
<input name="a"></form>
<iframe name="frame"></iframe><script>
const stop = "{url}/v1/runs/stop?run=run", json = {{ "Content-Type": "application/json" }};
const text = {{ "Content-Type": "text/plain" }};
const tried = [["cors", json], ["no-cors", json], ["no-cors", text]].map(([mode, headers]) =>
  fetch(stop, {{ method: "POST", mode, headers, body: "{{}}" }}).then(a => a.type, () => "refused"));
tried.push(fetch("{url}/v1/runs").then(a => a.text(), () => "refused"));
tried.push(fetch("{url}/v1/models", {{ mode: "no-cors" }}).then(a => a.type, () => "refused"));
document.forms[0].submit();
Promise.all(tried).then(outcomes => setTimeout(() => document.title = "tried " + outcomes.join(" "), 1000));
</script>"""


@contextmanager
def foreign_server(text: str) -> Iterator[int]:
    """Yield a foreign web server with one page."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.whole
@pytest.mark.parametrize("host", ["evil.localhost", "127.0.0.1"])
def test_a_foreign_page_stops_no_run_and_reads_nothing(
    tmp_path: Path, visit: Callable[..., Any], host: str
) -> None:
    """The server accepts pages from 127.0.0.1 at another port as local, but not from `evil.localhost`."""
    expected_errors = ("CORS", "blocked", "Content Security", "frame", "400", "403", "415", "429")
    with active_run(tmp_path / "run") as process, served(runs=tmp_path) as server:
        with foreign_server(EVIL.format(url=server.url)) as port:
            page = visit(f"http://{host}:{port}/", expected=expected_errors)
            page.wait_for_function("() => document.title.startsWith('tried')")
            cors, plain_json, plain, read, unread = page.title().split()[1:]
            assert (cors, read) == ("refused", "refused")
            assert {plain_json, plain, unread} <= {"refused", "opaque"}
            assert all("training" not in (frame.title() or "").lower() for frame in page.frames[1:])
        assert process.poll() is None
        # No page could stop the run.
        own = visit(f"{server.url}/training", expected=("429",))
        own.get_by_role("button", name="Stop after this step").click()
        own.get_by_text("The run stops after this step.").wait_for()
        assert process.wait(10) == 0


def test_a_link_to_the_page_sends_no_message(tmp_path: Path, visit: Callable[..., Any]) -> None:
    """A link must not send a message in the name of the person who follows it."""
    with served(feedback=tmp_path / "feedback.jsonl") as server:
        for query in ("?q=Hello", "?prompt=Hello&model=base&submit=1", "?message=Hello#q=Hello", "#Hello"):
            page = visit(server.url)
            sent: list[str] = []
            page.on("request", lambda request, sent=sent: sent.append(request.method))
            page.goto(f"{server.url}/{query}")
            page.reload()
            page.get_by_role("textbox").first.wait_for()
            page.wait_for_timeout(300)
            assert page.locator(".turns > li").count() == 0
            assert page.get_by_role("textbox").first.input_value() == ""
            assert {*sent} == {"GET"}
