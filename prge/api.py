"""What a notebook wants of prge: the verbs as functions, and their results as objects.

Keyword arguments are the settings of the verb, as its `--help` lists them; paths may be texts. Bad input
raises PrgeError with what the verb would say. `prge/__init__.pyi` tells type checkers and editors the names.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prge.cli.field_types import to_python_value
from prge.cli.settings import parse_path, settings_from_mapping
from prge.errors import DataError, shown
from prge.formats.bundle import Bundle
from prge.formats.bundle import open_bundle as _open_bundle
from prge.formats.run_folder import FINAL, SUMMARY
from prge.system.packages import require_extra

if TYPE_CHECKING:
    from prge.generation.loop import Completion, Generator
    from prge.generation.prompts import Prompt, Prompts


@dataclass(frozen=True)
class Run:
    """A run that has ended: its folder, the adapter of its best step, and its figures."""

    folder: Path
    adapter: Path
    """PEFT folder."""
    status: str
    """completed, or stopped early."""
    step: int
    """Of the adapter."""
    before: dict[str, Any] | None
    """Scores of development rows before the first step, as `prge eval` names them; None without such rows."""
    best: dict[str, Any] | None
    """Those of the adapter."""
    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Tuned:
    """A tuning that has ended: what it made in its folder, what it decided, and scores of its rows."""

    folder: Path
    bundle: Path
    adapter: Path
    """PEFT folder, for `peft.PeftModel.from_pretrained`."""
    before: dict[str, Any] | None
    """Scores of the frozen model on test rows, or on development rows without these."""
    after: dict[str, Any] | None
    chosen: dict[str, Any]
    """Decisions by name."""
    seconds: float


class Model:
    """A bundle's model with an adapter, in an engine that stays open."""

    def __init__(self, bundle: Bundle, adapter: str | None, engine: dict[str, Any]) -> None:
        self._speaking = importlib.import_module("device_runner.session.generation")
        flags = settings_from_mapping(self._speaking.SpeakingFlags, engine, "load()", "prge generate")
        tokenizer = importlib.import_module("prge.data.tokenization.tokenizer").bundle_tokenizer(bundle)
        self._prompts: Prompts = importlib.import_module("prge.generation.prompts").Prompts(tokenizer)
        _ = self._prompts.chat  # its template is read in a child that is forked before there is an engine
        self._adapter = self._speaking.read_adapter(bundle, adapter or self._speaking.BUNDLE)[1]
        self._generator: Generator = self._speaking.open_generator(bundle, tokenizer, flags, 1)

    def generate(
        self, prompt: str | Sequence[Mapping[str, Any]] | Sequence[int], **settings: Any
    ) -> Completion:
        """What the model writes after a text or token ids, or answers to messages in its chat template.

        Args:
            prompt: a text; messages with role and content; or token ids, which are taken as they are.
            settings: max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, overflow.

        Raises:
            PrgeError: settings or the prompt can't be used.
        """
        from prge.generation.loop import Request

        flags = settings_from_mapping(self._speaking.SpeakingFlags, settings, "generate()", "prge generate")
        request = Request(self._asked(to_python_value(prompt)), self._adapter, flags.generation())
        return self._generator.generate([request])[0]

    def _asked(self, prompt: Any) -> Prompt:
        from prge.data.tokenization.chat import check_messages
        from prge.data.tokenization.inputs import to_json_value
        from prge.generation.prompts import Prompt

        if isinstance(prompt, str):
            return self._prompts.encode_text(prompt)
        if not isinstance(prompt, list | tuple):
            problem = f"it is {shown(prompt)}, must be a text, messages or token ids"
            raise DataError("the prompt can't be used", [problem], code="prompt-unusable")
        if not prompt or not isinstance(prompt[0], dict):
            return Prompt(tuple(prompt))
        try:
            messages = check_messages(to_json_value(prompt, "the prompt"), answered=False)
        except ValueError as error:
            raise DataError("the prompt can't be used", [str(error)], code="messages-malformed") from None
        return self._prompts.encode_messages(messages)


def export(**settings: Any) -> Bundle:
    """Turn a model into a bundle, as `prge export` does; returns it, opened."""
    with require_extra("export"):
        config = importlib.import_module("server_export.settings").ExportConfig
        verb = importlib.import_module("server_export.export")
        return _open_bundle(verb.export(settings_from_mapping(config, settings, "export()", "prge export")))


def open_bundle(folder: Path | str) -> Bundle:
    """Open a bundle that `prge export` or `prge tune` wrote; raises BundleError."""
    return _open_bundle(parse_path(folder, "open_bundle(): folder"))


def tune(**settings: Any) -> Tuned:
    """Tune a model on rows, as `prge tune` does: export, choose, train, score, publish."""
    with require_extra("export"):
        kind = importlib.import_module("server_export.tune.settings").TuneSettings
        given = settings_from_mapping(kind, settings, "tune()", "prge tune")
        result = importlib.import_module("server_export.tune.stages").tune(given)
    return Tuned(
        given.out,
        Path(result["bundle"]),
        given.out / "adapter",
        result["score_before"],
        result["score_after"],
        {name: decision["value"] for name, decision in result["chosen"].items()},
        result["seconds"],
    )


def run(**settings: Any) -> Run:
    """Fine-tune the adapter of a bundle, as `prge run` does; `resume` goes on with a run."""
    with require_extra("device"):
        kind = importlib.import_module("device_runner.session.settings").RunSettings
        given = settings_from_mapping(kind, settings, "run()", "prge run")
        importlib.import_module("device_runner.run").run(given)
    summary = json.loads((given.out / SUMMARY).read_text(encoding="utf-8"))
    train = summary["train"]
    return Run(
        given.out,
        given.out / FINAL,
        summary["run"]["status"],
        train["final_step"],
        train["before"],
        train["best"],
        train["seconds"],
        train["memory"]["peak_bytes"],
    )


def evaluate(**settings: Any) -> dict[str, Any]:
    """Score an adapter on rows, as `prge eval` does; returns the figures by name."""
    with require_extra("device"):
        verb = importlib.import_module("device_runner.evaluate")
        found: dict[str, Any] = verb.run(
            settings_from_mapping(verb.EvaluateSettings, settings, "evaluate()", "prge eval")
        )
    return found


def load(bundle: Path | str, adapter: Path | str | None = None, **engine: Any) -> Model:
    """Open a bundle's model to write text.

    Args:
        bundle: folder of a bundle.
        adapter: run, checkpoint or PEFT folder, or `base` for the model alone; the bundle's own without one.
        engine: engine, threads, memory, context, as for `prge generate`.

    Raises:
        PrgeError: the bundle or the adapter can't be used.
    """
    with require_extra("device"):
        speaking = importlib.import_module("device_runner.session.generation")
        folder = parse_path(bundle, "load(): bundle")
        name = None if adapter is None else str(parse_path(adapter, "load(): adapter"))
        return Model(speaking.open_speaking(folder), name, engine)
