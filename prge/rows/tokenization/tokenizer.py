"""Text to token ids and back, from a bundle's `tokenizer.json` alone.

What a model wants around a text (a beginning-of-sequence token, an encoder's [CLS] and [SEP]) is learnt once
from the tokenizer's own post-processor and the manifest, as `begin` and `end`. Everything else is encoded
bare, so a prompt, a completion and a chat are put together in one way. A text that has `begin` written at its
beginning isn't given it twice.

Control tokens that are written in a text, such as `<|im_end|>`, are read as control tokens or as characters.
Of a chat template's text only those are read as control tokens that the template wrote (control_tokens.py).

A long text is encoded in windows, because a library's encoding takes hundreds of bytes a character. Windows
overlap, and are joined where both have the same tokens: the ids are those of the whole text.

    window          [----------------------]
    the next one                     [-----======-----------------]
    compared                            ^^^      joined in the middle of it
"""

from __future__ import annotations

import contextlib
import re
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import Unigram

from prge.errors import BundleError, ConfigError, DataError, PrgeError, shown
from prge.files.bundle import Bundle
from prge.files.documents import read_document
from prge.rows.tokenization.inputs import check_text
from prge.rows.tokenization.tokenizer_check import read_tokenizer

if TYPE_CHECKING:
    from prge.rows.tokenization.chat import ChatTemplate

TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
REMEDY = "copy or export the bundle again"
MOST_TEMPLATE_BYTES = 4_000_000
MOST_TOKENIZER_BYTES = 256 << 20

WINDOW = 1 << 14
OVERLAP = 1 << 11
LONGEST_WINDOW = 1 << 18
LARGEST_ID = (1 << 31) - 1
# No vocabulary has it.
_NO_CHARACTER = "\U0010ffff"

Ids = NDArray[np.int32]
# Rows of id, first character and the one after the last.
Tokens = NDArray[np.int32]
# Which of the control tokens that are written in a text are read as such: all, none, or those that begin at
# these characters, in ascending order.
Control = bool | Sequence[int]


@dataclass(frozen=True, eq=False)
class Pair:
    """Token ids i32 of a prompt, `begin` included, and of what follows it.

    `exact` says that prompt and completion encoded together begin with the prompt encoded alone, so that the
    ids are those of the joined text; otherwise the completion was encoded by itself.
    """

    prompt: Ids
    completion: Ids
    exact: bool


@dataclass(frozen=True)
class _Prompt:
    """An encoded prompt: its ids, `begin` included, and the last window, which what follows may change."""

    text: str
    control: bool
    ids: Ids
    start: int
    tail: Tokens


