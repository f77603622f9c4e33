from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from device_runner.session.settings import EvaluateSettings, RunSettings
from prge.api import Model as Model
from prge.api import Run as Run
from prge.api import Tuned as Tuned
from prge.api import load as load
from prge.errors import PrgeError as PrgeError
from prge.formats.bundle import Bundle
from server_export.settings import ExportConfig
from server_export.tune.settings import TuneSettings

_Settings = ParamSpec("_Settings")
_Result = TypeVar("_Result")

__version__: str

# A function takes the fields of its verb's settings class as keyword arguments.
def _takes(
    settings: Callable[_Settings, object],
) -> Callable[[Callable[[], _Result]], Callable[_Settings, _Result]]: ...
@_takes(TuneSettings)
def tune() -> Tuned: ...
@_takes(ExportConfig)
def export() -> Bundle: ...
@_takes(RunSettings)
def run() -> Run: ...
@_takes(EvaluateSettings)
def evaluate() -> dict[str, Any]: ...
def open_bundle(folder: Path | str) -> Bundle: ...
