"""A GGUF header as transformers' configuration, by transformers' tables and additional rules.

A file with a key that neither covers is refused: without the key it would silently be another model.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from prge.errors import Refusal, format_value, refused_as
from server_export.checkpoint.config_bounds import config_problems
from server_export.checkpoint.gguf.header import EMBEDDING, GgufHeader
from server_export.library_errors import TRANSFORMERS_ERRORS

# Tensors that are part of the configuration, and no parameters.
ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS = (
    f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long")
)
_REMEDY = "Use the model's original folder with safetensors, such as its publisher's on the Hub."
# Keys that may be ignored if they have this value.
_NEUTRAL: Mapping[str, object] = {
    "attention.causal": True,
    "nextn_predict_layers": 0,
    "expert_weights_scale": 1.0,
    # Softmax, as in all models that transformers reads from GGUF.
    "expert_gating_func": 1,
    "rope.scaling.attn_factor": 1.0,
}
_KNOWN_ELSEWHERE = (
    *("vocab_size", "pooling_type", "rope.scaling.finetuned", "tensor_data_layout"),
    "use_parallel_residual",  # transformers derives it from the tensors
)
# Keys with the same meaning for every configuration that has the attribute.
_ATTRIBUTES = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
# The constants of Llama 3.1 and later, from which the factors in a file were computed.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_SAME = 1e-4
# Gemma scales attention scores by the head width; its largest models by width / heads. By number of layers.
_GEMMA_LARGEST = {"gemma2": 46, "gemma3_text": 62}


def load_gguf_config(header: GgufHeader) -> Any:
    """Convert a file's header to transformers' configuration of its model.

    Raises:
        BundleError: transformers does not support the architecture in GGUF, a number is out of bounds, or the
            header has a key that can't be converted.
    """
    arguments = _by_tables(header)
    table = EMBEDDING in header.tensors and header.tensors[EMBEDDING].shape
    if not table:
        raise Refusal(
            "gguf-without-model",
            f"{header.path} does not contain a model: it has no {EMBEDDING}.",
            remedy=_REMEDY,
        )
    arguments["vocab_size"] = table[0]
    _check(header, arguments)
    config = _Translation(header, arguments).config()
    _check(header, config.to_dict())
    return config


def _check(header: GgufHeader, config: Mapping[str, Any]) -> None:
    problems = config_problems(config)
    layers = config.get("num_hidden_layers")
    # Each layer has at least one tensor.
    if isinstance(layers, int) and layers > len(header.tensors):
        problems.append(f"it has {layers:,} layers, but only {len(header.tensors):,} tensors")
    if problems:
        raise Refusal(
            "config-out-of-bounds",
            f"The header of {header.path} does not describe a model: {'; '.join(problems)}.",
            remedy=_REMEDY,
        )


def _refused(header: GgufHeader) -> AbstractContextManager[None]:
    """Refuse a file if transformers raises inside the context."""
    return refused_as(
        "gguf-not-read",
        f"{header.path} contains a model of the architecture {format_value(header.architecture)}, which "
        "transformers can't read",
        TRANSFORMERS_ERRORS,
        remedy=_REMEDY,
    )


def _by_tables(header: GgufHeader) -> dict[str, Any]:
    """Return what transformers' tables read from a header, as arguments of a configuration."""
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config, read_gguf_metadata

    if header.architecture in GGUF_CONFIG_ARCHS:
        with _refused(header):
            return dict(get_gguf_config(*read_gguf_metadata(str(header.path))))
    return _by_older_tables(header)


