"""A folder, GGUF file or hub id becomes a float32 model."""

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

from prge.errors import Refusal, first_line, refused_as, shown
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
# Heads that a model without one has no use for.
_HEADS = re.compile(r"^(cls|lm_head|classifier|pre_classifier|score|qa_outputs|pooler|vocab_\w+)\.")
_POOLER = "pooler."
_OTHER_PARTS = ("vision_config", "audio_config")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_MOST_BUFFER_BYTES = 1 << 30
_MOST_NAMES = 5
_HALVES = "rescale_every"
# How many tokens ahead ProphetNet predicts, each in a stream of states of its own.
_STREAMS = "ngram"


@dataclass
class LoadedModel:
    """A transformers model in float32 and evaluation mode.

    `is_decoder` tells a causal language model with its vocabulary head from an encoder without a head.
    `revision` is the commit of a hub id, `sha256` the content of a folder; the outline of one has none.
    `part_of` is the type of a checkpoint that holds more, such as images, of which this is the text part;
    `key_mapping` is what transformers is to be told of its names then, once the weights are there.
    `source` tells of the GGUF file that weights are dequantized from, nothing of other models.
    `classifier` is the last layer of an encoder's own classification head, whose other layers `model` has.
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
    """Load a causal language model or an encoder.

    Args:
        name_or_path: folder, GGUF file or hub id.
        pooled: True loads the model without its head, False with it, None decides by architecture.
        revision: of a hub id.
        own_head: whether an encoder's classification head is taken, if the checkpoint has one.

    Raises:
        BundleError: there is no model, it is of a kind that a program can't be made of, or its weights are
            not all there, not all used, or not finite.
    """
    from transformers import GenerationConfig

    files = find_files(name_or_path, revision)
    opened, outline, classifier = _opened(files, pooled, own_head)
    fetch_weights(files)
    check_size(files, outline, opened.part_of)
    given: dict[str, Any] = {"config": opened.config, "use_safetensors": True}
    loader = _loader(opened)
    if opened.part_of is not None or files.gguf:
        # transformers finds the text part of some checkpoints only, and saves no model of a GGUF file.
        loader, given["state_dict"] = type(outline), lazy_state_dict(files, outline)
    with refused_as(
        "not-loadable",
        f"{name_or_path} can't be loaded as {opened.kind}",
        (*TRANSFORMERS_ERRORS, SafetensorError),
        remedy="give the folder or hub id of a complete transformers checkpoint",
    ):
        model, report = loader.from_pretrained(
            None if "state_dict" in given else str(files.folder),
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **given,
        )
        if "state_dict" in given and (files.folder / GENERATION_CONFIG).is_file():
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
    """The model that `load_model` would load, with shapes instead of weights; from its config.json alone.

    Raises:
        BundleError: as `load_model`, but for the weights.
    """
    files = find_files(name_or_path, revision)
    opened, outline, classifier = _opened(files, pooled, own_head)
    for name in _other_parts(outline):
        outline.set_submodule(name, nn.Identity())
    loaded = prepare_model(
        outline, name_or_path, opened.is_decoder, files.revision, opened.part_of, classifier
    )
    return replace(loaded, source=files.source)


def read_use_cache(name_or_path: str, revision: str | None = None) -> bool:
    """Whether a model's own configuration has it keep keys and values; `prepare_model` switches that off."""
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
    if getattr(model.config, _HALVES, 0):
        # RWKV halves weights and states every few layers, so that half precision holds them.
        setattr(model.config, _HALVES, 0)
    if not is_decoder and classifier is None and getattr(model, "pooler", None) is not None:
        # BERT's head for sentence pairs, which no readout uses; some models call it all the same.
        model.pooler = nn.Identity()
    return LoadedModel(model, name_or_path, revision, is_decoder, part_of=part_of, classifier=classifier)


