"""Run steps of TRL's GRPOTrainer, on given completions or on those that it samples itself.

    python scripts/bench/trl_grpo_steps.py SETTINGS.json

The settings have `model`, `adapter` (a PEFT folder to start from), `out`, `prompts` (texts, in the order of
training), `rewards` and `completions` (for each step that samples, the rewards and the token ids of its
completions, prompt after prompt) or `reward` (a file as --reward takes it), and the arguments of TRL's
GRPOConfig in `grpo`. Prints JSON: the `losses` of all steps and their `seconds`; the adapter is written to
`out`/adapter.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def main() -> None:
    """Take the steps."""
    print(json.dumps(take_steps(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))


def take_steps(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss before each step, and its seconds."""
    import torch
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    losses: list[float] = []
    times: list[float] = []
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    base = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)

    class RecordingTrainer(GRPOTrainer):  # type: ignore[misc]
        """A trainer that records exact losses; its log rounds them."""

        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            """See transformers.Trainer."""
            loss = super().compute_loss(*arguments, **keywords)
            losses.append(float(loss.detach()))
            return loss

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Records the seconds of steps."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            """See transformers.TrainerCallback."""
            times.append(-time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """See transformers.TrainerCallback."""
            times[-1] += time.perf_counter()

    rewards, completions = iter(settings["rewards"]), iter(settings["completions"])

    def recorded_reward(completions: Any, **_: Any) -> Any:
        return next(rewards)

    def recorded_rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": next(completions),
            "logprobs": None,
        }

    trainer = RecordingTrainer(
        PeftModel.from_pretrained(base, settings["adapter"], is_trainable=True),
        reward_funcs=recorded_reward,
        rollout_func=recorded_rollouts,
        args=GRPOConfig(
            output_dir=settings["out"],
            num_train_epochs=1,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **settings["grpo"],
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in settings["prompts"]]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    trainer.model.save_pretrained(Path(settings["out"], "adapter"))
    return {"losses": losses, "seconds": times}


if __name__ == "__main__":
    main()
