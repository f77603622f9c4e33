"""Tests of the page's files: vendored ones, security headers, and access without a key."""

from __future__ import annotations

import hashlib
import json
import re
from string import Formatter

import pytest
from starlette.testclient import TestClient

from device_runner.serving.access import Access
from device_runner.serving.app import make_watch_app
from device_runner.serving.page.runs import Runs
from device_runner.serving.page.static import FOLDER, translator
from prge.report import rendering

# npm's htm 3.1.1, preact/standalone.module.js.
VENDORED = "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7"


@pytest.fixture
def client(tmp_path) -> TestClient:
    return TestClient(make_watch_app(Runs(tmp_path), Access(("secret",))), "http://localhost")


def test_vendored_files_are_unchanged_and_have_their_licences() -> None:
    assert hashlib.sha256((FOLDER / "preact.js").read_bytes()).hexdigest() == VENDORED
    assert "Apache License" in (FOLDER / "LICENSE.htm").read_text()
    assert "The MIT License" in (FOLDER / "LICENSE.preact").read_text()


def test_only_the_page_and_its_files_need_no_key(client: TestClient) -> None:
    for path in (
        "/",
        "/training",
        *(f"/page/{path.name}" for path in FOLDER.iterdir() if path.suffix in TYPES),
    ):
        assert client.get(path).status_code == 200, path
    for path in (
        "/v1/about",
        "/v1/runs",
        "/v1/runs/events?run=.",
        "/v1/runs/events?key=secret",
        "/x",
        "/pagex",
    ):
        assert client.get(path).status_code == 401, path
    assert client.post("/v1/runs/stop?run=.", json={}).status_code == 401
    assert client.get("/v1/about", headers={"Authorization": "Bearer secret"}).json()["talks"] is False


TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".json": "application/json",
         ".svg": "image/svg+xml"}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["..%2fstatic.py", "LICENSE.htm%2f..%2f..%2fruns.py", "%2e%2e/runs.py", "x.js", ""]
)
def test_no_other_file_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_every_response_forbids_loading_from_elsewhere(client: TestClient) -> None:
    for path, media_type in (
        ("/", "text/html; charset=utf-8"),
        ("/page/app.js", "text/javascript; charset=utf-8"),
    ):
        headers = client.get(path).headers
        assert headers["content-type"] == media_type
    for path in ("/", "/page/style.css", "/v1/about", "/health", "/none"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        )
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
    assert client.get("/page/app.js", headers={"Origin": "http://evil.example"}).status_code == 403


def test_the_page_has_no_foreign_urls_and_no_inline_script_or_style() -> None:
    for path in FOLDER.iterdir():
        if path.suffix in TYPES and path.name != "preact.js":
            urls = re.findall(r"https?://[^\s\"'<>]+", path.read_text(encoding="utf-8"))
            assert urls in ([], ["http://www.w3.org/2000/svg"]), path
    index = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script[^>]*>[^<]|<style|style=|\son[a-z]+=", index)


def test_every_text_exists_in_both_languages_and_is_used() -> None:
    table = json.loads((FOLDER / "texts.json").read_text(encoding="utf-8"))
    english, german = table["en"], table["de"]
    assert english.keys() == german.keys()
    for name, text in english.items():
        assert (
            german[name].count("{}")
            == text.count("{}")
            == len([*Formatter().parse(text)]) - (text[-2:] != "{}")
        )
    scripts = [path.read_text(encoding="utf-8") for path in FOLDER.glob("*.js") if path.name != "preact.js"]
    # Calls such as t("save") and t(is_message ? "message" : "text").
    calls = re.findall(r"\bt\(([^()]*)\)", "\n".join(scripts))
    used = {key for call in calls for key in re.findall(r'"(\w+)"', call)}
    assert len(used) > 50 and used <= english.keys()
    word = translator("de")
    assert word("loss") == "Verlust" and word("something else") == "something else"
    assert translator("en")("loss") == translator("../de")("loss") == "loss"
    # The page's colours are those of reports.
    style = (FOLDER / "style.css").read_text()
    for colour in re.findall(r"--(?:text|muted|page|box|line): (#\w+)", rendering.PAGE.read_text()):
        assert colour in style
