"""A folder or hub id becomes a float32 model."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from prge.errors import BundleError
from server_export.model.files import (
    BUFFERS,
    ModelFiles,
    fetch_weights,
    find_files,
    first_line,
    read_config,
    stored_numbers,
)

_DECODER_HEADS = ("ForCausalLM", "LMHeadModel")
# Heads that a model without one has no use for.
_HEADS = re.compile(r"^(cls|lm_head|classifier|pre_classifier|score|qa_outputs|pooler|vocab_\w+)\.")
_POOLER = "pooler."
_MOST_BUFFER_BYTES = 1 << 30
_MOST_NAMES = 5


@dataclass
class LoadedModel:
    """A transformers model in float32 and evaluation mode.

    `is_decoder` tells a causal language model with its vocabulary head from an encoder without a head.
    `revision` is the commit of a hub id, `sha256` the content of a folder; the outline of one has none.
    """

    model: nn.Module
    name_or_path: str
    revision: str | None
    is_decoder: bool
    sha256: str | None = None

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
        BundleError: there is no model, it is of a kind that a program can't be made of, or its weights are
            not all there, not all used, or not finite.
    """
    files = find_files(name_or_path, revision)
    config, is_decoder = _open_config(files, pooled)
    outline = _outline(files, config, is_decoder)
    fetch_weights(files)
    check_size(files, outline)
    try:
        model, report = _loader(is_decoder).from_pretrained(
            str(files.folder),
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises what its parts raise
        raise BundleError(
            f"{name_or_path} can't be loaded as {'a causal language model' if is_decoder else 'an encoder'}: "
            f"{first_line(error)}",
            remedy="give the folder or hub id of a complete transformers checkpoint",
        ) from None
    _check_weights(name_or_path, model, report, is_decoder)
    loaded = prepare_model(model, name_or_path, is_decoder, files.revision)
    return loaded if files.revision else replace(loaded, sha256=files.sha256())


def outline_model(
    name_or_path: str, *, pooled: bool | None = None, revision: str | None = None
) -> LoadedModel:
    """The model that `load_model` would load, with shapes instead of weights; from its config.json alone.

    Raises:
        BundleError: as `load_model`, but for the weights.
    """
    files = find_files(name_or_path, revision)
    config, is_decoder = _open_config(files, pooled)
    return prepare_model(_outline(files, config, is_decoder), name_or_path, is_decoder, files.revision)


def read_use_cache(name_or_path: str, revision: str | None = None) -> bool:
    """Whether a model's own configuration has it keep keys and values; `prepare_model` switches that off."""
    return bool(read_config(find_files(name_or_path, revision)).get("use_cache", True))


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


def _open_config(files: ModelFiles, pooled: bool | None) -> tuple[Any, bool]:
    """A checked configuration, and whether its model is a decoder."""
    from transformers import AutoConfig

    read_config(files)
    try:
        config = AutoConfig.from_pretrained(str(files.folder), trust_remote_code=False, local_files_only=True)
        _check_kind(config, files.name)
        return config, not pooled if pooled is not None else _is_decoder(config)
    except BundleError:
        raise
    except Exception as error:  # any number or name of a configuration may be what a class can't take
        raise BundleError(
            f"{files.name} can't be read as a transformers model: {first_line(error)}",
            remedy="give a folder with a transformers model, or a hub id",
        ) from None


def _loader(is_decoder: bool) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM

    return AutoModelForCausalLM if is_decoder else AutoModel


def _outline(files: ModelFiles, config: Any, is_decoder: bool) -> Any:
    """The model without memory for its numbers."""
    try:
        with torch.device("meta"):
            model = _loader(is_decoder).from_config(
                copy.deepcopy(config),
                dtype=torch.float32,
                attn_implementation="eager",
                trust_remote_code=False,
            )
    except Exception as error:
        raise BundleError(
            f"{files.name} describes no {'causal language model' if is_decoder else 'encoder'}: "
            f"{first_line(error)}",
            remedy="give a folder with a transformers model's config.json, or a hub id",
        ) from None
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            raise BundleError(
                f"{files.name} describes no model: {name} would be {list(parameter.shape)}",
                remedy="correct its config.json",
            )
    return model


def check_size(files: ModelFiles, outline: nn.Module) -> None:
    """Raise BundleError before a configuration makes memory be taken that no weights are there for."""
    needed = sum(
        math.prod(parameter.shape)
        for name, parameter in outline.named_parameters()
        if not name.startswith(_POOLER)
    )
    stored = stored_numbers(files)
    buffers = sum(buffer.numel() * buffer.itemsize for buffer in outline.buffers())
    if needed > stored:
        raise BundleError(
            f"{files.name} has weights for another model: its config.json describes {needed:,} numbers, the "
            f"weights hold {stored:,}",
            remedy="copy the model again",
        )
    if buffers > _MOST_BUFFER_BYTES:
        raise BundleError(
            f"{files.name} has tables of {buffers:,} bytes, at most {_MOST_BUFFER_BYTES:,} can be exported",
            remedy="correct its config.json",
        )


def _check_weights(name: str, model: nn.Module, report: Mapping[str, Any], is_decoder: bool) -> None:
    """Raise BundleError unless every weight came from the files, and every one of the files was used."""
    spare = (BUFFERS,) if is_decoder else (BUFFERS, _HEADS)
    problems = {
        "lacks": [key for key in report["missing_keys"] if is_decoder or not key.startswith(_POOLER)],
        "has no place for": [
            key for key in report["unexpected_keys"] if not any(kind.search(key) for kind in spare)
        ],
        "has numbers that aren't finite in": [
            key
            for key, parameter in model.named_parameters()
            if not all(bool(torch.isfinite(end)) for end in torch.aminmax(parameter))
        ],
    }
    texts = [f"it {what} {_listed(sorted(keys))}" for what, keys in problems.items() if keys]
    texts += [first_line(ValueError(message)) for message in report.get("error_msgs", ())]
    if texts:
        raise BundleError(
            f"the weights of {name} are not those of its config.json: {'; '.join(texts)}",
            remedy="give a complete checkpoint of the model",
        )


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + rest


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
