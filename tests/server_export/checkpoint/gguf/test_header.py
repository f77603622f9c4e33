"""GGUF headers with false sizes are refused before memory of these sizes is allocated."""

from __future__ import annotations

import os
import struct
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from prge.errors import BundleError, PrgeError
from prge.system.packages import install_extra_command
from server_export.checkpoint.gguf.header import read_header
from tests.gguf_files import write_gguf
from tests.refusals import raises, refusal
from tests.tiny_models import make_model, make_tokenizer

U32, TEXT, LIST = 4, 8, 9
F32, Q4_0, Q8_K, UNKNOWN = 0, 2, 15, 4000
ARCHITECTURE = ("general.architecture", TEXT, "llama")


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def field(key: str, value_type: int, value: object) -> bytes:
    """Return a key with a number, a string, or raw bytes."""
    content = (
        value if isinstance(value, bytes) else text(value) if value_type == TEXT else struct.pack("<I", value)
    )
    return text(key) + struct.pack("<I", value_type) + content


def tensor(name: str = "a", shape: Sequence[int] = (8, 4), ggml_type: int = F32, offset: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        + struct.pack("<IQ", ggml_type, offset)
    )


def header(
    fields: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: int = 128,
) -> bytes:
    fields = [field(*ARCHITECTURE), *fields]
    stated_counts = counts or (len(tensors), len(fields))
    head = magic + struct.pack("<IQQ", version, *stated_counts) + b"".join([*fields, *tensors])
    return head + bytes(-len(head) % 32 + data)


def texts(count: int, *values: str) -> bytes:
    return struct.pack("<IQ", TEXT, count) + b"".join(map(text, values))


