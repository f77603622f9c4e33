"""Converts text to token ids and back, with only a bundle's `tokenizer.json`.

The special tokens around a text (a beginning-of-sequence token, an encoder's [CLS] and [SEP]) are determined
once from the tokenizer's post-processor and the manifest, as `begin` and `end`. Texts are encoded without
special tokens, so that prompts, completions and chats are assembled in one way. `begin` is not added to a
text that already begins with these tokens.

Control tokens that are written in a text, such as `<|im_end|>`, are read as control tokens or as characters.
In the text of a chat template, only the template's own control tokens are read as such (control_tokens.py).

A long text is encoded in windows, because the library's encoding takes hundreds of bytes per character.
Windows overlap and are joined where both have the same tokens, so the ids are those of the whole text.

    window          [----------------------]
    next window                      [-----======-----------------]
    compared                            ^^^      joined in the middle
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import Unigram

from prge.data.tokenization.inputs import check_text
from prge.data.tokenization.tokenizer_check import read_tokenizer
from prge.errors import BundleError, ConfigError, DataError, PrgeError, format_value
from prge.formats.bundle import Bundle
from prge.formats.documents import read_document

if TYPE_CHECKING:
    from prge.data.tokenization.chat import ChatTemplate

TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
REMEDY = "Copy or export the bundle again."
MAX_TEMPLATE_BYTES = 4_000_000
MAX_TOKENIZER_BYTES = 256 << 20

WINDOW = 1 << 14
OVERLAP = 1 << 11
LONGEST_WINDOW = 1 << 18
LARGEST_ID = (1 << 31) - 1
# A character that no vocabulary contains.
_NO_CHARACTER = "\U0010ffff"
# The name of a token of SentencePiece that is one byte.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# How the names of this module's own tokens begin.
_ALIAS = "\ufdd0"

Ids = NDArray[np.int32]
# int32 [n, 3]: token id, and start and end of its characters.
Tokens = NDArray[np.int32]
# Which control tokens that are written in a text are read as such: all, none, or those that begin at these
# positions, in ascending order.
Control = bool | Sequence[int]


@dataclass(frozen=True, eq=False)
class EncodedPair:
    """Token ids (int32) of a prompt, `begin` included, and of its completion.

    If `exact` is true, the ids are those of the joined text, which begin with the ids of the prompt;
    otherwise the completion was encoded separately.
    """

    prompt: Ids
    completion: Ids
    exact: bool


@dataclass(frozen=True)
class _Prompt:
    """An encoded prompt: its ids, `begin` included, and its last window, which the next text may change."""

    text: str
    control: bool
    ids: Ids
    start: int
    tail: Tokens


class Tokenizer:
    """A `tokenizers` tokenizer with the special tokens of the manifest.

    Attributes:
        begin: ids before a whole text.
        end: ids after a whole text.
        pad_id: padding token, else the end-of-sequence token, else 0; padding is never read.
        stop_ids: tokens that end an answer, including the end-of-sequence token.
        special_ids: tokens that are not displayed.
        unknown_id: token of characters that are not in the vocabulary; None if every text can be encoded.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
        stop_ids: Sequence[int] = (),
        prepend_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        # A saved tokenizer may truncate and pad by itself; here, only truncation.py truncates, with a report.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._last_prompt: _Prompt | None = None
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.pad_id = next((token for token in (pad_id, eos_id) if token is not None), 0)
        self.stop_ids = frozenset(stop_ids) | ({eos_id} if eos_id is not None else set())
        self.chat_template = chat_template
        self.begin, self.end = self._surroundings()
        if max((*self.begin, *self.end), default=0) > LARGEST_ID:
            raise _too_large_error()
        if prepend_bos and bos_id is not None and self.begin[:1] != (bos_id,):
            self.begin = (bos_id, *self.begin)
        self.special_tokens = {
            name: token
            for name, identifier in (("bos_token", bos_id), ("eos_token", eos_id), ("pad_token", pad_id))
            if identifier is not None and (token := backend.id_to_token(identifier)) is not None
        }
        self._control_ids = {
            token.content: identifier
            for identifier, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self.control_tokens = frozenset(self._control_ids)
        self.special_ids = frozenset(self._control_ids.values())
        self.unknown_id = _unknown_id(backend)
        self.vocabulary_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Number of tokens, including added tokens."""

    def _surroundings(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the post-processor adds before and after a text."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return tuple(whole[:start]), tuple(whole[start + len(bare) :])
        return (), ()

    def encode(self, text: str, *, control: Control = False) -> list[int]:
        """Return the token ids of a text as a list; `control` as for `ids`."""
        ids: list[int] = self.ids(text, control=control).tolist()
        return ids

    def ids(
        self,
        text: str,
        *,
        control: Control = False,
        before: Sequence[int] = (),
        max_tokens: int | None = None,
    ) -> Ids:
        """Return the token ids of a text, int32.

        Args:
            text: A text of any length.
            control: which control tokens that are written in the text, such as `</s>`, are read as such
                instead of as characters.
            before: ids to prepend, unless the ids of the text already begin with them.
            max_tokens: stop soon after this number of tokens; the result may have a few more.
        """
        count = len(before)
        # A text rarely has more tokens than characters. Unwritten pages of the array take no memory.
        ids = np.empty(count + len(text) + OVERLAP, np.int32)
        ids[:count] = before
        for part in self.parts(text, control=control):
            end = count + len(part)
            if end > len(ids):
                ids.resize(end + end // 8, refcheck=False)
            ids[count:end] = part[:, 0]
            count = end
            if max_tokens is not None and count > max_tokens:
                break
        ids.resize(count, refcheck=False)
        return ids[len(before) :] if self._is_doubled(ids, before) else ids

    def parts(self, text: str, *, control: Control = False) -> Iterator[Tokens]:
        """Yield the tokens of a text in parts, int32 [n, 3]: id, and start and end of the characters.

        `control` is as for `ids`.

        Raises:
            DataError: the text can't be divided within `LONGEST_WINDOW` characters.
        """
        for _, tokens in self._parts(text, control):
            yield tokens

    def encode_pair(
        self, prompt: str, completion: str, *, control: bool = False, control_after: bool = False
    ) -> EncodedPair:
        """Encode a prompt and its completion, with an exact boundary between them.

        `control` and `control_after` say whether control tokens that are written in the prompt and in the
        completion are read as such.

        If the ids of the joined text begin with those of the prompt, the completion has the remaining ids. If
        a token would straddle the boundary, for example after a prompt that ends in a space, the prompt keeps
        its own ids, because a model sees only these before it answers, and the completion is encoded
        separately.
        """
        head = self._encode_prompt(prompt, control)
        # The completion can change only tokens near the end of the prompt, so its last window is sufficient.
        joined = array("i")
        anchor = head.tail[:1] if head.start else None
        end = prompt[head.start :]
        read: Control = control
        if control != control_after:
            first = len(end) if control_after else 0
            read = [first + at for at in self.control_at(completion if control_after else end)]
        for _, part in self._parts(end + completion, read, anchor):
            joined.frombytes(np.ascontiguousarray(part[:, 0]).tobytes())
        ids = np.frombuffer(joined, np.int32)
        count = len(head.tail)
        exact = np.array_equal(ids[:count], head.tail[:, 0])
        tail = ids[count:] if exact else self._continuation(completion, control_after)
        return EncodedPair(head.ids, tail, exact)

    def _continuation(self, text: str, control: bool) -> Ids:
        """Return the token ids of a text that continues another text.

        SentencePiece-like tokenizers prepend a space to a text, but not after a line break.
        """
        anchor = self.ids("\n")
        joined = self.ids("\n" + text, control=control)
        if np.array_equal(joined[: len(anchor)], anchor):
            return joined[len(anchor) :]
        return self.ids(text, control=control)

    def _is_doubled(self, ids: Ids, begin: Sequence[int]) -> bool:
        """Return whether ids begin with these control tokens twice, because the text already had them."""
        count = len(begin)
        return (
            bool(count) and self.special_ids.issuperset(begin) and ids[count : 2 * count].tolist() == [*begin]
        )

    def _encode_prompt(self, text: str, control: bool) -> _Prompt:
        """Encode a prompt; the last one is cached, since all candidates of a row have the same prompt."""
        cached = self._last_prompt
        if cached is None or (cached.text, cached.control) != (text, control):
            joined = array("i", self.begin)
            last = 0, np.empty((0, 3), np.int32)
            for last in self._parts(text, control):
                joined.frombytes(np.ascontiguousarray(last[1][:, 0]).tobytes())
            ids = np.frombuffer(joined, np.int32)
            if self._is_doubled(ids, self.begin):
                ids = ids[len(self.begin) :]
            start, tail = last
            tail = tail - np.array([0, start, start], np.int32)
            cached = self._last_prompt = _Prompt(text, control, ids, start, tail)
        return cached

    def _parts(
        self, text: str, control: Control, first: Tokens | None = None
    ) -> Iterator[tuple[int, Tokens]]:
        """Yield parts of a text, each with the start of its window.

        Tokens before the token `first`, if it is given, are left out.
        """
        check_text(text)
        start, end = 0, min(WINDOW, len(text))
        tokens = _starting_with(self._window(text, 0, end, control), first)
        while end < len(text):
            next_window = end - OVERLAP, min(end - OVERLAP + WINDOW, len(text))
            next_tokens = self._window(text, *next_window, control)
            seam = _seam(tokens, next_tokens, end - OVERLAP // 2, end - OVERLAP // 4)
            if seam is not None:
                yield start, tokens[: seam[0]]
                first = next_tokens[seam[1] : seam[1] + 1]
                (start, end), tokens = next_window, next_tokens[seam[1] :]
            elif 2 * (end - start) <= LONGEST_WINDOW:
                end = min(start + 2 * (end - start), len(text))
                tokens = _starting_with(self._window(text, start, end, control), first)
            else:
                raise _not_divisible_error(text[start : start + 20], end - start)
        yield start, tokens

    def _window(self, text: str, start: int, end: int, control: Control) -> Tokens:
        """Return the tokens of text[start:end], encoded separately."""
        window = text[start:end]
        if isinstance(control, bool):
            self._backend.encode_special_tokens = not control
            tokens = _encode(self._backend, window)
        else:
            tokens = self._aliases.encode(self._backend, window, [at - start for at in control])
        tokens[:, 1:] += start
        return tokens

    @cached_property
    def _aliases(self) -> _Aliases:
        names = sorted(self.control_tokens)
        added = self._backend.get_added_tokens_decoder()
        return _Aliases(self._backend, [added[self._control_ids[name]] for name in names], self._control_ids)

    def control_at(self, text: str) -> list[int]:
        """Return the positions at which control tokens that are written in a text begin."""
        return [match.start() for match in self._control_pattern.finditer(text)]

    def count_control(self, value: object) -> Counter[str]:
        """Count the control tokens that are written in the texts of a JSON value, such as a row."""
        if isinstance(value, str):
            return Counter(match[0] for match in self._control_pattern.finditer(value))
        if isinstance(value, Mapping):
            value = [*value, *value.values()]
        if not isinstance(value, list | tuple):
            return Counter()
        return sum((self.count_control(each) for each in value), Counter())

    def replace_control(self, text: str, replace: Callable[[str], str]) -> str:
        """Replace the control tokens in a text by the results of `replace`."""
        return self._control_pattern.sub(lambda match: replace(match[0]), text)

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        """Matches control tokens, and the longest of those with a common beginning, as the library does."""
        longest_first = sorted(self.control_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def decode(self, tokens: Sequence[int], *, special: bool = True) -> str:
        """Return the text of token ids; with `special` false, special tokens are left out."""
        with _library_errors(_decoding_error):
            return self._backend.decode(list(tokens), skip_special_tokens=not special)

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token adds to the decoded text, or its name if that isn't readable."""
        texts: list[str] = []
        before = ""
        for count in range(1, len(tokens) + 1):
            after = self.decode(tokens[:count])
            added = after[len(before) :]
            if not added or not after.startswith(before) or "\ufffd" in added:
                added = self.token(tokens[count - 1])
            texts.append(added)
            before = after
        return texts

    def token_text(self, identifier: int) -> str | None:
        """Return the text of a token inside a text; None if it isn't whole characters."""
        before = self.decode(self._whole_tokens)
        text = self.decode([*self._whole_tokens, identifier])
        added = text[len(before) :]
        return added if added and text.startswith(before) and "\ufffd" not in added else None

    def token_bytes(self, identifier: int) -> bytes:
        """Return the bytes of a token inside a text in UTF-8, which may be a part of a character.

        Empty if the token adds no text.
        """
        text = self.token_text(identifier)
        if text is not None:
            return text.encode(errors="replace")
        name = self._backend.id_to_token(identifier) or ""
        if fallback := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(fallback[1], 16)])
        # In other tokenizers, such a token adds nothing.
        return bytes(map(_BYTES.get, name, repeat(0))) if self._is_byte_level else b""

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = json.dumps(self.to_json()["decoder"])
        return '"ByteLevel"' in decoder

    @cached_property
    def _whole_tokens(self) -> list[int]:
        """Tokens of whole characters, after which other tokens are decoded as inside a text."""
        return self.encode("a")

    def to_json(self) -> dict[str, Any]:
        """Return the content of a `tokenizer.json` with the tokens that the tokenizer was loaded with."""
        with _library_errors(_decoding_error):
            content: dict[str, Any] = json.loads(self._backend.to_str())
        content["added_tokens"] = [
            token for token in content["added_tokens"] if not token["content"].startswith(_ALIAS)
        ]
        return content

    def control_id(self, text: str) -> int | None:
        """Return the id of a control token; None if the text is not a control token."""
        return self._control_ids.get(text)

    def token(self, identifier: int) -> str:
        """Return the name of a token in the vocabulary."""
        return self._backend.id_to_token(identifier) or f"<{identifier}>"


