"""Opening bundles: an intact bundle opens; any damage is reported before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prge.errors import BundleError
from prge.formats.bundle import ADAPTER, MANIFEST, TOKENIZER, manifest_sha256, open_bundle
from tests.bundles import PROGRAM, make_bundle, make_small_chain, read_manifest, write_manifest
from tests.refusals import raises

Damage = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "bundle")


def test_whole_bundle_opens(folder: Path) -> None:
    bundle = open_bundle(str(folder))
    assert bundle.chain == make_small_chain()
    assert (bundle.adapter, bundle.tokenizer) == (folder / ADAPTER, folder / TOKENIZER)
    assert bundle.sha256 == manifest_sha256(bundle.manifest)


def test_the_hash_of_a_bundle_does_not_depend_on_the_manifest_s_formatting(folder: Path) -> None:
    before = open_bundle(folder).sha256
    manifest = read_manifest(folder)
    rewritten = json.dumps(dict(reversed(manifest.items())), indent=4)
    (folder / MANIFEST).write_text(rewritten, encoding="utf-8")
    assert open_bundle(folder).sha256 == before
    write_manifest(folder, {**manifest, "lora": {}})
    assert open_bundle(folder).sha256 != before


def test_a_bundle_whose_manifest_names_no_model_is_described_without(folder: Path) -> None:
    manifest = read_manifest(folder)
    manifest.pop("model", None)
    write_manifest(folder, manifest)
    assert open_bundle(folder).description["model"] is None


def test_bundle_may_be_reached_through_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert open_bundle(tmp_path / "link").chain == make_small_chain()


def _flip_bit(name: str) -> Damage:
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return damage


def _truncate(name: str, size: int) -> Damage:
    def damage(folder: Path) -> None:
        with (folder / name).open("r+b") as stream:
            stream.truncate(size)

    return damage


def _replace_with_link(folder: Path) -> None:
    target = folder.parent / "elsewhere.pte"
    shutil.move(folder / PROGRAM, target)
    (folder / PROGRAM).symlink_to(target)


def _replace_folder_with_link(folder: Path) -> None:
    shutil.move(folder / ADAPTER, folder.parent / "elsewhere")
    (folder / ADAPTER).symlink_to(folder.parent / "elsewhere")


def _swap(folder: Path) -> None:
    """Swap two files of the same size."""
    first, second = folder / PROGRAM, folder / f"{ADAPTER}/adapter_model.safetensors"
    assert first.stat().st_size == second.stat().st_size
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)


@pytest.mark.parametrize(
    ("damage", "code", "value"),
    [
        (lambda folder: shutil.rmtree(folder), "not-a-bundle", ""),
        (lambda folder: (folder / MANIFEST).unlink(), "not-a-bundle", ""),
        (lambda folder: (folder / MANIFEST).write_bytes(b""), "manifest-damaged", MANIFEST),
        (_truncate(MANIFEST, 100), "manifest-damaged", MANIFEST),
        (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe\x00"), "manifest-damaged", MANIFEST),
        (lambda folder: (folder / MANIFEST).write_text("[" * 100_000), "manifest-damaged", MANIFEST),
        (lambda folder: (folder / MANIFEST).write_bytes(b" " * (3 << 20)), "manifest-damaged", MANIFEST),
        (lambda folder: (folder / MANIFEST).write_text("[1]"), "bundle-format", "'list'"),
        (lambda folder: (folder / PROGRAM).unlink(), "bundle-file-missing", PROGRAM),
        (lambda folder: shutil.rmtree(folder / TOKENIZER), "bundle-file-missing", "tokenizer/tokenizer.json"),
        (lambda folder: (folder / PROGRAM).write_bytes(b""), "bundle-file-size", " 0 "),
        (_truncate(PROGRAM, 511), "bundle-file-size", "511"),
        (lambda folder: (folder / PROGRAM).write_bytes(bytes(513)), "bundle-file-size", "513"),
        (_flip_bit(PROGRAM), "bundle-file-hash", PROGRAM),
        (_flip_bit(f"{ADAPTER}/adapter_model.safetensors"), "bundle-file-hash", ADAPTER),
        (_swap, "bundle-file-hash", ""),
        (_replace_with_link, "bundle-file-linked", PROGRAM),
        (_replace_folder_with_link, "bundle-file-linked", ADAPTER),
    ],
)
def test_damage_is_reported(folder: Path, damage: Damage, code: str, value: str) -> None:
    damage(folder)
    with raises(BundleError, code, containing=value) as caught:
        open_bundle(folder)
    assert caught.value.remedy


def _rename_file(name: str, new: str) -> Callable[[dict[str, Any]], object]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][new] = manifest["files"][name]

    return change


@pytest.mark.parametrize(
    ("change", "code", "value"),
    [
        (lambda manifest: manifest.update(format=5), "bundle-format", "5"),
        (lambda manifest: manifest.update(format=1), "bundle-format", "1"),
        (lambda manifest: manifest.update(format=2.0), "bundle-format", "2.0"),
        (lambda manifest: manifest.pop("format"), "bundle-format", "None"),
        (lambda manifest: manifest.pop("files"), "manifest-without-files", ""),
        (lambda manifest: manifest.update(files=[PROGRAM]), "manifest-without-files", ""),
        (lambda manifest: manifest["files"].pop(PROGRAM), "manifest-lacks-file", PROGRAM),
        (lambda manifest: manifest["files"].pop("weights/000.ptd"), "manifest-lacks-file", "weights/000.ptd"),
        (
            lambda manifest: manifest["files"].update({PROGRAM: "abc"}),
            "manifest-lacks-hash",
            PROGRAM,
        ),
        (
            lambda manifest: manifest["files"][PROGRAM].pop("sha256"),
            "manifest-lacks-hash",
            PROGRAM,
        ),
        (lambda manifest: manifest["files"][PROGRAM].update(bytes="512"), "manifest-lacks-hash", PROGRAM),
        (lambda manifest: manifest["files"][PROGRAM].update(sha256="0" * 64), "bundle-file-hash", PROGRAM),
        (_rename_file(PROGRAM, "../program.pte"), "file-outside-bundle", "'../program.pte'"),
        (_rename_file(PROGRAM, "adapter/../../x"), "file-outside-bundle", ""),
        (_rename_file(PROGRAM, "/etc/hostname"), "file-outside-bundle", "'/etc/hostname'"),
        (_rename_file(PROGRAM, "..\\program.pte"), "file-outside-bundle", ""),
        (_rename_file(PROGRAM, ""), "bundle-file-missing", ""),
        (_rename_file(PROGRAM, "adapter"), "bundle-file-missing", "adapter"),
        (_rename_file(PROGRAM, "program\0.pte"), "bundle-file-missing", ""),
        (lambda manifest: manifest.pop("chain"), "chain-unreadable", ""),
        (lambda manifest: manifest.update(chain=[]), "chain-unreadable", ""),
        (lambda manifest: manifest["chain"]["bounds"].update(copies=0), "chain-not-runnable", "copies"),
    ],
)
def test_an_inconsistent_manifest_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], code: str, value: str
) -> None:
    manifest = read_manifest(folder)
    change(manifest)
    write_manifest(folder, manifest)
    with raises(BundleError, code, containing=value):
        open_bundle(folder)


def test_a_manifest_that_was_changed_after_writing_is_refused(folder: Path) -> None:
    manifest = read_manifest(folder)
    manifest["lora"]["alpha"] = 32.0
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    with raises(BundleError, "manifest-changed"):
        open_bundle(folder)


@pytest.mark.parametrize("name", ["tokenizer/chat_template.jinja", "adapter/head.safetensors"])
def test_a_file_without_a_hash_that_would_be_read_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text("{{ messages }}")
    with raises(BundleError, "file-not-in-manifest", containing=name):
        open_bundle(folder)


def test_a_file_without_a_hash_that_is_not_read_is_ignored(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "tokenizer/.DS_Store").write_text("a file manager's")
    assert open_bundle(folder).chain == make_small_chain()
