"""What `prge android` sends, told to a phone that only listens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from device_runner.android.command import _send_bundle
from prge.bundle import MANIFEST, open_bundle
from prge.errors import BundleError
from tests.bundles import make_bundle, make_chain_bundle


class Listener:
    """Stands for device_runner.android.device.Phone."""

    sent: tuple[str, ...] = ()

    def path(self, *parts: str) -> str:
        return "/".join(parts)

    def send_folder(self, local: Path, remote: str, *, names: Iterable[str], **how: bool) -> int:
        self.sent = tuple(names)
        return len(self.sent)


@pytest.mark.parametrize("make", [make_bundle, make_chain_bundle])
def test_a_bundle_goes_as_its_manifest_names_it(tmp_path: Path, make: Any) -> None:
    folder = make(tmp_path / "bundle")
    (folder / "notes.txt").write_text("mine")
    phone: Any = Listener()
    bundle = open_bundle(folder)
    assert _send_bundle(phone, folder) == f"bundles/{bundle.sha256[:12]}"
    assert set(phone.sent) == {MANIFEST, *bundle.manifest["files"]}
    if bundle.chain is not None:
        parts = {"programs/block.pte", "weights/000.ptd", "weights/head.ptd", "tables.safetensors"}
        assert parts <= set(phone.sent)


def test_damaged_weights_stay_here(tmp_path: Path) -> None:
    folder = make_chain_bundle(tmp_path / "bundle")
    weights = folder / "weights/000.ptd"
    weights.write_bytes(bytes(weights.stat().st_size))
    phone: Any = Listener()
    with pytest.raises(BundleError, match=r"000\.ptd is not the file"):
        _send_bundle(phone, folder)
    assert not phone.sent
