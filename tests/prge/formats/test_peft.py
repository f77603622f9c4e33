"""PEFT folders are read and written as PEFT does, and written atomically."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prge.errors import AdapterError, RunError
from prge.formats.adapter import Adapter
from prge.formats.peft import (
    PeftAdapter,
    find_adapter,
    find_run,
    read_compatible_adapter,
    read_lora,
    read_peft,
    scaled_lora_a,
    write_lora,
    write_peft,
)
from prge.model_spec import AdaptedModule
from tests.refusals import raises
from tests.templates import random_adapter

MODULES = (
    AdaptedModule("model.layers.0.q_proj", rank=2, in_features=5, out_features=3),
    AdaptedModule("model.layers.0.v_proj", rank=2, in_features=5, out_features=4),
)
PREFIX = "base_model.model."
ROOT = Path(__file__).parents[3]


def tensors(modules: tuple[AdaptedModule, ...] = MODULES, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    arrays = {}
    for module in modules:
        for letter, shape in (
            ("A", (module.rank, module.in_features)),
            ("B", (module.out_features, module.rank)),
        ):
            name = f"{PREFIX}{module.name}.lora_{letter}.weight"
            arrays[name] = generator.standard_normal(shape).astype(np.float32)
    return arrays


def write_folder(folder: Path, arrays: dict[str, np.ndarray], **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "v_proj"],
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def template(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "template", tensors())


def some_adapter(seed: int = 1) -> Adapter:
    return random_adapter(MODULES, seed)


def test_read_transposes_lora_b(template: Path) -> None:
    adapter = read_peft(template, MODULES)
    for module in MODULES:
        stored = tensors()[f"{PREFIX}{module.name}.lora_B.weight"]
        assert np.array_equal(adapter.lora_b[module.name], stored.T)


def test_a_written_adapter_reads_back_equal(tmp_path: Path, template: Path) -> None:
    adapter = some_adapter()
    write_peft(tmp_path / "out", adapter, template)
    again = read_compatible_adapter(tmp_path / "out", MODULES, template)
    assert np.array_equal(again.values, adapter.values)
    assert (tmp_path / "out/adapter_config.json").read_bytes() == (
        template / "adapter_config.json"
    ).read_bytes()
    old, new = (load_file(folder / "adapter_model.safetensors") for folder in (template, tmp_path / "out"))
    assert old.keys() == new.keys()
    for name in old:
        assert ".lora_B." in name or np.array_equal(old[name], new[name])


def test_the_same_arrays_give_the_same_bytes(tmp_path: Path, template: Path) -> None:
    extra = {"optimizer.safetensors": {"b": np.arange(3), "a": np.zeros(2)}, "note.txt": b"x"}
    for name in ("one", "two"):
        write_peft(tmp_path / name, some_adapter(), template, extra)
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert sorted(one) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "hashes.json",
        "note.txt",
        "optimizer.safetensors",
    ]


@pytest.mark.parametrize("name", ["../x.safetensors", "a/b", "adapter_model.safetensors", "hashes.json"])
def test_an_extra_file_cannot_replace_another_file(tmp_path: Path, template: Path, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        write_peft(tmp_path / "out", some_adapter(), template, {name: {}})
    assert not (tmp_path / "out").exists()


def test_one_error_lists_every_bad_tensor(tmp_path: Path) -> None:
    arrays = tensors()
    q, v = (f"{PREFIX}{module.name}" for module in MODULES)
    del arrays[f"{q}.lora_A.weight"]
    arrays[f"{q}.lora_B.weight"] = np.zeros((3, 9), np.float32)
    arrays[f"{v}.lora_A.weight"] = arrays[f"{v}.lora_A.weight"].astype(np.float16)
    arrays[f"{v}.lora_B.weight"][1, 1] = np.nan
    arrays[f"{PREFIX}other.lora_B.weight"] = np.zeros((4, 2), np.float32)
    folder = write_folder(tmp_path / "bad", arrays, r=3)
    with pytest.raises(AdapterError) as caught:
        read_peft(folder, MODULES)
    text = "\n".join(caught.value.problems)
    for part in (
        "has rank 3 for model.layers.0.q_proj, the bundle has 2; 2 of 2 modules have others",
        f"{q}.lora_A.weight is missing, must be F32 [2, 5]",
        f"{q}.lora_B.weight is F32 [3, 9], must be F32 [3, 2]",
        f"{v}.lora_A.weight is F16 [2, 5], must be F32 [2, 5]",
        f"{v}.lora_B.weight [4, 2] has 1 values that are not finite",
        f"{PREFIX}other.lora_B.weight F32 [4, 2] is unexpected",
    ):
        assert part in text
    assert len(caught.value.problems) == 6


def test_an_adapter_of_another_lora_a_or_scale_can_only_generate(tmp_path: Path, template: Path) -> None:
    """Programs of LoRA-FA that train and score contain the bundle's lora_A."""
    for name, seed, alpha in (("other", 5, 4), ("scaled", 0, 8)):
        other = write_folder(tmp_path / name, tensors(seed=seed), lora_alpha=alpha)
        with raises(AdapterError, "adapter-does-not-fit", containing="2 of 2"):
            read_compatible_adapter(other, MODULES, template)
        assert read_compatible_adapter(other, MODULES, template, generates=True).lora_a is not None


