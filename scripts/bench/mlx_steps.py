"""Steps of mlx-lm's LoRA on MLX's processor backend; runs in an environment of its own, see peers.py.

    python mlx_steps.py 4bit|bf16|fp32 FOLDER

Every line of the standard input is answered by seconds and loss of a step on FOLDER's `model`, with the sizes
of its trial.json. The first one asks for nothing. The step is that of mlx_lm.tuner.trainer: compiled, AdamW.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def steps(kind: str, folder: Path) -> Iterator[tuple[float, ...]]:
    """Seconds and loss of each."""
    import mlx.core as mx
    from mlx import nn, optimizers
    from mlx_lm.tuner.trainer import default_loss

    mx.set_default_device(mx.cpu)
    trial = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    yield ()
    model = _model(kind, folder / "model", trial)
    optimizer = optimizers.AdamW(learning_rate=1e-4)
    mx.random.seed(0)
    batch = mx.random.randint(0, model.args.vocab_size, (trial["batch"], trial["tokens"]))
    lengths = mx.array([[0, trial["tokens"]]] * trial["batch"])
    slopes = nn.value_and_grad(model, default_loss)
    state = [model.state, optimizer.state]

    def step() -> Any:
        (loss, _), gradient = slopes(model, batch, lengths)
        optimizer.update(model, gradient)
        return loss

    compiled = mx.compile(step, inputs=state, outputs=state)
    while True:
        begin = time.perf_counter()
        loss = compiled()
        mx.eval(state, loss)
        yield time.perf_counter() - begin, loss.item()


def _model(kind: str, folder: Path, trial: dict[str, Any]) -> Any:
    """The model with LoRA of the trial's rank on the trial's layers."""
    import mlx.core as mx
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model, quantize_model

    model, config = load_model(folder)
    # Products of 4 bits with bfloat16 take ten times as long on an x86 processor as those with float32.
    model.set_dtype(mx.bfloat16 if kind == "bf16" else mx.float32)
    if kind == "4bit":
        model, _ = quantize_model(model, config, 64, 4)
    mx.eval(model.parameters())
    model.freeze()
    lora = {"rank": trial["rank"], "scale": 2.0, "dropout": 0.0}
    if trial["layers"] != "all-linear":
        lora["keys"] = {f"self_attn.{name}" for name in trial["layers"]}
    linear_to_lora_layers(model, len(model.layers), lora)
    model.train()
    return model


def main() -> None:
    """Answer every line of the standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    found = steps(sys.argv[1], Path(sys.argv[2]))
    for _ in sys.stdin:
        print(*next(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
