"""`prge serve`: serve a bundle and its adapters with OpenAI's protocol."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from device_runner.engines.generator import open_generation_engine
from device_runner.serving.history import FEEDBACK
from device_runner.serving.learning import OnlineLearner, plan_rounds
from device_runner.serving.listen_settings import read_api_keys, refuse_api_key_flag
from device_runner.serving.models import Models
from device_runner.serving.page.about import describe_adapter, describe_bundle
from device_runner.serving.round_process import RoundProcess
from device_runner.serving.settings import ServeSettings
from device_runner.session.generation import (
    BASE,
    BUNDLE,
    adapter_source,
    adapters_by_name,
    open_generation_engine_within,
    open_generative_bundle,
    print_note,
    read_adapter,
    read_template_kwargs,
)
from device_runner.session.memory import generation_budget, watched_memory
from device_runner.session.pauses import Pauses
from prge.cli.settings import parse_settings
from prge.data.feedback_examples import FeedbackExamples
from prge.data.readers.feedback import check_feedback
from prge.data.tokenization.tokenizer import Tokenizer, load_bundle_tokenizer, read_chat_template
from prge.formats.adapter import Adapter
from prge.formats.bundle import Bundle
from prge.formats.run_folder import run_lock
from prge.formats.tune_folder import find_tuning
from prge.generation.generator import GenerationEngine
from prge.system.terminal import best_effort


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge serve --help`."""
    refuse_api_key_flag(argv)
    settings = parse_settings(ServeSettings, argv, "prge serve", ["bundle"])
    serve(settings)
    return 0


