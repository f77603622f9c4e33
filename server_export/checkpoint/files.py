"""Locate the files of a model and check their sizes before transformers reads them.

Only `config.json` and safetensors files are read, or a GGUF file: nothing that runs code, and nothing outside
the model's folder. Every number of a configuration is checked against its bounds and the sizes of the weights
before a library uses it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors

from prge.data.tokenization.tokenizer import MAX_TOKENIZER_BYTES
from prge.errors import Refusal, first_line, format_value
from prge.formats.bundle import file_sha256
from prge.formats.documents import MAX_JSON_BYTES, DocumentError, read_json
from prge.formats.peft import CONFIG as ADAPTER_CONFIG
from server_export.checkpoint.config_bounds import config_problems
from server_export.checkpoint.gguf.files import gguf_paths, open_gguf
from server_export.checkpoint.gguf.header import GGUF_SUFFIX

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
# sentence-transformers' list of modules.
MODULES = "modules.json"
_POOLING, _MODE = "1_Pooling", "pooling_mode_"
_POOLINGS = {"mean_tokens": "mean", "mean": "mean", "cls_token": "first", "cls": "first"}
INDEX = "model.safetensors.index.json"
# Quantized checkpoints are refused: they come in many formats, and their rounding would be rounded again.
UNQUANTIZED = "Use the checkpoint before quantization; `prge export --quantize 8da4w` quantizes it to int4."
# Suffixes of files that transformers reads into memory as a whole.
_DOCUMENTS = (".json", ".txt", ".jinja", ".model")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Timeout of the request that tests whether the Hub is reachable.
_HUB_TIMEOUT = 5.0
_LARGEST_INDEX = 32 << 20
_FLOATS = ("F64", "F32", "F16", "BF16")
# Integer tables, such as ids of tokens or experts; an integer tensor named `weight` is quantized.
_INTEGERS, _WEIGHT = "I64", "weight"
# Masks and positions that older checkpoints store with their weights.
BUFFERS = re.compile(r"(attn\.(masked_)?bias|position_ids|rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model.

    Attributes:
        name: the name that the user gave: a folder, GGUF file or Hub id.
        folder: the folder with the configuration and the tokenizer; without `gguf`, also with the weights.
        revision: the commit of a Hub model.
        gguf: the parts of a GGUF file; empty for other models.
    """

    name: str
    folder: Path
    revision: str | None
    gguf: tuple[Path, ...] = ()

    @property
    def config_name(self) -> str:
        """The name of what describes the architecture: `config.json` or the GGUF header."""
        return "header" if self.gguf else CONFIG

    @property
    def config_path(self) -> str:
        """The path of what describes the architecture, for messages."""
        return f"the header of {self.name}" if self.gguf else str(self.folder / CONFIG)

    @property
    def weights(self) -> list[Path]:
        """The files of weights, by name.

        Raises:
            BundleError: there are none, or the index names a file outside the folder.
        """
        if self.gguf:
            return list(self.gguf)
        if (self.folder / WEIGHTS).is_file():
            return [self.folder / WEIGHTS]
        if not (self.folder / INDEX).is_file():
            pickled = next((path.name for pattern in _PICKLED for path in self.folder.glob(pattern)), None)
            reason = f"{pickled} is a pickle, which may run code" if pickled else f"it has no {WEIGHTS}"
            raise Refusal(
                "no-weights",
                f"{self.name} has no weights that can be read: {reason}.",
                remedy="Save the model again with `save_pretrained`, which writes safetensors.",
            )
        return [self.folder / name for name in shard_names(self.folder / INDEX)]

    @property
    def source(self) -> dict[str, Any]:
        """The manifest's description of the GGUF file that the weights come from; empty for other models."""
        return open_gguf(self.gguf).source() if self.gguf else {}

    def sha256(self) -> str:
        """Return the hash of the configuration and all weights; for a GGUF file, the hash of its bytes."""
        if self.gguf:
            return open_gguf(self.gguf).sha256()
        hashes = [(path.name, file_sha256(path)) for path in [self.folder / CONFIG, *self.weights]]
        return hashlib.sha256(repr(sorted(hashes)).encode()).hexdigest()


class ConfigOnlyFiles(ModelFiles):
    """The files of a model whose weights are not needed."""

    @property
    def weights(self) -> list[Path]:
        """No files."""
        return []


def _check_documents(folder: Path) -> None:
    """Refuse a folder with a configuration or tokenizer file that is too large to be read."""
    for path in sorted(folder.iterdir()):
        if path.suffix in _DOCUMENTS and path.is_file() and path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise Refusal(
                "file-too-large",
                f"{path} has {path.stat().st_size:,} bytes; the maximum is {MAX_TOKENIZER_BYTES:,}.",
                remedy="Download the model again, or save it again with `save_pretrained`.",
            )


