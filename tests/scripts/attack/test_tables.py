"""Everything that the tables name exists."""

from __future__ import annotations

import pytest
from damaged_files import CRAFTED, MUTATIONS, USES, Target
from tables import TABLES


@pytest.mark.parametrize("table", ["of_device", "of_model", "of_gguf"])
def test_targets_name_uses_and_mutations(table: str) -> None:
    for target in (Target(**entry) for entry in TABLES[table]):
        assert {*target.uses} <= {*USES} and target.crafted in CRAFTED and target.mutations in MUTATIONS


def test_a_text_is_composed_of_parts() -> None:
    assert TABLES["documents"]["sexagesimal"] == "{name}: " + ":".join(["59"] * 2000)


def test_a_use_changes_the_runs_that_it_names() -> None:
    assert (USES["resume"].runs, USES["eval adapter"].runs, USES["eval"].runs) == (
        ["unfinished"],
        ["adapter"],
        [],
    )
