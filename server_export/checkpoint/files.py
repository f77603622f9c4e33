"""The files of a model, found and bounded before transformers reads them.

Only `config.json` and safetensors are read, or a GGUF file: nothing that runs code, nothing outside the
model's folder. No number of a configuration reaches a library before it was held against its bounds and the
weights' own sizes.
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

from prge.data.tokenization.tokenizer import MOST_TOKENIZER_BYTES
from prge.errors import Refusal, first_line, shown
from prge.formats.bundle import file_sha256
from prge.formats.documents import MOST_JSON_BYTES, DocumentError, read_json
from prge.formats.peft import CONFIG as ADAPTER_CONFIG
from server_export.checkpoint.config_bounds import config_problems
from server_export.checkpoint.gguf.files import gguf_paths, open_gguf
from server_export.checkpoint.gguf.header import GGUF_SUFFIX

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
# Of sentence-transformers.
MODULES = "modules.json"
_POOLING, _MODE = "1_Pooling", "pooling_mode_"
_POOLINGS = {"mean_tokens": "mean", "mean": "mean", "cls_token": "first", "cls": "first"}
INDEX = "model.safetensors.index.json"
# What to do instead of exporting codes: their rounding would be rounded again, and has no one form.
UNQUANTIZED = "give the checkpoint that was quantized; prge export --quantize 8da4w makes int4 of it"
# Files that transformers reads as a whole.
_DOCUMENTS = (".json", ".txt", ".jinja", ".model")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Of the one question that tells whether the hub answers.
_SECONDS = 5.0
_LARGEST_INDEX = 32 << 20
_FLOATS = ("F64", "F32", "F16", "BF16")
# Numbers of tokens or experts, which are in tables; a weight of that kind is made of codes.
_NUMBERS, _WEIGHT = "I64", "weight"
# Masks and positions that older checkpoints store beside their weights.
BUFFERS = re.compile(r"(attn\.(masked_)?bias|position_ids|rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class ModelFiles:
    """A folder with a model; `revision` is the commit of one that came from a hub.

    `gguf` is a GGUF file in its parts; `folder` then has everything but the weights.
    """

    name: str
    folder: Path
    revision: str | None
    gguf: tuple[Path, ...] = ()

    @property
    def config_name(self) -> str:
        """What says how the model is built."""
        return "header" if self.gguf else CONFIG

    @property
    def config_path(self) -> str:
        """The same with its place, for messages."""
        return f"the header of {self.name}" if self.gguf else str(self.folder / CONFIG)

    @property
    def weights(self) -> list[Path]:
        """The files of weights, by name.

        Raises:
            BundleError: there is none, or the index names one outside the folder.
        """
        if self.gguf:
            return list(self.gguf)
        if (self.folder / WEIGHTS).is_file():
            return [self.folder / WEIGHTS]
        if not (self.folder / INDEX).is_file():
            pickled = next((path.name for kind in _PICKLED for path in self.folder.glob(kind)), None)
            reason = f"{pickled} is a pickle, which may run code" if pickled else f"it has no {WEIGHTS}"
            raise Refusal(
                "no-weights",
                f"{self.name} has no weights that can be read: {reason}",
                remedy="save the model again with `save_pretrained`, which writes safetensors",
            )
        return [self.folder / name for name in shard_names(self.folder / INDEX)]

    @property
    def source(self) -> dict[str, Any]:
        """What a manifest says of the file that weights were dequantized from; nothing of other files."""
        return open_gguf(self.gguf).source() if self.gguf else {}

    def sha256(self) -> str:
        """Hash of the configuration and of all weights; of a GGUF file, that of its bytes."""
        if self.gguf:
            return open_gguf(self.gguf).sha256()
        hashes = [(path.name, file_sha256(path)) for path in [self.folder / CONFIG, *self.weights]]
        return hashlib.sha256(repr(sorted(hashes)).encode()).hexdigest()


class ConfigOnlyFiles(ModelFiles):
    """The files of a model whose weights aren't asked for."""

    @property
    def weights(self) -> list[Path]:
        """None."""
        return []


