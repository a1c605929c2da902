"""Certificates of a federation: one authority, a server, and a client for each site; who one is stands in them.

The common name of a client's certificate is its name in the federation. Keys are on the curve P-256; a client's
certificate cannot serve and a server's cannot join (extended key usage, RFC 5280 4.2.1.12).
"""

import ipaddress
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atlas_fl.errors import ConfigError
from atlas_fl.io.atomic import write_atomic

CA, CERT, KEY, CLIENTS = "ca.pem", "cert.pem", "key.pem", "clients.txt"
AUTHORITY, SERVER = "ca", "server"
MOST_DAYS = 3650
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,62}")


@dataclass(frozen=True, kw_only=True)
class Certs:
    """What one end of a connection shows and trusts, in PEM."""

    name: str
    """The common name of its certificate."""
    ca: bytes
    cert: bytes
    key: bytes
    folder: Path


@dataclass(frozen=True, kw_only=True)
class _Issuer:
    name: x509.Name
    key: ec.EllipticCurvePrivateKey
    pem: bytes


def make_certs(
    folder: Path, *, servers: Sequence[str], clients: Sequence[str], days: int = 365, now: datetime | None = None
) -> tuple[Path, ...]:
    """The folders of a new federation: `ca`, `server`, and one for each client; each holds exactly what it needs.

    `servers` are the host names and addresses under which clients reach the server. Where the authority exists already,
    leave them out: the clients are added, and `server/clients.txt` lists them with the others. `now` is the time from
    which the certificates hold, for `days` days.

    Raises `ConfigError` for a bad name, a number of days out of range, and whatever would be overwritten.
    """
    _check(folder, servers, clients, days)
    begin = (now or datetime.now(UTC)) - timedelta(hours=1)  # clocks differ
    end = begin + timedelta(days=days, hours=1)
    made = []
    if servers:
        issuer = _new_authority(folder / AUTHORITY, begin, end)
        made.append(folder / AUTHORITY)
        made.append(_issue(folder / SERVER, issuer, SERVER, begin, end, hosts=servers))
    else:
        issuer = _old_authority(folder / AUTHORITY)
    made += [_issue(folder / name, issuer, name, begin, end) for name in clients]
    listed = folder / SERVER / CLIENTS
    before = listed.read_text(encoding="utf-8").split() if listed.exists() else []
    write_atomic(listed, "".join(f"{name}\n" for name in (*before, *clients)).encode())
    return tuple(made)


def open_certs(folder: Path, *, now: datetime | None = None) -> Certs:
    """What lies in a folder that `make_certs` made.

    Raises `ConfigError` where a file is missing or none of the format, the key is another's, or the time is over.
    """
    pem = {}
    for name in (CA, CERT, KEY):
        path = folder / name
        if not path.is_file():
            raise ConfigError(
                f"no file {path}; a folder of `atlas certs make` holds {CA}, {CERT} and {KEY}: give one with --certs"
            )
        pem[name] = path.read_bytes()
    try:
        cert = x509.load_pem_x509_certificate(pem[CERT])
        key = serialization.load_pem_private_key(pem[KEY], password=None)
        x509.load_pem_x509_certificate(pem[CA])
        (common,) = cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{folder} holds no certificates that can be read ({error}); make them again") from None
    if key.public_key() != cert.public_key():
        raise ConfigError(f"{folder / KEY} is not the key of {folder / CERT}; copy both from one `atlas certs make`")
    if not cert.not_valid_before_utc <= (now or datetime.now(UTC)) <= cert.not_valid_after_utc:
        held = f"{cert.not_valid_before_utc:%Y-%m-%d} to {cert.not_valid_after_utc:%Y-%m-%d}"
        raise ConfigError(f"{folder / CERT} is expired or not valid yet: it holds from {held}; make a new one")
    return Certs(name=str(common.value), ca=pem[CA], cert=pem[CERT], key=pem[KEY], folder=folder)


def listed_clients(folder: Path) -> tuple[str, ...]:
    """The names that may join, from `clients.txt` in the server's folder, in its order."""
    path = folder / CLIENTS
    if not path.is_file():
        raise ConfigError(
            f"no file {path}; the folder `server` of `atlas certs make` holds it, one client's name a line"
        )
    names = tuple(path.read_text(encoding="utf-8").split())
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"{path} lists {'no client' if not names else 'a client twice'}; one name a line, each once")
    return names


