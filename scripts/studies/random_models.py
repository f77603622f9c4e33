"""Train architectures with random weights on the demo's task: killed, resumed and asked in a chat.

    python scripts/studies/random_models.py --out OUT [--types qwen3_5_text gemma4_text] [--steps 600]

Each model is tiny and has its type's special features. `prge tune` with its defaults trains it to write the
mood of a text; the run is killed and resumed. Prints JSON by type:

    right_before, right_after   share of the demo's test rows whose mood it writes
    same_bits                   a run without kill ends with the same journal and adapter
    chat                        answers of `prge chat` to some test rows, and the right ones
    peak_mb, seconds            of the training process, and of all of `prge tune` including its export
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from verbs import DEMO, make_parser, prge, report, write_rows

from prge.cli.subprocesses import read_json, verb_command

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from demo import run_and_kill

_SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TWO_WINDOWS = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
_PER_LAYER = {
    **_TWO_WINDOWS,
    "vocab_size_per_layer_input": 1024,
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 2,
}
_IMAGES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
TYPES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    },
    "gemma4_text": {**_PER_LAYER, "global_head_dim": 32},
    "gemma3n_text": {**_PER_LAYER, "laurel_rank": 16, "activation_sparsity_pattern": None},
    "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2},
    # A model of images and texts, whose text part is used.
    "gemma3": {"text_config": {**_SIZES, **_TWO_WINDOWS}, "vision_config": _IMAGES},
}
_MOODS = ("terrible", "great")
_TASK = """\
name: written-mood
template: "{text} It was"
columns: {answers: mood}
metric: exact_match
generate: {max_tokens: 4}
"""
_CHAT_ROWS = 4


def main() -> None:
    """Train the models one after the other."""
    parser = make_parser(__doc__, seeds=[0])
    parser.add_argument("--types", nargs="+", default=[*TYPES], choices=[*TYPES])
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    write_data(arguments.out)
    results = {
        name: train_type(name, arguments.out, arguments.steps, arguments.seeds[0]) for name in arguments.types
    }
    report(results, arguments.out)


def write_data(folder: Path) -> None:
    """Write the demo's rows, with a word for the label, and their task."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.yaml").write_text(_TASK, encoding="utf-8")
    for part in ("train", "dev", "test"):
        rows = (
            {"text": row["text"], "mood": _MOODS[row["label"]]} for row in rows_of(DEMO / f"{part}.jsonl")
        )
        write_rows(folder / f"{part}.jsonl", rows)


def train_type(name: str, data: Path, steps: int, seed: int) -> dict[str, Any]:
    """Return the figures of a type; its files are in a folder of its name next to the rows."""
    model, tuned, again = (data / name / part for part in ("model", "tuned", "undisturbed"))
    write_model(name, model, seed)
    parts = {"data": "train", "dev": "dev", "test": "test"}
    arguments: list[object] = [
        word for flag, part in parts.items() for word in (f"--{flag}", data / f"{part}.jsonl")
    ]
    arguments += ["--task", data / "task.yaml", "--model", model, "--steps", steps, "--out", tuned]
    run_and_kill(tuned / "run", "tune", *arguments, output=sys.stderr)
    prge("tune", resume=tuned, json=data / name / "tuned.json")
    prge("run", config=tuned / "settings/run.yaml", out=again)
    result = read_json(data / name / "tuned.json")
    return {
        "right_before": result["score_before"]["exact_match"],
        "right_after": result["score_after"]["exact_match"],
        "same_bits": read_run_bytes(tuned / "run") == read_run_bytes(again),
        "chat": [ask(tuned, row) for row in rows_of(data / "test.jsonl")[:_CHAT_ROWS]],
        "peak_mb": result["peak_mb"],
        "seconds": result["seconds"],
    }


def write_model(name: str, folder: Path, seed: int) -> None:
    """Write a model of a type with random weights and the demo's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, AutoTokenizer

    torch.manual_seed(seed)
    is_text = "text_config" not in TYPES[name]
    config = AutoConfig.for_model(name, **{**(_SIZES if is_text else {}), **TYPES[name]})
    (AutoModelForCausalLM if is_text else AutoModelForMultimodalLM).from_config(config).save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(DEMO / "model").save_pretrained(folder)


def ask(tuned: Path, row: dict[str, Any]) -> dict[str, str]:
    """Ask the tuned model about a text in `prge chat`."""
    arguments = ["chat", tuned, "--temperature", 0, "--max-tokens", 4]
    terminal_input = f"{row['text']} It was\n/quit\n"
    result = subprocess.run(
        verb_command(*arguments), input=terminal_input, capture_output=True, text=True, check=True
    )
    return {"asked": row["text"], "answered": result.stdout.strip(), "right": row["mood"]}


def read_run_bytes(run: Path) -> list[bytes]:
    """Return the bytes of a run's journal and adapter."""
    return [(run / name).read_bytes() for name in ("journal.jsonl", "final/adapter_model.safetensors")]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
