"""Make a tiny model of any text model type of transformers by shrinking its configuration.

Rules about names of settings apply to all types; nothing is written for one type. A number in a configuration
is a size, whose name determines its maximum; a list with an entry for each layer keeps one layer of every
type.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tests.tiny_models import VOCABULARY, WIDTH, WINDOW, randomize

LAYERS, POSITIONS, INNER = 2, 64, 96
# Width of an inner layer whose activation keeps 5 in 100 values: with only 96 values, PyTorch's own gradients
# in float32 differ by up to 2e-4 of the largest from those in double precision; with 1,024, by 1e-5.
_SPARSE, _INNER_IF_SPARSE = "activation_sparsity_pattern", 1024
# The first pattern that matches the whole name sets the maximum.
_LARGEST = (
    (r"chunk_size_feed_forward|.*_(offset|size_divisible_by)", 1),
    (r"(num_(hidden_|encoder_|decoder_)?|n_|(en|de)coder_)?layers?|num_blocks|num_layers_per_stack", LAYERS),
    (r"qk_head_dim|attention_head_dim", 32),
    (r"attention_hidden_size", 2 * WIDTH),
    (r".*kernel_size", 9),
    (r"indexer_kv_heads", 1),
    (r"index_topk|.*indexer_budget", POSITIONS),
    (r".*compress_ratio", 2),
    (r".*(head_dim|d_head|dim_head|head_size|kv_channels|d_kv|headdim)|qk_nope_head_dim|v_head_dim", 16),
    (r"(n_)?mamba_(n_|num_)?heads", 8),
    (r".*(kv_heads|key_value_heads|num_key_heads|query_groups)", 2),
    (r".*heads?", 4),
    (r".*(first_k_dense_replace|num_dense_layers|_groups?|group_size|topk_group|interleave.*)", 1),
    (r".*(experts_per_tok(en)?|top_?k|moe_k|period|layer_interval|every_n_layers|sparse_step)", 2),
    (r".*(experts|expert_num)", 4),
    (r".*type_vocab_size(s)?|.*shared_experts", 2),
    (r".*vocab(_size)?(_per_layer_input|_base)?", VOCABULARY),
    (r".*(window(_size|_len)?|local_attention)", WINDOW),
    (r".*(positions?|position_embeddings|n_ctx|max_seq_len|context_length|model_max_length)", POSITIONS),
    (
        r".*(rank|lowrank|dt_rank|state_size|d_state|rotary_dim|topk_blocks|block_size|chunk_length|chunk_size)",
        8,
    ),
    (r".*(intermediate|ffn|ff|feed_forward|d_inner|n_inner|hidden_dim).*|dff", INNER),
    (r".*embedding_size", WIDTH // 2),
)
_LAYER_COUNTS = _LARGEST[1][0]
_MAX_LAYERS = 6
# Replacements for numbers of configurations that depend on each other. "sizes": also replace values that are
# None; "times": how often the chosen layers repeat.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": 16},
    {"head_dim": 32},
    {"num_key_value_heads": 2},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 4, "sizes": True},
    {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 3},
    *({"layer_types": [first, "full_attention"]} for first in ("conv", "mamba", "linear_attention")),
    {"attn_layer_indices": [1]},
    {"sizes": True},
    {"num_layers_per_stack": None},
    {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    {"axial_pos_embds": False},
    {"times": 2},
    {"attention_window": 4, "languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
)
_SPECIAL = ("pad", "bos", "eos")


def text_types() -> dict[str, bool]:
    """Return every text model type of transformers' tables, and whether it is a decoder."""
    from transformers.models.auto import modeling_auto as tables

    masked, causal = tables.MODEL_FOR_MASKED_LM_MAPPING_NAMES, tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names = {**masked, **tables.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES, **causal}
    return {name: name in causal and name not in masked for name in names}