def test_a_smaller_adapter_of_any_scale_can_be_trained_on(tmp_path: Path, template: Path) -> None:
    """The adapter computes what PEFT computes, and modules that it lacks can still learn."""
    modules = tuple(replace(module, trains_a=True) for module in MODULES)
    (module, other) = modules
    small = (AdaptedModule(module.name, 1, module.in_features, module.out_features),)
    arrays = tensors(small, seed=3)
    folder = write_folder(tmp_path / "elsewhere", arrays, r=1, lora_alpha=3, target_modules=["q_proj"])
    result = read_compatible_adapter(folder, modules, template)
    lora_a, lora_b = (arrays[f"{PREFIX}{module.name}.lora_{letter}.weight"] for letter in "AB")
    assert result.lora_a is not None
    # The bundle's scale is 4 / 2.
    product = 2 * result.lora_a[module.name].T @ result.lora_b[module.name]
    np.testing.assert_allclose(product.T, 3 * lora_b @ lora_a, rtol=1e-6)
    own = {name: tensors()[f"{PREFIX}{name}.lora_A.weight"] for name in (module.name, other.name)}
    assert np.array_equal(result.lora_a[module.name][1], own[module.name][1])
    assert np.array_equal(result.lora_a[other.name], own[other.name])
    assert not result.lora_b[module.name][1].any() and not result.lora_b[other.name].any()
    # The arrays are views of the values that a step changes.
    assert np.shares_memory(result.lora_a[other.name], result.values)


@pytest.mark.parametrize(
    ("named", "expected", "refused"),
    [
        (("model@sha256:12", None), ("other@sha256:34", None), True),
        (("model@sha256:12", None), ("other@sha256:12", None), False),
        (("hub/model", "12"), ("hub/model", "34"), True),
        (("hub/model", "12"), ("hub/model", "12"), False),
        (("hub/model", None), ("hub/model", "34"), False),
        (("/a/model", "sha256:12"), ("model@sha256:12", None), False),
        (("/a/model", "sha256:12"), ("model@sha256:34", None), True),
        (("here/model", None), ("model@sha256:12", None), False),
        ((None, None), ("model@sha256:12", None), False),
    ],
)
def test_an_adapter_of_another_base_model_is_refused_by_hash_or_commit(
    tmp_path: Path,
    named: tuple[str | None, str | None],
    expected: tuple[str | None, str | None],
    refused: bool,
) -> None:
    names = ("base_model_name_or_path", "revision")
    adapter, template = (
        write_folder(tmp_path / folder, tensors(), **dict(zip(names, each, strict=True)))
        for folder, each in (("adapter", named), ("template", expected))
    )
    if not refused:
        read_compatible_adapter(adapter, MODULES, template)
        return
    with raises(AdapterError, "adapter-does-not-fit", containing=str(named[0]).partition("@")[0]):
        read_compatible_adapter(adapter, MODULES, template)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path, template: Path) -> None:
    with raises(AdapterError, "not-an-adapter"):
        read_peft(tmp_path / "nowhere", MODULES)
    (template / "adapter_model.safetensors").unlink()
    with raises(AdapterError, "not-an-adapter", containing="adapter_model.safetensors"):
        read_peft(template, MODULES)


