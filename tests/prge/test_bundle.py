"""Reading a bundle: a whole one opens, and whatever is wrong with one is told before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from prge.bundle import ADAPTER, MANIFEST, PROGRAM, TOKENIZER, manifest_sha256, open_bundle
from prge.contract import Contract, TensorSpec
from prge.errors import BundleError
from tests.bundles import FILES, make_bundle, make_contract, read_json, write_manifest

Damage = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "bundle")


def test_whole_bundle_opens(folder: Path) -> None:
    bundle = open_bundle(str(folder))
    assert bundle.contract == make_contract()
    assert bundle.program.read_bytes() == FILES[PROGRAM]
    assert (bundle.adapter, bundle.tokenizer) == (folder / ADAPTER, folder / TOKENIZER)
    assert bundle.sha256 == manifest_sha256(bundle.manifest)


def test_bundle_hash_is_of_the_content_not_of_the_writing(folder: Path) -> None:
    before = open_bundle(folder).sha256
    manifest = read_json(folder)
    rewritten = json.dumps(dict(reversed(manifest.items())), indent=4)
    (folder / MANIFEST).write_text(rewritten, encoding="utf-8")
    assert open_bundle(folder).sha256 == before
    write_manifest(folder, {**manifest, "queries": 3})
    assert open_bundle(folder).sha256 != before


def test_a_bundle_whose_manifest_names_no_model_is_described_without(folder: Path) -> None:
    manifest = read_json(folder)
    manifest.pop("model", None)
    write_manifest(folder, manifest)
    assert open_bundle(folder).description["model"] is None


def test_bundle_may_be_reached_through_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert open_bundle(tmp_path / "link").contract == make_contract()


TANGENT = make_contract(kind="tangent", copies=1, queries=3)
SCORE = make_contract(copies=1, batch_size=7, positions=5)


def test_a_stack_bundle_scores_with_the_method_of_its_steps(folder: Path) -> None:
    bundle = open_bundle(folder)
    assert bundle.methods == {"forward": make_contract()}
    assert (bundle.score_method, bundle.score_contract) == ("forward", make_contract())
    write_manifest(folder, {**read_json(folder), "score": None})
    assert open_bundle(folder).scoring is None


def test_a_tangent_bundle_scores_with_a_method_of_its_own(tmp_path: Path) -> None:
    bundle = open_bundle(make_bundle(tmp_path / "bundle", contract=TANGENT.to_json(), score=SCORE.to_json()))
    assert bundle.methods == {"forward": TANGENT, "score": SCORE}
    assert (bundle.score_method, bundle.score_contract) == ("score", SCORE)


@pytest.mark.parametrize(
    ("score", "told"),
    [
        (None, "no method score"),
        ({}, "contract can't be read"),
        (TANGENT.to_json(), "score is a program for steps only"),
        (replace(SCORE, sequence_length=15).to_json(), "sequence_length is 16 and only 15"),
        (replace(SCORE, modules=SCORE.modules[:1]).to_json(), "modules is"),
        (replace(SCORE, vocabulary_size=63).to_json(), "vocabulary_size is 64 and 63"),
    ],
)
def test_a_tangent_bundle_needs_a_method_that_scores_the_same_model(
    tmp_path: Path, score: dict[str, Any] | None, told: str
) -> None:
    folder = make_bundle(tmp_path / "bundle", contract=TANGENT.to_json(), score=score)
    with pytest.raises(BundleError, match=told):
        open_bundle(folder)


CUT = (TensorSpec("trunk.0", "float32", (2, 16, 12)),)
TRUNK, STEP = make_contract(shared_rows=True).divided(CUT)


def test_a_bundle_that_was_cut_has_three_methods(tmp_path: Path) -> None:
    blocks = {"contract": STEP.to_json(), "score": SCORE.to_json(), "trunk": TRUNK.to_json()}
    bundle = open_bundle(make_bundle(tmp_path / "bundle", **blocks))
    assert bundle.methods == {"trunk": TRUNK, "step": STEP, "score": SCORE}
    assert (bundle.step_method, bundle.score_method) == ("step", "score")


@pytest.mark.parametrize(
    ("contract", "trunk"),
    [
        (STEP, None),
        (STEP.whole, TRUNK),
        (STEP, replace(TRUNK, sequence_length=15)),
        (STEP, replace(TRUNK, cut=(*CUT, *CUT))),
        (STEP, STEP),
        (TRUNK, TRUNK),
    ],
)
def test_trunk_and_step_that_dont_belong_together_are_refused(
    tmp_path: Path, contract: Contract, trunk: Contract | None
) -> None:
    blocks = {"contract": contract.to_json(), "score": SCORE.to_json()}
    folder = make_bundle(tmp_path / "bundle", **blocks, trunk=trunk.to_json() if trunk else None)
    with pytest.raises(BundleError, match="trunk and step don't belong together"):
        open_bundle(folder)


def test_a_program_for_steps_only_needs_a_method_that_scores(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "bundle", contract=STEP.whole.to_json())
    with pytest.raises(BundleError, match="no method score"):
        open_bundle(folder)


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


def lengths(*numbers: Any, cut: Any = ()) -> list[dict[str, Any]]:
    return [{"sequence_length": number, "cut": list(cut)} for number in numbers]


def test_every_method_may_have_variants_for_shorter_rows(tmp_path: Path) -> None:
    folder = make_bundle(
        tmp_path / "bundle", contract=TANGENT.to_json(), score=SCORE.to_json(), lengths=lengths(4, 8)
    )
    bundle = open_bundle(folder)
    assert bundle.lengths == (4, 8, 16)
    assert bundle.variants("score") == {
        "score_4": SCORE.shortened(4),
        "score_8": SCORE.shortened(8),
        "score": SCORE,
    }
    assert list(bundle.methods) == ["forward_4", "forward_8", "forward", "score_4", "score_8", "score"]
    assert bundle.methods["forward_4"] == replace(TANGENT, sequence_length=4)


def test_variants_of_a_cut_step_have_a_cut_of_their_own(tmp_path: Path) -> None:
    long, short = (TensorSpec("trunk.0", "float32", (2, length, 3)) for length in (16, 4))
    trunk, step = TANGENT.divided((long,))
    folder = make_bundle(
        tmp_path / "bundle",
        contract=step.to_json(),
        score=SCORE.to_json(),
        trunk=trunk.to_json(),
        lengths=lengths(4, cut=[asdict(short)]),
    )
    methods = open_bundle(folder).methods
    assert (methods["trunk_4"], methods["step_4"]) == TANGENT.shortened(4).divided((short,))


@pytest.mark.parametrize(
    "found",
    [
        lengths(8, 4),
        lengths(16),
        lengths(0),
        lengths("many"),
        lengths(4, cut=[{"name": "trunk.0", "dtype": "float32", "shape": [2, 4, 3]}]),
        [4, 8],
        {"sequence_length": 4},
    ],
)
def test_lengths_that_cant_be_are_refused(folder: Path, found: Any) -> None:
    write_manifest(folder, {**read_json(folder), "lengths": found})
    with pytest.raises(BundleError, match=r"lengths|sequence_length"):
        open_bundle(folder)


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
        (lambda folder: (folder / MANIFEST).write_text("[1]"), "has format 'list'"),
        (lambda folder: (folder / PROGRAM).unlink(), "lacks its file program.pte"),
        (lambda folder: shutil.rmtree(folder / TOKENIZER), "lacks its file tokenizer/tokenizer.json"),
        (lambda folder: (folder / PROGRAM).write_bytes(b""), "has 0 bytes"),
        (_truncate(PROGRAM, 511), "has 511 bytes, the manifest says 512"),
        (lambda folder: (folder / PROGRAM).write_bytes(FILES[PROGRAM] + b"x"), "has 513 bytes"),
        (_flip_bit(PROGRAM), "SHA-256 differs"),
        (_flip_bit(f"{ADAPTER}/adapter_model.safetensors"), "SHA-256 differs"),
        (_swap, "SHA-256 differs"),
        (_replace_with_link, "is a link"),
        (_replace_folder_with_link, "is a link or in a linked folder"),
    ],
)
def test_damage_is_told(folder: Path, damage: Damage, told: str) -> None:
    damage(folder)
    with pytest.raises(BundleError, match=told):
        open_bundle(folder)


def _rename_file(name: str, new: str) -> Callable[[dict[str, Any]], object]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][new] = manifest["files"][name]

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda manifest: manifest.update(format=3), "has format 3, this version reads 1 and 2"),
        (lambda manifest: manifest.pop("format"), "has format None"),
        (lambda manifest: manifest.pop("files"), "lists no program.pte"),
        (lambda manifest: manifest.update(files=["program.pte"]), "lists no program.pte"),
        (lambda manifest: manifest["files"].pop(PROGRAM), "lists no program.pte"),
        (lambda manifest: manifest["files"].update({PROGRAM: "abc"}), "neither size nor hash of program.pte"),
        (lambda manifest: manifest["files"][PROGRAM].pop("sha256"), "neither size nor hash of program.pte"),
        (lambda manifest: manifest["files"][PROGRAM].update(bytes="512"), "neither size nor hash"),
        (lambda manifest: manifest["files"][PROGRAM].update(sha256="0" * 64), "SHA-256 differs"),
        (_rename_file(PROGRAM, "../program.pte"), "outside the bundle: '../program.pte'"),
        (_rename_file(PROGRAM, "adapter/../../x"), "outside the bundle"),
        (_rename_file(PROGRAM, "/etc/hostname"), "outside the bundle: '/etc/hostname'"),
        (_rename_file(PROGRAM, "..\\program.pte"), "outside the bundle"),
        (_rename_file(PROGRAM, ""), "lacks its file"),
        (_rename_file(PROGRAM, "adapter"), "lacks its file adapter"),
        (_rename_file(PROGRAM, "program\0.pte"), "lacks its file"),
        (lambda manifest: manifest.pop("contract"), "contract can't be read"),
        (lambda manifest: manifest.update(contract=[]), "contract can't be read"),
        (lambda manifest: manifest["contract"].update(copies=0), "copies is 0"),
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


def test_every_refusal_says_what_to_do(folder: Path) -> None:
    (folder / PROGRAM).unlink()
    with pytest.raises(BundleError) as caught:
        open_bundle(folder)
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["tokenizer/chat_template.jinja", "adapter/head.safetensors"])
def test_a_file_that_is_read_and_that_nobody_hashed_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text("{{ messages }}")
    with pytest.raises(BundleError, match=f"{Path(name).name} is not in the bundle's manifest"):
        open_bundle(folder)


def test_a_file_that_no_reader_takes_for_the_bundles_is_left_alone(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "tokenizer/.DS_Store").write_text("a file manager's")
    assert open_bundle(folder).contract == make_contract()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[" * 100_000, "more than 32 levels"),
        (b'{"format": NaN}', "NaN"),
        (b'{"format": ' + b"9" * 5000 + b"}", "a number of 5000 digits"),
        (b'{"format": "\\ud800"}', "half of a"),
        (b" " * (3 << 20), "at most"),
    ],
)
def test_a_hostile_manifest_is_refused_in_words(folder: Path, content: bytes, told: str) -> None:
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(BundleError, match=f"manifest.json is damaged: .*{told}"):
        open_bundle(folder)


def test_more_lengths_than_a_program_has(folder: Path) -> None:
    lengths = [{"sequence_length": length} for length in range(1, 100)]
    write_manifest(folder, {**read_json(folder), "lengths": lengths})
    with pytest.raises(BundleError, match="has 100 lengths, must be at most 64"):
        open_bundle(folder)
