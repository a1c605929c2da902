"""What a node's settings become for the site that works for it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from atlas_fl.config import Config, config_hash, to_toml, with_values
from atlas_fl.deployment import site
from atlas_fl.deployment.site import SiteOptions, SiteResult
from atlas_fl.errors import ConfigError
from atlas_fl.flower import client_app
from atlas_fl.flower.client_app import answering, who, work
from atlas_fl.flower.messages import RECORD
from atlas_fl.runtime.transport.certificates import CA, CERT, KEY


def test_all_that_a_node_agrees_to_and_pins_reaches_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = list[SiteOptions]()

    def join(options: SiteOptions, **_: Any) -> SiteResult:
        joined.append(options)
        return SiteResult(name="site-1", adapter=None, sent_bytes=0, received_bytes=0)

    monkeypatch.setattr(site, "join_federation", join)
    settings = with_values(Config(), {"rounds": 7})
    (tmp_path / "fed.toml").write_text(to_toml(settings))
    config = {
        **{"task": "movie", "device": "cpu_2gb", "name": "site-1", "part": 1, "allow": "cut", "least-examples": 4},
        **{"config": str(tmp_path / "fed.toml"), "private": "kept", "most-sketch": 64, "to": "models", "patience": 5},
    }
    invitation = {"address": "host:1", "token": "t", CA: b"a", CERT: b"b", KEY: b"c"}
    message: Any = SimpleNamespace(content={RECORD: invitation})
    work(message, SimpleNamespace(node_config=config, node_id=7, run_id=3))  # type: ignore[arg-type]
    (options,) = joined
    assert options.config is not None and config_hash(options.config) == config_hash(settings)
    assert (options.private, options.to) == ("kept", "models/3")
    assert (options.allow, options.least_examples, options.most_sketch) == (("cut",), 4, 64)


def test_a_node_says_what_its_config_lacks_and_of_its_site_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of a site has paths of its disk, and what was spent in other federations."""

    def join(*_: Any, **__: Any) -> None:
        raise ConfigError("this site would spend epsilon 3.14 with this run by /home/north/north-runs")

    monkeypatch.setattr(site, "join_federation", join)
    monkeypatch.setattr(client_app.messages.app, "Message", lambda content, **_: content)
    invitation = {"address": "host:1", "token": "t", CA: b"a", CERT: b"b", KEY: b"c"}
    message: Any = SimpleNamespace(content={RECORD: invitation})
    context: Any = SimpleNamespace(node_config={"task": "movie", "device": "cpu_2gb"}, node_id=7, run_id=3)
    failed: Any = answering(work)(message, context)
    assert failed.reason == "it cannot do this; its own screen says why"
    context.node_config = {"task": "movie"}
    assert "node 7 has no device" in answering(who)(message, context).reason  # type: ignore[attr-defined]