@pytest.mark.parametrize("size", [0, 4, 50, -1])
def test_a_truncated_file_is_refused(template: Path, size: int) -> None:
    path = template / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with raises(AdapterError, "adapter-damaged"):
        read_peft(template, MODULES)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "hashes.json"])
def test_a_flipped_bit_is_detected(tmp_path: Path, template: Path, name: str) -> None:
    write_peft(tmp_path / "out", some_adapter(), template)
    path = tmp_path / "out" / name
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with raises(AdapterError, "adapter-damaged", "adapter-changed"):
        read_peft(tmp_path / "out", MODULES)


def test_hashes_of_files_outside_the_folder_are_refused(tmp_path: Path, template: Path) -> None:
    (template / "hashes.json").write_text('{"../x": "0", "gone": "0"}')
    with pytest.raises(AdapterError) as caught:
        read_peft(template, MODULES)
    assert len(caught.value.problems) == 2


def test_a_template_of_other_modules_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "template", tensors(MODULES[:1]))
    with raises(AdapterError, "adapter-of-other-modules"):
        write_peft(tmp_path / "out", some_adapter(), folder)
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_kept_unless_overwritten(tmp_path: Path, template: Path) -> None:
    out = tmp_path / "out"
    write_peft(out, some_adapter(1), template, {"old.txt": b""})
    with raises(RunError, "folder-exists", containing=str(out)):
        write_peft(out, some_adapter(2), template)
    assert np.array_equal(read_peft(out, MODULES).values, some_adapter(1).values)
    write_peft(out, some_adapter(2), template, overwrite=True)
    assert np.array_equal(read_peft(out, MODULES).values, some_adapter(2).values)
    assert not (out / "old.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "template"]


def test_overwriting_works_where_names_cant_be_exchanged(
    tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())  # a C library without renameat2
    for seed in (1, 2):
        write_peft(tmp_path / "out", some_adapter(seed), template, overwrite=True)
    assert np.array_equal(read_peft(tmp_path / "out", MODULES).values, some_adapter(2).values)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "template"]


WRITER = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from test_peft import some_adapter, write_peft
seed = 0
print("ready", flush=True)
while True:
    extra = {{"seed.txt": b"%d" % (seed % 2)}}
    write_peft({out!r}, some_adapter(seed % 2), {template!r}, extra, overwrite=True)
    seed += 1
"""


def test_a_killed_writer_leaves_the_old_or_the_new_folder(tmp_path: Path, template: Path) -> None:
    out = tmp_path / "out"
    code = WRITER.format(
        root=str(ROOT), tests=str(Path(__file__).parent), out=str(out), template=str(template)
    )
    write_peft(out, some_adapter(0), template, {"seed.txt": b"0"})
    generator = np.random.default_rng(0)
    for _ in range(6):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(float(generator.uniform(0.01, 0.05)))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        seed = int((out / "seed.txt").read_bytes())
        assert np.array_equal(read_peft(out, MODULES).values, some_adapter(seed).values)
    write_peft(out, some_adapter(0), template, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "template"]


def test_a_folder_that_another_process_is_writing_is_ignored(tmp_path: Path, template: Path) -> None:
    other = tmp_path / f".out.{os.getppid()}-abc.partial"
    other.mkdir()
    write_peft(tmp_path / "out", some_adapter(), template)
    assert other.is_dir()


def test_a_full_disk_leaves_the_old_folder(tmp_path: Path, template: Path) -> None:
    """A limit on the size of files simulates a full disk."""
    write_peft(tmp_path / "out", some_adapter(1), template)
    code = textwrap.dedent(f"""
        import resource, sys
        sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
        from test_peft import some_adapter, write_peft
        from prge.errors import RunError
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
        try:
            write_peft({str(tmp_path / "out")!r}, some_adapter(2), {str(template)!r}, overwrite=True)
        except RunError as error:
            print(error)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "can't be written" in done.stdout and "Free some storage" in done.stdout, done
    assert np.array_equal(read_peft(tmp_path / "out", MODULES).values, some_adapter(1).values)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "template"]


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, template: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(RunError, "write-failed"):
        write_peft(tmp_path / "file/out", some_adapter(), template)


