"""The classification heads that an encoder's run starts with."""

from __future__ import annotations

from device_runner.session.inputs import RunInputs
from device_runner.session.settings import RunSettings
from prge.engine import Engine
from prge.errors import RunError
from prge.formats.journal import Journal
from prge.training.checkpoint_heads import describe_unused_head
from prge.training.encoder_heads import Heads, fit_heads, heads_digest


def prepare_heads(
    settings: RunSettings, inputs: RunInputs, engine: Engine, journal: Journal
) -> tuple[Heads, str]:
    """Return an encoder's heads, and a description of where new ones come from.

    They come from the journal, the start adapter, another run, or a fit on the training rows.
    """
    model = engine.model
    if not model.is_encoder:
        return Heads(), ""
    heads = Heads.from_journal(journal, model.width)
    if heads is not None:
        return heads, ""
    folds = 0 if settings.head_learning_rate else settings.head_folds
    digest, source = (
        heads_digest(inputs.bundle.sha256, inputs.adapter, inputs.train, folds),
        "the adapter's",
    )
    if inputs.start_head:
        heads = Heads(inputs.start_head)
        if inputs.bundle.labels and settings.adapter is None:
            source = f"the checkpoint's own, of {', '.join(inputs.bundle.labels)}"
    elif settings.heads_of:
        if not settings.heads_of.is_file():
            raise RunError(
                f"--heads-of is {settings.heads_of}, which doesn't exist.",
                remedy="Set it to the journal.jsonl of a run, or leave it out.",
                code="file-missing",
            )
        other = Journal(settings.heads_of, writable=False)
        heads, source = Heads.from_journal(other, model.width, digest), f"those of {settings.heads_of}"
    if heads is None:
        heads = fit_heads(engine, inputs.adapter, inputs.train, folds)
        source = f"fitted on {len(inputs.train):,} rows"
        if refused := describe_unused_head(inputs.bundle):
            source += f"; {refused}"
    journal.append(heads.to_record(digest))
    return heads, source
