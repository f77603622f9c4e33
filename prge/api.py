"""The Python API: verbs as functions that return objects, for notebooks and scripts.

Keyword arguments are the settings of a verb, as its `--help` lists them; paths may be strings. Bad input
raises PrgeError with the message that the verb would print. `prge/__init__.pyi` has the signatures for type
checkers and editors.
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
from prge.errors import DataError, format_value
from prge.formats.bundle import Bundle
from prge.formats.bundle import open_bundle as _open_bundle
from prge.formats.run_folder import FINAL, SUMMARY
from prge.system.packages import require_extra

if TYPE_CHECKING:
    from prge.generation.loop import Completion, Generator
    from prge.generation.prompts import Prompt, Prompts


@dataclass(frozen=True)
class Run:
    """The result of a finished run: its folder, the adapter of its best step, and its metrics."""

    folder: Path
    """Run folder."""
    adapter: Path
    """PEFT folder of the adapter of the best step."""
    status: str
    """`completed`, or `stopped early`."""
    step: int
    """Number of steps after which the adapter was saved."""
    before: dict[str, Any] | None
    """Metrics on development rows before the first step, by their names in `prge eval`; None without such
    rows."""
    best: dict[str, Any] | None
    """Metrics of the adapter on development rows."""
    seconds: float
    """Training time."""
    peak_bytes: int | None
    """Peak memory of the training process; None if the system doesn't report it."""


@dataclass(frozen=True)
class Tuned:
    """The result of a finished tuning: its files, the settings that it chose, and its metrics."""

    folder: Path
    """Folder of the tuning."""
    bundle: Path
    """Bundle that it exported or was given."""
    adapter: Path
    """PEFT folder of the trained adapter, for `peft.PeftModel.from_pretrained`."""
    before: dict[str, Any] | None
    """Metrics of the frozen model on test rows, or on development rows if there are no test rows."""
    after: dict[str, Any] | None
    """Metrics of the trained adapter on the same rows."""
    chosen: dict[str, Any]
    """Settings that the tuning chose, by name."""
    seconds: float
    """Duration of the tuning."""


class Model:
    """A bundle's model with an adapter, ready to generate text; see `load`."""

    def __init__(self, bundle: Bundle, adapter: str | None, engine: dict[str, Any]) -> None:
        self._generation = importlib.import_module("device_runner.session.generation")
        flags = settings_from_mapping(self._generation.GenerationFlags, engine, "load()", "prge generate")
        tokenizer = importlib.import_module("prge.data.tokenization.tokenizer").load_bundle_tokenizer(bundle)
        self._prompts: Prompts = importlib.import_module("prge.generation.prompts").Prompts(tokenizer)
        # The chat template runs in a child process, which has to be forked before an engine is loaded.
        _ = self._prompts.chat
        self._adapter = self._generation.read_adapter(bundle, adapter or self._generation.BUNDLE)[1]
        self._generator: Generator = self._generation.open_generator(bundle, tokenizer, flags, 1)

    def generate(
        self, prompt: str | Sequence[Mapping[str, Any]] | Sequence[int], **settings: Any
    ) -> Completion:
        """Generate a completion of a prompt.

        Args:
            prompt: a text; messages with `role` and `content`, which the model's chat template formats; or
                token ids, which are used unchanged.
            settings: max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, overflow;
                as for `prge generate`.

        Returns:
            The completion, with its text, its tokens and the reason why it ended.

        Raises:
            PrgeError: a setting or the prompt is invalid.
        """
        from prge.generation.loop import Request

        flags = settings_from_mapping(
            self._generation.GenerationFlags, settings, "generate()", "prge generate"
        )
        request = Request(self._encode(to_python_value(prompt)), self._adapter, flags.generation())
        return self._generator.generate([request])[0]

    def _encode(self, prompt: Any) -> Prompt:
        from prge.data.tokenization.chat import check_messages
        from prge.data.tokenization.inputs import to_json_value
        from prge.generation.prompts import Prompt

        if isinstance(prompt, str):
            return self._prompts.encode_text(prompt)
        if not isinstance(prompt, list | tuple):
            problem = f"it is {format_value(prompt)}, must be a text, messages or token ids"
            raise DataError("The prompt can't be used:", [problem], code="prompt-unusable")
        if not prompt or not isinstance(prompt[0], dict):
            return Prompt(tuple(prompt))
        try:
            messages = check_messages(to_json_value(prompt, "the prompt"), answered=False)
        except ValueError as error:
            raise DataError("The prompt can't be used:", [str(error)], code="messages-malformed") from None
        return self._prompts.encode_messages(messages)


