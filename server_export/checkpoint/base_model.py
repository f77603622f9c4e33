"""The base model of a bundle or an adapter: recorded so that only the same one is ever taken for it."""

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
    """A hub id with its commit, `revision`, or a folder or file with the hash of its content, `sha256`.

    One that has neither was recorded by something else: a hub id that this machine has had is loaded, but no
    folder, which whoever wrote the record may not have meant to give away.
    """

    name: str
    revision: str | None = None
    sha256: str | None = None

    @property
    def on_hub(self) -> bool:
        """Whether it is a hub id: one with a commit, or one that this machine has had from there."""
        from huggingface_hub import try_to_load_from_cache

        if self.revision is not None or self.sha256 is not None or Path(self.name).exists():
            return self.revision is not None
        with suppress(ValueError):  # it can't be an id
            return isinstance(try_to_load_from_cache(self.name, CONFIG), str)
        return False

    @property
    def source(self) -> dict[str, Any]:
        """What the name alone says of a GGUF file, nothing of another model; see `LoadedModel.source`."""
        is_file = self.revision is None and self.name.endswith(GGUF_SUFFIX)
        return {"format": "gguf", "file": Path(self.name).name} if is_file else {}

    @property
    def label(self) -> str:
        """What others may know of it: the hub id, or the folder's name without its place."""
        return self.name if self.revision is not None else Path(self.name).resolve().name

    def to_manifest(self) -> dict[str, str | None]:
        """A manifest's names for it, without a folder's place."""
        return {"name_or_path": self.label, "revision": self.revision, "sha256": self.sha256}

    def to_peft(self, with_path: bool = False) -> dict[str, str]:
        """PEFT's names for it.

        A folder's is its path if `with_path`, which transformers and PEFT load; else a name with the hash,
        which is no hub id, so that nothing else is loaded in its place.
        """
        if self.revision is not None:
            return {"base_model_name_or_path": self.name, "revision": self.revision}
        if with_path and self.sha256 and is_local(self.name):
            path = str(Path(self.name).resolve())
            return {"base_model_name_or_path": path, "revision": f"{HASH_MARK[1:]}{self.sha256}"}
        if self.sha256:
            return {"base_model_name_or_path": f"{self.label}{HASH_MARK}{self.sha256}"}
        is_place = not with_path and is_local(self.name)
        return {"base_model_name_or_path": self.label if is_place else self.name}

    def load(self, *, pooled: bool | None, own_head: bool = True) -> LoadedModel:
        """Load it; arguments as of `load_model`.

        Raises:
            BundleError: it isn't there, or is no longer what was recorded.
        """
        from server_export.checkpoint.loading import load_model

        if self.revision is None and not is_local(self.name):
            content = f" with the content {self.sha256}" if self.sha256 else ""
            raise Refusal("base-missing", f"there is no folder or file {self.name}{content}")
        if self.sha256 is None and is_local(self.name):
            raise Refusal(
                "base-without-hash", f"{self.name} is named without its SHA-256, and lies on this machine"
            )
        loaded = load_model(self.name, pooled=pooled, revision=self.revision, own_head=own_head)
        if self.sha256 is not None and loaded.sha256 != self.sha256:
            raise Refusal(
                "base-changed", f"the content of {self.name} is another than it was: its SHA-256 differs"
            )
        return loaded


def base_of(loaded: LoadedModel) -> BaseModel:
    """The record of a model that was loaded."""
    return BaseModel(loaded.name_or_path, loaded.revision, loaded.sha256)


def base_from_manifest(block: Mapping[str, Any]) -> BaseModel | None:
    """What a manifest's `model` block records."""
    name = block.get("name_or_path")
    return BaseModel(name, block.get("revision"), block.get("sha256")) if name else None


def base_from_peft(config: Mapping[str, Any]) -> BaseModel | None:
    """What an `adapter_config.json` records."""
    named = named_base(config)
    return None if named is None else BaseModel(named.name, named.commit, named.sha256)


def model_problems(loaded: LoadedModel, block: Mapping[str, Any]) -> list[str]:
    """In what a model differs in kind and size from a manifest's `model` block."""
    from server_export.checkpoint.loading import parameter_count

    seen = {
        "architecture": type(loaded.model).__name__,
        "model_type": loaded.config.model_type,
        "parameters": parameter_count(loaded.model),
    }
    return [
        f"its {name} is {value}, the bundle's {block[name]}"
        for name, value in seen.items()
        if block.get(name) is not None and block[name] != value
    ]


def content_problems(loaded: LoadedModel, sha256: str | None) -> list[str]:
    """Whether a model's content is another than a recorded one, where both are known."""
    same = sha256 is None or loaded.sha256 in (None, sha256)
    return [] if same else ["its content is another, its SHA-256 differs"]
