"""Load a folder, GGUF file or Hub id as a float32 model."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from prge.errors import Refusal, first_line, format_value, refused_as
from server_export.checkpoint.classifier import (
    CheckpointClassifier,
    detach_classifier,
    detach_last_layer,
    is_classifier,
    is_single_label,
)
from server_export.checkpoint.config_bounds import check_cost, limit_modules
from server_export.checkpoint.experts import expert_layers
from server_export.checkpoint.files import (
    BUFFERS,
    GENERATION_CONFIG,
    UNQUANTIZED,
    ModelFiles,
    fetch_weights,
    find_files,
    read_config,
    stored_numel,
)
from server_export.checkpoint.stored import stored_tensors
from server_export.checkpoint.weights import lazy_state_dict, stored_names
from server_export.library_errors import TRANSFORMERS_ERRORS

_DECODER_HEADS = ("ForCausalLM", "LMHeadModel")
# Prefixes of head weights that a model without a head ignores.
_HEADS = re.compile(r"^(cls|lm_head|classifier|pre_classifier|score|qa_outputs|pooler|vocab_\w+)\.")
_POOLER = "pooler."
_OTHER_PARTS = ("vision_config", "audio_config")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_MAX_BUFFER_BYTES = 1 << 30
_MAX_NAMES = 5
_RESCALE = "rescale_every"
# The number of next tokens that ProphetNet predicts, each from hidden states of its own.
_STREAMS = "ngram"


@dataclass
class LoadedModel:
    """A transformers model in float32 and evaluation mode.

    Attributes:
        model: the model; its parameters may be on the meta device.
        name_or_path: the name that it was loaded by.
        revision: the commit of a Hub model.
        is_decoder: True for a causal language model with its head, False for an encoder.
        sha256: the hash of a folder's or GGUF file's content; None for a model without weights.
        part_of: the model type of a checkpoint that contains more than this text model, such as images.
        key_mapping: transformers' `key_mapping` for loading such a part; empty without weights.
        classifier: the last layer of an encoder's own classification head; `model` has the other layers.
        source: the manifest's description of the GGUF file; empty for other models.
    """

    model: nn.Module
    name_or_path: str
    revision: str | None
    is_decoder: bool
    sha256: str | None = None
    part_of: str | None = None
    key_mapping: Mapping[str, str] = field(default_factory=dict)
    classifier: CheckpointClassifier | None = None
    source: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        """The transformers configuration of the text model."""
        return self.model.config


def load_model(
    name_or_path: str, *, pooled: bool | None = None, revision: str | None = None, own_head: bool = True
) -> LoadedModel:
    """Load a causal language model or an encoder with its weights.

    Args:
        name_or_path: a folder, GGUF file or Hub id.
        pooled: True loads the model without its head, False with it; None decides by architecture.
        revision: the revision of a Hub id.
        own_head: whether to use the checkpoint's own classification head, if it has one.

    Raises:
        BundleError: there is no model, its architecture is not supported, or weights are missing, unexpected
            or not finite.
    """
    from transformers import GenerationConfig

    files = find_files(name_or_path, revision)
    opened, outline, classifier = _open_model(files, pooled, own_head)
    fetch_weights(files)
    check_size(files, outline, opened.part_of)
    arguments: dict[str, Any] = {"config": opened.config, "use_safetensors": True}
    loader = _loader(opened)
    if opened.part_of is not None or files.gguf:
        # transformers can't load every text part by itself, nor a GGUF file together with its configuration.
        loader, arguments["state_dict"] = type(outline), lazy_state_dict(files, outline)
    with refused_as(
        "not-loadable",
        f"Cannot load {name_or_path} as {opened.description}",
        (*TRANSFORMERS_ERRORS, SafetensorError),
        remedy="Use the folder or Hub id of a complete transformers checkpoint.",
    ):
        model, report = loader.from_pretrained(
            None if "state_dict" in arguments else str(files.folder),
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **arguments,
        )
        if "state_dict" in arguments and (files.folder / GENERATION_CONFIG).is_file():
            model.generation_config = GenerationConfig.from_pretrained(
                str(files.folder), local_files_only=True
            )
    _check_weights(name_or_path, model, report, opened, stored_tensors(files).names)
    if classifier is not None:
        classifier = detach_last_layer(model, classifier)
    loaded = prepare_model(model, name_or_path, opened.is_decoder, files.revision, opened.part_of, classifier)
    loaded = replace(loaded, source=files.source)
    return loaded if files.revision else replace(loaded, sha256=files.sha256())


def load_meta_model(
    name_or_path: str, *, pooled: bool | None = None, revision: str | None = None, own_head: bool = True
) -> LoadedModel:
    """Return the model that `load_model` loads with its parameters on the meta device; weights aren't read.

    Raises:
        BundleError: as of `load_model`, except for errors of weights.
    """
    files = find_files(name_or_path, revision)
    opened, outline, classifier = _open_model(files, pooled, own_head)
    for name in _other_parts(outline):
        outline.set_submodule(name, nn.Identity())
    loaded = prepare_model(
        outline, name_or_path, opened.is_decoder, files.revision, opened.part_of, classifier
    )
    return replace(loaded, source=files.source)


def read_use_cache(name_or_path: str, revision: str | None = None) -> bool:
    """Return whether a model's own configuration enables the KV cache, which `prepare_model` disables."""
    return bool(read_config(find_files(name_or_path, revision)).get("use_cache", True))


