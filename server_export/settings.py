"""Settings of an export. Importable without torch: the command line reads its help from here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from prge.errors import ConfigError
from prge.files.signatures import DECODE, PREFILL, ROLES
from prge.learning.estimators.table import EstimatorName
from prge.running.training_flags import ExampleFlags
from prge.verbs.bounds import bound_problems
from prge.verbs.inputs import AdapterInput, TrainRows
from prge.verbs.kinds import Bytes
from prge.verbs.outputs import OutputFolder

Readout = Literal["logprobs", "pooled"]
Pooling = Literal["mean", "first"]
PrependBos = Literal["auto", "always", "never"]
Init = Literal["random", "eva"]
AdapterKind = Literal["lora-fa", "lora"]
Rounding = Literal["gptq", "nearest"]

SCHEMES = ("fp32", "8da8w", "8da4w")
# XNNPACK takes a weight-only linear for a float one: it multiplies the integer codes and drops their scale.
WEIGHT_ONLY = ("int8wo", "int4wo", "8w", "4w", "int8_weight_only", "int4_weight_only", "a16w8", "a16w4")

# Tokens of the longest row, where the model has as many positions.
DEFAULT_LENGTH = 512
# Tokens of the longest text that is written, the same.
DEFAULT_CONTEXT = 4096


def roles_problems(roles: Collection[str]) -> list[str]:
    """What is wrong with the roles that a user asks for."""
    problems = [f"roles has {role!r}, must be of {', '.join(ROLES)}" for role in roles if role not in ROLES]
    if len({PREFILL, DECODE}.intersection(roles)) == 1:
        problems.append("roles has one of prefill and decode: to write text takes both")
    return problems


@dataclass(frozen=True)
class ExportConfig:
    """Turn a transformers model into a bundle that a device can train."""

    model: str
    """Folder or hub id of a transformers causal language model or encoder, or a GGUF file; random:NAME: a
    public architecture with random weights, to measure."""

    out: OutputFolder
    """Folder to write the bundle to."""

    adapter: AdapterKind = "lora-fa"
    """What a device trains: `lora-fa`, lora_b alone, or `lora`, both matrices. A PEFT folder to begin with is
    `--start-adapter`."""

    start_adapter: AdapterInput | None = None
    """PEFT LoRA folder to start from; gives both matrices, ranks, alpha and target modules."""

    target_modules: str | list[str] | None = None
    """Linear layers to adapt, with PEFT's meaning: names or name endings, a regular expression, or
    `all-linear`, those of all blocks. Without it PEFT's usual choice for the architecture, or `all-linear`
    where there is none."""

    adapt_layers: str | None = None
    """`top:k`: adapt the target modules in the top k blocks only. What lies below then runs once for an
    example, whatever the number of copies."""

    rank: int = 8
    """Rank of the adapter."""

    alpha: float = 16.0
    """LoRA alpha; the adapter is scaled by alpha / rank."""

    rs_lora: bool = False
    """Scale the adapter by alpha over the root of the rank instead (rsLoRA), which higher ranks learn more
    from."""

    seed: int = 0
    """Seed of the lora_a matrices, or of the choice among `--init-rows`."""

    init: Init = "random"
    """Where the lora_a come from: `random`, or `eva`, principal directions of what each layer sees of
    `--init-rows`. Those of a PEFT folder come with `--start-adapter`."""

    init_rows: TrainRows | None = None
    """Rows for `--init eva`, of the kind that a device will train on; labels are not used."""

    init_task: str | None = None
    """Task of the `--init-rows`, as for `prge run --task`."""

    init_tokens: int = 16_384
    """Most tokens of `--init-rows` to compute. Each takes a state of the model's width in memory."""

    spread_ranks: bool = False
    """Give layers ranks from 1 to 2 x `--rank` by what their directions explain, with as many trained numbers
    in all; needs `--init eva`. Blocks of other ranks are another kind, with programs of their own."""

    roles: list[str] = field(default_factory=lambda: list(ROLES))
    """What the programs can compute: `stack`, scores and differences between copies of the adapter;
    `tangent`, exact derivatives along random directions; `back`, the gradient by backpropagation; `prefill`
    and `decode`, to write text. Each is kilobytes of programs; `back` needs transposed weights of quantized
    models besides, and brings along what saves activations where memory is left."""

    sequence_length: int | None = None
    """Most tokens of a row that a run may have; rows are computed at their own length. Without it 512, or as
    many as the model has positions."""

    context: int | None = None
    """Most tokens of a text that the model writes, its prompt included. Without it 4,096, or as many as the
    model has positions."""

    readout: Readout | None = None
    """What the program returns: log-probabilities over the vocabulary, or `pooled` states, as of an encoder.
    Without it what fits the model."""

    pooling: Pooling | None = None
    """How an encoder's states become one vector: mean over the row, or its first token. Without it as the
    checkpoint's own classification head does, or a folder of sentence-transformers says, or else the mean."""

    quantize: str = "fp32"
    """Frozen weights: `fp32`, `8da8w` or `8da4w` (int8 or int4 weights, int8 dynamic activations)."""

    rounding: Rounding | None = None
    """How weights become int4: `gptq`, so that errors on `--calibration-rows` compensate each other, or
    `nearest`. Without it gptq, and nearest for random weights."""

    weight_bits: float = 4.25
    """Average bits of an int4 model's weights, scales not counted. Above 4, the most sensitive layers stay
    int8. For `--rounding gptq`."""

    calibration_rows: TrainRows | None = None
    """Rows for `--rounding gptq`, of the kind that a device will train on. Where they have fewer tokens than
    `--calibration-tokens`, a neutral text of prge's own follows."""

    calibration_task: str | None = None
    """Task of the `--calibration-rows`, as for `prge run --task`."""

    calibration_tokens: int = 4096
    """Tokens to calibrate on. Each takes a state of the model's width in memory."""

    prepend_bos: PrependBos = "auto"
    """Whether the device puts the begin-of-sequence token first; `auto` leaves it to the tokenizer."""

    chat_template: str | None = None
    """How messages become text: a Jinja file like transformers' `chat_template.jinja`, or `plain`, lines that
    begin with `User:` and `Assistant:`, which any tokenizer can spell. Without it the tokenizer's own."""

    revision: str | None = None
    """Revision of a hub model: branch, tag or commit."""

    overwrite: bool = False
    """Replace the bundle if the folder exists."""

    memory: Bytes | None = None
    """Most memory that the export takes; it is refused at once if it would take more. Default: what this
    machine has available."""

    cache: bool = True
    """Take programs that an earlier export lowered from the same graphs; --no-cache lowers them again.
    `prge cache` shows and empties the cache. They hold no weights."""

    explain: bool = False
    """Print each pass over the model's graph that changed something, one line each."""

    def __post_init__(self) -> None:
        problems = bound_problems(self)
        if self.start_adapter is not None:
            brought = {"adapt_layers": None, "init": "random", "rs_lora": False}
            problems += [
                f"{name} is {getattr(self, name)}, but start_adapter is given and brings its own"
                for name, value in brought.items()
                if getattr(self, name) != value
            ]
        if self.init == "eva" and self.init_rows is None:
            problems.append("init is eva, but init_rows is not given: it takes rows to compute")
        if self.init != "eva":
            problems += [
                f"{name} is given, but init is {self.init}: it is for eva"
                for name in ("init_rows", "init_task", "spread_ranks")
                if getattr(self, name)
            ]
        problems += roles_problems(self.roles)
        problems += self._calibration_problems()
        if self.quantize.lower() in WEIGHT_ONLY:
            problems.append(
                f"quantize is {self.quantize!r}: XNNPACK computes weight-only quantized layers wrongly "
                "and says nothing: it multiplies the integer codes and drops their scales. Take 8da8w or "
                "8da4w"
            )
        elif self.quantize not in SCHEMES:
            problems.append(f"quantize is {self.quantize!r}, must be one of {', '.join(SCHEMES)}")
        if problems:
            raise ConfigError("the export settings can't be used:", problems, code="settings-unusable")

    def _calibration_problems(self) -> list[str]:
        problems = []
        if self.quantize != "8da4w" and self.rounding == "gptq":
            problems.append(f"rounding is gptq, but quantize is {self.quantize}: it is for 8da4w")
        if self.quantize != "8da4w" or self.rounding == "nearest":
            why = f"quantize is {self.quantize}" if self.quantize != "8da4w" else "rounding is nearest"
            problems += [
                f"{name} is given, but {why}: it is for gptq, of 8da4w"
                for name in ("calibration_rows", "calibration_task")
                if getattr(self, name)
            ]
        return problems


@dataclass(frozen=True)
class EstimateConfig(ExportConfig, ExampleFlags):
    """Tell what an export and its runs would cost; takes the flags of `prge export`."""

    out: Path = Path("bundle")
    """Not written; it is here so that an export's settings can be given as they are."""

    estimator: EstimatorName | None = None
    """Estimator of a run: `tangent`, `antithetic` or `exact`. Without it, `--memory` and `--train` all that
    the roles allow are compared."""

    queries: int = 4
    """Random directions of a step; an exact gradient has none."""

    batch_size: int = 4
    """Examples of a step, of one sequence each unless --train says otherwise."""

    tokens: int = 64
    """Tokens of a call's longest row, all of them learnt."""

    memory: Bytes | None = None
    """Most memory that the process of a run takes, as of `prge run`."""

    train: TrainRows | None = None
    """Training rows: tell the steps of an epoch, and the memory of a step of the longest instead of
    `--tokens`."""

    json: bool = False
    """Print one JSON object instead of text."""
