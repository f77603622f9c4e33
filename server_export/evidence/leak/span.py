"""The span check: tokens that a gradient by lora_b can't hide while they are fewer than the rank.

A layer's gradient is the sum over tokens of (x lora_a^T)^T grad_output, [rank, out]. So its columns lie in
the span of the tokens' inputs times lora_a^T, which is public: whoever knows what a token would give checks
whether it lies in that span. In a decoder the input of a layer follows from the token and those before it, so
that rows are read from left to right. The idea is DAGER's (Petrov et al. 2024, arXiv 2405.15586), which
checks the inputs of full layers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from prge.model_spec import AdaptedModule
from server_export.evidence.leak.rows import KnownForm
from server_export.evidence.leak.victim import Victim

# A singular value below this share of the largest is the arithmetic's.
_TOLERANCE = 2e-5
# Residuals of tokens in the span, as shares of their inputs, are of the arithmetic too.
_FLOOR = 1e-5
# Inputs that differ by less than this share of their size are the same.
_SAME = 1e-4
# A prefix this much worse than the best one is given up; residuals are logarithms.
_GAP = 4.0


# Bases of the spans of layers' gradients by layer, f64 [rank, dimensions].
Spans = Mapping[str, torch.Tensor]


def residuals(spans: Spans, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """How far inputs, [inputs, rank] by layer, are from spans, [inputs].

    It is the mean over layers of the logarithm of the share that lies outside.
    """
    shares = []
    for name, basis in spans.items():
        given = inputs[name].double()
        outside = given - given @ basis @ basis.T
        share = outside.norm(dim=1) / given.norm(dim=1).clamp_min(1e-30)
        shares.append(share.clamp_min(_FLOOR).log())
    return torch.stack(shares).mean(0)


def spans_of(modules: tuple[AdaptedModule, ...], gradient: torch.Tensor) -> Spans:
    """Spans of a gradient [size]; none of a layer whose gradient has full rank: it rules nothing out."""
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
    """The unknown tokens that the model reads, from left to right: i64 [at most count, tokens], best first.

    A text's last token is only a target: no span has it. The best `beam` prefixes are gone on with.
    """
    length = form.length if form.classes else form.length - 1
    every = torch.arange(victim.vocabulary)
    prefixes, scores = torch.empty(1, 0, dtype=torch.long), torch.zeros(1, dtype=torch.float64)
    seen = _side_by_side(victim.reduced_inputs(form, prefixes))[:, None] if form.before else None
    for _ in range(length):
        before, added = prefixes.repeat_interleave(len(every), 0), every.repeat(len(prefixes))
        longer = torch.cat([before, added[:, None]], 1)
        inputs = victim.reduced_inputs(form, longer)
        totals = scores.repeat_interleave(len(every)) + residuals(spans, inputs)
        sides = _side_by_side(inputs)
        if seen is not None:
            # The first token again gives the same input again, whatever the row is.
            totals[_repeats(sides, seen.repeat_interleave(len(every), 0))] = torch.inf
        best = totals.topk(min(beam, len(totals)), largest=False)
        kept = best.indices[best.values <= best.values[0] + _GAP]
        prefixes, scores, own = longer[kept], totals[kept], sides[kept, None]
        seen = own if seen is None else torch.cat([seen[kept // len(every)], own], 1)
    return prefixes[:count]


def _side_by_side(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Inputs of all layers as one vector of each token, [tokens, ranks]."""
    return torch.cat(list(inputs.values()), 1)


def _repeats(added: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Which of some inputs [prefixes, ranks] equal one that the prefix has, [prefixes, tokens, ranks]."""
    nearest = (added[:, None] - seen).norm(dim=2).amin(1)
    return nearest < _SAME * added.norm(dim=1)
