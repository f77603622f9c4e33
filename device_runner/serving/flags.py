"""Settings of `prge serve`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from device_runner.engines.trunk_cache import Precision
from device_runner.serving.history import FEEDBACK
from device_runner.serving.listen_flags import ListenFlags
from device_runner.session.conditions import Condition, parse_when
from device_runner.session.settings import EngineFlags, PauseFlags, when_problems
from prge.errors import ConfigError
from prge.verbs.bounds import bound_problems, flag
from prge.verbs.inputs import InputFile, InputFolder, ModelInput, NamedAdapter, TrainRows
from prge.verbs.kinds import Bytes
from prge.verbs.outputs import AppendedFile, OutputFolder

_MOST_FEEDBACK = Bytes(1 << 30)


@dataclass(frozen=True, kw_only=True)
class RoundFlags(PauseFlags):
    """Learning while answers are made."""

    learn_every: int = 8
    """Rows of feedback of a round of learning; what one in five of them is about is held back to judge by."""
    learn_epochs: float = 8.0
    """Times that a round sees every row."""
    learning_rate: float | None = None
    """Peak learning rate of a round; default: that of the tuning or run before, or 0.003."""
    replay: float = 0.5
    """Share of a round's rows that are earlier ones: feedback and --kept, so that nothing is forgotten."""
    kept: TrainRows | None = None
    """Rows that must not be forgotten. Some are replayed; on others no adapter may be worse than that of the
    start. Default: those of the tuning or run before."""
    may_lose: float = 0.02
    """By how much an adapter may be worse than that of the start on kept rows: of their task's metric,
    such as accuracy, or else of the mean loss."""
    when: str = ""
    """Learn only while all of these hold, as of `prge run`: charging, cool, battery:30, idle, 22:00-07:00.
    Default: whenever no request is answered."""

    def learning_conditions(self) -> list[Condition]:
        """What must be met to learn: that by which the server answers at all, and `when`."""
        return [*self.conditions(), *parse_when(self.when)]

    def idle_problems(self) -> list[str]:
        """Flags that mean nothing without learning."""
        return [
            f"{flag(each.name)} belongs to --learn"
            for each in fields(RoundFlags)
            if each.name not in {other.name for other in fields(PauseFlags)}
            and getattr(self, each.name) != each.default
        ]


@dataclass(frozen=True, kw_only=True)
class LearnFlags(RoundFlags):
    """Where to learn into."""

    learn: OutputFolder | None = None
    """Folder to learn into: between requests the first --adapter, else the folder's own, learns from
    feedback, and a better one takes its place. The folder's feedback.jsonl is --feedback's default."""


@dataclass(frozen=True)
class ServeSettings(LearnFlags, ListenFlags, EngineFlags):
    """Serve a bundle and its adapters by OpenAI's protocol: chat completions, completions, models."""

    bundle: ModelInput
    """Folder that `prge export` or `prge tune` wrote. The adapter that was tuned, or that came with the
    bundle, is the model that the folder's name calls; `base` is the model without any."""
    adapter: list[NamedAdapter] = field(default_factory=list)
    """Further models: NAME=PATH, or the PATH of a run, checkpoint or PEFT folder that gives its name."""
    model_name: str | None = None
    """What clients call the folder's own model; default: the folder's name."""
    chat_template: InputFile | None = None
    """Jinja file that makes a prompt of messages. Default: the model's own; without one only
    /v1/completions answers."""
    chat_template_kwargs: str | None = None
    """JSON of what the chat template is given where a request has no chat_template_kwargs of its own, such
    as '{"enable_thinking": false}'."""
    queue: int = 64
    """Most answers that are made or wait at once; further requests get status 429."""
    slots: int = 8
    """Most answers that are made at once."""
    context: int | None = None
    """Most tokens of prompt and answer together; default: the bundle's bound."""
    cache_dtype: Precision = "float32"
    """Precision of keys and values of a text so far. float16 takes half the room, and time to read."""

    feedback: AppendedFile | None = None
    """File that /v1/feedback adds rows to, with what was asked and answered; `prge tune --data` takes it.
    Default: nothing is kept."""
    feedback_limit: Bytes = _MOST_FEEDBACK
    """Most bytes that this file may have, such as 200MB; then feedback gets status 507."""
    runs: InputFolder | None = None
    """A run, or a folder of runs, that the page /training shows. Default: none."""

    def __post_init__(self) -> None:
        idle = [] if self.learn is not None else self.idle_problems()
        problems = [*bound_problems(self), *when_problems(self.when), *idle]
        if self.learn is not None and self.feedback not in (None, self.learn / FEEDBACK):
            problems.append(f"--feedback is {self.feedback}: with --learn it is in that folder; leave it out")
        if problems:
            raise ConfigError("these settings can't be used:", problems, code="settings-unusable")
