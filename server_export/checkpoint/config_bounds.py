"""Bounds of the numbers in a model's configuration, held before a library makes anything of that size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prge.errors import shown

# Sizes are compared with the weights themselves; what is larger is no size of anything that has weights.
_LARGEST, _LARGEST_OF_ALL = 1 << 24, (1 << 31) - 1
_MOST_LAYERS = 512
_MOST_LABELS = 1 << 16
# Counts of modules, each of which is made by itself.
_LAYERS = re.compile(r"(num_|n_)(\w+_)?layers?|(encoder|decoder|text)_layers")
# Sizes that no model has without.
_SIZES = re.compile(
    r"hidden_size|n_embd|dim|d_model|intermediate_size|n_inner|hidden_dim|ffn_dim|vocab_size|head_dim"
    r"|num_hidden_layers|num_layers|n_layers?|num_attention_heads|num_heads|n_heads?|num_key_value_heads"
    r"|max_position_embeddings|n_positions|word_embed_proj_dim"
)


def config_problems(config: Mapping[str, object]) -> list[str]:
    """What is wrong with the numbers of a configuration, a sentence each; at most five."""
    problems = (problem for name, value in _flat(config) if (problem := _problem(name, value)))
    return [problem for problem, _ in zip(problems, range(5), strict=False)]


def _problem(name: str, value: object) -> str:
    """What is wrong with a number of a configuration, if anything is."""
    is_layers = _LAYERS.fullmatch(name) is not None
    if _SIZES.fullmatch(name) and value is not None and not isinstance(value, list):
        most = _MOST_LAYERS if is_layers else _LARGEST
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            return f"{name} is {shown(value)}, must be a whole number from 1 to {most}"
    elif isinstance(value, int) and "theta" not in name:
        most = _MOST_LAYERS if is_layers else _MOST_LABELS if name == "num_labels" else _LARGEST_OF_ALL
        if abs(value) > most:
            return f"{name} is {shown(value)}, must be at most {most}"
    return ""


def _flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Names and values of a document, without the lists and mappings that hold them."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _flat(inner, f"{name} (in a list)")
    else:
        yield name, value
