"""Certificates and keys of a fleet: an authority, its server's certificate, a key pair for each device.

    KEYS/authority.key            signs server certificates; keep it, give it to nobody
    KEYS/server/                  for the server: ca.pem, server.pem, server.key, devices/NAME.pub
    KEYS/devices/NAME/            for the device NAME: ca.pem, device.key

The server proves who it is by a certificate that ca.pem has signed. A device proves it by signing with its
key, whose public half lies in the server's folder: a device without a file there isn't let in.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

from device_runner.fleet.network.home import private_folder, write_private
from prge.errors import ProblemsError
from prge.host.regular_files import warn_of_shared_key

AUTHORITY, AUTHORITY_KEY = "ca.pem", "authority.key"
CERTIFICATE, CERTIFICATE_KEY, DEVICE_KEY = "server.pem", "server.key", "device.key"
SERVER, DEVICES = "server", "devices"
# By which the server's own process reaches it.
LOCAL = ("localhost", "127.0.0.1", "::1")
_AUTHORITY_DAYS, _CERTIFICATE_DAYS = 3650, 825
_NO_CURVE = "it is no key on an elliptic curve"
_USES = (
    "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign "
    "crl_sign encipher_only decipher_only"
).split()
_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
_HOST = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class KeysError(ProblemsError):
    """Keys or certificates of a fleet that are missing, damaged or not what they should be."""


@dataclass(frozen=True)
class ServerKeys:
    """A server's keys, checked: the authority's certificate, its own with the key, and devices' keys."""

    authority: Path
    certificate: Path
    key: Path
    devices: Mapping[str, ec.EllipticCurvePublicKey]

    @classmethod
    def open(cls, folder: Path) -> ServerKeys:
        """Read and check a server's keys.

        Raises:
            KeysError: files are missing, don't fit each other, or are no keys; each is named.
        """
        authority, certificate, key = _files(folder, (AUTHORITY, CERTIFICATE, CERTIFICATE_KEY), "server")
        keys = cls(authority, certificate, key, _device_keys(folder))
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_verify_locations(keys.authority)
            context.load_cert_chain(keys.certificate, keys.key)
        except OSError as error:
            raise KeysError(
                f"{folder} isn't a certificate with its key:", [str(error)], code="certificate-unusable"
            ) from None
        return keys


@dataclass(frozen=True)
class DeviceKeys:
    """A device's keys: the authority's certificate to know the server by, its own key to be known by."""

    authority: Path
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def open(cls, folder: Path) -> DeviceKeys:
        """Read a device's keys; raises KeysError where one is missing or damaged."""
        authority, path = _files(folder, (AUTHORITY, DEVICE_KEY), "device")
        return cls(authority, _key(path, load_ssh_private_key))


@dataclass(frozen=True)
class Made:
    """What `make_keys` has made: names of devices, and until when the server's certificate holds."""

    devices: tuple[str, ...]
    until: datetime | None


def make_keys(folder: Path, hosts: Sequence[str], devices: Sequence[str]) -> Made:
    """Make what is missing: the authority, a server certificate, devices' keys. Existing keys stay.

    Args:
        folder: where; see the module.
        hosts: names and addresses by which devices reach the server; given again, they replace the
            server's certificate, and devices need nothing new.
        devices: names of devices, in any mixture of old and new ones.

    Raises:
        KeysError: a name can't be used, or what is there is damaged.
        RunError: the folder can't be written.
    """
    problems = [f"{name!r} is no name of a device" for name in devices if not _NAME.fullmatch(name)]
    problems += [f"{host!r} is no name of a host" for host in hosts if _general_name(host) is None]
    if problems:
        raise KeysError("these keys can't be made:", problems, code="names-unusable")
    server = folder / SERVER
    for each in (folder, server, server / DEVICES, folder / DEVICES):
        private_folder(each)
    key = _authority(folder)
    certificate = (server / AUTHORITY).read_bytes()
    until = None
    if hosts or not (server / CERTIFICATE).exists():
        until = _certify(server, key, x509.load_pem_x509_certificate(certificate), hosts)
    made = tuple(name for name in dict.fromkeys(devices) if _make_device(folder, name, certificate))
    return Made(made, until)


