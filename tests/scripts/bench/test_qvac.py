"""QVAC's library is the pinned one, its models have the wanted types, and its steps are those of PEFT."""

from __future__ import annotations

import ctypes
import io
import json
import platform
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import qvac
import qvac_steps
from peers import TEXTS, cut_batches, read_text
from processes import LackingError, start_process
from serve import LEARNING_RATE

from prge.system.user_cache import cache_path

STEPS = Path(qvac_steps.__file__)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_path("qvac")


def write_tarball(path: Path, *names: str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(f"package/prebuilds/{name}")
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    return path


def write_npm(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Replace npm by a shell script."""
    program = folder / "npm"
    program.write_text("\n".join(("#!/bin/sh", *lines)))
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(program))


def test_without_npm_there_is_no_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(LackingError, match="there is no npm"):
        qvac.library_path()


def test_npm_says_why_it_fails(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_npm(tmp_path, monkeypatch, "echo 'npm error code E404' >&2", "exit 1")
    with pytest.raises(LackingError, match=r"@qvac/fabric .* can't be downloaded: npm error code E404"):
        qvac.library_path()


def test_only_the_pinned_package_is_installed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = "linux-x64"
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    backends = [f"{target}/qvac__fabric/libqvac-ggml-{name}.so" for name in ("cpu-x64", "vulkan")]
    tarball = write_tarball(tmp_path / "a.tgz", f"{target}/{qvac.LIBRARY}", *backends, "include/ggml-cpu.h")
    write_npm(tmp_path, monkeypatch, 'for folder; do :; done; cp "$(dirname "$0")"/a.tgz "$folder"')
    with pytest.raises(LackingError, match="has another content than expected: sha512-"):
        qvac.library_path()
    monkeypatch.setattr(qvac, "INTEGRITY", qvac.integrity_of(tarball))
    path = qvac.library_path()
    assert path.read_text() == f"{target}/{qvac.LIBRARY}"
    files = {each.relative_to(cache).as_posix() for each in cache.rglob("*") if each.is_file()}
    assert files == {
        f"{qvac.VERSION}/{qvac.LIBRARY}",
        f"{qvac.VERSION}/qvac__fabric/libqvac-ggml-cpu-x64.so",
    }
    tarball.unlink()
    assert qvac.library_path() == path


def test_other_machines_have_no_library(tmp_path: Path) -> None:
    tarball = write_tarball(tmp_path / "a.tgz", f"linux-x64/{qvac.LIBRARY}")
    with pytest.raises(LackingError, match="no library for linux-None"):
        qvac.extract(tarball, "linux-None", tmp_path / "out")


@pytest.mark.parametrize(("weight_type", "embedding"), [("f32", "F32"), ("q8_0", "Q8_0"), ("q4_0", "Q8_0")])
def test_matrices_are_converted_and_vectors_stay_as_they_are(
    tmp_path: Path, weight_type: str, embedding: str
) -> None:
    from gguf import GGUFReader, GGUFWriter
    from gguf.quants import dequantize

    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_context_length(64)
    writer.add_token_list(["a", "b"])
    random = np.random.default_rng(0)
    names = {"token_embd.weight": (2, 32), "blk.0.attn_q.weight": (4, 32), "blk.0.attn_norm.weight": (32,)}
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in names.items()}
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    qvac.convert(tmp_path / "a.gguf", tmp_path / "b.gguf", weight_type)
    reader = GGUFReader(tmp_path / "b.gguf")
    assert reader.fields["llama.context_length"].contents() == 64
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types == dict(zip(names, (embedding, weight_type.upper(), "F32"), strict=True))
    for tensor in reader.tensors:
        difference = np.abs(dequantize(tensor.data, tensor.tensor_type) - tensors[tensor.name]).max()
        assert difference <= {"F32": 0, "Q8_0": 0.02, "Q4_0": 0.4}[types[tensor.name]]


def test_structures_are_those_of_the_headers() -> None:
    """Sizes and offsets that a C compiler computes from the package's headers."""
    structures = {
        qvac_steps.ModelParams: 80,
        qvac_steps.ContextParams: 176,
        qvac_steps.Batch: 56,
        qvac_steps.OptParams: 64,
        qvac_steps.LoraParams: 24,
        qvac_steps.OptimizerParams: 28,
    }
    assert {each: ctypes.sizeof(each) for each in structures} == structures
    assert qvac_steps.ModelParams.use_extra_bufts.offset == 74
    names = {"flash_attn_type": 52, "type_k": 104, "op_offload": 139, "training": 169}
    assert {name: getattr(qvac_steps.ContextParams, name).offset for name in names} == names


def test_rows_are_joined_with_the_token_after_each() -> None:
    assert qvac_steps.joined([[1, 2, 3], [3, 4, 5]]) == ([1, 2, 3, 4], [2, 3, 4, 5])


@pytest.mark.whole
def test_losses_are_those_of_peft(smollm2: Path, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (cache_path("qvac") / qvac.VERSION / qvac.LIBRARY).is_file():
        pytest.skip("there is no library of QVAC: scripts/bench/peers.py --peer qvac downloads it")
    where = {"pretrained_model_name_or_path": smollm2.parent, "gguf_file": smollm2.name}
    text = AutoTokenizer.from_pretrained(**where)(read_text(TEXTS)).input_ids
    ((row,),) = cut_batches(text, 1, 1, qvac_steps.ROW_TOKENS)
    trial = {"batch": 1, "tokens": qvac_steps.ROW_TOKENS, "rank": 8, "layers": ["q_proj", "v_proj"]}
    (tmp_path / "trial.json").write_text(json.dumps({**trial, "threads": 1, "alpha": 16}))
    (tmp_path / "rows.json").write_text(json.dumps([[row]]))
    qvac.convert(smollm2, tmp_path / "f32.gguf", "f32")
    command = [sys.executable, STEPS, qvac.library_path(), tmp_path / "f32.gguf", tmp_path]
    with start_process(command, {}) as steps:
        losses = [steps.take_step()[1] for _ in range(3)]
    base = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=trial["layers"])
    tuned = get_peft_model(base, config)
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, LEARNING_RATE, weight_decay=0.0)
    expected = []
    for _ in losses:
        logprobs = tuned(input_ids=torch.tensor([row[:-1]])).logits[0].log_softmax(-1)
        loss = -logprobs[range(qvac_steps.ROW_TOKENS), row[1:]].mean()
        expected.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(expected[0], rel=1e-4)
    # The random lora_a are other ones.
    assert np.diff(losses) == pytest.approx(np.diff(expected), rel=0.2)
