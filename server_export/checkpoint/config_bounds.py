"""What a configuration may cost before any weight is there, whatever its keys are called.

Its numbers are sizes and counts, and transformers makes lists, names and modules of as many. So one with
large numbers is read in a child of bounded time and memory first, and a model's modules are counted while
they are made. Tensors without numbers cost nothing, and their sizes are compared with the weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prge.errors import Refusal, shown
from prge.host.children import BoundedChild, LimitError

# PyTorch's integers.
_LARGEST = (1 << 63) - 1
# Lists and names of so many entries take a second or two at most.
_READ_AT_ONCE = 1 << 18
_SECONDS, _MEMORY = 3.0, 256 << 20
# Models have thousands.
MOST_MODULES = 1 << 16
_MOST_PROBLEMS = 5
_ARCHITECTURES = "architectures"
# Sizes that no model has without.
_SIZES = re.compile(
    r"hidden_size|n_embd|dim|d_model|intermediate_size|n_inner|hidden_dim|ffn_dim|vocab_size|head_dim"
    r"|num_hidden_layers|num_layers|n_layers?|num_attention_heads|num_heads|n_heads?|num_key_value_heads"
    r"|max_position_embeddings|n_positions|word_embed_proj_dim"
)


def config_problems(config: Mapping[str, object]) -> list[str]:
    """What is wrong with the numbers and names of a configuration, a sentence each; at most five."""
    problems = (
        *(_not_names(value) for value in _values_of(_ARCHITECTURES, config)),
        *(_problem(name, value) for name, value in _flat(config)),
    )
    return [*filter(None, problems)][:_MOST_PROBLEMS]


def check_cost(config: Mapping[str, Any], path: str) -> None:
    """Refuse a configuration that transformers takes too long or too much memory to read.

    Args:
        config: its content.
        path: of it, for messages.

    Raises:
        Refusal: it takes more than 3 seconds of CPU time or 256 MiB.
    """
    from transformers import CONFIG_MAPPING

    large = {name: value for name, value in _flat(config) if _is_number(value) and abs(value) > _READ_AT_ONCE}
    if not large:
        return
    for inner_type in {str(value) for name, value in _flat(config) if name == "model_type"}:
        if inner_type in CONFIG_MAPPING:
            CONFIG_MAPPING[inner_type]  # imports its class, which the child can't
    largest = sorted(large.items(), key=lambda item: -abs(item[1]))[:_MOST_PROBLEMS]
    numbers = ", ".join(f"{name} = {value}" for name, value in largest)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise Refusal(
            "config-out-of-bounds",
            f"{path} describes no model: its model_type is {shown(model_type)}, and its largest numbers are "
            f"{numbers}",
            remedy="correct it, or give another model",
        )
    try:
        BoundedChild(_read, _SECONDS, _MEMORY).ask(json.dumps(config).encode())
    except LimitError as error:
        raise Refusal(
            "config-out-of-bounds",
            f"{path} describes no model: reading it {error}; its largest numbers are {numbers}",
            remedy="correct it, or give another model",
        ) from None


@contextmanager
def counted_modules(path: str) -> Iterator[None]:
    """Refuse a configuration of more than 65,536 modules while they are made inside.

    Args:
        path: of the configuration, for messages.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    count = 0

    def counting(module: object, name: str, inner: object) -> None:
        nonlocal count
        count += 1
        if count > MOST_MODULES:
            raise Refusal(
                "config-out-of-bounds",
                f"{path} describes a model of more than {MOST_MODULES:,} modules, which no model has",
                remedy="correct its numbers of layers and experts",
            )

    hook = register_module_module_registration_hook(counting)
    try:
        yield
    finally:
        hook.remove()


def _read(request: bytes) -> bytes:
    """Have transformers read a configuration; what it raises it raises of its caller again."""
    from transformers import CONFIG_MAPPING

    from server_export.library_errors import TRANSFORMERS_ERRORS

    config = json.loads(request)
    try:
        CONFIG_MAPPING[config["model_type"]].from_dict(config)
    except TRANSFORMERS_ERRORS as error:
        return str(type(error)).encode()
    return b""


def _problem(name: str, value: Any) -> str:
    """What is wrong with a value of a configuration, if anything is."""
    if _SIZES.fullmatch(name) and value is not None and (not _is_number(value) or value < 1):
        return f"{name} is {shown(value)}, must be a whole number of at least 1"
    if _is_number(value) and abs(value) > _LARGEST:
        return f"{name} is {shown(value)}, must have at most 64 bits"
    return ""


def _not_names(value: Any) -> str:
    """What is wrong with a list of names, if anything is."""
    if value is None or (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        return ""
    return f"{_ARCHITECTURES} is {shown(value)}, must be a list of names"


def _values_of(wanted: str, value: Any) -> Iterator[Any]:
    """The values of a key in a document, at any depth of mappings."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key == wanted:
                yield inner
            yield from _values_of(wanted, inner)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _flat(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of a document, without the lists and mappings that hold them."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _flat(inner, f"{name} (in a list)")
    else:
        yield name, value
