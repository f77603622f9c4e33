"""Mutations change a file, and crafted ones keep every checksum valid."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import damage
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from prge.formats.bundle import open_bundle
from prge.formats.documents import DocumentError, parse_json
from prge.formats.journal import Journal
from tests.bundles import PROGRAM, make_bundle


@pytest.mark.parametrize("mutation", sorted(set(damage.MUTATIONS) - {"lines"}))
def test_every_mutation_changes_the_file(tmp_path: Path, mutation: str) -> None:
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    (path.parent / "other").write_bytes(b"another one")
    path.write_bytes(b"content " * 100)
    damage.MUTATIONS[mutation](path, Random(1))
    is_plain = path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20
    assert not is_plain or path.read_bytes() != b"content " * 100


def test_a_bundle_with_updated_hashes_opens(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    (bundle / PROGRAM).write_bytes(b"another program")
    damage.rehash_bundle(bundle)
    assert open_bundle(bundle).file(PROGRAM).read_bytes() == b"another program"


def test_a_changed_record_keeps_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append({"type": "step", "step": 0, "loss": 0.5})
    kept = 0
    for seed in range(60):
        content = path.read_bytes()
        damage.mutate_journal(path, Random(seed))
        with Journal(path, writable=False) as journal:
            kept += bool(journal.records and journal.records != [{"type": "step", "step": 0, "loss": 0.5}])
        path.write_bytes(content)
    assert kept > 5


def test_some_mutations_of_documents_are_refused_by_readers(tmp_path: Path) -> None:
    path, refused = tmp_path / "config.json", 0
    for seed in range(60):
        path.write_text(json.dumps({"r": 2, "names": ["q", "v"], "deep": {"a": 1}}))
        damage.mutate_json(path, Random(seed))
        try:
            parse_json(path.read_bytes())
        except DocumentError:
            refused += 1
    assert 5 < refused < 55


def test_headers_of_weights_are_changed(tmp_path: Path) -> None:
    path, refused = tmp_path / "weights.safetensors", 0
    for seed in range(30):
        save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)}, path)
        before = path.read_bytes()
        damage.mutate_safetensors(path, Random(seed))
        assert path.read_bytes() != before
        try:
            load_file(path)
        except (SafetensorError, ValueError):
            refused += 1
    assert 5 < refused < 30


def test_a_gguf_header_is_damaged_in_its_numbers_and_texts(tmp_path: Path) -> None:
    """Numbers and texts are located up to the data, and a mutation changes only some of them."""
    import gguf

    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_token_list(["a", "bc"])
    writer.add_tensor("x", np.zeros((2, 3), np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    content = path.read_bytes()
    numbers, texts = damage.gguf_header_fields(content)
    assert [content[at : at + size] for at, size in texts][-3:] == [b"a", b"bc", b"x"]
    at, size = numbers[-1]
    # The offset of the last tensor; only padding and data come after it.
    assert (content[at : at + size], len(content[at + size :].strip(b"\0"))) == (bytes(8), 0)
    damage.mutate_gguf(path, Random(1))
    damaged = path.read_bytes()
    assert damaged != content and len(damaged) == len(content)
    assert damaged[at + size :] == content[at + size :]
