"""Parts that a client does not share: kept at its site by digest, named to the server, in no message."""

import json
from pathlib import Path

import pytest
import torch

from atlas_fl.aggregation.update_checks import check_update
from atlas_fl.client.job import Job, Update
from atlas_fl.client.options import TrainOptions
from atlas_fl.errors import CheckpointError, ConfigError, ModelError, ProtocolError
from atlas_fl.params import PRIVATE, Params, digest
from atlas_fl.partial_sharing import (
    expected_update,
    is_placeholder,
    private_digest,
    transmitted_params,
    unshared_keys,
    with_placeholders,
)
from atlas_fl.runtime.protocol.messages import PrivateRef, model_message, read_private
from atlas_fl.runtime.protocol.model_sync import Receiver, Sender
from atlas_fl.runtime.protocol.private_params import Owner, PrivateParamStore, check_store, clear_store
from atlas_fl.storage.jsonl import read_sealed, write_sealed

NAMES = frozenset({"a.lora_A", "a.lora_B", "b.lora_A", "b.lora_B", "head.w"})


def draw(ranks: dict[str, int]) -> Params:
    found = {"head.w": torch.full((2,), 7.0)}
    for module, rank in ranks.items():
        found[f"{module}.lora_A"] = torch.arange(3.0 * rank).reshape(rank, 3)
        found[f"{module}.lora_B"] = torch.zeros(2, rank)
    return found


OWNER = Owner(client="c", config="0123456789abcdef")


def vault_in(folder: Path, *share: str) -> PrivateParamStore:
    how = {"names": lambda _: NAMES, "draw": draw, "scale": lambda rank: 1 / rank}
    return PrivateParamStore(folder=folder / "kept", owner=OWNER, share=lambda _: share, rounds=2, **how)


def begun(ranks: dict[str, int], share: tuple[str, ...] = ("A",), sha256: str | None = None) -> Params:
    """A model as the server has it: without the values of what is not shared."""
    return with_placeholders(draw(ranks), unshared_keys(draw(ranks), share), sha256=sha256)


ONES = {"a": 1, "b": 1}


def private_of(model: Params) -> PrivateRef | None:
    """The private part as a site reads it from this model's message."""
    return read_private(json.loads(json.dumps(model_message(model)[0])))


def step(vault: PrivateParamStore, model: Params, *, round: int = 1, hash_loaded: bool = False):
    """A job and its answer, heads as JSON leaves them: (what was trained, all that was sent, the update)."""
    sender, receiver = Sender(), Receiver(store=vault)
    job = Job(client="c", params=model, round=round, options=TrainOptions(seed=0))
    head, down = sender.job("train", job, number=1)
    _, at_site, _ = receiver.job(json.loads(json.dumps(head)), down, client="c")
    whole = at_site.params
    loaded = digest(whole) if hash_loaded else None
    trained = {key: tensor + 1 for key, tensor in whole.items()}
    update = Update(client="c", params=trained, examples=4, metrics={}, loaded=loaded, keys=len(whole))
    answer, up = receiver.update("train", update, at_site, number=1)
    found = sender.update("train", json.loads(json.dumps(answer)), up, job=job)
    assert receiver.held["trained"].keys() == sender.held["trained"].keys()
    return trained, {**down, **up}, found


@pytest.mark.parametrize("share", [("A",), ("B", "head"), ("head",), ("A", "B"), ("A", "head")])
def test_a_site_goes_on_with_what_it_kept_and_no_message_has_a_value_of_it(tmp_path: Path, share) -> None:
    own = unshared_keys(draw({"a": 2, "b": 1}), share)
    model, vault = begun({"a": 2, "b": 1}, share), vault_in(tmp_path, *share)
    for round in (1, 2, 3):
        before = dict(model)
        whole, sent, found = step(vault, model, round=round, hash_loaded=True)
        assert not {key.removeprefix("param/") for key in sent} & {*own, PRIVATE}
        check_update(model, found.params)
        assert {key for key, tensor in found.params.items() if is_placeholder(tensor)} == set(own)
        assert private_digest(found.params) == digest({key: whole[key] for key in own})
        assert all(torch.equal(found.params[key], whole[key]) for key in NAMES.difference(own))
        # what an audit compares: the model as the server has it
        assert (found.loaded, found.keys) == (digest(before), len(before))
        model = found.params
        vault = vault_in(tmp_path, *share)  # the site was killed and is started again
    assert whole["head.w"].tolist() == [10.0, 10.0]
    again = vault.whole(transmitted_params(model), private_of(model), cut=None, round=0)
    assert digest(again) == digest(whole)
    vault.end(private_of(model))
    assert clear_store(vault.folder, OWNER) == ""
    assert not (tmp_path / "kept").exists()


