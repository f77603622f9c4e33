"""Write a model's tokenizer as a file for ExecuTorch's LLM runner.

The runner has its own reader of `tokenizer.json`, which supports byte pairs and a few types of normalizers,
splitters and decoders. The runner decodes a completion token by token, so it applies to every token what a
decoder does to the first one of a text, such as removing its space.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prge.data.tokenization.tokenizer import TOKENIZER_FILE
from prge.errors import BundleError
from server_export.checkpoint.tokenization import SAMPLES, adds_bos, write_tokenizer

_REMEDY = "Publish it as merged or as program instead."
_SPACE = {"String": " "}


def write_runner_tokenizer(tokenizer: Any, folder: Path, begins: bool) -> dict[str, Any]:
    """Write the files of a tokenizer so that the runner encodes and decodes like the model's own tokenizer.

    Args:
        tokenizer: tokenizer of transformers.
        folder: folder of the files.
        begins: whether every text begins with the begin-of-sequence token, even if the tokenizer doesn't add
            it.

    Returns:
        The manifest's `tokenizer` block. `num_bos` is the value for a prompt's `GenerationConfig`;
        `different_ids` is the number of samples with rare characters that the runner encodes differently.

    Raises:
        BundleError: the runner can't read the tokenizer, or encodes or decodes plain text differently.
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
    """Replace a splitter that only marks spaces, which the runner lacks, by an equivalent normalizer."""
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
    """Return a decoder without its special treatment of a text's beginning: a completion continues a text."""
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
    """Return a post-processor that begins every text with a token."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _different(tokenizer: Any, path: Path, prepended: bool, num_bos: int) -> int:
    """Return the number of samples that the runner encodes differently; raises BundleError for plain text."""
    from pytorch_tokenizers import CppHFTokenizer

    from server_export.quiet_libraries import quiet_engine

    reader = CppHFTokenizer()
    try:
        with quiet_engine():
            reader.load(str(path))
    except RuntimeError:
        raise BundleError(
            f"ExecuTorch's LLM runner can't read the tokenizer ({type(tokenizer).__name__}, {_types(path)}).",
            remedy=_REMEDY,
            code="tokenizer-unreadable",
        ) from None
    first = [tokenizer.bos_token_id] if prepended else []
    pairs = [(list(reader.encode(text, num_bos, 0)), first + tokenizer.encode(text)) for text in SAMPLES]
    (runner_ids, expected_ids), plain = pairs[0], SAMPLES[0]
    runner_text = "".join(reader.decode(token) for token in runner_ids[num_bos:])
    expected_text = tokenizer.decode(expected_ids[num_bos:])
    # A tokenizer without a decoder has no correct text to compare with.
    is_equal = runner_text.lstrip() == expected_text.lstrip() or tokenizer.backend_tokenizer.decoder is None
    if runner_ids != expected_ids or not is_equal:
        raise BundleError(
            f"ExecuTorch's LLM runner tokenizes differently: {plain!r} is {expected_ids} and "
            f"{expected_text!r}, but for the runner it is {runner_ids} and {runner_text!r}.",
            remedy=_REMEDY,
            code="tokenizer-differs",
        )
    return sum(runner_ids != expected_ids for runner_ids, expected_ids in pairs)


def _types(path: Path) -> str:
    """Return the types of a tokenizer's parts, for an error message."""
    content = json.loads(path.read_text(encoding="utf-8"))
    parts = ("model", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return ", ".join(f"{part} {content[part]['type']}" for part in parts if content.get(part))
