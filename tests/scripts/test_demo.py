"""Parts of the demo that no other test runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo import EXPORT, MODEL, learn_from_reward

from prge.formats.documents import read_json
from tests.verbs import prge
from tests.workshop import FolderBuilder


@pytest.fixture(scope="module")
def bundle(made_once: FolderBuilder) -> Path:
    """Return the demo's bundle."""

    def make(folder: Path) -> None:
        prge("export", "--model", MODEL, *EXPORT, "--out", folder / "bundle")

    return made_once("demo-that-writes", make) / "bundle"


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_the_model_learns_from_a_reward_alone(bundle: Path, tmp_path: Path) -> None:
    solved = learn_from_reward(tmp_path, bundle)
    assert solved["before"] < 0.3 and solved["after"] > solved["before"] + 0.3
    train = read_json(tmp_path / "rewarded/run.json")["train"]
    assert train["final_step"] > 0 and train["best"]["reward"] == solved["after"]
    # The rows of this run have prompts and no answers.
    assert "completion" not in (tmp_path / "wanted-train.jsonl").read_text(encoding="utf-8")