class Listed(Collection[str]):
    """The names that may join as the list is now, those first that it had at the start."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._first = folder, listed_clients(folder)

    def _names(self) -> tuple[str, ...]:
        try:
            return tuple(dict.fromkeys((*self._first, *listed_clients(self._folder))))
        except ConfigError:  # somebody is just editing it
            return self._first

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())


def _check(folder: Path, servers: Sequence[str], clients: Sequence[str], days: int) -> None:
    if not 1 <= days <= MOST_DAYS:
        raise ConfigError(f"--days is {days}; allowed: 1 to {MOST_DAYS}")
    _check_names(clients)
    for host in servers:
        if not _NAME.fullmatch(host) and not _address(host):
            raise ConfigError(f"--server {host!r} is neither a host name nor an address, such as host.example.org")
    if not servers and not (folder / AUTHORITY).exists():
        raise ConfigError(f"--server is missing; name the host that clients reach, or a folder that has {AUTHORITY}/")
    for name in (*((AUTHORITY, SERVER) if servers else ()), *clients):
        if (folder / name).exists():
            remedy = ", or leave --server out to add clients" if servers else ""
            raise ConfigError(
                f"{folder / name} exists already and is not overwritten; choose another folder or name{remedy}"
            )


def _check_names(clients: Sequence[str]) -> None:
    if not clients:
        raise ConfigError("--client is missing; name at least one site, as --client site-1")
    for name in clients:
        if not _NAME.fullmatch(name) or name in (AUTHORITY, SERVER):
            raise ConfigError(
                f"client {name!r} cannot be a name; allowed: up to 63 letters, digits, '_', '.', '-', and neither"
                f" {AUTHORITY!r} nor {SERVER!r}"
            )
    if len(set(clients)) < len(clients):
        raise ConfigError("--client names a site twice; every site needs a name of its own")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _new_authority(folder: Path, begin: datetime, end: datetime) -> _Issuer:
    key = ec.generate_private_key(ec.SECP256R1())
    # Two federations must not take each other's authority for their own, so its name is its key's.
    name = _named(f"atlas {x509.SubjectKeyIdentifier.from_public_key(key.public_key()).digest.hex()[:16]}")
    builder = _builder(name, name, key, begin, end).add_extension(x509.BasicConstraints(True, 0), critical=True)
    cert = builder.add_extension(_usage(signs=True), critical=True).sign(key, hashes.SHA256())
    pem = cert.public_bytes(serialization.Encoding.PEM)
    _write(folder, {CA: pem, KEY: _private(key)})
    return _Issuer(name=name, key=key, pem=pem)


def _old_authority(folder: Path) -> _Issuer:
    try:
        cert = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        key = serialization.load_pem_private_key((folder / KEY).read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} holds no authority that can be read ({error}); make another folder") from None
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return _Issuer(name=cert.subject, key=key, pem=cert.public_bytes(serialization.Encoding.PEM))


def _issue(
    folder: Path, issuer: _Issuer, name: str, begin: datetime, end: datetime, *, hosts: Sequence[str] = ()
) -> Path:
    """A certificate that this authority signs, in a folder with its key and the authority's own certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    role = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
    alternatives = [
        x509.IPAddress(address) if (address := _address(host)) else x509.DNSName(host) for host in hosts or (name,)
    ]
    builder = (
        _builder(_named(name), issuer.name, key, begin, end)
        .add_extension(x509.BasicConstraints(False, None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([role]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key()), critical=False)
    )
    cert = builder.sign(issuer.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return _write(folder, {CA: issuer.pem, CERT: cert, KEY: _private(key)})


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, begin: datetime, end: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _usage(*, signs: bool) -> x509.KeyUsage:
    rest = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, decipher_only=False, **rest)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption())


def _write(folder: Path, files: dict[str, bytes]) -> Path:
    """The folder with these files; a key is never readable by others, not even for a moment."""
    folder.mkdir(parents=True, mode=0o700)
    for name, content in files.items():
        mode = 0o600 if name == KEY else 0o644
        with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
    return folder
