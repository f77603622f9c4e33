"""What the verbs that generate text share: flags, adapters by name, and the generator of a bundle."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from device_runner.engines.generator import ChainGenerationEngine, open_generation_engine
from device_runner.engines.trunk_cache import Precision
from device_runner.session.memory import generation_budget
from device_runner.session.settings import EngineFlags
from prge.cli.inputs import InputFile, ModelInput, NamedAdapter, TestRows, TextInput
from prge.cli.outputs import AppendedFile
from prge.data.columns import RowError
from prge.data.forms.messages import template_kwargs
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import BundleError, ConfigError, escape_control, printable
from prge.formats.adapter import Adapter
from prge.formats.bundle import Bundle, open_bundle
from prge.formats.peft import find_adapter, read_compatible_adapter, read_peft
from prge.formats.tune_folder import find_tuning
from prge.generation.loop import Draft, GenerationSettings, Generator, Overflow
from prge.generation.sampling import MIN_P, SamplingSettings
from prge.system.terminal import best_effort
from prge.training.costs import format_megabytes
from prge.training.settings import RowsFlags, SelectionFlags

BUNDLE, BASE = "bundle", "base"
STDIN = "-"


@dataclass(frozen=True)
class BundleFlags:
    """The model that generates."""

    bundle: ModelInput
    """Folder that `prge export` or `prge tune` wrote."""
    adapter: tuple[NamedAdapter, ...] = ()
    """Runs, checkpoints or PEFT folders, or NAME=PATH; base: the model without an adapter. Default: the tuned
    adapter, or the bundle's own."""


@dataclass(frozen=True)
class GenerationFlags(EngineFlags):
    """How text is generated, and by which engine."""

    max_tokens: int = 128
    """Maximum number of generated tokens."""
    temperature: float = 0.0
    """0 always takes the most likely token; higher values sample: 0.7 stays close to it, 1 is the model's own
    distribution."""
    top_k: int = 0
    """Sample from this many of the most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with this total probability."""
    min_p: float = MIN_P
    """Sample from tokens with at least this share of the most likely token's probability; 0: from all."""
    repetition_penalty: float = 1.0
    """Values above 1 make tokens that the prompt or the answer already contains less likely."""
    seed: int | None = None
    """Seed of sampling: the same seed gives the same answers. Default: different answers each time."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer; they aren't part of it."""
    overflow: Overflow = "error"
    """What to do with a prompt that is too long for the context: error, or truncate its beginning, so that
    the answer has room."""
    context: int | None = None
    """Maximum number of tokens of prompt and answer together; default: all of the bundle's positions."""
    cache_dtype: Precision = "float32"
    """Precision of cached keys and values. float16 takes half the memory, and more time to read."""
    draft: Draft = "lookup"
    """lookup: text that repeats its prompt or itself is generated several tokens at a time; off: token by
    token."""
    system: str | None = None
    """Chat: the system message, unless the conversation has one."""
    chat_template_kwargs: str | None = None
    """Chat: JSON with variables of the chat template, such as '{"enable_thinking": false}'."""

    def __post_init__(self) -> None:
        self.generation()
        read_template_kwargs(self.chat_template_kwargs)

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        return read_template_kwargs(self.chat_template_kwargs)

    def generation(self) -> GenerationSettings:
        """Return the generation settings; raises ConfigError for invalid values."""
        choice = SamplingSettings(
            self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty, self.seed
        )
        return GenerationSettings(self.max_tokens, self.stop, choice, self.overflow, self.draft)


def read_template_kwargs(text: str | None) -> dict[str, Any]:
    """Parse the JSON of --chat-template-kwargs to variables of a chat template; raises ConfigError."""
    try:
        return template_kwargs(text)
    except RowError as error:
        raise ConfigError(
            "--chat-template-kwargs can't be used:", [str(error)], code="settings-unusable"
        ) from None


@dataclass(frozen=True)
class GenerateSettings(GenerationFlags, SelectionFlags, RowsFlags, BundleFlags):
    """Generate answers to prompts: a single answer is streamed, several are generated at once."""

    EXAMPLE: ClassVar = 'bundle --adapter run --prompt "Once upon a time"'
    ONE_OF: ClassVar = (("prompt", "messages", "data"),)

    prompt: tuple[TextInput, ...] = ()
    """Texts to continue; -: standard input."""
    chat: bool = False
    """Treat each --prompt as a user's message in the model's chat template."""
    messages: InputFile | None = None
    """JSON file with a list of messages to answer, in the model's chat template."""
    data: TestRows | None = None
    """Rows to answer, with the columns of --task or of a known format: jsonl, json, csv, tsv or parquet,
    several files one after another; a folder with a file test; or the name of a data set of the hub."""
    json: bool = False
    """Print a JSON object for each answer: text, tokens, reason, prompt_tokens, speed."""
    json_schema: InputFile | None = None
    """File of a JSON schema that every answer follows; needs the package llguidance."""
    grammar: InputFile | None = None
    """File of a grammar that every answer follows, in the syntax of Lark or of llama.cpp; needs the package
    llguidance."""

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.chat and not self.prompt:
            problems.append("--chat requires --prompt")
        if self.task and not self.data:
            problems.append("--task requires --data")
        if self.json_schema and self.grammar:
            problems.append("--json-schema and --grammar exclude each other")
        if self.columns and not self.data:
            problems.append("--columns requires --data")
        if self.system is not None and self.prompt and not self.chat:
            problems.append("--system requires --chat, --messages or --data")
        if problems:
            raise ConfigError("These settings can't be used:", problems, code="settings-unusable")