def export(**settings: Any) -> Bundle:
    """Export a model as a bundle, like `prge export`.

    Returns:
        The opened bundle.
    """
    with require_extra("export"):
        config = importlib.import_module("server_export.settings").ExportConfig
        verb = importlib.import_module("server_export.export")
        return _open_bundle(verb.export(settings_from_mapping(config, settings, "export()", "prge export")))


def open_bundle(folder: Path | str) -> Bundle:
    """Open a bundle that `prge export` or `prge tune` wrote; raises BundleError if it is damaged."""
    return _open_bundle(parse_path(folder, "open_bundle(): folder"))


def tune(**settings: Any) -> Tuned:
    """Fine-tune a model on rows, like `prge tune`: export it, choose settings, train and evaluate."""
    with require_extra("export"):
        settings_type = importlib.import_module("server_export.tune.settings").TuneSettings
        tune_settings = settings_from_mapping(settings_type, settings, "tune()", "prge tune")
        result = importlib.import_module("server_export.tune.stages").tune(tune_settings)
    return Tuned(
        tune_settings.out,
        Path(result["bundle"]),
        tune_settings.out / "adapter",
        result["score_before"],
        result["score_after"],
        {name: decision["value"] for name, decision in result["chosen"].items()},
        result["seconds"],
    )


def run(**settings: Any) -> Run:
    """Train the adapter of a bundle, like `prge run`; `resume` continues a run."""
    with require_extra("device"):
        settings_type = importlib.import_module("device_runner.session.settings").RunSettings
        run_settings = settings_from_mapping(settings_type, settings, "run()", "prge run")
        importlib.import_module("device_runner.run").run(run_settings)
    summary = json.loads((run_settings.out / SUMMARY).read_text(encoding="utf-8"))
    train = summary["train"]
    return Run(
        run_settings.out,
        run_settings.out / FINAL,
        summary["run"]["status"],
        train["final_step"],
        train["before"],
        train["best"],
        train["seconds"],
        train["memory"]["peak_bytes"],
    )


def evaluate(**settings: Any) -> dict[str, Any]:
    """Evaluate an adapter on rows, like `prge eval`; return the metrics by name."""
    with require_extra("device"):
        verb = importlib.import_module("device_runner.evaluate")
        metrics: dict[str, Any] = verb.run(
            settings_from_mapping(verb.EvaluateSettings, settings, "evaluate()", "prge eval")
        )
    return metrics


def load(bundle: Path | str, adapter: Path | str | None = None, **engine: Any) -> Model:
    """Load a bundle's model for text generation.

    Args:
        bundle: folder of the bundle.
        adapter: folder of a run, a checkpoint or a PEFT adapter, or `base` for the model without an adapter;
            default: the bundle's own adapter.
        engine: engine, threads, memory, context; as for `prge generate`.

    Raises:
        PrgeError: the bundle or the adapter is invalid.
    """
    with require_extra("device"):
        generation = importlib.import_module("device_runner.session.generation")
        folder = parse_path(bundle, "load(): bundle")
        name = None if adapter is None else str(parse_path(adapter, "load(): adapter"))
        return Model(generation.open_generative_bundle(folder), name, engine)