def _check_documents(folder: Path) -> None:
    """Raise BundleError for a configuration or tokenizer file that is too large to be read."""
    for path in sorted(folder.iterdir()):
        if path.suffix in _DOCUMENTS and path.is_file() and path.stat().st_size > MOST_TOKENIZER_BYTES:
            raise Refusal(
                "file-too-large",
                f"{path} has {path.stat().st_size:,} bytes, at most {MOST_TOKENIZER_BYTES:,} are read",
                remedy="download the model again, or save it again with `save_pretrained`",
            )


def find_files(name: str, revision: str | None = None) -> ModelFiles:
    """The files of a model: of a folder, a GGUF file, or a hub id, from which they are brought if need be.

    A revision belongs to a hub id: with one no folder is taken for the model.

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
                f"{name} is not a transformers model: {reason}",
                remedy="give the folder that `save_pretrained` wrote",
            )
        _check_documents(folder)
        return ModelFiles(name, folder, None)
    if folder.is_absolute() or name.startswith(".") or name.count("/") > 1:
        reason = "a folder has no revisions" if folder.is_dir() else f"there is no folder {name}"
        raise Refusal("no-such-model", reason, remedy="give a folder with a transformers model, or a hub id")
    config = _from_hub(name, CONFIG, revision)
    if config is None:
        raise Refusal(
            "no-such-model",
            f"{name} can't be read as a transformers model: its {CONFIG} is neither here nor to be reached",
            remedy="give a folder with a transformers model, or a hub id that can be reached or is cached",
        )
    return ModelFiles(name, config.parent, config.parent.name)


def is_local(name: str) -> bool:
    """Whether a name is that of a folder or of a GGUF file on this machine."""
    return Path(name).is_dir() or (Path(name).suffix == GGUF_SUFFIX and Path(name).exists())


def local_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder with the configuration and the tokenizer of a model on this machine; None of a hub id.

    Raises:
        PrgeError: a GGUF file can't be read.
    """
    if revision is not None:
        return None
    if gguf := gguf_paths(name):
        return open_gguf(gguf).folder
    return transformer_folder(Path(name)) if Path(name).is_dir() else None


def transformer_folder(folder: Path) -> Path:
    """Where sentence-transformers has the model: beside its list of modules, or in a folder of its own."""
    named = [module["path"] for module in sentence_modules(folder) if module["type"].endswith(".Transformer")]
    inner = folder / named[0] if named and Path(named[0]).name == named[0] else folder
    return inner if (inner / CONFIG).is_file() else folder


def sentence_modules(folder: Path) -> list[dict[str, str]]:
    """The modules of a folder of sentence-transformers: `type` and `path` of each; none of another one.

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
            "file-damaged", f"{path} can't be read: it lists no modules", remedy="copy the model again"
        )
    return content


def stored_pooling(files: ModelFiles) -> str | None:
    """How sentence-transformers pools the states of a model, as `--pooling` calls it; None where it doesn't.

    Raises:
        BundleError: a file is damaged, or it pools in another way.
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
    found = {_POOLINGS.get(mode, mode) for mode in modes if mode in _POOLINGS or f"{_MODE}{mode}" in content}
    if len(found) != 1 or not found <= {*_POOLINGS.values()}:
        raise Refusal(
            "pooling-not-supported",
            f"{path} pools by {shown(', '.join(sorted(found)))}, a bundle can by the mean or the first token",
            remedy="choose one with --pooling mean or --pooling first",
        )
    return found.pop()


def fetch_weights(files: ModelFiles) -> None:
    """Bring the weights of a hub id beside its configuration; a folder has them or doesn't."""
    if files.revision is None or _from_hub(files.name, WEIGHTS, files.revision) is not None:
        return
    index = _from_hub(files.name, INDEX, files.revision)
    for shard in shard_names(index) if index is not None else []:
        _from_hub(files.name, shard, files.revision)


def shard_names(index: Path) -> list[str]:
    """The files that an index of weights names, all of them beside it."""
    content = _json_of(index, _LARGEST_INDEX)
    places = content.get("weight_map") if isinstance(content, dict) else None
    names = set(places.values()) if isinstance(places, dict) and _are_texts(places) else set()
    if not names:
        raise Refusal("file-damaged", f"{index} names no file of weights", remedy="copy the model again")
    for name in sorted(names):
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise Refusal(
                "index-leaves-folder",
                f"{index} names {shown(name)}, which is no safetensors file beside it",
                remedy="copy the model again",
            )
    return sorted(names)


