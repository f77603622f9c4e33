"""What an adapter in each place would contribute: the gradient that it gets, and what its rank explains.

The gradient is that of the untrained adapter's `lora_b`, with principal directions as `lora_a`: how much of
the first steps is common to all rows. What a rank explains of a layer's inputs says how much of that is left
at another rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from prge.adapter import Adapter
from prge.contract import Contract
from prge.encoder_heads import fit_heads
from prge.errors import DataError
from prge.estimators import Step
from prge.exact import Exact
from prge.examples import Example, make_batch
from prge.head import Classifier
from server_export.model.chain import Chain
from server_export.model.gradients import EagerEngine
from server_export.stage import count_parts

_BATCHES, _EXAMPLES_OF_A_BATCH = 8, 8
_FOLDS = 8


@dataclass(frozen=True)
class Contribution:
    """Of one layer.

    `gradient` is the norm of the mean gradient at the rank that it was measured with, in units of the root
    mean square of a number's gradient over batches; `shares` what each direction explains of the mean square
    of the layer's inputs, the most first.
    """

    gradient: float
    shares: tuple[float, ...]

    def of_rank(self, rank: int) -> float:
        """What an adapter of a rank contributes."""
        return self.gradient * math.fsum(self.shares[:rank])


def gradient_norms(
    chain: Chain, contract: Contract, examples: Sequence[Example], pad: int, pooling: str
) -> dict[str, float]:
    """Norm of the mean gradient by each layer's `lora_b` at zero, in units of one number's gradient.

    The mean of a few rows' gradients is mostly noise, and a layer whose rows differ would look important. So
    products of different batches are averaged, in which noise cancels; a negative average counts as 0. Lower
    layers have larger gradients and stand smaller steps: the root mean square of a number's gradient over
    batches, which Adam divides by too, takes that out.

    Args:
        chain: in float32, with the adapters.
        contract: of the model's readout; its sizes are not used.
        examples: of training rows; the first 64 give gradients, and all of them an encoder's head.
        pad: token to fill rows up with.
        pooling: of an encoder's states.

    Raises:
        DataError: there are fewer than two examples.
        ConfigError: a class of an encoder's task has too few.
    """
    if len(examples) < 2:
        raise DataError(
            "no contributions can be measured:",
            [f"there are {len(examples)} examples, must be 2 or more"],
            remedy="give more --init-rows, or leave out --adapt-layers auto",
        )
    size = min(_EXAMPLES_OF_A_BATCH, len(examples) // 2)
    chosen = examples[: size * min(_BATCHES, len(examples) // size)]
    adapter = Adapter.zeros(chain.modules)
    classifier = _classifier(chain, contract, examples, adapter, pad, pooling)
    gradients = []
    done = count_parts(len(chosen) // size)
    for start in range(0, len(chosen), size):
        batch = chosen[start : start + size]
        engine = EagerEngine(chain, _contract(chain, contract, batch, "exact"), pooling)
        rows = make_batch(batch, engine.contract, pad=pad)
        measured = Exact().measure(engine, Step(adapter, [rows], 0, 0, classifier))
        gradients.append(np.asarray(measured.derivatives, np.float64))
        done()
    return _norms(chain, np.stack(gradients))


def _norms(chain: Chain, gradients: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> dict[str, float]:
    """By layer, from gradients [batches, numbers]."""
    count, found, start = len(gradients), {}, 0
    for module in chain.modules:
        own = gradients[:, start : start + module.rank * module.out_features]
        start += own.shape[1]
        of_sum, of_each = float((own.sum(0) ** 2).sum()), float((own**2).sum())
        signal = max(of_sum - of_each, 0.0) / (count - 1)
        found[module.name] = math.sqrt(own.shape[1] * signal / of_each) if of_each > 0 else 0.0
    return found


def _classifier(
    chain: Chain,
    contract: Contract,
    examples: Sequence[Example],
    adapter: Adapter,
    pad: int,
    pooling: str,
) -> Classifier | None:
    """Heads of an encoder that score each example without having seen it, as in a run."""
    if not contract.is_encoder:
        return None
    engine = EagerEngine(chain, _contract(chain, contract, examples, "stack", 32), pooling)
    return fit_heads(engine, adapter, examples, pad, _FOLDS).cross_fitted


def _contract(
    chain: Chain, contract: Contract, examples: Sequence[Example], kind: str, rows: int | None = None
) -> Contract:
    """Of a call that has room for examples, or for so many rows of their length."""
    sequences = [sequence for example in examples for sequence in example.sequences]
    is_exact_encoder = contract.is_encoder and kind == "exact"
    return replace(
        contract,
        kind=kind,
        batch_size=rows or len(sequences),
        sequence_length=max(2, *(len(sequence.tokens) for sequence in sequences)),
        positions=max(len(sequence.slots) for sequence in sequences),
        modules=chain.modules,
        classes=examples[0].candidates if is_exact_encoder else 0,
    )


def contributions(
    norms: Mapping[str, float], shares: Mapping[str, Sequence[float]]
) -> dict[str, Contribution]:
    """Both parts together, by layer."""
    return {name: Contribution(norm, tuple(shares[name])) for name, norm in norms.items()}
