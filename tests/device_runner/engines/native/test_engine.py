"""The native engine gives the torch engine's bits on every kind of program, and shares weights safely."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from device_runner.engines.base import probing_inputs  # noqa: E402
from device_runner.engines.choice import Backend, choose  # noqa: E402
from device_runner.engines.native.engine import NativeEngine  # noqa: E402
from prge.bundle import Bundle  # noqa: E402
from prge.contract import AdaptedModule, Contract  # noqa: E402
from server_export.lower.lowering import lower  # noqa: E402
from server_export.lower.method_graphs import export_programs  # noqa: E402
from tests.compilers import needs_compiler  # noqa: E402
from tests.server_export.programs import build  # noqa: E402
from tests.tiny_models import SHALLOW  # noqa: E402

pytestmark = [pytest.mark.export, needs_compiler]
KINDS = {
    "stack": ("llama", {}),
    "tangent": ("llama", {"estimator": "tangent"}),
    "verbalizer": (
        "llama",
        {"readout": "verbalizer", "label_tokens": (5, 9), "label_words": (" no", " yes")},
    ),
    "encoder": ("bert", {"estimator": "tangent"}),
    "quantized": ("llama", {"estimator": "tangent", "quantize": "8da4w"}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """A bundle of each kind, exported when it is first asked for."""

    @lru_cache
    def make(kind: str) -> Bundle:
        architecture, changes = KINDS[kind]
        torch.manual_seed(0)
        built = build(architecture, SHALLOW[architecture], **changes)
        folder: Path = tmp_path_factory.mktemp(kind)
        (folder / "program.pte").write_bytes(lower(export_programs(built)).buffer)
        return Bundle(folder, built.contract, {}, built.contracts.get("score"))

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_both_engines_give_the_same_bits(made: Callable[[str], Bundle], kind: str) -> None:
    bundle = made(kind)
    assert set(bundle.methods) == ({"forward"} if kind in ("stack", "verbalizer") else {"forward", "score"})
    for method, contract in bundle.methods.items():
        inputs = probing_inputs(contract)
        found, want = (
            Backend(name).engine.load(bundle, 1, method=method).forward(inputs)
            for name in ("native", "torch")
        )
        for name, array in want.items():
            assert np.isfinite(array).all() and array.any()
            assert found[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("kind", ["tangent", "encoder", "quantized"])
def test_shared_weights_change_no_bit(made: Callable[[str], Bundle], kind: str) -> None:
    bundle = made(kind)
    assert NativeEngine.can_share(bundle)
    inputs = {method: probing_inputs(contract) for method, contract in bundle.methods.items()}
    alone = {m: NativeEngine.load(bundle, 1, method=m).forward(inputs[m]) for m in inputs}
    together = {m: NativeEngine.load(bundle, 1, False, m, share_weights=True) for m in inputs}
    for method in ("score", "forward", "score"):
        for name, array in together[method].forward(inputs[method]).items():
            assert array.tobytes() == alone[method][name].tobytes()


def test_weights_of_the_same_bytes_and_another_shape_arent_shared(tmp_path: Path) -> None:
    """The runtime would give one the other's packing."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    contract = Contract(
        kind="stack",
        readout="logprobs",
        copies=1,
        batch_size=3,
        sequence_length=2,
        positions=1,
        width=0,
        vocabulary_size=5,
        label_tokens=(),
        modules=(AdaptedModule("head", rank=3, in_features=4, out_features=16),),
    )

    class Twins(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            values = torch.randn(64, generator=torch.Generator().manual_seed(0))
            self.wide = torch.nn.Parameter(values.reshape(4, 16).clone())
            self.tall = torch.nn.Parameter(values.reshape(16, 4).clone())

        def forward(self, tokens: object, positions: object, targets: object, lora_b: object) -> object:
            states = torch.nn.functional.linear(lora_b, self.wide)  # type: ignore[arg-type]
            return torch.nn.functional.linear(states, self.tall)[0, :, 1:2]

    example = tuple(torch.from_numpy(array) for array in probing_inputs(contract).values())
    exported = {name: torch.export.export(Twins().eval(), example) for name in ("forward", "score")}
    program = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
    (tmp_path / "program.pte").write_bytes(program.buffer)
    bundle = Bundle(tmp_path, contract, {}, replace(contract))
    assert not NativeEngine.can_share(bundle)
    NativeEngine.load(bundle, 1).forward(probing_inputs(contract))


def test_a_stack_bundle_has_nothing_to_share(made: Callable[[str], Bundle]) -> None:
    assert not NativeEngine.can_share(made("stack"))


def test_the_native_engine_is_the_first_choice_and_torch_the_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from device_runner.engines.native import runtime

    assert choose("auto") == choose("native") == Backend("native")
    assert choose("torch") == Backend("torch")
    runtime.interface.cache_clear()
    monkeypatch.setenv("PRGE_NATIVE_LIBRARY", str(tmp_path / "nothing.so"))
    try:
        fallen = choose("auto")
        assert fallen.name == "torch" and "nothing.so, which is no file" in fallen.reason
    finally:
        runtime.interface.cache_clear()
