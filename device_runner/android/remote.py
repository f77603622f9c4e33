"""Running a verb of prge on a phone: send its inputs, run it, and copy its output files back.

    flags -> settings of the verb -> inputs sent, paths of the phone in the settings -> settings.yaml there
    -> `prge VERB` there -> output files here

The types of the settings determine which are inputs and outputs: see prge/cli/inputs.py and
prge/cli/outputs.py.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from device_runner.android.device import Phone, PhoneFlags, is_name
from device_runner.android.push import rows_on_device, send_adapter, send_bundle, send_settings, send_tuning
from device_runner.session.generation import BASE, STDIN, adapter_source
from prge.cli.bounds import flag
from prge.cli.combined_settings import combine_settings, shared_values
from prge.cli.inputs import PART_OF_ROWS, Input, input_settings, join_reward, split_reward
from prge.cli.outputs import Output, output_settings
from prge.cli.settings import parse_settings
from prge.data.tokenization.inputs import read_input_text
from prge.errors import ConfigError, DeviceError
from prge.formats.documents import DocumentError, mapping, parse_yaml
from prge.formats.run_folder import CONFIG, as_run_error
from prge.formats.tune_folder import find_tuning
from prge.system.atomic import write_output
from prge.training.settings import RowsFlags


@dataclass(frozen=True, kw_only=True)
class RemoteFlags(PhoneFlags):
    """Data on the device.

    The verb runs on the device in this terminal, and the files that it writes are copied to this computer.
    """

    NOT_GIVEN: ClassVar[tuple[str, ...]] = ()
    """Settings of the verb that users can't give here."""
    POSITIONAL: ClassVar[tuple[str, ...]] = ("bundle", "adapter")
    """Settings that may be positional arguments, if the verb has them."""

    data_on_device: bool = False
    """The paths of rows are paths on the device, and no rows are sent."""

    def device_settings(self, settings: Any) -> Mapping[str, Any]:
        """Return the settings of the verb that follow from these flags, with paths on the device.

        Args:
            settings: the settings of the verb and these flags, as the user gave them.

        Raises:
            PrgeError: these flags can't be used.
        """
        return {}

    def execute(self, call: RemoteCall) -> int:
        """Run the verb, and return its exit code; raises PrgeError."""
        return call.attach()


@dataclass(frozen=True)
class RemoteVerb:
    """A verb of `prge android` that runs `prge VERB` with its own settings on a phone.

    Args:
        words: name of the verb.
        settings: settings class of the verb.
        help: what the verb does on a phone, for the list of verbs.
        example: words after the verb in the example command at the top of the help.
        flags: further flags; by default, the verb runs on the phone in this terminal.
        resume: function that runs the verb if its arguments have --resume.
        reads: whether the verb reads standard input.
    """

    words: str
    settings: type[Any]
    help: str
    example: str
    flags: type[RemoteFlags] = RemoteFlags
    resume: Callable[[list[str]], int] | None = None
    reads: bool = False

    @cached_property
    def all_settings(self) -> type[Any]:
        """A class of the verb's settings and the flags, for the command line and YAML files."""
        inputs = {*input_settings(self.settings).values()}
        without = [*self.flags.NOT_GIVEN, *([] if inputs & PART_OF_ROWS.keys() else ["data_on_device"])]
        about = f"{self.help[0].upper()}{self.help[1:]}."
        if Input.ADAPTER in inputs:
            stands_for = "an adapter, or for a bundle with it" if self.accepts_runs else "an adapter"
            about += f" The name of a run on the phone stands for {stands_for}."
        return combine_settings(about, self.flags, self.settings, without=without, example=self.example)

    @property
    def accepts_runs(self) -> bool:
        """Whether a run on the phone can replace a bundle and a list of adapters."""
        return self.flags is RemoteFlags and input_settings(self.settings).get("bundle") is Input.MODEL

    def main(self, argv: list[str]) -> int:
        """Run the verb with command-line arguments, and return its exit code; raises PrgeError."""
        if self.resume is not None and any(word.partition("=")[0] == "--resume" for word in argv):
            return self.resume(argv)
        positional = [name for name in self.flags.POSITIONAL if name in input_settings(self.settings)]
        settings = parse_settings(self.all_settings, argv, f"prge android {self.words}", positional)
        flags = self.flags(**shared_values(self.flags, settings))
        on_device, own = flags.device_settings(settings), shared_values(self.settings, settings)
        for item in fields(flags):  # a flag of the same name as a setting has another meaning
            own.pop(item.name, None)
        return flags.execute(RemoteCall(self, flags, self.settings(**{**own, **on_device}), on_device))


