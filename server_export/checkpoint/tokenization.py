"""The model's tokenizer as the one file that a device reads, checked to give the same ids."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from prge.errors import ConfigError, PrgeError, Refusal, first_line
from prge.rows.tokenization.tokenizer import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, Tokenizer, read_backend
from prge.rows.tokenization.tokenizer import load_tokenizer as read_tokenizer
from prge.text.prompts import Prompts
from server_export.checkpoint.files import end_tokens, find_files, hub_answers, local_folder
from server_export.settings import PrependBos

SAMPLES = (
    "Once upon a time, there was a little dog.",
    "It's 3.14% of \u20ac12,000 -- really?!\n\tYes: na\u00efve caf\u00e9s.",
    "  leading and trailing spaces  ",
    "\u4f60\u597d, \u043c\u0438\u0440 \U0001f44b",
    "",
)


def load_tokenizer(name_or_path: str, revision: str | None = None) -> Any:
    """The model's fast tokenizer, with the end-of-sequence token of its configuration if it names none.

    Raises:
        BundleError: it has none, or only one that can't be written as `tokenizer.json`.
    """
    from transformers import AutoTokenizer

    folder = local_folder(name_or_path, revision)
    if folder is not None and (path := Path(folder) / TOKENIZER_FILE).is_file():
        read_backend(path)  # which may end the process if nobody tried it
    is_local = folder is not None or not hub_answers()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder or name_or_path, revision=revision, trust_remote_code=False, local_files_only=is_local
        )
    except Exception as error:  # `tokenizers` raises Exception itself, and transformers many of its own
        raise Refusal(
            "no-tokenizer",
            f"{name_or_path} has no tokenizer that can be loaded: {first_line(error)}",
            remedy="put the model's tokenizer.json beside it",
        ) from None
    if not getattr(tokenizer, "is_fast", False):
        raise Refusal(
            "slow-tokenizer",
            f"the tokenizer of {name_or_path} ({type(tokenizer).__name__}) has no fast form, and a device "
            "reads tokenizer.json only",
            remedy="convert it to a tokenizer.json and put that beside the model",
        )
    if tokenizer.eos_token_id is None:
        name_end(tokenizer, end_tokens(find_files(name_or_path, revision)))
    return tokenizer


def name_end(tokenizer: Any, ends: Sequence[int]) -> None:
    """Give a tokenizer of transformers an end-of-sequence token, the first of `ends` that it knows.

    Rows are learnt with this token at their end, and a chat template may write it.
    """
    known = next((token for token in ends if token in _known(tokenizer)), None)
    if known is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(known)


def _known(tokenizer: Any) -> set[int]:
    return set(tokenizer.get_vocab().values())


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write `tokenizer.json`, and `chat_template.jinja` where there is a template.

    Raises:
        BundleError: what was written gives other ids than the model's own tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / TOKENIZER_FILE
    backend = tokenizer.backend_tokenizer
    # Truncation and padding that a checkpoint happens to carry belong to whoever trained it.
    content = json.loads(backend.to_str())
    content["truncation"] = content["padding"] = None
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    template = chat_template(tokenizer)
    if template is not None:
        (folder / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
    check_tokenizer(tokenizer, path)


def check_tokenizer(tokenizer: Any, path: Path) -> None:
    """Raise BundleError unless `tokenizers` reads the ids from `path` that the model's tokenizer gives."""
    from tokenizers import Tokenizer as Backend

    written = Backend.from_file(str(path))
    for text in SAMPLES:
        for special in (False, True):
            expected = tokenizer.encode(text, add_special_tokens=special)
            actual = written.encode(text, add_special_tokens=special).ids
            if actual != expected:
                raise Refusal(
                    "tokenizer-not-preserved",
                    f"the tokenizer doesn't survive being written: {text!r} is {expected}, "
                    f"but {actual} from tokenizer.json",
                    remedy="put a complete tokenizer.json beside the model",
                )


def tokenizer_block(
    tokenizer: Any, prepend_bos: PrependBos, vocabulary_size: int, ends: Sequence[int] = ()
) -> dict[str, Any]:
    """The manifest's `tokenizer` block.

    Args:
        tokenizer: of transformers.
        prepend_bos: as the export was asked.
        vocabulary_size: of the model's embeddings.
        ends: tokens that end an answer; those that the tokenizer lacks are left out. Its end-of-sequence
            token and what its chat template writes after an assistant's message end one too.

    Raises:
        BundleError: the tokenizer knows more tokens than the model.
        ConfigError: a begin-of-sequence token is asked for, and there is none.
    """
    size = len(tokenizer)
    highest = max(tokenizer.get_vocab().values(), default=-1) + 1
    if max(size, highest) > vocabulary_size:
        raise Refusal(
            "tokenizer-larger-than-model",
            f"the tokenizer has {max(size, highest)} tokens, the model has embeddings for {vocabulary_size}",
            remedy="tokenizer and model don't belong together, or the model's embeddings need to be resized",
        )
    if prepend_bos == "always" and tokenizer.bos_token_id is None:
        raise ConfigError(
            "the export settings can't be used:",
            ["prepend_bos is always, but the tokenizer has no such token"],
            code="no-bos-token",
        )
    own = [tokenizer.eos_token_id, *_ends_of_turns(tokenizer)]
    known = _known(tokenizer)
    return {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "stop_token_ids": sorted({token for token in (*ends, *own) if token in known}),
        "prepend_bos": prepend_bos == "always" and not adds_bos(tokenizer),
        "chat_template": chat_template(tokenizer) is not None,
        "vocabulary_size": size,
    }


def _ends_of_turns(tokenizer: Any) -> Collection[int]:
    """Control tokens that the chat template ends an assistant's message with."""
    if chat_template(tokenizer) is None:
        return ()
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(tokenizer, Path(folder))
        block = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        prompts = Prompts(read_tokenizer(folder, block))
        try:
            return prompts.end_of_turn[0]
        except PrgeError:  # rows of messages and clients of a server meet it
            return ()


def on_device(tokenizer: Any, prepend_bos: PrependBos, vocabulary_size: int) -> Tokenizer:
    """The tokenizer that a device makes of what an export writes; arguments and errors as above."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(tokenizer, Path(folder))
        return read_tokenizer(folder, tokenizer_block(tokenizer, prepend_bos, vocabulary_size))


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer itself begins every text with its begin-of-sequence token."""
    ids = tokenizer.encode("a", add_special_tokens=True)
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def chat_template(tokenizer: Any) -> str | None:
    """The default chat template."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None