def parameter_count(model: nn.Module) -> int:
    """Parameters of a model, tied ones counted once, those for more than texts not at all."""
    others = tuple(f"{name}." for name in _other_parts(model))
    counted = (each for name, each in model.named_parameters() if not name.startswith(others))
    return sum(math.prod(parameter.shape) for parameter in counted)


def vocabulary_size(model: Any) -> int:
    """Words that a model reads, and says if it has a head: either may have some that the other lacks."""
    head = model.get_output_embeddings()
    tables = [model.get_input_embeddings()] + ([] if head is None else [head])
    return min(int(table.weight.shape[0]) for table in tables)


@dataclass(frozen=True)
class _Opened:
    """A checked configuration of a text model, and what it is of; see `LoadedModel`."""

    config: Any
    is_decoder: bool
    part_of: str | None
    has_classes: bool = False

    @property
    def kind(self) -> str:
        return "a causal language model" if self.is_decoder else "an encoder"


def _opened(
    files: ModelFiles, pooled: bool | None, own_head: bool
) -> tuple[_Opened, Any, CheckpointClassifier | None]:
    """What a model is, its outline, and the last layer of its own classification head."""
    opened = _open_config(files, pooled)
    if pooled is None and opened.is_decoder and is_classifier(opened.config):
        raise Refusal(
            "classifying-decoder",
            f"{files.name} ({opened.config.model_type}) is a decoder that was trained for classes: its head "
            "reads the state of a row's last token, which no program answers",
            remedy="take the language model that it was made of, and a task with a word for each class",
        )
    if own_head and not opened.is_decoder and is_classifier(opened.config) and is_single_label(opened.config):
        with_classes = replace(opened, has_classes=True)
        outline = _outline(files, with_classes)
        if (classifier := detach_classifier(outline)) is not None:
            return with_classes, outline, classifier
    return opened, _outline(files, opened), None


def _open_config(files: ModelFiles, pooled: bool | None) -> _Opened:
    """The configuration of a model, or of the text part of one."""
    from transformers import AutoConfig, PretrainedConfig

    check_cost(read_config(files), files.config_path)
    with refused_as(
        "not-a-transformers-model",
        f"{files.name} can't be read as a transformers model",
        TRANSFORMERS_ERRORS,
        remedy="give a folder with a transformers model, or a hub id",
    ):
        whole = AutoConfig.from_pretrained(str(files.folder), trust_remote_code=False, local_files_only=True)
        text = whole if whole.is_encoder_decoder else whole.get_text_config()
        if not isinstance(text, PretrainedConfig):
            raise ValueError(f"its text_config is {shown(text)}")
    if _is_encoder_alone(whole):
        whole.is_encoder_decoder = False
        text = whole
    config = _text_part(whole, text)
    _check_kind(config, whole, files.name)
    is_decoder = not pooled if pooled is not None else _is_decoder(config)
    return _Opened(config, is_decoder, None if config is whole else whole.model_type)


def _text_part(config: Any, text: Any) -> Any:
    """The configuration of the text model of a checkpoint that holds more; any other one as it is."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()
    if text is config or not (text.model_type in known or _is_known(text)):
        return config
    # A head beside the part is the whole model's, which says whether it is the part's table of embeddings.
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    return text


def _encoder_class(config: Any) -> str | None:
    """The name of transformers' class for the encoder of a type alone, such as T5's."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES as ENCODERS

    return ENCODERS.get(config.model_type)


def _is_encoder_alone(config: Any) -> bool:
    """Whether a checkpoint is of that class."""
    return _encoder_class(config) in (getattr(config, "architectures", None) or ())


def _loader(opened: _Opened) -> Any:
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTextEncoding,
    )

    if opened.is_decoder:
        _is_known(opened.config)
        return AutoModelForCausalLM
    if opened.has_classes:
        return AutoModelForSequenceClassification
    return AutoModelForTextEncoding if _is_encoder_alone(opened.config) else AutoModel


