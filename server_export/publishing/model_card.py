"""The README.md of a published folder: what it is, how it was trained, how it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jinja2 import Environment

from prge.data.tokenization.tokenizer import CHAT_TEMPLATE_FILE
from prge.formats.curves import score_of
from prge.formats.documents import DocumentError, mapping, read_json
from prge.formats.run_folder import FINAL, SUMMARY
from prge.objectives.preferences import PREFERENCES
from prge.training.checkpoint import STATE, TrainingProgress
from prge.training.estimators.table import ESTIMATORS, EstimatorName
from server_export.checkpoint.base_model import BaseModel
from server_export.publishing.settings import Weights

TEMPLATE = Path(__file__).with_name("card.md")
_WHAT = {
    "peft": "LoRA adapter of {base}",
    "gguf": "LoRA adapter of {base} for llama.cpp",
    "merged": "{base} with a trained LoRA adapter merged into its weights",
    "program": "ExecuTorch inference program of {base} with a trained LoRA adapter",
    "llm": "{base} with a trained LoRA adapter for ExecuTorch's LLM runner",
}
# Settings of a run that a card tells; all others are somebody's files, or say nothing of the result.
_SETTINGS = (
    *("steps", "seed", "learning_rate", "schedule", "warmup", "optimizer", "momentum", "beta2"),
    *("weight_decay", "batch_size", "calls", "loss_normalisation", "clip", "patience"),
    *("head_learning_rate", "head_folds"),
)


@dataclass(frozen=True)
class CardFacts:
    """What a card tells.

    `head_layer` is the layer of the base model's own classification head that is trained, or whose input is;
    `has_own_classes` says that it is for the classes of that head.
    `run` is the run's `run.json`, empty where there is none; `step` is that which the adapter is of, where
    that is known; `num_bos` is how many tokens begin a prompt; `begin` is the token that texts began with in
    training and that the tokenizer doesn't put there. `source` describes the GGUF file that the base model's
    weights were dequantized from. `weights` are those of a merged model, `scheme` is the quantization of a
    program, `trained_scheme` that of the bundle that the adapter was trained with, where there is one.
    """

    name: str
    format: str
    base: BaseModel
    is_encoder: bool
    pooling: str | None
    has_head: bool
    head_layer: str
    has_own_classes: bool
    adapter: Mapping[str, Any]
    run: Mapping[str, Any]
    bundle_sha256: str | None
    step: int | None = None
    num_bos: int = 0
    bos_token: str = ""
    has_chat_template: bool = False
    is_text_part: bool = False
    key_mapping: Mapping[str, str] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    weights: Weights = "trained"
    scheme: str | None = None
    trained_scheme: str | None = None


def model_card(facts: CardFacts) -> str:
    """The text of README.md, from `card.md`."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    told: dict[str, str] = {}
    for name, value in _facts(facts):
        told.setdefault(_text(name), value)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        {each.name: getattr(facts, each.name) for each in fields(facts)}
        | {
            "tags": dict.fromkeys(ESTIMATORS[each].tag for _, each in _estimators(facts.run)),
            "what": _WHAT[facts.format].format(base=_base(facts.base)),
            "trainer": _trainer(facts.run),
            "training": [*_training(facts.run, facts.step), *_dequantized(facts)],
            "file": _text(facts.source.get("file", "")),
            "precision": _precision(facts),
            "chat_template": CHAT_TEMPLATE_FILE,
            "facts": told,
        }
    )


def _base(base: BaseModel) -> str:
    """The base model as all can find it: its hub id, or its content's hash; a folder's name says nothing."""
    if base.on_hub:
        return base.name
    return f"the model with the SHA-256 {base.sha256}" if base.sha256 else "a model that was not recorded"


def _trainer(run: Mapping[str, Any]) -> str:
    """What trained the adapter, where its run tells."""
    method = mapping(run.get("run")).get("method")
    if isinstance(method, str) and method:
        return f", trained in PyTorch by `prge baseline --method {_text(method)}`"
    return ", trained by prge" if _estimators(run) else ""


def _training(run: Mapping[str, Any], step: int | None) -> Iterator[str]:
    """How it was trained: what its estimator means, and how much went into it."""
    stretches = _estimators(run)
    for since, estimator in stretches:
        meaning = ESTIMATORS[estimator].meaning
        yield f"From step {since:,} on: {meaning}" if len(stretches) > 1 else meaning
    train, block = mapping(run.get("train")), mapping(run.get("run"))
    told = []
    objective = mapping(block.get("objective"))
    if (name := str(objective.get("name"))) in PREFERENCES:
        yield f"It learnt what is preferred, by {name.upper()} with beta {_text(objective.get('beta'))}."
    if steps := _whole(train.get("steps")):
        rows = _whole(train.get("training_rows"))
        told.append(f"{steps:,} steps" + (f" on {rows:,} training examples" if rows else ""))
        if step is not None and step != steps:
            told[-1] += f", of which the adapter is that after step {step:,}"
    if computed := _whole(train.get("rows")):
        told.append(f"{computed:,} sequences computed, where a way back counts as two")
    scheme = mapping(block.get("quantization")).get("scheme")
    if isinstance(scheme, str):
        told.append(f"frozen weights in {_text(scheme)}")
    if told:
        yield f"{'; '.join(told)}."
    before, best = mapping(train.get("before")), mapping(train.get("best"))
    if _is_scored(before) and _is_scored(best):
        (name, start), (_, end) = score_of(before), score_of(best)
        yield f"On development rows: {name.replace('_', ' ')} {start:.4g} before, {end:.4g} at best."