def make_tiny(model_type: str, seed: int = 0) -> Any:
    """Return a tiny model of a type in float32 with random parameters.

    Raises:
        ValueError: no shrunk configuration gives a model that runs.
    """
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForTextEncoding
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES as ENCODERS

    reason = ""
    model_class = AutoModelForCausalLM if text_types()[model_type] else AutoModel
    for config in tiny_configs(model_type):
        try:
            torch.manual_seed(seed)
            chosen = config()
            chosen.architectures = []
            if model_class is AutoModelForCausalLM and getattr(chosen, "is_decoder", None) is False:
                chosen.is_decoder = True
            if chosen.is_encoder_decoder and model_type in ENCODERS:
                # The encoder alone, such as T5's, which embeds sentences.
                chosen.is_encoder_decoder, model_class = False, AutoModelForTextEncoding
            model = model_class.from_config(chosen, attn_implementation="eager").eval()
            randomize(model)
            tokens = torch.arange(3, 12)[None]
            more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
            with torch.no_grad():
                model(input_ids=tokens, **more)
        except ImportError:
            # An error of a library for parts other than the text part.
            text = chosen.get_text_config()
            if text is not chosen:
                return make_tiny(text.model_type, seed)
        except Exception as error:  # a class may raise any exception of its parts
            reason = reason or f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
            continue
        if getattr(model, "pooler", None) is not None:
            model.pooler = torch.nn.Identity()
        return model.requires_grad_(False)
    raise ValueError(reason)


def make_classifier(model_type: str, classes: int, seed: int = 0, **changes: Any) -> Any:
    """Return a tiny model of a type with a classification head and random parameters."""
    import torch
    from transformers import AutoModelForSequenceClassification

    config = make_tiny(model_type).config
    config.num_labels = classes
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    randomize(model)
    config.architectures = model.config.architectures = [type(model).__name__]
    return model.requires_grad_(False)


def family(model_type: str, model: Any) -> str:
    """Return the family of a type, by its layers that are neither attention nor token-wise.

    Without such layers it is decoder or encoder. A recurrent decoder has a state whose size doesn't depend on
    how many tokens it has read. A type that transformers calls a causal language model, but isn't one, is
    neither.
    """
    config = model.config
    if config.is_encoder_decoder:
        return "encoder-decoder"
    if text_types()[model_type] and _keeps_state(model):
        return "recurrent"
    if any("expert" in name for name, _ in model.named_modules()):
        return "experts"
    if _has_other_parts(model_type, config):
        return "multimodal"
    if text_types()[model_type] and _reads_ahead(model):
        return "reads ahead"
    return "decoder" if text_types()[model_type] else "encoder"


def _has_other_parts(model_type: str, config: Any) -> bool:
    """Return whether a model also reads images or audio."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES as ENCODERS

    is_part = config.get_text_config(decoder=True) is not config and model_type not in ENCODERS
    return is_part or hasattr(config, "vision_config") or hasattr(config, "audio_config")


def _keeps_state(model: Any) -> bool:
    """Return whether a decoder needs more than keys and values of each token to continue a text."""
    import torch

    # Fewer tokens than a sliding window keeps; the window has a maximum too.
    short, longer = (torch.arange(3, 3 + count)[None] for count in (WINDOW - 3, WINDOW - 2))
    with torch.no_grad():
        kept, more = (
            _shapes([dict(model(input_ids=tokens, use_cache=True)), _own_tensors(model)])
            for tokens in (short, longer)
        )
    return any(len(shape) > 2 and shape[-2:] != (1, 1) and shape in more for shape in kept)


def _own_tensors(model: Any) -> list[Any]:
    """Return tensors of modules that are neither parameters nor buffers."""
    import torch

    values = (value for module in model.modules() for value in vars(module).values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def _shapes(values: Any) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in _tensors(values, set())]


def _tensors(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the tensors in an object of transformers at any depth, without parameters."""
    import torch

    if isinstance(value, torch.nn.Parameter | torch.nn.Module):
        return
    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, Mapping):
            inner: Any = value.values()
        elif isinstance(value, list | tuple):
            inner = value
        else:
            inner = vars(value).values() if type(value).__module__.startswith("transformers.") else ()
        for each in inner:
            yield from _tensors(each, seen)


def _reads_ahead(model: Any) -> bool:
    """Return whether a decoder's outputs for a token depend on later tokens."""
    import torch

    tokens = torch.arange(3, 12)[None].repeat(2, 1)
    tokens[1, 6:] += 5
    with torch.no_grad():
        one, other = model(input_ids=tokens).logits[:, :6]
    return not torch.allclose(one, other, atol=1e-5)


