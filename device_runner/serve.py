"""`prge serve`: a bundle and its adapters behind OpenAI's protocol, for any client that speaks it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from device_runner.session.speaking import BASE, BUNDLE, by_name, open_speaking, read_adapter
from prge.adapter import Adapter
from prge.bounds import bound_problems
from prge.bundle import Bundle
from prge.engine import EngineName
from prge.errors import ConfigError
from prge.rows.tokenizer import bundle_tokenizer, read_chat_template
from prge.settings import Bytes, parse_settings
from prge.terminal import best_effort

DESCRIPTION = "Serve a bundle and its adapters by OpenAI's protocol: chat completions, completions, models."


@dataclass(frozen=True)
class ServeSettings:
    """Serve a bundle and its adapters by OpenAI's protocol."""

    bundle: Path
    """Folder that `prge export` wrote. Its own adapter is the model that the folder's name calls; `base` is
    the model without any."""
    adapter: list[str] = field(default_factory=list)
    """Further models: NAME=PATH, or the PATH of a run, checkpoint or PEFT folder that gives its name."""
    host: str = "127.0.0.1"
    """Address to listen at; others than this machine reach 0.0.0.0 or ::."""
    port: int = 8000
    """Port to listen at; 0: a free one. It is printed."""
    api_key: str | None = None
    """What clients must send as their API key. Default: any client may ask."""
    chat_template: Path | None = None
    """Jinja file that makes a prompt of messages. Default: the model's own; without one only
    /v1/completions answers."""
    queue: int = 64
    """Most answers that are made or wait at once; further requests get status 429."""
    slots: int = 8
    """Most answers that are made at once."""
    context: int | None = None
    """Most tokens of prompt and answer together; default: the bundle's bound."""
    engine: EngineName = "auto"
    """native: the stock libraries, without torch; torch: the runtime's Python module; auto: native where
    it is built or can be."""
    threads: int | None = None
    """Threads of the engine; default: performance cores."""
    memory: Bytes | None = None
    """Weights that may stay loaded, such as 200MB. Default: all stay."""

    def __post_init__(self) -> None:
        if problems := bound_problems(self):
            raise ConfigError("these settings can't be used:", problems)


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge serve --help`."""
    settings = parse_settings(ServeSettings, argv, "prge serve", ["bundle"], description=DESCRIPTION)
    serve(settings)
    return 0


def serve(settings: ServeSettings) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        PrgeError: bad input, or an address that can't be listened at.
    """
    from device_runner.engines.speaking import open_speaker
    from device_runner.serving.app import LOCAL, make_app
    from device_runner.serving.listening import Server, address_of, listening
    from device_runner.serving.models import Models
    from device_runner.serving.worker import Worker
    from prge.generation.loop import Generator

    bundle = open_speaking(settings.bundle)
    adapters = _adapters(settings, bundle)
    tokenizer = bundle_tokenizer(bundle)
    if settings.chat_template is not None:
        tokenizer.chat_template = read_chat_template(settings.chat_template)
    models = Models(adapters, tokenizer)
    with listening(settings.host, settings.port) as listener:
        speaker = open_speaker(
            bundle, settings.threads, settings.engine, settings.memory, settings.slots, settings.context
        )
        with Worker(Generator(speaker, bundle_tokenizer(bundle)), settings.queue) as worker:
            hosts = LOCAL if settings.host in LOCAL else ()
            app = make_app(models, worker, settings.api_key, hosts)
            with best_effort(sys.stdout):
                print(f"models: {', '.join(models.names)}")
                print(f"listening at http://{address_of(listener)}/v1; Ctrl-C ends it", flush=True)
                if not hosts and settings.api_key is None:
                    print("anyone who reaches this address may ask: --api-key asks for a key", flush=True)
            Server(app, worker).run([listener])


def _adapters(settings: ServeSettings, bundle: Bundle) -> dict[str, Adapter]:
    """Adapters by the names of their models; raises ConfigError, AdapterError, RunError."""
    own, base = (read_adapter(bundle, name)[1] for name in (BUNDLE, BASE))
    found = [(bundle.folder.resolve().name, own), (BASE, base)]
    for word in settings.adapter:
        name, adapter = read_adapter(bundle, word)
        found.append((Path(word).resolve().name if name == word else name, adapter))
    return by_name(found)
