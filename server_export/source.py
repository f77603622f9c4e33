"""What an export starts from: a model without weights, and the adapter that the settings choose."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

from prge.training.costs import ModelSizes
from server_export.adapter.initial_adapter import StartAdapter, start_adapter
from server_export.adapter.outline import model_sizes_of
from server_export.checkpoint.files import ModelFiles, fetch_weights, find_files
from server_export.checkpoint.loading import LoadedModel, check_size, load_meta_model
from server_export.checkpoint.weights import checkpoint_key_mapping, load_classifier_weights
from server_export.model.chain import ModelChain
from server_export.pipeline import build_chain, linearize_conv1d
from server_export.quiet_libraries import quiet_libraries
from server_export.settings import ExportConfig
from server_export.trace.passes import Changes
from server_export.trace.patterns import unadapted_modules
from server_export.trace.positions import resolve_sequence_length
from server_export.trace.readout import readout_of


@dataclass(frozen=True)
class ExportSource:
    """A model without weights, its files, and its adapter.

    Attributes:
        files: the model's files.
        readout: `logprobs` or `pooled`.
        longest: the number of tokens of the longest row.
        transposed: names of weights that are stored transposed.
        start: the adapter that training starts from, and the model.
        costs: the sizes of the model, for estimates.
    """

    files: ModelFiles
    readout: str
    longest: int
    transposed: set[str]
    start: StartAdapter
    costs: ModelSizes

    @property
    def loaded(self) -> LoadedModel:
        """The model, with its parameters on the meta device."""
        return self.start.loaded

    def with_weights(self) -> ExportSource:
        """Return this source with downloaded and checked weights, and with their hash if necessary.

        A Hub model is identified by its revision and needs no hash.

        Raises:
            BundleError: there are no weights, or they don't fit the configuration.
        """
        fetch_weights(self.files)
        loaded = self.loaded
        check_size(self.files, loaded.model, loaded.part_of)
        if loaded.part_of is not None:
            loaded = replace(loaded, key_mapping=checkpoint_key_mapping(self.files, loaded.model))
        if loaded.classifier is not None:
            loaded = replace(
                loaded, classifier=load_classifier_weights(loaded.classifier, loaded.model, self.files)
            )
        if not self.files.revision:
            loaded = replace(loaded, sha256=self.files.sha256())
        return replace(self, start=replace(self.start, loaded=loaded))

    def starting_from(self, start: StartAdapter) -> ExportSource:
        """Return the source of the same model with another adapter."""
        return replace(self, start=start, costs=model_sizes_of(start, self.longest))

    def chain(self, scheme: str, context: int, changes: Changes | None = None) -> ModelChain:
        """Return the model as a chain of blocks; can be called only once, as it changes the model.

        Args:
            scheme: the quantization of the frozen weights.
            context: the number of tokens of the longest text.
            changes: collects what each pass changed.

        Raises:
            BundleError: the model can't be split into blocks.
        """
        start = self.start
        return build_chain(
            self.loaded,
            self.files,
            start.lora_a if start.trains_a else start.scaled_lora_a(),
            scales=start.scales if start.trains_a else None,
            longest=context,
            transposed=self.transposed,
            scheme=scheme,
            changes=changes,
        )

    def rank1_chain(self, scheme: str, context: int) -> ModelChain:
        """Return the chain of a copy with LoRA-FA of rank 1; this source can still be traced afterwards."""
        start = self.start.starting_from({name: a[:1] for name, a in self.start.lora_a.items()})
        copied = replace(
            start, trains_a=False, loaded=replace(self.loaded, model=copy.deepcopy(self.loaded.model))
        )
        return replace(self, start=copied).chain(scheme, context)


def open_source(config: ExportConfig) -> ExportSource:
    """Open the model of an export's settings without its weights.

    Raises:
        PrgeError: the model or the settings can't be used.
    """
    quiet_libraries()
    pooled = None if config.readout is None else config.readout == "pooled"
    files = find_files(config.model, config.revision)
    # With an explicit pooling the encoder's hidden states are pooled, and its own head is not used.
    own_head = config.pooling is None
    loaded = load_meta_model(config.model, pooled=pooled, revision=config.revision, own_head=own_head)
    readout = readout_of(config, loaded)
    longest = resolve_sequence_length(loaded, config.sequence_length)
    transposed = linearize_conv1d(loaded.model)
    start = start_adapter(config, loaded, bool(transposed), unadapted_modules(loaded.model))
    return ExportSource(files, readout, longest, transposed, start, model_sizes_of(start, longest))
