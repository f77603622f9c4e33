"""What the verbs that generate text share: their flags, adapters by name, and the generator of a bundle."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from device_runner.engines.speaking import ChainSpeaker, open_speaker
from device_runner.engines.trunk_cache import Precision
from device_runner.session.memory import budget_of_texts
from device_runner.session.settings import EngineFlags
from prge.errors import BundleError, ConfigError, printable, visible
from prge.files.adapter import Adapter
from prge.files.bundle import Bundle, open_bundle
from prge.files.peft import find_adapter, read_compatible_adapter, read_peft
from prge.files.tuned import tuning_at
from prge.host.terminal import best_effort
from prge.learning.costs import megabytes
from prge.rows.columns import RowError
from prge.rows.forms.messages import template_kwargs
from prge.rows.tokenization.tokenizer import Tokenizer
from prge.running.training_flags import RowsFlags, SelectionFlags
from prge.text.choice import MIN_P, ChoiceSettings
from prge.text.loop import Draft, GenerationSettings, Generator, Overflow
from prge.verbs.inputs import InputFile, ModelInput, NamedAdapter, TestRows, TextInput
from prge.verbs.outputs import AppendedFile

BUNDLE, BASE = "bundle", "base"
STDIN = "-"


@dataclass(frozen=True)
class OfBundle:
    """Which model speaks."""

    bundle: ModelInput
    """Folder that `prge export` or `prge tune` wrote."""
    adapter: tuple[NamedAdapter, ...] = ()
    """Runs, checkpoints or PEFT folders, or NAME=PATH; base: the model without an adapter. Default: the
    adapter that was tuned, or that the bundle came with."""


@dataclass(frozen=True)
class SpeakingFlags(EngineFlags):
    """How text is generated, and by which engine."""

    max_tokens: int = 128
    """Most tokens of an answer."""
    temperature: float = 0.0
    """0 takes the most likely token each time; higher ones draw: 0.7 stays close, 1 is the model's own
    distribution."""
    top_k: int = 0
    """Draw from so many of the most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest likely tokens that have this share of the probability together."""
    min_p: float = MIN_P
    """Draw from tokens with at least this share of the most likely one's probability; 0: from all."""
    repetition_penalty: float = 1.0
    """More than 1 makes tokens less likely that prompt and answer hold already."""
    seed: int | None = None
    """Of the draws: the same answers again. Default: others each time."""
    stop: tuple[str, ...] = ()
    """Words that an answer ends before."""
    overflow: Overflow = "error"
    """What to do with a prompt that is too long for the context: error, or truncate its beginning, so that
    the answer has room."""
    context: int | None = None
    """Most tokens of prompt and answer together; default: all that the bundle has positions for."""
    cache_dtype: Precision = "float32"
    """Precision of keys and values of a text so far. float16 takes half the room, and time to read."""
    draft: Draft = "lookup"
    """lookup: a text that repeats its prompt or itself is written several tokens at a time; off: token by
    token."""
    system: str | None = None
    """Chat: the system message, unless the conversation has one."""
    chat_template_kwargs: str | None = None
    """Chat: JSON of what the chat template is given, such as '{"enable_thinking": false}'."""

    def __post_init__(self) -> None:
        self.generation()
        read_template_kwargs(self.chat_template_kwargs)

    @property
    def variables(self) -> dict[str, Any]:
        """What the chat template is given."""
        return read_template_kwargs(self.chat_template_kwargs)

    def generation(self) -> GenerationSettings:
        """How an answer is made; raises ConfigError for what can't be."""
        choice = ChoiceSettings(
            self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty, self.seed
        )
        return GenerationSettings(self.max_tokens, self.stop, choice, self.overflow, self.draft)


def read_template_kwargs(given: str | None) -> dict[str, Any]:
    """What a chat template is given, by a flag's JSON; raises ConfigError."""
    try:
        return template_kwargs(given)
    except RowError as error:
        raise ConfigError(
            "--chat-template-kwargs can't be used:", [str(error)], code="settings-unusable"
        ) from None


