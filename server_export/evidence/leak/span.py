"""The span check: read tokens from a gradient with respect to lora_b if they are fewer than the rank.

A layer's gradient is the sum over tokens of (x lora_a^T)^T grad_output, [rank, out]. So its columns lie in
the span of the tokens' inputs times lora_a^T, which is public: an adversary can check whether the input of a
candidate token lies in that span. In a decoder, a layer's input follows from the token and the tokens before
it, so rows are read from left to right. The idea is DAGER's (Petrov et al. 2024, arXiv 2405.15586), which
checks the inputs of full layers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from prge.model_spec import AdaptedModule
from server_export.evidence.leak.rows import KnownForm
from server_export.evidence.leak.victim import Victim

# Singular values below this share of the largest are rounding errors.
_TOLERANCE = 2e-5
# Relative residuals below this are rounding errors.
_FLOOR = 1e-5
# Inputs with a relative difference below this are equal.
_SAME = 1e-4
# Prefixes with a log residual this much worse than the best one's are dropped.
_GAP = 4.0


# Basis of the span of each layer's gradient, f64 [rank, dimensions], by layer.
Spans = Mapping[str, torch.Tensor]


def residuals(spans: Spans, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the distances [inputs] of inputs, [inputs, rank] by layer, from spans.

    A distance is the mean over layers of the logarithm of the share of the norm outside the span.
    """
    shares = []
    for name, basis in spans.items():
        vectors = inputs[name].double()
        outside = vectors - vectors @ basis @ basis.T
        share = outside.norm(dim=1) / vectors.norm(dim=1).clamp_min(1e-30)
        shares.append(share.clamp_min(_FLOOR).log())
    return torch.stack(shares).mean(0)


def compute_spans(modules: tuple[AdaptedModule, ...], gradient: torch.Tensor) -> Spans:
    """Return the spans of a gradient [size], without layers of full rank, which exclude no input."""
    bases, start = {}, 0
    for module in modules:
        end = start + module.rank * module.out_features
        matrix = gradient[start:end].reshape(module.rank, -1).double()
        start = end
        vectors, values, _ = torch.linalg.svd(matrix, full_matrices=False)
        dimensions = int((values > _TOLERANCE * values[0].clamp_min(1e-30)).sum())
        if 0 < dimensions < module.rank:
            bases[module.name] = vectors[:, :dimensions]
    return bases


def read_prefixes(victim: Victim, form: KnownForm, spans: Spans, count: int, beam: int) -> torch.Tensor:
    """Return the unknown tokens that the model reads, i64 [at most count, tokens], best first.

    A beam search of width `beam` reads them from left to right. A text's last token is only a target, so no
    span contains it.
    """
    length = form.length if form.classes else form.length - 1
    vocabulary = torch.arange(victim.vocabulary)
    prefixes, scores = torch.empty(1, 0, dtype=torch.long), torch.zeros(1, dtype=torch.float64)
    prefix_inputs = _concat_layers(victim.reduced_inputs(form, prefixes))[:, None] if form.prefix else None
    for _ in range(length):
        repeated, tokens = prefixes.repeat_interleave(len(vocabulary), 0), vocabulary.repeat(len(prefixes))
        longer = torch.cat([repeated, tokens[:, None]], 1)
        inputs = victim.reduced_inputs(form, longer)
        totals = scores.repeat_interleave(len(vocabulary)) + residuals(spans, inputs)
        new_inputs = _concat_layers(inputs)
        if prefix_inputs is not None:
            # An input that the prefix already has is in every span, so it would repeat without end.
            repeats = _is_repeated(new_inputs, prefix_inputs.repeat_interleave(len(vocabulary), 0))
            totals[repeats] = torch.inf
        best = totals.topk(min(beam, len(totals)), largest=False)
        kept = best.indices[best.values <= best.values[0] + _GAP]
        prefixes, scores, added = longer[kept], totals[kept], new_inputs[kept, None]
        if prefix_inputs is not None:
            added = torch.cat([prefix_inputs[kept // len(vocabulary)], added], 1)
        prefix_inputs = added
    return prefixes[:count]


def _concat_layers(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the inputs of all layers as one vector for each token, [tokens, ranks]."""
    return torch.cat(list(inputs.values()), 1)


def _is_repeated(added: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Return which inputs [prefixes, ranks] equal one of the prefix's inputs, [prefixes, tokens, ranks]."""
    nearest = (added[:, None] - present).norm(dim=2).amin(1)
    return nearest < _SAME * added.norm(dim=1)
