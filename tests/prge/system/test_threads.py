"""Wait policy of the threads of numerical libraries."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.verbs import REPOSITORY

# Prints the policy that a verb has set when it fails for a missing model, before importing torch.
SCRIPT = """
import os, sys
from prge.cli.main import main
assert "torch" not in sys.modules
import builtins
real = builtins.__import__
def watched(name, *more):
    if name == "torch" and "torch" not in sys.modules:
        print("policy", os.environ.get("OMP_WAIT_POLICY"), flush=True)
    return real(name, *more)
builtins.__import__ = watched
main(sys.argv[1:])
"""


@pytest.mark.parametrize("given", [None, "active"])
def test_verbs_that_export_set_the_wait_policy_before_torch_is_imported(given: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"PYTHONPATH": str(REPOSITORY), **({"OMP_WAIT_POLICY": given} if given else {})}
    arguments = ["export", "--model", "/nowhere", "--out", "/tmp/nothing"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert f"policy {given or 'passive'}" in done.stdout, done.stderr
