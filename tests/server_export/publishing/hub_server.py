"""A hub on the loopback, with the part of its API that an upload needs, and a record of the requests."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from huggingface_hub import constants

from server_export.checkpoint.files import is_hub_reachable

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
OWNER = "me"


@dataclass
class Hub:
    """The state of the hub: repositories, their visibility and files, and all requests."""

    address: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    """Status of requests by a part of their path."""

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, Any]:
        """Return status and JSON for a request."""
        self.requests.append((method, path))
        for part, status in self.refused.items():
            if part in path:
                return status, {"error": f"refused; you sent {headers['Authorization']}"}
        if path.startswith("/lfs/"):
            oid = path.removeprefix("/lfs/")
            assert hashlib.sha256(body).hexdigest() == oid
            self.objects[oid] = body
            return 200, {}
        if headers["Authorization"] != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._created(json.loads(body))
        match = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+?)(?:\.git)?(/.*)?", path)
        assert match
        name, rest = match[1], match[2] or ""
        if name not in self.private:
            return 404, {"error": "Repository not found"}
        if not rest:
            return 200, {"id": name, "private": self.private[name]}
        if rest == "/preupload/main":
            files = [
                (each["path"], each["path"].endswith(".safetensors")) for each in json.loads(body)["files"]
            ]
            modes = [
                {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
                for path, large in files
            ]
            return 200, {"files": modes}
        if rest == "/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            actions = [{"upload": {"href": f"{self.address}/lfs/{each['oid']}"}} for each in objects]
            pairs = zip(objects, actions, strict=True)
            return 200, {"transfer": "basic", "objects": [{**each, "actions": one} for each, one in pairs]}
        assert rest == "/commit/main"
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[name][value["path"]] = self.objects[value["oid"]]
        return 200, {"commitUrl": f"{self.address}/{name}/commit/1", "commitOid": "1"}

    def _created(self, repository: dict[str, Any]) -> tuple[int, Any]:
        name = f"{repository['organization']}/{repository['name']}"
        if repository["organization"] != OWNER:
            return 403, {"error": "You don't have the rights to create a model under this namespace"}
        if name in self.private:
            return 409, {"error": "You already created this model repo"}
        self.private[name] = repository["visibility"] == "private"
        self.files[name] = {}
        return 200, {"url": f"{self.address}/{name}"}


def give_environment(monkeypatch: pytest.MonkeyPatch, **given: str) -> None:
    """Set environment variables, and the constants that the hub's library read from them at its import."""
    is_hub_reachable.cache_clear()
    for name, value in given.items():
        monkeypatch.setenv(name, value)
        constant = "ENDPOINT" if name == "HF_ENDPOINT" else name
        if hasattr(constants, constant):
            monkeypatch.setattr(constants, constant, value == "1" if value in ("0", "1") else value)


@contextmanager
def running() -> Iterator[Hub]:
    """Run a hub at `address` during the block."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, content = hub.answer(self.command, self.path.partition("?")[0], self.headers, body)
            data = json.dumps(content).encode()
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = _answer  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
