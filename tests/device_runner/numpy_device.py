"""A device without an engine: bundles whose programs are models in numpy, and what loads these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_runner.engines.opening import Engines
from prge.contract import Contract
from prge.engine import Array, Engine, Slope
from prge.files.bundle import ADAPTER, TOKENIZER, Bundle
from prge.files.chain import Block, Bounds, Chain, Interface, Kind
from prge.files.signatures import BACK, STACK, TANGENT
from tests.bundles import make_bundle
from tests.numpy_engine import NumpyEngine, NumpyExactEngine, NumpyTangentEngine
from tests.prge.rows.tiny_tokenizers import byte_level_backend, encoder_backend
from tests.templates import write_template

QUERIES, BATCH = 4, 4


class Killed(BaseException):
    """Stands for the end of the process."""


class Device:
    """Stands for the engine: opens models in numpy, and ends the process after some calls.

    `has_tangents` and `has_back` say whether its bundles have these roles. `grid` rounds what models answer
    to its multiples, derivatives aside, as int8 activations would. `broken` takes the place of one derivative
    of every call.
    """

    def __init__(
        self, encoder: bool = False, has_tangents: bool = True, grid: float = 0.0, has_back: bool = False
    ) -> None:
        backend = encoder_backend() if encoder else byte_level_backend()
        self.backend = backend
        self.encoder = encoder
        self.has_tangents = has_tangents
        self.has_back = has_back
        self.grid = grid
        self.calls_left: int | None = None
        self.broken: float | None = None

    def model(self, batch_size: int, copies: int = 1) -> NumpyEngine:
        """The same weights for any number of rows."""
        size = {"vocabulary": self.backend.get_vocab_size(), "sequence_length": 16, "positions": 15}
        return NumpyEngine(copies, batch_size, encoder=self.encoder, **size)

    def engine(self, contract: Contract) -> Engine:
        """The model for the calls of a contract."""
        model = self.model(contract.batch_size, contract.copies)
        engine: NumpyEngine | NumpyTangentEngine | NumpyExactEngine = model
        if contract.is_tangent:
            engine = model.tangent(contract.queries)
        elif contract.is_exact:
            engine = model.exact()
        assert engine.contract.inputs == contract.inputs
        if isinstance(engine, NumpyExactEngine):
            gradient = engine.gradient

            def back(inputs: Mapping[str, Array], slope: Slope) -> tuple[Array, dict[str, Array]]:
                self._count()
                answers, gradients = gradient(inputs, lambda answers: slope(self._rounded(answers)))
                return self._rounded(answers), self._broken(gradients)

            engine.gradient = back  # type: ignore[method-assign]
            return engine
        forward = engine.forward

        def counted(inputs: Mapping[str, Array]) -> dict[str, Array]:
            self._count()
            first, *more = forward(inputs).items()
            answers = {first[0]: self._rounded(first[1])}
            return answers | self._broken(dict(more))

        engine.forward = counted  # type: ignore[method-assign]
        return engine  # type: ignore[return-value]

    def _count(self) -> None:
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise Killed

    def _broken(self, derivatives: Mapping[str, Array]) -> dict[str, Array]:
        found = {name: array.astype(np.float32) for name, array in derivatives.items()}
        if self.broken is not None and found:
            found[list(found)[-1]].ravel()[-1] = self.broken
        return found

    def _rounded(self, array: Array) -> Array:
        return (np.round(array / self.grid) * self.grid if self.grid else array).astype(np.float32)

    def open_engines(
        self,
        bundle: Bundle,
        contract: Contract | None = None,
        threads: int | None = None,
        engine: str = "auto",
        memory: int | None = None,
        scoring: Contract | None = None,
        *_: object,
        **__: object,
    ) -> Engines:
        """Stands for device_runner.engines.opening.open_engines."""
        blocks: Any = None  # nobody speaks
        scoring = scoring or bundle.chain.scoring
        return Engines(self.engine(contract or scoring), self.engine(scoring), 1, "numpy", blocks)

    def replaces(self, monkeypatch: pytest.MonkeyPatch, *modules: object) -> None:
        """Put this device where these modules open engines."""
        for module in modules:
            monkeypatch.setattr(module, "open_engines", self.open_engines)

    def chain(self) -> Chain:
        """The model as blocks whose programs are only names."""
        contract = self.model(BATCH).contract
        state, targets = ("tokens",), ("state", "targets", "shift")
        roles = {
            STACK: Interface(("state", "lora_b.0"), ("state",)),
            TANGENT: Interface(("state", "d_state", "lora_b.0", "u.0", "v.0"), ("state", "d_state")),
            BACK: Interface(("state", "slope", "lora_b.0"), ("slope", "gradient.0")),
        }
        head = {
            STACK: Interface(targets, ("parts",)),
            TANGENT: Interface((*targets, "d_state"), ("parts", "d_parts")),
            BACK: Interface((*targets, "slope"), ("slope",)),
        }
        chosen = [STACK, *[TANGENT] * self.has_tangents, *[BACK] * self.has_back]
        kinds = [Kind("programs/0.pte", {STACK: Interface(state, ("state",))})]
        kinds += [
            Kind(f"programs/{number}.pte", {role: methods[role] for role in chosen})
            for number, methods in ((1, roles), (2, head))
        ]
        blocks = [
            Block(number, f"weights/{number}.ptd", (), (0,) if number == 1 else ()) for number in (0, 1, 2)
        ]
        return Chain(
            readout=contract.readout,
            pooling="mean",
            width=max(contract.width, 1),
            vocabulary_size=contract.vocabulary_size,
            modules=contract.modules,
            bounds=Bounds(copies=2, tokens=16),
            tables=(),
            kinds=tuple(kinds[:2] if self.encoder else kinds),
            blocks=tuple(blocks[:2] if self.encoder else blocks),
        )

    def write_bundle(self, folder: Path, scheme: str = "fp32", chat_template: str = "") -> Path:
        """A bundle of this model."""
        (folder / TOKENIZER).mkdir(parents=True)
        self.backend.save(str(folder / TOKENIZER / "tokenizer.json"))
        if chat_template:
            (folder / TOKENIZER / "chat_template.jinja").write_text(chat_template)
        write_template(folder / ADAPTER, self.chain().modules)
        return make_bundle(
            folder,
            self.chain(),
            model={"name_or_path": "numpy"},
            quantization={"scheme": scheme},
            tokenizer={"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        )


def write_films(folder: Path) -> None:
    """Write `train.jsonl` and `dev.jsonl`, whose texts have labels, and the task of them, `task.yaml`."""
    random = np.random.default_rng(0)
    words = ["good", "bad", "great", "terrible", "film", "dog", "cat", "town"]
    drawn = random.integers(0, 8, (60, 3)).tolist()
    # The middle word tells the label, in nine rows of ten.
    labels = [int(middle % 2 != (random.random() < 0.1)) for _, middle, _ in drawn]
    rows = [
        {"text": " ".join(words[word] for word in row), "label": label}
        for row, label in zip(drawn, labels, strict=True)
    ]
    for name, part in (("train", rows[:40]), ("dev", rows[40:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "task.yaml").write_text(
        'name: films\ntemplate: "{text}"\nlabel_words: {0: " No", 1: " Yes"}\ncolumns: {label: label}\n'
        "metric: accuracy\n"
    )
