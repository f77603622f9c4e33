"""A GGUF file opened as a model: its checked header, and a folder with everything but the weights.

The folder has `config.json`, `generation_config.json`, `tokenizer.json` and a chat template, as if
transformers had saved them, so that all code that reads a model's folder also reads a GGUF file. It is
removed when the process ends.
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

from prge.errors import Refusal, format_value
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
_MAX_PARTS = 1000
# Tensors that become part of the configuration instead of parameters.
IN_CONFIGURATION = frozenset({ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS})


@dataclass(frozen=True, eq=False)
class GgufModel:
    """A model in one GGUF file or in several parts of one.

    Attributes:
        paths: the parts.
        header: the header of the first part, with the tensors of all parts.
        folder: a temporary folder with the configuration and the tokenizer.
    """

    paths: tuple[Path, ...]
    header: GgufHeader
    folder: Path

    def sha256(self) -> str:
        """Return the hash of the file's bytes; for several parts, the hash of their hashes."""
        hashes = [file_sha256(path) for path in self.paths]
        return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()

    def source(self) -> dict[str, Any]:
        """Return the manifest's description of the file: its name and its quantization."""
        return {"format": "gguf", "file": self.paths[0].name, **quantization_of(self.header)}


def gguf_paths(name: str) -> tuple[Path, ...]:
    """Return the parts of the GGUF file that a name refers to; empty for other models.

    The name may be the file, any of its parts, or a folder with one GGUF file and no config.json.

    Raises:
        BundleError: a part is missing, or a folder contains several GGUF files.
    """
    path = Path(name)
    if path.is_dir():
        if (path / "config.json").exists():
            return ()
        files = sorted(each for each in path.glob(f"*{GGUF_SUFFIX}") if not each.name.startswith("mmproj"))
        first_parts = {_parts(each)[0] for each in files}
        if len(first_parts) > 1:
            raise Refusal(
                "gguf-several-files",
                f"{name} contains {len(first_parts)} GGUF files: "
                f"{', '.join(sorted(each.name for each in first_parts))}.",
                remedy="Select one of them with --model.",
            )
        return _parts(files[0]) if files else ()
    if path.suffix != GGUF_SUFFIX:
        return ()
    if not path.exists():
        raise Refusal(
            "no-such-model",
            f"There is no file {name}.",
            remedy="Use an existing file; `hf download OWNER/NAME FILE.gguf --local-dir .` downloads one.",
        )
    return _parts(path)


def _parts(path: Path) -> tuple[Path, ...]:
    """Return all parts of a file that llama.cpp's gguf-split wrote; for other files, the file itself."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match[3])
    if not 1 <= count <= _MAX_PARTS:
        raise Refusal(
            "gguf-too-many-parts",
            f"{path} is one of {count} parts; the maximum is {_MAX_PARTS}.",
            remedy="Use a file of fewer parts.",
        )
    paths = tuple(path.with_name(f"{match[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))
    if missing := [each.name for each in paths if not each.exists()]:
        raise Refusal(
            "gguf-parts-missing",
            f"{path} is one of {count} parts, but {len(missing)} of them are missing: {missing[0]}.",
            remedy="Put all parts into one folder.",
        )
    return paths


def open_gguf(paths: Sequence[Path]) -> GgufModel:
    """Open the parts of a GGUF file; unchanged files are opened once per process.

    Raises:
        PrgeError: a header is damaged, or transformers does not support the model.
    """
    try:
        file_states = tuple((path.resolve(), path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
    except OSError as error:
        raise Refusal(
            "file-damaged", f"Cannot read {paths[0]}: {error}.", remedy="Use another file."
        ) from None
    return _open(tuple(paths), file_states)


@cache
def _open(paths: tuple[Path, ...], file_states: object) -> GgufModel:
    header = _join_headers([read_header(path) for path in paths])
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
    """Remove a folder at the end of the process that made it, not at the end of its forked children."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _join_headers(headers: Sequence[GgufHeader]) -> GgufHeader:
    """Join the headers of all parts: the values of the first part, and the tensors of all."""
    first = headers[0]
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        part = header.get("split.no", number), header.get("split.count", len(headers))
        if part != (number, len(headers)):
            raise Refusal(
                "gguf-parts-differ",
                f"{header.path} is part {format_value(part[0])} of {format_value(part[1])} by its header, "
                f"but part {number} of {len(headers)} by its name.",
                remedy="Download the files again.",
            )
        if duplicates := sorted(tensors.keys() & header.tensors.keys()):
            raise Refusal(
                "gguf-parts-differ",
                f"{header.path} has a tensor {format_value(duplicates[0])} that another part has too.",
                remedy="Download the files again.",
            )
        tensors |= header.tensors
    total = first.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise Refusal(
            "gguf-parts-differ",
            f"{first.path} declares {format_value(total)} tensors, but its parts have {len(tensors)}.",
            remedy="Download the files again.",
        )
    return replace(first, tensors=tensors)


def quantization_of(header: GgufHeader) -> dict[str, Any]:
    """Return a file's quantization: `description`, `file_type`, and the number of tensors by `types`.

    The description is such as "Q4_1 with Q8_0 embedding", with the types of matrices by number of elements.
    """
    import gguf

    matrices: Counter[str] = Counter()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1 and tensor.name != EMBEDDING:
            matrices[type_name(tensor)] += tensor.numel
    embedding = type_name(header.tensors[EMBEDDING])
    names = [name for name, _ in matrices.most_common()]
    description = " and ".join(names) or embedding
    if names and names != [embedding]:
        description += f" with {embedding} embedding"
    file_type = header.get("general.file_type")
    try:
        file_type_name = gguf.LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        file_type_name = None
    types: Mapping[str, int] = Counter(type_name(tensor) for tensor in header.tensors.values())
    return {"description": description, "file_type": file_type_name, "types": dict(sorted(types.items()))}
