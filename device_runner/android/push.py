"""Sending bundles, adapters, folders of `prge tune`, rows, and settings of verbs to a phone."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from device_runner.android.adb import quote
from device_runner.android.device import Phone, check_name
from device_runner.android.packages import digest
from prge.cli.field_types import Paths
from prge.cli.settings import format_yaml
from prge.data.readers.files import PARQUET, json_fields
from prge.data.sources import Part, find_row_files, list_paths, read_source
from prge.errors import DeviceError
from prge.formats.bundle import MANIFEST, check_content, open_bundle
from prge.formats.peft import find_adapter
from prge.formats.run_folder import CONFIG, DECISIONS, FINAL, JOURNAL
from prge.formats.stored_settings import KEY, new_key, parse_key, sign
from prge.formats.tune_folder import Tuning


def send_bundle(phone: Phone, folder: Path, check: bool = False) -> str:
    """Send the files that a bundle's manifest names, and return the bundle's folder on the phone.

    The name of the folder is a part of the bundle's hash.
    """
    bundle = open_bundle(folder)
    folder = bundle.folder
    for block in bundle.chain.blocks:
        check_content(folder, bundle.manifest, block.weights)
    remote = phone.path("bundles", bundle.sha256[:12])
    phone.send_folder(folder, remote, names=[MANIFEST, *bundle.manifest["files"]], check=check)
    return remote


def send_adapter(phone: Phone, source: Path) -> str:
    """Send the PEFT folder of an adapter, and return its folder on the phone.

    Args:
        phone: the device.
        source: a PEFT folder, run, checkpoint, or folder of `prge tune`.
    """
    folder = find_adapter(source)
    remote = phone.path("adapters", digest(str(folder.resolve()))[:12])
    phone.send_folder(folder, remote)
    return remote


def send_run(phone: Phone, tuning: Tuning, bundle: str) -> str:
    """Send the final adapter of a tuning as a run with the tuning's name.

    Args:
        phone: the device.
        tuning: the tuning.
        bundle: path of its bundle on the phone.

    Returns:
        The folder of the run on the phone.

    Raises:
        DeviceError: the phone has another run of that name, or was lost.
    """
    check_name(tuning.name)
    remote = phone.path("runs", tuning.name)
    if phone.exists(f"{remote}/{JOURNAL}", "f"):
        raise DeviceError(
            f"{phone.adb.serial} already has a run {tuning.name}.",
            remedy=f"Rename {tuning.folder}, or remove the run with `prge android clean`.",
            code="run-exists-on-device",
        )
    with tempfile.TemporaryDirectory(prefix="prge-push-") as name:
        folder = Path(name)
        shutil.copytree(tuning.adapter, folder / FINAL)
        (folder / CONFIG).write_text(json.dumps({"bundle": bundle}), encoding="utf-8")
        phone.send_folder(folder, remote)
    return remote


def send_tuning(phone: Phone, tuning: Tuning, rows: bool = False) -> str:
    """Send a folder of `prge tune` with its bundle and adapter, and return its folder on the phone.

    Args:
        phone: the device.
        tuning: the tuning.
        rows: whether to send training and development rows too, which a server that learns needs.
    """
    with tempfile.TemporaryDirectory(prefix="prge-push-") as name:
        folder = Path(name)
        shutil.copytree(tuning.adapter, folder / "run" / FINAL)
        config = json.dumps({"bundle": send_bundle(phone, tuning.bundle)}) + "\n"
        # The phone's prge follows only paths that it has signed. adb's user may sign for it.
        (folder / CONFIG).write_bytes(sign(config, CONFIG, _key_of(phone)))
        (folder / DECISIONS).write_text("{}")
        if rows:
            # A journal marks the folder as a run, whose settings the server learns with.
            shutil.copy(tuning.run / CONFIG, folder / "run")
            (folder / "run" / JOURNAL).touch()
            (folder / "rows").mkdir()
            for path in tuning.rows.glob("*.jsonl"):
                if path.stem in ("train", "dev"):
                    shutil.copy(path, folder / "rows")
        remote = phone.path("adapters", digest(str(tuning.folder.resolve()))[:12])
        phone.send_folder(folder, remote)
    return remote


def _key_of(phone: Phone) -> bytes:
    """Return the key with which the phone's prge signs its settings; make one if there is none.

    run.sh sets the folder of the key.
    """
    path = phone.path("config", *KEY.parts)
    result = phone.adb.shell(f"cat {quote([path])}")
    key = parse_key(result.output.encode()) if result.code == 0 else None
    if key is None:
        key = new_key()
        phone.make_folder(path.rpartition("/")[0])
        phone.write(f"{key.decode()}\n", path)
    return key


def rows_on_device(phone: Phone, sources: Paths, flag: str, part: Part, on_device: bool) -> Paths:
    """Return the paths of rows on the device, after sending the rows that are on this computer.

    Args:
        phone: the device.
        sources: paths of the rows, on this computer or on the device.
        flag: the flag that names the rows, for error messages.
        part: which file of a folder.
        on_device: whether the rows are on the device already.
    """
    if not on_device:
        return send_rows(phone, sources, part)
    for path in list_paths(sources):
        if not path.is_absolute() or not phone.exists(str(path), "r"):
            raise DeviceError(
                f"{flag}: {phone.adb.serial} has no readable {path}.",
                remedy="Give an absolute path on the device, or leave --data-on-device out.",
                code="rows-missing-on-device",
            )
    return sources


def send_rows(phone: Phone, sources: Paths, part: Part) -> Paths:
    """Send rows to the device, and return their paths there.

    Rows that only a library can read, such as parquet, are converted to jsonl.
    """
    files = find_row_files(sources, part)
    if missing := [path for path in files if not path.exists()]:
        raise DeviceError(
            f"There is no file {missing[0]}.",
            remedy="To use rows on the phone, give --data-on-device.",
            code="file-missing",
        )
    sent = tuple(
        Path(phone.send_file(path) if path in files and not _is_table(path) else _as_jsonl(phone, path, part))
        for path in files or list_paths(sources)
    )
    return sent if len(sent) > 1 else sent[0]


def _is_table(path: Path) -> bool:
    return path.suffix.lower() == PARQUET


def _as_jsonl(phone: Phone, path: Path, part: Part) -> str:
    """Send a parquet file or a data set of the hub as jsonl, and return the path on the device."""
    with tempfile.TemporaryDirectory() as folder:
        converted = Path(folder, f"{path.stem if _is_table(path) else part}.jsonl")
        rows = read_source(path, part).rows
        lines = (json.dumps(json_fields(row.fields)) + "\n" for row in rows)
        converted.write_text("".join(lines), encoding="utf-8")
        return phone.send_file(converted)


def send_settings(phone: Phone, settings: Mapping[str, Any], folder: str) -> list[str]:
    """Write the settings of a verb to a folder of the phone, and return the flags that read them."""
    phone.make_folder(folder)
    phone.write(format_yaml(settings), f"{folder}/settings.yaml")
    return ["--config", f"{folder}/settings.yaml"]
