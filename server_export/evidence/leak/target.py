"""What an attack needs: the model with its adapter, and rows as a device reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from prge.errors import ConfigError, DataError
from prge.files.bundle import Bundle, open_bundle
from prge.files.peft import read_lora
from prge.learning.examples import Example
from prge.model_spec import AdaptedModule, ModelSpec
from prge.rows.build_options import BuildOptions
from prge.rows.example_building import load_examples
from prge.rows.forms.task import load_task
from prge.rows.report import warn_unread
from prge.rows.sources import read_source
from prge.rows.tokenization.tokenizer import Tokenizer, bundle_tokenizer
from server_export.adapter.layers import convert_conv1d
from server_export.adapter.start import start_adapter
from server_export.checkpoint.loading import LoadedModel, load_model
from server_export.checkpoint.tokenization import load_tokenizer, on_device
from server_export.evidence.leak.rows import Form, Rows, known_form, unknown_part
from server_export.evidence.leak.settings import LeakSettings
from server_export.evidence.leak.victim import LENGTH, Victim
from server_export.oracle import TorchEngine, open_base


@dataclass(frozen=True)
class Target:
    """What is attacked: settings with a bundle, if there is one, and all rows with their tokenizer."""

    settings: LeakSettings
    bundle: Bundle | None
    tokenizer: Tokenizer
    examples: list[Example]

    def victim(self, rank: int, seed: int) -> Victim:
        """The model with an adapter of that rank and seed, or with the bundle's.

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
        engine = TorchEngine.of(self.bundle, open_base(self.bundle, settings.model_path), adapter=adapter)
        return Victim(engine, {name: torch.from_numpy(matrix) for name, matrix in adapter.lora_b.items()})

    def reports(self, length: int, batch: int, seed: int) -> tuple[Form, list[Rows]]:
        """Rows of so many unknown tokens, in batches, chosen by a seed.

        Raises:
            DataError: there aren't enough rows that long.
        """
        form = known_form(self.examples, len(self.tokenizer.begin), length)
        long = [example for example in self.examples if len(unknown_part(example, form)) >= length]
        needed = self.settings.limit * batch
        if len(long) < needed:
            raise DataError(
                "there are too few rows:",
                [f"{needed} of {length} unknown tokens are needed, {len(long)} have as many"],
                remedy="give more rows, or a smaller --limit, --lengths or --batches",
                code="rows-too-few",
            )
        order = torch.randperm(len(long), generator=torch.Generator().manual_seed(seed))[:needed]
        chosen = [long[index] for index in order.tolist()]
        tokens = torch.tensor([unknown_part(example, form)[:length] for example in chosen])
        rows = Rows(tokens, torch.tensor([example.label or 0 for example in chosen]))
        return form, [rows[slice(start, start + batch)] for start in range(0, needed, batch)]


def open_target(settings: LeakSettings) -> Target:
    """Read the bundle and the rows.

    Raises:
        PrgeError: they can't be used, or the model is an encoder.
    """
    bundle = open_bundle(settings.bundle) if settings.bundle is not None else None
    if bundle is not None and bundle.chain.trains_a:
        raise ConfigError(
            "this bundle can't be attacked:",
            [f"{bundle.folder} trains both matrices, and reports are read as gradients by lora_b"],
            remedy="export it with --adapter lora-fa",
            code="trains-both-matrices",
        )
    if bundle is not None:
        tokenizer, model = bundle_tokenizer(bundle), bundle.chain.model
        if model.is_encoder:
            raise _encoder(settings.model_path)
    else:
        vocabulary = int(_load(settings).model.get_input_embeddings().weight.shape[0])
        tokenizer = on_device(load_tokenizer(settings.model_path), "auto", vocabulary)
        # Rows are read by the length and the vocabulary alone.
        some = (AdaptedModule("", 1, 1, 1),)
        model = ModelSpec("logprobs", 0, vocabulary, LENGTH, some)
    task = load_task(settings.task) if settings.task else None
    rows = read_source(settings.rows_path, "test", settings.columns, task=task)
    options = BuildOptions(
        "truncate", settings.append_eos, control_tokens=settings.control_tokens, date=settings.date
    )
    examples, report = load_examples(rows, tokenizer, model, task, options=options)
    warn_unread(report)
    return Target(settings, bundle, tokenizer, examples)


def _load(settings: LeakSettings) -> LoadedModel:
    """The model; raises PrgeError where there is none, or an encoder."""
    loaded = load_model(settings.model_path)
    if not loaded.is_decoder:
        raise _encoder(settings.model_path)
    return loaded


def _encoder(model: str) -> ConfigError:
    return ConfigError(
        "this can't be attacked:",
        [f"{model} is an encoder, whose rows these attacks don't read"],
        remedy="give a decoder; that an encoder isn't attacked says nothing about what its reports reveal",
        code="encoder-not-attacked",
    )
