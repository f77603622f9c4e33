"""`prge report`: one page about runs: what came out, what they wrote, what it cost, what is next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prge.errors import ConfigError, RunError
from prge.files.tuned import run_at
from prge.host.atomic import write_output
from prge.verbs.inputs import InputFolder
from prge.verbs.outputs import OutputFile, OutputFolder
from prge.verbs.settings import parse_settings


@dataclass(frozen=True)
class ReportSettings:
    """Write one HTML page about runs, finished or not. It needs no network and no script to be read.

    Or send their metrics to TensorBoard or Weights & Biases.
    """

    runs: tuple[InputFolder, ...]
    """Run folders of `prge run`, `prge tune` or `prge baseline`, finished, going on or killed."""
    out: OutputFile = Path("report.html")
    """HTML file to write; or an .svg, of the curves alone."""

    tensorboard: OutputFolder | None = None
    """Write no page, but TensorBoard's event files into this folder."""
    wandb: str | None = None
    """Write no page, but send the runs to this project of Weights & Biases."""
    follow: bool = False
    """With these: go on sending as metrics are written, until the runs end."""

    def __post_init__(self) -> None:
        problems = [] if self.runs else ["no run is given"]
        if self.follow and not self.sends:
            problems.append("--follow is for --tensorboard and --wandb")
        if self.out.suffix not in (".html", ".htm", ".svg"):
            problems.append(f"--out is {self.out}, must end in .html or .svg")
        if problems:
            raise ConfigError("there is nothing to report so:", problems, code="settings-unusable")

    @property
    def sends(self) -> bool:
        """Whether metrics are sent, in place of a page."""
        return self.tensorboard is not None or self.wandb is not None


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge report --help`."""
    settings = parse_settings(ReportSettings, argv, "prge report", ["runs"])
    if settings.sends:
        from device_runner.reporting.sending import send

        runs = [run_at(run) for run in settings.runs]
        send(runs, settings.tensorboard, settings.wandb, settings.follow)
        print(settings.tensorboard or settings.wandb)
    else:
        report(settings)
        print(settings.out)
    return 0


def report(settings: ReportSettings) -> None:
    """Write the page, or the picture.

    Raises:
        RunError: a folder is no run, a picture would have no curve, or the file can't be written.
    """
    from device_runner.reporting.content import compose
    from device_runner.reporting.reading import read_run
    from prge.pages.charts import as_file, beside
    from prge.pages.document import Picture
    from prge.pages.rendering import to_html

    blocks = compose([read_run(run_at(run)) for run in settings.runs])
    if settings.out.suffix != ".svg":
        text = to_html(blocks)
    elif drawn := beside([block.drawing for block in blocks if isinstance(block, Picture)], 2):
        text = as_file(drawn)
    else:
        raise RunError(
            f"{', '.join(map(str, settings.runs))}: nothing measured yet",
            remedy="wait for the first step",
            code="nothing-measured",
        )
    write_output(settings.out, text.encode(errors="backslashreplace"))
