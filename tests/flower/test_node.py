"""What a node says of itself, and what it is told."""

import re
from pathlib import Path
from typing import Any

import pytest

from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.flower.messages import Node, node_of, write_certs
from atlas_fl.runtime.transport.certificates import make_certs, open_certs

GIVEN = {"task": "movie", "device": "cpu_2gb"}


def test_a_node_is_named_by_its_config_or_by_its_number() -> None:
    given = {"task": "mine=reviews.csv,text=note", "device": "cpu_2gb", "part": 1, "data-dir": "d", "patience": 5}
    node = node_of(given, node_id=7)
    assert node == Node(name="7", task="mine=reviews.csv,text=note", device="cpu_2gb", part=1, data_dir="d", patience=5)
    assert node_of({**given, "name": "site-1"}, node_id=7).name == "site-1"


def test_a_node_agrees_to_nothing_but_what_its_config_says() -> None:
    node = node_of(GIVEN, node_id=7)
    assert (node.allow, node.least_examples, node.config, node.private) == ((), 16, None, None)
    own = node_of({**GIVEN, "allow": "cut labels", "least-examples": 4, "most-sketch": 64}, node_id=7)
    assert (own.allow, own.least_examples, own.most_sketch) == (("cut", "labels"), 4, 64)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "--node-config of node 7 has no task; start its SuperNode as with 'name="),
        ({"task": "movie"}, "--node-config of node 7 has no device"),
        ({**GIVEN, "parts": 1}, "unknown key in --node-config: 'parts'; did you mean 'part'"),
        ({**GIVEN, "part": True}, "--part is True; allowed: a whole number, or none"),
        ({**GIVEN, "task": 3}, "--task is 3; allowed: a text"),
        ({**GIVEN, "data-dir": ""}, "--data-dir is ''; allowed: printable text that is not empty"),
        (
            {**GIVEN, "allow": "cut all"},
            "--allow is ('cut', 'all'); allowed: a list, each one of cut, labels, hub-model,",
        ),
        ({**GIVEN, "dp": "site"}, "--dp is 'site'; allowed: one of none, example, client"),
        ({**GIVEN, "least-examples": 0}, "--least-examples is 0; allowed: at least 1"),
        ({**GIVEN, "config": ""}, "--config is ''; allowed: printable text that is not empty"),
        ({**GIVEN, "name": "ca"}, "client 'ca' cannot be a name; allowed: up to 63"),
        ({**GIVEN, "patience": 0}, "--patience is 0; allowed: above 0"),
    ],
)
def test_a_config_that_is_wrong_is_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        node_of(config, node_id=7)


def test_an_invitation_opens_as_certificates_and_one_that_lacks_a_part_is_refused(tmp_path: Path) -> None:
    make_certs(tmp_path / "certs", servers=["localhost"], clients=["site-1"])
    pem = {path.name: path.read_bytes() for path in (tmp_path / "certs" / "site-1").iterdir()}
    sent = {"address": "host:1", "token": "t", **pem}
    write_certs(sent, tmp_path)
    assert open_certs(tmp_path).name == "site-1"
    assert (tmp_path / "key.pem").stat().st_mode & 0o077 == 0
    for key in sent:
        with pytest.raises(ProtocolError, match=f"the server's message has no {key}; install the same atlas-fl"):
            write_certs({name: value for name, value in sent.items() if name != key}, tmp_path)
