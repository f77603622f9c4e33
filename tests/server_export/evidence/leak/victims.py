"""Tiny models with random weights as victims, and rows of random tokens."""

from __future__ import annotations

from typing import Any

import torch

from server_export.adapter.layers import convert_conv1d, initial_lora_a, match_target_modules
from server_export.checkpoint.loading import prepare_model
from server_export.evidence.leak.rows import KnownForm, Rows
from server_export.evidence.leak.victim import Victim
from tests.tiny_models import VOCABULARY, make_model

# The first id after the tokenizer's special tokens.
_FIRST = 4
BEGIN = (1,)


def make_victim(rank: int = 8, architecture: str = "llama", seed: int = 0, **changes: Any) -> Victim:
    """Return a victim with all linear layers adapted by a trained adapter with small values."""
    loaded = prepare_model(make_model(architecture, seed, **changes), architecture, is_decoder=True)
    convert_conv1d(loaded.model)
    names = match_target_modules(loaded.model, "all-linear")
    lora_a = initial_lora_a(loaded.model, names, rank, seed)
    generator = torch.Generator().manual_seed(seed)
    lora_b = {
        name: 0.1 * torch.randn(rank, loaded.model.get_submodule(name).out_features, generator=generator).T
        for name in names
    }
    return Victim.of(loaded, lora_a, lora_b)


def text_form(length: int, before: tuple[int, ...] = BEGIN) -> KnownForm:
    """Return the form of texts with `length` unknown tokens."""
    return KnownForm(before, length)


def task_form(length: int) -> KnownForm:
    """Return the form of rows that end in two known tokens and have one of two classes."""
    return KnownForm(BEGIN, length, (9, 10), (7, 11))


def make_rows(form: KnownForm, count: int, seed: int = 0) -> Rows:
    """Return random tokens and labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(_FIRST, VOCABULARY, (count, form.length), generator=generator)
    return Rows(tokens, torch.randint(max(len(form.classes), 1), (count,), generator=generator))
