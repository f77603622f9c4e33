"""The base model of a bundle or an adapter, recorded so that it can be identified exactly."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prge.errors import Refusal
from prge.formats.peft import HASH_MARK, named_base
from server_export.checkpoint.files import CONFIG, is_local
from server_export.checkpoint.gguf.header import GGUF_SUFFIX

if TYPE_CHECKING:
    from server_export.checkpoint.loading import LoadedModel


@dataclass(frozen=True)
class BaseModel:
    """A Hub id with its commit, or a folder or file with the hash of its content.

    A record without both comes from other software. If it names a Hub id, the id is loaded if this machine
    has it in its cache. A folder of that name is never loaded: the record's author may not have meant that
    folder.

    Attributes:
        name: the Hub id or path.
        revision: the commit of a Hub id.
        sha256: the hash of a folder's or file's content.
    """

    name: str
    revision: str | None = None
    sha256: str | None = None

    @property
    def on_hub(self) -> bool:
        """Whether the name is a Hub id: it has a commit, or is in this machine's cache."""
        from huggingface_hub import try_to_load_from_cache

        if self.revision is not None or self.sha256 is not None or Path(self.name).exists():
            return self.revision is not None
        with suppress(ValueError):  # the name isn't a valid id
            return isinstance(try_to_load_from_cache(self.name, CONFIG), str)
        return False

    @property
    def source(self) -> dict[str, Any]:
        """The description of a GGUF file, derived from its name; empty for other models."""
        is_file = self.revision is None and self.name.endswith(GGUF_SUFFIX)
        return {"format": "gguf", "file": Path(self.name).name} if is_file else {}

    @property
    def label(self) -> str:
        """The name without a path, safe to publish: the Hub id, or only the name of the folder."""
        return self.name if self.revision is not None else Path(self.name).resolve().name

    def to_manifest(self) -> dict[str, str | None]:
        """Return the fields of a manifest's `model` entry, without a folder's path."""
        return {"name_or_path": self.label, "revision": self.revision, "sha256": self.sha256}

    def to_peft(self, with_path: bool = False) -> dict[str, str]:
        """Return the fields of PEFT's `adapter_config.json`.

        A folder's name is its path with `with_path`, which transformers and PEFT can load. Otherwise it is
        a name with the hash, which is not a valid Hub id, so that nothing else is loaded by mistake.
        """
        if self.revision is not None:
            return {"base_model_name_or_path": self.name, "revision": self.revision}
        if with_path and self.sha256 and is_local(self.name):
            path = str(Path(self.name).resolve())
            return {"base_model_name_or_path": path, "revision": f"{HASH_MARK[1:]}{self.sha256}"}
        if self.sha256:
            return {"base_model_name_or_path": f"{self.label}{HASH_MARK}{self.sha256}"}
        is_shortened = not with_path and is_local(self.name)
        return {"base_model_name_or_path": self.label if is_shortened else self.name}

    def load(self, *, pooled: bool | None, own_head: bool = True) -> LoadedModel:
        """Load the model; for the arguments see `load_model`.

        Raises:
            BundleError: the model doesn't exist, or its content has changed.
        """
        from server_export.checkpoint.loading import load_model

        if self.revision is None and not is_local(self.name):
            content = f" with the content {self.sha256}" if self.sha256 else ""
            raise Refusal("base-missing", f"There is no folder or file {self.name}{content}.")
        if self.sha256 is None and is_local(self.name):
            raise Refusal(
                "base-without-hash",
                f"The base model {self.name} is a local path without a SHA-256, so it can't be verified.",
            )
        loaded = load_model(self.name, pooled=pooled, revision=self.revision, own_head=own_head)
        if self.sha256 is not None and loaded.sha256 != self.sha256:
            raise Refusal("base-changed", f"The content of {self.name} has changed: its SHA-256 differs.")
        return loaded


def base_of(loaded: LoadedModel) -> BaseModel:
    """Return the record of a loaded model."""
    return BaseModel(loaded.name_or_path, loaded.revision, loaded.sha256)


def base_from_manifest(block: Mapping[str, Any]) -> BaseModel | None:
    """Read the record of a manifest's `model` entry; None if it has no name."""
    name = block.get("name_or_path")
    return BaseModel(name, block.get("revision"), block.get("sha256")) if name else None


def base_from_peft(config: Mapping[str, Any]) -> BaseModel | None:
    """Read the record of an `adapter_config.json`; None if it names no base model."""
    named = named_base(config)
    return None if named is None else BaseModel(named.name, named.commit, named.sha256)


def model_problems(loaded: LoadedModel, block: Mapping[str, Any]) -> list[str]:
    """Return how the architecture or size of a model differs from a manifest's `model` entry."""
    from server_export.checkpoint.loading import parameter_count

    actual = {
        "architecture": type(loaded.model).__name__,
        "model_type": loaded.config.model_type,
        "parameters": parameter_count(loaded.model),
    }
    return [
        f"its {name} is {value}, the bundle's {block[name]}"
        for name, value in actual.items()
        if block.get(name) is not None and block[name] != value
    ]


def content_problems(loaded: LoadedModel, sha256: str | None) -> list[str]:
    """Return a message if the hash of a model's content is known and differs from the recorded one."""
    same = sha256 is None or loaded.sha256 in (None, sha256)
    return [] if same else ["its content differs: it has another SHA-256"]
