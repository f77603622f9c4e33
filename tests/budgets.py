"""Budgets of memory for tests, whose processes hold more than any bound would leave."""

from __future__ import annotations

from types import ModuleType

import pytest

from prge.training.costs import Budget


def fix_memory_budget(monkeypatch: pytest.MonkeyPatch, module: ModuleType, loaded: int) -> None:
    """Let so many bytes of weights and activations stay loaded where a module plans its steps."""
    budget = Budget(limit=1 << 40, loaded=loaded, predicted=1 << 40)
    monkeypatch.setattr(module, "budget_of_steps", lambda *_, **__: budget)
