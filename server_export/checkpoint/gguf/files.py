"""A GGUF file opened as a model: checked headers of its parts, and a folder with everything but the weights.

The folder has `config.json`, `generation_config.json`, `tokenizer.json` and a chat template, as if
transformers had saved them, so that whatever reads a model's folder reads a file's. It lasts as long as the
process.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from prge.errors import Refusal, shown
from prge.formats.bundle import file_sha256
from server_export.checkpoint.gguf.config import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, load_gguf_config
from server_export.checkpoint.gguf.header import (
    EMBEDDING,
    GGUF_SUFFIX,
    GgufHeader,
    GgufTensor,
    read_header,
    type_name,
)
from server_export.checkpoint.gguf.tokenizer import eos_token_ids, load_gguf_tokenizer

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS = 1000
# Tensors that the configuration is made of.
IN_CONFIGURATION = frozenset({ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS})


@dataclass(frozen=True, eq=False)
class GgufModel:
    """A model in one GGUF file or several parts of one; `header` has the tensors of all of them."""

    paths: tuple[Path, ...]
    header: GgufHeader
    folder: Path

    def sha256(self) -> str:
        """Hash of a file's bytes; of several parts, of their hashes."""
        hashes = [file_sha256(path) for path in self.paths]
        return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()

    def source(self) -> dict[str, Any]:
        """The file's name and what its weights were rounded to: see `quantization_of`."""
        return {"format": "gguf", "file": self.paths[0].name, **quantization_of(self.header)}


def gguf_paths(name: str) -> tuple[Path, ...]:
    """The GGUF file that a name means, in its parts; none where it means something else.

    It may be the file, any part of it, or a folder that holds one such file and no config.json.

    Raises:
        BundleError: a part is missing, or a folder holds several files.
    """
    path = Path(name)
    if path.is_dir():
        if (path / "config.json").exists():
            return ()
        files = sorted(each for each in path.glob(f"*{GGUF_SUFFIX}") if not each.name.startswith("mmproj"))
        whole = {_parts(each)[0] for each in files}
        if len(whole) > 1:
            raise Refusal(
                "gguf-several-files",
                f"{name} holds {len(whole)} GGUF files: {', '.join(sorted(each.name for each in whole))}",
                remedy="give one of them with --model",
            )
        return _parts(files[0]) if files else ()
    if path.suffix != GGUF_SUFFIX:
        return ()
    if not path.exists():
        raise Refusal(
            "no-such-model",
            f"there is no file {name}",
            remedy="give one that is there; `hf download OWNER/NAME FILE.gguf --local-dir .` brings one",
        )
    return _parts(path)


def _parts(path: Path) -> tuple[Path, ...]:
    """All parts of a file that llama.cpp's gguf-split wrote; another file alone."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match[3])
    if not 1 <= count <= _MOST_PARTS:
        raise Refusal(
            "gguf-too-many-parts",
            f"{path} would be one of {count} parts",
            remedy="give a file of fewer parts",
        )
    paths = tuple(path.with_name(f"{match[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))
    if missing := [each.name for each in paths if not each.exists()]:
        raise Refusal(
            "gguf-parts-missing",
            f"{path} is one of {count} parts, and {len(missing)} of them are missing: {missing[0]}",
            remedy="put all parts into one folder",
        )
    return paths


def open_gguf(paths: Sequence[Path]) -> GgufModel:
    """Open the parts of a GGUF file; a file that didn't change is opened once.

    Raises:
        PrgeError: a header is damaged, or describes no model that transformers can read.
    """
    try:
        facts = tuple((path.resolve(), path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
    except OSError as error:
        raise Refusal(
            "file-damaged", f"{paths[0]} can't be read: {error}", remedy="give another file"
        ) from None
    return _open(tuple(paths), facts)


@cache
def _open(paths: tuple[Path, ...], facts: object) -> GgufModel:
    header = _joined([read_header(path) for path in paths])
    config = load_gguf_config(header)
    tokenizer = load_gguf_tokenizer(header)
    folder = Path(tempfile.mkdtemp(prefix="prge-gguf-"))
    atexit.register(_remove, folder, os.getpid())
    content = {name: value for name, value in config.to_dict().items() if name != "_model_name_or_path"}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer.save_pretrained(folder)
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
        for name in ("bos", "pad")
        if getattr(tokenizer, f"{name}_token_id") is not None
    }
    generation = {**ids, "eos_token_id": eos_token_ids(header)}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return GgufModel(paths, header, folder)


def _remove(folder: Path, process: int) -> None:
    """Remove a folder at the end of the process that made it; a forked one only reads it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _joined(headers: Sequence[GgufHeader]) -> GgufHeader:
    """The header of a whole: the first part has the keys, each has its own tensors."""
    first = headers[0]
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        told = header.get("split.no", number), header.get("split.count", len(headers))
        if told != (number, len(headers)):
            raise Refusal(
                "gguf-parts-differ",
                f"{header.path} says that it is part {shown(told[0])} of {shown(told[1])}, and its name part "
                f"{number} of {len(headers)}",
                remedy="download the files again",
            )
        if twice := sorted(tensors.keys() & header.tensors.keys()):
            raise Refusal(
                "gguf-parts-differ",
                f"{header.path} has {shown(twice[0])}, which another part has too",
                remedy="download the files again",
            )
        tensors |= header.tensors
    total = first.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise Refusal(
            "gguf-parts-differ",
            f"{first.path} says that its parts hold {shown(total)} tensors, they hold {len(tensors)}",
            remedy="download the files again",
        )
    return replace(first, tensors=tensors)


def quantization_of(header: GgufHeader) -> dict[str, Any]:
    """What a file's weights were rounded to: `description`, `file_type`, and tensors of each of the `types`.

    The description is such as "Q4_1 with Q8_0 embedding": types of matrices, that of most numbers first.
    """
    import gguf

    matrices: Counter[str] = Counter()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1 and tensor.name != EMBEDDING:
            matrices[type_name(tensor)] += tensor.numel
    embedding = type_name(header.tensors[EMBEDDING])
    names = [name for name, _ in matrices.most_common()]
    told = " and ".join(names) or embedding
    if names and names != [embedding]:
        told += f" with {embedding} embedding"
    file_type = header.get("general.file_type")
    try:
        known = gguf.LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        known = None
    types: Mapping[str, int] = Counter(type_name(tensor) for tensor in header.tensors.values())
    return {"description": told, "file_type": known, "types": dict(sorted(types.items()))}