def _byte_characters() -> dict[str, int]:
    """Return the bytes that the characters of byte-level tokens stand for, as GPT-2 defines them."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_characters()


class _Aliases:
    """Aliases of control tokens, which mark the control tokens in a text that are read as such.

    The library reads either all special tokens of a text or none, but always reads added tokens that are not
    special, which the aliases are.
    """

    def __init__(self, backend: Backend, tokens: Sequence[AddedToken], ids: Mapping[str, int]) -> None:
        # Random, so that an untrusted text can't contain an alias.
        self._mark = f"{_ALIAS}{secrets.randbits(64):020}"
        names = [self._mark + token.content for token in tokens]
        backend.add_tokens(
            [
                AddedToken(
                    name,
                    special=False,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                )
                for name, token in zip(names, tokens, strict=True)
            ]
        )
        self._ids = {
            backend.token_to_id(name): ids[token.content] for name, token in zip(names, tokens, strict=True)
        }

    def encode(self, backend: Backend, text: str, control: Sequence[int]) -> Tokens:
        """Encode a text in which control tokens begin at the positions `control`."""
        marks = [at for at in control if 0 <= at < len(text)]
        edges = [0, *marks, len(text)]
        marked = self._mark.join(text[start:end] for start, end in pairwise(edges))
        backend.encode_special_tokens = True
        tokens = _encode(backend, marked)
        ids = tokens[:, 0]
        for known in self._ids.keys() & set(ids.tolist()):
            ids[ids == known] = self._ids[known]
        width = len(self._mark)
        starts = np.array(marks) + width * np.arange(len(marks))
        tokens[:, 1:] -= width * np.searchsorted(starts, tokens[:, 1:])
        return tokens


def _encode(backend: Backend, text: str) -> Tokens:
    """Encode a text with the library, without special tokens around it."""
    with _library_errors(_encoding_error):
        encoding = backend.encode(text, add_special_tokens=False)
    tokens = np.empty((len(encoding), 3), np.int32)
    try:
        tokens[:, 0] = encoding.ids
    except OverflowError:
        raise _too_large_error() from None
    tokens[:, 1:] = np.array(encoding.offsets, np.int32).reshape(-1, 2)
    return tokens


def _seam(tokens: Tokens, next_tokens: Tokens, low: int, high: int) -> tuple[int, int] | None:
    """Return where two windows can be joined, as an index into each; None if their tokens differ."""
    indices = [np.flatnonzero((each[:, 1] >= low) & (each[:, 2] <= high)) for each in (tokens, next_tokens)]
    compared = tokens[indices[0]]
    if not np.array_equal(compared, next_tokens[indices[1]]):
        return None
    # Don't join inside a character that has several tokens.
    fresh = np.flatnonzero(np.diff(compared[:, 1]) > 0) + 1
    if not len(fresh):
        return None
    middle = fresh[len(fresh) // 2]
    return int(indices[0][middle]), int(indices[1][middle])


def _starting_with(tokens: Tokens, first: Tokens | None) -> Tokens:
    """Return the tokens of a window from the token `first` on; all tokens if it is None."""
    if first is None:
        return tokens
    at = np.flatnonzero((tokens == first).all(1))
    if not len(at):
        raise _not_divisible_error("the same text in two ways", len(tokens))
    return tokens[int(at[0]) :]


def _unknown_id(backend: Backend) -> int | None:
    name = getattr(backend.model, "unk_token", None)
    if name is not None:
        return backend.token_to_id(name)
    if isinstance(backend.model, Unigram):  # its unk_token isn't accessible
        tokens = backend.model.tokenize(_NO_CHARACTER)
        return tokens[0].id if len(tokens) == 1 else None
    return None


def _too_large_error() -> BundleError:
    return BundleError(
        f"The tokenizer has a token above {LARGEST_ID}.", remedy=REMEDY, code="token-too-large"
    )


def _not_divisible_error(text: str, characters: int) -> DataError:
    return DataError(
        "The text can't be tokenized:",
        [f"it can't be divided within {characters} characters from {format_value(text)}"],
        remedy="Break up repetitions in it.",
        code="text-not-divisible",
    )


@contextlib.contextmanager
def _library_errors(make_error: Callable[[str], PrgeError]) -> Iterator[None]:
    """Turn exceptions of the library into errors of prge; a panic in Rust is not an Exception."""
    try:
        yield
    except (PrgeError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise make_error(str(error)) from None


def _decoding_error(problem: str) -> BundleError:
    return BundleError(
        f"The tokenizer can't decode its tokens: {problem}", remedy=REMEDY, code="tokens-not-decodable"
    )


def _encoding_error(problem: str) -> DataError:
    return DataError(
        "The text can't be tokenized:",
        [problem],
        remedy="Remove unusual characters from it.",
        code="text-not-encodable",
    )


def read_backend(path: Path) -> Backend:
    """Read the library's tokenizer from a `tokenizer.json`; raises BundleError if it is unusable."""
    with _library_errors(
        lambda problem: BundleError(f"{path} is damaged: {problem}", remedy=REMEDY, code="tokenizer-damaged")
    ):
        return read_tokenizer(read_document(path, MAX_TOKENIZER_BYTES), path)


