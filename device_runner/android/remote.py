"""A verb of prge on a phone: its own settings, what they name brought there, what it writes brought back.

    flags -> settings of the verb -> the same with the phone's paths, inputs sent -> settings.yaml there
    -> `prge VERB` there -> outputs here

Which settings are inputs and outputs their types say: see prge/verbs/inputs.py and prge/verbs/outputs.py.
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

from device_runner.android.bringing import rows_there, send_adapter, send_bundle, send_settings, send_tuning
from device_runner.android.device import Phone, PhoneFlags, is_name
from device_runner.session.speaking import BASE, STDIN, adapter_source
from prge.errors import ConfigError, DeviceError
from prge.files.documents import DocumentError, mapping, parse_yaml
from prge.files.run_folder import CONFIG, reported
from prge.files.tuned import tuning_at
from prge.host.atomic import write_output
from prge.rows.tokenization.inputs import read_text_of
from prge.running.training_flags import RowsFlags
from prge.verbs.bounds import flag
from prge.verbs.combining import combined, values_of
from prge.verbs.inputs import PART_OF_ROWS, Input, inputs_of
from prge.verbs.outputs import Output, outputs_of
from prge.verbs.settings import parse_settings


@dataclass(frozen=True, kw_only=True)
class RemoteFlags(PhoneFlags):
    """What is on the device already.

    The verb runs there at this terminal, and the files that it writes come here.
    """

    NOT_GIVEN: ClassVar[tuple[str, ...]] = ()
    """Settings of the verb that nobody gives."""
    POSITIONAL: ClassVar[tuple[str, ...]] = ("bundle", "adapter")
    """Settings that may be given as positional arguments, if the verb has them."""

    data_on_device: bool = False
    """Rows are named by their paths on the device, where they are already; nothing of them is sent."""

    def settings_there(self, given: Any) -> Mapping[str, Any]:
        """Settings of the verb that follow from these flags, as they are on the device.

        Args:
            given: what the user gave: settings of the verb, and these flags.

        Raises:
            PrgeError: these flags can't be used.
        """
        return {}

    def execute(self, call: RemoteCall) -> int:
        """Run the verb; returns the exit code, raises PrgeError."""
        return call.attach()


@dataclass(frozen=True)
class RemoteVerb:
    """A verb that `prge android` offers: `prge VERB` with its own settings, on a phone.

    Args:
        words: the verb's name.
        settings: its settings class.
        help: what it does on a phone, for the list of verbs.
        flags: what a user says of the phone besides; by default the verb runs there at this terminal.
        resume: runs the verb where the words have --resume.
        reads: whether the verb reads standard input.
    """

    words: str
    settings: type[Any]
    help: str
    flags: type[RemoteFlags] = RemoteFlags
    resume: Callable[[list[str]], int] | None = None
    reads: bool = False

    @cached_property
    def all_settings(self) -> type[Any]:
        """The verb's settings and the flags, as a command line or a YAML file gives them."""
        inputs = {*inputs_of(self.settings).values()}
        without = [*self.flags.NOT_GIVEN, *([] if inputs & PART_OF_ROWS.keys() else ["data_on_device"])]
        about = f"{self.help[0].upper()}{self.help[1:]}."
        if Input.ADAPTER in inputs:
            stands_for = "an adapter, or for a bundle with it" if self.takes_runs else "an adapter"
            about += f" The name of a run there stands for {stands_for}."
        return combined(about, self.flags, self.settings, without=without)

    @property
    def takes_runs(self) -> bool:
        """Whether a run on the phone can stand in the place of a bundle, and of a list of adapters."""
        return self.flags is RemoteFlags and inputs_of(self.settings).get("bundle") is Input.MODEL

    def main(self, argv: list[str]) -> int:
        """Run it; returns the exit code, raises PrgeError."""
        if self.resume is not None and any(word.partition("=")[0] == "--resume" for word in argv):
            return self.resume(argv)
        positional = [name for name in self.flags.POSITIONAL if name in inputs_of(self.settings)]
        given = parse_settings(self.all_settings, argv, f"prge android {self.words}", positional)
        flags = self.flags(**values_of(self.flags, given))
        there, own = flags.settings_there(given), values_of(self.settings, given)
        for item in fields(flags):  # which mean something else where the verb has them, too
            own.pop(item.name, None)
        return flags.execute(RemoteCall(self, flags, self.settings(**{**own, **there}), there))


