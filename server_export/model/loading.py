"""A folder or hub id becomes a float32 model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prge.errors import BundleError

_DECODER_HEADS = ("ForCausalLM", "LMHeadModel")
_WEIGHTS = (".safetensors", ".bin")


@dataclass
class LoadedModel:
    """A transformers model in float32 and evaluation mode.

    `is_decoder` tells a causal language model with its vocabulary head from an encoder without a head.
    """

    model: nn.Module
    name_or_path: str
    revision: str | None
    is_decoder: bool

    @property
    def config(self) -> Any:
        """The transformers configuration of the text model."""
        return self.model.config


def load_model(name_or_path: str, *, pooled: bool | None = None, revision: str | None = None) -> LoadedModel:
    """Load a causal language model or an encoder.

    Args:
        name_or_path: folder or hub id.
        pooled: True loads the model without its head, False with it, None decides by architecture.
        revision: of a hub id.

    Raises:
        BundleError: there is no model, or it is of a kind that a program can't be made of.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    config = _load_config(name_or_path, revision)
    _check_kind(config, name_or_path)
    is_decoder = not pooled if pooled is not None else _is_decoder(config)
    loader = AutoModelForCausalLM if is_decoder else AutoModel
    try:
        model = loader.from_pretrained(
            name_or_path, config=config, revision=revision, dtype=torch.float32, attn_implementation="eager"
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BundleError(
            f"{name_or_path} can't be loaded as {'a causal language model' if is_decoder else 'an encoder'}: "
            f"{_first_line(error)}",
            remedy="give the folder or hub id of a complete transformers checkpoint",
        ) from None
    return prepare_model(model, name_or_path, is_decoder, getattr(config, "_commit_hash", None) or revision)


def outline_model(
    name_or_path: str, *, pooled: bool | None = None, revision: str | None = None
) -> LoadedModel:
    """The model that `load_model` would load, with shapes instead of weights; from its config.json alone.

    Raises:
        BundleError: as `load_model`, but for the weights.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    config = _load_config(name_or_path, revision)
    _check_kind(config, name_or_path)
    is_decoder = not pooled if pooled is not None else _is_decoder(config)
    loader = AutoModelForCausalLM if is_decoder else AutoModel
    try:
        with torch.device("meta"):
            model = loader.from_config(config, dtype=torch.float32, attn_implementation="eager")
    except (ValueError, KeyError, RuntimeError) as error:
        raise BundleError(
            f"{name_or_path} describes no {'causal language model' if is_decoder else 'encoder'}: "
            f"{_first_line(error)}",
            remedy="give a folder with a transformers model's config.json, or a hub id",
        ) from None
    return prepare_model(model, name_or_path, is_decoder, revision)


def checkpoint_bytes(loaded: LoadedModel) -> int:
    """Bytes of a model's weights as they are stored: of its files, or of its configuration's dtype."""
    folder = Path(loaded.name_or_path)
    found = [path.stat().st_size for suffix in _WEIGHTS for path in folder.glob(f"*{suffix}")]
    if found:
        return sum(found)
    dtype = getattr(loaded.config, "dtype", None)
    return parameter_count(loaded.model) * (dtype.itemsize if isinstance(dtype, torch.dtype) else 4)


def prepare_model(
    model: nn.Module, name_or_path: str, is_decoder: bool, revision: str | None = None
) -> LoadedModel:
    """Freeze a transformers model, put it into evaluation mode, and convert it to float32."""
    model.eval().requires_grad_(False).float()
    model.config.use_cache = False
    if not is_decoder and getattr(model, "pooler", None) is not None:
        model.pooler = None  # BERT's head for sentence pairs, which no readout uses
    return LoadedModel(model, name_or_path, revision, is_decoder)


def parameter_count(model: nn.Module) -> int:
    """Parameters of a model, tied ones counted once."""
    return sum(math.prod(parameter.shape) for parameter in model.parameters())


def _load_config(name_or_path: str, revision: str | None) -> Any:
    from transformers import AutoConfig

    path = Path(name_or_path)
    looks_like_path = path.is_absolute() or name_or_path.startswith(".") or name_or_path.count("/") > 1
    if looks_like_path and not path.is_dir():
        raise BundleError(
            f"there is no folder {name_or_path}",
            remedy="give a folder with a transformers model, or a hub id",
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise BundleError(
            f"{name_or_path} is not a transformers model: it has no config.json",
            remedy="give the folder that `save_pretrained` wrote",
        )
    try:
        return AutoConfig.from_pretrained(name_or_path, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        raise BundleError(
            f"{name_or_path} can't be read as a transformers model: {_first_line(error)}",
            remedy="give a folder with a transformers model, or a hub id that can be reached or is cached",
        ) from None


def _check_kind(config: Any, name: str) -> None:
    """Refuse what has no single text stack with linear layers."""
    reason = ""
    if getattr(config, "is_encoder_decoder", False):
        reason = "an encoder-decoder model"
    elif any(hasattr(config, part) for part in ("vision_config", "audio_config")):
        reason = "a multimodal model"
    elif getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        reason = "a mixture of experts"
    elif getattr(config, "quantization_config", None):
        reason = "quantized already"
    elif not getattr(config, "vocab_size", None):
        reason = "not a text model"
    if reason:
        raise BundleError(
            f"{name} ({config.model_type}) is {reason}; "
            "a program needs a plain causal language model or text encoder",
            remedy="take another checkpoint",
        )


def _is_decoder(config: Any) -> bool:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    architectures = getattr(config, "architectures", None) or []
    if any(name.endswith(_DECODER_HEADS) for name in architectures):
        return True
    # Encoders such as BERT have a causal head in transformers too, but are trained without it.
    has_causal_head = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return has_causal_head and config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
