"""The inputs of a run that learns from a reward: prompts, and the reward of their completions."""

from __future__ import annotations

from device_runner.session.inputs import RunInputs, sample_prompts, start_record
from device_runner.session.settings import RunSettings
from prge.data.readers.files import Selection
from prge.data.sources import read_source
from prge.data.tokenization.tokenizer import load_bundle_tokenizer
from prge.formats.bundle import Bundle
from prge.formats.journal import Record
from prge.formats.peft import find_adapter, read_compatible_adapter
from prge.generation.prompts import Prompts
from prge.objectives.examples import tokens_sha256
from prge.objectives.objective import CROSS_ENTROPY, Objective
from prge.objectives.policy_gradient import GRPO
from prge.objectives.preferences import make_objective
from prge.rewards.opening import describe_reward
from prge.rewards.prompt_examples import PromptExample, prompt_examples


def read_reward_inputs(bundle: Bundle, settings: RunSettings) -> RunInputs:
    """Read the prompts and the adapter that the run starts from.

    Raises:
        PrgeError: the prompts, the reward or the adapter can't be used.
    """
    assert settings.reward is not None
    tokenizer, chain = load_bundle_tokenizer(bundle), bundle.chain
    prompts = Prompts(tokenizer, settings.date, control_tokens=settings.control_tokens)
    make_objective(settings.objective, settings)
    # Completions that are trained on pass the programs of training, which take shorter sequences.
    context = chain.bounds.context
    if settings.objective == "grpo":
        context = min(context, chain.model.sequence_length)
    notes: list[str] = []
    data: dict[str, Record] = {}

    def read(part: str, where: object, start: int, limit: int | None) -> tuple[list[PromptExample], str]:
        source = read_source(where, part, settings.columns)  # type: ignore[arg-type]
        selection = Selection(start, limit, settings.shuffle_seed)
        examples, lines = prompt_examples(
            source, selection, prompts, context=context, max_length=settings.max_completion_length
        )
        notes.extend(lines)
        data[part] = {"rows": len(examples)}
        return examples, source.sha256

    train, train_hash = read("train", settings.train, settings.train_start, settings.train_limit)
    dev: list[PromptExample] = []
    dev_hash = None
    if settings.dev is not None:
        dev, dev_hash = read("dev", settings.dev, settings.dev_start, settings.dev_limit)
    source = find_adapter(settings.adapter) if settings.adapter else bundle.adapter
    adapter = read_compatible_adapter(source, chain.model.modules, bundle.adapter)
    reward = describe_reward(settings.reward)
    is_grpo = settings.objective == "grpo"
    objective: Objective = GRPO(settings.clip_range, settings.beta or 0.0) if is_grpo else CROSS_ENTROPY
    origin = start_record(bundle, adapter, train_hash, dev_hash)
    origin |= {"objective": {"name": settings.objective}, "reward": reward}
    origin["tokens"] = tokens_sha256([*train, *dev])
    return RunInputs(
        bundle,
        tokenizer,
        None,
        [*train],
        [*dev],
        adapter,
        None,
        origin,
        "\n".join([*notes, f"reward: {reward['name']}"]),
        data,
        sample_prompts(settings, tokenizer),
        [],
        objective,
    )
