"""`prge serve`: a bundle and its adapters behind OpenAI's protocol, for any client that speaks it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from device_runner.engines.blocks import Blocks
from device_runner.engines.speaking import open_speaker
from device_runner.serving.flags import LearnFlags, ServingFlags
from device_runner.serving.history import FEEDBACK
from device_runner.serving.learning import Learning, open_learning
from device_runner.serving.models import Models
from device_runner.session.gates import Gates
from device_runner.session.speaking import (
    BASE,
    BUNDLE,
    adapter_source,
    by_name,
    note,
    open_speaking,
    read_adapter,
)
from prge.errors import ConfigError
from prge.files.adapter import Adapter
from prge.files.bundle import Bundle
from prge.files.documents import DocumentError, read_document
from prge.files.run_folder import run_lock
from prge.files.tuned import tuning_at
from prge.host.terminal import best_effort
from prge.rows.feedback import Fields, check_feedback
from prge.rows.tokenizer import Tokenizer, bundle_tokenizer, read_chat_template
from prge.text.speaker import Speaker
from prge.verbs.settings import parse_settings

KEY = "PRGE_API_KEY"
MOST_KEY_BYTES = 4096


@dataclass(frozen=True)
class ServeSettings(LearnFlags, ServingFlags):
    """Serve a bundle and its adapters by OpenAI's protocol: chat completions, completions, models."""

    host: str = "127.0.0.1"
    """Address to listen at; others than this machine reach 0.0.0.0 or ::, which needs an API key."""
    port: int = 8000
    """Port to listen at; 0: a free one. It is printed."""
    api_key_file: Path | None = None
    """File with what clients must send as their API key. Default: the environment's PRGE_API_KEY; without
    that, any program of this machine may ask."""
    insecure: bool = False
    """Instead of an API key: anyone who reaches the address may ask. To try things out."""
    feedback: Path | None = None
    """File that /v1/feedback adds rows to, with what was asked and answered; `prge tune --data` takes it.
    Default: nothing is kept."""

    def __post_init__(self) -> None:
        problems = self.serving_problems(learns=self.learn is not None)
        if self.learn is not None and self.feedback not in (None, self.learn / FEEDBACK):
            problems.append(f"--feedback is {self.feedback}: with --learn it is in that folder; leave it out")
        if problems:
            raise ConfigError("these settings can't be used:", problems)


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge serve --help`."""
    if any(word.partition("=")[0].replace("_", "-") == "--api-key" for word in argv):
        raise ConfigError(
            "a setting can't be used:",
            ["--api-key shows the key to everybody who can list processes"],
            remedy=f"give --api-key-file FILE, or set {KEY}",
        )
    settings = parse_settings(ServeSettings, argv, "prge serve", ["bundle"])
    serve(settings)
    return 0


def serve(settings: ServeSettings) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        PrgeError: bad input, or an address that can't be listened at.
    """
    from device_runner.serving.access import Access, is_local
    from device_runner.serving.app import make_app
    from device_runner.serving.feedback import Feedback
    from device_runner.serving.listening import Server, address_of, listening
    from device_runner.serving.worker import Worker
    from prge.text.loop import Generator

    key, gates = _read_key(settings.api_key_file), Gates(settings.conditions())
    with ExitStack() as held:
        if settings.learn is not None:
            held.enter_context(run_lock(settings.learn))
        file = settings.feedback if settings.learn is None else settings.learn / FEEDBACK
        if file is not None:
            check_feedback(file)
        bundle = open_speaking(settings.bundle)
        adapters = _adapters(settings, bundle)
        models = Models(adapters, _tokenizer(settings, bundle))
        listener = held.enter_context(listening(settings.host, settings.port))
        is_reached_by_others = not is_local(listener.getsockname()[0])
        _check_key(settings, key, is_reached_by_others)
        speaker, learning, blocks = _opened(settings, bundle, adapters, models)
        generator = Generator(speaker, bundle_tokenizer(bundle))
        if learning is not None:
            held.callback(learning.close)
        worker = held.enter_context(Worker(generator, settings.queue, learning))
        if learning is not None and blocks is not None:
            learning.give_way(worker, blocks)

        def kept(row: Fields) -> None:
            if learning is not None:
                learning.count(row)
                worker.wake()

        host = None if is_reached_by_others else settings.host
        app = make_app(models, worker, Access(key, host), Feedback(file, note, kept), learning, gates)
        lines = [f"models: {', '.join(models.names)}"]
        lines.append(f"listening at http://{address_of(listener)}/v1; Ctrl-C ends it")
        if is_reached_by_others:
            whom = "anyone" if key is None else "who has the key"
            lines.append(f"{whom} may ask, without encryption, from any machine")
        Server(app, worker, lambda: _tell(lines)).run([listener])


def _opened(
    settings: ServeSettings, bundle: Bundle, adapters: Mapping[str, Adapter], models: Models
) -> tuple[Speaker, Learning | None, Blocks | None]:
    """What writes, and where it learns too what does that with the same blocks, which are told then."""
    shape = settings.slots, settings.context, settings.cache_dtype
    if settings.learn is None:
        given = settings.threads, settings.engine, settings.memory
        return open_speaker(bundle, *given, *shape), None, None
    # Behind the folder's own and `base` come those that were given.
    name = list(adapters)[2 if settings.adapter else 0]
    source = settings.bundle if tuning_at(settings.bundle) else None
    if settings.adapter:
        source = adapter_source(settings.adapter[0])
    learning, engines = open_learning(
        settings,
        settings,
        source,
        bundle,
        adapters[name],
        _tokenizer(settings, bundle),
        partial(models.replace, name),
        note,
    )
    models.replace(name, learning.adapter)
    return engines.speaker(*shape), learning, engines.blocks


def _tokenizer(settings: ServeSettings, bundle: Bundle) -> Tokenizer:
    """The bundle's, with the chat template that was asked for."""
    tokenizer = bundle_tokenizer(bundle)
    if settings.chat_template is not None:
        tokenizer.chat_template = read_chat_template(settings.chat_template)
    return tokenizer


def _tell(lines: Sequence[str]) -> None:
    with best_effort(sys.stdout):
        print("\n".join(lines), flush=True)


def _read_key(path: Path | None) -> str | None:
    """The key that clients must send: a file's, else the environment's, else none.

    Raises:
        ConfigError: the file can't be read, or what is there is no key.
    """
    if path is None and KEY not in os.environ:
        return None
    where, key, remedy = KEY, os.environ.get(KEY, ""), f"set it, or unset {KEY} to serve without a key"
    if path is not None:
        where, remedy = str(path), f"python -c 'import secrets; print(secrets.token_urlsafe())' > {path}"
        try:
            key = read_document(path, MOST_KEY_BYTES).decode("ascii", "replace")
        except (OSError, DocumentError) as error:
            why = getattr(error, "strerror", None) or error
            remedy = f"give a file, or set {KEY}"
            raise ConfigError(
                "there is no API key:", [f"{path} can't be read: {why}"], remedy=remedy
            ) from None
    key = key.strip()
    if not re.fullmatch("[!-~]+", key):
        problem = "has characters that aren't printable ASCII, or spaces" if key else "is empty"
        raise ConfigError("there is no API key:", [f"{where} {problem}"], remedy=remedy)
    return key


def _check_key(settings: ServeSettings, key: str | None, is_reached_by_others: bool) -> None:
    """Refuse to be open to others by mistake; raises ConfigError."""
    problems = []
    if settings.insecure and key is not None:
        problems.append("give an API key or --insecure, and not both")
    if is_reached_by_others and key is None and not settings.insecure:
        problems.append(f"--host {settings.host} lets other machines ask, and there is no API key")
    if problems:
        remedy = f"give --api-key-file FILE, or set {KEY}; with --insecure anyone may ask"
        raise ConfigError("these settings can't be used:", problems, remedy=remedy)


def _adapters(settings: ServeSettings, bundle: Bundle) -> dict[str, Adapter]:
    """Adapters by the names of their models; raises ConfigError, AdapterError, RunError."""
    of_folder = str(settings.bundle) if tuning_at(settings.bundle) else BUNDLE
    own, base = (read_adapter(bundle, name)[1] for name in (of_folder, BASE))
    found = [(settings.model_name or settings.bundle.resolve().name, own), (BASE, base)]
    for word in settings.adapter:
        name, adapter = read_adapter(bundle, word)
        found.append((Path(word).resolve().name if name == word else name, adapter))
    return by_name(found)