def read_config(files: ModelFiles) -> dict[str, Any]:
    """The content of `config.json`, every number of it within bounds.

    Raises:
        BundleError: it is damaged, or a number is out of bounds.
    """
    path = files.folder / CONFIG
    place = files.config_path
    # Bounds of time steps are infinite where a model has none.
    config = _json_of(path, infinite=True)
    if not isinstance(config, dict):
        raise Refusal(
            "file-damaged", f"{place} can't be read: it is no JSON object", remedy="copy the model again"
        )
    problems = config_problems(config)
    if "transformers_weights" in config:
        problems.append("transformers_weights names other weights than those beside it")
    if problems:
        raise Refusal(
            "config-out-of-bounds",
            f"{place} describes no model: {'; '.join(problems)}",
            remedy="give another one",
        )
    return config


def eos_token_ids(files: ModelFiles) -> list[int]:
    """Ids that end a text, as `config.json` and, where there is one, `generation_config.json` name them, in
    this order.

    Raises:
        BundleError: a file is damaged, or names what is no token.
    """
    if files.revision is not None:
        _from_hub(files.name, GENERATION_CONFIG, files.revision)
    found: dict[int, None] = {}
    for path in (files.folder / CONFIG, files.folder / GENERATION_CONFIG):
        if not path.is_file():
            continue
        content = _json_of(path, infinite=True)
        inner = content.get("text_config") if isinstance(content, dict) else None
        parts = [part for part in (content, inner) if isinstance(part, dict)]
        named = next((part["eos_token_id"] for part in parts if part.get("eos_token_id") is not None), None)
        tokens = named if isinstance(named, list) else [] if named is None else [named]
        if any(type(token) is not int for token in tokens):
            raise Refusal(
                "file-damaged",
                f"{path} has the eos_token_id {shown(named)}, must be one token or several",
                remedy="correct it",
            )
        found.update(dict.fromkeys(tokens))
    return [*found]


def stored_numel(files: ModelFiles, names: Collection[str] | None = None) -> int:
    """How many numbers the weights hold, from their headers.

    Args:
        files: of the model.
        names: of the tensors that are counted; by default all.

    Raises:
        BundleError: a file is missing, damaged, or quantized.
    """
    if files.gguf:
        tensors = open_gguf(files.gguf).header.tensors
        return sum(each.numel for name, each in tensors.items() if names is None or name in names)
    total = 0
    for path in files.weights:
        if not path.is_file():
            raise Refusal(
                "weights-missing", f"{files.name} lacks its file {path.name}", remedy="copy the model again"
            )
        try:
            with safetensors.safe_open(str(path), framework="numpy") as weights:
                for name in weights.keys() if names is None else {*weights.keys()}.intersection(names):
                    tensor = weights.get_slice(name)
                    is_table = tensor.get_dtype() == _NUMBERS and not name.endswith(_WEIGHT)
                    if not (is_table or tensor.get_dtype() in _FLOATS or BUFFERS.search(name)):
                        raise Refusal(
                            "quantized-already",
                            f"{name} in {path} is {tensor.get_dtype()}: the model is quantized already",
                            remedy=UNQUANTIZED,
                        )
                    total += math.prod(tensor.get_shape())
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise Refusal(
                "weights-damaged", f"{path} is damaged: {error}", remedy="copy the model again"
            ) from None
    return total


def _json_of(path: Path, most_bytes: int = MOST_JSON_BYTES, infinite: bool = False) -> Any:
    try:
        return read_json(path, most_bytes, infinite)
    except (OSError, DocumentError) as error:
        raise Refusal(
            "file-damaged", f"{path} can't be read: {error}", remedy="copy the model again"
        ) from None


def _are_texts(mapping: Mapping[str, object]) -> bool:
    return all(isinstance(value, str) for value in mapping.values())


def _from_hub(name: str, file: str, revision: str | None) -> Path | None:
    """A file of a hub id in the cache, brought there if need be; None where there is none."""
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
            f"{name} can't be read as a transformers model: {first_line(error)}",
            remedy="give a folder with a transformers model, or a hub id that can be reached or is cached",
        ) from None


@lru_cache(maxsize=1)
def is_hub_reachable() -> bool:
    """Whether the hub can be asked: one question, once, where its library tries again and again."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception:  # whichever client the library's version has raises errors of its own
        return False
    return True
