"""Settings of an export. Importable without torch: the command line reads its help from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prge.bounds import bound_problems
from prge.chain import ROLES
from prge.errors import ConfigError

Readout = Literal["logprobs", "verbalizer", "pooled"]
Pooling = Literal["mean", "first"]
PrependBos = Literal["auto", "always", "never"]

Estimator = Literal["tangent", "antithetic", "exact"]

SCHEMES = ("fp32", "8da8w", "8da4w")
# XNNPACK takes a weight-only linear for a float one: it multiplies the integer codes and drops their scale.
WEIGHT_ONLY = ("int8wo", "int4wo", "8w", "4w", "int8_weight_only", "int4_weight_only", "a16w8", "a16w4")

DEFAULT_QUERIES = 4


@dataclass(frozen=True)
class ExportConfig:
    """What to export and how. Shapes are fixed by it: a program runs one batch size and the lengths named."""

    model: str
    """Folder or hub id of a transformers causal language model or encoder."""

    out: Path
    """Folder to write the bundle to."""

    adapter: Path | None = None
    """PEFT LoRA folder to start from; gives rank, alpha and target modules."""

    target_modules: str | list[str] | None = None
    """Linear layers to adapt, with PEFT's meaning: names or name endings, a regular expression, or
    `all-linear`. Without it PEFT's usual choice for the architecture."""

    adapt_layers: str | None = None
    """`top:k`: adapt the target modules in the top k blocks only. What lies below then runs once for an
    example, whatever the number of copies."""

    trunk_cache: bool = False
    """Export what lies below the first adapted block as a method of its own, so that a run computes it once
    for every example and keeps the result. Needs adapters in upper blocks only, as with `--adapt-layers`."""

    rank: int = 8
    """Rank of the adapter."""

    alpha: float = 16.0
    """LoRA alpha; the adapter is scaled by alpha / rank."""

    seed: int = 0
    """Seed of the frozen lora_a matrices."""

    estimator: Estimator = "tangent"
    """What the program computes for training: `antithetic`, losses of perturbed copies of the adapter in one
    call (P-RGE; other differences run on it too); `tangent`, exact derivatives along random directions
    beside each row; `exact`, the gradient by backpropagation."""

    queries: int = DEFAULT_QUERIES
    """Random directions a step. They fix the shape of a tangent program. A P-RGE program takes them as the
    default of its runs. An exact program has none."""

    copies: int | None = None
    """antithetic: adapter copies that run in one call. Without it 2 x queries, a whole step in one call."""

    batch_size: int = 4
    """Rows of one call: each with its tangents, or once for every copy."""

    score_batch_size: int | None = None
    """tangent, exact: rows that the program for scoring runs in one call. Without it as many as a step costs,
    (1 + queries) x batch_size or 2 x batch_size."""

    sequence_length: int = 64
    """Tokens of the longest row."""

    lengths: list[int] | None = None
    """Shorter lengths that the program gets methods for, so that a row pays for the next one above its own.
    The weights are stored once. Without numbers a quarter, a half and three quarters of sequence_length."""

    positions: int | None = None
    """Target tokens that a row has room for, each with a pass through the vocabulary head. Without it as
    many as the longest row holds, or one for each label word. Candidates of one token need only one each: a
    smaller number makes their program faster."""

    classes: int = 8
    """exact: most classes of an encoder's head. Its rows are weighed inside the program."""

    readout: Readout | None = None
    """What the program returns: log-probabilities over the vocabulary, over the label words only
    (`verbalizer`), or an encoder's `pooled` states. Without it what fits the model."""

    label_words: list[str] | None = None
    """Words of a verbalizer, one token each."""

    pooling: Pooling = "mean"
    """How an encoder's states become one vector: mean over the row, or its first token."""

    quantize: str = "fp32"
    """Frozen weights: `fp32`, `8da8w` or `8da4w` (int8 or int4 weights, int8 dynamic activations)."""

    roles: list[str] | None = None
    """Write the model as a chain of small programs with its weights beside them, for these roles: `stack`
    for scores and differences of copies, `tangent`, `back` for exact gradients. The estimator, queries, batch
    and lengths are then choices of a run."""

    prepend_bos: PrependBos = "auto"
    """Whether the device puts the begin-of-sequence token first; `auto` leaves it to the tokenizer."""

    revision: str | None = None
    """Revision of a hub model: branch, tag or commit."""

    overwrite: bool = False
    """Replace the bundle if the folder exists."""

    def __post_init__(self) -> None:
        problems = bound_problems(self)
        owners = {"copies": ("antithetic",), "score_batch_size": ("tangent", "exact")}
        problems += [
            f"{name} belongs to estimator {' or '.join(owner)}, but estimator is {self.estimator}"
            for name, owner in owners.items()
            if getattr(self, name) is not None and self.estimator not in owner
        ]
        if self.adapt_layers is not None and self.adapter is not None:
            problems.append("adapt_layers is for a new adapter, but adapter is given and brings its layers")
        problems += [
            f"--lengths has {length}, must be at most --sequence-length {self.sequence_length}"
            for length in self.lengths or ()
            if length > self.sequence_length
        ]
        problems += [
            f"roles has {role!r}, must be of {', '.join(ROLES)}"
            for role in self.roles or ()
            if role not in ROLES
        ]
        if self.quantize.lower() in WEIGHT_ONLY:
            problems.append(
                f"quantize is {self.quantize!r}: XNNPACK computes weight-only quantized layers wrongly "
                "and says nothing: it multiplies the integer codes and drops their scales. Take 8da8w or "
                "8da4w"
            )
        elif self.quantize not in SCHEMES:
            problems.append(f"quantize is {self.quantize!r}, must be one of {', '.join(SCHEMES)}")
        if self.readout == "verbalizer" and not self.label_words:
            problems.append("readout is verbalizer, but label_words is empty")
        if self.label_words and self.readout in ("logprobs", "pooled"):
            problems.append(f"label_words are for the verbalizer readout, but readout is {self.readout}")
        if problems:
            raise ConfigError("the export settings can't be used:", problems)

    @property
    def shorter_lengths(self) -> tuple[int, ...]:
        """Lengths below sequence_length that every method has a variant for, shortest first."""
        if self.lengths is None:
            return ()
        quarters = [self.sequence_length * part // 4 for part in (1, 2, 3)]
        return tuple(sorted({n for n in self.lengths or quarters if 0 < n < self.sequence_length}))

    @property
    def read_positions(self) -> int:
        """Target tokens that a decoder's row has room for."""
        if self.positions is not None:
            return self.positions
        return len(self.label_words) if self.label_words else max(self.sequence_length - 1, 1)

    @property
    def stack_copies(self) -> int:
        """Adapter copies of the program."""
        if self.estimator != "antithetic":
            return 1
        return self.copies if self.copies is not None else 2 * self.queries


@dataclass(frozen=True)
class EstimateConfig(ExportConfig):
    """What to estimate: the settings of an export, which may come from its file with `--config`."""

    out: Path = Path("bundle")
    """Not written; it is here so that an export's settings can be given as they are."""

    train: Path | None = None
    """Training rows: tell what an epoch of them takes, with every batch at the length that holds it."""

    task: str | None = None
    """Task of the training rows, as for `prge run`."""

    calibrate: bool = True
    """Measure the engine on this machine for two seconds. Without it there are no seconds a step."""

    json: bool = False
    """Print one JSON object instead of text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.roles is not None:
            raise ConfigError(
                "these settings can't be estimated:",
                ["--roles is given: what a chain of programs costs isn't told yet"],
                remedy="leave --roles out to estimate one program for the whole model",
            )
