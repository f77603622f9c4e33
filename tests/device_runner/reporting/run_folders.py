"""Run folders like those of `prge run`, written by tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PERPLEXITIES = {0: 60.0, 20: 41.5, 40: 44.25}


def learn_from_reward(folder: Path) -> Path:
    """Change the metrics of a run to those of one that learns from a reward."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        reward = record["step"] / 50
        record.pop("perplexity", None)
        facts = {"reward": reward, "solved": reward / 2, "completion_tokens": 160, "completion_length": 20.0}
        record |= {"loss": -reward, **facts}
        record |= {"value": reward} if record["event"] == "evaluation" else {"kl": reward / 10}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def write_run(folder: Path, status: str = "completed", steps: int = 40, **train: Any) -> Path:
    """Write the folder of a run of 40 steps, whose best step is 20, with samples of one prompt."""
    folder.mkdir(parents=True)
    config = ["bundle: /some/bundle", "train: rows.jsonl", "steps: 40", "learning_rate: 0.01", "seed: 42"]
    (folder / "config.yaml").write_text("\n".join([*config, "estimator: exact", ""]))
    lines: list[dict[str, Any]] = []
    for step in range(steps + 1):
        spent = {"forward_passes": 4 * step, "seconds": step / 2, "evaluation_seconds": 0.0}
        if step:
            lines.append({"event": "step", "step": step, "loss": 4 - step / 100, "tokens": 50, **spent})
        if step in PERPLEXITIES:
            value = PERPLEXITIES[step]
            figures = {"loss": value / 10, "perplexity": value, "value": -value}
            lines.append({"event": "evaluation", "step": step, **figures, **spent})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [{"step": step, "prompt": "Once", "text": f" upon a time {step}"} for step in (0, 20)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    summary = {
        "run": {
            "status": status,
            "model": {"name_or_path": "llama", "sha256": "ab" * 32},
            "quantization": {"scheme": "8da4w"},
            "roles": ["score", "backward", "prefill", "decode"],
            "engine": "native",
            "threads": 2,
        },
        "train": {
            "steps": steps,
            "seconds": steps / 2,
            "evaluation_seconds": 0.0,
            "forward_passes": 4 * steps,
            "final_step": 20 if status == "completed" else None,
            "trained_values": 6144,
            "memory": {"peak_bytes": 123_000_000, "beyond_loaded_bytes": None},
            "data": {
                "train": {
                    "rows": 30, "examples": 31, "tokens": 900, "target_tokens": 870, "longest": 64,
                    "dropped_target_tokens": 12, "notes": {"ends cut off, not trained on": 2},
                }
            },
            **train,
        },
        "meta": {"prge": "0.1.0", "cpu": {"model": "a processor", "count": 2}},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(summary))
    if status == "completed":
        (folder / "final").mkdir()
    return folder
