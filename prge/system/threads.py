"""How threads of libraries wait."""

from __future__ import annotations

import os


def set_passive_wait_policy() -> None:
    """Have OpenMP's threads sleep while they wait for work; call it before torch is imported.

    By default they look for work in a loop, which takes the processor from whoever has some: where other
    programs run, a model's forward pass took five times the processor time. Who has set OMP_WAIT_POLICY keeps
    that. Verbs that measure how fast PyTorch trains don't call it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
