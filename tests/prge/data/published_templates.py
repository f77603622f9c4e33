"""Published chat templates of models from packages that contain them, and tokenizers for them.

TRL contains those of many models, and variants of some with the `generation` tag.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tests.prge.data.tiny_tokenizers import byte_level_backend

# Matches control tokens in templates: words between bars or angle brackets.
_CONTROL = re.compile(r"<[|｜][^<>\s'\"{}+]*?[|｜]>|</?(?:start_of_turn|end_of_turn|turn)>|\[/?INST\]")
# Added tokens that are not special, as in Qwen's vocabularies.
_ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def published(name: str) -> str | None:
    """Return the source of a template in TRL; None if TRL isn't installed."""
    package = find_spec("trl")
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).parent / "chat_templates" / f"{name}.jinja"
    return path.read_text(encoding="utf-8") if path.is_file() else None


def backend_for(source: str) -> Backend:
    """Create a byte-level tokenizer with the control tokens of a template."""
    backend = byte_level_backend()
    words = sorted(set(_CONTROL.findall(source)) | {"<|start_header_id|>", "<|end_header_id|>"})
    backend.add_special_tokens([AddedToken(word, normalized=False) for word in words])
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in _ADDED])
    return backend


def transformers_tokenizer(source: str) -> Any:
    """Create a transformers tokenizer with the template."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend_for(source), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = source
    return tokenizer
