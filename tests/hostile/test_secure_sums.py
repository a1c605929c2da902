"""Secure sums across sites: the server has sums alone, sites that leave are made good, servers that lie end a site."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from atlas_fl.config import Config, to_toml, with_values
from atlas_fl.errors import ConfigError, DataError, ProtocolError
from atlas_fl.experiment.run import run_config
from atlas_fl.runtime.protocol.messages import as_tensor
from atlas_fl.runtime.transport.certificates import make_certs
from atlas_fl.runtime.transport.sessions import NO_TENSORS
from atlas_fl.secure_sums import STEPS
from tests.hostile.federation import ServerGoneError
from tests.hostile.servers import Kept, Recording, lie_to, record, welcomed
from tests.runs.reading import audited, passing_audit, same_tensors, state

FOUR = tuple(f"movie-{k}" for k in range(4))
GIVEN = {"strategy": "fedit", "ranks": "4", "secure": True, "clients_per_task": 4, "rounds": 2, "max_share": 0.5}


@pytest.fixture(scope="module")
def usual(shared_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Recording:
    made = shared_config(tasks="movie", pack_tokens=1, name="secure", **GIVEN)
    found = record(made, tmp_path_factory.mktemp("secure"), FOUR, secure=4)
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    return found


def test_sites_end_where_a_simulation_does(usual: Recording, shared_config: Callable[..., Config]) -> None:
    secrets = str(usual.folder)
    plain = shared_config(tasks="movie", pack_tokens=1, name="plain", secrets=secrets, **{**GIVEN, "secure": False})
    simulated = run_config(plain)
    first, last = state(simulated.folder, round=1), state(usual.found.folder, round=1)
    assert first.keys() == last.keys()
    for name, tensor in first.items():
        if tensor.is_floating_point():
            assert (tensor - last[name]).abs().max() <= 2e-6, name
    assert not same_tensors(first, last)
    passing_audit(usual.found.folder)
    (trained,) = audited(usual.found.folder, 1, "trained")
    by_site = [{key: one for key, one in trained.items() if key.startswith(f"{name}/")} for name in FOUR]
    assert len({tuple(float(one.sum()) for one in params.values()) for params in by_site}) == 1  # sums alone


def test_nothing_that_leaves_a_site_holds_its_model(usual: Recording) -> None:
    masked = 0
    for spoken in usual.spoken.values():
        for (head, tensors), _ in spoken.turns:
            if head["kind"] == "result" and "steps" in head["metrics"]:
                assert set(tensors) == {"metrics"}
            if head["kind"] == "sum" and head["what"] == "mask":
                masked += 1
                for numbers in tensors.values():  # uniform bytes; those of float32 are not
                    assert chisquare(np.bincount(numbers.numpy(), minlength=256)).pvalue > 1e-6
    assert masked == 2 * len(FOUR)


def test_a_site_says_what_leaves_it(usual: Recording) -> None:
    (line,) = [line for line in usual.told["movie-0"] if line.startswith("leaves this site")]
    assert "of which the server sees the sums over three sites or more alone" in line


def test_the_plan_says_what_the_server_sees(usual: Recording) -> None:
    plan = json.loads((usual.found.folder / "plan.json").read_text())
    assert any("the mean of the adapters over 4 clients" in note for note in plan["notes"])


Handler = Callable[[str, str, Callable[[], Any]], Any]
"""(site, step of a sum or nothing, what asks the server) -> the answer that the site gets."""


@pytest.fixture
def federated(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Recording]:
    """A round of four sites, each of whose exchanges goes through a handler."""

    def run(handler: Handler, **words: Any) -> Recording:
        ask = Kept.exchange

        def exchange(self: Kept, head: Any, tensors: Any = NO_TENSORS) -> Any:
            assert self.worker is not None
            return handler(self.worker.name, str(head.get("what", "")), lambda: ask(self, head, tensors))

        monkeypatch.setattr(Kept, "exchange", exchange)
        made = config(name="round", **{**GIVEN, "rounds": 1, "eval_every": 1})
        found = record(made, tmp_path, FOUR, how={"least": 1, "deadline": 6}, **words)
        assert found.found.faults == []
        return found

    return run


def without(*places: tuple[str, str]) -> Handler:
    """Sites that are gone from a step on."""

    def handle(name: str, step: str, ask: Callable[[], Any]) -> Any:
        if (name, step) in places:
            raise ServerGoneError
        return ask()

    return handle


# sites that leave


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_a_site_that_leaves_at_any_step_is_made_good(federated: Callable[..., Recording], step: str) -> None:
    found = federated(without(("movie-3", step)))
    assert (found.found.error, found.found.refused) == (None, {})
    assert not found.found.noted("is lost")
    (trained,) = audited(found.found.folder, 1, "trained")
    assert not any(name.startswith("movie-3/") for name in trained)
    names = [name for name in trained if name.startswith("movie-0/")]
    pairs = [(name, name.replace("movie-0/", f"{other}/")) for name in names for other in FOUR[1:3]]
    assert pairs and all(torch.equal(trained[one], trained[other]) for one, other in pairs)


@pytest.mark.slow
def test_where_too_many_leave_the_sum_is_lost_and_the_round_goes_on(federated: Callable[..., Recording]) -> None:
    found = federated(without(("movie-2", "mask"), ("movie-3", "mask")))
    assert (found.found.error, found.found.refused) == (None, {})
    assert found.found.noted("the sum of the adapters is lost: too few clients have taken all of its steps")


# servers that lie


def lies(step: str, lie: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Handler:
    """A server that alters its answer to a step of the first site."""

    def handle(name: str, asked: str, ask: Callable[[], Any]) -> Any:
        answer = ask()
        return lie(dict(answer[0]), dict(answer[1])) if (name, asked) == ("movie-0", step) else answer

    return handle


def fewer(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
    return {**head, "groups": [{**group, "clients": group["clients"][:3]} for group in head["groups"]]}, tensors


def lacking(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
    return {**head, "groups": [{**group, "keys": group["keys"][1:]} for group in head["groups"]]}, tensors


def another_list(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
    return head, {name: one for name, one in tensors.items() if not name.endswith("movie-3")}


def own_certificate(folder: Path) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    make_certs(folder, servers=["x"], clients=["movie-3"])
    own = as_tensor((folder / "movie-3" / "cert.pem").read_bytes())
    return lambda head, tensors: (
        head,
        {name: own if name.endswith("movie-3/cert") else one for name, one in tensors.items()},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "lie", "line"),
    [
        ("begin", fewer, "is of 3 sites, and this one takes part in sums of 4 or more; nothing was sent"),
        ("begin", lacking, "have a tensor twice or lack one; nothing was sent"),
        ("keys", own_certificate, "a certificate of 'movie-3' is not of this authority"),
        ("mask", another_list, "has 1 signatures of the list of survivors that it gave this client, and 3 are needed"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_server_that_lies_ends_a_site_with_one_line(
    federated: Callable[..., Recording], tmp_path: Path, step: str, lie: Any, line: str
) -> None:
    told = lie(tmp_path / "own") if lie is own_certificate else lie
    found = federated(lies(step, told), secure=4)
    assert line in found.found.refused["movie-0"] and "\n" not in found.found.refused["movie-0"]
    sent = [head for (head, _), _ in found.spoken["movie-0"].turns]
    assert not any(head["kind"] == "result" and "steps" in head["metrics"] for head in sent)


def test_other_clients_in_a_later_round_are_refused(usual: Recording) -> None:
    sums = [worker.sums for worker in usual.spoken["movie-1"].workers if worker is not None][-1]
    assert sums is not None and sums._groups
    told = [{"clients": group.clients, "keys": group.keys, "what": group.what} for group in sums._groups]
    assert sums._agreed(({"groups": told}, {}), {})
    changed = dataclasses.replace(sums, least=3)
    with pytest.raises(ProtocolError, match="are of other clients than before, and their difference would show"):
        changed._agreed(fewer({"groups": told}, {}), {})


def test_a_round_that_is_done_again_has_the_same_survivors(usual: Recording) -> None:
    sums = [worker.sums for worker in usual.spoken["movie-1"].workers if worker is not None][-1]
    assert sums is not None
    sums._check_again(2, 0, FOUR)  # a server that was killed
    with pytest.raises(DataError, match="the sum of round 2 was of 4 sites and is of 3 now, and their difference"):
        sums._check_again(2, 0, FOUR[1:])


# settings


def test_a_site_that_wants_secure_sums_takes_part_in_nothing_else(usual: Recording, tmp_path: Path) -> None:
    def plain(config: Config) -> str:
        return to_toml(with_values(config, {"secure": "off"}))

    spoken = welcomed(usual.spoken["movie-0"], plain)
    certs = usual.folder / "certs" / "movie-0"
    ended = lie_to(spoken, lambda *_: None, tmp_path, "movie-0", certs=certs, secure=4)
    assert "this site takes part in secure sums alone (--secure), and the server's settings have none" in ended.error


def test_a_server_whose_clients_may_be_others_later_is_refused(config: Callable[..., Config], tmp_path: Path) -> None:
    found = record(config(name="late", **GIVEN), tmp_path, FOUR, how={"late": True})
    assert isinstance(found.found.error, ConfigError)
    assert "late ones may join; say --no-late" in str(found.found.error)
