"""Settings of `prge serve`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from device_runner.engines.trunk_cache import Precision
from device_runner.serving.history import FEEDBACK
from device_runner.serving.listen_settings import ListenFlags
from device_runner.session.constraints import Constraint, parse_when
from device_runner.session.settings import EngineFlags, PauseFlags, when_problems
from prge.cli.bounds import bound_problems, flag
from prge.cli.field_types import Bytes
from prge.cli.inputs import InputFile, InputFolder, ModelInput, NamedAdapter, TrainRows
from prge.cli.outputs import AppendedFile, OutputFolder
from prge.errors import ConfigError

_MAX_FEEDBACK = Bytes(1 << 30)
LearnObjective = Literal["completion", "kto", "grpo"]


@dataclass(frozen=True, kw_only=True)
class RoundFlags(PauseFlags):
    """Flags of learning from feedback while serving."""

    learn_every: int = 8
    """Feedback rows per round of learning; rows with every fifth prompt are held out for judging."""
    learn_objective: LearnObjective = "completion"
    """Loss of a round. completion: cross-entropy of corrections and good answers; kto, grpo: as for `prge
    run`, from ratings: good and bad ones, and a correction with the answer that it replaces."""
    learn_epochs: float = 8.0
    """Epochs over the rows of a round."""
    learning_rate: float | None = None
    """Peak learning rate of a round; default: that of the previous tuning or run, or 0.003."""
    replay: float = 0.5
    """Fraction of a round's rows that are earlier ones, from feedback and --kept, to prevent forgetting."""
    kept: TrainRows | None = None
    """Rows that must not be forgotten. Some are replayed; on others, no adapter may be worse than the initial
    one. Default: those of the previous tuning or run."""
    may_lose: float = 0.02
    """By how much an adapter may be worse than the initial one on --kept rows: in their task's metric, such
    as accuracy, or otherwise in the mean loss."""
    when: str = ""
    """Learn only while all of these hold, as for `prge run`: charging, cool, battery:30, idle, 22:00-07:00.
    Default: whenever no request is being answered."""

    def learning_conditions(self) -> list[Constraint]:
        """Return the conditions for learning: those for serving, and `when`."""
        return [*self.constraints(), *parse_when(self.when)]

    def idle_problems(self) -> list[str]:
        """Return the flags that have no effect without learning."""
        return [
            f"{flag(each.name)} needs --learn"
            for each in fields(RoundFlags)
            if each.name not in {other.name for other in fields(PauseFlags)}
            and getattr(self, each.name) != each.default
        ]


@dataclass(frozen=True, kw_only=True)
class LearnFlags(RoundFlags):
    """The folder to learn into."""

    learn: OutputFolder | None = None
    """Folder to learn into: between requests, the first --adapter (otherwise the folder's own) learns from
    feedback, and is replaced by a better one. Sets the default of --feedback to feedback.jsonl in this
    folder."""


@dataclass(frozen=True)
class ServeSettings(LearnFlags, ListenFlags, EngineFlags):
    """Serve a bundle and its adapters through OpenAI's protocol: chat completions, completions, models."""

    EXAMPLE: ClassVar = "bundle --adapter run --port 8000"

    bundle: ModelInput
    """Folder that `prge export` or `prge tune` wrote. The folder's name is the model with its tuned or
    bundled adapter; `base` is the model without an adapter."""
    adapter: list[NamedAdapter] = field(default_factory=list)
    """More models: NAME=PATH, or just the PATH of a run, checkpoint or PEFT folder, which gives the name."""
    model_name: str | None = None
    """Name of the folder's own model for clients; default: the folder's name."""
    chat_template: InputFile | None = None
    """Jinja file that turns messages into a prompt. Default: the model's own; without one, only
    /v1/completions is available."""
    chat_template_kwargs: str | None = None
    """JSON of variables for the chat template, if a request has no chat_template_kwargs, such as
    '{"enable_thinking": false}'."""
    queue: int = 64
    """Maximum number of completions that are generated or wait at once; further requests get status 429."""
    slots: int = 8
    """Maximum number of completions that are generated at once."""
    context: int | None = None
    """Maximum number of tokens of prompt and completion together; default: the bundle's limit."""
    cache_dtype: Precision = "float32"
    """Precision of the key-value cache. float16 halves its size, and takes more time to read."""

    feedback: AppendedFile | None = None
    """File to which /v1/feedback appends rows, with the prompt and the completion; `prge tune --data` reads
    it. Default: nothing is stored."""
    feedback_limit: Bytes = _MAX_FEEDBACK
    """Maximum size of this file, such as 200MB; feedback beyond it gets status 507."""
    runs: InputFolder | None = None
    """A run, or a folder with runs, to show on the page /training. Default: none."""

    def __post_init__(self) -> None:
        idle = [] if self.learn is not None else self.idle_problems()
        problems = [*bound_problems(self), *when_problems(self.when), *idle]
        if self.learn is not None and self.feedback not in (None, self.learn / FEEDBACK):
            problems.append(
                f"--feedback is {self.feedback}: --learn sets it to a file in its folder; leave it out"
            )
        if problems:
            raise ConfigError("These settings can't be used:", problems, code="settings-unusable")