def prepare_model(
    model: nn.Module,
    name_or_path: str,
    is_decoder: bool,
    revision: str | None = None,
    part_of: str | None = None,
    classifier: CheckpointClassifier | None = None,
) -> LoadedModel:
    """Freeze a transformers model, put it into evaluation mode, and convert it to float32."""
    model.eval().requires_grad_(False).float()
    model.config.use_cache = False
    if getattr(model.config, _RESCALE, 0):
        # RWKV halves weights and hidden states every few layers to avoid float16 overflow.
        setattr(model.config, _RESCALE, 0)
    if not is_decoder and classifier is None and getattr(model, "pooler", None) is not None:
        # BERT's head for sentence pairs: no readout uses it, but some models call it.
        model.pooler = nn.Identity()
    return LoadedModel(model, name_or_path, revision, is_decoder, part_of=part_of, classifier=classifier)


def parameter_count(model: nn.Module) -> int:
    """Return the number of a model's text parameters, tied ones counted once."""
    others = tuple(f"{name}." for name in _other_parts(model))
    counted = (each for name, each in model.named_parameters() if not name.startswith(others))
    return sum(math.prod(parameter.shape) for parameter in counted)


def vocabulary_size(model: Any) -> int:
    """Return the number of tokens that both the embedding and the head, if there is one, know."""
    head = model.get_output_embeddings()
    tables = [model.get_input_embeddings()] + ([] if head is None else [head])
    return min(int(table.weight.shape[0]) for table in tables)


@dataclass(frozen=True)
class _ModelConfig:
    """The checked configuration of a text model; fields as in `LoadedModel`."""

    config: Any
    is_decoder: bool
    part_of: str | None
    has_classes: bool = False

    @property
    def description(self) -> str:
        return "a causal language model" if self.is_decoder else "an encoder"


def _open_model(
    files: ModelFiles, pooled: bool | None, own_head: bool
) -> tuple[_ModelConfig, Any, CheckpointClassifier | None]:
    """Return a model's configuration, the model without weights, and the last layer of its own classifier."""
    opened = _open_config(files, pooled)
    if pooled is None and opened.is_decoder and is_classifier(opened.config):
        raise Refusal(
            "classifying-decoder",
            f"{files.name} ({opened.config.model_type}) is a decoder with a classification head, which "
            "reads the hidden state of the last token. This head is not supported.",
            remedy="Use its base language model, and a task with a word for each class.",
        )
    if own_head and not opened.is_decoder and is_classifier(opened.config) and is_single_label(opened.config):
        with_classes = replace(opened, has_classes=True)
        outline = _outline(files, with_classes)
        if (classifier := detach_classifier(outline)) is not None:
            return with_classes, outline, classifier
    return opened, _outline(files, opened), None


def _open_config(files: ModelFiles, pooled: bool | None) -> _ModelConfig:
    """Return the checked configuration of a model, or of the text part of a multimodal model."""
    from transformers import AutoConfig, PretrainedConfig

    check_cost(read_config(files), files.config_path)
    with refused_as(
        "not-a-transformers-model",
        f"Cannot load {files.name} as a transformers model",
        TRANSFORMERS_ERRORS,
        remedy="Use a folder with a transformers model, or a Hub id.",
    ):
        whole = AutoConfig.from_pretrained(str(files.folder), trust_remote_code=False, local_files_only=True)
        text = whole if whole.is_encoder_decoder else whole.get_text_config()
        if not isinstance(text, PretrainedConfig):
            raise ValueError(f"text_config is {format_value(text)}")
    if _is_encoder_alone(whole):
        whole.is_encoder_decoder = False
        text = whole
    config = _text_part(whole, text)
    _check_is_text_model(config, whole, files.name)
    is_decoder = not pooled if pooled is not None else _is_decoder(config)
    return _ModelConfig(config, is_decoder, None if config is whole else whole.model_type)


