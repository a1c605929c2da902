"""`atlas certs`: what each action leaves, and one line for each mistake."""

import shutil
from hashlib import sha256
from pathlib import Path

import pytest

from atlas_fl.cli.main import main
from atlas_fl.errors import ConfigError
from atlas_fl.runtime.transport.certificates import open_certs, read_list


@pytest.fixture
def fed(tmp_path, monkeypatch, capsys) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["certs", "make", "certs", "--server", "localhost", "--client", "site-1", "--client", "site-2"]) == 0
    assert "good until" in capsys.readouterr().out
    return tmp_path / "certs"


def test_a_site_is_made_renewed_revoked_and_made_again(fed, capsys) -> None:
    first = read_list(fed / "server")
    assert main(["certs", "renew", "site-1"]) == 0
    assert "the certificate before it is worth nothing now" in capsys.readouterr().out
    assert read_list(fed / "server").keys() == first.keys()
    assert read_list(fed / "server")["site-1"] != first["site-1"]
    assert main(["certs", "revoke", "site-1", "site-2", "--to", "certs"]) == 0
    assert "site-1, site-2 may not join any more" in capsys.readouterr().out
    assert read_list(fed / "server") == {}
    assert main(["certs", "make", "certs", "--client", "site-1"]) == 0
    assert list(read_list(fed / "server")) == ["site-1"]


def test_a_site_has_its_own_key_signed(fed, capsys) -> None:
    assert main(["certs", "request", "site-3"]) == 0
    requested = capsys.readouterr().out
    assert "key.pem and stays here" in requested
    assert main(["certs", "sign", "site-3/request.pem", "--days", "5"]) == 0
    signed = capsys.readouterr().out
    assert "for client site-3, who may join now" in signed
    # both ends read it to each other, as `sha256sum request.pem` has it
    digest = sha256(Path("site-3/request.pem").read_bytes()).hexdigest()
    for said in (requested, signed):
        assert f"SHA-256 of the request: {digest}\n" in said
    assert "if the site had another SHA-256, first `atlas certs revoke site-3 --to certs`" in signed
    with pytest.raises(
        ConfigError, match=r"key\.pem.*; .*put ca\.pem and cert\.pem into that of `atlas certs request`"
    ):
        open_certs(fed / "site-3")
    for name in ("ca.pem", "cert.pem"):
        shutil.copy(fed / "site-3" / name, "site-3")
    assert open_certs(Path("site-3")).name == "site-3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "missing: ACTION"),
        ("fly x", "'fly' is not one of make, renew, revoke, request, sign"),
        ("make", "missing: DIR|NAME|REQUEST; see `atlas certs --help`"),
        ("make a b", "`atlas certs make` was given 2 words"),
        ("make certs --client site-1", "exists already in certs and is not overwritten"),
        ("make certs --client site-3 --to x", "--to is not for `atlas certs make`, which takes --server and --client"),
        ("renew site-3", "client 'site-3' is not in certs/server/clients.txt; listed: site-1, site-2"),
        ("renew", "missing: DIR|NAME|REQUEST;"),
        ("renew site-1 --days 0", "--days is 0; allowed: 1 to 3650"),
        ("renew site-1 site-1", "the command names a site twice"),
        ("revoke site-1 --to nowhere", "nowhere/server/clients.txt cannot be read"),
        ("revoke site-1 --server h", "--server is not for `atlas certs revoke`, which takes --to"),
        ("revoke ../evil", "client '../evil' cannot be a name"),
        ("request ca", "client 'ca' cannot be a name"),
        ("request a b", "`atlas certs request` was given 2 words; it takes one NAME"),
        ("sign nothing.pem", "nothing.pem is no request that can be signed"),
        ("sign certs/ca/ca.pem", "is no request that can be signed"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(words: str, message: str, fed, capsys) -> None:
    before = {path: path.read_bytes() for path in fed.rglob("*") if path.is_file()}
    assert main(["certs", *words.split()]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert {path: path.read_bytes() for path in fed.rglob("*") if path.is_file()} == before
