"""Settings of `prge publish`. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prge.errors import ConfigError
from prge.verbs.bounds import bound_problems
from prge.verbs.inputs import AdapterInput, BundleInput
from prge.verbs.outputs import OutputFolder

Weights = Literal["trained", "original"]


@dataclass(frozen=True)
class PublishConfig:
    """Give a trained adapter to PEFT or llama.cpp, merge it, or make a program for ExecuTorch."""

    source: AdapterInput
    """Folder of a run or of `prge tune`, checkpoint or PEFT folder with the trained adapter."""

    out: OutputFolder
    """Folder to write."""

    bundle: BundleInput | None = None
    """Bundle that the adapter was trained with; without it the one that the run's config.yaml names."""

    model: str | None = None
    """Folder, GGUF file or hub id of the base model; without it the one that the bundle records, if it is
    still there."""

    revision: str | None = None
    """Revision of a hub model; without it the one that the bundle names."""

    format: Literal["peft", "merged", "program", "llm", "gguf"] = "peft"
    """peft: an adapter for PEFT; gguf: an adapter for llama.cpp; merged: a Hugging Face model; program: an
    encoder as an ExecuTorch program; llm: a decoder as one, for ExecuTorch's LLM runner and its apps."""

    weights: Weights | None = None
    """merged: the frozen weights that the adapter is merged into. trained: the values that the bundle's
    quantization leaves of them, as floats, which training and scores have seen; original: those of the base
    model. Default: trained."""

    sequence_length: int | None = None
    """program, llm: tokens that it takes, an llm's answer among them; without it the bundle's length, for an
    llm at least 512 if the model has as many positions."""

    quantize: str | None = None
    """program, llm: quantization of the frozen weights; without it the bundle's."""

    overwrite: bool = False
    """Replace the folder if it was published before; with --push also commit to a repository that exists."""

    push: str | None = None
    """OWNER/NAME on Hugging Face's hub: upload the folder there too, with the token of HF_TOKEN. A repository
    is made if there is none, private unless --public is given."""

    public: bool = False
    """With --push: let all read the repository."""

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
            raise ConfigError("these settings can't be used:", problems, code="settings-unusable")
