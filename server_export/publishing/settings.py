"""Settings of `prge publish`. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from prge.cli.bounds import bound_problems
from prge.cli.inputs import AdapterInput, BundleInput
from prge.cli.outputs import OutputFolder
from prge.errors import ConfigError

Weights = Literal["trained", "original"]


@dataclass(frozen=True)
class PublishConfig:
    """Publish a trained adapter for PEFT or llama.cpp, as a merged model, or as a program for ExecuTorch."""

    EXAMPLE: ClassVar = "run --out published --format merged"

    source: AdapterInput
    """Folder of a run or of `prge tune`, checkpoint or PEFT folder with the trained adapter."""

    out: OutputFolder
    """Folder to write."""

    bundle: BundleInput | None = None
    """Bundle that the adapter was trained with; default: the bundle that the run's config.yaml names."""

    model: str | None = None
    """Folder, GGUF file or hub id of the base model; default: the model that the bundle records, if it still
    exists."""

    revision: str | None = None
    """Revision of a hub model; default: the revision that the bundle records."""

    format: Literal["peft", "merged", "program", "llm", "gguf"] = "peft"
    """peft: an adapter for PEFT; gguf: an adapter for llama.cpp; merged: a Hugging Face model; program: an
    encoder as an ExecuTorch program; llm: a decoder as a program for ExecuTorch's LLM runner and its apps."""

    weights: Weights | None = None
    """merged: the frozen weights that the adapter is merged into. trained: the bundle's quantized weights as
    floats, which the adapter was trained and scored with; original: the weights of the base model. Default:
    trained."""

    sequence_length: int | None = None
    """program, llm: most tokens of a row, or of prompt and completion together; default: the bundle's length,
    and for llm at least 512 if the model has so many positions."""

    quantize: str | None = None
    """program, llm: quantization of the frozen weights; default: the bundle's."""

    overwrite: bool = False
    """Replace a folder that was published before; with --push, also commit to an existing repository."""

    push: str | None = None
    """OWNER/NAME on Hugging Face's hub: also upload the folder, with the token of HF_TOKEN. A repository is
    created if there is none, private unless you give --public."""

    public: bool = False
    """With --push: let everybody read the repository."""

    def __post_init__(self) -> None:
        problems = bound_problems(self)
        if self.format not in ("program", "llm"):
            problems += [
                f"{name} is for the formats program and llm, but format is {self.format}"
                for name in ("sequence_length", "quantize")
                if getattr(self, name) is not None
            ]
        if self.weights is not None and self.format != "merged":
            problems.append(f"weights is for the format merged, but format is {self.format}")
        if self.public and self.push is None:
            problems.append("--public belongs to --push")
        if problems:
            raise ConfigError("These settings can't be used:", problems, code="settings-unusable")