def _dequantized(facts: CardFacts) -> Iterator[str]:
    """That the base model is what a GGUF file stands for."""
    if facts.source:
        weights = "The weights here are" if facts.format == "merged" else "The base model is"
        kinds = f", in {_text(facts.source['description'])}," if "description" in facts.source else ""
        yield (
            f"{weights} what the GGUF file {_text(facts.source.get('file'))} stands for: its weights{kinds} "
            "were dequantized, and the adapter was trained with them. With the weights that the file was "
            "made of answers can differ."
        )


def _precision(facts: CardFacts) -> str:
    """What the adapter was trained against, and how far answers of this folder may be from that; or empty."""
    scheme = facts.trained_scheme
    if scheme is None:
        scheme = mapping(mapping(facts.run.get("run")).get("quantization")).get("scheme")
    if not isinstance(scheme, str) or scheme == "fp32" or facts.scheme == scheme:
        return ""
    trained = (
        f"The adapter was trained and scored against frozen weights that are rounded to {_text(scheme)}, in "
        "an engine that rounds the inputs of layers to int8 too."
    )
    if facts.format == "merged" and facts.weights == "trained" and facts.trained_scheme is not None:
        return (
            f"{trained} The weights here are those, as floats, with the adapter added. The inputs of layers "
            "are rounded in the engine alone, so that answers can still differ a little from those that were "
            "scored."
        )
    if facts.format == "merged":
        return f"{trained} Here it is merged into the original weights, with which answers can differ."
    if facts.scheme is not None:
        return f"{trained} The weights here are in {_text(facts.scheme)}, with which answers can differ."
    return (
        f"{trained} With the original weights of the base model answers can differ: "
        "`prge publish --format merged` writes a model with the weights that it was trained against."
    )


def _estimators(run: Mapping[str, Any]) -> list[tuple[int, EstimatorName]]:
    """The estimators that steps were taken with, each with its first step; those that a card can tell of."""
    stretches = mapping(run.get("run")).get("estimators")
    if not isinstance(stretches, list):
        stretches = [{"since": 0, "estimator": _settings(run).get("estimator")}]
    told = [(each.get("since"), each.get("estimator")) for each in stretches if isinstance(each, Mapping)]
    return [
        (since, name)
        for since, told_name in told
        for name in ESTIMATORS
        if name == told_name and isinstance(since, int)
    ]


def _is_scored(record: Mapping[str, Any]) -> bool:
    """Whether an evaluation has a loss, and nothing but numbers."""
    return "loss" in record and all(isinstance(value, int | float) for value in record.values())


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _settings(run: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(mapping(run.get("run")).get("settings"))


def _facts(facts: CardFacts) -> Iterator[tuple[str, str]]:
    if facts.base.on_hub:
        yield "base model", facts.base.name
        if facts.base.revision:
            yield "base model commit", facts.base.revision
    elif facts.base.sha256:
        yield "base model sha256", facts.base.sha256
    if facts.source:
        yield "base model file", _text(facts.source.get("file"))
        yield "base model weights", _text(["GGUF", *filter(None, [facts.source.get("description")])])
    for key, name in (("r", "rank"), ("lora_alpha", "alpha"), ("target_modules", "target modules")):
        if facts.adapter.get(key) is not None:
            yield name, _text(facts.adapter[key])
    if facts.bundle_sha256:
        yield "bundle", facts.bundle_sha256
    run, settings = mapping(facts.run.get("run")), _settings(facts.run)
    estimators = [name for _, name in _estimators(facts.run)]
    for name in ("status", "method", "engine"):
        if isinstance(run.get(name), str):
            yield name, _text(run[name])
    if estimators:
        yield "estimator", ", then ".join(estimators)
    # Settings are those of the last one.
    for name in (*_SETTINGS, *(ESTIMATORS[estimators[-1]].settings if estimators else ())):
        if settings.get(name) is not None:
            yield name.replace("_", " "), _text(settings[name])
    yield from _numbers(mapping(facts.run.get("train")), "")


def _numbers(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """The numbers of a nested mapping: its texts may be files of the user's."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _numbers(part, f"{name} {str(key).replace('_', ' ')}".strip())
    elif isinstance(value, int | float):
        yield name, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def read_run_summary(folder: Path | None) -> dict[str, Any]:
    """A run folder's `run.json`, empty where there is none that can be read."""
    try:
        content = read_json(folder / SUMMARY) if folder is not None else {}
    except (OSError, DocumentError):
        return {}
    return content if isinstance(content, dict) else {}


def read_adapter_step(folder: Path, run: Mapping[str, Any]) -> int | None:
    """The step that an adapter's folder is of: a checkpoint's, or that of `final/`, as `run.json` has it."""
    try:
        return TrainingProgress.read(folder / STATE).step
    except (OSError, ValueError, TypeError):
        return _whole(mapping(run.get("train")).get("final_step")) if folder.name == FINAL else None
