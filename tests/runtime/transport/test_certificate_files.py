import os
import shutil
import ssl
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.runtime.transport.certificates import (
    CA,
    CERT,
    Certs,
    Listed,
    digest_of,
    holds_until,
    listed_clients,
    make_certs,
    open_certs,
    private_key_of,
    public_key_of,
    read_list,
    renew_certs,
    request_cert,
    revoke_certs,
    sign_request,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_certs(tmp_path / "certs", servers=["localhost", "127.0.0.1"], clients=["site-1", "site-2"])
    return tmp_path / "certs"


def test_each_site_has_exactly_what_it_needs(folder: Path) -> None:
    files = {path.name: sorted(inside.name for inside in path.iterdir()) for path in folder.iterdir()}
    site = ["ca.pem", "cert.pem", "key.pem"]
    assert files == {
        "ca": ["ca.pem", "key.pem"],
        "server": ["ca.pem", "cert.pem", "clients.txt", "key.pem"],
        "site-1": site,
        "site-2": site,
    }
    for name in files:
        assert stat.S_IMODE((folder / name / "key.pem").stat().st_mode) == 0o600
    assert listed_clients(folder / "server") == ("site-1", "site-2")


def handshake(client: Certs, server: Certs, *, host: str = "localhost") -> None:
    """TLS in memory, by Python's own library."""
    ends = {}
    for end, purpose in ((server, ssl.PROTOCOL_TLS_SERVER), (client, ssl.PROTOCOL_TLS_CLIENT)):
        context = ssl.SSLContext(purpose)
        context.load_cert_chain(end.folder / "cert.pem", end.folder / "key.pem")
        context.load_verify_locations(cadata=end.ca.decode())
        context.verify_mode = ssl.CERT_REQUIRED
        ends[purpose] = context
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        ends[ssl.PROTOCOL_TLS_CLIENT].wrap_bio(back, there, server_hostname=host),
        ends[ssl.PROTOCOL_TLS_SERVER].wrap_bio(there, back, server_side=True),
    ]
    for _ in range(3):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue


