import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from atlas_fl.errors import CheckpointError, DataError
from atlas_fl.storage import checkpoint
from atlas_fl.storage.checkpoint import TensorFile, load, load_latest, paths_by_round, prune, save
from atlas_fl.storage.tensors import encode_tensors
from tests.examples import examples
from tests.runs.reading import same_tensors


def tensors(round: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(round)
    shared = torch.randn(4, 3, generator=draw)
    return {"movie-0/head.bias": torch.full((2,), float(round)), "a-0/x.lora_A": shared, "a-1/x.lora_A": shared}


def three_rounds(folder: Path) -> Path:
    for round in (1, 2, 3):
        save(folder, round=round, tensors=tensors(round), state={"round": round, "metrics": 100 * round})
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_comes_back_bit_for_bit(tmp_path) -> None:
    state = {"loss": 0.1 + 0.2, "clients": ["a", "b"], "eta": 1e-300, "nested": {"none": None, "text": "ü\n"}}
    save(tmp_path, round=12, tensors=tensors(12), state=state)
    found, messages = load_latest(tmp_path)
    assert (found.round, found.state, found.path.name, messages) == (12, state, "round-0012", ())
    assert encode_tensors(found.tensors) == encode_tensors(tensors(12))
    assert encode_tensors(load_file(found.path / "state.safetensors")) == encode_tensors(tensors(12))


def test_the_same_federation_gives_the_same_files(tmp_path) -> None:
    paths = [save(tmp_path / name, round=1, tensors=tensors(1), state={"x": 0.1}) for name in "ab"]
    for file in ("state.safetensors", "state.json"):
        assert (paths[0] / file).read_bytes() == (paths[1] / file).read_bytes()


def test_nothing_saved_is_nothing_loaded(tmp_path) -> None:
    assert load_latest(tmp_path / "none") == (None, ())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


def other_number(path: Path) -> None:
    path.write_text(path.read_text().replace('"metrics": 300', '"metrics": 200'))


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "tensors cut": ("state.safetensors", cut, "state.safetensors of [0-9]+ bytes has SHA-256 .*, but state.json says"),
    "tensors altered": ("state.safetensors", flip, "state.safetensors of [0-9]+ bytes has SHA-256"),
    "tensors gone": ("state.safetensors", Path.unlink, r"no file .*state\.safetensors"),
    "state cut": ("state.json", cut, r"^damaged file .*state\.json"),
    "state altered": ("state.json", other_number, r"^damaged file .*state\.json: it is not what was written; restore"),
    "state empty": ("state.json", lambda path: path.write_bytes(b""), r"^damaged file .*state\.json"),
    "state no mapping": ("state.json", lambda path: path.write_text("[1]"), "it is not what was written"),
    "state no text": ("state.json", lambda path: path.write_bytes(b"\xff\xfe\x00"), r"^damaged file .*state\.json"),
    "state without digest": ("state.json", lambda path: path.write_text("{}"), "it is not what was written"),
    "state gone": ("state.json", Path.unlink, r"no file .*state\.json"),
}


@pytest.mark.parametrize(("file", "damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(tmp_path, file, damage, message) -> None:
    damage(three_rounds(tmp_path) / "round-0003" / file)
    found, messages = load_latest(tmp_path)
    assert (found.round, found.state["metrics"]) == (2, 200)
    assert len(messages) == 1
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "round-0003")
    assert messages[0].startswith("checkpoint round-0003 passed over: ")
    assert messages[0].endswith("; going on from round-0002")


def test_every_damaged_checkpoint_is_named_and_none_good_is_none(tmp_path) -> None:
    three_rounds(tmp_path)
    for round in (1, 2, 3):
        flip(tmp_path / f"round-000{round}" / "state.safetensors")
    found, messages = load_latest(tmp_path)
    assert found is None
    assert [message.split(":")[0] for message in messages] == [
        f"checkpoint round-000{round} passed over" for round in (3, 2, 1)
    ]


@examples(60)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), file=st.sampled_from(["json", "safetensors"]))
def test_no_flipped_bit_is_ever_loaded_as_another_state(tmp_path_factory, place: float, bit: int, file: str) -> None:
    folder = tmp_path_factory.mktemp("flip")
    path = save(folder, round=1, tensors=tensors(1), state={"metrics": 100}) / f"state.{file}"
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    found, messages = load_latest(folder)
    assert found is None
    assert len(messages) == 1


def test_unfinished_folders_are_no_checkpoints_and_are_cleared_by_the_next_save(tmp_path) -> None:
    three_rounds(tmp_path)
    (tmp_path / ".round-0004.writing").mkdir()
    (tmp_path / ".round-0001.removed").mkdir()
    (tmp_path / "round-0002.replaced").mkdir()
    (tmp_path / "notes").mkdir()
    found, messages = load_latest(tmp_path)
    assert (found.round, messages) == (3, ())
    save(tmp_path, round=4, tensors=tensors(4), state={})
    assert names(tmp_path) == ["notes", "round-0001", "round-0002", "round-0003", "round-0004"]


def test_going_back_behind_a_damaged_round_removes_it(tmp_path) -> None:
    three_rounds(tmp_path)
    for round in (2, 3):
        flip(tmp_path / f"round-000{round}" / "state.safetensors")
    save(tmp_path, round=2, tensors=tensors(2), state={"again": True})
    assert names(tmp_path) == ["round-0001", "round-0002"]
    found, messages = load_latest(tmp_path)
    assert (found.round, found.state, messages) == (2, {"again": True}, ())


