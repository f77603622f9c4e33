"""`prge publish --push`: the real client of the hub, against a hub on the loopback."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server_export.adapters import trained_adapter
from tests.server_export.publishing.hub_server import TOKEN, Hub, give_environment, running
from tests.tiny_models import save_model
from tests.verbs import prge

Publish = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trained adapter."""
    root = tmp_path_factory.mktemp("trained")
    return trained_adapter(save_model(root / "llama", "llama"), root / "adapter")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as hub:
        yield hub


@pytest.fixture
def publish(trained: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Return a function that runs the verb with a token, and checks that the token is written nowhere."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {
            "HF_ENDPOINT": hub.address,
            "HF_TOKEN": TOKEN,
            "HF_TOKEN_PATH": str(tmp_path / "home/token"),
            "HF_HUB_DISABLE_XET": "1",  # which is a protocol of its own
            "HF_HUB_OFFLINE": "0",
        }
        with monkeypatch.context() as patch:
            give_environment(patch, **{**variables, **environment})
            done = prge("publish", trained, "--out", "out", *arguments, check=False, cwd=tmp_path)
        assert TOKEN not in done.stdout + done.stderr
        written = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert not any(TOKEN in path.read_text(errors="replace") for path in written)
        assert "Traceback" not in done.stderr
        return done

    return run


@pytest.mark.parametrize(("arguments", "private"), [([], True), (["--public"], False)])
def test_a_whole_folder_is_pushed_into_a_repository_that_is_private_by_default(
    publish: Publish, hub: Hub, tmp_path: Path, arguments: list[str], private: bool
) -> None:
    done = publish("--push", "me/tuned", *arguments)
    assert (done.returncode, done.stdout) == (0, f"{hub.address}/me/tuned\n"), done.stderr
    assert hub.private == {"me/tuned": private}
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files["me/tuned"] == written
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= written.keys()


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["me/tuned"], {"HF_TOKEN": ""}, "--push needs a token of the hub, and there is none.\n  Create one"),
        (["me/tuned"], {"HF_TOKEN": "wrong"}, "the hub answers 401: "),
        (["me/tuned"], {"HF_TOKEN": f"{TOKEN} é"}, "The token of the hub has characters that no token has"),
        ([""], {}, "--push is '', which is not the name of a repository"),
        (["tuned"], {}, "--push is 'tuned', which is not the name of a repository: the owner is missing"),
        (["me/../etc"], {}, "--push is 'me/../etc', which is not the name of a repository"),
        (["me/a b"], {}, "--push is 'me/a b', which is not the name of a repository"),
        (["https://huggingface.co/me/tuned"], {}, "--push is a URL, "),
        (
            ["me/tuned"],
            {"HF_HUB_OFFLINE": "1"},
            "Cannot push to me/tuned because the hub is offline.\n  Unset HF_HUB_OFFLINE",
        ),
        (["me/tuned"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "Check that http://127.0.0.1:9 can be reached"),
        (
            ["me/there"],
            {},
            "Cannot push to me/there.\n  The repository exists. Give another name, or --overwrite",
        ),
        (["me/shown", "--overwrite"], {}, "me/shown exists, and everybody can read it.\n  Give --public"),
    ],
)
def test_an_impossible_push_is_refused_before_anything_is_written(
    publish: Publish,
    hub: Hub,
    tmp_path: Path,
    arguments: list[str],
    environment: dict[str, str],
    expected: str,
) -> None:
    hub.private = {"me/there": True, "me/shown": False}
    done = publish("--push", *arguments, **environment)
    assert done.returncode == 2
    assert expected in done.stderr
    assert not (tmp_path / "out").exists()
    assert all(method == "GET" for method, _ in hub.requests)


def test_overwrite_adds_a_commit_to_an_existing_repository(publish: Publish, hub: Hub) -> None:
    hub.private, hub.files = {"me/there": True}, {"me/there": {"notes.txt": b"mine"}}
    done = publish("--push", "me/there", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert hub.files["me/there"].keys() >= {"notes.txt", "README.md"}
    assert ("POST", "/api/repos/create") not in hub.requests


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        ({"/repos/create": 403}, "the hub answers 403: "),
        ({"/commit/": 413}, "the hub answers 413: "),
        ({"/lfs/": 403}, "Cannot push to me/tuned: "),
    ],
)
def test_a_failed_push_leaves_the_folder_and_is_repeated_with_overwrite(
    publish: Publish, hub: Hub, tmp_path: Path, refused: dict[str, int], expected: str
) -> None:
    hub.refused = refused
    done = publish("--push", "me/tuned")
    assert done.returncode == 2
    assert expected in done.stderr
    assert "out is complete; run the same command with --overwrite to try again" in done.stderr
    assert (tmp_path / "out" / "README.md").is_file()
    hub.refused = {}
    assert publish("--push", "me/tuned", "--overwrite").returncode == 0
    assert hub.private == {"me/tuned": True} and "adapter_model.safetensors" in hub.files["me/tuned"]


def test_public_needs_push(publish: Publish) -> None:
    assert "--public belongs to --push" in publish("--public").stderr
