"""Count the project files and frames of one exact step, as a measure of how hard it is to read.

    python scripts/studies/step_frames.py --bundle BUNDLE --train rows.jsonl --task task.yaml

Trains three steps with the native engine in a temporary folder and prints JSON: the `step_files` that run in
an exact step, the `frames` from the loop's step down to the engine's own code, and the number of `run_files`
of the whole run, from the settings on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import device_runner.run as run_verb
from device_runner.session.settings import RunSettings
from prge.cli.settings import parse_settings
from prge.training.loop import AdapterLearner

ROOT = Path(run_verb.__file__).parents[1]
_PACKAGES = tuple(str(ROOT / name) for name in ("prge", "device_runner"))
_ENGINE = str(ROOT / "device_runner/engines/native/runtime.py")


class FrameRecorder:
    """Records the files and frames that run, as a function for `sys.setprofile`."""

    def __init__(self) -> None:
        self.run_files: set[str] = set()
        self.step_files: set[str] = set()
        self.frames: list[str] = []
        self._step: FrameType | None = None

    def record(self, frame: FrameType, event: str, _: Any) -> None:
        """Handle a call or a return."""
        if event == "return" and frame is self._step:
            self._step = None
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(_PACKAGES):
            return
        if frame.f_code is AdapterLearner.step.__code__:
            self._step = frame
        name = str(Path(file).relative_to(ROOT))
        self.run_files.add(name)
        if self._step is None:
            return
        self.step_files.add(name)
        is_call = file == _ENGINE and frame.f_code.co_name == "run"
        if is_call and len(frames := [*self._frames(frame)]) > len(self.frames):
            self.frames = frames[::-1]

    def _frames(self, frame: FrameType | None) -> Iterator[str]:
        """Yield the project's functions from a frame up to the step."""
        while frame is not None:
            if frame.f_code.co_filename.startswith(_PACKAGES):
                yield f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_code.co_name}"
            if frame is self._step:
                return
            frame = frame.f_back


def study(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train and count."""
    recorder = FrameRecorder()
    with tempfile.TemporaryDirectory() as folder:
        arguments_of_run = [
            "--bundle",
            arguments.bundle,
            "--train",
            arguments.train,
            "--out",
            f"{folder}/run",
        ]
        arguments_of_run += ["--task", arguments.task] if arguments.task else []
        arguments_of_run += [
            "--estimator",
            "exact",
            "--engine",
            "native",
            "--steps",
            "3",
            "--batch-size",
            "4",
            "--quiet",
        ]
        sys.setprofile(recorder.record)
        try:
            run_verb.run(parse_settings(RunSettings, arguments_of_run, "prge run"))
        finally:
            sys.setprofile(None)
    return {
        "step_files": sorted(recorder.step_files),
        "frames": recorder.frames,
        "counts": {
            "step_files": len(recorder.step_files),
            "frames": len(recorder.frames),
            "run_files": len(recorder.run_files),
        },
    }


def main() -> None:
    """Parse the flags and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--task")
    print(json.dumps(study(parser.parse_args()), indent=2))


if __name__ == "__main__":
    main()
