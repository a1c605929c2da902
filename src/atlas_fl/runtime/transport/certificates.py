"""Certificates of a federation for mutual TLS: an authority, a server, and a client for each site; renew and revoke.

The common name of a client's certificate is its name in the federation. Keys are on the curve P-256; a client's
certificate cannot serve and a server's cannot join (extended key usage, RFC 5280 4.2.1.12).

Who may join stands in `clients.txt` of the server's folder: a name a line, and the SHA-256 of its certificate. A
certificate that was replaced or revoked is not listed any more, and so is worth nothing although it has not expired.
"""

import ipaddress
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import count
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from atlas_fl.errors import ConfigError, ProtocolError, short_repr
from atlas_fl.frozen import Frozen
from atlas_fl.storage.folder_access import read_named_file, write_atomic

CA, CERT, KEY, REQUEST, CLIENTS = "ca.pem", "cert.pem", "key.pem", "request.pem", "clients.txt"
AUTHORITY, SERVER, REVOKED = "ca", "server", ".revoked"
MOST_DAYS = 3650
MOST_REQUEST_BYTES = 64 * 2**10
"""Most bytes of a request for a certificate, which comes from elsewhere."""
MOST_LIST_BYTES = 2**24
EMPTY_SECONDS = 2.0
"""Seconds that a list may be empty until it is taken for one of nobody."""
EARLY = timedelta(hours=1)
"""Time that a certificate holds before it is made: clocks differ."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,62}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_READABLE = "give a folder of `atlas certs make`, or put ca.pem and cert.pem into that of `atlas certs request`"


class Certs(Frozen):
    """The certificates that one end of a connection shows and trusts, in PEM."""

    name: str
    """The common name of its certificate."""
    ca: bytes
    cert: bytes
    key: bytes
    folder: Path


class _Authority(Frozen):
    """An authority, and the time for which its new certificates hold, which never outlive it."""

    name: x509.Name
    key: ec.EllipticCurvePrivateKey
    pem: bytes
    times: tuple[datetime, datetime]
    """(begin, end)"""

    def issue(
        self, folder: Path, name: str, *, hosts: Sequence[str] = (), key: ec.EllipticCurvePublicKey | None = None
    ) -> Path:
        """A folder with a new certificate, the authority's own, and the key, if it is made here.

        The certificate is for `key` where the private half of that is elsewhere.
        """
        files = {CA: self.pem}
        if key is None:
            new_key = ec.generate_private_key(ec.SECP256R1())
            key = new_key.public_key()
            files[KEY] = _private(new_key)
        addresses = {host: _address(host) for host in hosts or (name,)}
        extensions = (
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH]),
            x509.SubjectAlternativeName(
                [x509.IPAddress(own) if own else x509.DNSName(host) for host, own in addresses.items()]
            ),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
        )
        files[CERT] = _pem(_certificate(_x509_name(name), key, self.name, self.key, self.times, extensions))
        _write(folder, files)
        return folder


def make_certs(
    folder: Path, *, servers: Sequence[str], clients: Sequence[str], days: int = 365, now: datetime | None = None
) -> tuple[Path, ...]:
    """The folders of a new federation: `ca`, `server`, and one for each client; each holds exactly what it needs.

    Without clients the sites make their own keys (`request_cert`), which `sign_request` adds.
    `servers` are the host names and addresses under which clients reach the server. Where the authority exists already,
    leave them out: the clients are added, and `server/clients.txt` lists them with the others. `now` is the time from
    which the certificates hold, for `days` days, and never longer than their authority's.

    Raises `ConfigError` for a bad name, a number of days out of range, and whatever would be overwritten.
    """
    times = _times(days, now)
    _check_new(folder, servers, clients)
    made = []
    if servers:
        authority = _new_authority(folder / AUTHORITY, times)
        made = [folder / AUTHORITY, authority.issue(folder / SERVER, SERVER, hosts=servers)]
    else:
        authority = _old_authority(folder / AUTHORITY, times)
    made += [authority.issue(folder / name, name) for name in clients]
    _list_certs(folder, clients)
    return tuple(made)


def renew_certs(folder: Path, *, clients: Sequence[str], days: int = 365) -> tuple[Path, ...]:
    """The folders of these clients with new certificates, which are listed in the place of the old ones.

    With a new key, or where the site keeps its key to itself, for the same one. The old folders lie in `.revoked`.
    Raises `ConfigError` for a client that is not listed, and as `make_certs` does.
    """
    _check_listed(folder, clients)
    authority = _old_authority(folder / AUTHORITY, _times(days))
    keys = {name: _key_kept_by(folder / name) for name in clients}
    for name in clients:
        _set_aside(folder, name)
    made = tuple(authority.issue(folder / name, name, key=keys[name]) for name in clients)
    _list_certs(folder, clients)
    return made


def revoke_certs(folder: Path, *, clients: Sequence[str]) -> tuple[Path, ...]:
    """Take these clients off the list; return the places where their folders lie now.

    Raises `ConfigError` for a client that is not listed.
    """
    listed = _check_listed(folder, clients)
    _write_list(folder, {name: fingerprint for name, fingerprint in listed.items() if name not in clients})
    moved = [_set_aside(folder, name) for name in clients]
    return tuple(path for path in moved if path is not None)


def request_cert(folder: Path, *, name: str) -> Path:
    """The file of a request, to be signed where the authority lies; its key stays in this folder and goes nowhere.

    Raises `ConfigError` for a bad name, and where there is a key already.
    """
    check_name(name)
    if any((folder / file).exists() for file in (KEY, REQUEST, CERT)):
        raise ConfigError(f"{folder} has a key or a certificate already, which is not overwritten; give another --to")
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(_x509_name(name)).sign(key, hashes.SHA256())
    _write(folder, {KEY: _private(key), REQUEST: _pem(request)})
    return folder / REQUEST


def sign_request(request: Path, *, folder: Path, days: int = 365) -> Path:
    """The folder with certificate and authority for the site of this request, which `clients.txt` lists from now on.

    Raises `ConfigError` where it is no request that its own key has signed, or its name cannot be or is listed already.
    """
    times = _times(days)
    name, key = _read_request(request)
    if name in read_list(folder / SERVER):
        raise ConfigError(
            f"client {name!r} of {request} is listed already; `atlas certs revoke {name} --to {folder}` first, if this"
            " is to take its place"
        )
    authority = _old_authority(folder / AUTHORITY, times)
    _set_aside(folder, name)
    made = authority.issue(folder / name, name, key=key)
    _list_certs(folder, [name])
    return made


def open_certs(folder: Path, *, now: datetime | None = None) -> Certs:
    """The certificates in a folder that `make_certs` made.

    Raises `ConfigError` where a file is missing or malformed, the key is another's, or the time is over.
    """
    with _refused(f"{folder} holds no certificates that can be read", _READABLE):
        pem = {name: _read(folder / name) for name in (CA, CERT, KEY)}
        cert = x509.load_pem_x509_certificate(pem[CERT])
        key = serialization.load_pem_private_key(pem[KEY], password=None)
        x509.load_pem_x509_certificate(pem[CA])
    if key.public_key() != cert.public_key():
        raise ConfigError(f"{folder / KEY} is not the key of {folder / CERT}; {_READABLE}")
    if not cert.not_valid_before_utc <= (now or datetime.now(UTC)) <= cert.not_valid_after_utc:
        period = f"{cert.not_valid_before_utc:%Y-%m-%d} to {cert.not_valid_after_utc:%Y-%m-%d}"
        raise ConfigError(f"{folder / CERT} is expired or not valid yet: it holds from {period}; make a new one")
    name = _only_name(cert.subject)
    if not _NAME.fullmatch(name):  # files are named after it
        raise ConfigError(f"{folder / CERT} is of {short_repr(name)}, no name of a site; {_READABLE}")
    return Certs(name=name, ca=pem[CA], cert=pem[CERT], key=pem[KEY], folder=folder)


def digest_of(pem: bytes) -> str:
    """The SHA-256 of a certificate as `clients.txt` lists it: of its DER form, in hexadecimal digits.

    Raises `ValueError` for what is no certificate in PEM.
    """
    return sha256(ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))).hexdigest()


def common_name(pem: bytes) -> str:
    """The one common name of a certificate, every sign of it: TLS libraries end it at its first NUL.

    Empty where it has none or several. Raises `ValueError` for what is no certificate in PEM.
    """
    return _only_name(x509.load_pem_x509_certificate(pem).subject)


def private_key_of(certs: Certs) -> ec.EllipticCurvePrivateKey:
    """The key of a site's own certificate; raises `ConfigError` for one that signs no secure sums."""
    key = serialization.load_pem_private_key(certs.key, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(
            f"{certs.folder / KEY} is no key of an elliptic curve, and secure sums need one; make it"
            " with `atlas certs request`"
        )
    return key


def public_key_of(pem: bytes, *, name: str, ca: bytes) -> ec.EllipticCurvePublicKey:
    """The public key of this site; raises `ProtocolError` unless the authority has signed its certificate, which holds.

    Revoked certificates are the server's to know.
    """
    store = Store([x509.load_pem_x509_certificate(ca)])
    try:
        leaf = x509.load_pem_x509_certificate(pem)
        PolicyBuilder().store(store).build_client_verifier().verify(leaf, [])
    except (ValueError, VerificationError):
        raise ProtocolError(
            f"a certificate of {short_repr(name)} is not of this authority, or expired; ask who runs the server"
        ) from None
    key = leaf.public_key()
    if _only_name(leaf.subject) != name or not isinstance(key, ec.EllipticCurvePublicKey):
        raise ProtocolError(f"a certificate of {short_repr(name)} is another's; ask who runs the server")
    return key


def _only_name(subject: x509.Name) -> str:
    """The one common name of a subject; empty where it has none or several."""
    attributes = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(attributes[0].value) if len(attributes) == 1 else ""


def holds_until(folder: Path) -> datetime:
    """The time at which the certificate in this folder ends."""
    return x509.load_pem_x509_certificate(_read(folder / CERT)).not_valid_after_utc


def read_list(folder: Path) -> dict[str, str | None]:
    """The clients that may join, from `clients.txt` in the server's folder: by name the SHA-256 of its certificate.

    None, for a name alone, stands for any certificate of that name that the authority has signed. A line that begins
    with # is a comment. Raises `ConfigError` where there is no list, or none that can be read.
    """
    path = folder / CLIENTS
    with _refused(f"{path} cannot be read", "the folder `server` of `atlas certs make` holds it"):
        lines = _read(path).decode(errors="replace").splitlines()
    listed: dict[str, str | None] = {}
    for line in lines:
        words = line.split()
        if not words or line.lstrip().startswith("#"):
            continue
        name = words[0]
        fingerprint = words[1].lower() if len(words) == 2 else None
        is_entry = len(words) == 1 or (fingerprint is not None and _DIGEST.fullmatch(fingerprint) is not None)
        if not is_entry or not _NAME.fullmatch(name) or name in listed:
            raise ConfigError(
                f"{path} has {short_repr(line)}; one name a line, each once, with the SHA-256 of its certificate"
            )
        listed[name] = fingerprint
    return listed


def listed_clients(folder: Path) -> tuple[str, ...]:
    """The names that may join, from `clients.txt` in the server's folder, in its order; `ConfigError` for none."""
    names = tuple(read_list(folder))
    if not names:
        raise ConfigError(f"{folder / CLIENTS} lists no client; one name a line, each once")
    return names


class Listed:
    """The list of who may join, as it is now; while it cannot be read, as it was last."""

    def __init__(
        self,
        folder: Path,
        *,
        on_note: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._on_note = on_note
        self._clock = clock
        self._empty_since: float | None = None
        listed_clients(folder)
        self._seen = self._stamp()
        self._list = read_list(folder)
        self._told = ""

    def _stamp(self) -> tuple[int, int, int]:
        status = (self._folder / CLIENTS).stat()
        return status.st_mtime_ns, status.st_size, status.st_ino

    def now(self) -> Mapping[str, str | None]:
        """The clients that may join, as `read_list` has them."""
        note = self._told
        try:
            stamp = self._stamp()
            if stamp != self._seen and not self._is_being_written(stamp[1]):
                self._list = read_list(self._folder)
                self._seen = stamp
                note = "" if self._list else f"{self._folder / CLIENTS} lists nobody; until it does nobody may join"
        except (ConfigError, OSError) as error:
            note = f"{error}; until then the list is the one that could be read last"
        if note and note != self._told:
            self._on_note(note)
        self._told = note
        return self._list

    def _is_being_written(self, size: int) -> bool:
        """Return whether a file of this size is just being written: it is empty, and was not so for long."""
        if size:
            self._empty_since = None
            return False
        if self._empty_since is None:
            self._empty_since = self._clock()
        return self._clock() - self._empty_since < EMPTY_SECONDS


@contextmanager
def _refused(fault: str, remedy: str) -> Iterator[None]:
    """Whatever is wrong with a file or with what it holds, as one `ConfigError`."""
    try:
        yield
    except (OSError, ValueError, TypeError, InvalidSignature) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        raise ConfigError(f"{fault} ({reason}); {remedy}") from None


def _times(days: int, now: datetime | None = None) -> tuple[datetime, datetime]:
    """(begin, end) of certificates for so many days from now."""
    if not 1 <= days <= MOST_DAYS:
        raise ConfigError(f"--days is {days}; allowed: 1 to {MOST_DAYS}")
    begin = (now or datetime.now(UTC)) - EARLY
    return begin, begin + EARLY + timedelta(days=days)


def _list_certs(folder: Path, clients: Sequence[str]) -> None:
    """List these clients with the certificates that they have now, those who are new after the others."""
    listed = read_list(folder / SERVER) if (folder / SERVER / CLIENTS).exists() else {}
    _write_list(folder, {**listed, **{name: digest_of(_read(folder / name / CERT)) for name in clients}})


def _write_list(folder: Path, listed: Mapping[str, str | None]) -> None:
    lines = [name if fingerprint is None else f"{name} {fingerprint}" for name, fingerprint in listed.items()]
    path = folder / SERVER / CLIENTS
    _private_folder(path.parent)
    write_atomic(path, "".join(f"{line}\n" for line in lines or ["# nobody"]).encode(), mode=0o600)


def _check_listed(folder: Path, clients: Sequence[str]) -> dict[str, str | None]:
    """The list; raises `ConfigError` unless each of these clients is on it, and named once."""
    _check_names(clients)
    listed = read_list(folder / SERVER)
    for name in clients:
        if name not in listed:
            raise ConfigError(
                f"client {name!r} is not in {folder / SERVER / CLIENTS}; listed: {', '.join(listed) or 'nobody'}"
            )
    return listed


def _set_aside(folder: Path, name: str) -> Path | None:
    """Move the folder of this client, whose certificate is not listed any more; None where there is none."""
    if not (folder / name).exists():
        return None
    _private_folder(folder / REVOKED)
    places = (folder / REVOKED / f"{name}-{number}" for number in count(1))
    target = next(place for place in places if not place.exists())
    (folder / name).rename(target)
    return target


def _key_kept_by(site: Path) -> ec.EllipticCurvePublicKey | None:
    """The key of a site that has its private half alone; None where a new one is to be made here."""
    if (site / KEY).exists() or not (site / CERT).exists():
        return None
    with _refused(f"{site} holds no certificates that can be read", _READABLE):
        key = x509.load_pem_x509_certificate(_read(site / CERT)).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey), "`sign_request` signs no others"
    return key


def _read_request(path: Path) -> tuple[str, ec.EllipticCurvePublicKey]:
    """(name, key) of a request that its own key has signed."""
    with _refused(f"{path} is no request that can be signed", "make one with `atlas certs request`"):
        request = x509.load_pem_x509_csr(read_named_file(path, max_bytes=MOST_REQUEST_BYTES))
        key = request.public_key()
        name = _only_name(request.subject)
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ValueError("its key is not on the curve P-256")
        if not request.is_signature_valid:
            raise ValueError("its key has not signed it")
        if not name:
            raise ValueError("it has no name, or several")
    check_name(name)
    return name, key


def _check_new(folder: Path, servers: Sequence[str], clients: Sequence[str]) -> None:
    """Raise `ConfigError` for a bad name, and where one of these is there already."""
    if not clients and not servers:
        raise ConfigError("--client is missing; name at least one site, as --client site-1, or the --server alone")
    _check_names(clients)
    for host in servers:
        if not _NAME.fullmatch(host) and not _address(host):
            raise ConfigError(f"--server {host!r} is neither a host name nor an address, such as host.example.org")
    if not servers and not (folder / AUTHORITY).exists():
        raise ConfigError(f"--server is missing; name the host that clients reach, or a folder that has {AUTHORITY}/")
    listed = read_list(folder / SERVER) if (folder / SERVER / CLIENTS).exists() else {}
    for name in (*((AUTHORITY, SERVER) if servers else ()), *clients):
        if name in listed or (folder / name).exists():
            remedy = f"choose another name, or give it a new certificate with `atlas certs renew {name} --to {folder}`"
            if name in (AUTHORITY, SERVER):
                remedy = "choose another folder, or leave --server out to add clients"
            raise ConfigError(f"{name!r} exists already in {folder} and is not overwritten; {remedy}")


def check_name(name: str) -> None:
    """Raise `ConfigError` where no client can be called so."""
    if not _NAME.fullmatch(name) or name in (AUTHORITY, SERVER):
        raise ConfigError(
            f"client {short_repr(name)} cannot be a name; allowed: up to 63 letters, digits, '_', '.', '-', and"
            f" neither {AUTHORITY!r} nor {SERVER!r}"
        )


def _check_names(clients: Sequence[str]) -> None:
    for name in clients:
        check_name(name)
    if len(set(clients)) < len(clients):
        raise ConfigError("the command names a site twice; every site needs a name of its own")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _x509_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _new_authority(folder: Path, times: tuple[datetime, datetime]) -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    # Two federations must not take each other's authority for their own, so its name is its key's.
    name = _x509_name(f"atlas {x509.SubjectKeyIdentifier.from_public_key(key.public_key()).digest.hex()[:16]}")
    pem = _pem(_certificate(name, key.public_key(), name, key, times, ()))
    _write(folder, {CA: pem, KEY: _private(key)})
    return _Authority(name=name, key=key, pem=pem, times=times)


def _old_authority(folder: Path, times: tuple[datetime, datetime]) -> _Authority:
    """The authority in this folder; raises `ConfigError` where there is none, or its time is over."""
    begin, end = times
    with _refused(f"{folder} holds no authority that can be read", "make another folder"):
        pem = _read(folder / CA)
        cert = x509.load_pem_x509_certificate(pem)
        key = serialization.load_pem_private_key(_read(folder / KEY), password=None)
    until = cert.not_valid_after_utc
    if until <= begin + EARLY:
        raise ConfigError(f"the authority in {folder} has ended on {until:%Y-%m-%d}; make a new folder for everyone")
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return _Authority(name=cert.subject, key=key, pem=pem, times=(begin, min(end, until)))


def _certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    times: tuple[datetime, datetime],
    extensions: Sequence[x509.ExtensionType],
) -> x509.Certificate:
    """A certificate of this key, which serves for TLS as the extensions say, or without any signs others."""
    signs = not extensions
    usage = x509.KeyUsage(not signs, False, False, False, False, signs, signs, False, False)
    builder = (
        x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
        .not_valid_before(times[0])
        .not_valid_after(times[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.BasicConstraints(signs, 0 if signs else None), critical=True)
        .add_extension(usage, critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _pem(signed: x509.Certificate | x509.CertificateSigningRequest) -> bytes:
    return signed.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _private_folder(folder: Path) -> None:
    """Make this folder, and those above it that are missing, for their owner alone, whatever the umask."""
    for missing in reversed([folder, *folder.parents]):
        if not missing.exists():
            missing.mkdir(mode=0o700)


def _read(path: Path) -> bytes:
    """The content of a certificate, a key or a list, which may be a link where secrets are mounted."""
    return read_named_file(path, max_bytes=MOST_LIST_BYTES)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write these new files into a folder of their owner; a key is never readable by others, not even for a moment."""
    _private_folder(folder)
    for name, content in files.items():
        write_atomic(folder / name, content, mode=0o600 if name == KEY else 0o644)
