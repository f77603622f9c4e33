"""Training steps of a trial by prge and by other trainers, for peers.py.

    python scripts/bench/peer_steps.py METHOD FOLDER

For every line of the standard input the process prints seconds and loss of a step with the sizes of FOLDER's
trial.json on the next rows of its rows.json; the first line only waits for the start. `prge-int4` and
`prge-fp32` use FOLDER's bundles `int4` and `fp32`, `peft-fp32` and `peft-bf16` its `model`, `executorch` the
program that `executorch-export` makes. `mlx-4bit`, `mlx-bf16` and `mlx-fp32` need a Python with mlx-lm, which
doesn't have prge.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve import LEARNING_RATE, Measurements, peft_steps, serve

JOINT = "joint.pte"


def prge_steps(method: str, folder: Path, trial: dict[str, Any]) -> Measurements:
    """Run exact steps of a bundle with Adam and the default memory of a run."""
    from timing import full_examples, timed_step

    from prge.formats.bundle import open_bundle
    from prge.formats.peft import read_peft
    from prge.training.estimators.protocol import Step
    from prge.training.optimizers import Adam

    bundle = folder / method.removeprefix("prge-")
    yield ()
    opened = timed_step(bundle, "exact", trial["batch"], trial["tokens"], trial["threads"])
    manifest = open_bundle(bundle)
    adapter = read_peft(manifest.adapter, manifest.chain.modules)
    optimizer = Adam(adapter.size)
    steps = [replace(opened, step=Step(adapter, full_examples(batch), 0, 0)) for batch in rows_of(folder)]
    for step in itertools.cycle(steps):
        begin = time.perf_counter()
        _, measurement = step()
        assert measurement.gradient is not None
        optimizer.update(adapter.values, measurement.gradient, LEARNING_RATE)
        yield time.perf_counter() - begin, measurement.loss


def mlx_steps(weight_type: str, folder: Path, trial: dict[str, Any]) -> Measurements:
    """Run steps of mlx-lm on the CPU, compiled as by its trainer, with AdamW."""
    import mlx.core as mx
    from mlx import nn, optimizers
    from mlx_lm.tuner.trainer import default_loss

    mx.set_default_device(mx.cpu)
    yield ()
    model = _mlx_model(weight_type, folder / "model", trial)
    optimizer = optimizers.AdamW(learning_rate=LEARNING_RATE, weight_decay=0.0)
    mx.random.seed(0)
    lengths = mx.array([[0, trial["tokens"]]] * trial["batch"])
    loss_and_grad = nn.value_and_grad(model, default_loss)
    state = [model.state, optimizer.state]

    def step(batch: Any) -> Any:
        (loss, _), gradient = loss_and_grad(model, batch, lengths)
        optimizer.update(model, gradient)
        return loss

    compiled = mx.compile(step, inputs=state, outputs=state)
    for batch in itertools.cycle([mx.array(batch) for batch in rows_of(folder)]):
        begin = time.perf_counter()
        loss = compiled(batch)
        mx.eval(state, loss)
        yield time.perf_counter() - begin, loss.item()


def _mlx_model(weight_type: str, folder: Path, trial: dict[str, Any]) -> Any:
    """Load the model with LoRA of the trial's rank on the trial's layers."""
    import mlx.core as mx
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model, quantize_model

    model, config = load_model(folder)
    # 4-bit products with bfloat16 take ten times as long on x86 as those with float32.
    model.set_dtype(mx.bfloat16 if weight_type == "bf16" else mx.float32)
    if weight_type == "4bit":
        model, _ = quantize_model(model, config, 64, 4)
    mx.eval(model.parameters())
    model.freeze()
    lora = {"rank": trial["rank"], "scale": trial["alpha"] / trial["rank"], "dropout": 0.0}
    if trial["layers"] != "all-linear":
        lora["keys"] = {f"self_attn.{name}" for name in trial["layers"]}
    linear_to_lora_layers(model, len(model.layers), lora)
    model.train()
    return model


def executorch_steps(folder: Path, trial: dict[str, Any]) -> Measurements:
    """Run the joint program with ExecuTorch's SGD, its only optimizer."""
    import torch
    from executorch.extension.training import _load_for_executorch_for_training, get_sgd_optimizer

    from device_runner.engines.torch_runtime import set_threads

    set_threads(trial["threads"])
    yield ()
    module = _load_for_executorch_for_training(str(folder / JOINT))
    batches = [torch.tensor(batch) for batch in rows_of(folder)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The parameters are known after a step.
        module.forward_backward("forward", (batches[0],))
        optimizer = get_sgd_optimizer(module.named_parameters(), LEARNING_RATE)
        for inputs in itertools.cycle(batches):
            begin = time.perf_counter()
            (loss,) = module.forward_backward("forward", (inputs,))
            optimizer.step(module.named_gradients())
            yield time.perf_counter() - begin, float(loss)


def export_joint(folder: Path, trial: dict[str, Any]) -> None:
    """Write the program of a loss and its gradient for PEFT's LoRA, in float32, for XNNPACK."""
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from peft import LoraConfig, get_peft_model
    from torch.export.experimental import _export_forward_backward
    from transformers import AutoModelForCausalLM

    from server_export.evidence.baselines.executorch_training import replace_full_like
    from server_export.evidence.baselines.fixed_length import fix_length
    from server_export.trace import readout

    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    fix_length(base)
    layers = trial["layers"]
    tuned = get_peft_model(
        base, LoraConfig(r=trial["rank"], lora_alpha=trial["alpha"], target_modules=layers)
    )
    positions = torch.arange(trial["tokens"]).unsqueeze(0)

    class Loss(torch.nn.Module):
        """Mean loss over all tokens but the first of each row."""

        def __init__(self) -> None:
            super().__init__()
            self.tuned = tuned.base_model.model
            self.register_buffer("positions", positions)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            """Return the loss f32 [] of tokens i64 [batch, length]."""
            outputs = self.tuned(input_ids=tokens, position_ids=self.positions, use_cache=False)
            return -readout.log_probabilities(outputs.logits[:, :-1], tokens[:, 1:]).mean()

    inputs = (torch.zeros((trial["batch"], trial["tokens"]), dtype=torch.int64),)
    program = Loss()
    with torch.no_grad():
        program(*inputs)  # the first call fixes the position tables
    joint = _export_forward_backward(torch.export.export(program, inputs))
    replace_full_like(joint)
    lowered = to_edge_transform_and_lower(joint, partitioner=[XnnpackPartitioner()]).to_executorch()
    (folder / JOINT).write_bytes(lowered.buffer)


def rows_of(folder: Path) -> list[list[list[int]]]:
    """Return the rows of each step, without the token after a row, which only qvac_steps.py trains on."""
    batches = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    return [[row[:-1] for row in batch] for batch in batches]


def main() -> None:
    """Serve a method, or export."""
    method, folder = sys.argv[1], Path(sys.argv[2])
    trial = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    if method == "executorch-export":
        export_joint(folder, trial)
    elif method.startswith("mlx"):
        serve(lambda: mlx_steps(method.removeprefix("mlx-"), folder, trial))
    elif method == "executorch":
        serve(lambda: executorch_steps(folder, trial))
    elif method.startswith("prge"):
        serve(lambda: prge_steps(method, folder, trial))
    else:
        dtype = {"peft-fp32": "float32", "peft-bf16": "bfloat16"}[method]
        sizes = [trial[name] for name in ("batch", "tokens", "threads", "rank", "layers")]
        batches, alpha = rows_of(folder), trial["alpha"]
        serve(lambda: peft_steps(folder, dtype, *sizes, batches=batches, alpha=alpha))


if __name__ == "__main__":
    main()
