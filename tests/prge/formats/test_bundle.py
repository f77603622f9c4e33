"""Reading a bundle: a whole one opens, and whatever is wrong with one is told before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prge.errors import BundleError
from prge.formats.bundle import ADAPTER, MANIFEST, TOKENIZER, manifest_sha256, open_bundle
from tests.bundles import PROGRAM, make_bundle, make_small_chain, read_json, write_manifest

Damage = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "bundle")


def test_whole_bundle_opens(folder: Path) -> None:
    bundle = open_bundle(str(folder))
    assert bundle.chain == make_small_chain()
    assert (bundle.adapter, bundle.tokenizer) == (folder / ADAPTER, folder / TOKENIZER)
    assert bundle.sha256 == manifest_sha256(bundle.manifest)


def test_bundle_hash_is_of_the_content_not_of_the_writing(folder: Path) -> None:
    before = open_bundle(folder).sha256
    manifest = read_json(folder)
    rewritten = json.dumps(dict(reversed(manifest.items())), indent=4)
    (folder / MANIFEST).write_text(rewritten, encoding="utf-8")
    assert open_bundle(folder).sha256 == before
    write_manifest(folder, {**manifest, "lora": {}})
    assert open_bundle(folder).sha256 != before


def test_a_bundle_whose_manifest_names_no_model_is_described_without(folder: Path) -> None:
    manifest = read_json(folder)
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
    """Two files of one size change places."""
    first, second = folder / PROGRAM, folder / f"{ADAPTER}/adapter_model.safetensors"
    assert first.stat().st_size == second.stat().st_size
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: shutil.rmtree(folder), "is not a bundle"),
        (lambda folder: (folder / MANIFEST).unlink(), "is not a bundle"),
        (lambda folder: (folder / MANIFEST).write_bytes(b""), "is damaged"),
        (_truncate(MANIFEST, 100), "is damaged"),
        (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe\x00"), "is damaged"),
        (lambda folder: (folder / MANIFEST).write_text("[" * 100_000), "is damaged"),
        (lambda folder: (folder / MANIFEST).write_bytes(b" " * (3 << 20)), "is damaged: .*at most"),
        (lambda folder: (folder / MANIFEST).write_text("[1]"), "has format 'list'"),
        (lambda folder: (folder / PROGRAM).unlink(), "lacks its file programs/block.pte"),
        (lambda folder: shutil.rmtree(folder / TOKENIZER), "lacks its file tokenizer/tokenizer.json"),
        (lambda folder: (folder / PROGRAM).write_bytes(b""), "has 0 bytes"),
        (_truncate(PROGRAM, 511), "has 511 bytes, the manifest says 512"),
        (lambda folder: (folder / PROGRAM).write_bytes(bytes(513)), "has 513 bytes"),
        (_flip_bit(PROGRAM), "SHA-256 differs"),
        (_flip_bit(f"{ADAPTER}/adapter_model.safetensors"), "SHA-256 differs"),
        (_swap, "SHA-256 differs"),
        (_replace_with_link, "is a link"),
        (_replace_folder_with_link, "is a link or in a linked folder"),
    ],
)
def test_damage_is_told(folder: Path, damage: Damage, told: str) -> None:
    damage(folder)
    with pytest.raises(BundleError, match=told) as caught:
        open_bundle(folder)
    assert caught.value.remedy


def _rename_file(name: str, new: str) -> Callable[[dict[str, Any]], object]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][new] = manifest["files"][name]

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda manifest: manifest.update(format=5), "has format 5, this version reads 3 and 4"),
        (lambda manifest: manifest.update(format=1), "has format 1, this version reads 3 and 4"),
        (lambda manifest: manifest.update(format=2.0), "has format 2.0"),
        (lambda manifest: manifest.pop("format"), "has format None"),
        (lambda manifest: manifest.pop("files"), "lists no files"),
        (lambda manifest: manifest.update(files=[PROGRAM]), "lists no files"),
        (lambda manifest: manifest["files"].pop(PROGRAM), "lists no 'programs/block.pte'"),
        (lambda manifest: manifest["files"].pop("weights/000.ptd"), "lists no 'weights/000.ptd'"),
        (
            lambda manifest: manifest["files"].update({PROGRAM: "abc"}),
            "neither size nor hash of programs/block.pte",
        ),
        (
            lambda manifest: manifest["files"][PROGRAM].pop("sha256"),
            "neither size nor hash of programs/block.pte",
        ),
        (lambda manifest: manifest["files"][PROGRAM].update(bytes="512"), "neither size nor hash"),
        (lambda manifest: manifest["files"][PROGRAM].update(sha256="0" * 64), "SHA-256 differs"),
        (_rename_file(PROGRAM, "../program.pte"), "outside the bundle: '../program.pte'"),
        (_rename_file(PROGRAM, "adapter/../../x"), "outside the bundle"),
        (_rename_file(PROGRAM, "/etc/hostname"), "outside the bundle: '/etc/hostname'"),
        (_rename_file(PROGRAM, "..\\program.pte"), "outside the bundle"),
        (_rename_file(PROGRAM, ""), "lacks its file"),
        (_rename_file(PROGRAM, "adapter"), "lacks its file adapter"),
        (_rename_file(PROGRAM, "program\0.pte"), "lacks its file"),
        (lambda manifest: manifest.pop("chain"), "chain can't be read"),
        (lambda manifest: manifest.update(chain=[]), "chain can't be read"),
        (lambda manifest: manifest["chain"]["bounds"].update(copies=0), "bound of copies is 0"),
    ],
)
def test_manifest_that_lies_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    manifest = read_json(folder)
    change(manifest)
    write_manifest(folder, manifest)
    with pytest.raises(BundleError, match=told.replace("\\", "\\\\")):
        open_bundle(folder)


def test_manifest_changed_after_writing_is_told(folder: Path) -> None:
    manifest = read_json(folder)
    manifest["lora"]["alpha"] = 32.0
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(BundleError, match="its own hash differs"):
        open_bundle(folder)


@pytest.mark.parametrize("name", ["tokenizer/chat_template.jinja", "adapter/head.safetensors"])
def test_a_file_that_is_read_and_that_nobody_hashed_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text("{{ messages }}")
    with pytest.raises(BundleError, match=f"{Path(name).name} is not in the bundle's manifest"):
        open_bundle(folder)


def test_a_file_that_no_reader_takes_for_the_bundles_is_left_alone(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "tokenizer/.DS_Store").write_text("a file manager's")
    assert open_bundle(folder).chain == make_small_chain()
