"""A verb of prge on a phone: its own settings, what they name brought there, what it writes brought back.

    flags -> settings of the verb -> the same with the phone's paths, inputs sent -> settings.yaml there
    -> `prge VERB` there -> outputs here

Which settings are inputs and outputs their types say: see prge/verbs/inputs.py and prge/verbs/outputs.py.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from device_runner.android.adb import quote
from device_runner.android.bringing import rows_there, send_adapter, send_bundle, send_settings, send_tuning
from device_runner.android.device import DeviceSettings, Phone, check_name, is_name
from device_runner.session.speaking import BASE, STDIN, adapter_source
from prge.errors import ConfigError, DeviceError
from prge.files.documents import parse_yaml
from prge.files.run_folder import reported
from prge.files.tuned import tuning_at
from prge.host.atomic import write_output
from prge.rows.inputs import read_text_of
from prge.running.training_flags import RowsFlags
from prge.verbs.bounds import flag
from prge.verbs.combining import combined, values_of
from prge.verbs.inputs import PART_OF_ROWS, Input, inputs_of
from prge.verbs.outputs import Output, outputs_of
from prge.verbs.settings import parse_settings
from prge.verbs.subverbs import Action


@dataclass(frozen=True, kw_only=True)
class ResumeFlags(DeviceSettings):
    """Which device, and what to go on with there."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ()

    def go_on(self) -> int:
        """Go on; returns the exit code, raises PrgeError."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RemoteFlags(DeviceSettings):
    """What is on the device already.

    The verb runs there at this terminal, and the files that it writes come here.
    """

    RESUMED: ClassVar[type[ResumeFlags] | None] = None
    """The settings of a command line with --resume."""
    NOT_GIVEN: ClassVar[tuple[str, ...]] = ()
    """Settings of the verb that nobody gives."""

    data_on_device: bool = False
    """Rows are named by their paths on the device, where they are already; nothing of them is sent."""

    @property
    def sends_rows_of_tuning(self) -> bool:
        """Whether the rows of a tuning go to the phone with its bundle and adapter."""
        return False

    def settings_there(self, given: Any) -> Mapping[str, Any]:
        """Settings of the verb that follow from these flags, as they are on the device.

        Args:
            given: the verb's settings that the user gave, and these flags.

        Raises:
            PrgeError: these flags can't be used.
        """
        return {}

    def bring(self, phone: Phone, settings: Any) -> Mapping[str, Any]:
        """Bring what no type of a setting says; the settings that this changes. Raises PrgeError."""
        return {}

    def execute(self, call: RemoteCall) -> int:
        """Run the verb; returns the exit code, raises PrgeError."""
        return call.attach()


@dataclass(frozen=True, kw_only=True)
class NamedRuns(RemoteFlags):
    """Which runs of the device write text, at this terminal."""

    ONE_OF: ClassVar = (("names", "bundle"),)

    names: tuple[str, ...] = ()
    """Runs on the device, all of one bundle, in the place of --bundle and --adapter; base: the model without
    an adapter."""

    def settings_there(self, given: Any) -> Mapping[str, Any]:
        """The runs as adapters; see RemoteFlags."""
        if not self.names:
            return {}
        if given.adapter:
            raise ConfigError("these settings can't be used:", ["--adapter belongs to --bundle"])
        if {*self.names} == {BASE}:
            raise ConfigError("no run is named:", ["name one whose model is to write; `prge android status`"])
        return {"bundle": Path(self.folder), "adapter": tuple(map(self._adapter, self.names))}

    def _adapter(self, name: str) -> str:
        if name == BASE:
            return name
        check_name(name)
        path = self.path("runs", name)
        return path if "=" in name else f"{name}={path}"

    def bring(self, phone: Phone, settings: Any) -> Mapping[str, Any]:
        """The bundle that the runs train; see RemoteFlags."""
        bundles = {name: _bundle_of(phone, name) for name in self.names if name != BASE}
        if len({*bundles.values()}) > 1:
            problems = [f"{name}: {bundle}" for name, bundle in bundles.items()]
            raise ConfigError("the runs have different bundles:", problems)
        return {"bundle": next(iter(bundles.values()))} if bundles else {}


@dataclass(frozen=True)
class RemoteVerb:
    """A verb that `prge android` offers: `prge VERB` with its own settings, on a phone.

    Args:
        words: the verb's name.
        settings: its settings class.
        help: what it does on a phone, for the list of verbs.
        flags: what a user says of the phone, besides; by default the verb runs there at this terminal.
        positional: settings that may be given without their flag.
        reads: whether the verb reads standard input.
    """

    words: str
    settings: type[Any]
    help: str
    flags: type[RemoteFlags] = RemoteFlags
    positional: tuple[str, ...] = ()
    reads: bool = False

    @property
    def action(self) -> Action:
        """For `prge android`."""
        return Action(self.help, self.main)

    @cached_property
    def all_settings(self) -> type[Any]:
        """The verb's settings and the flags, as a command line or a YAML file gives them."""
        has_rows = bool(PART_OF_ROWS.keys() & inputs_of(self.settings).values())
        without = [*self.flags.NOT_GIVEN, *([] if has_rows else ["data_on_device"])]
        about = f"{self.help[0].upper()}{self.help[1:]}."
        return combined(about, self.flags, self.settings, without=without)

    def main(self, argv: list[str]) -> int:
        """Run it; returns the exit code, raises PrgeError."""
        prog, resumed = f"prge android {self.words}", self.flags.RESUMED
        if resumed is not None and any(word.partition("=")[0] == "--resume" for word in argv):
            return parse_settings(resumed, argv, prog, resumed.POSITIONAL).go_on()
        given = parse_settings(self.all_settings, argv, prog, self.positional)
        flags = self.flags(**values_of(self.flags, given))
        there = flags.settings_there(given)
        own = values_of(self.settings, given)
        for item in fields(flags):  # which have another meaning where the verb has them, too
            own.pop(item.name, None)
        return flags.execute(RemoteCall(self, flags, self.settings(**{**own, **there}), there))