def _is_known(config: Any) -> bool:
    """Whether transformers has a decoder of a configuration.

    It is told its own of a text part whose type its table lacks: it has that of the whole alone.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = type(config)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return True
    package = kind.__module__.rpartition(".")[0]
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        whole = CONFIG_MAPPING[name]
        if whole.__module__.startswith(f"{package}."):
            found = MODEL_FOR_CAUSAL_LM_MAPPING[whole]
            if found.config_class is kind:
                # Without it transformers keeps its own configurations as they are.
                AutoModelForCausalLM.register(kind, found, exist_ok=True)
                return True
    return False


def _outline(files: ModelFiles, opened: _Opened) -> Any:
    """The model without memory for its numbers."""
    loader, config = _loader(opened), copy.deepcopy(opened.config)
    refusal = refused_as(
        "model-not-made",
        f"{files.name} isn't {opened.kind}",
        TRANSFORMERS_ERRORS,
        remedy="give a folder with a transformers model's config.json, or a hub id",
    )
    with refusal, limit_modules(files.config_path), torch.device("meta"):
        model = loader.from_config(
            config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            raise Refusal(
                "empty-parameter",
                f"{files.name} describes no model: {name} would be {list(parameter.shape)}",
                remedy="correct its config.json",
            )
    if not expert_layers(model) and _has_experts(model, opened.config):
        raise Refusal(
            "experts-not-supported",
            f"{files.name} ({opened.config.model_type}) is a mixture of experts that transformers calls in a "
            "way of its own",
            remedy="take a checkpoint of another type, such as qwen3_moe, olmoe, granitemoe or mixtral",
        )
    return model


def _needs_other_parts(config: Any) -> bool:
    """Whether a configuration has parts beside texts, and isn't that of a language model without them."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as DECODERS

    kind = type(config)
    goes_without = kind in DECODERS and DECODERS[kind].config_class is kind
    return any(hasattr(config, part) for part in _OTHER_PARTS) and not goes_without


def _other_parts(model: Any) -> list[str]:
    """The modules for images and sounds, which texts never come to: those with a configuration for these."""
    kinds = {type(getattr(model.config, part, None)) for part in _OTHER_PARTS} - {type(None)}
    found = list[str]()
    for name, module in model.named_modules():
        is_inner = name.startswith(tuple(f"{other}." for other in found))
        if type(getattr(module, "config", None)) in kinds and not is_inner:
            found.append(name)
    return found


def _has_experts(model: nn.Module, config: Any) -> bool:
    """Whether layers of a model have several experts; its configuration may count some that none has."""
    from transformers import PretrainedConfig

    parts = [config, *(part for part in vars(config).values() if isinstance(part, PretrainedConfig))]
    counts = (getattr(part, name, None) for part in parts for name in _EXPERTS)
    return any(isinstance(count, int) and count > 1 for count in counts) and any(
        hasattr(module, "experts") for module in model.modules()
    )


def check_size(files: ModelFiles, outline: nn.Module, part_of: str | None = None) -> None:
    """Raise BundleError before a configuration makes memory be taken that no weights are there for."""
    needed = sum(
        math.prod(parameter.shape)
        for name, parameter in outline.named_parameters()
        if not name.startswith(_POOLER)
    )
    # What isn't the text part's may be anything.
    stored = stored_numel(files, stored_names(files, outline) if part_of is not None else None)
    buffers = sum(buffer.numel() * buffer.itemsize for buffer in outline.buffers())
    if needed > stored:
        raise Refusal(
            "weights-of-another-model",
            f"{files.name} has weights for another model: its {files.config_name} describes {needed:,} "
            f"numbers, the weights hold {stored:,}",
            remedy="copy the model again",
        )
    if buffers > _MOST_BUFFER_BYTES:
        raise Refusal(
            "tables-too-large",
            f"{files.name} has tables of {buffers:,} bytes, at most {_MOST_BUFFER_BYTES:,} can be exported",
            remedy="correct its config.json",
        )


