"""`prge serve`: a bundle and its adapters behind OpenAI's protocol, for any client that speaks it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from device_runner.engines.blocks import Blocks
from device_runner.serving.flags import LearnFlags, ServingFlags
from device_runner.serving.history import FEEDBACK
from device_runner.serving.learning import Learning, open_learning
from device_runner.serving.listen_flags import ListenFlags, read_keys, refuse_key
from device_runner.serving.models import Models
from device_runner.serving.page.about import about_adapter, about_bundle
from device_runner.session.gates import Gates
from device_runner.session.memory import budget_of_texts, watched_memory
from device_runner.session.speaking import (
    BASE,
    BUNDLE,
    adapter_source,
    by_name,
    note,
    open_speaker_within,
    open_speaking,
    read_adapter,
    read_template_kwargs,
)
from prge.errors import ConfigError
from prge.files.adapter import Adapter
from prge.files.bundle import Bundle
from prge.files.run_folder import run_lock
from prge.files.tuned import tuning_at
from prge.host.terminal import best_effort
from prge.learning.costs import StepShape
from prge.rows.feedback_examples import FeedbackExamples
from prge.rows.readers.feedback import Fields, check_feedback
from prge.rows.tokenization.tokenizer import Tokenizer, bundle_tokenizer, read_chat_template
from prge.text.speaker import Speaker
from prge.verbs.kinds import Bytes
from prge.verbs.outputs import OutputFile
from prge.verbs.settings import parse_settings

_MOST_FEEDBACK = Bytes(1 << 30)


@dataclass(frozen=True)
class ServeSettings(LearnFlags, ListenFlags, ServingFlags):
    """Serve a bundle and its adapters by OpenAI's protocol: chat completions, completions, models."""

    feedback: OutputFile | None = None
    """File that /v1/feedback adds rows to, with what was asked and answered; `prge tune --data` takes it.
    Default: nothing is kept."""
    feedback_limit: Bytes = _MOST_FEEDBACK
    """Most bytes that this file may have, such as 200MB; then feedback gets status 507."""
    runs: Path | None = None
    """A run, or a folder of runs, that the page /training shows. Default: none."""

    def __post_init__(self) -> None:
        problems = self.serving_problems(learns=self.learn is not None)
        if self.learn is not None and self.feedback not in (None, self.learn / FEEDBACK):
            problems.append(f"--feedback is {self.feedback}: with --learn it is in that folder; leave it out")
        if problems:
            raise ConfigError("these settings can't be used:", problems)


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge serve --help`."""
    refuse_key(argv)
    settings = parse_settings(ServeSettings, argv, "prge serve", ["bundle"])
    with watched_memory(settings.memory, note):
        serve(settings)
    return 0


def serve(settings: ServeSettings) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        PrgeError: bad input, or an address that can't be listened at.
    """
    from device_runner.serving.access import is_local
    from device_runner.serving.app import make_app
    from device_runner.serving.feedback import Feedback, FeedbackFile
    from device_runner.serving.listening import Server, address_of, listening
    from device_runner.serving.page.runs import Runs
    from device_runner.serving.worker import Worker
    from prge.text.loop import Generator

    keys, gates = read_keys(settings.api_key_file), Gates(settings.conditions())
    with ExitStack() as held:
        runs = None if settings.runs is None else Runs(settings.runs)
        if settings.learn is not None:
            held.enter_context(run_lock(settings.learn))
        file = settings.feedback if settings.learn is None else settings.learn / FEEDBACK
        if file is not None:
            check_feedback(file)
        bundle = open_speaking(settings.bundle)
        adapters = _adapters(settings, bundle)
        variables = read_template_kwargs(settings.chat_template_kwargs)
        models = Models(adapters, _tokenizer(settings, bundle), variables)
        listener = held.enter_context(listening(settings.host, settings.port))
        is_reached_by_others = not is_local(listener.getsockname()[0])
        access = settings.access(keys, is_reached_by_others)
        examples = None
        if file is not None and settings.learn is None:
            examples = FeedbackExamples(_tokenizer(settings, bundle), bundle.chain.model)
        speaker, learning, blocks = _opened(settings, bundle, adapters, models)
        generator = Generator(speaker, bundle_tokenizer(bundle))
        if learning is not None:
            held.callback(learning.close)
        worker = held.enter_context(Worker(generator, settings.queue, learning))
        if learning is not None and blocks is not None:
            learning.give_way(worker, blocks)

        def kept(row: Fields) -> None:
            worker.wake()  # for a round, perhaps

        taken = None
        if file is not None and (examples := examples if learning is None else learning.examples):
            taken = FeedbackFile(file, examples, worker.storage, settings.feedback_limit)
        feedback, about = Feedback(taken, note, kept), _about(settings, bundle, models.names)
        app = make_app(models, worker, access, feedback, learning, runs, about, gates)
        address = f"http://{address_of(listener)}"
        lines = [f"models: {', '.join(models.names)}"]
        lines.append(f"listening at {address}/v1; Ctrl-C ends it")
        lines.append(f"talk to them at {address}/")
        if is_reached_by_others:
            whom = "who has a key" if keys else "anyone"
            lines.append(f"{whom} may ask, without encryption, from any machine")

        def ending() -> None:
            feedback.close()
            if runs is not None:
                runs.close()

        Server(app, worker, lambda: _tell(lines), ending).run([listener])


def _opened(
    settings: ServeSettings, bundle: Bundle, adapters: Mapping[str, Adapter], models: Models
) -> tuple[Speaker, Learning | None, Blocks | None]:
    """What writes, and where it learns too what does that with the same blocks, which are told then."""
    slots, context, precision = settings.slots, settings.context, settings.cache_dtype
    if settings.learn is None:
        return open_speaker_within(bundle, settings, slots, context, precision, note), None, None

    def loaded_beside(steps: StepShape) -> int | None:
        nonlocal context
        given = settings.memory, settings.engine, slots, context, precision, steps
        context, budget = budget_of_texts(bundle, *given)
        return None if budget is None else budget.loaded

    # Behind the folder's own and `base` come those that were given.
    name = list(adapters)[2 if settings.adapter else 0]
    source = settings.bundle if tuning_at(settings.bundle) else None
    if settings.adapter:
        source = adapter_source(settings.adapter[0])
    learning, opened = open_learning(
        settings,
        settings,
        source,
        bundle,
        adapters[name],
        _tokenizer(settings, bundle),
        partial(models.replace, name),
        note,
        loaded_beside,
    )
    models.replace(name, learning.adapter)
    return opened.speaker(slots, context, precision), learning, opened.blocks


def _about(settings: ServeSettings, bundle: Bundle, names: Sequence[str]) -> dict[str, Any]:
    """What the page tells of the models: the folder's own, `base`, and those that were given."""
    own = settings.bundle if tuning_at(settings.bundle) else bundle.adapter
    sources = [own, None, *map(adapter_source, settings.adapter)]
    told = [{} if source is None else about_adapter(source) for source in sources]
    return {"bundle": about_bundle(bundle), "models": dict(zip(names, told, strict=True))}


def _tokenizer(settings: ServeSettings, bundle: Bundle) -> Tokenizer:
    """The bundle's, with the chat template that was asked for."""
    tokenizer = bundle_tokenizer(bundle)
    if settings.chat_template is not None:
        tokenizer.chat_template = read_chat_template(settings.chat_template)
    return tokenizer


def _tell(lines: Sequence[str]) -> None:
    with best_effort(sys.stdout):
        print("\n".join(lines), flush=True)


def _adapters(settings: ServeSettings, bundle: Bundle) -> dict[str, Adapter]:
    """Adapters by the names of their models; raises ConfigError, AdapterError, RunError."""
    of_folder = str(settings.bundle) if tuning_at(settings.bundle) else BUNDLE
    own, base = (read_adapter(bundle, name)[1] for name in (of_folder, BASE))
    found = [(settings.model_name or settings.bundle.resolve().name, own), (BASE, base)]
    for word in settings.adapter:
        name, adapter = read_adapter(bundle, word)
        found.append((Path(word).resolve().name if name == word else name, adapter))
    return by_name(found)
