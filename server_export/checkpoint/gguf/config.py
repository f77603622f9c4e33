"""A GGUF header as transformers' configuration: by its tables, and by what they leave out.

transformers' tables know what most files say. What else a file says of its model is translated here, or the
file is refused: a key that is left out is another model, which nobody would notice.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from prge.errors import Refusal, refused_as, shown
from server_export.checkpoint.config_bounds import config_problems
from server_export.checkpoint.gguf.header import EMBEDDING, GgufHeader
from server_export.library_errors import TRANSFORMERS_ERRORS

# Tensors of a file that a configuration describes: they are no parameters.
ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS = (
    f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long")
)
_REMEDY = "take the model's own folder with safetensors, such as its publisher's on the hub"
# Keys of a value that changes nothing, and keys that say what is known already.
_NEUTRAL: Mapping[str, object] = {
    "attention.causal": True,
    "nextn_predict_layers": 0,
    "expert_weights_scale": 1.0,
    # A softmax, as the models have that transformers reads.
    "expert_gating_func": 1,
    "rope.scaling.attn_factor": 1.0,
}
_SAID_ELSEWHERE = (
    *("vocab_size", "pooling_type", "rope.scaling.finetuned", "tensor_data_layout"),
    "use_parallel_residual",  # which transformers sees by the tensors
)
# Keys that have the same meaning in every configuration that has the attribute.
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
# Of Llama 3.1 and later, by which their factors were computed.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_SAME = 1e-4
# Gemma scales scores by the width of its heads; its largest models by the share of the model's width.
_GEMMA_LARGEST = {"gemma2": 46, "gemma3_text": 62}


def load_gguf_config(header: GgufHeader) -> Any:
    """transformers' configuration of a file's model.

    Raises:
        BundleError: transformers doesn't read such models from GGUF, a number is out of bounds, or the header
            says something that its configuration can't.
    """
    known = _by_tables(header)
    table = EMBEDDING in header.tensors and header.tensors[EMBEDDING].shape
    if not table:
        raise Refusal(
            "gguf-without-model", f"{header.path} holds no model: it has no {EMBEDDING}", remedy=_REMEDY
        )
    known["vocab_size"] = table[0]
    _check(header, known)
    config = _Translation(header, known).config()
    _check(header, config.to_dict())
    return config


def _check(header: GgufHeader, config: Mapping[str, Any]) -> None:
    problems = config_problems(config)
    layers = config.get("num_hidden_layers")
    # Each has a tensor at least.
    if isinstance(layers, int) and layers > len(header.tensors):
        problems.append(f"it counts {layers:,} layers, and there are {len(header.tensors):,} tensors")
    if problems:
        raise Refusal(
            "config-out-of-bounds",
            f"the header of {header.path} describes no model: {'; '.join(problems)}",
            remedy=_REMEDY,
        )


def _refused(header: GgufHeader) -> AbstractContextManager[None]:
    """Refuse a file that transformers, called inside, doesn't take."""
    return refused_as(
        "gguf-not-read",
        f"{header.path} holds a model of the architecture {shown(header.architecture)} that transformers "
        "can't read",
        TRANSFORMERS_ERRORS,
        remedy=_REMEDY,
    )


def _by_tables(header: GgufHeader) -> dict[str, Any]:
    """What transformers' tables make of a header, as keywords of a configuration."""
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config, read_gguf_metadata

    if header.architecture in GGUF_CONFIG_ARCHS:
        with _refused(header):
            return dict(get_gguf_config(*read_gguf_metadata(str(header.path))))
    return _by_older_tables(header)


