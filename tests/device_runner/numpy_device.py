"""A device without an engine: bundles whose programs are models in numpy, and what loads these."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import pytest

from device_runner.engines.programs import Programs
from device_runner.engines.trunk_cache import TrunkCache
from prge.bundle import ADAPTER, PROGRAM, TOKENIZER, Bundle, file_sha256
from prge.contract import FORMAT
from prge.engine import Array
from tests.bundles import write_manifest
from tests.numpy_engine import NumpyEngine, NumpyTangentEngine
from tests.prge.rows.tiny_tokenizers import byte_level_backend, encoder_backend
from tests.templates import write_template

QUERIES, BATCH = 3, 4


class Killed(BaseException):
    """Stands for the end of the process."""


class Device:
    """Stands for the engine: loads models in numpy, and ends the process after some calls.

    `scored` is how many rows the program for scoring takes; with `copies` there is only a P-RGE program.
    `grid` rounds what they answer to its multiples, derivatives aside, as int8 activations would.
    """

    def __init__(
        self, encoder: bool = False, copies: int | None = None, scored: int = 7, grid: float = 0.0
    ) -> None:
        backend = encoder_backend() if encoder else byte_level_backend()
        self.backend = backend
        self.vocabulary = backend.get_vocab_size()
        self.encoder = encoder
        self.copies = copies
        self.scored = scored
        self.grid = grid
        self.loads: list[str] = []
        self.calls_left: int | None = None

    def model(self, batch_size: int, copies: int = 1) -> NumpyEngine:
        """The same weights for any number of rows."""
        size = {"vocabulary": self.vocabulary, "sequence_length": 16, "positions": 8}
        return NumpyEngine(copies, batch_size, encoder=self.encoder, **size)

    def program(self, method: str) -> NumpyEngine | NumpyTangentEngine:
        """The model as a method of the bundle: a P-RGE program's only one, or a tangent program's two."""
        if self.copies is not None:
            return self.model(BATCH, self.copies)
        return self.model(self.scored) if method == "score" else self.model(BATCH).tangent(QUERIES)

    def load(self, method: str) -> NumpyEngine | NumpyTangentEngine:
        """The loader of a bundle's programs."""
        self.loads.append(method)
        engine = self.program(method)
        forward = engine.forward

        def counted(inputs: Mapping[str, Array]) -> dict[str, Array]:
            if self.calls_left is not None:
                self.calls_left -= 1
                if self.calls_left < 0:
                    raise Killed
            return {name: self._rounded(name, array) for name, array in forward(inputs).items()}

        engine.forward = counted  # type: ignore[method-assign]
        return engine

    def _rounded(self, name: str, array: Array) -> Array:
        if self.grid and not name.startswith("d"):
            array = np.round(array / self.grid) * self.grid
        return array.astype(np.float32)

    def open_engines(
        self,
        bundle: Bundle,
        threads: int | None = None,
        keep: bool = False,
        engine: str = "auto",
        cache: TrunkCache | None = None,
        lengths: Collection[int] | None = None,
        only_scoring: bool = False,
        memory: int | None = None,
    ) -> Programs:
        """Stands for device_runner.engines.programs.open_engines."""
        return Programs(bundle, self.load, keep)

    def replaces(self, monkeypatch: pytest.MonkeyPatch, *modules: object) -> None:
        """Put this device where these modules open programs."""
        for module in modules:
            monkeypatch.setattr(module, "open_engines", self.open_engines)

    def write_bundle(self, folder: Path, scheme: str = "fp32") -> Path:
        """A bundle of this model; its program is only a name."""
        step = self.program("forward").contract
        write_template(folder / ADAPTER, step.modules)
        (folder / TOKENIZER).mkdir()
        self.backend.save(str(folder / TOKENIZER / "tokenizer.json"))
        (folder / PROGRAM).write_bytes(b"numpy")
        files = [path for path in folder.rglob("*") if path.is_file()]
        manifest = {
            "format": FORMAT,
            "contract": step.to_json(),
            "score": None if self.copies is not None else self.program("score").contract.to_json(),
            "queries": QUERIES,
            "model": {"name_or_path": "numpy"},
            "quantization": {"scheme": scheme},
            "tokenizer": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
            "files": {
                str(path.relative_to(folder)): {"sha256": file_sha256(path), "bytes": path.stat().st_size}
                for path in files
            },
        }
        write_manifest(folder, manifest)
        return folder


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