def test_the_chain_holds_for_pythons_own_tls(folder: Path) -> None:
    server = open_certs(folder / "server")
    handshake(open_certs(folder / "site-1"), server)
    handshake(open_certs(folder / "site-1"), server, host="127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError, match=r"[Hh]ostname mismatch"):
        handshake(open_certs(folder / "site-1"), server, host="other.example")
    with pytest.raises(ssl.SSLCertVerificationError, match=r"purpose|unsuitable"):
        handshake(open_certs(folder / "site-1"), open_certs(folder / "site-2"), host="site-2")


def test_nothing_is_overwritten(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*.pem")}
    for servers, clients in ((["localhost"], ["site-3"]), ([], ["site-3", "site-1"])):
        with pytest.raises(ConfigError, match=r"exists already in .* and is not overwritten; choose another"):
            make_certs(folder, servers=servers, clients=clients)
    assert {path: path.read_bytes() for path in folder.rglob("*.pem")} == before


def test_the_list_of_a_server_is_the_one_that_lies_there_now_and_no_other(folder: Path) -> None:
    notes = list[str]()
    path, listed = folder / "server" / "clients.txt", Listed(folder / "server", on_note=notes.append)
    assert "site-3" not in listed.now()
    make_certs(folder, servers=[], clients=["site-3"])
    assert "site-3" in listed.now()
    handshake(open_certs(folder / "site-3"), open_certs(folder / "server"))
    assert list(listed.now()) == ["site-1", "site-2", "site-3"]
    assert listed.now()["site-3"] == digest_of(open_certs(folder / "site-3").cert)
    revoke_certs(folder, clients=["site-1"])
    assert list(listed.now()) == ["site-2", "site-3"], "who was listed at the start is off it as well"
    assert notes == []
    assert "stranger" not in listed.now()
    for broken in (b"", b"site-2\nsite-2\n", b"../evil\n", b"\xff\xfe\x00\n"):
        path.write_bytes(broken)
        assert list(listed.now()) == ["site-2", "site-3"], "the last that could be read, while this one is edited"
    path.unlink()
    assert list(listed.now()) == ["site-2", "site-3"]
    assert len(notes) == 4, "once for each reason, and not for an empty file, which somebody is writing"
    assert all("until then the list is the one that could be read last" in note for note in notes)
    path.write_text("site-2\n")
    assert list(listed.now()) == ["site-2"]


def test_an_empty_list_is_one_of_nobody_once_it_was_empty_for_two_seconds_and_a_note_says_so(folder: Path) -> None:
    notes, now = list[str](), [0.0]
    path = folder / "server" / "clients.txt"
    listed = Listed(folder / "server", on_note=notes.append, clock=lambda: now[0])
    kept = path.read_text()
    path.write_text("")
    for now[0] in (10.0, 11.9):
        assert list(listed.now()) == ["site-1", "site-2"], "somebody may be writing it"
    path.write_text(kept)
    assert list(listed.now()) == ["site-1", "site-2"]
    path.write_text("")
    now[0] = 20.0
    assert list(listed.now()) == ["site-1", "site-2"], "it was not empty all the while"
    assert notes == []
    for now[0] in (22.0, 23.0):
        assert list(listed.now()) == []
    assert notes == [f"{path} lists nobody; until it does nobody may join"]
    path.write_text(kept)
    assert list(listed.now()) == ["site-1", "site-2"]


def test_the_last_client_can_be_revoked_too(folder: Path) -> None:
    listed = Listed(folder / "server")
    revoke_certs(folder, clients=["site-1", "site-2"])
    assert list(listed.now()) == []
    with pytest.raises(ConfigError, match=r"clients\.txt lists no client; one name a line"):
        listed_clients(folder / "server")


def der_digest(path: Path) -> str:
    """The digest of OpenSSL's `x509 -fingerprint -sha256`, by another library than the one under test uses."""
    cert = x509.load_pem_x509_certificate(path.read_bytes())
    return sha256(cert.public_bytes(serialization.Encoding.DER)).hexdigest()


def test_a_list_holds_the_digest_of_each_certificate_and_old_lists_of_names_alone_are_read(folder: Path) -> None:
    expected = {name: der_digest(folder / name / "cert.pem") for name in ("site-1", "site-2")}
    assert read_list(folder / "server") == expected
    path = folder / "server" / "clients.txt"
    path.write_text("site-1\n\nsite-2\nsite-3\n")
    assert read_list(folder / "server") == {"site-1": None, "site-2": None, "site-3": None}
    make_certs(folder, servers=[], clients=["site-4"])
    assert read_list(folder / "server")["site-1"] is None, "what was listed by name alone stays so"
    assert read_list(folder / "server")["site-4"] == der_digest(folder / "site-4" / "cert.pem")
    path.write_text(f"# who\nsite-1 {expected['site-1'].upper()}\n")
    assert read_list(folder / "server") == {"site-1": expected["site-1"]}
    digest = expected["site-1"]
    for wrong in (f"{digest} site-1", "site-1 site-2", f"site-1 {digest} more", "site-1\nsite-1"):
        path.write_text(f"{wrong}\n")
        with pytest.raises(ConfigError, match="one name a line, each once, with the SHA-256 of its certificate"):
            read_list(folder / "server")


def verified(folder: Path, cert: bytes) -> list[str]:
    """The names of a client's certificate that cryptography's own path validation accepts (RFC 5280)."""
    store = Store([x509.load_pem_x509_certificate((folder / "ca" / "ca.pem").read_bytes())])
    verifier = PolicyBuilder().store(store).build_client_verifier()
    found = verifier.verify(x509.load_pem_x509_certificate(cert), [])
    return [name.value for name in found.subjects or [] if isinstance(name, x509.DNSName)]


def test_a_key_that_a_site_makes_is_as_good_as_one_that_was_made_for_it(folder: Path, tmp_path: Path) -> None:
    request = request_cert(tmp_path / "own", name="site-9")
    signed = sign_request(request, folder=folder)
    assert sorted(path.name for path in signed.iterdir()) == ["ca.pem", "cert.pem"], "no key but at the site"
    assert verified(folder, (signed / "cert.pem").read_bytes()) == ["site-9"]
    assert verified(folder, (folder / "site-1" / "cert.pem").read_bytes()) == ["site-1"]
    with pytest.raises(VerificationError):
        verified(folder, (folder / "server" / "cert.pem").read_bytes())
    assert read_list(folder / "server")["site-9"] == der_digest(signed / "cert.pem")
    for name in ("ca.pem", "cert.pem"):
        shutil.copy(signed / name, tmp_path / "own")
    handshake(open_certs(tmp_path / "own"), open_certs(folder / "server"))
    # renewed for the same key, which nobody has but the site
    (again,) = renew_certs(folder, clients=["site-9"], days=9)
    assert not (again / "key.pem").exists()
    shutil.copy(again / "cert.pem", tmp_path / "own")
    assert open_certs(tmp_path / "own").name == "site-9"
    assert read_list(folder / "server")["site-9"] == der_digest(again / "cert.pem")
    with pytest.raises(ConfigError, match="own has a key or a certificate already, which is not overwritten"):
        request_cert(tmp_path / "own", name="site-9")
    with pytest.raises(ConfigError, match=r"client 'site-9' of .* is listed already; `atlas certs revoke site-9 --to"):
        sign_request(request, folder=folder)


def requested(name: str, *, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | None = None) -> bytes:
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one) for one in name.split("+")])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def forged() -> bytes:
    """A request with another name than its key has signed."""
    der = ssl.PEM_cert_to_DER_cert(requested("site-8").decode().replace(" REQUEST", "").replace("NEW ", ""))
    pem = ssl.DER_cert_to_PEM_cert(der.replace(b"site-8", b"site-7"))
    return pem.replace(" CERTIFICATE", " CERTIFICATE REQUEST").encode()


