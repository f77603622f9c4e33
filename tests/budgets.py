"""Fixed memory budgets for tests, whose processes hold more than any real bound would leave."""

from __future__ import annotations

from types import ModuleType

import pytest

from prge.training.costs import Budget


def fix_memory_budget(monkeypatch: pytest.MonkeyPatch, module: ModuleType, loaded: int) -> None:
    """Let a module plan its steps with a fixed number of bytes for loaded weights and activations."""
    budget = Budget(limit=1 << 40, loaded=loaded, predicted=1 << 40)
    monkeypatch.setattr(module, "step_budget", lambda *_, **__: budget)
