"""Load the tables of attacks from tables.yaml."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    pass


def _text(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> str:
    parts = loader.construct_sequence(node, deep=True)
    return "".join(part if isinstance(part, str) else part[0] * part[1] for part in parts)


_Loader.add_constructor("!text", _text)
TABLES: dict[str, Any] = yaml.load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), _Loader)


def random_entry(random: Random, table: dict[str, Any]) -> tuple[str, Any]:
    """Return a random entry of a table with its name."""
    name = random.choice(list(table))
    return name, table[name]