@dataclass(frozen=True)
class ChatSettings(GenerationFlags, BundleFlags):
    """Chat with a bundle's model in the terminal; /help lists the commands."""

    EXAMPLE: ClassVar = "bundle --adapter run"

    max_tokens: int = 512
    """Maximum number of tokens of an answer."""
    temperature: float = 0.7
    """0 always takes the most likely token; higher values sample, 1 from the model's own distribution."""
    top_p: float = 0.95
    """Sample from the smallest set of most likely tokens with this total probability."""
    overflow: Overflow = "truncate"
    """What to do when the conversation is too long for the context: truncate drops its oldest turns; or
    error."""
    feedback: AppendedFile | None = None
    """File that /good, /bad and /better append rows to, with the prompt and the answer; `prge tune --data`
    takes it. Default: no feedback is saved."""


def open_generative_bundle(folder: Path) -> Bundle:
    """Open a bundle whose model generates text; raises BundleError for another one."""
    bundle = open_bundle(folder)
    if bundle.chain.readout != "logprobs":
        raise BundleError(
            f"{folder} can't generate text: its readout is {bundle.chain.readout}.",
            remedy="Export a causal language model, without label words.",
            code="readout-writes-no-text",
        )
    return bundle


def read_adapter(bundle: Bundle, word: str) -> tuple[str, Adapter]:
    """Return name and adapter for a user's word: a path, NAME=PATH, `bundle` or `base`.

    Raises:
        RunError: the path is a run without a result.
        AdapterError: the path has no adapter, or one that doesn't fit the bundle.
    """
    modules = bundle.chain.modules
    if word == BASE:
        return BASE, Adapter.zeros(modules)
    if word == BUNDLE:
        return BUNDLE, read_peft(bundle.adapter, modules)
    name = word.partition("=")[0]
    folder = find_adapter(adapter_source(word))
    return name, read_compatible_adapter(folder, modules, bundle.adapter, generates=True)


def adapter_source(word: str) -> Path:
    """Return the path in a user's PATH or NAME=PATH."""
    _, equals, path = word.partition("=")
    return Path(path if equals and not Path(word).exists() else word)


def read_adapters(flags: BundleFlags, bundle: Bundle) -> dict[str, Adapter]:
    """Read adapters by name as `read_adapter` does; by default the tuned adapter or the bundle's own."""
    tuning = find_tuning(flags.bundle)
    if tuning is not None and not flags.adapter:
        return {tuning.name: read_adapter(bundle, str(tuning.folder))[1]}
    return adapters_by_name([read_adapter(bundle, word) for word in flags.adapter or [BUNDLE]])


def adapters_by_name(named: Sequence[tuple[str, Adapter]]) -> dict[str, Adapter]:
    """Return adapters by printable name; raises ConfigError if two have the same name."""
    named = [(printable(name), adapter) for name, adapter in named]
    counts = Counter(name for name, _ in named)
    if problems := [
        f"{name!r} is the name of {count} adapters" for name, count in counts.items() if count > 1
    ]:
        raise ConfigError(
            "Adapters need different names:",
            problems,
            remedy="Give --adapter NAME=PATH.",
            code="adapter-names-unusable",
        )
    return dict(named)


def open_generator(bundle: Bundle, tokenizer: Tokenizer, flags: GenerationFlags, slots: int) -> Generator:
    """Open a generator on the engine that the flags choose; raises BundleError, EngineError."""
    engine = open_generation_engine_within(
        bundle, flags, slots=slots, context=flags.context, precision=flags.cache_dtype, log=print_note
    )
    return Generator(engine, tokenizer)


def open_generation_engine_within(
    bundle: Bundle,
    flags: EngineFlags,
    *,
    slots: int,
    context: int | None,
    precision: Precision,
    log: Callable[[str], None],
) -> ChainGenerationEngine:
    """Open a generation engine within `--memory`; without --context its context is as long as that allows.

    Raises:
        PrgeError: see open_generation_engine and device_runner.session.memory.generation_budget.
    """
    context_limit, budget = generation_budget(
        bundle, flags.memory, flags.engine, slots=slots, context=context, precision=precision
    )
    if (
        budget is not None
        and context is None
        and context_limit is not None
        and context_limit < bundle.chain.bounds.context
    ):
        log(
            f"--memory {format_megabytes(budget.limit)} allows {context_limit:,} tokens of context; "
            "use --context to set another number"
        )
    loaded = None if budget is None else budget.loaded
    return open_generation_engine(
        bundle,
        threads=flags.threads,
        engine=flags.engine,
        loaded=loaded,
        slots=slots,
        context=context_limit,
        precision=precision,
        log=log,
    )


def print_note(text: str) -> None:
    """Print a message for the user to standard error, apart from generated text."""
    with best_effort(sys.stderr):
        print(escape_control(text), file=sys.stderr, flush=True)