def load_tokenizer(folder: Path | str, block: Mapping[str, Any]) -> Tokenizer:
    """Load `tokenizer.json` and, if it exists, `chat_template.jinja`.

    Args:
        folder: the bundle's tokenizer folder.
        block: the `tokenizer` entry of the manifest.

    Raises:
        BundleError: A file is missing or damaged, or the entry doesn't fit the tokenizer.
    """
    path = Path(folder) / TOKENIZER_FILE
    if not path.is_file():
        raise BundleError(f"The bundle has no {path}.", remedy=REMEDY, code="bundle-file-missing")
    backend = read_backend(path)
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "pad"):
        identifier = block.get(f"{name}_token_id")
        if identifier is not None and not _is_token(backend, identifier):
            raise BundleError(
                f"The manifest's {name}_token_id is {identifier!r}, which {path} doesn't have.",
                remedy=REMEDY,
                code="token-unknown",
            )
        ids[name] = identifier
    template_path = Path(folder) / CHAT_TEMPLATE_FILE
    try:
        template = template_path.read_text(encoding="utf-8") if template_path.is_file() else None
    except UnicodeDecodeError as error:
        raise BundleError(
            f"{template_path} is damaged: {error}", remedy=REMEDY, code="chat-template-damaged"
        ) from None
    if template is None and block.get("chat_template"):
        raise BundleError(
            f"The bundle has no {template_path}, which its manifest requires.",
            remedy=REMEDY,
            code="bundle-file-missing",
        )
    stop_ids = block.get("stop_token_ids", [])
    if not isinstance(stop_ids, list) or not all(_is_token(backend, each) for each in stop_ids):
        raise BundleError(
            f"The manifest's stop_token_ids are {format_value(stop_ids)}, not tokens of {path}.",
            remedy=REMEDY,
            code="token-unknown",
        )
    with _library_errors(
        lambda problem: BundleError(f"{path} is damaged: {problem}", remedy=REMEDY, code="tokenizer-damaged")
    ):
        return Tokenizer(
            backend,
            bos_id=ids["bos"],
            eos_id=ids["eos"],
            pad_id=ids["pad"],
            stop_ids=stop_ids,
            prepend_bos=bool(block.get("prepend_bos")),
            chat_template=template,
        )


