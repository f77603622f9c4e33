"""Mutations of files: random ones, ones for a file's format, and ones that keep every checksum valid."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from prge.formats.bundle import MANIFEST, file_sha256, manifest_sha256

Mutation = Callable[[Path, Random], object]
_BLOCK = 4096
_HUGE = 5 << 28  # more than the memory limit of a case


def _flip_bits(path: Path, random: Random, times: int = 1) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(times if content else 0):
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def _overwrite(path: Path, random: Random, block: bytes) -> None:
    content = bytearray(path.read_bytes())
    start = random.randrange(max(1, len(content)))
    content[start : start + len(block)] = block[: len(content) - start]
    path.write_bytes(content)


def _truncate(path: Path, random: Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: random.randrange(max(1, len(content)))])


def _remove_bytes(path: Path, random: Random) -> None:
    content = path.read_bytes()
    start = random.randrange(max(1, len(content)))
    path.write_bytes(content[:start] + content[start + random.randint(1, 200) :])


def _grow(path: Path, random: Random) -> None:
    with path.open("ab") as stream:
        stream.write(
            random.choice([b"\0" * _BLOCK, b"\n", b"{}\n", b"x", random.randbytes(300), path.read_bytes()])
        )


def _change_lines(path: Path, random: Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True) or [b""]
    first, second = random.randrange(len(lines)), random.randrange(len(lines))
    change = random.randrange(4)
    if change == 0:
        del lines[first]
    elif change == 1:
        lines.insert(first, lines[second])
    elif change == 2:
        lines[first], lines[second] = lines[second], lines[first]
    else:
        random.shuffle(lines)
    path.write_bytes(b"".join(lines))


def _replace_by_other(path: Path, random: Random) -> None:
    """Replace the file by another one of the same folder or the folder above."""
    others = [other for other in sorted(path.parent.rglob("*")) if other.is_file() and other != path]
    others += [other for other in sorted(path.parent.parent.glob("*/*")) if other.is_file() and other != path]
    content = random.choice(others).read_bytes() if others else b"another file"
    path.write_bytes(content)


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _link(path: Path) -> None:
    shutil.move(path, linked_path(path))
    path.symlink_to(linked_path(path))


def _make_huge(path: Path, _: Random) -> None:
    with path.open("r+b") as stream:
        stream.truncate(_HUGE)


# Links point to a copy next to the file, which must not change.
MUTATIONS: dict[str, Mutation] = {
    "one bit": _flip_bits,
    "eight bits": lambda path, random: _flip_bits(path, random, 8),
    "noise": lambda path, random: _overwrite(path, random, random.randbytes(random.randint(1, _BLOCK))),
    "zeros": lambda path, random: _overwrite(path, random, bytes(random.randint(1, _BLOCK))),
    "all noise": lambda path, random: path.write_bytes(random.randbytes(path.stat().st_size)),
    "cut": _truncate,
    "cut out": _remove_bytes,
    "empty": lambda path, _: path.write_bytes(b""),
    "grown": _grow,
    "lines": _change_lines,
    "swapped": _replace_by_other,
    "missing": lambda path, _: path.unlink(),
    "folder": lambda path, _: _replace(path, os.mkdir),
    "pipe": lambda path, _: _replace(path, os.mkfifo),
    "link": lambda path, _: _link(path),
    "dangling link": lambda path, _: _replace(path, lambda name: name.symlink_to("nowhere")),
    "link to itself": lambda path, _: _replace(path, lambda name: name.symlink_to(name.name)),
    "device": lambda path, random: _replace(
        path, lambda name: name.symlink_to(random.choice(["/dev/zero", "/dev/full", "/dev/urandom"]))
    ),
    "huge": _make_huge,
}


def linked_path(path: Path) -> Path:
    """Return the path of the file that a link points to."""
    return path.with_name(path.name + ".linked")


# Values that Python's JSON can't write are substituted afterwards.
_SUBSTITUTIONS = {
    '"@digits@"': "9" * 5000,
    '"@deep@"': "[" * 50_000 + "]" * 50_000,
    '"@nan@"': "NaN",
    '"@infinity@"': "-Infinity",
    '"@exponent@"': "1e999",
    '"@half@"': '"\\ud800"',
    '"@long@"': '"' + "x" * 1_000_000 + '"',
}
_VALUES: list[Any] = [
    *(json.loads(text) for text in _SUBSTITUTIONS),
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**12, 10**18, 0.5, -0.0, 1e308, 1e-320),
    *("", "x", "../../etc/passwd", "/dev/zero", "\0", "null", "%s{0}", [], [[]], [1, 2], {}, {"": ""}),
]


def mutate_value(value: Any, random: Random, times: int = 1) -> Any:
    """Return a JSON value with parts replaced by hostile values, removed, duplicated or renamed."""
    value = json.loads(json.dumps(value))
    for _ in range(times):
        items = list(_iter_items(value))
        if not items:
            return random.choice(_VALUES)
        holder, key = random.choice(items)
        change = random.randrange(6)
        if change < 4:
            holder[key] = random.choice(_VALUES)
        elif change == 4:
            del holder[key]
        elif isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        else:
            holder.append(holder[key])
    return value


def to_json_bytes(value: Any) -> bytes:
    """Serialize a mutated value as JSON."""
    text = json.dumps(value)
    for mark, spelling in _SUBSTITUTIONS.items():
        text = text.replace(mark, spelling)
    return text.encode()


def _iter_items(value: Any) -> Any:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _iter_items(value[key])


def mutate_json(path: Path, random: Random) -> None:
    """Change some values of a JSON file."""
    path.write_bytes(to_json_bytes(mutate_value(json.loads(path.read_bytes()), random, random.randint(1, 2))))


def rehash_folder(folder: Path) -> None:
    """Make a PEFT folder's hashes.json agree with its files."""
    path = folder / "hashes.json"
    if path.is_file():
        try:
            names = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            return  # the file itself was damaged
        path.write_text(
            json.dumps({name: file_sha256(folder / name) for name in names if (folder / name).is_file()})
        )


