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

from prge.errors import DataError, shown
from prge.files.bundle import Bundle
from prge.files.bundle import open_bundle as _open_bundle
from prge.files.run_folder import FINAL, SUMMARY
from prge.host.packages import needing
from prge.verbs.kinds import plain_value
from prge.verbs.settings import path_of, settings_of

if TYPE_CHECKING:
    from prge.text.loop import Answer, Generator
    from prge.text.prompts import Prompt, Prompts


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
        self._speaking = importlib.import_module("device_runner.session.speaking")
        flags = settings_of(self._speaking.SpeakingFlags, engine, "load()", "prge generate")
        tokenizer = importlib.import_module("prge.rows.tokenization.tokenizer").bundle_tokenizer(bundle)
        self._prompts: Prompts = importlib.import_module("prge.text.prompts").Prompts(tokenizer)
        _ = self._prompts.chat  # its template is read in a child that is forked before there is an engine
        self._adapter = self._speaking.read_adapter(bundle, adapter or self._speaking.BUNDLE)[1]
        self._generator: Generator = self._speaking.open_generator(bundle, tokenizer, flags, 1)

    def generate(self, prompt: str | Sequence[Mapping[str, Any]] | Sequence[int], **settings: Any) -> Answer:
        """What the model writes after a text or token ids, or answers to messages in its chat template.

        Args:
            prompt: a text; messages with role and content; or token ids, which are taken as they are.
            settings: max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, overflow.

        Raises:
            PrgeError: settings or the prompt can't be used.
        """
        from prge.text.loop import Request

        flags = settings_of(self._speaking.SpeakingFlags, settings, "generate()", "prge generate")
        request = Request(self._asked(plain_value(prompt)), self._adapter, flags.generation())
        return self._generator.generate([request])[0]

    def _asked(self, prompt: Any) -> Prompt:
        from prge.rows.tokenization.chat import check_messages
        from prge.rows.tokenization.inputs import checked_json
        from prge.text.prompts import Prompt

        if isinstance(prompt, str):
            return self._prompts.of_text(prompt)
        if not isinstance(prompt, list | tuple):
            problem = f"it is {shown(prompt)}, must be a text, messages or token ids"
            raise DataError("the prompt can't be used", [problem], code="prompt-unusable")
        if not prompt or not isinstance(prompt[0], dict):
            return Prompt(tuple(prompt))
        try:
            messages = check_messages(checked_json(prompt, "the prompt"), answered=False)
        except ValueError as error:
            raise DataError("the prompt can't be used", [str(error)], code="messages-malformed") from None
        return self._prompts.of_messages(messages)


def export(**settings: Any) -> Bundle:
    """Turn a model into a bundle, as `prge export` does; returns it, opened."""
    with needing("export"):
        config = importlib.import_module("server_export.settings").ExportConfig
        verb = importlib.import_module("server_export.export")
        return _open_bundle(verb.export(settings_of(config, settings, "export()", "prge export")))


def open_bundle(folder: Path | str) -> Bundle:
    """Open a bundle that `prge export` or `prge tune` wrote; raises BundleError."""
    return _open_bundle(path_of(folder, "open_bundle(): folder"))


def tune(**settings: Any) -> Tuned:
    """Tune a model on rows, as `prge tune` does: export, choose, train, score, publish."""
    with needing("export"):
        kind = importlib.import_module("server_export.tune.settings").TuneSettings
        given = settings_of(kind, settings, "tune()", "prge tune")
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
    with needing("device"):
        kind = importlib.import_module("device_runner.session.settings").RunSettings
        given = settings_of(kind, settings, "run()", "prge run")
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
    with needing("device"):
        verb = importlib.import_module("device_runner.evaluate")
        found: dict[str, Any] = verb.run(
            settings_of(verb.EvaluateSettings, settings, "evaluate()", "prge eval")
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
    with needing("device"):
        speaking = importlib.import_module("device_runner.session.speaking")
        folder = path_of(bundle, "load(): bundle")
        name = None if adapter is None else str(path_of(adapter, "load(): adapter"))
        return Model(speaking.open_speaking(folder), name, engine)