def small_model(seed: int = 0) -> Any:
    """Return a model of two linear layers, as PEFT adapts it."""
    import torch

    torch.manual_seed(seed)
    layers = {"q_proj": torch.nn.Linear(5, 3), "v_proj": torch.nn.Linear(5, 4)}
    return torch.nn.Sequential(torch.nn.ModuleDict(layers))


def written_by_peft(folder: Path, dtype: str = "float32", **settings: Any) -> Any:
    """Write a folder with PEFT, with random matrices; returns its model."""
    import peft
    import torch

    targets = ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=targets, init_lora_weights=False, **settings)
    model = peft.get_peft_model(small_model(), config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_folders_that_peft_writes_are_read(tmp_path: Path, dtype: str) -> None:
    model = written_by_peft(tmp_path, dtype)
    adapter = read_lora(tmp_path)
    assert (adapter.rank, adapter.alpha, adapter.scale_of("0.v_proj")) == (2, 6.0, 3.0)
    assert adapter.target_modules == ["q_proj", "v_proj"]
    assert adapter.modules == (
        AdaptedModule("0.q_proj", rank=2, in_features=5, out_features=3),
        AdaptedModule("0.v_proj", rank=2, in_features=5, out_features=4),
    )
    for name in ("q_proj", "v_proj"):
        layer = model.base_model.model[0][name]
        for matrices, values in ((layer.lora_A, adapter.lora_a), (layer.lora_B, adapter.lora_b)):
            matrix = values[f"0.{name}"]
            assert matrix.dtype == np.float32
            assert np.array_equal(matrix, matrices["default"].weight.detach().float().numpy())


def test_modules_have_pefts_ranks_and_alphas(tmp_path: Path) -> None:
    """A pattern is a whole name or its end; PEFT computes each module's alpha / rank from its own values."""
    model = written_by_peft(tmp_path, rank_pattern={"0.q_proj": 3}, alpha_pattern={"v_proj": 5})
    adapter = read_lora(tmp_path)
    assert [module.rank for module in adapter.modules] == [3, 2]
    for name in ("q_proj", "v_proj"):
        layer = model.base_model.model[0][name]
        assert layer.scaling["default"] == adapter.scale_of(f"0.{name}")
        assert np.array_equal(layer.lora_A["default"].weight.detach(), adapter.lora_a[f"0.{name}"])
    scaled = scaled_lora_a(tmp_path)
    np.testing.assert_allclose(scaled["0.q_proj"], 2 * adapter.lora_a["0.q_proj"])
    np.testing.assert_allclose(scaled["0.v_proj"], 2.5 * adapter.lora_a["0.v_proj"])


def test_an_adapter_with_different_ranks_is_written_and_read(tmp_path: Path) -> None:
    written_by_peft(tmp_path / "start", rank_pattern={"0.q_proj": 1})
    modules = read_lora(tmp_path / "start").modules
    trained = random_adapter(modules, 2)
    write_peft(tmp_path / "out", trained, tmp_path / "start")
    again = read_compatible_adapter(tmp_path / "out", modules, tmp_path / "start")
    assert (
        again.values.tobytes()
        == trained.values.tobytes()
        == read_peft(tmp_path / "out", modules).values.tobytes()
    )
    written_by_peft(tmp_path / "even")
    with raises(AdapterError, "adapter-does-not-fit", containing="0.q_proj"):
        read_peft(tmp_path / "even", modules)


def test_peft_loads_written_folders(tmp_path: Path) -> None:
    import peft

    generator = np.random.default_rng(0)
    shapes = {"0.q_proj": (5, 3), "0.v_proj": (5, 4)}
    adapter = PeftAdapter(
        {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
        {name: generator.random((2, width), np.float32) for name, (width, _) in shapes.items()},
        {name: generator.random((out, 2), np.float32) for name, (_, out) in shapes.items()},
    )
    write_lora(tmp_path / "out", adapter)
    model = peft.PeftModel.from_pretrained(small_model(), str(tmp_path / "out"))
    for name in shapes:
        layer = model.base_model.model.get_submodule(name)
        assert layer.scaling["default"] == adapter.scale_of(name)
        assert np.array_equal(layer.lora_A["default"].weight.detach(), adapter.lora_a[name])
        assert np.array_equal(layer.lora_B["default"].weight.detach(), adapter.lora_b[name])
    again = read_lora(tmp_path / "out")
    assert again.modules == adapter.modules and again.config == adapter.config


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"r": 0}, "r is 0"),
        ({"r": -1}, "r is -1"),
        ({"r": 1e300}, "r is 1e+300"),
        ({"r": True}, "r is True"),
        ({"r": 10**12}, "the adapter says rank 1000000000000"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'"),
        ({"lora_alpha": float("inf")}, "Infinity, which JSON does not allow"),
        ({"deep": functools.reduce(lambda inner, _: [inner], range(99), [])}, "more than 32 levels"),
        ({"target_modules": None}, "target_modules is None"),
        ({"target_modules": [3]}, "target_modules is [3]"),
        ({"r": [1] * 10_000}, "r is [1, 1"),
        ({"use_qalora": True}, "use_qalora is set"),
        ({"use_dora": True}, "use_dora is set"),
        ({"bias": "lora_only"}, "bias is"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"rank_pattern": {"q_proj": 9}}, "q_proj.lora_A is [2, 5], the adapter says rank 9"),
        ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern is {'q_proj': 2.5}, must map"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is ['q_proj'], must map"),
        ({"rank_pattern": {".*q_proj": 2}}, "must have names of modules, no expressions"),
        ({"alpha_pattern": {"q_proj": True}}, "alpha_pattern is {'q_proj': True}, must map"),
        ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern is {'q_proj': 0}, must map"),
    ],
)
def test_settings_that_a_program_cannot_compute_are_refused(
    tmp_path: Path, change: dict[str, object], problem: str
) -> None:
    folder = write_folder(tmp_path / "adapter", tensors(), **change)
    with pytest.raises(AdapterError) as caught:
        read_lora(folder)
    assert problem in "\n".join(caught.value.problems)


