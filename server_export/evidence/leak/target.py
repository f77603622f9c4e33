"""The target of an attack: the model with its adapter, and rows as a device reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from prge.data.example_building import load_examples
from prge.data.forms.task import load_task
from prge.data.options import BuildOptions
from prge.data.row_report import warn_unread
from prge.data.sources import read_source
from prge.data.tokenization.tokenizer import Tokenizer, load_bundle_tokenizer
from prge.errors import ConfigError, DataError
from prge.formats.bundle import Bundle, open_bundle
from prge.formats.peft import read_lora
from prge.model_spec import AdaptedModule, ModelSpec
from prge.objectives.examples import Example
from server_export.adapter.initial_adapter import start_adapter
from server_export.adapter.layers import convert_conv1d
from server_export.checkpoint.loading import LoadedModel, load_model
from server_export.checkpoint.tokenization import device_tokenizer, load_tokenizer
from server_export.evidence.leak.rows import KnownForm, Rows, known_form, unknown_part
from server_export.evidence.leak.settings import LeakSettings
from server_export.evidence.leak.victim import MAX_LENGTH, Victim
from server_export.oracle import TorchEngine, load_base_model


@dataclass(frozen=True)
class AttackTarget:
    """Settings, an optional bundle, the tokenizer and all rows of an attack."""

    settings: LeakSettings
    bundle: Bundle | None
    tokenizer: Tokenizer
    examples: list[Example]

    def victim(self, rank: int, seed: int) -> Victim:
        """Return the model with a new adapter of a rank and seed, or with the bundle's adapter.

        Raises:
            PrgeError: model or adapter can't be used.
        """
        settings = self.settings
        if self.bundle is None:
            loaded = _load(settings)
            convert_conv1d(loaded.model)
            start = start_adapter(replace(settings.export, rank=rank, seed=seed), loaded, False)
            return Victim.of(loaded, start.scaled_lora_a(), start.lora_b)
        adapter = read_lora(settings.adapter or self.bundle.adapter)
        engine = TorchEngine.of(
            self.bundle, load_base_model(self.bundle, settings.model_path), adapter=adapter
        )
        return Victim(engine, {name: torch.from_numpy(matrix) for name, matrix in adapter.lora_b.items()})

    def reports(self, length: int, batch: int, seed: int) -> tuple[KnownForm, list[Rows]]:
        """Return the form and batches of rows with `length` unknown tokens, chosen by a seed.

        Raises:
            DataError: too few rows are long enough.
        """
        form = known_form(self.examples, len(self.tokenizer.begin), length)
        long = [example for example in self.examples if len(unknown_part(example, form)) >= length]
        needed = self.settings.limit * batch
        if len(long) < needed:
            raise DataError(
                "There are too few rows:",
                [f"{needed} rows with {length} unknown tokens are needed, and {len(long)} are long enough"],
                remedy="Give more rows, or smaller --limit, --lengths or --batches.",
                code="rows-too-few",
            )
        order = torch.randperm(len(long), generator=torch.Generator().manual_seed(seed))[:needed]
        chosen = [long[index] for index in order.tolist()]
        tokens = torch.tensor([unknown_part(example, form)[:length] for example in chosen])
        rows = Rows(tokens, torch.tensor([example.label or 0 for example in chosen]))
        return form, [rows[slice(start, start + batch)] for start in range(0, needed, batch)]


def open_target(settings: LeakSettings) -> AttackTarget:
    """Read the bundle and the rows.

    Raises:
        PrgeError: bundle or rows can't be used, or the model is an encoder.
    """
    bundle = open_bundle(settings.bundle) if settings.bundle is not None else None
    if bundle is not None and bundle.chain.trains_a:
        raise ConfigError(
            "Cannot attack this bundle:",
            [f"{bundle.folder} trains both matrices, and these attacks need gradients of lora_b alone"],
            remedy="Export it with --adapter lora-fa.",
            code="trains-both-matrices",
        )
    if bundle is not None:
        tokenizer, model = load_bundle_tokenizer(bundle), bundle.chain.model
        if model.is_encoder:
            raise _encoder_error(settings.model_path)
    else:
        vocabulary = int(_load(settings).model.get_input_embeddings().weight.shape[0])
        tokenizer = device_tokenizer(load_tokenizer(settings.model_path), "auto", vocabulary)
        # Only the length and the vocabulary matter for reading rows.
        placeholder = (AdaptedModule("", 1, 1, 1),)
        model = ModelSpec("logprobs", 0, vocabulary, MAX_LENGTH, placeholder)
    task = load_task(settings.task) if settings.task else None
    rows = read_source(settings.rows_path, "test", settings.columns, task=task)
    options = BuildOptions(
        "truncate", settings.append_eos, control_tokens=settings.control_tokens, date=settings.date
    )
    examples, report = load_examples(rows, tokenizer, model, task, options=options)
    warn_unread(report)
    return AttackTarget(settings, bundle, tokenizer, examples)


def _load(settings: LeakSettings) -> LoadedModel:
    """Load the model; raises PrgeError if there is none or it is an encoder."""
    loaded = load_model(settings.model_path)
    if not loaded.is_decoder:
        raise _encoder_error(settings.model_path)
    return loaded


def _encoder_error(model: str) -> ConfigError:
    return ConfigError(
        "Cannot attack this model:",
        [f"{model} is an encoder, and these attacks support decoders only"],
        remedy="Give a decoder; this does not mean that an encoder's reports reveal nothing.",
        code="encoder-not-attacked",
    )
