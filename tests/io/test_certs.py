import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from atlas_fl.errors import ConfigError
from atlas_fl.io.certs import Certs, Listed, listed_clients, make_certs, open_certs


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


def test_the_name_is_in_the_certificate_and_the_hosts_are_in_the_servers(folder: Path) -> None:
    assert open_certs(folder / "site-1").name == "site-1"
    cert = x509.load_pem_x509_certificate((folder / "server" / "cert.pem").read_bytes())
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]


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


def test_a_foreign_certificate_does_not_pass(folder: Path, tmp_path: Path) -> None:
    make_certs(tmp_path / "other", servers=["localhost"], clients=["site-1"])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(open_certs(tmp_path / "other" / "site-1"), open_certs(folder / "server"))


def test_nothing_is_overwritten(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*.pem")}
    for servers, clients, remedy in (
        (["localhost"], ["site-3"], "folder or name, or leave --server out to add clients$"),
        ([], ["site-3", "site-1"], "folder or name$"),
    ):
        with pytest.raises(ConfigError, match=f"exists already and is not overwritten; choose another {remedy}"):
            make_certs(folder, servers=servers, clients=clients)
    assert {path: path.read_bytes() for path in folder.rglob("*.pem")} == before


def test_a_site_that_is_added_has_the_same_authority(folder: Path) -> None:
    make_certs(folder, servers=[], clients=["site-3"])
    assert listed_clients(folder / "server") == ("site-1", "site-2", "site-3")
    handshake(open_certs(folder / "site-3"), open_certs(folder / "server"))


def test_the_list_of_a_server_is_the_one_that_lies_there_now_and_no_other(folder: Path) -> None:
    listed = Listed(folder / "server")
    assert "site-3" not in listed
    make_certs(folder, servers=[], clients=["site-3"])
    assert "site-3" in listed
    assert list(listed) == ["site-1", "site-2", "site-3"]
    assert len(listed) == 3
    (folder / "server" / "clients.txt").write_text("")
    assert list(listed) == ["site-1", "site-2"], "who was listed at the start stays so while the file is edited"
    assert "stranger" not in listed


def test_a_certificate_holds_for_its_days(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    make_certs(tmp_path / "old", servers=["localhost"], clients=["site-1"], days=3, now=now - timedelta(days=4))
    with pytest.raises(ConfigError, match=r"expired or not valid yet: it holds from .* make a new one"):
        open_certs(tmp_path / "old" / "site-1")
    assert open_certs(tmp_path / "old" / "site-1", now=now - timedelta(days=2)).name == "site-1"


@pytest.mark.parametrize(
    ("servers", "clients", "days", "message"),
    [
        ([], ["site-1"], 1, "--server is missing"),
        (["localhost"], [], 1, "--client is missing"),
        (["localhost"], ["a/b"], 1, "client 'a/b' cannot be a name; allowed: up to 63 letters"),
        (["localhost"], [".."], 1, "cannot be a name"),
        (["localhost"], ["server"], 1, "cannot be a name"),
        (["localhost"], ["a", "a"], 1, "names a site twice"),
        (["local host"], ["a"], 1, "neither a host name nor an address"),
        (["localhost"], ["a"], 0, "--days is 0; allowed: 1 to 3650"),
    ],
)
def test_mistakes_are_told_and_leave_nothing(
    servers: list[str], clients: list[str], days: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_certs(tmp_path / "certs", servers=servers, clients=clients, days=days)
    assert not (tmp_path / "certs").exists()


def test_missing_and_mixed_files_are_told(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file .*nowhere/ca.pem"):
        open_certs(folder / "nowhere")
    (folder / "site-1" / "key.pem").write_bytes((folder / "site-2" / "key.pem").read_bytes())
    with pytest.raises(ConfigError, match="is not the key of"):
        open_certs(folder / "site-1")
    (folder / "site-2" / "cert.pem").write_text("nothing")
    with pytest.raises(ConfigError, match="no certificates that can be read"):
        open_certs(folder / "site-2")
    (folder / "server" / "clients.txt").write_text("a\na\n")
    with pytest.raises(ConfigError, match="lists a client twice"):
        listed_clients(folder / "server")