@dataclass(frozen=True)
class RemoteCall:
    """One call of a verb on a phone: `settings` are the verb's, those in `there` as they are on the phone."""

    verb: RemoteVerb
    flags: RemoteFlags
    settings: Any
    there: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def phone(self) -> Phone:
        """The phone, connected, with the driver that is here; raises DeviceError."""
        phone = self.flags.phone()
        phone.need_this_driver()
        return phone

    def bring(self) -> dict[str, Any]:
        """Bring what the settings name; all of them by name, as they are on the phone. Raises PrgeError."""
        there = {**self.there, **self.flags.bring(self.phone, self.settings)}
        settings = self.settings
        if isinstance(settings, RowsFlags):
            settings = settings.dated()
        found = {item.name: getattr(settings, item.name) for item in fields(settings)}
        for name, kind in inputs_of(type(settings)).items():
            if name not in there and found[name] is not None:
                there[name] = self._sent(name, kind, found[name])
        return found | there

    def send(self, settings: Mapping[str, Any], folder: str) -> list[str]:
        """Write settings to a folder of the phone; words for its Python that run the verb with them."""
        return ["-m", "prge.cli", *self.verb.words.split(), *send_settings(self.phone, settings, folder)]

    def attach(self) -> int:
        """Run the verb at this terminal, and bring the files here that it wrote, however it ended.

        Returns:
            Its exit code.

        Raises:
            PrgeError: an input can't be brought, a file can't be written here, or the phone was lost.
        """
        phone, settings = self.phone, self.bring()
        folder = phone.path("tmp", f"{self.verb.words.split()[-1]}-{secrets.token_hex(4)}")
        outputs = outputs_of(type(self.settings)).items()
        files = {name: path for name, _ in outputs if (path := settings[name]) and name not in self.there}
        settings |= {name: f"{folder}/{name}{path.suffix}" for name, path in files.items()}
        # A file that rows are appended to goes along: the verb sees what it would see here.
        before = {
            name: files[name].read_bytes()
            for name, output in outputs
            if output is Output.APPENDED and name in files and files[name].is_file()
        }
        try:
            phone.make(folder)
            for name in before:
                phone.copy_file(files[name], settings[name])
            code = phone.attach(self.send(settings, folder), self.verb.reads)
            for name, path in files.items():
                _keep(path, before.get(name, b""), phone.read_file(settings[name]))
            return code
        finally:
            phone.remove(folder)

    def _sent(self, name: str, kind: Input, value: Any) -> Any:
        """What a setting is on the phone, where its input is sent now."""
        match kind:
            case Input.FILE:
                is_file = isinstance(value, Path) or Path(value).is_file()
                return self.phone.send_file(Path(value)) if is_file else value
            case Input.BUNDLE:
                return send_bundle(self.phone, value)
            case Input.MODEL:
                if tuning := tuning_at(value):
                    return send_tuning(self.phone, tuning, self.flags.sends_rows_of_tuning)
                return send_bundle(self.phone, value)
            case Input.ADAPTER if isinstance(value, Path):
                return self._adapter(name, value)
            case Input.ADAPTER:
                return [self._named_adapter(name, word) for word in value]
            case Input.TEXT:
                return [read_text_of(sys.stdin) if text == STDIN else text for text in value]
            case _ if kind in PART_OF_ROWS:
                return rows_there(
                    self.phone, value, flag(name), PART_OF_ROWS[kind], self.flags.data_on_device
                )
        raise ConfigError("these settings can't be used:", [f"{flag(name)} can't be brought to a phone"])

    def _named_adapter(self, name: str, word: str) -> str:
        if word == BASE:
            return word
        source = adapter_source(word)
        called = source.resolve().name if source == Path(word) else word.partition("=")[0]
        return f"{called}={self._adapter(name, source)}"

    def _adapter(self, name: str, source: Path) -> str:
        """An adapter of this computer, sent, or that of a run on the phone."""
        if source.exists():
            return send_adapter(self.phone, source)
        run = self.phone.path("runs", str(source))
        if not is_name(str(source)) or not self.phone.exists(run, "d"):
            raise DeviceError(
                f"{flag(name)} {source}: there is no such folder, and no run of that name on "
                f"{self.phone.adb.serial}",
                remedy="give a run, checkpoint or PEFT folder, or a run of `prge android status`",
            )
        return run


def _keep(path: Path, before: bytes, content: bytes | None) -> None:
    """Write a file of the phone here; None: there is none. Of one that was changed meanwhile nothing goes."""
    if content is None or content == before:
        return
    if before and path.read_bytes() != before:
        with reported(path), path.open("ab") as stream:
            stream.write(content.removeprefix(before))
    else:
        write_output(path, content)


def _bundle_of(phone: Phone, name: str) -> str:
    """The bundle that a run on the device trains."""
    answer = phone.adb.shell(f"cat {quote([phone.path('runs', name, 'config.yaml')])}")
    if answer.code:
        raise phone.no_run(name)
    try:
        settings = parse_yaml(answer.output)
    except ValueError:
        settings = None
    bundle = settings.get("bundle") if isinstance(settings, dict) else None
    if not isinstance(bundle, str):
        raise DeviceError(f"the settings of the run {name!r} on {phone.adb.serial} name no bundle")
    return bundle
