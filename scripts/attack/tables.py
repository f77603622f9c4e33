"""Tables of what attacks send; see tables.yaml."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import yaml


class Text(list[Any]):
    """Parts of a text that may be long, which `str` puts together: texts, and pairs of a text and a count."""

    def __str__(self) -> str:
        return "".join(part if isinstance(part, str) else part[0] * part[1] for part in self)


class _Loader(yaml.SafeLoader):
    pass


_Loader.add_constructor("!text", lambda loader, node: Text(loader.construct_sequence(node, deep=True)))
TABLES: dict[str, Any] = yaml.load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), _Loader)


def drawn(random: Random, table: dict[str, Any]) -> tuple[str, Any]:
    """An entry of a table, by its name."""
    name = random.choice(list(table))
    return name, table[name]
