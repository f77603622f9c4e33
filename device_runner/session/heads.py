"""The heads that an encoder's run begins with."""

from __future__ import annotations

from device_runner.session.inputs import RunInputs
from device_runner.session.settings import RunSettings
from prge.engine import Engine
from prge.errors import RunError
from prge.files.journal import Journal
from prge.learning.encoder_heads import Heads, digest_of, fit_heads
from prge.rows.own_heads import refused_labels


def prepare_heads(
    settings: RunSettings, inputs: RunInputs, engine: Engine, journal: Journal
) -> tuple[Heads, str]:
    """An encoder's heads, and in words where new ones come from.

    They are the journal's, the start adapter's, another run's, or fitted on the training rows.
    """
    model = engine.model
    if not model.is_encoder:
        return Heads(), ""
    heads = Heads.from_journal(journal, model.width)
    if heads is not None:
        return heads, ""
    folds = 0 if settings.head_learning_rate else settings.head_folds
    digest, told = digest_of(inputs.bundle.sha256, inputs.adapter, inputs.train, folds), "the adapter's"
    if inputs.start_head:
        heads = Heads(inputs.start_head)
        if inputs.bundle.labels and settings.adapter is None:
            told = f"the checkpoint's own, of {', '.join(inputs.bundle.labels)}"
    elif settings.heads_of:
        if not settings.heads_of.is_file():
            raise RunError(
                f"--heads-of is {settings.heads_of}: there is no such file",
                remedy="give the journal.jsonl of a run, or leave it out",
                code="file-missing",
            )
        other = Journal(settings.heads_of, writable=False)
        heads, told = Heads.from_journal(other, model.width, digest), f"those of {settings.heads_of}"
    if heads is None:
        heads = fit_heads(engine, inputs.adapter, inputs.train, folds)
        told = f"fitted on {len(inputs.train):,} rows"
        if refused := refused_labels(inputs.bundle):
            told += f"; {refused}"
    journal.append(heads.to_record(digest))
    return heads, told
