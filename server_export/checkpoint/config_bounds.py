"""Bounds on what a configuration may cost before any weight is read, for all of its keys.

The numbers of a configuration are sizes and counts, and transformers makes lists, names and modules of these
sizes. A configuration with large numbers is therefore read in a child process of bounded time and memory
first, and a model's modules are counted while they are made. Tensors on the meta device cost nothing, and
their sizes are compared with the weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prge.errors import Refusal, format_value
from prge.system.sandbox import BoundedChild, LimitError

# The largest int64.
_LARGEST = (1 << 63) - 1
# Lists and names of this many entries take a second or two at most.
_MAX_UNBOUNDED = 1 << 18
_SECONDS, _MEMORY = 3.0, 256 << 20
# Published models have thousands of modules.
MAX_MODULES = 1 << 16
_MAX_PROBLEMS = 5
_ARCHITECTURES = "architectures"
# Sizes that are positive in every model.
_SIZES = re.compile(
    r"hidden_size|n_embd|dim|d_model|intermediate_size|n_inner|hidden_dim|ffn_dim|vocab_size|head_dim"
    r"|num_hidden_layers|num_layers|n_layers?|num_attention_heads|num_heads|n_heads?|num_key_value_heads"
    r"|max_position_embeddings|n_positions|word_embed_proj_dim"
)


def config_problems(config: Mapping[str, object]) -> list[str]:
    """Return what is wrong with the numbers and names of a configuration, at most five sentences."""
    problems = (
        *(_names_problem(value) for value in _values_of(_ARCHITECTURES, config)),
        *(_value_problem(name, value) for name, value in _leaves(config)),
    )
    return [*filter(None, problems)][:_MAX_PROBLEMS]


def check_cost(config: Mapping[str, Any], path: str) -> None:
    """Refuse a configuration whose parsing by transformers takes too much time or memory.

    Args:
        config: the parsed configuration.
        path: its path, for messages.

    Raises:
        Refusal: parsing takes more than 3 seconds of CPU time or 256 MiB.
    """
    from transformers import CONFIG_MAPPING

    large = {
        name: value for name, value in _leaves(config) if _is_number(value) and abs(value) > _MAX_UNBOUNDED
    }
    if not large:
        return
    for inner_type in {str(value) for name, value in _leaves(config) if name == "model_type"}:
        if inner_type in CONFIG_MAPPING:
            CONFIG_MAPPING[inner_type]  # imports the class, which the child process can't
    largest = sorted(large.items(), key=lambda item: -abs(item[1]))[:_MAX_PROBLEMS]
    numbers = ", ".join(f"{name} = {value}" for name, value in largest)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise Refusal(
            "config-out-of-bounds",
            f"{path} does not describe a model: its model_type is {format_value(model_type)}, and its "
            f"largest numbers are {numbers}.",
            remedy="Correct the file, or use another model.",
        )
    try:
        BoundedChild(_parse_config, _SECONDS, _MEMORY).call(json.dumps(config).encode())
    except LimitError as error:
        raise Refusal(
            "config-out-of-bounds",
            f"{path} does not describe a model: reading it {error}. Its largest numbers are {numbers}.",
            remedy="Correct the file, or use another model.",
        ) from None


@contextmanager
def limit_modules(path: str) -> Iterator[None]:
    """Refuse a configuration if more than 65,536 modules are made inside the context.

    Args:
        path: the path of the configuration, for messages.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    count = 0

    def count_module(module: object, name: str, inner: object) -> None:
        nonlocal count
        count += 1
        if count > MAX_MODULES:
            raise Refusal(
                "config-out-of-bounds",
                f"{path} describes a model with more than {MAX_MODULES:,} modules, more than any model has.",
                remedy="Correct its numbers of layers and experts.",
            )

    hook = register_module_module_registration_hook(count_module)
    try:
        yield
    finally:
        hook.remove()


def _parse_config(request: bytes) -> bytes:
    """Parse a configuration with transformers; return the name of transformers' exception, if it raises one.

    The caller parses the configuration again and then gets the exception itself.
    """
    from transformers import CONFIG_MAPPING

    from server_export.library_errors import TRANSFORMERS_ERRORS

    config = json.loads(request)
    try:
        CONFIG_MAPPING[config["model_type"]].from_dict(config)
    except TRANSFORMERS_ERRORS as error:
        return str(type(error)).encode()
    return b""


def _value_problem(name: str, value: Any) -> str:
    """Return what is wrong with a value of a configuration; empty if nothing is."""
    if _SIZES.fullmatch(name) and value is not None and (not _is_number(value) or value < 1):
        return f"{name} is {format_value(value)} but must be a positive integer"
    if _is_number(value) and abs(value) > _LARGEST:
        return f"{name} is {format_value(value)} but must fit into 64 bits"
    return ""


def _names_problem(value: Any) -> str:
    """Return what is wrong with a list of names; empty if nothing is."""
    if value is None or (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        return ""
    return f"{_ARCHITECTURES} is {format_value(value)} but must be a list of names"


def _values_of(key: str, value: Any) -> Iterator[Any]:
    """Yield the values of a key in a document, at any depth of mappings."""
    if isinstance(value, Mapping):
        for inner_key, inner in value.items():
            if inner_key == key:
                yield inner
            yield from _values_of(key, inner)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a document's leaves."""
    if isinstance(value, Mapping):
        for inner_key, inner in value.items():
            yield from _leaves(inner, str(inner_key))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, f"{name} (in a list)")
    else:
        yield name, value
