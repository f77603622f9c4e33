"""The header of a GGUF file, checked before any library reads the file.

    magic, version, counts | keys and values | names, shapes, types and offsets of tensors | aligned data

A header may lie. Every length is held against bounds and against the bytes that are left before anything of
that size is read, and every tensor against the file that has to hold it. What `read_header` accepts can be
given to readers that trust a header, such as transformers'. Format: llama.cpp's docs/gguf.md.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from prge.errors import PrgeError, Refusal, shown
from prge.host.packages import install_extra
from prge.host.regular_files import open_regular

SUFFIX = ".gguf"
ARCHITECTURE = "general.architecture"
TOKENS, MERGES, TOKEN_TYPES, SCORES = (
    f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "token_type", "scores")
)
TEMPLATE = "tokenizer.chat_template"
EMBEDDING = "token_embd.weight"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT, _DEFAULT_ALIGNMENT, _MOST_ALIGNMENT = "general.alignment", 32, 1 << 16
_KIND = "general.type"
# Far beyond every published file: those have dozens of keys, thousands of tensors, and 300,000 tokens.
_MOST_KEYS, _MOST_TENSORS = 1 << 12, 1 << 16
_LONGEST_KEY, _LONGEST_NAME, _LONGEST_TOKEN, _LONGEST_TEXT = 1 << 10, 1 << 8, 1 << 10, 1 << 20
_MOST_ELEMENTS, _MOST_TOKENS = 1 << 22, 1 << 20
_MOST_BYTES = 64 << 20
# Longer arrays are of tokens; what is said of layers is kept.
_MOST_KEPT = 1 << 10
_MOST_DIMENSIONS, _LARGEST_DIMENSION = 4, 1 << 31
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_WHOLE = (0, 1, 2, 3, 4, 5, 10, 11)
_TOKEN_ID = re.compile(r"tokenizer\.ggml\.\w+_token_id")
_REMEDY = "download the file again; a file that says this everywhere is no model"


@dataclass(frozen=True)
class GgufValue:
    """A value of a header, its type, and that of its elements where it is an array.

    `value` is a number, a text, or a list; of arrays of texts and of long ones it is the count alone.
    """

    kind: int
    value: Any
    element: int | None = None


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file: `shape` as PyTorch has it, `kind` as ggml numbers types, `start` in bytes."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    bytes: int

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    def values(self, rows: slice | list[int] | None = None) -> np.ndarray[Any, Any]:
        """Its numbers, dequantized to float32; of some rows of the first dimension, if they are given."""
        import gguf

        kind = gguf.GGMLQuantizationType(self.kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        stored = (*self.shape[:-1], self.shape[-1] // block * size)
        data = np.memmap(self.path, np.uint8, "r", self.start, stored)
        part = data if rows is None else data[rows]
        result = np.empty((*part.shape[:-1], part.shape[-1] // size * block), np.float32)
        flat, out = part.reshape(-1, part.shape[-1]), result.reshape(-1, result.shape[-1])
        # What a block becomes takes several times its numbers while it is computed.
        step = max(1, _DEQUANTIZED_AT_ONCE // max(1, out.shape[-1]))
        for start in range(0, len(flat), step):
            # A copy: what is mapped has any alignment. Who reads weights refuses those that aren't finite.
            with np.errstate(all="ignore"):
                out[start : start + step] = gguf.dequantize(np.array(flat[start : start + step]), kind)
        return result


_DEQUANTIZED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class GgufHeader:
    """What a checked header says: values by key, and tensors by name."""

    path: Path
    version: int
    fields: Mapping[str, GgufValue]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the type of model."""
        return str(self.fields[ARCHITECTURE].value)

    def get(self, key: str, default: Any = None) -> Any:
        """A value; see `GgufValue`."""
        return self.fields[key].value if key in self.fields else default

    def of_model(self, key: str, default: Any = None) -> Any:
        """A value that the header says under the name of its architecture."""
        return self.get(f"{self.architecture}.{key}", default)


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file; no byte behind it is read.

    Raises:
        BundleError: the file can't be opened, its header is damaged or says what can't be, or it is no model.
        PrgeError: the package gguf is not installed.
    """
    require_gguf()
    try:
        with open_regular(path, "rb", follow=True, buffering=1 << 16) as stream:
            return _Reader(path, stream).header()
    except (OSError, struct.error) as error:
        raise Refusal("gguf-damaged", f"{path} can't be read: {error}", remedy=_REMEDY) from None


def require_gguf() -> None:
    """Raise PrgeError unless the package gguf is installed."""
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError:
        raise PrgeError(
            "reading GGUF needs the package gguf, which is not installed",
            remedy=install_extra("gguf"),
            code="package-missing",
        ) from None


class _Reader:
    """Reads a header from its beginning; never more than is left, and never more than the bounds allow."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path, self._stream = path, stream
        self._size = os.fstat(stream.fileno()).st_size
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(4, "the magic") != _MAGIC:
            self._refuse("it doesn't begin as a GGUF file does")
        version = self._number("I", "the version")
        if version not in _VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
                self._refuse("it was written for big-endian machines")
            self._refuse(f"its version is {version}, must be {' or '.join(map(str, _VERSIONS))}")
        tensors = self._count("tensors", _MOST_TENSORS)
        keys = self._count("keys", _MOST_KEYS)
        fields: dict[str, GgufValue] = {}
        for _ in range(keys):
            key = self._text("a key", _LONGEST_KEY)
            if key in fields:
                self._refuse(f"the key {shown(key)} is there twice")
            fields[key] = self._value(key, self._number("I", f"the type of {shown(key)}"))
        self._check_fields(fields)
        found = [self._tensor() for _ in range(tensors)]
        alignment = self._alignment(fields)
        start = -(-self._at // alignment) * alignment
        placed = {each.name: self._placed(each, start, alignment) for each in found}
        if len(placed) < len(found):
            names = [each.name for each in found]
            self._refuse(f"the tensor {shown(next(n for n in names if names.count(n) > 1))} is there twice")
        self._check_apart(placed)
        self._check_vocabulary(fields, placed)
        return GgufHeader(self._path, version, fields, placed)

    def _refuse(self, what: str) -> NoReturn:
        raise Refusal("gguf-damaged", f"{self._path} can't be read as GGUF: {what}", remedy=_REMEDY)

    def _take(self, count: int, what: str) -> bytes:
        """The next bytes, which must be there and within the bound of a header."""
        if count > self._size - self._at:
            self._refuse(f"{what} would end behind the file, which has {self._size:,} bytes")
        if self._at + count > _MOST_BYTES:
            self._refuse(f"its header has more than {_MOST_BYTES:,} bytes")
        content = self._stream.read(count)
        if len(content) < count:
            self._refuse(f"{what} is missing")
        self._at += count
        return content

    def _number(self, letter: str, what: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}"), what))[0]

    def _count(self, what: str, most: int) -> int:
        count = int(self._number("Q", f"the number of {what}"))
        if count > most:
            self._refuse(f"it counts {count:,} {what}, at most {most:,} are read")
        return count

    def _text(self, what: str, longest: int, *, may_be_empty: bool = False) -> str:
        length = int(self._number("Q", f"the length of {what}"))
        if not length and not may_be_empty:
            self._refuse(f"{what} is empty")
        if length > longest:
            self._refuse(f"{what} has {length:,} bytes, at most {longest:,} are read")
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            self._refuse(f"{what} is no UTF-8 text")

    def _value(self, key: str, kind: int) -> GgufValue:
        name = shown(key)
        if kind in _SCALARS:
            value = self._number(_SCALARS[kind], name)
            if isinstance(value, float) and not math.isfinite(value):
                self._refuse(f"{name} is {value}")
            return GgufValue(kind, value)
        if kind == _STRING:
            return GgufValue(kind, self._text(name, _LONGEST_TEXT, may_be_empty=True))
        if kind != _ARRAY:
            self._refuse(f"{name} has the type {kind}, which GGUF doesn't know")
        element = int(self._number("I", f"the type of {name}"))
        if element != _STRING and element not in _SCALARS:
            # Arrays of arrays have no use in a model, and no bound.
            self._refuse(f"{name} is an array of type {element}, must be of numbers or texts")
        count = self._count(f"values of {name}", _MOST_ELEMENTS)
        if element == _STRING:
            # Each has a length at least.
            self._fits(count * 8, name)
            for _ in range(count):
                self._text(f"a text of {name}", _LONGEST_TOKEN, may_be_empty=True)
            return GgufValue(kind, count, element)
        letter = _SCALARS[element]
        content = self._take(count * struct.calcsize(f"<{letter}"), name)
        if count > _MOST_KEPT:
            return GgufValue(kind, count, element)
        values = list(struct.unpack(f"<{count}{letter}", content))
        if not all(math.isfinite(value) for value in values):
            self._refuse(f"{name} has numbers that aren't finite")
        return GgufValue(kind, values, element)

    def _fits(self, count: int, what: str) -> None:
        if count > self._size - self._at:
            self._refuse(f"{what} would end behind the file, which has {self._size:,} bytes")

    def _tensor(self) -> GgufTensor:
        name = self._text("the name of a tensor", _LONGEST_NAME)
        dimensions = int(self._number("I", f"the dimensions of {shown(name)}"))
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            self._refuse(f"{shown(name)} has {dimensions} dimensions, must have 1 to {_MOST_DIMENSIONS}")
        shape = tuple(int(self._number("Q", f"the shape of {shown(name)}")) for _ in range(dimensions))[::-1]
        kind, offset = (int(self._number(letter, shown(name))) for letter in "IQ")
        if not all(1 <= size <= _LARGEST_DIMENSION for size in shape):
            self._refuse(f"{shown(name)} would have the shape {shown(list(shape))}")
        block, size = self._block(name, kind)
        if shape[-1] % block:
            self._refuse(
                f"{shown(name)} has rows of {shape[-1]:,} numbers, its type stores them in blocks of {block}"
            )
        return GgufTensor(self._path, name, shape, kind, offset, math.prod(shape) // block * size)

    def _block(self, name: str, kind: int) -> tuple[int, int]:
        sizes = _block_sizes(kind)
        if sizes is None:
            raise Refusal(
                "gguf-type-not-read",
                f"{self._path} stores {shown(name)} in the ggml type {_kind_name(kind)}, which can't be "
                "dequantized",
                remedy="take a file of another quantization, such as Q8_0, Q4_K_M or F16",
            )
        return sizes

    def _alignment(self, fields: Mapping[str, GgufValue]) -> int:
        if _ALIGNMENT not in fields:
            return _DEFAULT_ALIGNMENT
        given = fields[_ALIGNMENT]
        is_power = given.kind == 4 and given.value and not given.value & (given.value - 1)
        if not is_power or given.value > _MOST_ALIGNMENT:
            self._refuse(
                f"{_ALIGNMENT} is {shown(given.value)}, must be a power of 2 up to {_MOST_ALIGNMENT}"
            )
        return int(given.value)

    def _placed(self, tensor: GgufTensor, start: int, alignment: int) -> GgufTensor:
        """A tensor whose `start` counts from the beginning of the file; the reader gave it the data's."""
        if tensor.start % alignment:
            self._refuse(f"{shown(tensor.name)} begins at {tensor.start:,}, which isn't aligned")
        begin = start + tensor.start
        if begin + tensor.bytes > self._size:
            self._refuse(
                f"{shown(tensor.name)} would end at byte {begin + tensor.bytes:,} of a file of {self._size:,}"
            )
        return GgufTensor(tensor.path, tensor.name, tensor.shape, tensor.kind, begin, tensor.bytes)

    def _check_apart(self, tensors: Mapping[str, GgufTensor]) -> None:
        """Several tensors of the same bytes would take more memory than the file has."""
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for first, second in itertools.pairwise(ordered):
            if first.start + first.bytes > second.start:
                self._refuse(f"{shown(first.name)} and {shown(second.name)} lie in the same place")

    def _check_fields(self, fields: Mapping[str, GgufValue]) -> None:
        architecture = fields.get(ARCHITECTURE)
        if architecture is None or architecture.kind != _STRING or not architecture.value:
            self._refuse(f"it has no {ARCHITECTURE}")
        kind = fields[_KIND].value if _KIND in fields else "model"
        if kind != "model":
            raise Refusal(
                "gguf-without-model",
                f"{self._path} holds no model: its {_KIND} is {shown(kind)}",
                remedy="give the file of the language model itself",
            )

    def _check_vocabulary(self, fields: Mapping[str, GgufValue], tensors: Mapping[str, GgufTensor]) -> None:
        """That tokens are texts, each with a type and a score, and that special ones are among them."""
        tokens = fields.get(TOKENS)
        if tokens is None:
            return
        texts = [name for name in (TOKENS, MERGES) if name in fields]
        for name in texts:
            if (fields[name].kind, fields[name].element) != (_ARRAY, _STRING):
                self._refuse(f"{name} is no array of texts")
        count = int(tokens.value)
        if not 1 <= count <= _MOST_TOKENS:
            self._refuse(f"it has {count:,} tokens, must have 1 to {_MOST_TOKENS:,}")
        for name in (TOKEN_TYPES, SCORES):
            if name in fields and (given := _length(fields[name])) != count:
                self._refuse(f"{name} has {given:,} values for {count:,} tokens")
        for name, field in fields.items():
            is_id = _TOKEN_ID.fullmatch(name) is not None
            if is_id and (field.kind not in _WHOLE or not 0 <= field.value < count):
                self._refuse(f"{name} is {shown(field.value)}, there are {count:,} tokens")
        table = tensors.get(EMBEDDING)
        if table is not None and table.shape[0] < count:
            self._refuse(f"it has {count:,} tokens, and {EMBEDDING} has {table.shape[0]:,} rows")


def _length(field: GgufValue) -> int:
    if field.kind != _ARRAY or field.element == _STRING:
        return -1
    return len(field.value) if isinstance(field.value, list) else int(field.value)


@cache
def _block_sizes(kind: int) -> tuple[int, int] | None:
    """Numbers and bytes of a block of a ggml type; None unless it can be dequantized."""
    import gguf

    try:
        known = gguf.GGMLQuantizationType(kind)
        block, size = gguf.GGML_QUANT_SIZES[known]
        gguf.dequantize(np.zeros((1, size), np.uint8), known)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return int(block), int(size)


def _kind_name(kind: int) -> str:
    import gguf

    try:
        return str(gguf.GGMLQuantizationType(kind).name)
    except ValueError:
        return str(kind)


def kind_name(tensor: GgufTensor) -> str:
    """ggml's name for the type that a tensor is stored in, such as Q4_1."""
    return _kind_name(tensor.kind)