def tiny_configs(model_type: str) -> Iterator[Any]:
    """Return functions that make a configuration, the most likely one first."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    for with_lists in (True, False):
        for changes in _VARIANTS:
            yield lambda lists=with_lists, more=changes: config_class(**_shrunk(config_class(), lists, more))


def _shrunk(config: Any, with_lists: bool, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a tiny configuration of the same class."""
    from transformers import PretrainedConfig

    result: dict[str, Any] = {}
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    layers = _chosen_layers(values) * changes.get("times", 1)
    for name, value in values.items():
        if name in changes:
            result[name] = changes[name]
        elif isinstance(value, PretrainedConfig):
            result[name] = {**_shrunk(value, with_lists, changes), "model_type": value.model_type}
        elif isinstance(value, int) and not isinstance(value, bool):
            result[name] = _size(name, value, values)
        elif name.endswith("token_id") and isinstance(value, list):
            result[name] = _size(name, value[0], values)
        elif value is None and "sizes" in changes and _largest(name) is not None:
            result[name] = _largest(name)
        elif _is_by_layer(value, values) and with_lists:
            result[name] = [_entry(name, value[index], values) for index in layers]
        elif name == "attention_types":
            result[name] = [[pattern, 1] for pattern, _ in value]
    count, shared = _layer_count(values), values.get("num_kv_shared_layers") or 0
    result |= {name: len(layers) for name, value in values.items() if value == count and _is_layers(name)}
    return result | ({"num_kv_shared_layers": len(layers) // 2} if shared else {})


def _size(name: str, value: int, given: Mapping[str, Any]) -> int:
    if name.endswith(("token_id", "token_index")):
        special = next((index for index, word in enumerate(_SPECIAL) if name.startswith(word)), 3)
        return value if value < VOCABULARY else special
    if name == "vocab_size":
        return VOCABULARY
    if value <= 1 or name in ("attention_chunk_size", "num_buckets"):
        return value
    largest = _largest(name)
    if largest == WINDOW and value == given.get("max_position_embeddings"):
        # It contains all positions, and some models read single ones.
        largest = POSITIONS
    if largest == INNER and _SPARSE in given:
        largest = _INNER_IF_SPARSE
    if largest in (WIDTH // 2, 2 * WIDTH) and value == given.get("hidden_size"):
        largest = WIDTH
    return min(value, WIDTH if largest is None else largest)


def _largest(name: str) -> int | None:
    return next((size for pattern, size in _LARGEST if re.fullmatch(pattern, name)), None)


def _is_layers(name: str) -> bool:
    return re.fullmatch(_LAYER_COUNTS, name) is not None


def _layer_count(given: Mapping[str, Any]) -> int:
    counts = [value for name, value in given.items() if isinstance(value, int) and _is_layers(name)]
    return max(counts, default=0)


def _is_by_layer(value: Any, given: Mapping[str, Any]) -> bool:
    """Return whether a value is a list with an entry for each layer; entries of index lists differ."""
    if not isinstance(value, list) or len(value) < 2 or len(value) != _layer_count(given):
        return False
    return value != sorted(set(value)) if all(isinstance(each, int) for each in value) else True


def _entry(name: str, value: Any, given: Mapping[str, Any]) -> Any:
    is_size = isinstance(value, int) and not isinstance(value, bool)
    return _size(name, value, given) if is_size else copy.deepcopy(value)


def _chosen_layers(given: Mapping[str, Any]) -> list[int]:
    """Return indices of one layer of every type in order, at least two, and twice if layers share keys."""
    lists = [value for value in given.values() if _is_by_layer(value, given)]
    patterns = [
        len(given.get("block_types") or ()),
        *(len(each[0]) for each in given.get("attention_types", ())),
    ]
    layer_types = list(zip(*(map(str, each) for each in lists), strict=True))
    first = sorted({layer_type: index for index, layer_type in reversed([*enumerate(layer_types)])}.values())[
        :_MAX_LAYERS
    ]
    more = [index for index in range(max(LAYERS, *patterns)) if index not in first]
    chosen = sorted([*first, *more[: max(0, LAYERS - len(first), max(patterns) - len(first))]])
    return chosen * 2 if given.get("num_kv_shared_layers") else chosen
