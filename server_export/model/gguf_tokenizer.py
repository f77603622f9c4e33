"""The tokenizer of a GGUF file, as transformers makes it of the header, with what it leaves out put right."""

from __future__ import annotations

from typing import Any

from prge.errors import BundleError, shown
from server_export.model.gguf_header import TOKENS, GgufHeader

_MODEL, _SPLIT, _PREFIX = (f"tokenizer.ggml.{name}" for name in ("model", "pre", "add_space_prefix"))
_REMEDY = "take the model's own folder, with its tokenizer.json"
# llama.cpp's names for rules by which texts are split before tokens are merged: GPT-2's own, and that with
# every digit by itself. transformers takes what it doesn't know for GPT-2's.
_AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "trillion", "granite-docling")
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_CONTROL = 3
# Control tokens that end an answer whatever a header says, as llama.cpp takes them.
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <turn|> <|endoftext|> <|eom_id|> <|end_of_text|> "
    "<|return|> <EOT> <|END_OF_TURN_TOKEN|>".split()
)


def tokenizer_of(header: GgufHeader) -> Any:
    """The fast tokenizer of a file, with its special tokens and its chat template.

    Raises:
        BundleError: the file has none, or one that transformers can't make the same tokens with.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    if TOKENS not in header.fields:
        raise BundleError(f"{header.path} has no tokenizer", remedy=_REMEDY)
    split = _split(header)
    try:
        architecture, told, settings = get_gguf_tokenizer(str(header.path))
        backend, _ = convert_gguf_tokenizer(architecture, told)
        _put_right(header, backend, split)
        return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    except (
        Exception
    ) as error:  # of transformers, of tokenizers, and of what a hostile vocabulary brings about
        raise BundleError(
            f"{header.path} has a tokenizer that can't be read: {str(error).splitlines()[0:1] or error}",
            remedy=_REMEDY,
        ) from None


def end_tokens(header: GgufHeader) -> list[int]:
    """Tokens that end an answer: those of the header, and control tokens that are named so."""
    from transformers.integrations.gguf import get_gguf_tokenizer

    named = {header.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    _, told, _ = get_gguf_tokenizer(str(header.path))
    kinds = told.get("token_type") or []
    texts = zip(told["tokens"], kinds, strict=False)
    named |= {number for number, (text, kind) in enumerate(texts) if kind == _CONTROL and text in _ENDS}
    return sorted(named)


def _split(header: GgufHeader) -> str | None:
    """The name of the rule that splits texts, of a tokenizer that has one.

    Raises:
        BundleError: it is one that transformers doesn't know.
    """
    # A table that transformers doesn't export: what isn't in it is silently split as GPT-2 does.
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    split = header.get(_SPLIT)
    known = (*GGUF_PRE_TOKENIZER_SPLITS, *_AS_GPT2, *_DIGITS_APART, "default", None)
    if header.get(_MODEL) == "gpt2" and split not in known:
        raise BundleError(
            f"{header.path} splits texts by the rule {shown(split)}, which transformers doesn't know: they "
            "would become other tokens",
            remedy=_REMEDY,
        )
    return split if isinstance(split, str) else None


def _put_right(header: GgufHeader, backend: Any, split: str | None) -> None:
    from tokenizers import decoders, pre_tokenizers

    if header.get(_MODEL) == "gpt2" and split in _DIGITS_APART:
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
