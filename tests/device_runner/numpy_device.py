"""A device without an engine: bundles whose programs are numpy models, and functions that open them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from device_runner.engines.opening import OpenEngine
from prge.engine import Array, Call, Directions, FloatArray, GradFn
from prge.formats.bundle import ADAPTER, TOKENIZER, Bundle
from prge.formats.chain import BlockProgram, BlockSpec, Bounds, Chain, Interface
from prge.formats.signatures import BACKWARD, FORWARD, JVP
from tests.bundles import make_bundle
from tests.numpy_engine import NumpyEngine
from tests.prge.data.tiny_tokenizers import byte_level_backend, encoder_backend
from tests.templates import write_peft_folder

QUERIES = 4


class Killed(BaseException):
    """Simulates the end of the process."""


class Device:
    """Replaces the engine: opens numpy models, and ends the process after a number of calls.

    `has_jvp` and `has_backward` select the roles of the bundles. `grid` rounds outputs, but not derivatives,
    to its multiples, like int8 activations. `broken` replaces one derivative of every call.
    """

    def __init__(
        self, encoder: bool = False, has_jvp: bool = True, grid: float = 0.0, has_backward: bool = False
    ) -> None:
        self.backend = encoder_backend() if encoder else byte_level_backend()
        self.encoder = encoder
        self.has_jvp = has_jvp
        self.has_backward = has_backward
        self.grid = grid
        self.calls_left: int | None = None
        self.broken: float | None = None

    def count(self) -> None:
        """Count a call."""
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise Killed

    def open_engine(self, bundle: Bundle, role: str = FORWARD, **_: object) -> OpenEngine:
        """Replace device_runner.engines.opening.open_engine."""
        bundle.chain.check_role(role)
        blocks: Any = None  # no text is generated
        engine: Any = _Engine(self, role)
        assert engine.model == bundle.chain.model
        store: Any = SimpleNamespace(residual_bytes=None, trunk=None)
        return OpenEngine(engine, 1, "numpy", blocks, store)

    def replaces(self, monkeypatch: pytest.MonkeyPatch, *modules: object) -> None:
        """Make these modules open engines of this device."""
        for module in modules:
            monkeypatch.setattr(module, "open_engine", self.open_engine)

    def chain(self) -> Chain:
        """Return the model's chain, whose programs are only names."""
        model = _Engine(self, FORWARD).model
        state, targets = ("tokens",), ("hidden_states", "targets", "shift")
        roles = {
            FORWARD: Interface(("hidden_states", "lora_b.0"), ("hidden_states",)),
            JVP: Interface(
                ("hidden_states", "tangent_hidden_states", "lora_b.0", "u.0", "v.0"),
                ("hidden_states", "tangent_hidden_states"),
            ),
            BACKWARD: Interface(
                ("hidden_states", "grad_hidden_states", "lora_b.0"), ("grad_hidden_states", "grad_lora_b.0")
            ),
        }
        head = {
            FORWARD: Interface(targets, ("parts",)),
            JVP: Interface((*targets, "tangent_hidden_states"), ("parts", "tangent_parts")),
            BACKWARD: Interface((*targets, "grad_parts"), ("grad_hidden_states",)),
        }
        chosen = [FORWARD, *[JVP] * self.has_jvp, *[BACKWARD] * self.has_backward]
        programs = [BlockProgram("programs/0.pte", {FORWARD: Interface(state, ("hidden_states",))})]
        programs += [
            BlockProgram(f"programs/{number}.pte", {role: methods[role] for role in chosen})
            for number, methods in ((1, roles), (2, head))
        ]
        blocks = [
            BlockSpec(number, f"weights/{number}.ptd", (), (0,) if number == 1 else ())
            for number in (0, 1, 2)
        ]
        return Chain(
            readout=model.readout,
            pooling="mean",
            width=model.width,
            vocabulary_size=model.vocabulary_size,
            modules=model.modules,
            bounds=Bounds(copies=2, tokens=16),
            tables=(),
            programs=tuple(programs[:2] if self.encoder else programs),
            blocks=tuple(blocks[:2] if self.encoder else blocks),
        )

    def write_bundle(self, folder: Path, scheme: str = "fp32", chat_template: str = "") -> Path:
        """Write a bundle of this model."""
        (folder / TOKENIZER).mkdir(parents=True)
        self.backend.save(str(folder / TOKENIZER / "tokenizer.json"))
        if chat_template:
            (folder / TOKENIZER / "chat_template.jinja").write_text(chat_template)
        write_peft_folder(folder / ADAPTER, self.chain().modules)
        return make_bundle(
            folder,
            self.chain(),
            model={"name_or_path": "numpy"},
            quantization={"scheme": scheme},
            tokenizer={"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        )


class _Engine(NumpyEngine):
    """Engine of a device's model, with one role for steps."""

    def __init__(self, device: Device, role: str) -> None:
        super().__init__(
            vocabulary=device.backend.get_vocab_size(), sequence_length=16, encoder=device.encoder
        )
        self._device = device
        self._role = role

    def forward(self, call: Call) -> Array:
        self._device.count()
        return self._rounded(super().forward(call))

    def jvp(self, call: Call, directions: Directions) -> tuple[Array, Array]:
        assert self._role == JVP
        self._device.count()
        outputs, derivatives = super().jvp(call, directions)
        return self._rounded(outputs), self._derived(derivatives)

    def vjp(self, call: Call, grad_fn: GradFn) -> tuple[Array, Array]:
        assert self._role == BACKWARD
        self._device.count()
        outputs, gradient = super().vjp(call, lambda outputs: grad_fn(self._rounded(outputs)))
        return self._rounded(outputs), self._derived(gradient)

    def _rounded(self, outputs: Array) -> FloatArray:
        grid = self._device.grid
        return (np.round(outputs / grid) * grid if grid else outputs).astype(np.float32)

    def _derived(self, derivatives: Array) -> FloatArray:
        result = derivatives.astype(np.float32)
        if self._device.broken is not None:
            result.ravel()[-1] = self._device.broken
        return result


def write_films(folder: Path) -> None:
    """Write labelled texts `train.jsonl` and `dev.jsonl`, and their task `task.yaml`."""
    random = np.random.default_rng(0)
    words = ["good", "bad", "great", "terrible", "film", "dog", "cat", "town"]
    indices = random.integers(0, 8, (60, 3)).tolist()
    # The middle word determines the label in nine rows of ten.
    labels = [int(middle % 2 != (random.random() < 0.1)) for _, middle, _ in indices]
    rows = [
        {"text": " ".join(words[word] for word in row), "label": label}
        for row, label in zip(indices, labels, strict=True)
    ]
    for name, part in (("train", rows[:40]), ("dev", rows[40:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "task.yaml").write_text(
        'name: films\ntemplate: "{text}"\nlabel_words: {0: " No", 1: " Yes"}\ncolumns: {label: label}\n'
        "metric: accuracy\n"
    )
