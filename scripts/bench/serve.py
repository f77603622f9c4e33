"""A process that takes steps of one method when it is asked: what scripts/bench/exact.py compares.

    python scripts/bench/serve.py METHOD FOLDER ROWS TOKENS THREADS QUERIES

FOLDER holds a bundle and the model that it is from. Every line of the standard input asks for a step; its
seconds and loss are the answer. Methods on the engine import what a device has, and no more.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ENGINE: dict[str, Any] = {
    "blocks": "exact",
    "least": "exact",
    "tangent": "tangent",
    "prge": "antithetic",
}
ADAPTED, RANK = ("q_proj", "v_proj"), 8


class Sizes(NamedTuple):
    """Of a step."""

    rows: int
    tokens: int
    threads: int
    queries: int


def engine_step(method: str, bundle: Path, sizes: Sizes) -> Callable[[], float]:
    """A step of a bundle; gives its loss."""
    from timing import least_memory, timed_step

    memory = least_memory(bundle) if method == "least" else None
    step = timed_step(bundle, ENGINE[method], *sizes, memory=memory)
    return lambda: step()[1].loss


def pytorch_step(method: str, model: Path, sizes: Sizes) -> Callable[[], float]:
    """A step of PyTorch and PEFT; gives its loss."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(sizes.threads)
    dtype = torch.bfloat16 if "bf16" in method else torch.float32
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    tuned = get_peft_model(base, LoraConfig(r=RANK, target_modules=[*ADAPTED]))
    tuned.train()
    if "checkpointing" in method:
        tuned.enable_input_require_grads()
        tuned.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(parameter for parameter in tuned.parameters() if parameter.requires_grad)
    torch.manual_seed(0)
    tokens = torch.randint(0, base.config.vocab_size, (sizes.rows, sizes.tokens))

    def step() -> float:
        loss = tuned(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return step


def main() -> None:
    """Take a step for every line of the standard input."""
    method, folder, *sizes = sys.argv[1:]
    make, name = (engine_step, "bundle") if method in ENGINE else (pytorch_step, "model")
    step = make(method, Path(folder, name), Sizes(*map(int, sizes)))
    for _ in sys.stdin:
        begin = time.perf_counter()
        loss = step()
        print(time.perf_counter() - begin, loss, flush=True)


if __name__ == "__main__":
    main()
