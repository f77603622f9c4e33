"""`prge android generate` and `chat`: the same verbs on a phone, for runs that are there."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from device_runner.android.adb import quote
from device_runner.android.device import (
    DeviceSettings,
    Phone,
    check_name,
    files_there,
    send_rows,
    send_settings,
)
from device_runner.session.speaking import BASE, STDIN, ChatFlags, GenerateFlags
from prge.errors import ConfigError, DeviceError
from prge.files.documents import parse_yaml
from prge.rows.tokenization.inputs import read_text_of
from prge.verbs.settings import part_of


@dataclass(frozen=True)
class _Runs(DeviceSettings):
    """Which runs speak."""

    names: tuple[str, ...] = ()
    """Runs on the device, all of one bundle; base: the model without an adapter."""


@dataclass(frozen=True)
class AndroidGenerateSettings(GenerateFlags, _Runs):
    """Generate text on a device."""


@dataclass(frozen=True)
class AndroidChatSettings(ChatFlags, _Runs):
    """Talk to a run's model on a device."""


def generate_on(phone: Phone, settings: AndroidGenerateSettings) -> int:
    """Generate there, at this terminal; files are brought. Returns the exit code; raises as `chat_on`."""
    sent: dict[str, Any] = {**files_there(phone, settings, "messages", "task")}
    if settings.data is not None:
        sent["data"] = send_rows(phone, settings.data, "test")
    sent["prompt"] = [read_text_of(sys.stdin) if text == STDIN else text for text in settings.prompt]
    own = vars(part_of(GenerateFlags, settings))
    return _speaking(phone, "generate", settings.names, {**own, **sent})


def chat_on(phone: Phone, settings: AndroidChatSettings) -> int:
    """Talk there, at this terminal; returns the exit code.

    Raises:
        ConfigError: no run is named, or runs of different bundles.
        DeviceError: a run isn't there, or the device was lost.
    """
    return _speaking(phone, "chat", settings.names, vars(part_of(ChatFlags, settings)))


def _speaking(phone: Phone, verb: str, names: Sequence[str], settings: Mapping[str, Any]) -> int:
    """A verb with the bundle of runs, and the runs as its adapters."""
    runs = [name for name in names if name != BASE]
    if not runs:
        raise ConfigError("no run is named:", ["name one whose model is to speak; `prge android status`"])
    bundles = {name: _bundle_of(phone, name) for name in runs}
    if len(set(bundles.values())) > 1:
        raise ConfigError("the runs have different bundles:", [f"{n}: {b}" for n, b in bundles.items()])
    paths = {name: phone.path("runs", name) for name in runs}
    adapters = [
        BASE if name == BASE else paths[name] if "=" in name else f"{name}={paths[name]}" for name in names
    ]
    folder = phone.path("tmp", f"{verb}-{secrets.token_hex(4)}")
    words = send_settings(phone, {**settings, "bundle": bundles[runs[0]], "adapter": adapters}, folder)
    try:
        return phone.attach(["-m", "prge.cli", verb, *words], reads=verb == "chat")
    finally:
        phone.remove(folder)


def _bundle_of(phone: Phone, name: str) -> str:
    """The bundle that a run on the device trains."""
    check_name(name)
    told = phone.adb.shell(f"cat {quote([phone.path('runs', name, 'config.yaml')])}")
    if told.code:
        raise phone.no_run(name)
    try:
        settings = parse_yaml(told.output)
    except ValueError:
        settings = None
    bundle = settings.get("bundle") if isinstance(settings, dict) else None
    if not isinstance(bundle, str):
        raise DeviceError(f"the settings of the run {name!r} on {phone.adb.serial} name no bundle")
    return bundle
