"""The header of a GGUF file, checked before any library reads the file.

    magic, version, counts | keys and values | names, shapes, types and offsets of tensors | aligned data

Headers are not trusted. Every length is compared with its bound and with the rest of the file before anything
of this size is read, and every tensor with the size of the file. Readers that trust a header, such as
transformers', can read what `read_header` accepts. Format: llama.cpp's docs/gguf.md.
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

from prge.errors import PrgeError, Refusal, format_value
from prge.system.packages import install_extra_command
from prge.system.regular_files import open_regular

GGUF_SUFFIX = ".gguf"
ARCHITECTURE = "general.architecture"
TOKENS, MERGES, TOKEN_TYPES, SCORES = (
    f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "token_type", "scores")
)
TEMPLATE = "tokenizer.chat_template"
EMBEDDING = "token_embd.weight"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT, _DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = "general.alignment", 32, 1 << 16
_FILE_TYPE = "general.type"
# Far beyond every published file, which have dozens of keys, thousands of tensors, and 300,000 tokens.
_MAX_KEYS, _MAX_TENSORS = 1 << 12, 1 << 16
_LONGEST_KEY, _LONGEST_NAME, _LONGEST_TOKEN, _LONGEST_TEXT = 1 << 10, 1 << 8, 1 << 10, 1 << 20
_MAX_ELEMENTS, _MAX_TOKENS = 1 << 22, 1 << 20
_MAX_BYTES = 64 << 20
# Longer arrays describe tokens and are only counted; arrays of layers are kept.
_MAX_KEPT = 1 << 10
_MAX_DIMENSIONS, _LARGEST_DIMENSION = 4, 1 << 31
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALAR_TYPES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_INTEGER_TYPES = (0, 1, 2, 3, 4, 5, 10, 11)
_TOKEN_ID = re.compile(r"tokenizer\.ggml\.\w+_token_id")
_REMEDY = "Download the file again, or use another one."


@dataclass(frozen=True)
class GgufValue:
    """A value of a header with its type and, for an array, the type of its elements.

    `value` is a number, a string or a list; for arrays of strings and for long arrays it is only the length.
    """

    type_id: int
    value: Any
    element: int | None = None


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        path: the file.
        name: llama.cpp's name of the tensor.
        shape: the shape in PyTorch's order.
        type_id: the number of its ggml type.
        start: the offset of its data in bytes.
        bytes: the size of its data.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    bytes: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def values(self, rows: slice | list[int] | None = None) -> np.ndarray[Any, Any]:
        """Return the values dequantized to float32, of all or of the given rows of the first dimension."""
        import gguf

        ggml_type = gguf.GGMLQuantizationType(self.type_id)
        block, size = gguf.GGML_QUANT_SIZES[ggml_type]
        stored_shape = (*self.shape[:-1], self.shape[-1] // block * size)
        data = np.memmap(self.path, np.uint8, "r", self.start, stored_shape)
        selected = data if rows is None else data[rows]
        result = np.empty((*selected.shape[:-1], selected.shape[-1] // size * block), np.float32)
        flat, out = selected.reshape(-1, selected.shape[-1]), result.reshape(-1, result.shape[-1])
        # Dequantizing a block takes several times the memory of its result.
        step = max(1, _DEQUANTIZED_ELEMENTS // max(1, out.shape[-1]))
        for start in range(0, len(flat), step):
            # The copy aligns the mapped bytes. Values that aren't finite are refused by the callers.
            with np.errstate(all="ignore"):
                out[start : start + step] = gguf.dequantize(np.array(flat[start : start + step]), ggml_type)
        return result


_DEQUANTIZED_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class GgufHeader:
    """A checked header: values by key, and tensors by name."""

    path: Path
    version: int
    fields: Mapping[str, GgufValue]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model type."""
        return str(self.fields[ARCHITECTURE].value)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; see `GgufValue`."""
        return self.fields[key].value if key in self.fields else default

    def model_value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key that is prefixed with the architecture."""
        return self.get(f"{self.architecture}.{key}", default)


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file; nothing after the header is read.

    Raises:
        BundleError: the file can't be opened, its header is damaged or inconsistent, or it is not a model.
        PrgeError: the package gguf is not installed.
    """
    require_gguf()
    try:
        with open_regular(path, "rb", follow=True, buffering=1 << 16) as stream:
            return _Reader(path, stream).header()
    except (OSError, struct.error) as error:
        raise Refusal("gguf-damaged", f"Cannot read {path}: {error}.", remedy=_REMEDY) from None


def require_gguf() -> None:
    """Raise PrgeError unless the package gguf is installed."""
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError:
        raise PrgeError(
            "Reading GGUF files needs the package gguf, which is not installed.",
            remedy=install_extra_command("gguf"),
            code="package-missing",
        ) from None


class _Reader:
    """Reads a header from its beginning, never more than the file has or the bounds allow."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path, self._stream = path, stream
        self._size = os.fstat(stream.fileno()).st_size
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(4, "the magic") != _MAGIC:
            self._refuse("it does not begin like a GGUF file")
        version = self._number("I", "the version")
        if version not in _VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
                self._refuse("it was written for big-endian machines")
            self._refuse(f"its version is {version} but must be {' or '.join(map(str, _VERSIONS))}")
        tensors = self._count("tensors", _MAX_TENSORS)
        keys = self._count("keys", _MAX_KEYS)
        fields: dict[str, GgufValue] = {}
        for _ in range(keys):
            key = self._text("a key", _LONGEST_KEY)
            if key in fields:
                self._refuse(f"the key {format_value(key)} occurs twice")
            fields[key] = self._value(key, self._number("I", f"the type of {format_value(key)}"))
        self._check_fields(fields)
        tensors_read = [self._tensor() for _ in range(tensors)]
        alignment = self._alignment(fields)
        start = -(-self._at // alignment) * alignment
        by_name = {each.name: self._placed(each, start, alignment) for each in tensors_read}
        if len(by_name) < len(tensors_read):
            names = [each.name for each in tensors_read]
            self._refuse(
                f"the tensor {format_value(next(n for n in names if names.count(n) > 1))} occurs twice"
            )
        self._check_apart(by_name)
        self._check_vocabulary(fields, by_name)
        return GgufHeader(self._path, version, fields, by_name)

    def _refuse(self, what: str) -> NoReturn:
        raise Refusal("gguf-damaged", f"Cannot read {self._path} as GGUF: {what}.", remedy=_REMEDY)

    def _take(self, count: int, what: str) -> bytes:
        """Return the next bytes, which must be inside the file and the bound of a header."""
        if count > self._size - self._at:
            self._refuse(f"{what} would end after the end of the file, which has {self._size:,} bytes")
        if self._at + count > _MAX_BYTES:
            self._refuse(f"its header has more than {_MAX_BYTES:,} bytes")
        content = self._stream.read(count)
        if len(content) < count:
            self._refuse(f"{what} is missing")
        self._at += count
        return content

    def _number(self, letter: str, what: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}"), what))[0]

    def _count(self, what: str, limit: int) -> int:
        count = int(self._number("Q", f"the number of {what}"))
        if count > limit:
            self._refuse(f"it counts {count:,} {what}, but at most {limit:,} are allowed")
        return count

    def _text(self, what: str, longest: int, *, may_be_empty: bool = False) -> str:
        length = int(self._number("Q", f"the length of {what}"))
        if not length and not may_be_empty:
            self._refuse(f"{what} is empty")
        if length > longest:
            self._refuse(f"{what} has {length:,} bytes, but at most {longest:,} are allowed")
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            self._refuse(f"{what} is not valid UTF-8")

    def _value(self, key: str, value_type: int) -> GgufValue:
        name = format_value(key)
        if value_type in _SCALAR_TYPES:
            value = self._number(_SCALAR_TYPES[value_type], name)
            if isinstance(value, float) and not math.isfinite(value):
                self._refuse(f"{name} is {value}")
            return GgufValue(value_type, value)
        if value_type == _STRING:
            return GgufValue(value_type, self._text(name, _LONGEST_TEXT, may_be_empty=True))
        if value_type != _ARRAY:
            self._refuse(f"{name} has the type {value_type}, which GGUF does not define")
        element_type = int(self._number("I", f"the type of {name}"))
        if element_type != _STRING and element_type not in _SCALAR_TYPES:
            # Models have no arrays of arrays, whose size would have no bound.
            self._refuse(f"{name} is an array of type {element_type} but must contain numbers or strings")
        count = self._count(f"values of {name}", _MAX_ELEMENTS)
        if element_type == _STRING:
            # Each string has at least its length of 8 bytes.
            self._fits(count * 8, name)
            for _ in range(count):
                self._text(f"a string of {name}", _LONGEST_TOKEN, may_be_empty=True)
            return GgufValue(value_type, count, element_type)
        letter = _SCALAR_TYPES[element_type]
        content = self._take(count * struct.calcsize(f"<{letter}"), name)
        if count > _MAX_KEPT:
            return GgufValue(value_type, count, element_type)
        values = list(struct.unpack(f"<{count}{letter}", content))
        if not all(math.isfinite(value) for value in values):
            self._refuse(f"{name} has numbers that aren't finite")
        return GgufValue(value_type, values, element_type)

    def _fits(self, count: int, what: str) -> None:
        if count > self._size - self._at:
            self._refuse(f"{what} would end after the end of the file, which has {self._size:,} bytes")

    def _tensor(self) -> GgufTensor:
        name = self._text("the name of a tensor", _LONGEST_NAME)
        dimensions = int(self._number("I", f"the dimensions of {format_value(name)}"))
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self._refuse(
                f"{format_value(name)} has {dimensions} dimensions but must have 1 to {_MAX_DIMENSIONS}"
            )
        shape = tuple(
            int(self._number("Q", f"the shape of {format_value(name)}")) for _ in range(dimensions)
        )[::-1]
        ggml_type, offset = (int(self._number(letter, format_value(name))) for letter in "IQ")
        if not all(1 <= size <= _LARGEST_DIMENSION for size in shape):
            self._refuse(f"{format_value(name)} has the invalid shape {format_value(list(shape))}")
        block, size = self._block(name, ggml_type)
        if shape[-1] % block:
            self._refuse(
                f"{format_value(name)} has rows of {shape[-1]:,} elements, but its type stores blocks of "
                f"{block}"
            )
        return GgufTensor(self._path, name, shape, ggml_type, offset, math.prod(shape) // block * size)

    def _block(self, name: str, ggml_type: int) -> tuple[int, int]:
        sizes = _block_sizes(ggml_type)
        if sizes is None:
            raise Refusal(
                "gguf-type-not-read",
                f"{self._path} stores {format_value(name)} in the ggml type {_ggml_type_name(ggml_type)}, "
                "which can't be dequantized.",
                remedy="Use a file with another quantization, such as Q8_0, Q4_K_M or F16.",
            )
        return sizes

    def _alignment(self, fields: Mapping[str, GgufValue]) -> int:
        if _ALIGNMENT not in fields:
            return _DEFAULT_ALIGNMENT
        field = fields[_ALIGNMENT]
        is_power = field.type_id == 4 and field.value and not field.value & (field.value - 1)
        if not is_power or field.value > _MAX_ALIGNMENT:
            self._refuse(
                f"{_ALIGNMENT} is {format_value(field.value)} but must be a power of 2 up to {_MAX_ALIGNMENT}"
            )
        return int(field.value)

    def _placed(self, tensor: GgufTensor, start: int, alignment: int) -> GgufTensor:
        """Return a tensor whose `start` counts from the beginning of the file instead of the data."""
        if tensor.start % alignment:
            self._refuse(f"{format_value(tensor.name)} begins at {tensor.start:,}, which isn't aligned")
        begin = start + tensor.start
        if begin + tensor.bytes > self._size:
            self._refuse(
                f"{format_value(tensor.name)} would end at byte {begin + tensor.bytes:,} of a file of "
                f"{self._size:,}"
            )
        return GgufTensor(tensor.path, tensor.name, tensor.shape, tensor.type_id, begin, tensor.bytes)

    def _check_apart(self, tensors: Mapping[str, GgufTensor]) -> None:
        """Refuse overlapping tensors, which could take more memory than the file has bytes."""
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for first, second in itertools.pairwise(ordered):
            if first.start + first.bytes > second.start:
                self._refuse(f"{format_value(first.name)} and {format_value(second.name)} overlap")

    def _check_fields(self, fields: Mapping[str, GgufValue]) -> None:
        architecture = fields.get(ARCHITECTURE)
        if architecture is None or architecture.type_id != _STRING or not architecture.value:
            self._refuse(f"it has no {ARCHITECTURE}")
        file_type = fields[_FILE_TYPE].value if _FILE_TYPE in fields else "model"
        if file_type != "model":
            raise Refusal(
                "gguf-without-model",
                f"{self._path} does not contain a model: its {_FILE_TYPE} is {format_value(file_type)}.",
                remedy="Use the file of the language model itself.",
            )

    def _check_vocabulary(self, fields: Mapping[str, GgufValue], tensors: Mapping[str, GgufTensor]) -> None:
        """Refuse a vocabulary unless tokens are strings with types and scores, and special tokens exist."""
        tokens = fields.get(TOKENS)
        if tokens is None:
            return
        string_arrays = [name for name in (TOKENS, MERGES) if name in fields]
        for name in string_arrays:
            if (fields[name].type_id, fields[name].element) != (_ARRAY, _STRING):
                self._refuse(f"{name} is not an array of strings")
        count = int(tokens.value)
        if not 1 <= count <= _MAX_TOKENS:
            self._refuse(f"it has {count:,} tokens but must have 1 to {_MAX_TOKENS:,}")
        for name in (TOKEN_TYPES, SCORES):
            if name in fields and (length := _length(fields[name])) != count:
                self._refuse(f"{name} has {length:,} values for {count:,} tokens")
        for name, field in fields.items():
            is_id = _TOKEN_ID.fullmatch(name) is not None
            if is_id and (field.type_id not in _INTEGER_TYPES or not 0 <= field.value < count):
                self._refuse(f"{name} is {format_value(field.value)}, but there are {count:,} tokens")
        table = tensors.get(EMBEDDING)
        if table is not None and table.shape[0] < count:
            self._refuse(f"it has {count:,} tokens, but {EMBEDDING} has {table.shape[0]:,} rows")


def _length(field: GgufValue) -> int:
    if field.type_id != _ARRAY or field.element == _STRING:
        return -1
    return len(field.value) if isinstance(field.value, list) else int(field.value)


@cache
def _block_sizes(ggml_type: int) -> tuple[int, int] | None:
    """Return the elements and bytes of a block of a ggml type; None if it can't be dequantized."""
    import gguf

    try:
        quantization = gguf.GGMLQuantizationType(ggml_type)
        block, size = gguf.GGML_QUANT_SIZES[quantization]
        gguf.dequantize(np.zeros((1, size), np.uint8), quantization)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return int(block), int(size)


def _ggml_type_name(ggml_type: int) -> str:
    import gguf

    try:
        return str(gguf.GGMLQuantizationType(ggml_type).name)
    except ValueError:
        return str(ggml_type)


def type_name(tensor: GgufTensor) -> str:
    """Return ggml's name of a tensor's type, such as Q4_1."""
    return _ggml_type_name(tensor.type_id)
