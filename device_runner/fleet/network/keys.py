"""Certificates and keys of a fleet: an authority, the server's certificate, and a key pair for each device.

    KEYS/authority.key            signs server certificates; keep it secret
    KEYS/server/                  for the server: ca.pem, server.pem, server.key, devices/NAME.pub
    KEYS/devices/NAME/            for the device NAME: ca.pem, device.key

The server proves its identity by a certificate that ca.pem has signed. A device proves its identity by a
signature of its key, whose public half is in the server's folder; devices without a file there are not
admitted.
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

from device_runner.fleet.network.flower_files import private_folder, write_private
from prge.errors import ProblemsError
from prge.system.regular_files import warn_if_key_is_shared

AUTHORITY, AUTHORITY_KEY = "ca.pem", "authority.key"
CERTIFICATE, CERTIFICATE_KEY, DEVICE_KEY = "server.pem", "server.key", "device.key"
SERVER, DEVICES = "server", "devices"
# Names by which the server's own process connects.
LOCAL = ("localhost", "127.0.0.1", "::1")
_AUTHORITY_DAYS, _CERTIFICATE_DAYS = 3650, 825
_NOT_ELLIPTIC = "it is not an elliptic-curve key"
_USES = (
    "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign "
    "crl_sign encipher_only decipher_only"
).split()
_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
_HOST = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class KeysError(ProblemsError):
    """Keys or certificates of a fleet that are missing, damaged or do not match."""


@dataclass(frozen=True)
class ServerKeys:
    """A server's verified keys: the authority's certificate, its own with the key, and devices' keys."""

    authority: Path
    certificate: Path
    key: Path
    devices: Mapping[str, ec.EllipticCurvePublicKey]

    @classmethod
    def open(cls, folder: Path) -> ServerKeys:
        """Read and verify a server's keys.

        Raises:
            KeysError: files are missing, do not match, or are not keys; each is named.
        """
        authority, certificate, key = _files(folder, (AUTHORITY, CERTIFICATE, CERTIFICATE_KEY), "server")
        keys = cls(authority, certificate, key, _device_keys(folder))
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_verify_locations(keys.authority)
            context.load_cert_chain(keys.certificate, keys.key)
        except OSError as error:
            raise KeysError(
                f"{folder} does not hold a certificate with its key:",
                [str(error)],
                code="certificate-unusable",
            ) from None
        return keys


@dataclass(frozen=True)
class DeviceKeys:
    """A device's keys: the authority's certificate, which verifies the server, and its own private key."""

    authority: Path
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def open(cls, folder: Path) -> DeviceKeys:
        """Read a device's keys; raises KeysError if one is missing or damaged."""
        authority, path = _files(folder, (AUTHORITY, DEVICE_KEY), "device")
        return cls(authority, _key(path, load_ssh_private_key))


@dataclass(frozen=True)
class CreatedKeys:
    """What `make_keys` created: names of devices, and the end of the server certificate's validity."""

    devices: tuple[str, ...]
    until: datetime | None


def make_keys(folder: Path, hosts: Sequence[str], devices: Sequence[str]) -> CreatedKeys:
    """Create what is missing: the authority, a server certificate, and devices' keys. Existing keys stay.

    Args:
        folder: for all keys; see the module.
        hosts: names and addresses by which devices reach the server. If they are given again, they replace
            the server's certificate, and devices need nothing new.
        devices: names of devices, old and new ones in any mixture.

    Raises:
        KeysError: a name can't be used, or existing files are damaged.
        RunError: the folder can't be written.
    """
    problems = [f"{name!r} is not a valid name of a device" for name in devices if not _NAME.fullmatch(name)]
    problems += [f"{host!r} is not a valid host name" for host in hosts if _general_name(host) is None]
    if problems:
        raise KeysError("These keys can't be created:", problems, code="names-unusable")
    server = folder / SERVER
    for each in (folder, server, server / DEVICES, folder / DEVICES):
        private_folder(each)
    key = _authority(folder)
    certificate = (server / AUTHORITY).read_bytes()
    valid_until = None
    if hosts or not (server / CERTIFICATE).exists():
        valid_until = _certify(server, key, x509.load_pem_x509_certificate(certificate), hosts)
    created = tuple(name for name in dict.fromkeys(devices) if _make_device(folder, name, certificate))
    return CreatedKeys(created, valid_until)


def _authority(folder: Path) -> ec.EllipticCurvePrivateKey:
    """Return the authority's key; creates it with its certificate if there is none."""
    path = folder / AUTHORITY_KEY
    if path.exists() and (folder / SERVER / AUTHORITY).exists():
        return _key(path, load_pem_private_key)
    if path.exists() or (folder / SERVER / AUTHORITY).exists():
        raise KeysError(
            f"{folder} can't be used:",
            [f"it has only one of {AUTHORITY_KEY} and {SERVER}/{AUTHORITY}"],
            remedy="Restore the other one, or give another folder.",
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
    """Create the server's certificate; return the end of its validity."""
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
    """Create a device's key pair; False if it exists."""
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
    """Return a host as certificates name it; None if it is not a host name."""
    with suppress(ValueError):
        return x509.IPAddress(ip_address(host))
    return x509.DNSName(host) if _HOST.fullmatch(host) else None


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _device_keys(server: Path) -> dict[str, ec.EllipticCurvePublicKey]:
    """Read the public keys of admitted devices, by name."""
    keys: dict[str, ec.EllipticCurvePublicKey] = {}
    problems = []
    for path in sorted((server / DEVICES).glob("*.pub")):
        try:
            key = load_ssh_public_key(path.read_bytes())
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError(_NOT_ELLIPTIC)
            keys[path.stem] = key
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            problems.append(f"{path}: {error}")
    if problems:
        raise KeysError(
            "These keys of devices can't be used:",
            problems,
            remedy="Create keys with `prge fleet keys`.",
            code="key-unreadable",
        )
    return keys


def _key(path: Path, load: Callable[[bytes, None], object]) -> ec.EllipticCurvePrivateKey:
    """Read the key in a file; raises KeysError if there is none."""
    warn_if_key_is_shared(path)
    try:
        key = load(path.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(_NOT_ELLIPTIC)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise KeysError(f"{path} can't be used:", [str(error)], code="key-unreadable") from None
    return key


def _files(folder: Path, names: Sequence[str], owner: str) -> list[Path]:
    """Return the paths of key files in a folder; raises KeysError if some are missing."""
    paths = [folder.absolute() / name for name in names]
    if missing := [f"{path} does not exist" for path in paths if not path.is_file()]:
        raise KeysError(
            f"These are not the keys of a {owner}:",
            missing,
            remedy=f"`prge fleet keys` creates a folder for each {owner}",
            code="keys-missing",
        )
    return paths