def _by_older_tables(header: GgufHeader) -> dict[str, Any]:
    """Return the same for architectures that transformers reads by the package gguf.

    The package makes an array of every token, so it gets a small file with the same header but no vocabulary.
    """
    import gguf
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "header.gguf")
        writer = gguf.GGUFWriter(path, header.architecture)
        for key, field in header.fields.items():
            is_kept = field.element is None or (isinstance(field.value, list) and field.value)
            if is_kept and not key.startswith(("general.architecture", "general.alignment", "split.")):
                types = (each and gguf.GGUFValueType(each) for each in (field.type_id, field.element))
                writer.add_key_value(key, field.value, *types)
        for name in header.tensors:
            writer.add_tensor(name, np.zeros(1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with _refused(header):
            return dict(load_gguf_checkpoint(str(path), return_tensors=False)["config"])


class _Translation:
    """Adds what transformers' tables leave out of a header to the arguments of a configuration."""

    def __init__(self, header: GgufHeader, known: Mapping[str, Any]) -> None:
        from transformers import AutoConfig

        self._header, self._known = header, known
        self._model_type = str(known["model_type"])
        with _refused(header):
            self._base = AutoConfig.for_model(**known)
        self._more: dict[str, Any] = {}
        prefix = f"{header.architecture}."
        self._unread = {key.removeprefix(prefix) for key in header.fields if key.startswith(prefix)}
        self._unread -= self._read_by_tables()

    def config(self) -> Any:
        """Return the configuration.

        Raises:
            BundleError: the header has a key that was not converted.
        """
        from transformers import AutoConfig

        self._take_attributes()
        self._take_windows()
        self._take_rotation()
        self._take_scaling()
        self._take_neutral()
        if self._unread:
            unread = ", ".join(
                f"{key} = {format_value(self._header.model_value(key))}" for key in sorted(self._unread)[:5]
            )
            raise Refusal(
                "gguf-key-not-read",
                f"{self._header.path} has keys that transformers does not read from GGUF, so that it would "
                f"be another model: {unread}.",
                remedy=_REMEDY,
            )
        with _refused(self._header):
            config = AutoConfig.for_model(**{**self._known, **self._more})
        for name in ("layer_types",):
            if name in self._more:
                setattr(config, name, self._more[name])
        return config

    def _read_by_tables(self) -> set[str]:
        from transformers.integrations import GGUF_CONFIG_MAPPING
        from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

        if self._header.architecture in GGUF_CONFIG_ARCHS:
            return self._unread
        table = GGUF_CONFIG_MAPPING.get(self._model_type.removesuffix("_text"), {})
        return {key for key, name in table.items() if name is not None}

    def _take(self, key: str) -> Any:
        """Return a value and mark its key as read; None if there is no such unread key."""
        if key not in self._unread:
            return None
        self._unread.discard(key)
        return self._header.model_value(key)

    def _refusal(self, what: str) -> Refusal:
        return Refusal("gguf-value-not-read", f"Cannot read {self._header.path}: {what}.", remedy=_REMEDY)

    def _take_attributes(self) -> None:
        # Qwen has sliding windows in some layers, and a header doesn't say in which.
        has_windows = not hasattr(self._base, "use_sliding_window")
        for key, name in _ATTRIBUTES.items():
            has_attribute = hasattr(self._base, name) or name in ("rope_theta", "rope_local_base_freq")
            if (
                has_attribute
                and (has_windows or name != "sliding_window")
                and (value := self._take(key)) is not None
            ):
                self._more[name] = value
        width = self._header.model_value("attention.key_length")
        if width is not None and not hasattr(self._base, "head_dim") and width == self._head_width():
            self._take("attention.key_length")
        if self._header.model_value("attention.value_length", width) == (width or self._head_width()):
            self._take("attention.value_length")
        if self._model_type == "gpt2":
            self._more["n_positions"] = self._header.model_value("context_length")
            self._more["n_inner"] = self._header.model_value("feed_forward_length")
        if (
            self._model_type == "bloom"
            and self._header.model_value("feed_forward_length") == 4 * self._width()
        ):
            self._unread -= {"feed_forward_length", "context_length"}
        if self._model_type == "mamba" and self._header.model_value("attention.head_count") == 0:
            self._unread -= {"feed_forward_length", "attention.head_count"}
        if self._model_type in _GEMMA_LARGEST:
            is_largest = self._known.get("num_hidden_layers") == _GEMMA_LARGEST[self._model_type]
            self._more["query_pre_attn_scalar"] = (
                self._width() // self._count("attention.head_count")
                if is_largest
                else self._header.model_value("attention.key_length")
            )

    def _count(self, key: str) -> int:
        """Return a required value that must be a positive integer."""
        value = self._header.model_value(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._refusal(f"{key} is {format_value(value)}")
        return value

    def _width(self) -> int:
        return self._count("embedding_length")

    def _head_width(self) -> int:
        head_dim = (
            self._more.get("head_dim") or self._known.get("head_dim") or getattr(self._base, "head_dim", None)
        )
        if isinstance(head_dim, int) and head_dim > 0:
            return head_dim
        return self._width() // self._count("attention.head_count")

    def _take_windows(self) -> None:
        pattern = self._take("attention.sliding_window_pattern")
        if pattern is None:
            return
        layers = self._count("block_count")
        is_sliding = pattern
        if isinstance(pattern, int) and pattern > 0:
            is_sliding = [bool((i + 1) % pattern) for i in range(layers)]
        is_valid = isinstance(is_sliding, list) and len(is_sliding) == layers
        if not is_valid or not hasattr(self._base, "layer_types"):
            raise self._refusal(f"attention.sliding_window_pattern is {format_value(pattern)}")
        self._more["layer_types"] = [
            "sliding_attention" if sliding else "full_attention" for sliding in is_sliding
        ]

    def _take_rotation(self) -> None:
        """Read how many dimensions of a head are rotated."""
        rotated = self._header.model_value("rope.dimension_count")
        self._take("rope.dimension_count")
        if rotated is None or not self._header.model_value("attention.head_count"):
            return
        share = self._count("rope.dimension_count") / self._head_width()
        parameters = getattr(self._base, "rope_parameters", None)
        default = parameters.get("partial_rotary_factor", 1.0) if isinstance(parameters, dict) else 1.0
        if isinstance(default, int | float) and math.isclose(share, default):
            return
        if self._model_type not in ("phi3", "stablelm", "nemotron"):
            raise self._refusal(f"it rotates {rotated} of the {self._head_width()} dimensions of a head")
        self._more["partial_rotary_factor"] = share

    def _take_scaling(self) -> None:
        """Read how rotary positions are scaled for long texts."""
        tensors = self._header.tensors
        scaling_type = self._take("rope.scaling.type") or "none"
        factor, original = (
            self._take(f"rope.scaling.{key}") for key in ("factor", "original_context_length")
        )
        if ROPE_FACTORS in tensors:
            self._more["rope_scaling"] = self._llama3(tensors[ROPE_FACTORS].values())
        elif {SHORT_FACTORS, LONG_FACTORS} <= tensors.keys():
            if self._model_type != "phi3" or not original:
                raise self._refusal(f"{LONG_FACTORS} is not supported for {self._model_type}")
            # This factor follows from both lengths.
            self._take("rope.scaling.attn_factor")
            self._more["original_max_position_embeddings"] = original
            self._more["rope_scaling"] = {
                "rope_type": "longrope",
                "short_factor": tensors[SHORT_FACTORS].values().tolist(),
                "long_factor": tensors[LONG_FACTORS].values().tolist(),
            }
        elif scaling_type == "linear" and factor:
            self._more["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        elif scaling_type == "yarn" and factor and original:
            self._more["rope_scaling"] = {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
            }
        elif scaling_type != "none" and factor not in (None, 0.0, 1.0):
            raise self._refusal(f"rope.scaling.type is {format_value(scaling_type)}")
        theta = self._more.get("rope_theta", self._known.get("rope_theta"))
        if "rope_scaling" in self._more and theta is not None and self._model_type != "gemma3_text":
            self._more["rope_parameters"] = {**self._more.pop("rope_scaling"), "rope_theta": theta}

    def _llama3(self, stored: Any) -> dict[str, Any]:
        """Return Llama 3's scaling if a file's factors are those that it computes."""
        factor, theta = float(stored.max()), self._known.get("rope_theta", 10_000.0)
        if not isinstance(theta, int | float) or theta <= 0 or not factor > 0:
            raise self._refusal(f"rope.freq_base is {format_value(theta)}")
        dimensions = 2 * len(stored)
        lengths = 2 * math.pi * theta ** (np.arange(0, dimensions, 2) / dimensions)
        low, high, original = _LLAMA3.values()
        smooth = np.clip((original / lengths - low) / (high - low), 0.0, 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if not np.allclose(expected, stored, rtol=_SAME):
            raise self._refusal(f"its {ROPE_FACTORS} aren't those of Llama 3")
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}

    def _take_neutral(self) -> None:
        for key in _KNOWN_ELSEWHERE:
            self._take(key)
        for key, value in _NEUTRAL.items():
            if self._header.model_value(key) == value:
                self._take(key)