def _authority(folder: Path) -> ec.EllipticCurvePrivateKey:
    """The authority's key, made with its certificate where there is none."""
    path = folder / AUTHORITY_KEY
    if path.exists() and (folder / SERVER / AUTHORITY).exists():
        return _key(path, load_pem_private_key)
    if path.exists() or (folder / SERVER / AUTHORITY).exists():
        raise KeysError(
            f"{folder} can't be used:",
            [f"it has only one of {AUTHORITY_KEY} and {SERVER}/{AUTHORITY}"],
            remedy="bring the other one back, or give another folder",
            code="authority-incomplete",
        )
    key = ec.generate_private_key(ec.SECP256R1())
    name = _named("prge fleet authority")
    certificate = (
        _builder(name, name, key.public_key(), _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_private(path, _pem(key))
    write_private(folder / SERVER / AUTHORITY, certificate.public_bytes(Encoding.PEM))
    return key


def _certify(
    server: Path, authority: ec.EllipticCurvePrivateKey, issuer: x509.Certificate, hosts: Iterable[str]
) -> datetime:
    """Make the server's certificate; until when it holds."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = [name for host in dict.fromkeys([*hosts, *LOCAL]) if (name := _general_name(host))]
    certificate = (
        _builder(_named("prge fleet server"), issuer.subject, key.public_key(), _CERTIFICATE_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
        )
        .sign(authority, hashes.SHA256())
    )
    write_private(server / CERTIFICATE_KEY, _pem(key))
    write_private(server / CERTIFICATE, certificate.public_bytes(Encoding.PEM))
    return certificate.not_valid_after_utc


def _make_device(folder: Path, name: str, authority: bytes) -> bool:
    """Make a device's key pair; False where it has one."""
    device = folder / DEVICES / name
    private_folder(device)
    public = folder / SERVER / DEVICES / f"{name}.pub"
    if (device / DEVICE_KEY).exists():
        return False
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(device / AUTHORITY, authority)
    write_private(device / DEVICE_KEY, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    write_private(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return True


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of devices differ
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*uses: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in uses for use in _USES})


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName | None:
    """A host as certificates name it; None for what is no name of one."""
    with suppress(ValueError):
        return x509.IPAddress(ip_address(host))
    return x509.DNSName(host) if _HOST.fullmatch(host) else None


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _device_keys(server: Path) -> dict[str, ec.EllipticCurvePublicKey]:
    """Public keys of the devices that a server lets in, by name."""
    keys: dict[str, ec.EllipticCurvePublicKey] = {}
    problems = []
    for path in sorted((server / DEVICES).glob("*.pub")):
        try:
            key = load_ssh_public_key(path.read_bytes())
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError(_NO_CURVE)
            keys[path.stem] = key
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            problems.append(f"{path}: {error}")
    if problems:
        raise KeysError(
            "keys of devices can't be used:",
            problems,
            remedy="`prge fleet keys` makes them",
            code="key-unreadable",
        )
    return keys


def _key(path: Path, load: Callable[[bytes, None], object]) -> ec.EllipticCurvePrivateKey:
    """The key of a file; raises KeysError for what is none."""
    warn_of_shared_key(path)
    try:
        key = load(path.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(_NO_CURVE)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise KeysError(f"{path} can't be used:", [str(error)], code="key-unreadable") from None
    return key


def _files(folder: Path, names: Sequence[str], whose: str) -> list[Path]:
    """Files of a folder of keys; raises KeysError where some are missing."""
    paths = [folder.absolute() / name for name in names]
    if missing := [f"{path} is no file" for path in paths if not path.is_file()]:
        raise KeysError(
            f"these aren't a {whose}'s keys:",
            missing,
            remedy=f"`prge fleet keys` makes a folder for each {whose}",
            code="keys-missing",
        )
    return paths
