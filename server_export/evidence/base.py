"""The model that a bundle was exported from, with the values that the bundle computes with."""

from __future__ import annotations

from prge.errors import BundleError
from prge.files.bundle import Bundle
from prge.files.chain import OWN_HEAD
from server_export.adapter.layers import convert_conv1d
from server_export.checkpoint.base import content_problems, model_problems
from server_export.checkpoint.loading import LoadedModel, load_model
from server_export.model.bundle_layers import layers_of
from server_export.model.quantization import round_base


def open_base(bundle: Bundle, model: str) -> LoadedModel:
    """Load the model, a folder or hub id, that a bundle was exported from, as `as_exported` has it.

    Raises:
        BundleError: there is no such model, or it is another one.
    """
    recorded = bundle.manifest.get("model", {})
    revision = recorded.get("revision") if recorded.get("name_or_path") == model else None
    own_head = bundle.pooling == OWN_HEAD
    loaded = load_model(model, pooled=bundle.chain.is_encoder, revision=revision, own_head=own_head)
    as_exported(bundle, loaded)
    return loaded


def as_exported(bundle: Bundle, loaded: LoadedModel) -> None:
    """Give a model the frozen values of a bundle in place, as floats; its Conv1D layers become linear ones.

    Raises:
        BundleError: it is another model.
    """
    block = bundle.manifest.get("model", {})
    if problems := model_problems(loaded, block) or content_problems(loaded, block.get("sha256")):
        raise BundleError(
            f"{loaded.name_or_path} is not the model of the bundle: " + "; ".join(problems),
            remedy="give the model that the bundle was exported from with --model",
        )
    convert_conv1d(loaded.model)
    round_base(loaded.model, bundle.quantization or "fp32", layers_of(bundle))
