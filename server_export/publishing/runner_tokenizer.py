"""A model's tokenizer as the file that ExecuTorch's LLM runner reads.

The runner has a reader of its own for `tokenizer.json`. It knows byte pairs, and few kinds of what comes
before and after. It writes an answer token by token: what a decoder does to the first token of a text, such
as taking its space away, it does to every one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prge.errors import BundleError
from prge.rows.tokenization.tokenizer import TOKENIZER_FILE
from server_export.checkpoint.tokenization import SAMPLES, adds_bos, write_tokenizer

_REMEDY = "publish it as merged or as program instead"
_SPACE = {"String": " "}


def write_runner_tokenizer(tokenizer: Any, folder: Path, begins: bool) -> dict[str, Any]:
    """Write the files of `write_tokenizer` so that the runner reads and writes what the model's own does.

    Args:
        begins: whether every text begins with the token for that, though the tokenizer itself adds none.

    Returns:
        The manifest's `tokenizer` block. `num_bos` is what a prompt's `GenerationConfig` needs;
        `different_ids` counts samples, of rarer signs, that the runner reads as other tokens.

    Raises:
        BundleError: the runner can't read it, or reads and writes plain text in another way.
    """
    write_tokenizer(tokenizer, folder)
    path = folder / TOKENIZER_FILE
    content = json.loads(path.read_text(encoding="utf-8"))
    _split_in_normalizer(content)
    content["decoder"] = _decoder(content.get("decoder"))
    adds = adds_bos(tokenizer)
    if begins and not adds:
        content["post_processor"] = _prepends(tokenizer.bos_token, tokenizer.bos_token_id)
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    num_bos = int(adds or begins)
    return {"num_bos": num_bos, "different_ids": _different(tokenizer, path, begins and not adds, num_bos)}


def _split_in_normalizer(content: dict[str, Any]) -> None:
    """Write a splitter that only marks spaces, which the runner doesn't know, as the same normalizer."""
    splitter = content.get("pre_tokenizer") or {}
    if splitter.get("type") != "Metaspace" or splitter.get("split", True):
        return
    steps = [{"type": "Replace", "pattern": _SPACE, "content": splitter["replacement"]}]
    if splitter.get("prepend_scheme") != "never":
        steps.insert(0, {"type": "Prepend", "prepend": splitter["replacement"]})
    before = [content["normalizer"]] if content.get("normalizer") else []
    content["normalizer"] = {"type": "Sequence", "normalizers": [*before, *steps]}
    content["pre_tokenizer"] = None


def _decoder(decoder: dict[str, Any] | None) -> dict[str, Any] | None:
    """A decoder without what it does at the beginning of a text: an answer goes on with one."""
    if decoder is None:
        return None
    if decoder["type"] == "Metaspace":
        return {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "}
    if decoder["type"] == "Sequence":
        parts = [_decoder(part) for part in decoder["decoders"]]
        kept = [part for part in parts if part and not (part["type"] == "Strip" and part["start"])]
        return {**decoder, "decoders": kept}
    return decoder


def _prepends(token: str, number: int) -> dict[str, Any]:
    """The last step of a tokenizer that begins every text with a token."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _different(tokenizer: Any, path: Path, prepended: bool, num_bos: int) -> int:
    from pytorch_tokenizers import CppHFTokenizer

    from server_export.quiet import quiet_engine

    reader = CppHFTokenizer()
    try:
        with quiet_engine():
            reader.load(str(path))
    except RuntimeError:
        raise BundleError(
            f"ExecuTorch's LLM runner can't read the tokenizer ({type(tokenizer).__name__}, {_kinds(path)})",
            remedy=_REMEDY,
            code="tokenizer-unreadable",
        ) from None
    first = [tokenizer.bos_token_id] if prepended else []
    seen = [(list(reader.encode(text, num_bos, 0)), first + tokenizer.encode(text)) for text in SAMPLES]
    (ours, theirs), plain = seen[0], SAMPLES[0]
    pieces = "".join(reader.decode(token) for token in ours[num_bos:])
    text = tokenizer.decode(theirs[num_bos:])
    # Without a decoder no text is right.
    written = pieces.lstrip() == text.lstrip() or tokenizer.backend_tokenizer.decoder is None
    if ours != theirs or not written:
        raise BundleError(
            f"ExecuTorch's LLM runner takes the tokenizer for another: {plain!r} is {theirs} and {text!r}, "
            f"for the runner it is {ours} and {pieces!r}",
            remedy=_REMEDY,
            code="tokenizer-differs",
        )
    return sum(ours != theirs for ours, theirs in seen)


def _kinds(path: Path) -> str:
    content = json.loads(path.read_text(encoding="utf-8"))
    parts = ("model", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return ", ".join(f"{part} {content[part]['type']}" for part in parts if content.get(part))
