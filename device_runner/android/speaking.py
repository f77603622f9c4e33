"""`prge android generate` and `chat`: the words of the same verbs on a phone, for runs that are there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from device_runner.android.adb import quote
from device_runner.android.device import DeviceSettings, Phone, check_name, send_rows
from device_runner.session.speaking import BASE, STDIN, ChatFlags, GenerateFlags
from prge.errors import ConfigError, DeviceError
from prge.files.documents import parse_yaml
from prge.verbs.bounds import flag


@dataclass(frozen=True)
class _Runs(DeviceSettings):
    names: tuple[str, ...] = ()
    """Runs on the device, all of one bundle; base: the model without an adapter."""


@dataclass(frozen=True)
class AndroidGenerateSettings(GenerateFlags, _Runs):
    """Generate text on a device."""


@dataclass(frozen=True)
class AndroidChatSettings(ChatFlags, _Runs):
    """Talk to a run's model on a device."""


def generate_words(phone: Phone, settings: AndroidGenerateSettings) -> list[str]:
    """Words for Python on the device; files are brought there. Raises DeviceError, ConfigError."""
    sent: dict[str, Any] = {}
    if settings.messages is not None:
        sent["messages"] = Path(phone.send_file(settings.messages))
    if settings.data is not None:
        sent["data"] = Path(send_rows(phone, settings.data, "test"))
    if settings.task and Path(settings.task).is_file():
        sent["task"] = phone.send_file(Path(settings.task))
    sent["prompt"] = tuple(sys.stdin.read() if text == STDIN else text for text in settings.prompt)
    return [*_verb(phone, "generate", settings.names), *_flags(GenerateFlags, replace(settings, **sent))]


def chat_words(phone: Phone, settings: AndroidChatSettings) -> list[str]:
    """Words for Python on the device; raises DeviceError, ConfigError."""
    return [*_verb(phone, "chat", settings.names), *_flags(ChatFlags, settings)]


def _verb(phone: Phone, verb: str, names: Sequence[str]) -> list[str]:
    """A verb with the bundle of runs, and the runs as its adapters."""
    runs = [name for name in names if name != BASE]
    if not runs:
        raise ConfigError("no run is named:", ["name one whose model is to speak; `prge android status`"])
    bundles = {name: _bundle_of(phone, name) for name in runs}
    if len(set(bundles.values())) > 1:
        raise ConfigError("the runs have different bundles:", [f"{n}: {b}" for n, b in bundles.items()])
    words = ["-m", "prge.cli", verb, "--bundle", bundles[runs[0]]]
    for name in names:
        path = phone.path("runs", name)
        words += [f"--adapter={name if name == BASE else path if '=' in name else f'{name}={path}'}"]
    return words


def _bundle_of(phone: Phone, name: str) -> str:
    """The bundle that a run on the device trains."""
    check_name(name)
    told = phone.adb.shell(f"cat {quote([phone.path('runs', name, 'config.yaml')])}")
    if told.code:
        runs = ", ".join(phone.jobs()) or "none"
        raise DeviceError(f"{phone.adb.serial} has no run {name!r}; it has: {runs}")
    try:
        settings = parse_yaml(told.output)
    except ValueError:
        settings = None
    bundle = settings.get("bundle") if isinstance(settings, dict) else None
    if not isinstance(bundle, str):
        raise DeviceError(f"the settings of the run {name!r} on {phone.adb.serial} name no bundle")
    return bundle


def _flags(settings_type: type[Any], settings: Any) -> list[str]:
    """The flags of `settings_type` that differ from their defaults, as words."""
    words = []
    for item in fields(settings_type):
        value = getattr(settings, item.name)
        if value == item.default:
            continue
        if isinstance(value, bool):
            words.append(flag(item.name))
        else:
            values = value if isinstance(value, tuple) else (value,)
            words += [f"{flag(item.name)}={each}" for each in values]
    return words