def test_matrices_that_do_not_form_pairs_are_refused(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = tensors()
    q, v = (f"{PREFIX}{module.name}" for module in MODULES)
    del arrays[f"{q}.lora_A.weight"]
    arrays[f"{v}.lora_B.weight"] = np.full((4, 3), np.inf, np.float32)
    arrays[f"{v}.lora_A.weight"] = np.zeros((2, 5), np.int8)
    arrays["lm_head.weight"] = np.zeros(3, np.float32)
    with pytest.raises(AdapterError) as caught:
        read_lora(write_folder(tmp_path / "bad", arrays))
    text = "\n".join(caught.value.problems)
    for part in (
        "lora_B.weight [4, 3] has 12 values that are not finite",
        "lora_A.weight is I8, must be one of F32, F16, BF16",
        "lm_head.weight is neither lora_A nor lora_B",
        "model.layers.0.q_proj has only one of lora_A and lora_B",
        "model.layers.0.v_proj.lora_B is [4, 3], the adapter says rank 2",
        "it holds no lora_A",
    ):
        assert part in text


def test_pickled_weights_are_not_read(template: Path) -> None:
    (template / "adapter_model.safetensors").rename(template / "adapter_model.bin")
    with raises(AdapterError, "not-an-adapter", containing="adapter_model.safetensors"):
        read_lora(template)


def test_an_adapter_is_read_from_its_run_result_checkpoint_or_folder(tmp_path: Path, template: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "journal.jsonl").write_text("")
    with raises(RunError, "run-unfinished", containing="--resume"):
        find_adapter(run)
    for name in ("final", "checkpoints/step-000003"):
        write_peft(run / name, some_adapter(), template)
        assert find_adapter(run / name) == run / name
        assert find_run(run / name) == run
    assert find_adapter(run) == run / "final"
    assert find_adapter(template) == template
    assert find_run(template) is None
    with raises(AdapterError, "adapter-missing"):
        find_adapter(tmp_path)


def test_an_adapter_that_is_not_finite_is_never_written(tmp_path: Path, template: Path) -> None:
    adapter = read_peft(template, MODULES)
    adapter.values[1] = np.nan
    with raises(AdapterError, "adapter-not-finite"):
        write_peft(tmp_path / "new", adapter, template)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["adapter_config.json", "hashes.json"])
