"""Settings of an export. Importable without torch: the command line reads its help from here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from prge.cli.bounds import bound_problems
from prge.cli.field_types import Bytes
from prge.cli.inputs import AdapterInput, TrainRows
from prge.cli.outputs import OutputFolder
from prge.errors import ConfigError
from prge.formats.signatures import DECODE, PREFILL, ROLES
from prge.training.estimators.table import EstimatorName
from prge.training.settings import ExampleFlags

Readout = Literal["logprobs", "pooled"]
Pooling = Literal["mean", "first"]
PrependBos = Literal["auto", "always", "never"]
Init = Literal["random", "eva"]
AdapterType = Literal["lora-fa", "lora"]
Rounding = Literal["gptq", "nearest"]

SCHEMES = ("fp32", "8da8w", "8da4w")
# XNNPACK mistakes a weight-only linear layer for a float layer: it uses the integer codes and drops their
# scale.
WEIGHT_ONLY = ("int8wo", "int4wo", "8w", "4w", "int8_weight_only", "int4_weight_only", "a16w8", "a16w4")

# Default maximum length of a row in tokens; fewer if the model has fewer positions.
DEFAULT_LENGTH = 512
# Default maximum length of a generated text in tokens, prompt included; fewer if the model has fewer
# positions.
DEFAULT_CONTEXT = 4096


def roles_problems(roles: Collection[str]) -> list[str]:
    """Return one message for each problem of a set of roles; empty if the set can be exported."""
    problems = [
        f"roles contains {role!r}, which is not one of {', '.join(ROLES)}"
        for role in roles
        if role not in ROLES
    ]
    if len({PREFILL, DECODE}.intersection(roles)) == 1:
        problems.append("roles contains only one of prefill and decode, but text generation needs both")
    return problems


@dataclass(frozen=True)
class ExportConfig:
    """Export a transformers model as a bundle that can be fine-tuned on a device."""

    EXAMPLE: ClassVar = "--model HuggingFaceTB/SmolLM2-135M-Instruct --out bundle"

    model: str
    """The model to export: the folder or Hub id of a transformers causal language model or encoder, or a GGUF
    file. `random:NAME` exports a public architecture with random weights, for benchmarks."""

    out: OutputFolder
    """The folder to write the bundle to."""

    adapter: AdapterType = "lora-fa"
    """The matrices that are trained on the device: only lora_b (`lora-fa`) or lora_a and lora_b (`lora`). To
    start from an existing adapter, use `--start-adapter`."""

    start_adapter: AdapterInput | None = None
    """A PEFT LoRA folder to start training from. Its matrices, ranks, alpha and target modules are used."""

    target_modules: str | list[str] | None = None
    """The linear layers to adapt, with the same meaning as in PEFT: names or name suffixes, a regular
    expression, or `all-linear` for all linear layers of the blocks. Default: PEFT's choice for the
    architecture, or `all-linear` if PEFT has none."""

    adapt_layers: str | None = None
    """`top:k` adapts the target modules in the top k blocks only. The blocks below then run once per example,
    for any number of adapter copies."""

    rank: int = 8
    """The rank of the adapter."""

    lora_alpha: float = 16.0
    """LoRA alpha. The adapter's output is scaled by alpha / rank."""

    use_rslora: bool = False
    """Whether to scale the adapter's output by alpha / sqrt(rank) instead of alpha / rank (rsLoRA), which
    helps adapters of high rank."""

    seed: int = 0
    """The random seed of the initial lora_a matrices and of the selection of `--init-rows`."""

    init: Init = "random"
    """How to initialize lora_a: `random`, or `eva`: the principal directions of each layer's inputs on
    `--init-rows`. To use the matrices of a PEFT folder, use `--start-adapter`."""

    init_rows: TrainRows | None = None
    """The rows for `--init eva`. They should resemble the rows that the device will train on. Labels are not
    used."""

    init_task: str | None = None
    """The task of `--init-rows`, as for `prge run --task`."""

    init_tokens: int = 16_384
    """The maximum number of tokens of `--init-rows` to run. Each token needs memory for one hidden state."""

    spread_ranks: bool = False
    """Whether to give the layers different ranks, from 1 to 2 x `--rank`, by how much of the inputs their
    directions explain. The number of trainable parameters does not grow. Needs `--init eva`. Blocks with
    different ranks are different block types, each with its own programs."""

    roles: list[str] = field(default_factory=lambda: list(ROLES))
    """What the exported programs can compute. `forward`: scores, for several adapter copies at once. `jvp`:
    exact directional derivatives along random directions. `backward`: gradients by backpropagation.
    `prefill` and `decode`: text generation. A role adds kilobytes of programs; for quantized models,
    `backward` also needs transposed weights. `backward` includes the roles that save activations if memory
    allows."""

    sequence_length: int | None = None
    """The maximum number of tokens of a row in a run. Rows are computed at their own length. Default: 512, or
    the number of the model's positions if that is smaller."""

    context: int | None = None
    """The maximum number of tokens of a generated text, including the prompt. Default: 4,096, or the number
    of the model's positions if that is smaller."""

    readout: Readout | None = None
    """What the programs return: `logprobs`, log-probabilities over the vocabulary, or `pooled`, a pooled
    hidden state per row, as from an encoder. Default: what fits the model."""

    pooling: Pooling | None = None
    """How an encoder's hidden states are pooled: `mean` over the tokens, or the `first` token. Default: as in
    the checkpoint's classification head or its sentence-transformers configuration, otherwise `mean`."""

    quantize: str = "fp32"
    """The quantization of the frozen weights: `fp32`, `8da8w` or `8da4w` (int8 or int4 weights, int8 dynamic
    activations)."""

    rounding: Rounding | None = None
    """How weights are rounded to int4: `gptq`, which compensates rounding errors on `--calibration-rows`, or
    `nearest`. Default: `gptq`; `nearest` for random weights."""

    weight_bits: float = 4.25
    """The average number of bits per weight of an int4 model, without scales. If it is above 4, the most
    sensitive layers are int8. Only for `--rounding gptq`."""

    calibration_rows: TrainRows | None = None
    """The rows for `--rounding gptq`. They should resemble the rows that the device will train on. If they
    have fewer tokens than `--calibration-tokens`, a neutral text is added."""

    calibration_task: str | None = None
    """The task of `--calibration-rows`, as for `prge run --task`."""

    calibration_tokens: int = 4096
    """The number of calibration tokens. Each token needs memory for one hidden state."""

    prepend_bos: PrependBos = "auto"
    """Whether the device prepends the begin-of-sequence token. `auto`: only if the tokenizer does."""

    chat_template: str | None = None
    """The chat template: a Jinja file like transformers' `chat_template.jinja`, or `plain` for lines that
    begin with `User:` and `Assistant:`, which work with any tokenizer. Default: the tokenizer's own
    template."""

    revision: str | None = None
    """The revision of a Hub model: a branch, tag or commit."""

    overwrite: bool = False
    """Whether to replace the output folder if it exists."""

    memory: Bytes | None = None
    """The maximum memory of the export. An export that would need more is refused before it starts. Default:
    the available memory of this machine."""

    cache: bool = True
    """Whether to reuse programs that an earlier export lowered from the same graphs; --no-cache lowers them
    again. `prge cache` lists and empties the cache, which contains no weights."""

    explain: bool = False
    """Print each pass that changed the model's graph, one per line."""

    def __post_init__(self) -> None:
        problems = bound_problems(self)
        if self.start_adapter is not None:
            from_adapter = {"adapt_layers": None, "init": "random", "use_rslora": False}
            problems += [
                f"{name} is {getattr(self, name)}, but start_adapter is set and already determines it"
                for name, value in from_adapter.items()
                if getattr(self, name) != value
            ]
        if self.init == "eva" and self.init_rows is None:
            problems.append("init is eva, which needs init_rows")
        if self.init != "eva":
            problems += [
                f"{name} is set, but init is {self.init}; {name} is only for init eva"
                for name in ("init_rows", "init_task", "spread_ranks")
                if getattr(self, name)
            ]
        problems += roles_problems(self.roles)
        problems += self._calibration_problems()
        if self.quantize.lower() in WEIGHT_ONLY:
            problems.append(
                f"quantize is {self.quantize!r}, but XNNPACK computes weight-only quantized layers wrongly "
                "without an error, because it drops their scales. Use 8da8w or 8da4w"
            )
        elif self.quantize not in SCHEMES:
            problems.append(f"quantize is {self.quantize!r} but must be one of {', '.join(SCHEMES)}")
        if problems:
            raise ConfigError("Invalid export settings:", problems, code="settings-unusable")

    def _calibration_problems(self) -> list[str]:
        problems = []
        if self.quantize != "8da4w" and self.rounding == "gptq":
            problems.append(f"rounding is gptq, which needs quantize 8da4w, but quantize is {self.quantize}")
        if self.quantize != "8da4w" or self.rounding == "nearest":
            reason = f"quantize is {self.quantize}" if self.quantize != "8da4w" else "rounding is nearest"
            problems += [
                f"{name} is set, but {reason}; {name} is only for 8da4w with gptq"
                for name in ("calibration_rows", "calibration_task")
                if getattr(self, name)
            ]
        return problems


@dataclass(frozen=True)
class EstimateConfig(ExportConfig, ExampleFlags):
    """Estimate the cost of an export and of its runs; takes the flags of `prge export`."""

    EXAMPLE: ClassVar = "--model HuggingFaceTB/SmolLM2-135M-Instruct --memory 400MB"

    out: Path = Path("bundle")
    """Ignored; accepted so that you can pass the settings of an export unchanged."""

    estimator: EstimatorName | None = None
    """The estimator of a run, such as `tangent`, `antithetic` or `exact`. Without it, and without `--memory`
    and `--train`, all estimators that the roles allow are compared."""

    queries: int = 4
    """The number of random directions per step; unused by exact gradients."""

    batch_size: int = 4
    """The number of examples per step. Without --train, each is one sequence."""

    tokens: int = 64
    """The number of tokens of the longest sequence of a step. The loss counts all of them."""

    memory: Bytes | None = None
    """The maximum memory of the training process, as for `prge run`."""

    train: TrainRows | None = None
    """The training rows. The estimate then covers the steps of an epoch, and the memory of the step with the
    longest sequence instead of `--tokens`."""

    json: bool = False
    """Print one JSON object instead of text."""