def _text_part(config: Any, text: Any) -> Any:
    """Return the configuration of a multimodal checkpoint's text model; other configurations unchanged."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()
    if text is config or not (text.model_type in known or _has_decoder_class(text)):
        return config
        # A head next to the text part belongs to the whole model, whose configuration says if it is tied.
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    return text


def _encoder_class(config: Any) -> str | None:
    """Return the name of transformers' class for only the encoder of a model type, such as T5's."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES as ENCODERS

    return ENCODERS.get(config.model_type)


def _is_encoder_alone(config: Any) -> bool:
    """Return whether a checkpoint consists of such an encoder."""
    return _encoder_class(config) in (getattr(config, "architectures", None) or ())


def _loader(opened: _ModelConfig) -> Any:
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTextEncoding,
    )

    if opened.is_decoder:
        _has_decoder_class(opened.config)
        return AutoModelForCausalLM
    if opened.has_classes:
        return AutoModelForSequenceClassification
    return AutoModelForTextEncoding if _is_encoder_alone(opened.config) else AutoModel


def _has_decoder_class(config: Any) -> bool:
    """Return whether transformers has a causal language model for a configuration.

    A text part whose type is missing in transformers' table is registered with the class that the table has
    for the whole model.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config_class = type(config)
    if config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        return True
    package = config_class.__module__.rpartition(".")[0]
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        whole = CONFIG_MAPPING[name]
        if whole.__module__.startswith(f"{package}."):
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[whole]
            if model_class.config_class is config_class:
                # `exist_ok` is needed because transformers refuses to replace its own entries.
                AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
                return True
    return False


def _outline(files: ModelFiles, opened: _ModelConfig) -> Any:
    """Build the model on the meta device."""
    loader, config = _loader(opened), copy.deepcopy(opened.config)
    refusal = refused_as(
        "model-not-made",
        f"{files.name} is not {opened.description}",
        TRANSFORMERS_ERRORS,
        remedy="Use a folder with a transformers model's config.json, or a Hub id.",
    )
    with refusal, limit_modules(files.config_path), torch.device("meta"):
        model = loader.from_config(
            config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            raise Refusal(
                "empty-parameter",
                f"{files.name} does not describe a model: {name} has the shape {list(parameter.shape)}.",
                remedy="Correct its config.json.",
            )
    if not expert_layers(model) and _has_experts(model, opened.config):
        raise Refusal(
            "experts-not-supported",
            f"{files.name} ({opened.config.model_type}) is a mixture of experts that transformers does "
            "not call through its common interface. This architecture is not supported.",
            remedy="Use a checkpoint of another type, such as qwen3_moe, olmoe, granitemoe or mixtral.",
        )
    return model


def _needs_other_parts(config: Any) -> bool:
    """Return whether a model has parts for images or audio that no text-only class of transformers omits."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as DECODERS

    config_class = type(config)
    is_text_only = config_class in DECODERS and DECODERS[config_class].config_class is config_class
    return any(hasattr(config, part) for part in _OTHER_PARTS) and not is_text_only


def _other_parts(model: Any) -> list[str]:
    """Return the names of modules for images and audio, which text never reaches, by their configurations."""
    config_classes = {type(getattr(model.config, part, None)) for part in _OTHER_PARTS} - {type(None)}
    other_parts = list[str]()
    for name, module in model.named_modules():
        is_inner = name.startswith(tuple(f"{other}." for other in other_parts))
        if type(getattr(module, "config", None)) in config_classes and not is_inner:
            other_parts.append(name)
    return other_parts


def _has_experts(model: nn.Module, config: Any) -> bool:
    """Return whether a model has layers of several experts; a configuration alone may count unused ones."""
    from transformers import PretrainedConfig

    parts = [config, *(part for part in vars(config).values() if isinstance(part, PretrainedConfig))]
    counts = (getattr(part, name, None) for part in parts for name in _EXPERTS)
    return any(isinstance(count, int) and count > 1 for count in counts) and any(
        hasattr(module, "experts") for module in model.modules()
    )


def check_size(files: ModelFiles, outline: nn.Module, part_of: str | None = None) -> None:
    """Refuse a model larger than its stored weights, before any memory is allocated for it."""
    needed = sum(
        math.prod(parameter.shape)
        for name, parameter in outline.named_parameters()
        if not name.startswith(_POOLER)
    )
    # The weights of a checkpoint's other parts don't count.
    stored = stored_numel(files, stored_names(files, outline) if part_of is not None else None)
    buffers = sum(buffer.numel() * buffer.itemsize for buffer in outline.buffers())
    if needed > stored:
        raise Refusal(
            "weights-of-another-model",
            f"The weights of {files.name} belong to another model: its {files.config_name} describes "
            f"{needed:,} parameters, the weights hold {stored:,}.",
            remedy="Copy or download the model again.",
        )
    if buffers > _MAX_BUFFER_BYTES:
        raise Refusal(
            "tables-too-large",
            f"The buffers of {files.name} take {buffers:,} bytes; the maximum is {_MAX_BUFFER_BYTES:,}.",
            remedy="Correct its config.json.",
        )