def _check_weights(
    name: str, model: Any, report: Mapping[str, Any], opened: _Opened, stored: Collection[str]
) -> None:
    """Raise BundleError unless every weight came from the files, and every one of the files was used."""
    has_head = opened.is_decoder or opened.has_classes
    spare = _spare(model, opened.is_decoder, stored)
    problems = {
        "lacks": [key for key in report["missing_keys"] if has_head or not key.startswith(_POOLER)],
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
        raise _other_weights(name, "; ".join(texts))


def check_names(loaded: LoadedModel, files: ModelFiles) -> None:
    """Raise Refusal, `weights-incomplete`, if a model without weights has no place for a tensor of its files.

    A GGUF file is checked when it is opened; of a checkpoint that holds more than texts a part is taken.
    """
    if files.gguf or loaded.part_of is not None:
        return
    model: Any = loaded.model
    names = stored_tensors(files).names
    # transformers' own list for the model, such as of layers that predict several tokens.
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    spare = [*_spare(model, loaded.is_decoder, names), *map(re.compile, ignored)]
    if not loaded.is_decoder:
        spare.append(re.compile(rf"(^|\.){re.escape(_POOLER)}"))
    # Parts for images and sounds were taken out.
    out = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.Identity))
    others = {name for name in {*names} - stored_names(files, model) if not name.startswith(out)}
    if others := {name for name in others if not any(each.search(name) for each in spare)}:
        raise _other_weights(files.name, f"it has no place for {_listed(sorted(others))}")


def _spare(model: Any, is_decoder: bool, stored: Collection[str]) -> list[re.Pattern[str]]:
    """What names of tensors look like that a model may have no place for: old buffers, and heads."""
    if is_decoder:
        return [BUFFERS]
    prefix = f"{model.base_model_prefix}."
    if not any(key.startswith(prefix) for key in stored):
        return [BUFFERS, _HEADS]
    # What stands beside the base is a head.
    return [BUFFERS, _HEADS, re.compile(rf"^(?!{re.escape(prefix)})")]


def _other_weights(name: str, what: str) -> Refusal:
    return Refusal(
        "weights-incomplete",
        f"the weights of {name} are not those of its config.json: {what}",
        remedy="give a complete checkpoint of the model",
    )


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + rest


def _check_kind(config: Any, whole: Any, name: str) -> None:
    """Refuse what has no single text stack with linear layers; `config` is the text part of `whole`."""
    code, reason, remedy = "", "", "take another checkpoint"
    codes = getattr(config, "quantization_config", None) or getattr(whole, "quantization_config", None)
    if getattr(config, "is_encoder_decoder", False):
        code, reason = "encoder-decoder", "an encoder-decoder model"
        if hasattr(config, "hidden_size") and (name_of_encoder := _encoder_class(config)):
            remedy += f', or its encoder: write "architectures": ["{name_of_encoder}"] into its config.json'
    elif codes:
        method = codes.get("quant_method") if isinstance(codes, Mapping) else None
        code, remedy = "quantized-already", UNQUANTIZED
        reason = f"quantized already{f' ({shown(method)})' if method else ''}"
    elif config is whole and _needs_other_parts(config):
        code = "more-than-texts"
        reason = "a model of more than texts, whose text part transformers has no class of its own for"
    elif hasattr(type(config), _STREAMS):
        code, reason = "several-streams", "a model whose layers carry a stream of states for each next token"
    elif not getattr(config, "hidden_size", None):
        code, reason = "no-width", "a model whose configuration has no hidden_size of its text part"
    elif not getattr(config, "vocab_size", None):
        code, reason = "not-a-text-model", "not a text model"
    if code:
        raise Refusal(
            code,
            f"{name} ({whole.model_type}) is {reason}; "
            "a program needs a plain causal language model or text encoder",
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