def bad_requests() -> Iterator[tuple[bytes, str]]:
    yield forged(), "its key has not signed it"
    yield requested("../evil"), "client '../evil' cannot be a name"
    yield requested("server"), "client 'server' cannot be a name"
    yield requested("a+b"), "it has no name, or several"
    yield requested("a", key=ec.generate_private_key(ec.SECP384R1())), "not on the curve P-256"
    yield requested("a", key=rsa.generate_private_key(65537, 2048)), "not on the curve P-256"
    yield b"nothing", "is no request that can be signed"
    yield b"-----BEGIN CERTIFICATE REQUEST-----\n" + b"A" * 2**20, "at most 65,536 are read"


def test_a_request_is_signed_where_its_own_key_has_signed_it_under_a_name_that_can_be(folder: Path) -> None:
    before, path = read_list(folder / "server"), folder / "request.pem"
    for content, message in bad_requests():
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message) as caught:
            sign_request(path, folder=folder)
        assert str(caught.value).isprintable()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(
        ConfigError, match=r"no request that can be signed \(.*request\.pem: no regular file\); make one"
    ):
        sign_request(path, folder=folder)
    assert read_list(folder / "server") == before


def test_a_certificate_that_was_replaced_or_revoked_is_listed_no_more(folder: Path) -> None:
    old = {name: (folder / name / "cert.pem").read_bytes() for name in ("site-1", "site-2")}
    (folder / "server" / "clients.txt").write_text("site-1\nsite-2\n")
    renew_certs(folder, clients=["site-1"])
    (moved,) = revoke_certs(folder, clients=["site-2"])
    assert moved == folder / ".revoked" / "site-2-1"
    assert (moved / "cert.pem").read_bytes() == old["site-2"]
    assert (folder / ".revoked" / "site-1-1" / "cert.pem").read_bytes() == old["site-1"]
    assert read_list(folder / "server") == {"site-1": der_digest(folder / "site-1" / "cert.pem")}
    assert digest_of(old["site-1"]) != read_list(folder / "server")["site-1"]
    make_certs(folder, servers=[], clients=["site-2"])
    listed = read_list(folder / "server")["site-2"]
    assert listed == der_digest(folder / "site-2" / "cert.pem") != digest_of(old["site-2"])
    (again,) = revoke_certs(folder, clients=["site-2"])
    assert again == folder / ".revoked" / "site-2-2", "nothing is overwritten"
    for act in (revoke_certs, renew_certs):
        with pytest.raises(ConfigError, match=r"client 'site-2' is not in .*clients\.txt; listed: site-1$"):
            act(folder, clients=["site-2"])
    shutil.rmtree(folder / "site-1")
    with pytest.raises(
        ConfigError, match=r"'site-1' exists already in .* a new certificate with `atlas certs renew site"
    ):
        make_certs(folder, servers=[], clients=["site-1"])
    renew_certs(folder, clients=["site-1"])
    assert read_list(folder / "server") == {"site-1": der_digest(folder / "site-1" / "cert.pem")}


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    fed, now = tmp_path / "fed", datetime.now(UTC)
    make_certs(fed, servers=["localhost"], clients=["site-1"], days=300, now=now - timedelta(days=290))
    make_certs(fed, servers=[], clients=["site-2"], days=365)
    renew_certs(fed, clients=["site-1"], days=365)
    sign_request(request_cert(tmp_path / "own", name="site-3"), folder=fed, days=365)
    end = x509.load_pem_x509_certificate((fed / "ca" / "ca.pem").read_bytes()).not_valid_after_utc
    assert {holds_until(fed / name) for name in ("site-1", "site-2", "site-3")} == {end}
    with pytest.raises(ConfigError, match=r"the authority in .*ca has ended on .*; make a new folder for everyone"):
        make_certs(fed, servers=[], clients=["site-4"], now=now + timedelta(days=11))


