"""A site's model is there in full with a receipt, or not at all; and nothing of a user's is taken for one."""

import errno
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atlas_fl.config import Config
from atlas_fl.deployment.privacy_record import pay_sums
from atlas_fl.deployment.receipt import Receipt, read_receipt, write_model
from atlas_fl.deployment.site import SiteOptions, SiteResult, join_federation
from atlas_fl.errors import ConfigError, DataError, ProtocolError
from atlas_fl.events import Note
from atlas_fl.runtime.protocol.private_params import Owner, PrivateParamStore, check_store
from atlas_fl.runtime.transport.certificates import make_certs
from atlas_fl.storage.jsonl import write_sealed

RECEIPT = Receipt(client="site-1", config="0123456789abcdef", model="ab" * 32)


def export(folder: Path) -> None:
    (folder / "weights").write_bytes(bytes(1000))
    (folder / "labels.json").write_text("[]")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", RECEIPT, export)
    return tmp_path / "model"


def test_a_model_is_known_by_its_receipt(written: Path) -> None:
    found = read_receipt(written, client="site-1")
    assert sorted(found.files) == ["labels.json", "weights"]
    assert replace(found, files={}) == RECEIPT
    assert read_receipt(written.with_name("not-there"), client="site-1") is None


def test_what_is_no_model_of_this_client_is_in_the_way(written: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model exists already; name another folder with --to, or move it away"):
        read_receipt(written, client="site-2")
    for strange in (tmp_path / "folder", tmp_path / "file"):
        (strange.mkdir if strange.name == "folder" else strange.touch)()
        with pytest.raises(ConfigError, match=f"{strange.name} exists already; name another folder"):
            read_receipt(strange, client="site-1")
    receipt = written / "atlas.json"
    receipt.write_text(receipt.read_text().replace("0123456789", "0123456788"))
    with pytest.raises(ConfigError, match="model exists already"):
        read_receipt(written, client="site-1")


def test_what_a_site_keeps_can_be_read_by_its_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_model(tmp_path / "a-adapter", RECEIPT, export)
        own = {"share": ("B",), "names": lambda _: frozenset({"q"}), "draw": dict, "scale": float, "rounds": 1}
        (tmp_path / "given").mkdir()
        for folder in (tmp_path / "a-private", tmp_path / "given"):
            owner = Owner(client="a", config=RECEIPT.config)
            PrivateParamStore(folder=folder, owner=owner, **own)._keep({"q": torch.ones(2)}, 1)
        pay_sums({"a sum": "its digest"}, path=tmp_path / "a-sums")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    folders = dict.fromkeys(("a-adapter", "a-private", "given"), 0o700)
    assert modes == {**folders, "a-sums": 0o600, ".a-sums.lock": 0o600}


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(bytes(999) + b"1"), Path.unlink])
def test_a_model_that_was_altered_is_not_taken_for_what_was_given(written: Path, damage) -> None:
    damage(written / "weights")
    with pytest.raises(ConfigError, match=r"weights is not as it was written; .*`atlas serve --again site-1`"):
        read_receipt(written, client="site-1")


def test_a_full_disk_leaves_nothing_and_says_where_and_what_to_do(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        export(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        DataError, match=r"cannot be written to .*model \(No space left on device\); make room and start"
    ):
        write_model(tmp_path / "model", RECEIPT, full)
    assert list(tmp_path.iterdir()) == []


def test_what_came_to_lie_there_while_the_run_went_on_stays(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("years of work")
    with pytest.raises(ConfigError, match="model exists already"):
        write_model(tmp_path / "model", RECEIPT, export)
    assert (tmp_path / "model" / "weights").read_text() == "years of work"


@pytest.fixture
def joining(tmp_path: Path) -> SiteOptions:
    """A site whose server has gone."""
    make_certs(tmp_path / "certs", servers=["localhost"], clients=["site-1"])
    return SiteOptions(
        address="localhost:1",
        certs=tmp_path / "certs" / "site-1",
        task="movie",
        device="cpu_2gb",
        first_seconds=0.1,
        private=str(tmp_path / "private"),
        to=str(tmp_path / "model"),
    )


def test_a_model_that_is_there_already_is_enough_where_the_server_has_gone(joining: SiteOptions, written: Path) -> None:
    write_sealed(Path(joining.private or "") / "vault.json", {"client": "site-1", "config": RECEIPT.config})
    told: list[object] = []
    found = join_federation(joining, on_event=told.append)
    assert found == SiteResult(name="site-1", adapter=written, sent_bytes=0, received_bytes=0)
    *_, last = [event.text for event in told if isinstance(event, Note)]
    assert last.startswith("no answer from localhost:1 for 0.1 seconds")
    assert last.endswith(
        f"and {written} is complete without it; {joining.private} stays until the server knows so, or you remove it"
    )
    check_store(Path(joining.private or ""), Owner(client="site-1", config=RECEIPT.config))
    shutil.rmtree(written)
    with pytest.raises(ProtocolError, match=r"no answer from localhost:1 for 0\.1 seconds"):
        join_federation(joining)


@pytest.mark.usefixtures("written")
def test_the_model_of_other_settings_is_refused_before_anybody_is_asked(joining: SiteOptions) -> None:
    told: list[object] = []
    with pytest.raises(ConfigError, match=r"model has the model of another run; name another folder with --to"):
        join_federation(replace(joining, config=Config()), on_event=told.append)
    assert told == []


def test_a_folder_of_a_users_is_refused_as_private_before_anybody_is_asked(joining: SiteOptions, tmp_path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"private holds thesis\.txt, which `atlas join` has not written"):
        join_federation(joining)
    assert (tmp_path / "private" / "thesis.txt").read_text() == "years of work"