TOKENS = field("tokenizer.ggml.tokens", LIST, texts(2, "a", "b"))
LIES = {
    "magic": (header(magic=b"GGML"), "does not begin like a GGUF file"),
    "nothing": (b"", "magic would end after the end of the file"),
    "version": (header(version=1), "its version is 1 but must be 2 or 3"),
    "big-endian": (header(version=3 << 24), "for big-endian machines"),
    "tensor count": (header(counts=(1 << 60, 1)), "counts 1,152,921,504,606,846,976 tensors"),
    "key count": (header(counts=(0, 1 << 63)), "keys, but at most 4,096"),
    "more keys than there are": (header(counts=(0, 2)), "a key is empty"),
    "key length": (header([struct.pack("<Q", 1 << 62)]), "a key has 4,611,686,018,427,387,904 bytes"),
    "text length": (header([field("x", TEXT, struct.pack("<Q", 1 << 40))]), "'x' has 1,099,511,627,776"),
    "text after the end of the file": (
        header([field("x", TEXT, struct.pack("<Q", 5000))]),
        "would end after the end of the file",
    ),
    "no UTF-8": (header([field("x", TEXT, text(b"\xff\xfe"))]), "'x' is not valid UTF-8"),
    "type of a value": (header([field("x", 13, b"\0" * 8)]), "has the type 13"),
    "array length": (
        header([field("x", LIST, struct.pack("<IQ", U32, 1 << 61))]),
        "counts 2,305,843,009,213,693,952 values",
    ),
    "array after the end of the file": (
        header([field("x", LIST, struct.pack("<IQ", U32, 1 << 20))]),
        "'x' would end after the end of the file",
    ),
    "texts after the end of the file": (
        header([field("x", LIST, texts(1 << 20))]),
        "'x' would end after the end of the file",
    ),
    "nested array": (header([field("x", LIST, struct.pack("<IQ", LIST, 1))]), "an array of type 9"),
    "key twice": (header([field("x", U32, 1), field("x", U32, 1)]), "'x' occurs twice"),
    "alignment of 0": (header([field("general.alignment", U32, 0)]), "must be a power of 2"),
    "alignment of 48": (header([field("general.alignment", U32, 48)]), "must be a power of 2"),
    "alignment of another type": (header([field("general.alignment", TEXT, "32")]), "must be a power of 2"),
    "no architecture": (header([], counts=(0, 0)), "no general.architecture"),
    "adapter": (header([field("general.type", TEXT, "adapter")]), "does not contain a model"),
    "dimensions": (header(tensors=[tensor(shape=(1,) * 5)]), "has 5 dimensions"),
    "no dimensions": (header(tensors=[tensor(shape=())]), "has 0 dimensions"),
    "dimension of 0": (header(tensors=[tensor(shape=(0, 4))]), "has the invalid shape"),
    # Products that overflow 64 bits, as in llama.cpp's CVE-2026-27940.
    "product that overflows": (header(tensors=[tensor(shape=(1 << 31, 1 << 31, 4, 1))]), "would end at byte"),
    "dimension that overflows": (header(tensors=[tensor(shape=(1 << 63, 2))]), "has the invalid shape"),
    "offset that overflows": (header(tensors=[tensor(offset=(1 << 64) - 32)]), "would end at byte"),
    # An end after the end of the file, as in Ollama's CVE-2026-7482.
    "offset after the end of the file": (header(tensors=[tensor(offset=1 << 20)]), "would end at byte"),
    "size after the end of the file": (header(tensors=[tensor(shape=(8, 5))]), "would end at byte"),
    "offset that isn't aligned": (header(tensors=[tensor(offset=4)]), "begins at 4, which isn't aligned"),
    "type of a tensor": (header(tensors=[tensor(ggml_type=UNKNOWN)]), "the ggml type 4000"),
    "type that nothing dequantizes": (header(tensors=[tensor(ggml_type=Q8_K)]), "the ggml type Q8_K"),
    "row that is no multiple of a block": (
        header(tensors=[tensor(shape=(8, 4), ggml_type=Q4_0)]),
        "blocks of 32",
    ),
    "tensor twice": (header(tensors=[tensor(), tensor()]), "'a' occurs twice"),
    "equal offsets": (header(tensors=[tensor("a"), tensor("b")]), "overlap"),
    "overlap": (
        header(tensors=[tensor("a"), tensor("b", offset=96)], data=256),
        "'a' and 'b' overlap",
    ),
    "types of tokens": (
        header([TOKENS, field("tokenizer.ggml.token_type", LIST, struct.pack("<IQ", U32, 0))]),
        "token_type has 0 values for 2 tokens",
    ),
    "special token": (
        header([TOKENS, field("tokenizer.ggml.eos_token_id", U32, 2)]),
        "eos_token_id is 2, but there are 2 tokens",
    ),
    "tokens that are not texts": (
        header([field("tokenizer.ggml.tokens", LIST, struct.pack("<IQI", U32, 1, 1))]),
        "tokens is not an array of strings",
    ),
    "a number for tokens": (
        header([field("tokenizer.ggml.tokens", U32, 2)]),
        "tokens is not an array of strings",
    ),
    "more tokens than rows": (
        header([TOKENS], [tensor("token_embd.weight", shape=(8, 1))]),
        "2 tokens, but token_embd.weight has 1 rows",
    ),
    "long token": (header([field("tokenizer.ggml.tokens", LIST, texts(1, "x" * 5000))]), "at most 1,024"),
    "not a number": (header([field("x", 6, struct.pack("<f", np.nan))]), "'x' is nan"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_false_size_is_refused_without_allocating_it(case: str, tmp_path: Path) -> None:
    content, match = LIES[case]
    path = tmp_path / "case.gguf"
    path.write_bytes(content)
    fill_caches(tmp_path)
    tracemalloc.start()
    try:
        with refusal("gguf-damaged", "gguf-without-model", "gguf-type-not-read") as caught:
            read_header(path)
        assert match in str(caught.value)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def fill_caches(folder: Path) -> None:
    """Read a valid file, so that imports and caches are in memory."""
    path = folder / "plain.gguf"
    path.write_bytes(header(tensors=[tensor()]))
    read_header(path)


def test_a_plain_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    path.write_bytes(header([TOKENS], [tensor("a"), tensor("b", (32, 2), Q4_0, 128)], data=512))
    header_read = read_header(path)
    assert header_read.architecture == "llama"
    assert header_read.get("tokenizer.ggml.tokens") == 2
    assert [(each.name, each.shape, each.bytes) for each in header_read.tensors.values()] == [
        ("a", (4, 8), 128),
        ("b", (2, 32), 36),
    ]
    assert header_read.tensors["b"].start == header_read.tensors["a"].start + 128


@pytest.mark.parametrize("file_type", ["folder", "pipe", "device"])
def test_special_files_are_refused_at_once(file_type: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make = {"folder": os.mkdir, "pipe": os.mkfifo, "device": lambda name: os.symlink("/dev/zero", name)}
    make[file_type](path)
    with refusal("gguf-damaged"):
        read_header(path)


def test_random_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    """Whatever bytes of a header change, the tensors of an accepted header are inside the file."""
    path = write_gguf(tmp_path / "tiny.gguf", make_model("llama"), make_tokenizer(), "Q8_0")
    content, random = path.read_bytes(), Random(0)
    first = min(each.start for each in read_header(path).tensors.values())
    accepted = 0
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(random.randint(1, 4)):
            at = random.randrange(first)
            damaged[at : at + 8] = random.choice(
                [random.randbytes(1), random.randbytes(8), b"\xff" * 8, bytes(8), struct.pack("<Q", 1 << 40)]
            )
        path.write_bytes(damaged)
        try:
            header_read = read_header(path)
        except BundleError:
            continue
        accepted += 1
        assert all(each.start + each.bytes <= len(damaged) for each in header_read.tensors.values())
    assert accepted < 400


def test_a_missing_package_is_refused_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with raises(PrgeError, "package-missing", containing=install_extra_command("gguf")):
        read_header(tmp_path / "model.gguf")
