"""Questions and invitations over a grid that is in this process."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from flwr.app import ConfigRecord, Error, Message, RecordDict

from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.flower import server_app
from atlas_fl.flower.messages import RECORD
from atlas_fl.flower.server_app import Invitations, name_nodes, natural, order_of
from atlas_fl.runtime.transport.certificates import make_certs
from atlas_fl.runtime.transport.sessions import Tokens


class Grid:
    """Nodes that answer at once: with a name, with an error, or (None) never."""

    def __init__(self, answers: dict[int, Any]) -> None:
        self.answers, self.there, self.sent = answers, set(answers), list[Message]()
        self._replies: list[Message] = []

    def get_node_ids(self) -> Iterable[int]:
        return self.there

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(f"message-{len(self.sent)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            message.metadata.__dict__["_src_node_id"] = 1
            self.sent.append(message)
            answer = self.answers[message.metadata.dst_node_id]
            if isinstance(answer, Error):
                self._replies.append(Message(answer, reply_to=message))
            elif answer is not None:
                content = RecordDict({RECORD: ConfigRecord({"name": answer})})
                self._replies.append(Message(content, reply_to=message))
        return ids

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        found, self._replies = self._replies, []
        assert {reply.metadata.reply_to_message_id for reply in found} <= set(ids)
        return found


@pytest.fixture(autouse=True)
def as_in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(f"flwr.supercore.task_identity.TaskIdentity._{name}", 1)
    monkeypatch.setattr(server_app, "POLL_SECONDS", 0.001)


def test_nodes_are_known_by_the_names_they_give() -> None:
    assert name_nodes(Grid({7: "site-2", 8: "site-1"}), count=2, seconds=60) == {"site-2": 7, "site-1": 8}


@pytest.mark.parametrize(
    ("answers", "count", "message"),
    [
        ({7: "a", 8: Error(2, "has no task")}, 0, "^node 8 cannot take part: has no task$"),
        ({7: "a", 8: Error(5, "It is gone.")}, 0, "^node 8 cannot take part: It is gone. Start its SuperNode again"),
        ({7: "a", 8: "server"}, 0, "^node 8 cannot take part: client 'server' cannot be a name; allowed: up to 63"),
        ({7: "a", 8: "../a"}, 0, "^node 8 cannot take part: client '../a' cannot be a name"),
        ({7: "a", 8: Error(2, "x\x1b[2J\ny")}, 0, r"^node 8 cannot take part: x\?\[2J\?y$"),
        ({7: "a", 8: None}, 0, "^node 8 cannot take part: no answer within 0.05 seconds; look at its SuperNode's log$"),
        (
            {7: "a"},
            2,
            "^1 of 2 SuperNodes are connected after 0.05 seconds; start them, or lower nodes in --run-config$",
        ),
        ({}, 0, "^0 of 1 SuperNodes are connected"),
    ],
)
def test_a_federation_that_cannot_begin_says_why(answers: dict[int, Any], count: int, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        name_nodes(Grid(answers), count=count, seconds=0.05)


def test_a_second_node_of_a_name_is_refused_and_the_run_goes_on() -> None:
    """The one with the lower number has it, in whatever order they answer."""
    events = list[Any]()
    grid = Grid({9: "a", 8: "b", 7: "a"})
    assert name_nodes(grid, count=3, seconds=60, on_event=events.append) == {"a": 7, "b": 8}
    (note,) = [str(event) for event in events]
    assert "node 9 was refused: node 7 is named 'a' too; give one another name in its --node-config" in note


def test_nodes_that_cannot_take_part_are_left_out_where_fewer_suffice() -> None:
    events = list[Any]()
    grid = Grid({7: "a", 8: Error(2, "has no task"), 9: "ca", 10: None})
    assert name_nodes(grid, count=4, seconds=0.05, min_clients=1, on_event=events.append) == {"a": 7}
    told = "\n".join(str(event) for event in events)
    lines = (
        "node 8 cannot take part: has no task",
        "client 'ca' cannot be a name",
        "node 10 cannot take part: no answer",
    )
    assert [line for line in lines if line not in told] == []
    with pytest.raises(ProtocolError, match="node 8 cannot take part"):
        name_nodes(Grid({7: "a", 8: Error(2, "has no task")}), count=2, seconds=60, min_clients=2)


class Watched:
    """Invitations of one node, watched by a test instead of a thread."""

    def __init__(self, folder: Path, answer: Any) -> None:
        make_certs(folder / "certs", servers=["localhost"], clients=["site-1"])
        self.tokens, self.grid = Tokens(), Grid({7: answer})
        self.post = Invitations(
            grid=self.grid, nodes={"site-1": 7}, certs=folder / "certs", tokens=self.tokens, address="localhost:1"
        )
        self.notes, self.lost = list[str](), list[tuple[str, str]]()
        self.desk = SimpleNamespace(note=self.notes.append, submit=lambda work, *args: self.lost.append(work(*args)))
        self.manager = SimpleNamespace(remove=lambda name, reason: (name, reason))

    def step(self) -> None:
        self.post.step(self.manager, self.desk)

    def tokens_sent(self) -> list[str]:
        return [str(message.content[RECORD]["token"]) for message in self.grid.sent]


def test_a_node_whose_app_crashes_is_invited_again_with_a_new_token_but_not_for_ever(tmp_path: Path) -> None:
    watched = Watched(tmp_path, Error(8, "ClientApp stopped responding."))
    for _ in range(10):
        watched.step()
    first, *_, last = watched.tokens_sent()
    assert len(set(watched.tokens_sent())) == 4
    watched.tokens.redeem("site-1", {"token": last, "session": "s"})
    with pytest.raises(ProtocolError, match="not its own now"):
        watched.tokens.redeem("site-1", {"token": first, "session": "s"})
    assert watched.notes[0] == "site-1: ClientApp stopped responding. It is started again"
    assert watched.lost == [("site-1", "ClientApp stopped responding.")]


def test_a_node_that_has_gone_is_invited_when_it_is_back(tmp_path: Path) -> None:
    watched = Watched(tmp_path, Error(5, "SuperNode is gone."))
    watched.step()
    watched.grid.there.clear()
    watched.step()
    assert len(watched.grid.sent) == 1
    watched.grid.there.add(7)
    watched.step()
    assert len(watched.grid.sent) == 2


def test_what_a_site_cannot_mend_by_itself_is_told_and_not_tried_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path, Error(2, "no answer from localhost:1"))
    for _ in range(3):
        watched.step()
    assert len(watched.grid.sent) == 1
    assert watched.notes == ["site-1: no answer from localhost:1"]
    assert watched.lost == [("site-1", "no answer from localhost:1")]


def test_clients_are_in_the_order_that_people_count_in() -> None:
    names = ["trec-0", "movie-10", "movie-2", "7", "movie-0", "site"]
    assert sorted(names, key=natural) == ["7", "movie-0", "movie-2", "movie-10", "site", "trec-0"]


def test_a_run_config_is_read_and_one_that_is_wrong_is_one_line() -> None:
    places: dict[str, Any] = {"config": "fed.toml", "address": "h:1", "host": ""}
    values = {**places, "nodes": 2, "min-clients": 0, "wait": 5, "deadline": 6}
    assert order_of(values).deadline == 6
    for wrong in ({"nodes": "two"}, {"config": None}):
        kept = {key: value for key, value in (values | wrong).items() if value is not None}
        with pytest.raises(ConfigError, match="the run config cannot be read"):
            order_of(kept)
