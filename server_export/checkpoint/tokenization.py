"""The model's tokenizer as the one file that a device reads, checked to produce the same ids."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from prge.data.tokenization.tokenizer import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, Tokenizer, read_backend
from prge.data.tokenization.tokenizer import load_tokenizer as read_tokenizer
from prge.errors import ConfigError, PrgeError, Refusal, first_line
from prge.generation.prompts import Prompts
from server_export.checkpoint.files import eos_token_ids, find_files, is_hub_reachable, local_folder
from server_export.settings import PrependBos

SAMPLES = (
    "Once upon a time, there was a little dog.",
    "It's 3.14% of \u20ac12,000 -- really?!\n\tYes: na\u00efve caf\u00e9s.",
    "  leading and trailing spaces  ",
    "\u4f60\u597d, \u043c\u0438\u0440 \U0001f44b",
    "",
)


def load_tokenizer(name_or_path: str, revision: str | None = None) -> Any:
    """Load the fast tokenizer of a model, with the model's end-of-sequence token if the tokenizer has none.

    Raises:
        BundleError: there is no tokenizer, or it can't be written as `tokenizer.json`.
    """
    from transformers import AutoTokenizer

    folder = local_folder(name_or_path, revision)
    if folder is not None and (path := Path(folder) / TOKENIZER_FILE).is_file():
        read_backend(path)  # checks the file in a child process: reading a damaged one may end the process
    is_local = folder is not None or not is_hub_reachable()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder or name_or_path, revision=revision, trust_remote_code=False, local_files_only=is_local
        )
    except Exception as error:  # `tokenizers` raises Exception itself, and transformers many of its own
        raise Refusal(
            "no-tokenizer",
            f"Cannot load a tokenizer for {name_or_path}: {first_line(error)}",
            remedy="Put the model's tokenizer.json into its folder.",
        ) from None
    if not getattr(tokenizer, "is_fast", False):
        raise Refusal(
            "slow-tokenizer",
            f"The tokenizer of {name_or_path} ({type(tokenizer).__name__}) has no fast version, and devices "
            "read tokenizer.json only.",
            remedy="Convert it to a tokenizer.json and put that into the model's folder.",
        )
    if tokenizer.eos_token_id is None:
        set_eos_token(tokenizer, eos_token_ids(find_files(name_or_path, revision)))
    return tokenizer


def set_eos_token(tokenizer: Any, ends: Sequence[int]) -> None:
    """Set the end-of-sequence token of a transformers tokenizer to the first of `ends` that it knows.

    Training rows end with this token, and a chat template may write it.
    """
    token_id = next((candidate for candidate in ends if candidate in _token_ids(tokenizer)), None)
    if token_id is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(token_id)


def _token_ids(tokenizer: Any) -> set[int]:
    return set(tokenizer.get_vocab().values())


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write `tokenizer.json`, and `chat_template.jinja` if the tokenizer has a template.

    Raises:
        BundleError: the written file produces other ids than the model's own tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / TOKENIZER_FILE
    backend = tokenizer.backend_tokenizer
    # Truncation and padding are left over from the checkpoint's own training.
    content = json.loads(backend.to_str())
    content["truncation"] = content["padding"] = None
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    template = chat_template(tokenizer)
    if template is not None:
        (folder / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
    check_tokenizer(tokenizer, path)


def check_tokenizer(tokenizer: Any, path: Path) -> None:
    """Raise BundleError unless the written tokenizer produces the same ids as the model's tokenizer."""
    from tokenizers import Tokenizer as Backend

    written = Backend.from_file(str(path))
    for text in SAMPLES:
        for special in (False, True):
            expected = tokenizer.encode(text, add_special_tokens=special)
            actual = written.encode(text, add_special_tokens=special).ids
            if actual != expected:
                raise Refusal(
                    "tokenizer-not-preserved",
                    f"The written tokenizer encodes {text!r} as {actual}, the model's own as {expected}.",
                    remedy="Put a complete tokenizer.json into the model's folder.",
                )


def tokenizer_manifest(
    tokenizer: Any, prepend_bos: PrependBos, vocabulary_size: int, ends: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the `tokenizer` entry of the manifest.

    Args:
        tokenizer: the tokenizer of transformers.
        prepend_bos: the export's setting.
        vocabulary_size: the number of the model's embeddings.
        ends: ids that end an answer; unknown ones are left out. The tokenizer's end-of-sequence token, and
            the control tokens that its chat template writes after an assistant's message, are added.

    Raises:
        BundleError: the tokenizer has more tokens than the model.
        ConfigError: `prepend_bos` needs a begin-of-sequence token, and the tokenizer has none.
    """
    size = len(tokenizer)
    highest = max(tokenizer.get_vocab().values(), default=-1) + 1
    if max(size, highest) > vocabulary_size:
        raise Refusal(
            "tokenizer-larger-than-model",
            f"The tokenizer has {max(size, highest)} tokens, but the model has {vocabulary_size} embeddings.",
            remedy="Use the model's own tokenizer, or resize the model's embeddings.",
        )
    if prepend_bos == "always" and tokenizer.bos_token_id is None:
        raise ConfigError(
            "Invalid export settings:",
            ["prepend_bos is always, but the tokenizer has no begin-of-sequence token"],
            code="no-bos-token",
        )
    from_tokenizer = [tokenizer.eos_token_id, *_end_of_message_ids(tokenizer)]
    known = _token_ids(tokenizer)
    return {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "stop_token_ids": sorted({token for token in (*ends, *from_tokenizer) if token in known}),
        "prepend_bos": prepend_bos == "always" and not adds_bos(tokenizer),
        "chat_template": chat_template(tokenizer) is not None,
        "vocabulary_size": size,
    }


def _end_of_message_ids(tokenizer: Any) -> Collection[int]:
    """Return the control tokens that the chat template writes after an assistant's message."""
    if chat_template(tokenizer) is None:
        return ()
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(tokenizer, Path(folder))
        special_tokens = {
            f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
        }
        prompts = Prompts(read_tokenizer(folder, special_tokens))
        try:
            return prompts.end_of_turn[0]
        except PrgeError:  # reported later, when messages are rendered
            return ()


def device_tokenizer(tokenizer: Any, prepend_bos: PrependBos, vocabulary_size: int) -> Tokenizer:
    """Return the tokenizer as a device loads it from an export.

    Takes the arguments of `tokenizer_manifest` and raises the same errors.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(tokenizer, Path(folder))
        return read_tokenizer(folder, tokenizer_manifest(tokenizer, prepend_bos, vocabulary_size))


def adds_bos(tokenizer: Any) -> bool:
    """Return whether the tokenizer itself begins every encoded text with its begin-of-sequence token."""
    ids = tokenizer.encode("a", add_special_tokens=True)
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def chat_template(tokenizer: Any) -> str | None:
    """Return the default chat template of a transformers tokenizer, if it has one."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None
