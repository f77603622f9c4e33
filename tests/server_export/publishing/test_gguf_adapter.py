"""A GGUF adapter has the values of the trained adapter, in the order of llama.cpp's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from prge.errors import BundleError
from prge.formats.peft import read_lora
from server_export.publish import main
from server_export.publishing.gguf_adapter import write_gguf
from tests.refusals import raises
from tests.server_export.adapters import RANK, trained_adapter
from tests.tiny_models import make_config, save_model

HEADS, GROUPS, WIDTH = 4, 2, 16
NAMES = {"q_proj": "attn_q", "v_proj": "attn_v", "qkv_proj": "attn_qkv", "c_attn": "attn_qkv"}


def text_of(field: Any) -> str:
    return bytes(field.parts[field.data[0]]).decode()


def to_transformers_order(lora_b: Any, heads: int) -> Any:
    """Convert rows from llama.cpp's pairs (2 i, 2 i + 1) of a head to transformers' pairs (i, i + half)."""
    rows = np.empty_like(lora_b)
    half = WIDTH // 2
    for head in range(heads):
        for pair in range(half):
            for part in range(2):
                rows[head * WIDTH + part * half + pair] = lora_b[head * WIDTH + 2 * pair + part]
    return rows


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "gpt2"])
def test_a_gguf_adapter_reads_back_as_it_was_trained(tmp_path: Path, architecture: str) -> None:
    base = save_model(tmp_path / "base", architecture)
    trained = trained_adapter(base, tmp_path / "trained")
    flags = ["--model", str(base), "--format", "gguf", "--out", str(tmp_path / "out")]
    assert main([str(trained), *flags]) == 0

    reader = gguf.GGUFReader(tmp_path / "out/adapter.gguf")
    named = "llama" if architecture == "mistral" else architecture
    facts = {name: text_of(reader.fields[name]) for name in ("general.type", "adapter.type")}
    assert facts == {"general.type": "adapter", "adapter.type": "lora"}
    assert text_of(reader.fields["general.architecture"]) == named
    adapter = read_lora(trained)
    # llama.cpp divides by the rank that it reads from the shapes.
    alpha = reader.fields["adapter.lora.alpha"]
    assert float(alpha.parts[alpha.data[0]][0]) / RANK == adapter.alpha / adapter.rank

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 2 * len(adapter.lora_a) > 2
    for module, lora_a in adapter.lora_a.items():
        layer = next(part for part in module.split(".") if part.isdigit())
        name = f"blk.{layer}.{NAMES[module.rpartition('.')[2]]}.weight"
        stored_a, stored_b = (tensors[f"{name}.lora_{letter}"] for letter in "ab")
        # GGUF counts the fastest dimension first.
        assert list(stored_a.shape) == [lora_a.shape[1], RANK]
        assert list(stored_b.shape) == [RANK, len(adapter.lora_b[module])]
        np.testing.assert_array_equal(stored_a.data, lora_a)
        lora_b = np.array(stored_b.data)
        if named == "llama" and module.endswith("q_proj"):
            assert not np.array_equal(lora_b, adapter.lora_b[module])
            lora_b = to_transformers_order(lora_b, HEADS)
        np.testing.assert_array_equal(lora_b, adapter.lora_b[module])
    assert "--lora adapter.gguf" in (tmp_path / "out/README.md").read_text()


def test_keys_are_reordered_by_their_own_number_of_heads(tmp_path: Path) -> None:
    from prge.formats.peft import PeftAdapter

    name = "model.layers.1.self_attn.k_proj"
    random = np.random.default_rng(0)
    lora_b = random.standard_normal((GROUPS * WIDTH, RANK)).astype(np.float32)
    lora_a = random.standard_normal((RANK, 64)).astype(np.float32)
    adapter = PeftAdapter({"r": RANK, "lora_alpha": 8}, {name: lora_a}, {name: lora_b})
    write_gguf(tmp_path / "a.gguf", adapter, make_config("llama"))
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    np.testing.assert_array_equal(
        to_transformers_order(tensors["blk.1.attn_k.weight.lora_b"], GROUPS), lora_b
    )


def test_modules_keep_their_own_rank_and_scale(tmp_path: Path) -> None:
    """llama.cpp multiplies by the file's alpha divided by the rank of each module."""
    from prge.formats.peft import PeftAdapter

    random = np.random.default_rng(0)
    ranks = {f"model.layers.{layer}.self_attn.o_proj": rank for layer, rank in ((0, 1), (1, 3))}
    lora_a, lora_b = (
        {name: random.standard_normal(shape(rank)).astype(np.float32) for name, rank in ranks.items()}
        for shape in (lambda rank: (rank, 64), lambda rank: (64, rank))
    )
    patterns = {
        "rank_pattern": {"layers.1.self_attn.o_proj": 3},
        "alpha_pattern": {"layers.1.self_attn.o_proj": 12},
    }
    adapter = PeftAdapter({"r": 1, "lora_alpha": 4, **patterns}, lora_a, lora_b)
    write_gguf(tmp_path / "a.gguf", adapter, make_config("llama"))
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    alpha = reader.fields["adapter.lora.alpha"]
    for layer, (name, rank) in enumerate(ranks.items()):
        a, b = (tensors[f"blk.{layer}.attn_output.weight.lora_{letter}"] for letter in "ab")
        product = float(alpha.parts[alpha.data[0]][0]) / len(a) * b @ a
        assert len(a) == rank
        np.testing.assert_allclose(product, 4 * lora_b[name] @ lora_a[name], atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "module", "code", "shown"),
    [
        ("opt", "model.decoder.layers.0.self_attn.q_proj", "no-gguf-architecture", "opt"),
        ("bert", "encoder.layer.0.attention.self.query", "no-gguf-architecture", "bert"),
        ("llama", "lm_head", "no-gguf-weight", "lm_head"),
        ("llama", "model.layers.0.somewhere", "no-gguf-weight", "model.layers.0.somewhere"),
    ],
)
def test_unsupported_modules_are_refused(
    tmp_path: Path, architecture: str, module: str, code: str, shown: str
) -> None:
    from prge.formats.peft import PeftAdapter

    lora_a, lora_b = np.ones((1, 4), np.float32), np.ones((4, 1), np.float32)
    adapter = PeftAdapter({"r": 1, "lora_alpha": 1}, {module: lora_a}, {module: lora_b})
    with raises(BundleError, code, containing=shown):
        write_gguf(tmp_path / "a.gguf", adapter, make_config(architecture))