def test_a_private_part_begins_drawn_and_grows_with_the_ranks_by_hand(tmp_path: Path) -> None:
    """B = (1, 1) of rank 1 at scale 1 is (2, 2), (0, 0) of rank 2 at scale 1/2; the head stays."""
    vault = vault_in(tmp_path, "A")
    _, _, found = step(vault, begun(ONES))
    assert found.params["a.lora_B"].shape == (0, 1)
    at_start = begun({"a": 2, "b": 1}, sha256=private_digest(found.params))
    whole = vault.whole(transmitted_params(at_start), private_of(at_start), cut=None, round=1)
    assert whole["a.lora_B"].tolist() == [[2.0, 0.0], [2.0, 0.0]]
    assert whole["b.lora_B"].tolist() == [[1.0], [1.0]]
    assert whole["head.w"].tolist() == [8.0, 8.0]


def test_what_did_not_change_keeps_its_name_and_an_answer_without_a_model_names_nothing(tmp_path: Path) -> None:
    vault, start = vault_in(tmp_path, "A"), draw(ONES)
    private = private_of(begun(ONES))
    job = Job(client="c", params=start, round=1, options=None)
    looked = Update(client="c", params={**start, "sketch": torch.ones(1)}, examples=0, metrics={})
    update, told = vault.split_private(looked, job, {}, private)
    assert told == private
    assert update.params.keys() == {"a.lora_A", "b.lora_A", "sketch"}
    measured = Update(client="c", params={"importance": torch.ones(1)}, examples=0, metrics={})
    assert vault.split_private(measured, job, {}, private) == (measured, None)
    assert not (tmp_path / "kept").exists()


def test_a_version_goes_when_the_server_can_no_longer_go_back_to_it(tmp_path: Path) -> None:
    model, names = begun(ONES), []
    for round in range(1, 7):
        model = step(vault_in(tmp_path, "A"), model, round=round)[2].params
        names.append(private_digest(model))
    held = {path.stem for path in (tmp_path / "kept").glob("*.safetensors")}
    # named last in round k + 1; in round 6 the server may be as far back as the end of round 4
    assert held == set(names[2:])


def test_what_is_kept_beside_a_model_goes_by_its_kind_and_stays_while_it_is_named(tmp_path: Path) -> None:
    vault = vault_in(tmp_path, "A")
    owed = {"a.lora_B": torch.ones(2, 1)}
    name = vault.keep_tree("residual", owed, 1)
    assert {key: one.tolist() for key, one in vault.tree("residual", name).items()} == {"a.lora_B": [[1.0], [1.0]]}
    part = private_digest(step(vault, begun(ONES))[2].params)
    assert part is not None
    for kind, other in (("momentum", name), ("residual", part)):  # no model may be added to what leaves
        with pytest.raises(ModelError, match=f"names as {kind} what is none; nothing was sent"):
            vault.tree(kind, other)
    with pytest.raises(ModelError, match="names as a part of the model what is none"):
        vault.whole({}, PrivateRef(sha256=name, ranks=(1, 1)), cut=None, round=1)
    # a client that took no part for fifty rounds is named both at once
    vault.use([part, name], 50)
    vault.whole(
        {"a.lora_A": owed["a.lora_B"], "b.lora_A": owed["a.lora_B"]}, PrivateRef(sha256=part), cut=None, round=50
    )
    assert {path.stem for path in vault.folder.glob("*.safetensors")} == {part, name}


def test_what_predicts_beside_a_shared_model_is_a_whole_one_of_its_shapes(tmp_path: Path) -> None:
    vault = vault_in(tmp_path)
    whole = private_digest(step(vault, begun(ONES, ()))[2].params)
    assert whole is not None and vault.own_model(whole, draw(ONES)).keys() == NAMES
    owed = vault.keep_tree("residual", draw(ONES), 1)
    part = private_digest(step(vault_in(tmp_path, "A"), begun(ONES))[2].params)
    assert part is not None
    for name, shared in ((owed, ONES), (part, ONES), (whole, {"a": 2, "b": 1})):
        with pytest.raises(ModelError, match="names as a model beside the shared one what is none; nothing was sent"):
            vault.own_model(name, draw(shared))