def _check_weights(
    name: str, model: Any, report: Mapping[str, Any], opened: _ModelConfig, stored: Collection[str]
) -> None:
    """Raise BundleError unless the files have exactly the model's weights, and all are finite."""
    has_head = opened.is_decoder or opened.has_classes
    ignorable = _ignorable(model, opened.is_decoder, stored)
    problems = {
        "lacks": [key for key in report["missing_keys"] if has_head or not key.startswith(_POOLER)],
        "does not use": [
            key for key in report["unexpected_keys"] if not any(pattern.search(key) for pattern in ignorable)
        ],
        "has values that aren't finite in": [
            key
            for key, parameter in model.named_parameters()
            if not all(bool(torch.isfinite(end)) for end in torch.aminmax(parameter))
        ],
    }
    messages = [f"it {what} {_join_names(sorted(keys))}" for what, keys in problems.items() if keys]
    messages += [first_line(ValueError(message)) for message in report.get("error_msgs", ())]
    if messages:
        raise _other_weights_error(name, "; ".join(messages))


def check_names(loaded: LoadedModel, files: ModelFiles) -> None:
    """Raise a Refusal, `weights-incomplete`, if a model without weights has no use for a stored tensor.

    GGUF files are checked when they are opened, and multimodal checkpoints may contain other parts.
    """
    if files.gguf or loaded.part_of is not None:
        return
    model: Any = loaded.model
    names = stored_tensors(files).names
    # transformers' own list for the model, such as layers that predict several tokens.
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignorable = [*_ignorable(model, loaded.is_decoder, names), *map(re.compile, ignored)]
    if not loaded.is_decoder:
        ignorable.append(re.compile(rf"(^|\.){re.escape(_POOLER)}"))
    # Modules for images and audio were replaced by identities.
    removed = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.Identity))
    unused = {name for name in {*names} - stored_names(files, model) if not name.startswith(removed)}
    if unused := {name for name in unused if not any(each.search(name) for each in ignorable)}:
        raise _other_weights_error(files.name, f"it does not use {_join_names(sorted(unused))}")


def _ignorable(model: Any, is_decoder: bool, stored: Collection[str]) -> list[re.Pattern[str]]:
    """Return patterns of stored names that a model may ignore: old buffers and unused heads."""
    if is_decoder:
        return [BUFFERS]
    prefix = f"{model.base_model_prefix}."
    if not any(key.startswith(prefix) for key in stored):
        return [BUFFERS, _HEADS]
    # Everything outside of the base is a head.
    return [BUFFERS, _HEADS, re.compile(rf"^(?!{re.escape(prefix)})")]


def _other_weights_error(name: str, what: str) -> Refusal:
    return Refusal(
        "weights-incomplete",
        f"The weights of {name} don't match its configuration: {what}.",
        remedy="Use a complete checkpoint of the model.",
    )


def _join_names(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + rest


def _check_is_text_model(config: Any, whole: Any, name: str) -> None:
    """Refuse a model that is not a single text model; `config` is the text part of `whole`."""
    code, reason, remedy = "", "", "Use another checkpoint."
    quantization = getattr(config, "quantization_config", None) or getattr(whole, "quantization_config", None)
    if getattr(config, "is_encoder_decoder", False):
        code, reason = "encoder-decoder", "an encoder-decoder model"
        if hasattr(config, "hidden_size") and (name_of_encoder := _encoder_class(config)):
            remedy += (
                f' To export its encoder, write "architectures": ["{name_of_encoder}"] into config.json.'
            )
    elif quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        code, remedy = "quantized-already", UNQUANTIZED
        reason = f"already quantized{f' ({format_value(method)})' if method else ''}"
    elif config is whole and _needs_other_parts(config):
        code = "more-than-texts"
        reason = "a multimodal model, and transformers has no class for its text part alone"
    elif hasattr(type(config), _STREAMS):
        code, reason = "several-streams", "a model with separate hidden states for each predicted token"
    elif not getattr(config, "hidden_size", None):
        code, reason = "no-width", "a model without hidden_size in the configuration of its text part"
    elif not getattr(config, "vocab_size", None):
        code, reason = "not-a-text-model", "not a text model"
    if code:
        raise Refusal(
            code,
            f"{name} ({whole.model_type}) is {reason}. "
            "Only causal language models and text encoders are supported.",
            remedy=remedy,
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