def rehash_bundle(bundle: Path) -> None:
    """Make a bundle's manifest agree with its files."""
    path = bundle / MANIFEST
    manifest = json.loads(path.read_bytes())
    for name, entry in manifest["files"].items():
        if (bundle / name).is_file():
            entry["sha256"], entry["bytes"] = file_sha256(bundle / name), (bundle / name).stat().st_size
    manifest["manifest_sha256"] = manifest_sha256(manifest)
    path.write_text(json.dumps(manifest))


def mutate_manifest(path: Path, random: Random) -> None:
    """Change some values of a manifest and update its own hash."""
    manifest = mutate_value(json.loads(path.read_bytes()), random, random.randint(1, 2))
    if isinstance(manifest, dict):
        manifest["manifest_sha256"] = manifest_sha256(manifest)
    path.write_bytes(to_json_bytes(manifest))


def mutate_journal(path: Path, random: Random) -> None:
    """Change a record of a journal and update its checksum."""
    lines = path.read_bytes().splitlines()
    index = random.randrange(len(lines))
    record = (
        to_json_bytes(mutate_value(json.loads(lines[index])["record"], random))
        .replace(b", ", b",")
        .replace(b": ", b":")
    )
    lines[index] = b'{"crc32":"%08x","record":%s}' % (zlib.crc32(record), record)
    path.write_bytes(b"\n".join(lines) + b"\n")


def mutate_safetensors(path: Path, random: Random) -> None:
    """Change the header of a safetensors file, or put numbers that aren't finite into it."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])
    if random.random() < 0.3 and data:
        start = random.randrange(len(data) // 4) * 4
        data[start : start + 4] = random.choice([b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff"])
        text = content[8 : 8 + size]
    else:
        text = to_json_bytes(mutate_value(header, random))
    length = random.choice([len(text)] * 6 + [0, 2**40, 2**63, len(text) + 1])
    path.write_bytes(length.to_bytes(8, "little") + text + data)


# Wrong values for counts, lengths, sizes, types and offsets.
_WRONG_VALUES = (
    0,
    1,
    2,
    5,
    9,
    48,
    1 << 16,
    1 << 20,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 62,
    1 << 63,
    (1 << 64) - 32,
)


def mutate_gguf(path: Path, random: Random) -> None:
    """Replace numbers or texts in a GGUF header; texts keep their length."""
    content = bytearray(path.read_bytes())
    numbers, texts = gguf_header_fields(bytes(content))
    for _ in range(random.randint(1, 2)):
        if random.random() < 0.8:
            at, size = random.choice(numbers)
            value_now = int.from_bytes(content[at : at + size], "little")
            lie = random.choice(
                [
                    *_WRONG_VALUES,
                    value_now + 1,
                    max(value_now - 1, 0),
                    value_now * 2,
                    (1 << 64) - 1 - value_now,
                ]
            )
            content[at : at + size] = (lie % (1 << 8 * size)).to_bytes(size, "little")
        else:
            at, size = random.choice(texts)
            other = random.choice(
                [
                    random.randbytes(size),
                    b"\xff" * size,
                    b"\0" * size,
                    _text_of(bytes(content), texts, random),
                ]
            )
            content[at : at + size] = (other + bytes(size))[:size]
    path.write_bytes(content)


def _text_of(content: bytes, texts: list[tuple[int, int]], random: Random) -> bytes:
    at, size = random.choice(texts)
    return bytes(content[at : at + size])


def gguf_header_fields(content: bytes) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return offsets and sizes in bytes of the numbers and of the texts of a valid GGUF header.

    For a list, only the first and the last element are included.
    """
    numbers, texts, at = list[tuple[int, int]](), list[tuple[int, int]](), 4
    widths = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def number(size: int) -> int:
        nonlocal at
        numbers.append((at, size))
        at += size
        return int.from_bytes(content[at - size : at], "little")

    def text() -> None:
        nonlocal at
        length = number(8)
        if length:
            texts.append((at, length))
        at += length

    def value(type_id: int) -> None:
        if type_id == 9:
            element, count = number(4), number(8)
            for index in range(count):
                lengths = len(numbers), len(texts)
                value(element)
                if 0 < index < count - 1:
                    # The tokens of a vocabulary are alike and would dominate the choice.
                    del numbers[lengths[0] :], texts[lengths[1] :]
        elif type_id == 8:
            text()
        else:
            number(widths[type_id])

    _, tensors, keys = number(4), number(8), number(8)
    for _ in range(keys):
        text()
        value(number(4))
    for _ in range(tensors):
        text()
        for _ in range(number(4)):
            number(8)
        number(4)
        number(8)
    return numbers, texts
