"""The tokenizer of a GGUF file, as transformers makes it of the header, with what it leaves out put right."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prge.errors import Refusal, first_line, shown
from server_export.checkpoint.gguf.header import TOKENS, GgufHeader

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


def load_gguf_tokenizer(header: GgufHeader) -> Any:
    """The fast tokenizer of a file, with its special tokens and its chat template.

    Raises:
        BundleError: the file has none, or one that transformers can't make the same tokens with.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    if TOKENS not in header.fields:
        raise Refusal("no-tokenizer", f"{header.path} has no tokenizer", remedy=_REMEDY)
    split = _split(header)
    with _refused(header):
        architecture, told, settings = get_gguf_tokenizer(str(header.path))
        backend, _ = convert_gguf_tokenizer(architecture, told)
    _put_right(header, backend, split)
    content = _content_of_file(backend, told)
    with _refused(header):
        backend = Tokenizer.from_str(json.dumps(content))
        return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


@contextmanager
def _refused(header: GgufHeader) -> Iterator[None]:
    """Refuse a file whose tokenizer the libraries called inside don't take."""
    try:
        yield
    except Exception as error:  # `tokenizers` raises Exception itself, and transformers many of its own
        raise Refusal(
            "tokenizer-not-read",
            f"{header.path} has a tokenizer that can't be read: {first_line(error)}",
            remedy=_REMEDY,
        ) from None


def eos_token_ids(header: GgufHeader) -> list[int]:
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
        raise Refusal(
            "tokenizer-split-not-read",
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


def _content_of_file(backend: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    """A `tokenizer.json` with the file's tokens and no others, and with its token for what is unknown.

    The classes that transformers takes for templates add tokens of their own, which a model has no rows for.
    """
    content, tokens = json.loads(backend.to_str()), told["tokens"]
    content["added_tokens"] = [each for each in content["added_tokens"] if each["id"] < len(tokens)]
    unknown = told.get("unk_token_id")
    if content["model"]["type"] == "BPE" and unknown is not None:
        content["model"]["unk_token"] = tokens[unknown]
    return dict(content)