def find_files(name: str, revision: str | None = None) -> ModelFiles:
    """Return the files of a folder, GGUF file or Hub id; files of a Hub id are downloaded if necessary.

    With a revision, the name is a Hub id, even if there is a folder of that name.

    Raises:
        PrgeError: there is no such model, or a GGUF file can't be read.
    """
    folder = Path(name)
    if revision is None and (gguf := gguf_paths(name)):
        return ModelFiles(name, open_gguf(gguf).folder, None, gguf)
    if folder.is_dir() and revision is None:
        folder = transformer_folder(folder)
        reason = "" if (folder / CONFIG).is_file() else f"it has no {CONFIG}"
        if (folder / ADAPTER_CONFIG).is_file():
            reason = f"its {ADAPTER_CONFIG} makes it an adapter"
        if reason:
            raise Refusal(
                "not-a-transformers-model",
                f"{name} is not a transformers model: {reason}.",
                remedy="Use the folder that `save_pretrained` wrote.",
            )
        _check_documents(folder)
        return ModelFiles(name, folder, None)
    if folder.is_absolute() or name.startswith(".") or name.count("/") > 1:
        reason = (
            f"{name} is a folder, which has no revisions" if folder.is_dir() else f"There is no folder {name}"
        )
        raise Refusal(
            "no-such-model", f"{reason}.", remedy="Use a folder with a transformers model, or a Hub id."
        )
    config = _from_hub(name, CONFIG, revision)
    if config is None:
        raise Refusal(
            "no-such-model",
            f"Cannot load {name} as a transformers model: its {CONFIG} is neither local nor reachable.",
            remedy="Use a folder with a transformers model, or a Hub id that is reachable or cached.",
        )
    return ModelFiles(name, config.parent, config.parent.name)


def is_local(name: str) -> bool:
    """Return whether a name is a folder or a GGUF file on this machine."""
    return Path(name).is_dir() or (Path(name).suffix == GGUF_SUFFIX and Path(name).exists())


def local_folder(name: str, revision: str | None = None) -> Path | None:
    """Return the folder with the configuration and tokenizer of a local model; None for a Hub id.

    Raises:
        PrgeError: a GGUF file can't be read.
    """
    if revision is not None:
        return None
    if gguf := gguf_paths(name):
        return open_gguf(gguf).folder
    return transformer_folder(Path(name)) if Path(name).is_dir() else None


def transformer_folder(folder: Path) -> Path:
    """Return the folder of the transformers model in a sentence-transformers folder; else the same folder."""
    paths = [module["path"] for module in sentence_modules(folder) if module["type"].endswith(".Transformer")]
    inner = folder / paths[0] if paths and Path(paths[0]).name == paths[0] else folder
    return inner if (inner / CONFIG).is_file() else folder


def sentence_modules(folder: Path) -> list[dict[str, str]]:
    """Return `type` and `path` of each module in a sentence-transformers folder; empty for other folders.

    Raises:
        BundleError: the file that lists them is damaged.
    """
    path = folder / MODULES
    content = _json_of(path) if path.is_file() else []
    if not isinstance(content, list) or not all(
        isinstance(each, dict) and isinstance(each.get("type"), str) and isinstance(each.get("path"), str)
        for each in content
    ):
        raise Refusal(
            "file-damaged",
            f"Cannot read {path}: it is not a list of modules.",
            remedy="Copy or download the model again.",
        )
    return content


def stored_pooling(files: ModelFiles) -> str | None:
    """Return sentence-transformers' pooling of a model as a value of `--pooling`, or None if it has none.

    Raises:
        BundleError: a file is damaged, or the pooling is not supported.
    """
    if files.revision is not None:
        for name in (MODULES, f"{_POOLING}/{CONFIG}"):
            _from_hub(files.name, name, files.revision)
    folder = files.folder if (files.folder / MODULES).is_file() else Path(files.name)
    paths = [each["path"] for each in sentence_modules(folder) if each["type"].endswith(".Pooling")]
    if not paths or Path(paths[0]).name != paths[0] or not (folder / paths[0] / CONFIG).is_file():
        return None
    path = folder / paths[0] / CONFIG
    content = _json_of(path)
    content = content if isinstance(content, dict) else {}
    modes = {name.removeprefix(_MODE) for name, value in content.items() if value is True}
    modes |= {content["pooling_mode"]} if isinstance(content.get("pooling_mode"), str) else set()
    pooling = {
        _POOLINGS.get(mode, mode) for mode in modes if mode in _POOLINGS or f"{_MODE}{mode}" in content
    }
    if len(pooling) != 1 or not pooling <= {*_POOLINGS.values()}:
        raise Refusal(
            "pooling-not-supported",
            f"{path} pools by {format_value(', '.join(sorted(pooling)))}; a bundle supports only the mean "
            "and the first token.",
            remedy="Choose one with --pooling mean or --pooling first.",
        )
    return pooling.pop()


def fetch_weights(files: ModelFiles) -> None:
    """Download the weights of a Hub model into the folder of its configuration, if it is one."""
    if files.revision is None or _from_hub(files.name, WEIGHTS, files.revision) is not None:
        return
    index = _from_hub(files.name, INDEX, files.revision)
    for shard in shard_names(index) if index is not None else []:
        _from_hub(files.name, shard, files.revision)


