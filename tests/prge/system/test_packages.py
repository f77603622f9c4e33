"""Commands that install packages work in any shell, without prge on an index."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from prge.system.packages import install, install_extra_command, requirement

REPOSITORY = Path(__file__).resolve().parents[3]


def test_requirements_come_from_the_package_itself() -> None:
    installed = importlib.metadata.requires("prge")
    assert installed is not None
    assert f"{requirement('torch')};" in "".join(installed).replace(" ;", ";")
    assert "==" in requirement("executorch")
    assert requirement("pyyaml") == requirement("PyYAML")
    assert requirement("no-such-package") == "no-such-package"


def test_a_command_names_packages_for_a_shell() -> None:
    assert install(["a==1", "b>=2,<3"]) == "pip install a==1 'b>=2,<3'"
    command = install_extra_command("data").split()
    assert command[:2] == ["pip", "install"]
    assert sorted(word.partition(">")[0] for word in command[2:]) == ["'datasets", "'pyarrow"]
    assert "numpy" in install_extra_command("", "gguf") and "gguf" in install_extra_command("", "gguf")


def test_a_package_that_is_not_installed_points_to_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert install_extra_command("data") == "pip install -e '.[data]'"
    assert requirement("torch") == "torch"


def test_no_text_of_the_repository_installs_prge_from_an_index() -> None:
    texts = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
    texts += [
        path
        for name in ("prge", "server_export", "device_runner")
        for path in REPOSITORY.glob(f"{name}/**/*.py")
    ]
    asking = [path for path in texts if "pip install 'prge" in path.read_text(encoding="utf-8")]
    assert not [path for path in asking if path.name != "CHANGELOG.md"]
