"""Run steps of TRL's GRPOTrainer, on given completions or on those that it samples itself.

    python scripts/bench/trl_grpo_steps.py SETTINGS.json

The settings have `model`, `adapter` (a PEFT folder to start from), `out`, `rows` (a jsonl file with prompts,
in the order of training unless `grpo` shuffles them), the arguments of TRL's GRPOConfig in `grpo`, and either
`rewards` and `completions` (for each step that samples, the rewards and the token ids of its completions,
prompt after prompt) or `reward` (a file as --reward takes it). Prints JSON: the `losses` of all steps and
their `seconds`, the `tokens` of all completions, and `memory_mb`; the adapter is written to `out`/adapter.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_recording import clock, recording_trainer

from prge.rewards.opening import open_reward


def main() -> None:
    """Take the steps."""
    print(json.dumps(take_steps(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))


def take_steps(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss before each step, and its seconds."""
    import torch
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    losses: list[float] = []
    times: list[float] = []
    tokens = 0
    rows = [json.loads(line) for line in Path(settings["rows"]).read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    base = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)

    recorded, sampled = (iter(settings.get(name, ())) for name in ("rewards", "completions"))
    reward = open_reward(settings["reward"]) if "reward" in settings else None

    def rewards(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> Any:
        nonlocal tokens
        tokens += sum(map(len, completion_ids))
        if reward is None:
            return next(recorded)
        texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
        # TRL passes more than columns, such as the trainer's state.
        lists = {name: values for name, values in columns.items() if isinstance(values, list)}
        cells = [{name: values[index] for name, values in lists.items()} for index in range(len(texts))]
        return [reward(prompt, text, row) for prompt, text, row in zip(prompts, texts, cells, strict=True)]

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": next(sampled),
            "logprobs": None,
        }

    trainer = recording_trainer(GRPOTrainer, losses)(
        PeftModel.from_pretrained(base, settings["adapter"], is_trainable=True),
        reward_funcs=rewards,
        rollout_func=None if reward is not None else rollouts,
        args=GRPOConfig(
            output_dir=settings["out"],
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **settings["grpo"],
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock(times)],
    )
    trainer.train()
    trainer.model.save_pretrained(Path(settings["out"], "adapter"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {"losses": losses, "seconds": times, "tokens": tokens, "memory_mb": peak}


if __name__ == "__main__":
    main()
