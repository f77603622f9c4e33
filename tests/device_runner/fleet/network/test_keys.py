"""Tests of a fleet's keys: the files of server and devices, their permissions, and damaged files."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from tests.refusals import raises

pytest.importorskip("cryptography")

from cryptography import x509

from device_runner.fleet.network.keys import DeviceKeys, KeysError, ServerKeys, make_keys


def names_of(keys: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate((keys / "server" / "server.pem").read_bytes())
    result = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return sorted(str(name.value) for name in result)


def test_each_side_gets_a_folder_that_only_its_owner_can_read(tmp_path: Path) -> None:
    created = make_keys(tmp_path / "keys", ["server.lan", "192.168.1.5"], ["one", "two"])
    assert created.devices == ("one", "two")
    assert created.until is not None
    files = {str(path.relative_to(tmp_path / "keys")) for path in (tmp_path / "keys").rglob("*.*")}
    own = {f"devices/{name}/{file}" for name in ("one", "two") for file in ("ca.pem", "device.key")}
    server = {"ca.pem", "server.pem", "server.key", "devices/one.pub", "devices/two.pub"}
    assert files == {"authority.key", *own, *(f"server/{name}" for name in server)}
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "keys").rglob("*")} == {0}
    assert names_of(tmp_path / "keys") == ["127.0.0.1", "192.168.1.5", "::1", "localhost", "server.lan"]
    keys = ServerKeys.open(tmp_path / "keys" / "server")
    assert sorted(keys.devices) == ["one", "two"]


def test_the_certificate_is_valid_for_its_hosts(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["server.lan"], ["one"])
    keys = ServerKeys.open(tmp_path / "keys" / "server")
    authority = DeviceKeys.open(tmp_path / "keys" / "devices" / "one").authority
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(keys.certificate, keys.key)
    handshake(serving, ssl.create_default_context(cafile=authority), "server.lan")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(serving, ssl.create_default_context(cafile=authority), "other.lan")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(serving, ssl.create_default_context(), "server.lan")


def handshake(serving: ssl.SSLContext, asking: ssl.SSLContext, host: str) -> None:
    """Do a TLS handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    client = asking.wrap_bio(to_client, to_server, server_hostname=host)
    for _ in range(3):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() is not None


def test_devices_and_hosts_can_be_added(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, [], ["one"])
    kept = ["authority.key", "server/ca.pem", "devices/one/device.key", "server/devices/one.pub"]
    before = [(keys / name).read_bytes() for name in kept]
    certificate = (keys / "server" / "server.pem").read_bytes()
    created = make_keys(keys, [], ["one", "two"])
    assert (created.devices, created.until) == (("two",), None)
    assert (keys / "server" / "server.pem").read_bytes() == certificate
    assert make_keys(keys, ["new.lan"], []).until is not None
    assert "new.lan" in names_of(keys)
    assert [(keys / name).read_bytes() for name in kept] == before


@pytest.mark.parametrize(
    ("hosts", "devices", "value"),
    [
        (["a b"], [], "'a b'"),
        (["-x"], [], "'-x'"),
        ([], ["../x"], "'../x'"),
        ([], [""], "''"),
    ],
)
def test_invalid_names_are_reported(tmp_path: Path, hosts: list[str], devices: list[str], value: str) -> None:
    with raises(KeysError, "names-unusable", containing=value):
        make_keys(tmp_path / "keys", hosts, devices)
    assert not (tmp_path / "keys").exists()


def test_damaged_and_missing_keys_are_named(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, [], ["one"])
    (keys / "devices" / "one" / "device.key").write_text("nonsense")
    with raises(KeysError, "key-unreadable", containing="device.key"):
        DeviceKeys.open(keys / "devices" / "one")
    (keys / "devices" / "one" / "device.key").unlink()
    with raises(KeysError, "keys-missing", containing="device.key"):
        DeviceKeys.open(keys / "devices" / "one")
    (keys / "server" / "devices" / "one.pub").write_text("ssh-rsa nonsense")
    with raises(KeysError, "key-unreadable", containing="one.pub"):
        ServerKeys.open(keys / "server")
    (keys / "server" / "devices" / "one.pub").unlink()
    (keys / "server" / "server.key").write_text("nonsense")
    with raises(KeysError, "certificate-unusable", containing=str(keys / "server")):
        ServerKeys.open(keys / "server")
    (keys / "authority.key").unlink()
    with raises(KeysError, "authority-incomplete", containing="authority.key"):
        make_keys(keys, [], ["two"])


def test_keys_that_others_can_read_cause_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_keys(tmp_path / "keys", [], ["one"])
    folder = tmp_path / "keys" / "devices" / "one"
    DeviceKeys.open(folder)
    assert capsys.readouterr().err == ""
    (folder / "device.key").chmod(0o644)
    DeviceKeys.open(folder)
    assert f"chmod 600 {folder / 'device.key'}" in capsys.readouterr().err
