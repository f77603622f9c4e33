"""Completions of a random model under a constraint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prge.data.tokenization.tokenizer import Tokenizer
from prge.generation.constraints import BeginConstraint
from prge.generation.loop import Completion, GenerationSettings, Generator, Request
from prge.generation.prompts import Prompt
from prge.generation.sampling import SamplingSettings
from tests.numpy_generation_engine import NumpyGenerationEngine, make_adapter
from tests.prge.data.tiny_tokenizers import byte_level_backend

TOKENIZER = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, prepend_bos=True)


def completions(
    constraint: BeginConstraint, tokenizer: Tokenizer = TOKENIZER, count: int = 4, **given: Any
) -> Sequence[Completion]:
    """Return completions of a model with random weights."""
    engine = NumpyGenerationEngine(420, context=400, slots=4)
    samplings = [SamplingSettings(2.0, min_p=0, seed=seed) for seed in range(count)]
    requests = [
        Request(
            Prompt((1, 5, 6), continues=False),
            make_adapter(),
            GenerationSettings(**{"max_tokens": 200, "sampling": sampling, **given}),
            constraint=constraint,
        )
        for sampling in samplings
    ]
    return Generator(engine, tokenizer).generate(requests)
