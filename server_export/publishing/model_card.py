"""The model card of a published folder: what it contains, how it was trained, how to use it."""

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
# Settings of a run that a card shows; others name files of the user, or don't affect the result.
_SETTINGS = (
    *("steps", "seed", "learning_rate", "lr_scheduler_type", "warmup_steps"),
    *("optimizer", "momentum", "adam_beta2"),
    *("weight_decay", "batch_size", "calls", "loss_normalisation", "max_grad_norm", "patience"),
    *("head_learning_rate", "head_folds"),
)


@dataclass(frozen=True)
class CardFacts:
    """The content of a model card.

    Attributes:
        name: name of the folder.
        format: format that the adapter is published in.
        base: the base model.
        is_encoder: whether the base model is an encoder.
        pooling: pooling of an encoder's hidden states.
        has_head: whether the folder has a trained classification head.
        head_layer: layer of the base model's own classification head that the trained head replaces, or whose
            input the trained head reads; empty: there is none.
        has_own_classes: whether the trained head is for the classes of the base model's own head.
        adapter: the adapter's `adapter_config.json`.
        run: the run's `run.json`; empty if there is none.
        bundle_sha256: hash of the bundle, if there is one.
        step: step of the adapter, if it is known.
        num_bos: number of tokens that begin a prompt.
        bos_token: token that texts began with in training, if the tokenizer doesn't add it.
        has_chat_template: whether the folder has a chat template.
        is_text_part: whether the adapter is for the text part of a multimodal model.
        key_mapping: names of weights for loading the text part.
        source: description of the GGUF file that the base model's weights were dequantized from.
        weights: which frozen weights a merged model has.
        scheme: quantization of a program.
        trained_scheme: quantization of the bundle that the adapter was trained with, if there is one.
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
    """Return the text of README.md, rendered from `card.md`."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    table: dict[str, str] = {}
    for name, value in _facts(facts):
        table.setdefault(_text(name), value)
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
            "facts": table,
        }
    )


def _base(base: BaseModel) -> str:
    """Return the base model's hub id, or else the hash of its content; paths mean nothing to others."""
    if base.on_hub:
        return base.name
    return f"the model with the SHA-256 {base.sha256}" if base.sha256 else "a model that was not recorded"


def _trainer(run: Mapping[str, Any]) -> str:
    """Return text that names what trained the adapter; empty if the run doesn't record it."""
    method = mapping(run.get("run")).get("method")
    if isinstance(method, str) and method:
        return f", trained in PyTorch by `prge baseline --method {_text(method)}`"
    return ", trained by prge" if _estimators(run) else ""


def _training(run: Mapping[str, Any], step: int | None) -> Iterator[str]:
    """Yield paragraphs about training: estimators, objective, amount of training, and scores."""
    periods = _estimators(run)
    for since, estimator in periods:
        meaning = ESTIMATORS[estimator].meaning
        yield f"From step {since:,} on: {meaning}" if len(periods) > 1 else meaning
    train, block = mapping(run.get("train")), mapping(run.get("run"))
    amounts = []
    objective = mapping(block.get("objective"))
    if (name := str(objective.get("name"))) in PREFERENCES:
        yield f"It was trained on preferences, by {name.upper()} with beta {_text(objective.get('beta'))}."
    if steps := _whole(train.get("steps")):
        rows = _whole(train.get("training_rows"))
        amounts.append(f"{steps:,} steps" + (f" on {rows:,} training examples" if rows else ""))
        if step is not None and step != steps:
            amounts[-1] += f", of which the adapter is that after step {step:,}"
    if computed := _whole(train.get("forward_passes")):
        amounts.append(f"{computed:,} sequences computed, where a backward pass counts as two")
    scheme = mapping(block.get("quantization")).get("scheme")
    if isinstance(scheme, str):
        amounts.append(f"frozen weights in {_text(scheme)}")
    if amounts:
        yield f"{'; '.join(amounts)}."
    before, best = mapping(train.get("before")), mapping(train.get("best"))
    if _is_scored(before) and _is_scored(best):
        (name, start), (_, end) = score_of(before), score_of(best)
        yield f"On development rows: {name.replace('_', ' ')} {start:.4g} before, {end:.4g} at best."


def _dequantized(facts: CardFacts) -> Iterator[str]:
    """Yield a paragraph about the GGUF file that the base model comes from, if there is one."""
    if facts.source:
        weights = "The weights here are" if facts.format == "merged" else "The base model is"
        types = f", in {_text(facts.source['description'])}," if "description" in facts.source else ""
        yield (
            f"{weights} what the GGUF file {_text(facts.source.get('file'))} stands for: its weights{types} "
            "were dequantized, and the adapter was trained with them. With the original weights, outputs can "
            "differ."
        )


def _precision(facts: CardFacts) -> str:
    """Return text on how this folder's weights differ from those in training; empty if they don't."""
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
            "are rounded in the engine alone, so outputs can still differ slightly from those in training."
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
    """Return the known estimators of the run's steps, each with its first step."""
    periods = mapping(run.get("run")).get("estimators")
    if not isinstance(periods, list):
        periods = [{"since": 0, "estimator": _settings(run).get("estimator")}]
    pairs = [(each.get("since"), each.get("estimator")) for each in periods if isinstance(each, Mapping)]
    return [
        (since, name)
        for since, recorded_name in pairs
        for name in ESTIMATORS
        if name == recorded_name and isinstance(since, int)
    ]


def _is_scored(record: Mapping[str, Any]) -> bool:
    """Return whether an evaluation has a loss, and only numbers as values."""
    return "loss" in record and all(isinstance(value, int | float) for value in record.values())


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _settings(run: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(mapping(run.get("run")).get("settings"))


def _facts(facts: CardFacts) -> Iterator[tuple[str, str]]:
    """Yield names and values for the card's table."""
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
    # run.json has the settings of the last estimator.
    for name in (*_SETTINGS, *(ESTIMATORS[estimators[-1]].settings if estimators else ())):
        if settings.get(name) is not None:
            yield name.replace("_", " "), _text(settings[name])
    yield from _numbers(mapping(facts.run.get("train")), "")


def _numbers(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the numbers of a nested mapping, whose texts may name files of the user."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _numbers(part, f"{name} {str(key).replace('_', ' ')}".strip())
    elif isinstance(value, int | float):
        yield name, _text(value)


def _text(value: Any) -> str:
    """Return a value as text that is safe in a table of Markdown."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def read_run_summary(folder: Path | None) -> dict[str, Any]:
    """Read the `run.json` of a run folder; empty if there is no readable one."""
    try:
        content = read_json(folder / SUMMARY) if folder is not None else {}
    except (OSError, DocumentError):
        return {}
    return content if isinstance(content, dict) else {}


def read_adapter_step(folder: Path, run: Mapping[str, Any]) -> int | None:
    """Return the step of an adapter's folder, from a checkpoint's state, or from `run.json` for `final/`."""
    try:
        return TrainingProgress.read(folder / STATE).step
    except (OSError, ValueError, TypeError):
        return _whole(mapping(run.get("train")).get("final_step")) if folder.name == FINAL else None