@dataclass(frozen=True)
class RemoteCall:
    """One call of a verb on a phone.

    Attributes:
        verb: the verb.
        flags: flags of the phone.
        settings: settings of the verb; paths of inputs are paths of this computer.
        on_device: those of the settings whose paths are paths of the phone already.
    """

    verb: RemoteVerb
    flags: RemoteFlags
    settings: Any
    on_device: Mapping[str, Any]

    @cached_property
    def phone(self) -> Phone:
        """The connected phone; raises DeviceError unless it has this computer's version of the driver."""
        phone = self.flags.phone()
        phone.require_this_driver()
        return phone

    def send_inputs(self, **on_device: Any) -> dict[str, Any]:
        """Send all inputs that the settings name, and return all settings with paths of the phone.

        Args:
            on_device: settings whose paths are paths of the phone already.

        Raises:
            PrgeError: an input can't be sent.
        """
        settings, on_device = self.settings, {**self.on_device, **on_device}
        if self.verb.accepts_runs:
            settings = self._with_run(settings, on_device)
        adapter = getattr(settings, "adapter", None)
        is_device_run = isinstance(adapter, Path) and self._run_folder(str(adapter))
        if isinstance(settings, RowsFlags) and not is_device_run:
            settings = settings.with_date()
        values = {item.name: getattr(settings, item.name) for item in fields(settings)} | on_device
        for name, source in input_settings(type(settings)).items():
            if name not in on_device and values[name] is not None:
                values[name] = self._send_input(name, source, values[name])
        return values

    def send(self, settings: Mapping[str, Any], folder: str) -> list[str]:
        """Write settings to a folder of the phone, and return the arguments of Python that run the verb."""
        return ["-m", "prge.cli.main", *self.verb.words.split(), *send_settings(self.phone, settings, folder)]

    def attach(self) -> int:
        """Run the verb in this terminal, and copy the files that it wrote to this computer.

        The files are copied however the verb ended.

        Returns:
            The exit code of the verb.

        Raises:
            PrgeError: an input can't be sent, a file can't be written on this computer, or the phone was
                lost.
        """
        phone, settings, outputs = self.phone, self.send_inputs(), output_settings(type(self.settings))
        folder = phone.path("tmp", f"{self.verb.words}-{secrets.token_hex(4)}")
        files: dict[str, Path] = {name: settings[name] for name in outputs if settings[name] is not None}
        settings |= {name: f"{folder}/{name}{path.suffix}" for name, path in files.items()}
        # Files that the verb appends to are sent, so that the verb sees what it would see here.
        appended = [name for name in files if outputs[name] is Output.APPENDED and files[name].is_file()]
        before = {name: files[name].read_bytes() for name in appended}
        try:
            phone.make_folder(folder)
            for name in appended:
                phone.copy_file(files[name], settings[name])
            code = phone.attach(self.send(settings, folder), self.verb.reads)
            for name, path in files.items():
                _write_locally(path, before.get(name), phone.read_file(settings[name]))
            return code
        finally:
            phone.remove(folder)

    def _send_input(self, name: str, source: Input, value: Any) -> Any:
        """Send the input that a setting names, and return the setting's value on the phone."""
        match source:
            case Input.FILE:
                is_file = isinstance(value, Path) or Path(value).is_file()
                return self.phone.send_file(Path(value)) if is_file else value
            case Input.BUNDLE:
                return send_bundle(self.phone, value)
            case Input.MODEL:
                tuning = find_tuning(value)
                return send_tuning(self.phone, tuning) if tuning else send_bundle(self.phone, value)
            case Input.ADAPTER if isinstance(value, Path):
                return self._adapter(name, value)
            case Input.ADAPTER:
                return [self._named_adapter(name, word) for word in value]
            case Input.TEXT:
                return [read_input_text(sys.stdin) if text == STDIN else text for text in value]
            case Input.REWARD:
                path, function = split_reward(value)
                return join_reward(self.phone.send_file(path), function)
            case _ if source in PART_OF_ROWS:
                return rows_on_device(
                    self.phone, value, flag(name), PART_OF_ROWS[source], self.flags.data_on_device
                )
        raise ConfigError(
            "These settings can't be used:",
            [f"{flag(name)} can't be sent to a phone"],
            code="setting-not-portable",
        )

    def _with_run(self, settings: Any, on_device: dict[str, Any]) -> Any:
        """Return settings in which the name of a run on the phone became its adapter.

        The bundle of the run is written to `on_device`. Settings that name no run stay as they are.
        """
        bundle, adapter = settings.bundle, settings.adapter
        words = [str(bundle), *(adapter if isinstance(adapter, tuple) else ())]
        name = next((word for word in words if word != BASE), BASE)
        if str(bundle) != BASE and not self._run_folder(name) and (bundle.exists() or not is_name(name)):
            return settings
        bundles = {
            word: _bundle_of(self.phone, word) for word in words if word == name or self._run_folder(word)
        }
        if len({*bundles.values()}) > 1:
            raise ConfigError(
                "The runs have different bundles:",
                [f"{n}: {b}" for n, b in bundles.items()],
                code="bundles-differ",
            )
        on_device["bundle"] = bundles[name]
        return replace(settings, adapter=tuple(words) if isinstance(adapter, tuple) else adapter or bundle)

    def _named_adapter(self, name: str, word: str) -> str:
        """Return an entry of a list of adapters, NAME=PATH, with a path of the phone."""
        if word == BASE:
            return word
        if run := self._run_folder(word):
            return run if "=" in word else f"{word}={run}"
        source = adapter_source(word)
        title = source.resolve().name if source == Path(word) else word.partition("=")[0]
        return f"{title}={self._adapter(name, source)}"

    def _adapter(self, name: str, source: Path) -> str:
        """Return an adapter's path on the phone: that of a run there, or of a local adapter to be sent."""
        if run := self._run_folder(str(source)):
            return run
        if not source.exists():
            raise DeviceError(
                f"{flag(name)} {source}: there is no such folder, and no run of that name on "
                f"{self.phone.adb.serial}.",
                remedy="Give a run, checkpoint or PEFT folder, or the name of a run on the phone.",
                code="adapter-missing",
            )
        return send_adapter(self.phone, source)

    def _run_folder(self, name: str) -> str:
        """Return the folder of a run on the phone; empty if there is no run of that name."""
        run = self.phone.path("runs", name)
        return run if is_name(name) and self.phone.exists(run, "d") else ""


def _write_locally(path: Path, before: bytes | None, content: bytes | None) -> None:
    """Write the content of a file of the phone to a file of this computer.

    If the local file was changed meanwhile, only what the verb appended is added to it.

    Args:
        path: path of the local file.
        before: content that was sent to the phone; None: nothing was sent.
        content: content on the phone now; None: there is no such file.
    """
    if content is None or content == before:
        return
    if before is not None and path.read_bytes() != before:
        with as_run_error(path), path.open("ab") as stream:
            stream.write(content.removeprefix(before))
    else:
        write_output(path, content)


def _bundle_of(phone: Phone, name: str) -> str:
    """Return the path of a run's bundle on the device; raises DeviceError."""
    config = phone.read_file(phone.path("runs", name, CONFIG))
    if config is None:
        raise phone.no_run_error(name)
    with suppress(DocumentError):
        if bundle := mapping(parse_yaml(config)).get("bundle"):
            return str(bundle)
    raise DeviceError(
        f"The settings of the run {name!r} on {phone.adb.serial} name no bundle.", code="run-without-bundle"
    )
