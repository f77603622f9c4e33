"""`prge report`: write a page about runs: results, samples, costs, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from prge.cli.inputs import InputFolder
from prge.cli.outputs import OutputFile, OutputFolder
from prge.cli.settings import parse_settings
from prge.errors import ConfigError, RunError
from prge.formats.tune_folder import resolve_run
from prge.system.atomic import write_output


@dataclass(frozen=True)
class ReportSettings:
    """Write one HTML page about runs, finished or not. Reading it needs no network and no scripts.

    Or send their metrics to TensorBoard or Weights & Biases.
    """

    EXAMPLE: ClassVar = "run --out report.html"

    runs: tuple[InputFolder, ...]
    """Run folders of `prge run`, `prge tune` or `prge baseline`: finished, running or killed."""
    out: OutputFile = Path("report.html")
    """HTML file to write, or an .svg file with only the curves."""

    tensorboard: OutputFolder | None = None
    """Write TensorBoard's event files into this folder instead of a page."""
    wandb: str | None = None
    """Send the runs to this project of Weights & Biases instead of writing a page."""
    follow: bool = False
    """With --tensorboard or --wandb: keep sending new metrics until the runs end."""

    def __post_init__(self) -> None:
        problems = [] if self.runs else ["no run is named"]
        if self.follow and not self.sends:
            problems.append("--follow requires --tensorboard or --wandb")
        if self.out.suffix not in (".html", ".htm", ".svg"):
            problems.append(f"--out is {self.out}, must end in .html or .svg")
        if problems:
            raise ConfigError("These settings can't be used:", problems, code="settings-unusable")

    @property
    def sends(self) -> bool:
        """Whether metrics are sent instead of writing a page."""
        return self.tensorboard is not None or self.wandb is not None


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge report --help`."""
    settings = parse_settings(ReportSettings, argv, "prge report", ["runs"])
    if settings.sends:
        from device_runner.reporting.trackers import send

        runs = [resolve_run(run) for run in settings.runs]
        send(runs, settings.tensorboard, settings.wandb, settings.follow)
        print(settings.tensorboard or settings.wandb)
    else:
        report(settings)
        print(settings.out)
    return 0


def report(settings: ReportSettings) -> None:
    """Write the page, or the curves.

    Raises:
        RunError: a folder is not a run, there are no curves yet, or the file can't be written.
    """
    from device_runner.reporting.content import compose
    from device_runner.reporting.run_reader import read_run
    from prge.report.charts import arrange_charts, standalone_svg
    from prge.report.document import Picture
    from prge.report.rendering import to_html

    blocks = compose([read_run(resolve_run(run)) for run in settings.runs])
    if settings.out.suffix != ".svg":
        content = to_html(blocks)
    elif drawing := arrange_charts([block.drawing for block in blocks if isinstance(block, Picture)], 2):
        content = standalone_svg(drawing)
    else:
        raise RunError(
            f"{', '.join(map(str, settings.runs))}: nothing measured yet.",
            remedy="Wait for the first step.",
            code="nothing-measured",
        )
    write_output(settings.out, content.encode(errors="backslashreplace"))
