"""`prge guide`: gives a bundle the axes that its forward-only runs keep their directions to.

rows -> gradient of each, by backpropagation in PyTorch -> principal axes of every adapted layer's outputs

A gradient by a layer's `lora_b` lies near a few axes of the layer's outputs, whatever row it is of. The
workstation finds them on rows of the kind that a device will train on; the device needs no way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prge.contract import matrices
from prge.errors import ConfigError, DataError
from prge.files.adapter import adapter_size
from prge.files.bundle import Bundle, open_bundle
from prge.host.threads import let_threads_sleep
from prge.learning.estimators.guide import Guide, add_guide
from prge.running.training_flags import ExampleFlags
from prge.verbs.bounds import bound_problems
from prge.verbs.kinds import Paths
from prge.verbs.outputs import OutputFolder
from prge.verbs.settings import parse_settings

if TYPE_CHECKING:
    from server_export.evidence.baselines.problem import ModelProblem


@dataclass(frozen=True)
class GuideSettings(ExampleFlags):
    """Give a bundle axes for the directions of its forward-only runs, from gradients of rows."""

    bundle: OutputFolder
    """Folder that `prge export` wrote; it is another bundle afterwards, which no earlier run goes on with."""
    model: str
    """Folder, GGUF file or hub id of the model that it was exported from."""
    data: Paths
    """Rows with their labels, of the kind that a device will train on."""
    axes: int = 16
    """Axes of each layer's outputs."""
    limit: int = 400
    """Most rows; each costs a forward and a backward pass."""
    seed: int = 0
    """Seed of the choice among the rows."""

    def __post_init__(self) -> None:
        if problems := bound_problems(self):
            raise ConfigError("these settings can't be used:", problems)


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge guide --help`."""
    let_threads_sleep()
    settings = parse_settings(GuideSettings, argv, "prge guide")
    print(guide(settings))
    return 0


def guide(settings: GuideSettings) -> str:
    """Find the axes and write them into the bundle; returns what to say of them.

    Raises:
        PrgeError: bundle, model or rows can't be used; the bundle is as it was.
    """
    bundle = open_bundle(settings.bundle)
    problem = _problem(settings, bundle)
    found, shares = axes_of_gradients(problem, settings.axes)
    add_guide(bundle, found)
    few, much = min(shares.values()), max(shares.values())
    modules = bundle.chain.modules
    searched = sum(matrix.rank * found.width(matrix) for matrix in matrices(modules))
    trained = adapter_size(modules)
    return (
        f"{settings.bundle}: directions have {searched:,} random numbers instead of {trained:,}; their axes "
        f"explain {few:.0%} to {much:.0%} of the gradients of {len(problem.train):,} rows by a layer"
    )


def axes_of_gradients(problem: ModelProblem, count: int) -> tuple[Guide, dict[str, float]]:
    """Principal axes of the gradients of a problem's single rows, and what they explain of each layer's.

    An axis is as long as the square root of the gradients' root mean square along it: between one length for
    all, and lengths along which only the first would be learnt. All of a layer together have the mean square
    of signs. The problem's model gets an adapter.

    Raises:
        DataError: the rows have no gradient by a layer.
    """
    import torch

    from server_export.evidence.baselines.adapter import insert_adapter
    from server_export.model.principal import Principal

    lora_b = [layer.lora_b for layer in insert_adapter(problem).values()]
    problem.model.requires_grad_(False)
    for matrix in lora_b:
        matrix.requires_grad_(True)
    principals = [Principal(module.out_features, count) for module in problem.modules]
    for example in problem.train:
        gradients = torch.autograd.grad(problem.loss([example]), lora_b)
        for principal, gradient in zip(principals, gradients, strict=True):
            principal.add(gradient.T.float())
    axes, shares = {}, {}
    for module, principal in zip(problem.modules, principals, strict=True):
        found = principal.directions()
        if not len(found.rows):
            raise DataError(
                "the rows can't give axes:",
                [f"they have no gradient by {module.name}"],
                remedy="give other rows, or adapt other layers",
            )
        squares = found.shares.sqrt()
        lengths = (squares / squares.sum() * module.out_features).sqrt()
        axes[module.name] = (found.rows * lengths.float().unsqueeze(1)).numpy()
        shares[module.name] = float(found.shares.sum())
    return Guide(axes), shares


def _problem(settings: GuideSettings, bundle: Bundle) -> ModelProblem:
    """The bundle's model with the rows."""
    from prge.rows.example_building import BuildOptions, load_examples
    from prge.rows.own_heads import head_of, task_of
    from prge.rows.readers import Selection
    from prge.rows.report import warn_unread
    from prge.rows.sources import read_source
    from prge.rows.tokenizer import bundle_tokenizer
    from server_export.evidence.base import open_base
    from server_export.evidence.baselines.problem import ModelProblem
    from server_export.quiet import quiet_libraries

    quiet_libraries()
    tokenizer = bundle_tokenizer(bundle)
    task = task_of(bundle, settings.task)
    rows = read_source(settings.data, "train", settings.columns, task=task)
    chosen = Selection(limit=settings.limit, shuffle_seed=settings.seed)
    # Of preferences what is liked.
    options = BuildOptions(
        "auto",
        settings.append_eos,
        objective=None if task else "completion",
        control_tokens=settings.control_tokens,
        date=settings.date,
    )
    examples, report = load_examples(rows, tokenizer, bundle.chain.scoring, task, chosen, options)
    warn_unread(report)
    widest = max(len(example.sequences) for example in examples)
    base = open_base(bundle, settings.model)
    head = head_of(bundle, bundle.adapter, task, examples[0].candidates)
    return ModelProblem(bundle, base, examples, tokenizer.pad_id, widest, settings.seed, head=head)
