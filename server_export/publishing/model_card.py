"""The README.md of a published folder: what it is, how it was trained, how it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prge.documents import DocumentError, read_json
from prge.run_folder import SUMMARY
from server_export.model.base import BaseModel

_USES = {
    "peft": """from peft import PeftModel
from transformers import {loader}

model = {loader}.from_pretrained({base})
model = PeftModel.from_pretrained(model, "<this folder>")""",
    "merged": """from transformers import {loader}

model = {loader}.from_pretrained("<this folder>")""",
    "program": """from executorch.runtime import Runtime

method = Runtime.get().load_program("program.pte").load_method("forward")
({output},) = method.execute([{inputs}])  # shapes and dtypes: manifest.json""",
    "gguf": """llama-cli -m "<GGUF file of {base}>" --lora adapter.gguf""",
    "llm": """from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

runner = TextLLMRunner("program.pte", "tokenizer.json")
runner.generate("Once upon a time", GenerationConfig(num_bos={num_bos}, temperature=0), print)""",
}
_LIBRARIES = {
    "peft": "peft",
    "merged": "transformers",
    "program": "executorch",
    "llm": "executorch",
    "gguf": "llama.cpp",
}
_HEAD = """
`head.safetensors` is the classification head: `scores = pooled @ weight.T + bias`, where `pooled` is the
{pooling} of the last hidden states.
"""
# Settings of a run that a card tells; all others are somebody's files, or say nothing of the result.
_SETTINGS = (
    *("steps", "seed", "learning_rate", "schedule", "warmup", "optimizer", "momentum", "beta2"),
    *("batch_size", "calls", "clip", "patience", "head_learning_rate", "head_folds"),
)
# Those that an estimator has besides.
_OF_ESTIMATOR = {
    "tangent": ("queries", "share_directions"),
    "antithetic": ("queries", "epsilon", "directions"),
    "one-sided": ("queries", "epsilon", "directions", "baseline", "normalize"),
    "exact": ("clip_examples",),
}
_TAGS = {
    "tangent": "forward-mode-differentiation",
    "antithetic": "zeroth-order",
    "one-sided": "zeroth-order",
    "exact": "backpropagation",
}
_METHODS = {
    "tangent": "with forward passes only: exact derivatives along random directions",
    "antithetic": "with forward passes only: antithetic differences (P-RGE, arXiv 2409.15520)",
    "one-sided": "with forward passes only: one-sided differences",
    "exact": "with exact gradients: backpropagation as an inference graph",
}


@dataclass(frozen=True)
class CardFacts:
    """What a card tells.

    `run` is the run's `run.json`, empty where there is none; `num_bos` is how many tokens begin a prompt.
    """

    name: str
    format: str
    base: BaseModel
    is_encoder: bool
    pooling: str | None
    has_head: bool
    adapter: Mapping[str, Any]
    run: Mapping[str, Any]
    bundle_sha256: str | None
    num_bos: int = 0


def model_card(facts: CardFacts) -> str:
    """The text of README.md."""
    base, revision = facts.base.label, facts.base.revision
    # The hub takes only hub ids here, and a folder's path is nobody else's business.
    header = ["---", *([f"base_model: {base}"] if revision else [])]
    tag = _TAGS.get(_estimator(facts.run))
    header += [
        f"library_name: {_LIBRARIES[facts.format]}",
        "tags:",
        "- lora",
        *([f"- {tag}"] if tag else []),
        "- prge",
        "---",
    ]
    use = _USES[facts.format].format(
        loader="AutoModel" if facts.is_encoder else "AutoModelForCausalLM",
        base=_base_in_code(facts),
        output="scores" if facts.has_head else "pooled" if facts.is_encoder else "logits",
        inputs="tokens, attention_mask" if facts.is_encoder else "tokens, positions",
        num_bos=facts.num_bos,
    )
    what = {
        "peft": f"LoRA adapter of {base}",
        "gguf": f"LoRA adapter of {base} for llama.cpp",
        "merged": f"{base} with a trained LoRA adapter merged into its weights",
        "program": f"ExecuTorch inference program of {base} with a trained LoRA adapter",
        "llm": f"{base} with a trained LoRA adapter for ExecuTorch's LLM runner",
    }[facts.format]
    seen: dict[str, str] = {}
    for name, value in _facts(facts):
        seen.setdefault(name, value)
    rows = list(seen.items())
    width = max(len(name) for name, _ in rows)
    head = _HEAD.format(pooling="mean" if facts.pooling == "mean" else "first") if facts.has_head else ""
    return "\n".join(
        [
            *header,
            "",
            f"# {facts.name}",
            "",
            f"{what}{_training(facts.run)}.",
            "",
            "```sh" if facts.format == "gguf" else "```python",
            use,
            "```",
            head if facts.format in ("peft", "merged") else "",
            f"| {'fact':<{width}} | value |",
            f"| {'-' * width} | --- |",
            *(f"| {name:<{width}} | {value} |" for name, value in rows),
            "",
        ]
    )


def _base_in_code(facts: CardFacts) -> str:
    base, revision = facts.base.label, facts.base.revision
    if facts.format == "gguf":
        return base
    return f'"{base}", revision="{revision}"' if revision else f'"<folder of {base}>"'


def _training(run: Mapping[str, Any]) -> str:
    """How the adapter was trained, where its run tells."""
    method = _mapping(run.get("run")).get("method")
    if isinstance(method, str) and method:
        return f", trained in PyTorch by `prge baseline --method {_text(method)}`"
    told = _METHODS.get(_estimator(run))
    return f", trained by prge {told}" if told else ""


def _estimator(run: Mapping[str, Any]) -> str:
    return str(_settings(run).get("estimator"))


def _settings(run: Mapping[str, Any]) -> Mapping[str, Any]:
    return _mapping(_mapping(run.get("run")).get("settings"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _facts(facts: CardFacts) -> Iterator[tuple[str, str]]:
    yield "base model", facts.base.label
    if facts.base.revision or facts.base.sha256:
        kind = "commit" if facts.base.revision else "sha256"
        yield f"base model {kind}", str(facts.base.revision or facts.base.sha256)
    for key, name in (("r", "rank"), ("lora_alpha", "alpha"), ("target_modules", "target modules")):
        if facts.adapter.get(key) is not None:
            yield name, _text(facts.adapter[key])
    if facts.bundle_sha256:
        yield "bundle", facts.bundle_sha256
    run, settings, estimator = _mapping(facts.run.get("run")), _settings(facts.run), _estimator(facts.run)
    for name in ("status", "method", "engine"):
        if isinstance(run.get(name), str):
            yield name, _text(run[name])
    if estimator in _METHODS:
        yield "estimator", estimator
    for name in (*_SETTINGS, *_OF_ESTIMATOR.get(estimator, ())):
        if settings.get(name) is not None:
            yield name.replace("_", " "), _text(settings[name])
    yield from _numbers(_mapping(facts.run.get("train")), "")


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
    return " ".join(text.split()).replace("|", "\\|")


def read_run(folder: Path | None) -> dict[str, Any]:
    """A run folder's `run.json`, empty where there is none that can be read."""
    try:
        content = read_json(folder / SUMMARY) if folder is not None else {}
    except (OSError, DocumentError):
        return {}
    return content if isinstance(content, dict) else {}