@dataclass(frozen=True)
class RemoteCall:
    """One call of a verb on a phone: `settings` are the verb's, those in `there` as they are on the phone."""

    verb: RemoteVerb
    flags: RemoteFlags
    settings: Any
    there: Mapping[str, Any]

    @cached_property
    def phone(self) -> Phone:
        """The phone, connected, with the driver that is here; raises DeviceError."""
        phone = self.flags.phone()
        phone.need_this_driver()
        return phone

    def bring(self, **there: Any) -> dict[str, Any]:
        """Bring what the settings name; all of them, as they are on the phone. Raises PrgeError.

        Args:
            there: settings that are on the phone already.
        """
        settings, there = self.settings, {**self.there, **there}
        if self.verb.takes_runs:
            settings = self._with_run(settings, there)
        adapter = getattr(settings, "adapter", None)
        is_run_there = isinstance(adapter, Path) and self._run_there(str(adapter))
        if isinstance(settings, RowsFlags) and not is_run_there:
            settings = settings.dated()
        values = {item.name: getattr(settings, item.name) for item in fields(settings)} | there
        for name, source in inputs_of(type(settings)).items():
            if name not in there and values[name] is not None:
                values[name] = self._send_input(name, source, values[name])
        return values

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
        phone, settings, outputs = self.phone, self.bring(), outputs_of(type(self.settings))
        folder = phone.path("tmp", f"{self.verb.words}-{secrets.token_hex(4)}")
        files: dict[str, Path] = {name: settings[name] for name in outputs if settings[name] is not None}
        settings |= {name: f"{folder}/{name}{path.suffix}" for name, path in files.items()}
        # A file that rows are appended to goes along: the verb sees what it would see here.
        appended = [name for name in files if outputs[name] is Output.APPENDED and files[name].is_file()]
        before = {name: files[name].read_bytes() for name in appended}
        try:
            phone.make(folder)
            for name in appended:
                phone.copy_file(files[name], settings[name])
            code = phone.attach(self.send(settings, folder), self.verb.reads)
            for name, path in files.items():
                _write_here(path, before.get(name), phone.read_file(settings[name]))
            return code
        finally:
            phone.remove(folder)

    def _send_input(self, name: str, source: Input, value: Any) -> Any:
        """Send what a setting names; what the setting is on the phone."""
        match source:
            case Input.FILE:
                is_file = isinstance(value, Path) or Path(value).is_file()
                return self.phone.send_file(Path(value)) if is_file else value
            case Input.BUNDLE:
                return send_bundle(self.phone, value)
            case Input.MODEL:
                tuning = tuning_at(value)
                return send_tuning(self.phone, tuning) if tuning else send_bundle(self.phone, value)
            case Input.ADAPTER if isinstance(value, Path):
                return self._adapter(name, value)
            case Input.ADAPTER:
                return [self._named_adapter(name, word) for word in value]
            case Input.TEXT:
                return [read_text_of(sys.stdin) if text == STDIN else text for text in value]
            case _ if source in PART_OF_ROWS:
                return rows_there(
                    self.phone, value, flag(name), PART_OF_ROWS[source], self.flags.data_on_device
                )
        raise ConfigError(
            "these settings can't be used:",
            [f"{flag(name)} can't be brought to a phone"],
            code="setting-not-portable",
        )

    def _with_run(self, settings: Any, there: dict[str, Any]) -> Any:
        """Settings whose bundle is the name of a run on the phone: the bundle that it trains, its adapter."""
        bundle, adapter = settings.bundle, settings.adapter
        words = [str(bundle), *(adapter if isinstance(adapter, tuple) else ())]
        name = next((word for word in words if word != BASE), BASE)
        if str(bundle) != BASE and not self._run_there(name) and (bundle.exists() or not is_name(name)):
            return settings
        bundles = {
            word: _bundle_of(self.phone, word) for word in words if word == name or self._run_there(word)
        }
        if len({*bundles.values()}) > 1:
            raise ConfigError(
                "the runs have different bundles:",
                [f"{n}: {b}" for n, b in bundles.items()],
                code="bundles-differ",
            )
        there["bundle"] = bundles[name]
        return replace(settings, adapter=tuple(words) if isinstance(adapter, tuple) else adapter or bundle)

    def _named_adapter(self, name: str, word: str) -> str:
        if word == BASE:
            return word
        if run := self._run_there(word):
            return run if "=" in word else f"{word}={run}"
        source = adapter_source(word)
        called = source.resolve().name if source == Path(word) else word.partition("=")[0]
        return f"{called}={self._adapter(name, source)}"

    def _adapter(self, name: str, source: Path) -> str:
        """That of a run on the phone, or else one of this computer, which is sent."""
        if run := self._run_there(str(source)):
            return run
        if not source.exists():
            raise DeviceError(
                f"{flag(name)} {source}: there is no such folder, and no run of that name on "
                f"{self.phone.adb.serial}",
                remedy="give a run, checkpoint or PEFT folder, or a run of `prge android status`",
                code="adapter-missing",
            )
        return send_adapter(self.phone, source)

    def _run_there(self, name: str) -> str:
        """The folder of a run on the phone; empty where there is none of that name."""
        run = self.phone.path("runs", name)
        return run if is_name(name) and self.phone.exists(run, "d") else ""


def _write_here(path: Path, before: bytes | None, content: bytes | None) -> None:
    """Write here what a file of the phone holds; of one that was changed here meanwhile nothing goes.

    Args:
        path: of the file here.
        before: what went to the phone of it.
        content: what the phone has now; None: no such file.
    """
    if content is None or content == before:
        return
    if before is not None and path.read_bytes() != before:
        with reported(path), path.open("ab") as stream:
            stream.write(content.removeprefix(before))
    else:
        write_output(path, content)


def _bundle_of(phone: Phone, name: str) -> str:
    """The bundle that a run on the device trains."""
    config = phone.read_file(phone.path("runs", name, CONFIG))
    if config is None:
        raise phone.no_run(name)
    with suppress(DocumentError):
        if bundle := mapping(parse_yaml(config)).get("bundle"):
            return str(bundle)
    raise DeviceError(
        f"the settings of the run {name!r} on {phone.adb.serial} name no bundle", code="run-without-bundle"
    )
