"""The runner encodes like the model's tokenizer, and its decoded tokens join to the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_tokenizers as reader

from prge.errors import BundleError
from server_export.publishing.runner_tokenizer import write_runner_tokenizer
from tests.refusals import raises
from tests.tiny_models import make_tokenizer

TEXT = "the dog sat"


def sentencepiece_like(split: bool = False) -> Any:
    """Return a tokenizer with marks for spaces, like that of a Llama in transformers 5."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for letter in "\u2581abcdefghijklmnopqrstuvwxyzOI.,":
        letters[letter] = len(letters)
    letters["th"] = len(letters)
    letters["\u2581d"] = len(letters)
    backend = Tokenizer(models.BPE(letters, [("t", "h"), ("\u2581", "d")], unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=split)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def opened(folder: Path) -> Any:
    loaded = reader.CppHFTokenizer()
    loaded.load(str(folder / "tokenizer.json"))
    return loaded


@pytest.mark.parametrize("begins", [False, True])
def test_marks_of_spaces_are_encoded_and_decoded(tmp_path: Path, begins: bool) -> None:
    tokenizer = sentencepiece_like()
    block = write_runner_tokenizer(tokenizer, tmp_path, begins)
    assert block["num_bos"] == begins
    ids = opened(tmp_path).encode(TEXT, block["num_bos"], 0)
    assert list(ids) == [1] * begins + tokenizer.encode(TEXT)
    assert [opened(tmp_path).decode(token) for token in ids[begins:]] == [
        *(" ", "th", "e", " d", "o", "g", " ", "s", "a", "t")
    ]


def test_a_byte_level_tokenizer_is_unchanged(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    assert write_runner_tokenizer(tokenizer, tmp_path, False) == {"num_bos": 0, "different_ids": 0}
    assert "".join(map(opened(tmp_path).decode, tokenizer.encode(TEXT))) == TEXT


def test_tokenizers_that_the_runner_cannot_read_are_refused(tmp_path: Path) -> None:
    from tokenizers import normalizers

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with raises(BundleError, "tokenizer-unreadable", containing="normalizer Lowercase"):
        write_runner_tokenizer(tokenizer, tmp_path, False)
