"""Settings for the threads of numerical libraries."""

from __future__ import annotations

import os


def set_passive_wait_policy() -> None:
    """Make OpenMP threads sleep while they wait for work; call this before torch is imported.

    By default they spin, which takes CPU time from other programs: on a busy machine a forward pass took
    five times the CPU time. A value of OMP_WAIT_POLICY that the user has set is kept. Verbs that measure the
    speed of PyTorch don't call this.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