@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"{", b"[]", b"[" * 100_000, b" " * (3 << 20)])
def test_damaged_documents_are_refused_with_a_message(template: Path, name: str, content: bytes) -> None:
    (template / name).write_bytes(content)
    with raises(AdapterError, "adapter-damaged", "adapter-changed", "not-an-adapter") as caught:
        read_peft(template, MODULES)
    assert name in str(caught.value) and len(str(caught.value)) < 1000


def test_an_adapter_of_the_bundle_needs_no_lora_a_of_its_own(tmp_path: Path, template: Path) -> None:
    adapter = some_adapter()
    write_peft(tmp_path / "run", adapter, template)
    result = read_compatible_adapter(tmp_path / "run", MODULES, template)
    assert result.lora_a is None
    assert result.values.tobytes() == adapter.values.tobytes()


def test_an_adapter_of_another_program_has_its_own_lora_a(tmp_path: Path, template: Path) -> None:
    """The adapter keeps its own scale; lora_b is 0 for ranks and modules that the adapter lacks."""
    (module, other) = MODULES
    small = (AdaptedModule(module.name, 1, module.in_features, module.out_features),)
    arrays = tensors(small, seed=3)
    folder = write_folder(tmp_path / "elsewhere", arrays, r=1, lora_alpha=3, target_modules=["q_proj"])
    result = read_compatible_adapter(folder, MODULES, template, generates=True)
    assert result.lora_a is not None
    lora_a, lora_b = (arrays[f"{PREFIX}{module.name}.lora_{letter}.weight"] for letter in "AB")
    product = result.lora_a[module.name].T @ result.lora_b[module.name]
    np.testing.assert_allclose(product.T, 3 * lora_b @ lora_a, rtol=1e-6)
    assert result.lora_a[module.name].shape == (2, 5) and not result.lora_b[other.name].any()


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ((AdaptedModule(MODULES[0].name, 3, 5, 3),), "q_proj has rank 3, the bundle has 2"),
        (
            (AdaptedModule("model.layers.7.q_proj", 2, 5, 3),),
            "1 modules that the bundle doesn't, the first is",
        ),
        ((AdaptedModule(MODULES[0].name, 2, 6, 3),), "is a layer from 6 to 3, not (5, 3)"),
    ],
)
def test_an_adapter_that_doesnt_fit_is_refused(
    tmp_path: Path, template: Path, modules: tuple[AdaptedModule, ...], message: str
) -> None:
    folder = write_folder(tmp_path / "elsewhere", tensors(modules), r=modules[0].rank)
    with pytest.raises(AdapterError) as error:
        read_compatible_adapter(folder, MODULES, template)
    assert message in str(error.value)