def _by_older_tables(header: GgufHeader) -> dict[str, Any]:
    """The same of architectures that transformers reads by the package gguf.

    That makes an array of every token. It is given a small file that says the same, but for the vocabulary.
    """
    import gguf
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "header.gguf")
        writer = gguf.GGUFWriter(path, header.architecture)
        for key, field in header.fields.items():
            is_kept = field.element is None or (isinstance(field.value, list) and field.value)
            if is_kept and not key.startswith(("general.architecture", "general.alignment", "split.")):
                kinds = (each and gguf.GGUFValueType(each) for each in (field.type_id, field.element))
                writer.add_key_value(key, field.value, *kinds)
        for name in header.tensors:
            writer.add_tensor(name, np.zeros(1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with _refused(header):
            return dict(load_gguf_checkpoint(str(path), return_tensors=False)["config"])


class _Translation:
    """What a header says beside transformers' tables, as keywords of a configuration."""

    def __init__(self, header: GgufHeader, known: Mapping[str, Any]) -> None:
        from transformers import AutoConfig

        self._header, self._known = header, known
        self._kind = str(known["model_type"])
        with _refused(header):
            self._base = AutoConfig.for_model(**known)
        self._more: dict[str, Any] = {}
        prefix = f"{header.architecture}."
        self._unread = {key.removeprefix(prefix) for key in header.fields if key.startswith(prefix)}
        self._unread -= self._read_by_tables()

    def config(self) -> Any:
        """The configuration.

        Raises:
            BundleError: the header has a key that nothing reads.
        """
        from transformers import AutoConfig

        self._take_attributes()
        self._take_windows()
        self._take_rotation()
        self._take_scaling()
        self._take_neutral()
        if self._unread:
            told = ", ".join(
                f"{key} = {shown(self._header.model_value(key))}" for key in sorted(self._unread)[:5]
            )
            raise Refusal(
                "gguf-key-not-read",
                f"{self._header.path} says of its model what transformers doesn't read from GGUF, so that it "
                f"would be another model: {told}",
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
        table = GGUF_CONFIG_MAPPING.get(self._kind.removesuffix("_text"), {})
        return {key for key, name in table.items() if name is not None}

    def _take(self, key: str) -> Any:
        """A value that is still unread, None where there is none."""
        if key not in self._unread:
            return None
        self._unread.discard(key)
        return self._header.model_value(key)

    def _refuse(self, what: str) -> Refusal:
        return Refusal("gguf-value-not-read", f"{self._header.path} can't be read: {what}", remedy=_REMEDY)

    def _take_attributes(self) -> None:
        # Qwen slides in some layers, and a header doesn't say in which.
        slides = not hasattr(self._base, "use_sliding_window")
        for key, name in _ATTRIBUTES.items():
            has = hasattr(self._base, name) or name in ("rope_theta", "rope_local_base_freq")
            if has and (slides or name != "sliding_window") and (value := self._take(key)) is not None:
                self._more[name] = value
        width = self._header.model_value("attention.key_length")
        if width is not None and not hasattr(self._base, "head_dim") and width == self._head_width():
            self._take("attention.key_length")
        if self._header.model_value("attention.value_length", width) == (width or self._head_width()):
            self._take("attention.value_length")
        if self._kind == "gpt2":
            self._more["n_positions"] = self._header.model_value("context_length")
            self._more["n_inner"] = self._header.model_value("feed_forward_length")
        if self._kind == "bloom" and self._header.model_value("feed_forward_length") == 4 * self._width():
            self._unread -= {"feed_forward_length", "context_length"}
        if self._kind == "mamba" and self._header.model_value("attention.head_count") == 0:
            self._unread -= {"feed_forward_length", "attention.head_count"}
        if self._kind in _GEMMA_LARGEST:
            is_largest = self._known.get("num_hidden_layers") == _GEMMA_LARGEST[self._kind]
            self._more["query_pre_attn_scalar"] = (
                self._width() // self._count("attention.head_count")
                if is_largest
                else self._header.model_value("attention.key_length")
            )

    def _count(self, key: str) -> int:
        """A value that the header must have, a whole number of at least 1."""
        value = self._header.model_value(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._refuse(f"{key} is {shown(value)}")
        return value

    def _width(self) -> int:
        return self._count("embedding_length")

    def _head_width(self) -> int:
        given = (
            self._more.get("head_dim") or self._known.get("head_dim") or getattr(self._base, "head_dim", None)
        )
        if isinstance(given, int) and given > 0:
            return given
        return self._width() // self._count("attention.head_count")

    def _take_windows(self) -> None:
        pattern = self._take("attention.sliding_window_pattern")
        if pattern is None:
            return
        layers = self._count("block_count")
        slides = pattern
        if isinstance(pattern, int) and pattern > 0:
            slides = [bool((i + 1) % pattern) for i in range(layers)]
        is_known = isinstance(slides, list) and len(slides) == layers
        if not is_known or not hasattr(self._base, "layer_types"):
            raise self._refuse(f"attention.sliding_window_pattern is {shown(pattern)}")
        self._more["layer_types"] = ["sliding_attention" if each else "full_attention" for each in slides]

    def _take_rotation(self) -> None:
        """How many numbers of a head are turned."""
        turned = self._header.model_value("rope.dimension_count")
        self._take("rope.dimension_count")
        if turned is None or not self._header.model_value("attention.head_count"):
            return
        share = self._count("rope.dimension_count") / self._head_width()
        parameters = getattr(self._base, "rope_parameters", None)
        given = parameters.get("partial_rotary_factor", 1.0) if isinstance(parameters, dict) else 1.0
        if isinstance(given, int | float) and math.isclose(share, given):
            return
        if self._kind not in ("phi3", "stablelm", "nemotron"):
            raise self._refuse(f"it turns {turned} of the {self._head_width()} numbers of a head")
        self._more["partial_rotary_factor"] = share

    def _take_scaling(self) -> None:
        """How the angles of rotary positions are scaled for long texts."""
        tensors = self._header.tensors
        kind = self._take("rope.scaling.type") or "none"
        factor, original = (
            self._take(f"rope.scaling.{key}") for key in ("factor", "original_context_length")
        )
        if ROPE_FACTORS in tensors:
            self._more["rope_scaling"] = self._llama3(tensors[ROPE_FACTORS].values())
        elif {SHORT_FACTORS, LONG_FACTORS} <= tensors.keys():
            if self._kind != "phi3" or not original:
                raise self._refuse(f"{LONG_FACTORS} belongs to no {self._kind}")
            # What it multiplies scores by follows from both lengths.
            self._take("rope.scaling.attn_factor")
            self._more["original_max_position_embeddings"] = original
            self._more["rope_scaling"] = {
                "rope_type": "longrope",
                "short_factor": tensors[SHORT_FACTORS].values().tolist(),
                "long_factor": tensors[LONG_FACTORS].values().tolist(),
            }
        elif kind == "linear" and factor:
            self._more["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        elif kind == "yarn" and factor and original:
            self._more["rope_scaling"] = {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
            }
        elif kind != "none" and factor not in (None, 0.0, 1.0):
            raise self._refuse(f"rope.scaling.type is {shown(kind)}")
        theta = self._more.get("rope_theta", self._known.get("rope_theta"))
        if "rope_scaling" in self._more and theta is not None and self._kind != "gemma3_text":
            self._more["rope_parameters"] = {**self._more.pop("rope_scaling"), "rope_theta": theta}

    def _llama3(self, stored: Any) -> dict[str, Any]:
        """Llama 3's way, if the factors of a file are what it computes."""
        factor, theta = float(stored.max()), self._known.get("rope_theta", 10_000.0)
        if not isinstance(theta, int | float) or theta <= 0 or not factor > 0:
            raise self._refuse(f"rope.freq_base is {shown(theta)}")
        turned = 2 * len(stored)
        lengths = 2 * math.pi * theta ** (np.arange(0, turned, 2) / turned)
        low, high, original = _LLAMA3.values()
        smooth = np.clip((original / lengths - low) / (high - low), 0.0, 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if not np.allclose(expected, stored, rtol=_SAME):
            raise self._refuse(f"its {ROPE_FACTORS} aren't those of Llama 3")
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}

    def _take_neutral(self) -> None:
        for key in _SAID_ELSEWHERE:
            self._take(key)
        for key, value in _NEUTRAL.items():
            if self._header.model_value(key) == value:
                self._take(key)