def test_a_part_that_is_lost_or_damaged_is_told_in_a_line(tmp_path: Path) -> None:
    vault = vault_in(tmp_path, "A")
    model = step(vault, begun(ONES))[2].params
    (path,) = (tmp_path / "kept").glob("*.safetensors")
    content = path.read_bytes()
    for damage in (lambda: path.write_bytes(content[:-1] + b"x"), path.unlink):
        damage()
        with pytest.raises(ModelError, match="what this site has not shared") as caught:
            step(vault, model)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_only_what_is_not_shared_may_stay_away_and_only_digests_name_files(tmp_path: Path) -> None:
    start = draw(ONES)
    own = unshared_keys(start, ("A",))
    lacking = with_placeholders(start, [*own, "a.lora_A"], sha256="ab" * 32)
    with pytest.raises(ProtocolError, match=r"a\.lora_A is \(1, 0\)"):
        check_update(expected_update(start | {PRIVATE: lacking[PRIVATE]}, lacking, ("A",)), lacking)
    kept = begun(ONES, sha256="ab" * 32)
    check_update(expected_update(start | {PRIVATE: kept[PRIVATE]}, kept, ("A",)), kept)
    with pytest.raises(ProtocolError, match=r"head\.w is \(2,\)"):
        check_update(kept, {**start, PRIVATE: kept[PRIVATE]})
    with pytest.raises(ProtocolError, match=r"private\.sha256 is '\.\./\.\./other'; allowed: a SHA-256"):
        read_private({"private": {"sha256": "../../other", "ranks": []}})
    with pytest.raises(ProtocolError, match="ranks of 1 modules, 0 are here"):
        told = read_private({"private": {"sha256": None, "ranks": [1]}})
        vault_in(tmp_path, "A").whole(transmitted_params(kept), told, cut=None, round=1)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with two versions, and what a write that was cut short has left."""
    model = begun(ONES)
    for round in (1, 2):
        model = step(vault_in(tmp_path, "A"), model, round=round)[2].params
    folder = tmp_path / "kept"
    (folder / f".{'ab' * 32}.safetensors.{'0' * 16}.writing").write_bytes(b"half")
    assert len(list(folder.iterdir())) == 4
    return folder


def newest_of(folder: Path) -> str:
    return str(json.loads((folder / "vault.json").read_text())["newest"])


def test_the_newest_version_stays_where_the_server_names_an_older_one_at_the_end(kept: Path, tmp_path: Path) -> None:
    """Not even a round far beyond removes it; a server that names the newest, now or later, ends the run."""
    vault, newest = vault_in(tmp_path, "A"), newest_of(kept)
    (old,) = {path.stem for path in kept.glob("*.safetensors")} - {newest}
    sent = {key: tensor for key, tensor in draw(ONES).items() if key.endswith("lora_A")}
    vault.whole(sent, PrivateRef(sha256=old, ranks=()), cut=None, round=10**9)
    for told in (PrivateRef(sha256=old, ranks=()), PrivateRef(sha256=None, ranks=()), None):
        vault.end(told)
        left = clear_store(kept, OWNER)
        assert left.startswith(f"{kept} stays: the server's model at the end is without the newest")
        assert (kept / f"{newest}.safetensors").exists()
    vault.end(PrivateRef(sha256=newest, ranks=()))
    assert clear_store(vault.folder, OWNER) == ""
    assert not kept.exists()


def test_a_folder_that_no_vault_has_made_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "data.csv").write_text("text,label")
    (folder / "thesis.txt").write_text("years of work")
    (folder / f"{'ab' * 32}.safetensors").symlink_to(folder / "thesis.txt")
    for strange in (f"{'ab' * 32}.safetensors", "sub", "thesis.txt"):
        with pytest.raises(ConfigError, match=f"kept holds {strange}, which `atlas join` has not written; name a new"):
            check_store(folder, OWNER)
        path = folder / strange
        path.rename(tmp_path / strange)
    check_store(folder, OWNER)  # it is empty now
    check_store(tmp_path / "not-there", OWNER)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file; name a new or an empty folder with --private"):
        check_store(tmp_path / "file", OWNER)
    assert (tmp_path / "sub" / "data.csv").read_text() == "text,label"


def test_the_vault_of_another_client_or_another_run_is_refused(kept: Path) -> None:
    check_store(kept, OWNER)
    check_store(kept)
    for client, config, named in (("d", OWNER.config, "d in 01234567"), ("c", "fed", "c in fed")):
        message = f"holds what c does not share in .* 01234567, and this is {named}; name a new"
        with pytest.raises(ConfigError, match=message):
            check_store(kept, Owner(client=client, config=config))
    (kept / "vault.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"damaged file .*vault\.json"):
        check_store(kept, OWNER)


def test_only_what_the_vault_has_written_is_removed_at_the_end(kept: Path, tmp_path: Path) -> None:
    thesis, link = kept / "thesis.txt", kept / f"{'cd' * 32}.safetensors"
    (tmp_path / "elsewhere").write_text("mine")
    thesis.write_text("years of work")
    link.symlink_to(tmp_path / "elsewhere")
    (kept / "sub").mkdir()
    check_store(kept, OWNER)  # these came while the run went on
    vault_in(tmp_path, "A").end(PrivateRef(sha256=newest_of(kept), ranks=()))
    assert clear_store(kept, OWNER) == f"{kept} stays: it holds {link.name}, which `atlas join` has not written"
    assert {path.name for path in kept.iterdir()} == {"thesis.txt", "sub", link.name}
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert thesis.read_text() == "years of work"


def test_the_folder_of_another_owner_is_not_cleared(kept: Path) -> None:
    write_sealed(kept / "vault.json", {"client": "c", "config": "of another run"})
    assert clear_store(kept, OWNER) == ""
    assert len(list(kept.iterdir())) == 4


def test_no_name_in_the_index_leads_out_of_the_folder(kept: Path, tmp_path: Path) -> None:
    victim = tmp_path / f"{'ab' * 32}.safetensors"
    victim.touch()
    mark = read_sealed(kept / "vault.json")
    write_sealed(kept / "vault.json", {**mark, "rounds": {f"../{victim.stem}": 0, **mark["rounds"]}})
    step(vault_in(tmp_path, "A"), begun(ONES), round=9)
    assert victim.exists()
    assert list(json.loads((kept / "vault.json").read_text())["rounds"]) == [newest_of(kept)]
