"""The README.md of a published folder: what it is, how it was trained, how it is used."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_USES = {
    "peft": """from peft import PeftModel
from transformers import {loader}

model = {loader}.from_pretrained("{base}")
model = PeftModel.from_pretrained(model, "<this folder>")""",
    "merged": """from transformers import {loader}

model = {loader}.from_pretrained("<this folder>")""",
    "program": """from executorch.runtime import Runtime

method = Runtime.get().load_program("program.pte").load_method("forward")
({output},) = method.execute([{inputs}])  # shapes and dtypes: manifest.json""",
}
_LIBRARIES = {"peft": "peft", "merged": "transformers", "program": "executorch"}
_HEAD = """
`head.safetensors` is the classification head: `scores = pooled @ weight.T + bias`, where `pooled` is the
{pooling} of the last hidden states.
"""
# Settings of a run that say nothing of it, by its estimator.
_IDLE = {
    "tangent": {"epsilon", "baseline", "normalize", "directions"},
    "exact": {"epsilon", "baseline", "normalize", "directions", "queries", "share_directions"},
    "antithetic": {"baseline", "normalize", "share_directions", "keep_programs"},
    "one-sided": {"share_directions", "keep_programs"},
}


@dataclass(frozen=True)
class CardFacts:
    """What a card tells. `run` is the run's `run.json`, empty where there is none."""

    name: str
    format: str
    base: str
    base_is_folder: bool
    is_encoder: bool
    pooling: str | None
    has_head: bool
    adapter: Mapping[str, Any]
    run: Mapping[str, Any]
    bundle_sha256: str | None


def model_card(facts: CardFacts) -> str:
    """The text of README.md."""
    # The hub takes only hub ids here, and a folder's path is nobody else's business.
    base = Path(facts.base).name if facts.base_is_folder else facts.base
    header = ["---", *([] if facts.base_is_folder else [f"base_model: {base}"])]
    header += [
        f"library_name: {_LIBRARIES[facts.format]}",
        "tags:",
        "- lora",
        "- zeroth-order",
        "- prge",
        "---",
    ]
    use = _USES[facts.format].format(
        loader="AutoModel" if facts.is_encoder else "AutoModelForCausalLM",
        base=base,
        output="scores" if facts.has_head else "pooled" if facts.is_encoder else "logits",
        inputs="tokens, attention_mask" if facts.is_encoder else "tokens, positions",
    )
    what = {
        "peft": f"LoRA adapter of {base}",
        "merged": f"{base} with a trained LoRA adapter merged into its weights",
        "program": f"ExecuTorch inference program of {base} with a trained LoRA adapter",
    }[facts.format]
    seen: dict[str, str] = {}
    for name, value in _facts(facts, base):
        seen.setdefault(name, value)  # the bundle's hash is in the run's facts too
    rows = list(seen.items())
    width = max(len(name) for name, _ in rows)
    head = _HEAD.format(pooling="mean" if facts.pooling == "mean" else "first") if facts.has_head else ""
    return "\n".join(
        [
            *header,
            "",
            f"# {facts.name}",
            "",
            f"{what}, trained with forward passes only by prge ({_method(facts.run)}).",
            "",
            "```python",
            use,
            "```",
            head if facts.format != "program" else "",
            f"| {'fact':<{width}} | value |",
            f"| {'-' * width} | --- |",
            *(f"| {name:<{width}} | {value} |" for name, value in rows),
            "",
        ]
    )


def _method(run: Mapping[str, Any]) -> str:
    if _estimator(run) == "tangent":
        return "exact derivatives along random directions"
    if _estimator(run) == "exact":
        return "backpropagation, as an inference graph"
    return "P-RGE, arXiv 2409.15520"


def _estimator(run: Mapping[str, Any]) -> str:
    return str(_mapping(_mapping(run.get("run")).get("settings")).get("estimator"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _facts(facts: CardFacts, base: str) -> Iterator[tuple[str, str]]:
    yield "base model", base
    for key, name in (("r", "rank"), ("lora_alpha", "alpha"), ("target_modules", "target modules")):
        if facts.adapter.get(key) is not None:
            yield name, _text(facts.adapter[key])
    if facts.bundle_sha256:
        yield "bundle", facts.bundle_sha256
    idle = _IDLE.get(_estimator(facts.run), set())
    run = dict(_mapping(facts.run.get("run")))
    if "settings" in run:
        settings = _mapping(run["settings"])
        run["settings"] = {name: value for name, value in settings.items() if name not in idle}
    yield from _flat(run, "")
    yield from _flat(facts.run.get("train"), "")


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Numbers and short texts of a nested mapping; paths of the training machine are left out."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(part, f"{name} {str(key).replace('_', ' ')}".strip())
    elif isinstance(value, bool | int | float) or (
        isinstance(value, str) and "/" not in value and "\\" not in value
    ):
        yield name, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def read_run(folder: Path | None) -> dict[str, Any]:
    """A run folder's `run.json`, empty where there is none that can be read."""
    try:
        content = json.loads((folder / "run.json").read_bytes()) if folder is not None else {}
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