@dataclass(frozen=True)
class GenerateSettings(SpeakingFlags, SelectionFlags, RowsFlags, OfBundle):
    """Write what a model answers to prompts: one is streamed, several are made at once."""

    ONE_OF: ClassVar = (("prompt", "messages", "data"),)

    prompt: tuple[TextInput, ...] = ()
    """Texts to go on from, as they are; -: standard input."""
    chat: bool = False
    """Take each --prompt for a user's message, in the model's chat template."""
    messages: InputFile | None = None
    """JSON file with a list of messages to answer, in the model's chat template."""
    data: TestRows | None = None
    """Rows to answer, with the columns of --task or of a known form: jsonl, json, csv, tsv or parquet,
    several files one after another; a folder with a file test; or the name of a data set of the hub."""
    json: bool = False
    """Print a JSON object for each answer: text, tokens, reason, prompt_tokens, speed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.chat and not self.prompt:
            problems.append("--chat belongs to --prompt")
        if self.task and not self.data:
            problems.append("--task belongs to --data")
        if self.columns and not self.data:
            problems.append("--columns belongs to --data")
        if self.system is not None and self.prompt and not self.chat:
            problems.append("--system belongs to --chat, --messages or --data")
        if problems:
            raise ConfigError("it isn't clear what to answer:", problems, code="settings-unusable")


@dataclass(frozen=True)
class ChatSettings(SpeakingFlags, OfBundle):
    """Talk to a bundle's model in the terminal; /help lists what can be said to the program."""

    max_tokens: int = 512
    """Most tokens of an answer."""
    temperature: float = 0.7
    """0 takes the most likely token each time; higher ones draw, 1 from the model's own distribution."""
    top_p: float = 0.95
    """Draw from the fewest likely tokens that have this share of the probability together."""
    overflow: Overflow = "truncate"
    """What to do when the conversation is too long for the context: truncate, forget its oldest turns; or
    error."""
    feedback: AppendedFile | None = None
    """File that /good, /bad and /better add rows to, with what was asked and answered; `prge tune --data`
    takes it. Default: nothing is kept."""


def open_speaking(folder: Path) -> Bundle:
    """Open a bundle whose model writes text; raises BundleError for another one."""
    bundle = open_bundle(folder)
    if bundle.chain.readout != "logprobs":
        raise BundleError(
            f"{folder} writes no text: its readout is {bundle.chain.readout}",
            remedy="export a causal language model, without label words",
            code="readout-writes-no-text",
        )
    return bundle


def read_adapter(bundle: Bundle, word: str) -> tuple[str, Adapter]:
    """An adapter of a bundle and its name, by what a user writes: a path, NAME=PATH, `bundle` or `base`.

    Raises:
        RunError: the path is a run without a result.
        AdapterError: it holds no adapter, or one that doesn't fit the bundle.
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
    """The path of an adapter that a user writes as such, or as NAME=PATH."""
    _, equals, path = word.partition("=")
    return Path(path if equals and not Path(word).exists() else word)


def read_adapters(given: OfBundle, bundle: Bundle) -> dict[str, Adapter]:
    """Adapters by name, as `read_adapter`; without words the tuned one or the bundle's. Names must differ."""
    tuning = tuning_at(given.bundle)
    if tuning is not None and not given.adapter:
        return {tuning.name: read_adapter(bundle, str(tuning.folder))[1]}
    return by_name([read_adapter(bundle, word) for word in given.adapter or [BUNDLE]])


def by_name(found: Sequence[tuple[str, Adapter]]) -> dict[str, Adapter]:
    """Adapters by their names, of which folders' may be no text; raises ConfigError for one that two have."""
    found = [(printable(name), adapter) for name, adapter in found]
    counts = Counter(name for name, _ in found)
    if problems := [f"{name!r} is the name of {count}" for name, count in counts.items() if count > 1]:
        raise ConfigError(
            "adapters need names of their own:",
            problems,
            remedy="give --adapter NAME=PATH",
            code="adapter-names-unusable",
        )
    return dict(found)


def open_generator(bundle: Bundle, tokenizer: Tokenizer, flags: SpeakingFlags, slots: int) -> Generator:
    """A generator on the engine that the flags ask for; raises BundleError, EngineError."""
    speaker = open_speaker_within(
        bundle, flags, slots=slots, context=flags.context, precision=flags.cache_dtype, tell=note
    )
    return Generator(speaker, tokenizer)


def open_speaker_within(
    bundle: Bundle,
    flags: EngineFlags,
    *,
    slots: int,
    context: int | None,
    precision: Precision,
    tell: Callable[[str], None],
) -> ChainSpeaker:
    """A speaker whose process keeps `--memory`; without --context with texts as long as that allows.

    Raises:
        PrgeError: see open_speaker and device_runner.session.memory.budget_of_texts.
    """
    most, budget = budget_of_texts(
        bundle, flags.memory, flags.engine, slots=slots, context=context, precision=precision
    )
    if budget is not None and context is None and most is not None and most < bundle.chain.bounds.context:
        tell(
            f"--memory {megabytes(budget.limit)} leaves room for texts of up to {most:,} tokens; "
            "--context asks for others"
        )
    loaded = None if budget is None else budget.loaded
    return open_speaker(
        bundle,
        threads=flags.threads,
        engine=flags.engine,
        loaded=loaded,
        slots=slots,
        context=most,
        precision=precision,
        tell=tell,
    )


def note(text: str) -> None:
    """Tell a user something beside the text that is generated."""
    with best_effort(sys.stderr):
        print(visible(text), file=sys.stderr, flush=True)
