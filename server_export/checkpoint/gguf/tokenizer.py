"""The tokenizer of a GGUF file, by transformers' conversion and corrections of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prge.errors import Refusal, first_line, format_value
from server_export.checkpoint.gguf.header import TOKENS, GgufHeader

_MODEL, _SPLIT, _PREFIX = (f"tokenizer.ggml.{name}" for name in ("model", "pre", "add_space_prefix"))
_REMEDY = "Use the model's original folder, with its tokenizer.json."
# llama.cpp's names of pre-tokenizers: those that split as GPT-2 does, and those that also split off every
# digit. transformers treats unknown names as GPT-2's.
_AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "trillion", "granite-docling")
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_CONTROL = 3
# Control tokens that llama.cpp treats as ends of an answer, whatever the header says.
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <turn|> <|endoftext|> <|eom_id|> <|end_of_text|> "
    "<|return|> <EOT> <|END_OF_TURN_TOKEN|>".split()
)


def load_gguf_tokenizer(header: GgufHeader) -> Any:
    """Load the fast tokenizer of a GGUF file, with its special tokens and its chat template.

    Raises:
        BundleError: the file has no tokenizer, or transformers can't reproduce its tokens.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    if TOKENS not in header.fields:
        raise Refusal("no-tokenizer", f"{header.path} has no tokenizer.", remedy=_REMEDY)
    pretokenizer = _pretokenizer(header)
    with _refused(header):
        architecture, metadata, settings = get_gguf_tokenizer(str(header.path))
        backend, _ = convert_gguf_tokenizer(architecture, metadata)
    _correct_backend(header, backend, pretokenizer)
    content = _tokenizer_json(backend, metadata)
    with _refused(header):
        backend = Tokenizer.from_str(json.dumps(content))
        return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


@contextmanager
def _refused(header: GgufHeader) -> Iterator[None]:
    """Refuse a file if `tokenizers` or transformers raises inside the context."""
    try:
        yield
    except Exception as error:  # `tokenizers` raises Exception itself, and transformers many of its own
        raise Refusal(
            "tokenizer-not-read",
            f"Cannot read the tokenizer of {header.path}: {first_line(error)}",
            remedy=_REMEDY,
        ) from None


def eos_token_ids(header: GgufHeader) -> list[int]:
    """Return the ids that end an answer: those of the header, and control tokens with well-known names."""
    from transformers.integrations.gguf import get_gguf_tokenizer

    ids = {header.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    _, metadata, _ = get_gguf_tokenizer(str(header.path))
    token_types = metadata.get("token_type") or []
    tokens = zip(metadata["tokens"], token_types, strict=False)
    ids |= {
        token_id
        for token_id, (token, token_type) in enumerate(tokens)
        if token_type == _CONTROL and token in _ENDS
    }
    return sorted(ids)


def _pretokenizer(header: GgufHeader) -> str | None:
    """Return the name of a file's pre-tokenizer, or None if the file names none.

    Raises:
        BundleError: transformers does not know the pre-tokenizer.
    """
    # transformers doesn't export this table, and silently splits as GPT-2 does for other names.
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    pretokenizer = header.get(_SPLIT)
    known = (*GGUF_PRE_TOKENIZER_SPLITS, *_AS_GPT2, *_DIGITS_APART, "default", None)
    if header.get(_MODEL) == "gpt2" and pretokenizer not in known:
        raise Refusal(
            "tokenizer-split-not-read",
            f"{header.path} has the pre-tokenizer {format_value(pretokenizer)}, which transformers does "
            "not know; text would be tokenized differently.",
            remedy=_REMEDY,
        )
    return pretokenizer if isinstance(pretokenizer, str) else None


def _correct_backend(header: GgufHeader, backend: Any, pretokenizer: str | None) -> None:
    from tokenizers import decoders, pre_tokenizers

    if header.get(_MODEL) == "gpt2" and pretokenizer in _DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    is_gemma = header.architecture.startswith("gemma")
    if header.get(_MODEL) == "llama" and header.get(_PREFIX) is False and not is_gemma:
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement="\u2581", prepend_scheme="never", split=False
        )
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )


def _tokenizer_json(backend: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `tokenizer.json` with exactly the file's tokens and with its unknown token.

    transformers' converters add tokens of their own, for which the model has no embeddings.
    """
    content, tokens = json.loads(backend.to_str()), metadata["tokens"]
    content["added_tokens"] = [each for each in content["added_tokens"] if each["id"] < len(tokens)]
    unknown = metadata.get("unk_token_id")
    if content["model"]["type"] == "BPE" and unknown is not None:
        content["model"]["unk_token"] = tokens[unknown]
    return dict(content)
