"""`prge tune`: from rows to a tuned model with one command."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prge.cli.settings import parse_settings
from prge.formats.run_folder import DECISIONS, write_json
from prge.system.progress import format_duration
from prge.system.terminal import best_effort
from prge.system.threads import set_passive_wait_policy
from prge.training.evaluation import displacement_warning
from server_export.tune.samples import sample_lines
from server_export.tune.settings import TuneSettings

_COUNTS = ("examples", "cut_examples")


def main(argv: Sequence[str]) -> int:
    """Run `prge tune` and return its exit code."""
    set_passive_wait_policy()
    from server_export.tune.stages import tune

    settings = parse_settings(TuneSettings, argv, "prge tune", ["data"])
    try:
        result = tune(settings)
    except KeyboardInterrupt:
        is_begun = (settings.out / DECISIONS).is_file()
        hint = (
            f"stopped; resume with: prge tune --resume {settings.out}" if is_begun else "nothing was written"
        )
        # On standard error, since standard output may be a file.
        with best_effort(sys.stderr):
            print(f"\n{hint}", file=sys.stderr, flush=True)
        raise
    print("\n".join(result_lines(settings.out, result)))
    if settings.json:
        write_json(settings.json, result)
    return 0


def result_lines(out: Path, result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that a tuning prints at its end."""
    before, after = result["score_before"] or {}, result["score_after"] or {}
    yield f"\n{result['scored_rows'] + ' rows':<16}{'before':>12}{'after':>12}"
    for name in after:
        if name not in _COUNTS and isinstance(after[name], int | float):
            earlier = f"{before[name]:>12.4g}" if name in before else f"{'':>12}"
            yield f"{name:<16}{earlier}{after[name]:>12.4g}"
    if result["final_step"] == 0:
        yield "no step scored better than the start, so the adapter is the initial one"
    if warning := displacement_warning(after):
        yield f"note: {warning}"
    yield from sample_lines(result["samples"] or {})
    if scheme := result["quantization"]:
        yield (
            f"note: it was trained and scored against weights in {scheme}; with the original weights, "
            f"outputs can differ. `prge publish {out} --format merged --out FOLDER` writes a model with the "
            "weights that it was trained against"
        )
    memory = result["peak_mb"]
    yield f"\n{format_duration(result['seconds'])}" + (
        f", at most {memory:.0f} MB while training" if memory else ""
    )
    yield f"adapter  {out / 'adapter'}   loads with peft.PeftModel.from_pretrained"
    yield f"report   {out / 'report.html'}"
    if result["run_on_phone"]:
        yield f"phone    prge android chat {result['run_on_phone']}"
    yield f"next     {result['next']}"