def serve(settings: ServeSettings) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        PrgeError: bad input, or the address can't be bound.
    """
    from device_runner.serving.access import is_local
    from device_runner.serving.app import make_app
    from device_runner.serving.feedback import Feedback, FeedbackFile
    from device_runner.serving.page.runs import Runs
    from device_runner.serving.uvicorn_server import Server, format_address, listening
    from device_runner.serving.worker import Worker
    from prge.generation.loop import Generator

    keys, pauses = read_api_keys(settings.api_key_file), Pauses(settings.constraints())
    learning: OnlineLearner | None = None
    with ExitStack() as stack:
        stack.enter_context(
            watched_memory(
                settings.memory, print_note, lambda: 0 if learning is None else learning.peak_bytes
            )
        )
        runs = None if settings.runs is None else Runs(settings.runs)
        lock = None if settings.learn is None else stack.enter_context(run_lock(settings.learn))
        file = settings.feedback if settings.learn is None else settings.learn / FEEDBACK
        if file is not None:
            check_feedback(file)
        bundle = open_generative_bundle(settings.bundle)
        adapters = _adapters(settings, bundle)
        variables = read_template_kwargs(settings.chat_template_kwargs)
        models = Models(adapters, _tokenizer(settings, bundle), variables)
        listener = stack.enter_context(listening(settings.host, settings.port))
        is_reached_by_others = not is_local(listener.getsockname()[0])
        access = settings.access(keys, is_reached_by_others)
        storage = ThreadPoolExecutor(1, "storage")
        examples = None
        if lock is not None:
            learning, engine = _open_learning(settings, bundle, adapters, models, storage, lock)
            stack.callback(learning.close)
            examples = learning.examples
        else:
            if file is not None:
                examples = FeedbackExamples(_tokenizer(settings, bundle), bundle.chain.model)
            engine = open_generation_engine_within(
                bundle,
                settings,
                slots=settings.slots,
                context=settings.context,
                precision=settings.cache_dtype,
                log=print_note,
            )
        generator = Generator(engine, load_bundle_tokenizer(bundle))
        stack.callback(storage.shutdown, cancel_futures=True)
        worker = stack.enter_context(
            Worker(generator, settings.queue, learning.pause if learning else _ignore)
        )
        feedback_file = None
        if file is not None and examples is not None:
            feedback_file = FeedbackFile(file, examples, storage, settings.feedback_limit)
        feedback = Feedback(feedback_file, print_note, learning.wake if learning else _ignore)
        about = _about(settings, bundle, models.names)
        app = make_app(models, worker, access, feedback, learning, runs, about, pauses)
        address = f"http://{format_address(listener)}"
        lines = [f"models: {', '.join(models.names)}"]
        lines.append(f"listening at {address}/v1; press Ctrl-C to stop")
        lines.append(f"chat in the browser: {address}/")
        if is_reached_by_others:
            who = "everyone with a key" if keys else "anyone"
            lines.append(f"{who} may send requests from any machine, without encryption")

        def ending() -> None:
            feedback.close()
            if runs is not None:
                runs.close()

        ticking = learning.tick if learning else _ignore
        Server(app, worker, lambda: _print_lines(lines), ending, ticking).run([listener])


def _open_learning(
    settings: ServeSettings,
    bundle: Bundle,
    adapters: Mapping[str, Adapter],
    models: Models,
    storage: Executor,
    lock: int,
) -> tuple[OnlineLearner, GenerationEngine]:
    """Return the online learner and the generation engine, which share `--memory`."""
    # The adapters in --adapter follow the bundle's own and `base`.
    name = list(adapters)[2 if settings.adapter else 0]
    source = settings.bundle if find_tuning(settings.bundle) else None
    if settings.adapter:
        source = adapter_source(settings.adapter[0])
    tokenizer = _tokenizer(settings, bundle)
    plan, has_retained = plan_rounds(settings, settings, source, bundle, tokenizer)
    context, budget = generation_budget(
        bundle,
        settings.memory,
        settings.engine,
        slots=settings.slots,
        context=settings.context,
        precision=settings.cache_dtype,
        steps=plan.shape,
    )
    loaded = None if budget is None else budget.loaded
    learning = OnlineLearner(
        settings,
        plan,
        has_retained,
        bundle,
        adapters[name],
        tokenizer,
        serve=partial(models.replace, name),
        log=print_note,
        begin=partial(RoundProcess, lock=lock),
        storage=storage,
        loaded=loaded,
    )
    models.replace(name, learning.adapter)
    engine = open_generation_engine(
        bundle,
        threads=settings.threads,
        engine=settings.engine,
        loaded=loaded,
        slots=settings.slots,
        context=context,
        precision=settings.cache_dtype,
        log=print_note,
    )
    return learning, engine


def _about(settings: ServeSettings, bundle: Bundle, names: Sequence[str]) -> dict[str, Any]:
    """Describe the models for the page: the bundle's own, `base`, and those in --adapter."""
    own_source = settings.bundle if find_tuning(settings.bundle) else bundle.adapter
    sources = [own_source, None, *map(adapter_source, settings.adapter)]
    descriptions = [{} if source is None else describe_adapter(source) for source in sources]
    return {"bundle": describe_bundle(bundle), "models": dict(zip(names, descriptions, strict=True))}


def _tokenizer(settings: ServeSettings, bundle: Bundle) -> Tokenizer:
    """Return the bundle's tokenizer, with the chat template of --chat-template if it is set."""
    tokenizer = load_bundle_tokenizer(bundle)
    if settings.chat_template is not None:
        tokenizer.chat_template = read_chat_template(settings.chat_template)
    return tokenizer


def _ignore(*_: object) -> None:
    """Do nothing: a callback for servers that don't learn."""


def _print_lines(lines: Sequence[str]) -> None:
    with best_effort(sys.stdout):
        print("\n".join(lines), flush=True)


def _adapters(settings: ServeSettings, bundle: Bundle) -> dict[str, Adapter]:
    """Return adapters by model name; raises ConfigError, AdapterError, RunError."""
    own_word = str(settings.bundle) if find_tuning(settings.bundle) else BUNDLE
    own, base = (read_adapter(bundle, name)[1] for name in (own_word, BASE))
    named = [(settings.model_name or settings.bundle.resolve().name, own), (BASE, base)]
    for word in settings.adapter:
        name, adapter = read_adapter(bundle, word)
        named.append((Path(word).resolve().name if name == word else name, adapter))
    return adapters_by_name(named)