def read_chat_template(path: Path) -> str:
    """Read the source of a chat template that a user names; raises ConfigError."""
    try:
        return read_document(path, MAX_TEMPLATE_BYTES).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} can't be read as a chat template:", [str(error)], code="chat-template-unreadable"
        ) from None


def compile_chat_template(tokenizer: Tokenizer, date: str | None = None) -> ChatTemplate | None:
    """Compile the chat template of a tokenizer; return None if it has none.

    Args:
        tokenizer: the model's tokenizer.
        date: date that the template sees as today, in ISO 8601; None for the current date.

    Raises:
        BundleError: the template is damaged.
        DataError: jinja2 isn't installed.
    """
    if tokenizer.chat_template is None:
        return None
    try:
        from prge.data.tokenization.chat import ChatTemplate
    except ImportError:
        raise DataError(
            "A chat template needs the package jinja2.",
            [],
            remedy="pip install jinja2",
            code="package-missing",
        ) from None
    return ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens, date)


def _is_token(backend: Backend, identifier: object) -> bool:
    return (
        type(identifier) is int
        and 0 <= identifier <= LARGEST_ID
        and backend.id_to_token(identifier) is not None
    )


def load_bundle_tokenizer(bundle: Bundle) -> Tokenizer:
    """Load the tokenizer of an opened bundle; raises BundleError like `load_tokenizer`."""
    block = bundle.manifest.get("tokenizer")
    return load_tokenizer(bundle.tokenizer, block if isinstance(block, Mapping) else {})
