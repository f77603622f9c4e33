"""What is brought to a phone: bundles, adapters, folders of `prge tune`, rows, and settings of verbs."""

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
from prge.errors import DeviceError
from prge.files.bundle import MANIFEST, check_content, open_bundle
from prge.files.own_settings import KEY, new_key, parse_key, sign
from prge.files.peft import find_adapter
from prge.files.run_folder import CONFIG, DECISIONS, FINAL, JOURNAL
from prge.files.tuned import Tuning
from prge.rows.readers.files import PARQUET, json_fields
from prge.rows.sources import Part, paths_of, read_source, rows_files
from prge.verbs.kinds import Paths
from prge.verbs.settings import yaml_of


def send_bundle(phone: Phone, folder: Path, check: bool = False) -> str:
    """Bring a bundle, the files that its manifest names alone; its folder there has its hash in the name."""
    bundle = open_bundle(folder)
    folder = bundle.folder
    for block in bundle.chain.blocks:
        check_content(folder, bundle.manifest, block.weights)
    remote = phone.path("bundles", bundle.sha256[:12])
    phone.send_folder(folder, remote, names=[MANIFEST, *bundle.manifest["files"]], check=check)
    return remote


def send_adapter(phone: Phone, source: Path) -> str:
    """Bring the PEFT folder of what a user names as an adapter; its folder there."""
    folder = find_adapter(source)
    remote = phone.path("adapters", digest(str(folder.resolve()))[:12])
    phone.send_folder(folder, remote)
    return remote


def send_run(phone: Phone, tuning: Tuning, bundle: str) -> str:
    """Bring what a tuning's run ended with, as a run of the tuning's name, for a bundle that is there."""
    check_name(tuning.name)
    remote = phone.path("runs", tuning.name)
    if phone.exists(f"{remote}/{JOURNAL}", "f"):
        raise DeviceError(
            f"{phone.adb.serial} has a run {tuning.name} of its own",
            remedy=f"rename {tuning.folder}, or remove the run with `prge android clean`",
            code="run-exists-on-device",
        )
    with tempfile.TemporaryDirectory(prefix="prge-push-") as name:
        folder = Path(name)
        shutil.copytree(tuning.adapter, folder / FINAL)
        (folder / CONFIG).write_text(json.dumps({"bundle": bundle}), encoding="utf-8")
        phone.send_folder(folder, remote)
    return remote


def send_tuning(phone: Phone, tuning: Tuning, rows: bool = False) -> str:
    """Bring a tuning as a tuning: bundle, adapter and, if something is to learn there, `rows`; its folder."""
    with tempfile.TemporaryDirectory(prefix="prge-push-") as name:
        folder = Path(name)
        shutil.copytree(tuning.adapter, folder / "run" / FINAL)
        config = json.dumps({"bundle": send_bundle(phone, tuning.bundle)}) + "\n"
        # Signed as the phone would: whoever reaches it by adb may write all that prge has there.
        (folder / CONFIG).write_bytes(sign(config, CONFIG, _key_of(phone)))
        (folder / DECISIONS).write_text("{}")
        if rows:
            # By its journal a run is known as one, and rounds go on with its settings.
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
    """The key that prge on the phone knows its own settings by, made where there is none; see run.sh."""
    path = phone.path("config", *KEY.parts)
    answer = phone.adb.shell(f"cat {quote([path])}")
    key = parse_key(answer.output.encode()) if answer.code == 0 else None
    if key is None:
        key = new_key()
        phone.make(path.rpartition("/")[0])
        phone.write(f"{key.decode()}\n", path)
    return key


def rows_there(phone: Phone, where: Paths, flag: str, part: Part, on_device: bool) -> Paths:
    """The paths on the device of rows that a user names: those that are there, or are brought now.

    Args:
        phone: the device.
        where: rows, `on_device` or here.
        flag: that names them.
        part: which file of a folder.
        on_device: whether they are there.
    """
    if not on_device:
        return send_rows(phone, where, part)
    for path in paths_of(where):
        if not path.is_absolute() or not phone.exists(str(path), "r"):
            raise DeviceError(
                f"{flag}: {phone.adb.serial} has no readable {path}",
                remedy="give an absolute path on the device, or leave --data-on-device out",
                code="rows-missing-on-device",
            )
    return where


def send_rows(phone: Phone, where: Paths, part: Part) -> Paths:
    """Bring the rows that a user names, as `Phone.send_file`; what takes a library to read goes as jsonl."""
    files = rows_files(where, part)
    if missing := [path for path in files if not path.exists()]:
        raise DeviceError(
            f"there is no file {missing[0]}",
            remedy="rows on the phone need --data-on-device",
            code="file-missing",
        )
    sent = tuple(
        Path(phone.send_file(path) if path in files and not _is_table(path) else _as_jsonl(phone, path, part))
        for path in files or paths_of(where)
    )
    return sent if len(sent) > 1 else sent[0]


def _is_table(path: Path) -> bool:
    return path.suffix.lower() == PARQUET


def _as_jsonl(phone: Phone, path: Path, part: Part) -> str:
    """Bring the rows of a parquet file, or of a data set of the hub, as jsonl; its path on the device."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, f"{path.stem if _is_table(path) else part}.jsonl")
        rows = read_source(path, part).rows
        lines = (json.dumps(json_fields(row.fields)) + "\n" for row in rows)
        written.write_text("".join(lines), encoding="utf-8")
        return phone.send_file(written)


def send_settings(phone: Phone, settings: Mapping[str, Any], folder: str) -> list[str]:
    """Bring settings of a verb, by their names, to a folder of the phone; words with which it reads them."""
    phone.make(folder)
    phone.write(yaml_of(settings), f"{folder}/settings.yaml")
    return ["--config", f"{folder}/settings.yaml"]