def test_the_newest_are_kept(tmp_path) -> None:
    three_rounds(tmp_path)
    prune(tmp_path, keep=2)
    assert names(tmp_path) == ["round-0002", "round-0003"]
    prune(tmp_path, keep=5)
    assert names(tmp_path) == ["round-0002", "round-0003"]


def test_the_best_are_kept_beside_the_newest(tmp_path) -> None:
    three_rounds(tmp_path)
    save(tmp_path, round=4, tensors=tensors(4), state={})
    prune(tmp_path, keep=1, keep_rounds=(2, 7))
    assert names(tmp_path) == ["round-0002", "round-0004"]
    assert list(paths_by_round(tmp_path)) == [2, 4]
    found, messages = load_latest(tmp_path)
    assert (found.round, messages) == (4, ())


def test_a_refused_state_changes_nothing(tmp_path) -> None:
    three_rounds(tmp_path)
    with pytest.raises(DataError, match="best is nan"):
        save(tmp_path, round=4, tensors=tensors(4), state={"best": math.nan})
    assert names(tmp_path) == ["round-0001", "round-0002", "round-0003"]


def test_ten_thousand_rounds_are_in_order(tmp_path) -> None:
    for round in (9_999, 10_000):
        save(tmp_path, round=round, tensors={}, state={})
    found, _ = load_latest(tmp_path)
    assert found.round == 10_000


def test_what_no_run_has_written_is_kept_when_its_checkpoint_goes(tmp_path) -> None:
    for round in (1, 2, 3):
        save(tmp_path, round=round, tensors=tensors(round), state={})
    for round in (1, 3):
        (tmp_path / f"round-000{round}" / "notes.txt").write_text(f"of round {round}")
    (tmp_path / ".round-2-of-mine").mkdir()
    (tmp_path / "round-0004").write_text("mine")
    save(tmp_path, round=2, tensors=tensors(2), state={})
    prune(tmp_path, keep=1)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        ".round-2-of-mine",
        "round-0001.kept-1",
        "round-0001.kept-1/notes.txt",
        "round-0002",
        "round-0002/state.json",
        "round-0002/state.safetensors",
        "round-0003.kept-1",
        "round-0003.kept-1/notes.txt",
        "round-0004.kept-1",
    ]
    assert (tmp_path / "round-0004.kept-1").read_text() == "mine"
    found, damaged = load_latest(tmp_path)
    assert found.round == 2
    assert damaged == ()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[TensorFile]:
    """No files yet, where what has not changed is never too small to be left out."""
    monkeypatch.setattr(checkpoint, "LEAST_KEPT", 0)
    return []


def changing(rounds: int) -> Iterator[dict[str, torch.Tensor]]:
    """Twenty clients of whom one changes in each round; one goes after the fifth round and comes back."""
    clients = {f"start/c{client}/x": torch.randn(30) for client in range(20)}
    for round in range(rounds):
        clients = {**clients, f"start/c{round % 20}/x": torch.randn(30)}
        yield {name: tensor for name, tensor in clients.items() if name != "start/c9/x" or round not in (5, 6)}


def sizes(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in path.glob("*.safetensors")}


def test_a_checkpoint_holds_what_has_changed_and_links_to_the_rest(tmp_path: Path, written: list[TensorFile]) -> None:
    wholes = 0
    for round, clients in enumerate(changing(50), start=1):
        path = save(tmp_path, round=round, tensors=clients, state={}, written=written)
        prune(tmp_path, keep=1)  # a link needs no other name of its file
        assert same_tensors(load(path).tensors, clients)
        wholes += len(written) == 1
        if len(written) > 1:
            assert sizes(path)["state.safetensors"] < 500
        assert sum(sizes(path).values()) < 2.5 * 20 * 120 + 100 * len(written)
    assert wholes == 2  # the first, and when as much is linked as counts; then no file is older than twenty rounds


def test_a_damaged_link_is_found_out(tmp_path: Path, written: list[TensorFile]) -> None:
    for round, clients in enumerate(changing(3), start=1):
        save(tmp_path, round=round, tensors=clients, state={}, written=written)
    flip(tmp_path / "round-0003/state-0002.safetensors")  # what the second round has written
    found, messages = load_latest(tmp_path)
    assert found.round == 1
    assert "round-0003 passed over: state-0002.safetensors of" in messages[0]
    assert "round-0002 passed over: state.safetensors of" in messages[1]


def test_without_hard_links_everything_is_written(
    tmp_path: Path, written: list[TensorFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refused)
    for round, clients in enumerate(changing(3), start=1):
        path = save(tmp_path, round=round, tensors=clients, state={}, written=written)
        assert list(sizes(path)) == ["state.safetensors"]
        assert same_tensors(load(path).tensors, clients)


def test_a_small_state_is_written_whole(tmp_path: Path) -> None:
    written: list[TensorFile] = []
    for round, clients in enumerate(changing(3), start=1):
        assert list(sizes(save(tmp_path, round=round, tensors=clients, state={}, written=written))) == [
            "state.safetensors"
        ]


def test_a_large_state_is_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 1000)
    (clients,) = changing(1)
    path = save(tmp_path, round=1, tensors=clients, state={})
    assert sorted(sizes(path)) == ["state-0001.safetensors", "state-0002.safetensors", "state.safetensors"]
    assert same_tensors(load(path).tensors, clients)