class Tokenizer:
    """A `tokenizers` tokenizer with the special tokens that the manifest names.

    `begin` and `end` are the ids that belong before and after a whole text. `pad_id` is the padding token, or
    the end-of-sequence token, or 0: padding is never read, any id that exists will do. `stop_ids` are the
    tokens that end an answer, the end-of-sequence token among them; `special_ids` those that aren't shown.
    `unknown_id` is the token of what the vocabulary can't spell, None if it can spell everything.
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
        # A saved tokenizer may cut and pad by itself, unreported; here only the data module cuts.
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
            raise _too_large()
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
        """Number of tokens, added ones included."""

    def _surroundings(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids that the post-processor puts before and after a text."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return tuple(whole[:start]), tuple(whole[start + len(bare) :])
        return (), ()

    def encode(self, text: str, *, control: Control = False) -> list[int]:
        """Token ids of a text; `control` as `ids`."""
        ids: list[int] = self.ids(text, control=control).tolist()
        return ids

    def ids(
        self, text: str, *, control: Control = False, before: Sequence[int] = (), most: int | None = None
    ) -> Ids:
        """Token ids of a text, i32.

        Args:
            text: of any length.
            control: read control tokens that are written in the text, all or those that begin at these
                characters, instead of taking `</s>` for the four characters that it is.
            before: ids in front, unless the text's own begin with them.
            most: of a text with more there are a few more than these, and the rest isn't read.
        """
        count = len(before)
        # Seldom has a text more tokens than characters, but for a space in front; what isn't written takes no
        # memory.
        ids = np.empty(count + len(text) + OVERLAP, np.int32)
        ids[:count] = before
        for part in self.parts(text, control=control):
            end = count + len(part)
            if end > len(ids):
                ids.resize(end + end // 8, refcheck=False)
            ids[count:end] = part[:, 0]
            count = end
            if most is not None and count > most:
                break
        ids.resize(count, refcheck=False)
        return ids[len(before) :] if self._is_doubled(ids, before) else ids

    def parts(self, text: str, *, control: Control = False) -> Iterator[Tokens]:
        """The tokens of a text, part by part: i32 [n, 3] of id, first character, and the one after the last.

        `control` as `ids`.

        Raises:
            DataError: the text goes on for `LONGEST_WINDOW` characters without a place to divide it.
        """
        for _, tokens in self._parts(text, control):
            yield tokens

    def encode_pair(
        self, prompt: str, completion: str, *, control: bool = False, control_after: bool = False
    ) -> Pair:
        """Encode a prompt and what follows it, with an exact boundary between them.

        Control tokens that are written in the prompt are read as such with `control`, those in the completion
        with `control_after`.

        Where the joined text's ids begin with the prompt's, the completion is the rest. Where a token would
        straddle the boundary (a prompt that ends in a space, say) the prompt keeps its own ids, because these
        are all that a model sees before it answers, and the completion is encoded by itself.
        """
        head = self._prompt(prompt, control)
        # What follows a prompt changes tokens near its end at most, so the last window is enough of it.
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
        return Pair(head.ids, tail, exact)

    def _continuation(self, text: str, control: bool) -> Ids:
        """Token ids of a text that follows another one.

        SentencePiece-like tokenizers put a space before a text; after a line break they don't.
        """
        anchor = self.ids("\n")
        joined = self.ids("\n" + text, control=control)
        if np.array_equal(joined[: len(anchor)], anchor):
            return joined[len(anchor) :]
        return self.ids(text, control=control)

    def _is_doubled(self, ids: Ids, begin: Sequence[int]) -> bool:
        """Whether ids begin with these control tokens twice: a text had them written at its beginning."""
        count = len(begin)
        return (
            bool(count) and self.special_ids.issuperset(begin) and ids[count : 2 * count].tolist() == [*begin]
        )

    def _prompt(self, text: str, control: bool) -> _Prompt:
        """An encoded prompt; the last one is kept, since every candidate of a row has the same."""
        kept = self._last_prompt
        if kept is None or (kept.text, kept.control) != (text, control):
            joined = array("i", self.begin)
            last = 0, np.empty((0, 3), np.int32)
            for last in self._parts(text, control):
                joined.frombytes(np.ascontiguousarray(last[1][:, 0]).tobytes())
            ids = np.frombuffer(joined, np.int32)
            if self._is_doubled(ids, self.begin):
                ids = ids[len(self.begin) :]
            start, tail = last
            tail = tail - np.array([0, start, start], np.int32)
            kept = self._last_prompt = _Prompt(text, control, ids, start, tail)
        return kept

    def _parts(
        self, text: str, control: Control, first: Tokens | None = None
    ) -> Iterator[tuple[int, Tokens]]:
        """Parts of a text with the start of the window that each is from.

        `first`, where it is given, is the token that the parts begin with; those before it are left out.
        """
        check_text(text)
        start, end = 0, min(WINDOW, len(text))
        tokens = _since(self._window(text, 0, end, control), first)
        while end < len(text):
            follower = end - OVERLAP, min(end - OVERLAP + WINDOW, len(text))
            following = self._window(text, *follower, control)
            seam = _seam(tokens, following, end - OVERLAP // 2, end - OVERLAP // 4)
            if seam is not None:
                yield start, tokens[: seam[0]]
                first = following[seam[1] : seam[1] + 1]
                (start, end), tokens = follower, following[seam[1] :]
            elif 2 * (end - start) <= LONGEST_WINDOW:
                end = min(start + 2 * (end - start), len(text))
                tokens = _since(self._window(text, start, end, control), first)
            else:
                raise _undivided(text[start : start + 20], end - start)
        yield start, tokens

    def _window(self, text: str, start: int, end: int, control: Control) -> Tokens:
        """The tokens of text[start:end] alone."""
        window = text[start:end]
        if isinstance(control, bool):
            self._backend.encode_special_tokens = not control
            tokens = _encoded(self._backend, window)
        else:
            tokens = self._stand_ins.encode(self._backend, window, [at - start for at in control])
        tokens[:, 1:] += start
        return tokens

    @cached_property
    def _stand_ins(self) -> _StandIns:
        names = sorted(self.control_tokens)
        added = self._backend.get_added_tokens_decoder()
        return _StandIns(self._backend, [added[self._control_ids[name]] for name in names], self._control_ids)

    def control_at(self, text: str) -> list[int]:
        """Where control tokens that are written in a text begin."""
        return [match.start() for match in self._written.finditer(text)]

    def count_control(self, value: object) -> Counter[str]:
        """Control tokens that are written in texts, in a row or anything else that JSON can hold."""
        if isinstance(value, str):
            return Counter(match[0] for match in self._written.finditer(value))
        if isinstance(value, Mapping):
            value = [*value, *value.values()]
        if not isinstance(value, list | tuple):
            return Counter()
        return sum((self.count_control(each) for each in value), Counter())

    def replace_control(self, text: str, replace: Callable[[str], str]) -> str:
        """A text in which control tokens are replaced by what `replace` makes of them."""
        return self._written.sub(lambda match: replace(match[0]), text)

    @cached_property
    def _written(self) -> re.Pattern[str]:
        """Matches control tokens, where several begin the longest, as the library does."""
        longest_first = sorted(self.control_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def decode(self, tokens: Sequence[int], *, special: bool = True) -> str:
        """Text of token ids; with `special` false, special tokens are left out."""
        with _library_errors(_undecodable):
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

    def control_id(self, text: str) -> int | None:
        """Id of the control token that is written so; None if none is."""
        return self._control_ids.get(text)

    def token(self, identifier: int) -> str:
        """Name of a token in the vocabulary."""
        return self._backend.id_to_token(identifier) or f"<{identifier}>"


class _StandIns:
    """Other names of control tokens, which no text has: only where they stand are control tokens read.

    The library reads all control tokens of a text or none, but what was added without being special it
    always reads.
    """

    def __init__(self, backend: Backend, tokens: Sequence[AddedToken], ids: Mapping[str, int]) -> None:
        # Nobody who writes a text can guess it, so nobody else can write a control token.
        self._mark = f"\ufdd0{secrets.randbits(64):020}"
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
        """The tokens of a text in which control tokens begin at `control`."""
        marks = [at for at in control if 0 <= at < len(text)]
        edges = [0, *marks, len(text)]
        marked = self._mark.join(text[start:end] for start, end in pairwise(edges))
        backend.encode_special_tokens = True
        tokens = _encoded(backend, marked)
        ids = tokens[:, 0]
        for known in self._ids.keys() & set(ids.tolist()):
            ids[ids == known] = self._ids[known]
        width = len(self._mark)
        places = np.array(marks) + width * np.arange(len(marks))
        tokens[:, 1:] -= width * np.searchsorted(places, tokens[:, 1:])
        return tokens


def _encoded(backend: Backend, text: str) -> Tokens:
    """The tokens of a text alone."""
    with _library_errors(_unencodable):
        encoding = backend.encode(text, add_special_tokens=False)
    tokens = np.empty((len(encoding), 3), np.int32)
    try:
        tokens[:, 0] = encoding.ids
    except OverflowError:
        raise _too_large() from None
    tokens[:, 1:] = np.array(encoding.offsets, np.int32).reshape(-1, 2)
    return tokens


def _seam(tokens: Tokens, following: Tokens, low: int, high: int) -> tuple[int, int] | None:
    """Where two windows can be joined: an index into each, if they have the same tokens from low to high."""
    places = [np.flatnonzero((each[:, 1] >= low) & (each[:, 2] <= high)) for each in (tokens, following)]
    compared = tokens[places[0]]
    if not np.array_equal(compared, following[places[1]]):
        return None
    # Not inside a character that is several tokens.
    fresh = np.flatnonzero(np.diff(compared[:, 1]) > 0) + 1
    if not len(fresh):
        return None
    middle = fresh[len(fresh) // 2]
    return int(places[0][middle]), int(places[1][middle])


def _since(tokens: Tokens, first: Tokens | None) -> Tokens:
    """The tokens of a window from a known one on; all where none is known."""
    if first is None:
        return tokens
    at = np.flatnonzero((tokens == first).all(1))
    if not len(at):
        raise _undivided("the same text in two ways", len(tokens))
    return tokens[int(at[0]) :]


def _unknown_id(backend: Backend) -> int | None:
    name = getattr(backend.model, "unk_token", None)
    if name is not None:
        return backend.token_to_id(name)
    if isinstance(backend.model, Unigram):  # which doesn't tell
        tokens = backend.model.tokenize(_NO_CHARACTER)
        return tokens[0].id if len(tokens) == 1 else None
    return None


def _too_large() -> BundleError:
    return BundleError(f"the tokenizer has a token above {LARGEST_ID}", remedy=REMEDY, code="token-too-large")


def _undivided(text: str, characters: int) -> DataError:
    return DataError(
        "the text can't be tokenized",
        [f"it goes on for {characters} characters without a place to divide it, from {shown(text)}"],
        remedy="break up what repeats itself in it",
        code="text-not-divisible",
    )


@contextlib.contextmanager
def _library_errors(as_ours: Callable[[str], PrgeError]) -> Iterator[None]:
    """Turn what the library raises into an error of prge's; where Rust panics that is no Exception."""
    try:
        yield
    except (PrgeError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise as_ours(str(error)) from None


def _undecodable(problem: str) -> BundleError:
    return BundleError(
        f"the tokenizer can't decode its tokens: {problem}", remedy=REMEDY, code="tokens-not-decodable"
    )


def _unencodable(problem: str) -> DataError:
    return DataError(
        "the text can't be tokenized",
        [problem],
        remedy="leave out what is unusual in it",
        code="text-not-encodable",
    )


def read_backend(path: Path) -> Backend:
    """The library's tokenizer of a `tokenizer.json`; raises BundleError where it is damaged, or hostile."""
    with _library_errors(
        lambda problem: BundleError(f"{path} is damaged: {problem}", remedy=REMEDY, code="tokenizer-damaged")
    ):
        return read_tokenizer(read_document(path, MOST_TOKENIZER_BYTES), path)


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
        raise BundleError(f"the bundle has no {path}", remedy=REMEDY, code="bundle-file-missing")
    backend = read_backend(path)
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "pad"):
        identifier = block.get(f"{name}_token_id")
        if identifier is not None and not _is_token(backend, identifier):
            raise BundleError(
                f"the manifest's {name}_token_id is {identifier!r}, which {path} doesn't have",
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
            f"the bundle has no {template_path}, its manifest says that it has",
            remedy=REMEDY,
            code="bundle-file-missing",
        )
    stop_ids = block.get("stop_token_ids", [])
    if not isinstance(stop_ids, list) or not all(_is_token(backend, each) for each in stop_ids):
        raise BundleError(
            f"the manifest's stop_token_ids are {shown(stop_ids)}, not tokens of {path}",
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
    """The source of a chat template that a user names; raises ConfigError."""
    try:
        return read_document(path, MOST_TEMPLATE_BYTES).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} can't be read as a chat template:", [str(error)], code="chat-template-unreadable"
        ) from None


def compile_chat_template(tokenizer: Tokenizer, date: str | None = None) -> ChatTemplate | None:
    """The chat template of a tokenizer; None if it has none.

    Args:
        tokenizer: of the model.
        date: day that the template takes for today, in ISO 8601; None: that on which it renders.

    Raises:
        BundleError: the template is damaged.
        DataError: jinja2 isn't installed.
    """
    if tokenizer.chat_template is None:
        return None
    try:
        from prge.rows.tokenization.chat import ChatTemplate
    except ImportError:
        raise DataError(
            "a chat template needs the package jinja2",
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


def bundle_tokenizer(bundle: Bundle) -> Tokenizer:
    """The tokenizer of an opened bundle; raises BundleError as `load_tokenizer`."""
    block = bundle.manifest.get("tokenizer")
    return load_tokenizer(bundle.tokenizer, block if isinstance(block, Mapping) else {})
