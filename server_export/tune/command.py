"""`prge tune`: from rows to a tuned model with one command."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prge.files.run_folder import DECISIONS, write_json
from prge.host.progress import duration
from prge.host.terminal import best_effort
from prge.host.threads import let_threads_sleep
from prge.rows.scoring import displacement
from prge.verbs.settings import parse_settings
from server_export.tune.samples import sample_lines
from server_export.tune.settings import TuneSettings

_COUNTS = ("examples", "cut_examples")


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge tune --help`."""
    let_threads_sleep()
    from server_export.tune.stages import tune

    settings = parse_settings(TuneSettings, argv, "prge tune", ["data"])
    try:
        result = tune(settings)
    except KeyboardInterrupt:
        is_begun = (settings.out / DECISIONS).is_file()
        told = f"stopped; go on with: prge tune --resume {settings.out}" if is_begun else "nothing was made"
        # On the terminal too where results go into a file.
        with best_effort(sys.stderr):
            print(f"\n{told}", file=sys.stderr, flush=True)
        raise
    print("\n".join(result_lines(settings.out, result)))
    if settings.json:
        write_json(settings.json, result)
    return 0


def result_lines(out: Path, result: Mapping[str, Any]) -> Iterator[str]:
    """What a tuning says at its end."""
    before, after = result["score_before"] or {}, result["score_after"] or {}
    yield f"\n{result['scored_rows'] + ' rows':<16}{'before':>12}{'after':>12}"
    for name in after:
        if name not in _COUNTS and isinstance(after[name], int | float):
            earlier = f"{before[name]:>12.4g}" if name in before else f"{'':>12}"
            yield f"{name:<16}{earlier}{after[name]:>12.4g}"
    if result["final_step"] == 0:
        yield "no step was better than the start, so the adapter is that of the start"
    if fallen := displacement(after):
        yield f"note: {fallen}"
    yield from sample_lines(result["samples"] or {})
    if scheme := result["quantization"]:
        yield (
            f"note: it was trained and scored against weights in {scheme}; with the original weights answers "
            f"can differ. `prge publish {out} --format merged --out FOLDER` writes a model with the weights "
            "that it was trained against"
        )
    memory = result["peak_mb"]
    yield f"\n{duration(result['seconds'])}" + (f", at most {memory:.0f} MB while training" if memory else "")
    yield f"adapter  {out / 'adapter'}   loads with peft.PeftModel.from_pretrained"
    yield f"report   {out / 'report.html'}"
    if result["run_on_phone"]:
        yield f"phone    prge android chat {result['run_on_phone']}"
    yield f"next     {result['next']}"
