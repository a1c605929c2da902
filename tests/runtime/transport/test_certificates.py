"""Certificates that do not hold are refused at once, by both ends, with a line that says which and why."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.runtime.transport.certificates import Certs, make_certs, open_certs, private_key_of
from atlas_fl.runtime.transport.frames import encode_frame
from atlas_fl.runtime.transport.server import METHOD, SERVICE
from atlas_fl.runtime.transport.sessions import PROTOCOL
from tests.runtime.transport.test_stream import Echo, link, serving

NOW = datetime.now(UTC)
THEN, LATER = NOW - timedelta(days=30), NOW + timedelta(days=5)
PATIENCE = 3600.0
"""Patience of the link: a second try waits longer than any test may take."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation whose authority holds for a year, with sites whose own time is over, or has not come, and others."""
    folder = tmp_path_factory.mktemp("certificates")
    fed, other = folder / "fed", folder / "other"
    make_certs(fed, servers=["localhost"], clients=["site-1"], now=THEN)
    make_certs(fed, servers=[], clients=["expired"], days=2, now=THEN)
    make_certs(fed, servers=[], clients=["early"], days=2, now=LATER)
    make_certs(other, servers=["localhost"], clients=["foreign"])
    # It trusts the server's authority, and has another one's certificate.
    shutil.copytree(other / "foreign", fed / "foreign")
    shutil.copy(fed / "ca" / "ca.pem", fed / "foreign" / "ca.pem")
    # Another key signs in the name of the server's authority.
    (folder / "false").mkdir()
    shutil.copytree(other / "ca", folder / "false" / "ca")
    shutil.copy(fed / "ca" / "ca.pem", folder / "false" / "ca" / "ca.pem")
    make_certs(folder / "false", servers=[], clients=["forged"])
    shutil.copytree(folder / "false" / "forged", fed / "forged")
    return folder


TIMES = {"expired": THEN, "early": LATER}


def shown_by(folder: Path, name: str) -> Certs:
    return open_certs(folder / "fed" / name, now=TIMES.get(name))


@pytest.fixture
def served(folder: Path) -> Iterator[tuple[Echo, int]]:
    echo = Echo()
    with serving(echo, folder / "fed") as port:
        yield echo, port


@pytest.mark.parametrize("name", ["expired", "early", "foreign", "forged"])
def test_a_site_whose_certificate_does_not_hold_is_refused_and_does_not_try_again(folder, served, proxies, name):
    echo, port = served
    proxy, notes = proxies(port), list[str]()
    expected = f"the server at localhost:{proxy.port} refuses the certificate {folder / 'fed' / name / 'cert.pem'} "
    with pytest.raises(ProtocolError, match=expected) as caught:
        link(proxy.port, shown_by(folder, name), notes, wait=PATIENCE).__enter__()
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("ask for a new folder of `atlas certs make`")
    assert (proxy.links <= 2, notes, echo.presence) == (True, [], [])
    # and it is the certificate: another one of this folder is let in on the same way
    with link(proxy.port, shown_by(folder, "site-1"), notes, wait=PATIENCE) as good:
        assert good.exchange({"n": 1})[0]["from"] == "site-1"


@pytest.mark.parametrize("name", ["expired", "early", "foreign", "forged"])
def test_the_server_refuses_it_also_to_whoever_does_not_ask_first(folder, served, name) -> None:
    """A gRPC client of its own, without the probe that tells a site why: it gets no stream."""
    echo, port = served

    def call(certs: Certs) -> bytes:
        credentials = grpc.ssl_channel_credentials(certs.ca, certs.key, certs.cert)
        hello = encode_frame({"session": "s", "protocol": PROTOCOL}, {})
        with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
            return bytes(next(channel.stream_stream(f"/{SERVICE}/{METHOD}")(iter([hello]), timeout=60)))

    with pytest.raises(grpc.RpcError) as caught:
        call(shown_by(folder, name))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    assert echo.presence == []
    assert b"welcome" in call(shown_by(folder, "site-1"))


@pytest.mark.parametrize(
    ("begin", "reason"), [(THEN, "certificate has expired"), (LATER, "certificate is not yet valid")]
)
def test_a_server_whose_certificate_does_not_hold_is_refused_by_a_site(tmp_path, begin, reason) -> None:
    fed = tmp_path / "fed"
    make_certs(fed, servers=["localhost"], clients=["site-1"], days=2, now=begin)
    notes = list[str]()
    with (
        serving(Echo(), fed, now=begin) as port,
        pytest.raises(ProtocolError, match=f"certificate of localhost:{port} is refused here: {reason}"),
    ):
        link(port, open_certs(fed / "site-1", now=begin), notes, wait=PATIENCE).__enter__()
    assert notes == []


def test_a_server_of_another_authority_is_refused_by_a_site(folder: Path, served: tuple[Echo, int]) -> None:
    with pytest.raises(ProtocolError, match=f"certificate of localhost:{served[1]} is refused here"):
        link(served[1], open_certs(folder / "other" / "foreign"), wait=PATIENCE).__enter__()


@pytest.mark.parametrize("name", ["expired", "early"])
def test_a_site_is_told_before_it_knocks_that_its_time_is_over_or_has_not_come(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}/cert.pem is expired or not valid yet: it holds from .*; make a new"):
        open_certs(folder / "fed" / name)


def test_a_key_of_rsa_signs_no_secure_sums(folder: Path) -> None:
    certs = open_certs(folder / "fed" / "site-1")
    assert private_key_of(certs).key_size == 256
    pem = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with pytest.raises(ConfigError, match="is no key of an elliptic curve, and secure sums need one; make it with"):
        private_key_of(replace(certs, key=pem))
