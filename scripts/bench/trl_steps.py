"""Run steps of TRL's trainers on rows in order, for comparison with prge's preferences.

    python scripts/bench/trl_steps.py SETTINGS.json

The settings have `objective` (dpo, ipo, simpo, kto, orpo), `model`, `adapter` (a PEFT folder to start from),
`rows` (prompt with chosen and rejected, or with completion, label and `other`, the index of the row whose
completion is the mismatched one of KTO), `beta`, `batch_size`, `learning_rate`, `out`. Prints JSON: `losses`,
and `seconds` of each step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_recording import clock, recording_trainer


def main() -> None:
    """Take a step of SGD for each batch of the rows."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps(take_steps(settings)))


def take_steps(settings: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the loss before each step, and its seconds."""
    import torch
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = settings["rows"]
    losses: list[float] = []
    times: list[float] = []
    trainer_class, config_class, extra_settings = _trainer(settings["objective"], rows)

    base = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    arguments = config_class(
        output_dir=settings["out"],
        beta=settings["beta"],
        learning_rate=settings["learning_rate"],
        per_device_train_batch_size=settings["batch_size"],
        num_train_epochs=1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **extra_settings,
    )
    trainer = recording_trainer(trainer_class, losses)(
        PeftModel.from_pretrained(base, settings["adapter"], is_trainable=True),
        args=arguments,
        train_dataset=Dataset.from_list([{**row} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[clock(times)],
    )
    trainer.train()
    return {"losses": losses, "seconds": times}


def _trainer(objective: str, rows: list[dict[str, Any]]) -> tuple[type, type, dict[str, Any]]:
    """Return TRL's trainer of an objective, its configuration class, and its extra settings."""
    if objective == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer, ORPOConfig, {}
    if objective == "simpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        return CPOTrainer, CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.0}
    import trl

    common_settings = {"precompute_ref_log_probs": True}
    if objective in ("dpo", "ipo"):
        loss_type = {"dpo": "sigmoid"}.get(objective, objective)
        return trl.DPOTrainer, trl.DPOConfig, {**common_settings, "loss_type": [loss_type]}
    other_rows = [row.pop("other") for row in rows]

    class Paired(trl.KTOTrainer):  # type: ignore[misc]
        """KTO with the mismatched completions that the rows name."""

        def _prepare_dataset(self, *arguments: Any, **keywords: Any) -> Any:
            prepared = super()._prepare_dataset(*arguments, **keywords)
            answers = [prepared["completion_ids"][index] for index in other_rows]
            return prepared.remove_columns("KL_completion_ids").add_column("KL_completion_ids", answers)

    return Paired, trl.KTOConfig, common_settings


if __name__ == "__main__":
    main()
