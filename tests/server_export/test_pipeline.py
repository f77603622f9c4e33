"""`prge export --explain` lists the passes that changed a model, in order."""

from __future__ import annotations

from pathlib import Path

from server_export.pipeline import BLOCK, WHOLE, describe_changes
from server_export.trace.passes import Changes, Pass
from tests.server_export.trace.graphs import chain_in
from tests.tiny_models import save_model
from tests.tiny_types import make_tiny

PASSES = [each.name for each in (*WHOLE, *BLOCK) if isinstance(each, Pass)]


def changes_of(folder: Path) -> Changes:
    changes = Changes()
    chain_in(folder, changes=changes)
    return changes


def test_few_passes_change_a_plain_llama(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    changes = changes_of(tmp_path)
    assert changes.names == ["casts", "operators of XNNPACK", "rotations by layers"]
    *_, last = describe_changes(changes).splitlines()
    assert last == "rotations by layers: 4 slice, 2 neg, 2 cat -> 2 linear [model.layers.*.self_attn]"


def test_linear_attention_is_explained_by_its_patterns(tmp_path: Path) -> None:
    make_tiny("qwen3_5_text").save_pretrained(tmp_path)
    changes = changes_of(tmp_path)
    patterns = [name for name in changes.names if name not in PASSES]
    assert patterns == ["convolutions", "delta rule"]
    lines = describe_changes(changes).splitlines()
    assert len(lines) == len(changes.names)
    assert lines[1] == "delta rule: replaces 1 torch_chunk_gated_delta_rule of the model"


def test_a_pass_without_changes_is_not_listed(tmp_path: Path) -> None:
    make_tiny("bert").save_pretrained(tmp_path)
    changes = changes_of(tmp_path)
    assert "learned positions" in changes.names and "rotations by layers" not in changes.names
    assert all(change.count for change in changes)
