"""Text to token ids and back, from a bundle's `tokenizer.json` alone.

What a model wants around a text (a beginning-of-sequence token, an encoder's [CLS] and [SEP]) is learnt once
from the tokenizer's own post-processor and the manifest, as `begin` and `end`. Everything else is encoded
bare, so a prompt, a completion and a chat are put together in one way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from prge.bundle import Bundle
from prge.errors import BundleError

TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
REMEDY = "copy or export the bundle again"


@dataclass(frozen=True)
class Pair:
    """Token ids of a prompt, `begin` included, and of what follows it.

    `exact` says that prompt and completion encoded together begin with the prompt encoded alone, so that the
    ids are those of the joined text; otherwise the completion was encoded by itself.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    exact: bool


class Tokenizer:
    """A `tokenizers` tokenizer with the special tokens that the manifest names.

    `begin` and `end` are the ids that belong before and after a whole text. `pad_id` is the padding token, or
    the end-of-sequence token, or 0: padding is never read, any id that exists will do.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
        prepend_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        # A saved tokenizer may cut and pad by itself, unreported; here only the data module cuts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.pad_id = next((token for token in (pad_id, eos_id) if token is not None), 0)
        self.chat_template = chat_template
        self.begin, self.end = self._surroundings()
        if prepend_bos and bos_id is not None and self.begin[:1] != (bos_id,):
            self.begin = (bos_id, *self.begin)
        self.special_tokens = {
            name: token
            for name, identifier in (("bos_token", bos_id), ("eos_token", eos_id), ("pad_token", pad_id))
            if identifier is not None and (token := backend.id_to_token(identifier)) is not None
        }
        self.control_tokens = frozenset(
            token.content for token in backend.get_added_tokens_decoder().values() if token.special
        )

    def _surroundings(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids that the post-processor puts before and after a text."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return tuple(whole[:start]), tuple(whole[start + len(bare) :])
        return (), ()

    def encode(self, text: str, *, special: bool = False, control: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            special: put `begin` before and `end` after it, as for a whole text.
            control: read control tokens written in the text, as a chat template does, instead of taking
                `</s>` for the four characters that it is.
        """
        tokens, _ = self.encode_with_offsets(text, control=control)
        return [*self.begin, *tokens, *self.end] if special else tokens

    def encode_with_offsets(
        self, text: str, *, control: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text and, for each, its characters [start, end) in the text."""
        self._backend.encode_special_tokens = not control
        encoding = self._backend.encode(text, add_special_tokens=False)
        return list(encoding.ids), [(start, end) for start, end in encoding.offsets]

    def encode_pair(self, prompt: str, completion: str, *, control: bool = False) -> Pair:
        """Encode a prompt and what follows it, with an exact boundary between them.

        Where the joined text's ids begin with the prompt's, the completion is the rest. Where a token would
        straddle the boundary (a prompt that ends in a space, say) the prompt keeps its own ids, because these
        are all that a model sees before it answers, and the completion is encoded by itself.
        """
        head = self.encode(prompt, control=control)
        joined = self.encode(prompt + completion, control=control)
        exact = joined[: len(head)] == head
        tail = joined[len(head) :] if exact else self.encode_continuation(completion, control=control)
        return Pair((*self.begin, *head), tuple(tail), exact)

    def encode_continuation(self, text: str, *, control: bool = False) -> list[int]:
        """Token ids of a text that follows another one.

        SentencePiece-like tokenizers put a space before a text; after a line break they don't.
        """
        anchor = self.encode("\n", control=control)
        joined = self.encode("\n" + text, control=control)
        return (
            joined[len(anchor) :] if joined[: len(anchor)] == anchor else self.encode(text, control=control)
        )

    def decode(self, tokens: Sequence[int], *, special: bool = True) -> str:
        """Text of token ids; with `special` false, special tokens are left out."""
        return self._backend.decode(list(tokens), skip_special_tokens=not special)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """What each token adds to the decoded text; its name where that is nothing readable."""
        pieces: list[str] = []
        before = ""
        for count in range(1, len(tokens) + 1):
            after = self.decode(tokens[:count])
            added = after[len(before) :]
            if not added or not after.startswith(before) or "\ufffd" in added:
                added = self.token(tokens[count - 1])
            pieces.append(added)
            before = after
        return pieces

    def token(self, identifier: int) -> str:
        """Name of a token in the vocabulary."""
        return self._backend.id_to_token(identifier) or f"<{identifier}>"

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)


def load_tokenizer(folder: Path | str, block: Mapping[str, Any]) -> Tokenizer:
    """Load `tokenizer.json` and, where there is one, `chat_template.jinja`.

    Args:
        folder: a bundle's tokenizer folder.
        block: the manifest's `tokenizer` block.

    Raises:
        BundleError: a file is missing or damaged, or the block doesn't fit the tokenizer.
    """
    path = Path(folder) / TOKENIZER_FILE
    if not path.is_file():
        raise BundleError(f"the bundle has no {path}", remedy=REMEDY)
    try:
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the binding raises plain Exception
        raise BundleError(f"{path} is damaged: {error}", remedy=REMEDY) from None
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "pad"):
        identifier = block.get(f"{name}_token_id")
        known = type(identifier) is int and 0 <= identifier < 2**31 and backend.id_to_token(identifier)
        if identifier is not None and not known:
            raise BundleError(
                f"the manifest's {name}_token_id is {identifier!r}, which {path} doesn't have", remedy=REMEDY
            )
        ids[name] = identifier
    template_path = Path(folder) / CHAT_TEMPLATE_FILE
    template = template_path.read_text(encoding="utf-8") if template_path.is_file() else None
    if template is None and block.get("chat_template"):
        raise BundleError(f"the bundle has no {template_path}, its manifest says that it has", remedy=REMEDY)
    return Tokenizer(
        backend,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        pad_id=ids["pad"],
        prepend_bos=bool(block.get("prepend_bos")),
        chat_template=template,
    )


def bundle_tokenizer(bundle: Bundle) -> Tokenizer:
    """The tokenizer of an opened bundle; raises BundleError as `load_tokenizer`."""
    block = bundle.manifest.get("tokenizer")
    return load_tokenizer(bundle.tokenizer, block if isinstance(block, Mapping) else {})
