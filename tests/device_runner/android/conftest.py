"""A real adb daemon, a real runtime, and a bundle to train, made once for all tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from device_runner.android.runtime import BundleSettings, build_runtime, default_cache
from tests.device_runner.android.daemons import (
    REPOSITORY,
    Daemon,
    Network,
    adbd_folder,
    end_jobs,
    lacking_for_network,
    lacking_for_packages,
)
from tests.verbs import prge
from tests.workshop import FolderBuilder

DEMO = REPOSITORY / "server_export" / "demo_data"


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Yield Debian's adbd for this machine; skips if a tool is missing."""
    if reason := lacking_for_network() or lacking_for_packages():
        pytest.skip(reason)
    files = adbd_folder(tmp_path_factory.mktemp("adbd"), default_cache())
    network = Network()
    home = tmp_path_factory.mktemp("home")
    daemon = Daemon(network, files, home)
    daemon.start()
    yield daemon
    daemon.close()
    network.close()


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a runtime for this machine, with the newest packages."""
    return built_runtime(tmp_path_factory, fleet=False)


def built_runtime(tmp_path_factory: pytest.TempPathFactory, fleet: bool) -> Path:
    """Build a runtime for this machine; skips if a tool is missing."""
    need_packages()
    out = tmp_path_factory.mktemp("runtime") / "runtime"
    build_runtime(BundleSettings(out=out, machine="amd64", fleet=fleet))
    return out


def need_packages() -> None:
    """Skip unless this machine has the tools to build a runtime for it."""
    reason = lacking_for_packages()
    if not reason and shutil.which("x86_64-linux-gnu-g++") is None:
        reason = "there is no x86_64-linux-gnu-g++"
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def phone(daemon: Daemon, runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield prge's folder on the device, with the runtime; its name needs careful quoting."""
    folder = tmp_path_factory.mktemp("device") / 'it\'s "a phone" & more'
    daemon.prge("push", runtime, "--folder", folder)
    yield folder
    end_jobs(folder)


@pytest.fixture(scope="session")
def forward_bundle(made_once: FolderBuilder) -> Path:
    """Return a bundle of the demo's model for forward passes of copies and for generation."""

    def fill(folder: Path) -> None:
        prge(
            "export", "--model", DEMO / "model", "--out", folder / "my bundle", "--target-modules", "o_proj",
            "--roles", "forward", "prefill", "decode", "--sequence-length", 32,
        )  # fmt: skip

    return made_once("demo forward bundle", fill) / "my bundle"


@pytest.fixture
def run_arguments(phone: Path, forward_bundle: Path) -> list[object]:
    """Return arguments of a short `prge android run`, without its name."""
    return [
        "--folder", phone, "--bundle", forward_bundle, "--train", DEMO / "train.jsonl", "--dev",
        DEMO / "dev.jsonl", "--dev-limit", 20, "--task", DEMO / "task.yaml", "--steps", 20, "--threads", 1,
        "--queries", 2, "--batch-size", 2,
        "--eval-steps", 10, "--select", "loss", "--save-steps", 10, "--learning-rate", 0.01,
    ]  # fmt: skip