def shard_names(index: Path) -> list[str]:
    """Return the names of the files of weights that an index lists, all in the index's folder."""
    content = _json_of(index, _LARGEST_INDEX)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    names = set(weight_map.values()) if isinstance(weight_map, dict) and _are_strings(weight_map) else set()
    if not names:
        raise Refusal(
            "file-damaged", f"{index} lists no files of weights.", remedy="Copy or download the model again."
        )
    for name in sorted(names):
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise Refusal(
                "index-leaves-folder",
                f"{index} lists {format_value(name)}, which is not a safetensors file in the same folder.",
                remedy="Copy or download the model again.",
            )
    return sorted(names)


def read_config(files: ModelFiles) -> dict[str, Any]:
    """Return the content of `config.json` with all numbers within bounds.

    Raises:
        BundleError: the file is damaged, or a number is out of bounds.
    """
    path = files.folder / CONFIG
    shown_path = files.config_path
    # Some configurations bound time steps by infinity.
    config = _json_of(path, infinite=True)
    if not isinstance(config, dict):
        raise Refusal(
            "file-damaged",
            f"Cannot read {shown_path}: it is not a JSON object.",
            remedy="Copy or download the model again.",
        )
    problems = config_problems(config)
    if "transformers_weights" in config:
        problems.append("transformers_weights names weights outside of the model's own files")
    if problems:
        raise Refusal(
            "config-out-of-bounds",
            f"{shown_path} does not describe a model: {'; '.join(problems)}.",
            remedy="Use another model.",
        )
    return config


def eos_token_ids(files: ModelFiles) -> list[int]:
    """Return the end-of-sequence ids of `config.json`, then those of `generation_config.json` if it exists.

    Raises:
        BundleError: a file is damaged, or an id is not an integer.
    """
    if files.revision is not None:
        _from_hub(files.name, GENERATION_CONFIG, files.revision)
    ids: dict[int, None] = {}
    for path in (files.folder / CONFIG, files.folder / GENERATION_CONFIG):
        if not path.is_file():
            continue
        content = _json_of(path, infinite=True)
        inner = content.get("text_config") if isinstance(content, dict) else None
        parts = [part for part in (content, inner) if isinstance(part, dict)]
        value = next((part["eos_token_id"] for part in parts if part.get("eos_token_id") is not None), None)
        tokens = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token) is not int for token in tokens):
            raise Refusal(
                "file-damaged",
                f"The eos_token_id in {path} is {format_value(value)} but must be one token id or a list "
                "of them.",
                remedy="Correct the file.",
            )
        ids.update(dict.fromkeys(tokens))
    return [*ids]


def stored_numel(files: ModelFiles, names: Collection[str] | None = None) -> int:
    """Return the number of elements of all weights, from the headers of their files.

    Args:
        files: the files of the model.
        names: the tensors to count; by default all.

    Raises:
        BundleError: a file is missing or damaged, or the model is quantized.
    """
    if files.gguf:
        tensors = open_gguf(files.gguf).header.tensors
        return sum(each.numel for name, each in tensors.items() if names is None or name in names)
    total = 0
    for path in files.weights:
        if not path.is_file():
            raise Refusal(
                "weights-missing",
                f"{files.name} lacks its file {path.name}.",
                remedy="Copy or download the model again.",
            )
        try:
            with safetensors.safe_open(str(path), framework="numpy") as weights:
                for name in weights.keys() if names is None else {*weights.keys()}.intersection(names):
                    tensor = weights.get_slice(name)
                    is_integer_table = tensor.get_dtype() == _INTEGERS and not name.endswith(_WEIGHT)
                    if not (is_integer_table or tensor.get_dtype() in _FLOATS or BUFFERS.search(name)):
                        raise Refusal(
                            "quantized-already",
                            f"The model is already quantized: {name} in {path} is {tensor.get_dtype()}.",
                            remedy=UNQUANTIZED,
                        )
                    total += math.prod(tensor.get_shape())
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise Refusal(
                "weights-damaged",
                f"{path} is damaged: {error}.",
                remedy="Copy or download the model again.",
            ) from None
    return total


def _json_of(path: Path, max_bytes: int = MAX_JSON_BYTES, infinite: bool = False) -> Any:
    try:
        return read_json(path, max_bytes, infinite)
    except (OSError, DocumentError) as error:
        raise Refusal(
            "file-damaged", f"Cannot read {path}: {error}.", remedy="Copy or download the model again."
        ) from None


def _are_strings(mapping: Mapping[str, object]) -> bool:
    return all(isinstance(value, str) for value in mapping.values())


def _from_hub(name: str, file: str, revision: str | None) -> Path | None:
    """Return the cached file of a Hub id, downloaded if necessary; None if the model has no such file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        local = not is_hub_reachable()
        return Path(hf_hub_download(name, file, revision=revision, local_files_only=local))
    except EntryNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Refusal(
            "hub-unreachable",
            f"Cannot load {name} as a transformers model: {first_line(error)}",
            remedy="Use a folder with a transformers model, or a Hub id that is reachable or cached.",
        ) from None


@lru_cache(maxsize=1)
def is_hub_reachable() -> bool:
    """Return whether the Hub is reachable, by one request per process: its library retries many times."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT)
    except Exception:  # whichever client the library's version has raises errors of its own
        return False
    return True