def test_nothing_is_writable_or_a_key_readable_by_others_whatever_the_umask(tmp_path: Path) -> None:
    fed, before = tmp_path / "up" / "fed", os.umask(0)
    try:
        make_certs(fed, servers=["localhost"], clients=["site-1", "site-2"])
        sign_request(request_cert(tmp_path / "at" / "own", name="site-3"), folder=fed)
        renew_certs(fed, clients=["site-1"])
        revoke_certs(fed, clients=["site-2"])
    finally:
        os.umask(before)
    for path in [*(tmp_path / "up").rglob("*"), *(tmp_path / "at").rglob("*"), tmp_path / "up", tmp_path / "at"]:
        secret = path.name in ("key.pem", "clients.txt")
        expected = 0o700 if path.is_dir() else 0o600 if secret else 0o644
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


@pytest.mark.parametrize(
    ("servers", "clients", "days", "message"),
    [
        ([], ["site-1"], 1, "--server is missing"),
        ([], [], 1, "--client is missing; .* or the --server alone"),
        (["localhost"], ["a/b"], 1, "client 'a/b' cannot be a name; allowed: up to 63 letters"),
        (["localhost"], [".."], 1, "cannot be a name"),
        (["localhost"], ["server"], 1, "cannot be a name"),
        (["localhost"], ["a", "a"], 1, "names a site twice"),
        (["local host"], ["a"], 1, "neither a host name nor an address"),
        (["localhost"], ["a"], 0, "--days is 0; allowed: 1 to 3650"),
    ],
)
def test_mistakes_are_told_and_leave_nothing(servers, clients, days, message, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        make_certs(tmp_path / "certs", servers=servers, clients=clients, days=days)
    assert not (tmp_path / "certs").exists()


def test_a_federation_begins_without_sites_whose_keys_stay_with_them(tmp_path: Path) -> None:
    made = make_certs(tmp_path / "certs", servers=["localhost"], clients=[])
    assert [folder.name for folder in made] == ["ca", "server"]
    assert read_list(tmp_path / "certs/server") == {}
    for name in ("north", "south"):
        request = request_cert(tmp_path / name, name=name)
        signed = sign_request(request, folder=tmp_path / "certs")
        assert {path.name for path in signed.iterdir()} == {"ca.pem", "cert.pem"}
    assert list(read_list(tmp_path / "certs/server")) == ["north", "south"]


def test_missing_and_mixed_files_are_told(folder: Path) -> None:
    unread = "no certificates that can be read"
    with pytest.raises(ConfigError, match=rf"{unread} \(.*nowhere/ca\.pem: No such file or directory\); give a folder"):
        open_certs(folder / "nowhere")
    (folder / "site-1" / "key.pem").write_bytes((folder / "site-2" / "key.pem").read_bytes())
    with pytest.raises(ConfigError, match="is not the key of"):
        open_certs(folder / "site-1")
    (folder / "site-2" / "cert.pem").write_text("nothing")
    with pytest.raises(ConfigError, match=unread):
        open_certs(folder / "site-2")
    (folder / "server" / "clients.txt").write_text("a\na\n")
    with pytest.raises(ConfigError, match="has 'a'; one name a line, each once"):
        listed_clients(folder / "server")


def test_a_public_key_is_of_a_site_that_the_authority_has_signed_and_of_nobody_else(tmp_path: Path) -> None:
    now, other, old = tmp_path / "now", tmp_path / "other", tmp_path / "old"
    for folder in (now, other):
        make_certs(folder, servers=["localhost"], clients=["site-1", "site-2"])
    make_certs(old, servers=["localhost"], clients=["site-1"], days=1, now=datetime.now(UTC) - timedelta(days=9))
    ca, mine = (now / "site-1" / CA).read_bytes(), (now / "site-1" / CERT).read_bytes()
    assert public_key_of(mine, name="site-1", ca=ca) == private_key_of(open_certs(now / "site-1")).public_key()
    for pem, authority, message in (
        ((other / "site-1" / CERT).read_bytes(), ca, "is not of this authority"),
        ((old / "site-1" / CERT).read_bytes(), (old / "site-1" / CA).read_bytes(), "or expired; ask who"),
        ((now / "site-2" / CERT).read_bytes(), ca, "is another's"),
        ((now / "server" / CERT).read_bytes(), ca, "is not of this authority"),
        (b"none", ca, "is not of this authority"),
    ):
        with pytest.raises(ProtocolError, match=f"a certificate of 'site-1' .*{message}"):
            public_key_of(pem, name="site-1", ca=authority)
