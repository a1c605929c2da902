"""Secure sums across sites: the server has sums alone, sites that leave are made good, servers that lie end a site."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from atlas_fl.aggregation.secure_mean import SumGroup
from atlas_fl.config import Config, to_toml, with_values
from atlas_fl.config.settings import replace_settings
from atlas_fl.deployment.settings_policy import key_book
from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.experiment.export import load_models
from atlas_fl.experiment.run import run_config
from atlas_fl.params import SHARE
from atlas_fl.runtime.coordinator.secure_sums import SumSite
from atlas_fl.runtime.protocol.messages import read_packed, write_packed
from atlas_fl.runtime.transport.certificates import make_certs, open_certs, private_key_of
from atlas_fl.runtime.transport.sessions import NO_TENSORS
from atlas_fl.secure_sums import CLAIM_BYTES, COMMIT_BYTES, STEPS, Identity
from atlas_fl.storage.jsonl import read_json
from atlas_fl.storage.run_folder import find_run
from tests.hostile.federation import ServerGoneError
from tests.hostile.servers import Kept, Recording, lie_to, record, welcomed
from tests.runs.reading import audited, passing_audit, rows, same_tensors, state

FOUR = tuple(f"movie-{k}" for k in range(4))
GIVEN = {"strategy": "fedit", "ranks": "4", "secure": True, "clients_per_task": 4, "rounds": 2, "max_share": 0.5}


@pytest.fixture(scope="module")
def usual(shared_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Recording:
    made = shared_config(tasks="movie", pack_tokens=1, name="secure", **GIVEN)
    found = record(made, tmp_path_factory.mktemp("secure"), FOUR, secure=4)
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    return found


@pytest.mark.core
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
    (trained,) = audited(usual.found.folder, 1, "summed")
    by_site = [{key: one for key, one in trained.items() if key.startswith(f"{name}/")} for name in FOUR]
    assert len({tuple(float(one.sum()) for one in params.values()) for params in by_site}) == 1  # sums alone


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("fedper", marks=pytest.mark.core),
        pytest.param("fedrep", marks=pytest.mark.slow),
        pytest.param("fedsa", marks=(pytest.mark.slow, pytest.mark.product)),
    ],
)
def test_what_is_not_shared_stays_at_its_site_and_the_rest_is_summed(
    strategy: str, shared_config: Callable[..., Config], tmp_path: Path
) -> None:
    given = {**GIVEN, "strategy": strategy, "space": "factors", "tasks": "movie", "pack_tokens": 1}
    made = shared_config(name=f"secure-{strategy}", **given)
    found = record(made, tmp_path, FOUR, secure=4, allow=("partial-training",))
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    plain = run_config(shared_config(name=f"plain-{strategy}", secrets=str(tmp_path), **{**given, "secure": False}))
    whole, summed = state(plain.folder), state(found.found.folder)
    travelled = [name for name, one in summed.items() if one.is_floating_point() and one.numel()]
    assert any("lora_A" in name for name in travelled)
    off = torch.cat([(whole[name] - summed[name]).flatten() for name in travelled])
    # AdamW divides by gradients that are nearly 0, so values are farther off than the sums, by a part of the rate
    assert off.abs().quantile(0.9) <= made.training.lr / 20
    kept = {name: one for name, one in whole.items() if one.is_floating_point() and not summed[name].numel()}
    assert kept
    for name, one in kept.items():  # what a site kept to itself is that of the simulation
        _, client, key = name.split("/")
        assert (one - found.whole[client][key]).abs().quantile(0.9) <= made.training.lr / 20, name
    passing_audit(found.found.folder)


@pytest.mark.parametrize(
    ("strategy", "own"),
    [
        pytest.param("ditto", "by client/second", marks=pytest.mark.core),
        pytest.param("apfl", "by client/second", marks=pytest.mark.core),
        pytest.param("feddpa", "by client/second", marks=(pytest.mark.slow, pytest.mark.product)),
        pytest.param("mr_mtl", "start", marks=pytest.mark.slow),
        pytest.param("fedalt", "start", marks=pytest.mark.slow),
        pytest.param("fedalt_fixed", "start", marks=pytest.mark.core),
        pytest.param("shrinkage", "start", marks=pytest.mark.core),
        pytest.param("fedavg_ft", "start", marks=(pytest.mark.slow, pytest.mark.product)),
        pytest.param("fedbabu", "start", marks=(pytest.mark.slow, pytest.mark.product)),
    ],
)
def test_models_of_ones_own_stay_at_their_sites_and_the_shared_one_is_summed(
    strategy: str, own: str, shared_config: Callable[..., Config], tmp_path: Path
) -> None:
    """The site writes the model that a simulation predicts with; of its own one the server has the digest alone."""
    given = {**GIVEN, "strategy": strategy, "space": "factors", "tasks": "movie", "pack_tokens": 1, "rounds": 3}
    if strategy == "shrinkage":  # where clients have other classes, each keeps a part of its own
        given |= {"partition": "dirichlet", "dirichlet_alpha": 0.1, "lr": 0.02}
    made = shared_config(name=f"secure-{strategy}", audit=True, **given)
    allow = {"allow": ("partial-training",)} if strategy == "fedbabu" else {}
    found = record(made, tmp_path, FOUR, secure=4, **allow)
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    plain = run_config(shared_config(name=f"plain-{strategy}", secrets=str(tmp_path), **{**given, "secure": False}))
    whole, summed = state(plain.folder), state(found.found.folder)
    values = [name for name, one in summed.items() if one.is_floating_point() and one.numel()]
    assert any("lora_A" in name for name in values) and not any(name.startswith(own) for name in values)
    shared = {name: name.replace(name.split("/")[1], "movie-0") for name in values}  # equal models are stored once
    off = [(whole[name if name in whole else shared[name]] - summed[name]).flatten() for name in values]
    predicting = load_models(find_run(plain.folder))
    assert predicting.keys() == found.whole.keys() and len(found.whole) == 4
    for client, params in predicting.items():
        assert params.keys() == found.whole[client].keys()
        off += [(one - found.whole[client][key]).flatten() for key, one in params.items()]
    # AdamW divides by gradients that are nearly 0, so values are farther off than the sums, by a part of the rate
    assert torch.cat(off).abs().quantile(0.9) <= made.training.lr / 20
    key = (
        "head.classifier.weight" if strategy != "shrinkage" else next(key for key in predicting[FOUR[0]] if "_B" in key)
    )
    models = [found.whole[name][key] for name in FOUR]
    assert min(float((one - models[0]).abs().max()) for one in models[1:]) > 1e-4  # secrets decide how far
    passing_audit(found.found.folder)


@pytest.mark.slow
def test_sites_of_two_tasks_sum_adapters_over_both_and_heads_apart(
    shared_config: Callable[..., Config], tmp_path: Path
) -> None:
    six = tuple(f"{task}-{k}" for task in ("movie", "trec") for k in range(3))
    given = {**GIVEN, "strategy": "fedavg", "space": "factors", "clients_per_task": 3, "alone": "none"}
    found = record(shared_config(tasks=("movie", "trec"), name="tasks", **given), tmp_path, six, secure=3)
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    passing_audit(found.found.folder)
    said = [row["reason"].partition(",")[0] for row in rows(found.found.folder) if row.get("event") == "summed"]
    whole = [
        "the adapters of 6 of 6 clients",
        "the head of movie of 3 of 3 clients",
        "the head of trec of 3 of 3 clients",
    ]
    assert sorted(said) == sorted(2 * whole)


@pytest.mark.slow
def test_sites_with_budgets_of_their_own_end_where_a_simulation_of_private_training_does(
    shared_config: Callable[..., Config], tmp_path: Path
) -> None:
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    given = {**GIVEN, "tasks": "movie", "pack_tokens": 1, "dp": "example", "epsilon": 2.0, "alone": "none"}
    found = record(shared_config(name="sums", **given), tmp_path, FOUR, secure=4, dp="example", epsilon=2.0)
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    passing_audit(found.found.folder, "epsilon")
    # of the same settings, since noise follows from them
    simulated = run_config(shared_config(name="private", secrets=str(tmp_path), **given))
    assert same_tensors(state(simulated.folder), state(found.found.folder))
    assert {len(read_json(tmp_path / f"{name}-privacy")["paid"]) for name in FOUR} == {2}
    (line, *_) = [line for line in found.told["movie-0"] if "a hostile server may still learn" in line]
    assert "with noise of epsilon 2 for each example" in line and "seen in sums over sites alone" in line


def test_nothing_that_leaves_a_site_holds_its_model(usual: Recording) -> None:
    masked = 0
    for spoken in usual.spoken.values():
        for (head, tensors), _ in spoken.turns:
            if head["kind"] == "result" and "steps" in head.get("metrics", ()):
                assert set(tensors) == {"metrics"}
        steps = [answer[0].get("step") for _, answer in spoken.turns]
        for step, ((_, tensors), _) in zip(steps, spoken.turns[1:], strict=False):
            if step == "mask":
                masked += 1
                ((_, numbers),) = read_packed(tensors).items()  # uniform bytes; those of float32 are not
                assert chisquare(np.bincount(np.frombuffer(numbers, np.uint8), minlength=256)).pvalue > 1e-6
    assert masked == 2 * len(FOUR)  # adapters and the head, which the same sites share, in one sum


def test_a_site_says_what_leaves_it(usual: Recording) -> None:
    (line,) = [line for line in usual.told["movie-0"] if line.startswith("leaves this site")]
    assert "of which the server sees the sums over three sites or more alone" in line


def test_the_plan_says_what_the_server_sees(usual: Recording) -> None:
    plan = json.loads((usual.found.folder / "plan.json").read_text())
    assert any("the mean of the adapters and the head of movie over 4 clients" in note for note in plan["notes"])


Handler = Callable[[str, str, Callable[[], Any]], Any]
"""(site, step of a sum that it answers or nothing, what asks the server) -> the answer that the site gets."""


@pytest.fixture
def federated(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Recording]:
    """A round of four sites, each of whose exchanges goes through a handler."""

    def run(handler: Handler, given: Mapping[str, Any] = GIVEN, **words: Any) -> Recording:
        ask, steps = Kept.exchange, dict[str, str]()

        def exchange(self: Kept, head: Any, tensors: Any = NO_TENSORS) -> Any:
            assert self.worker is not None
            answer = handler(self.worker.name, steps.get(self.worker.name, ""), lambda: ask(self, head, tensors))
            steps[self.worker.name] = str(answer[0].get("step", ""))
            return answer

        monkeypatch.setattr(Kept, "exchange", exchange)
        made = config(name="round", **{**given, "rounds": 1, "eval_every": 1})
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
    (trained,) = audited(found.found.folder, 1, "summed")
    assert found.found.noted("no sum of movie-3 in round 1")
    names = [name for name in trained if name.startswith("movie-0/")]
    pairs = [(name, name.replace("movie-0/", f"{other}/")) for name in names for other in FOUR[1:]]
    assert pairs and all(torch.equal(trained[one], trained[other]) for one, other in pairs)


@pytest.mark.slow
def test_where_too_many_leave_the_sum_is_lost_and_the_round_goes_on(federated: Callable[..., Recording]) -> None:
    found = federated(without(("movie-2", "mask"), ("movie-3", "mask")))
    assert (found.found.error, found.found.refused) == (None, {})
    assert found.found.noted(
        "the sum of the adapters and the head of movie is lost: 2 of 4 clients have answered mask, and 3 are needed"
    )


@pytest.mark.slow
def test_who_leaves_before_its_masked_vector_has_no_share_in_the_mean(federated: Callable[..., Recording]) -> None:
    """It has trained, and goes on with its own model beside the mean of all others."""
    found = federated(without(("movie-3", "mask")), {**GIVEN, "strategy": "fedalt", "audit": True})
    assert (found.found.error, found.found.refused) == (None, {})
    (shares,) = audited(found.found.folder, 1, "server")
    told = {name: float(shares[f"{SHARE}/{name}/{SHARE}"]) for name in FOUR}
    assert told.pop("movie-3") == 0.0 and min(told.values()) > 0.2
    assert sum(told.values()) == pytest.approx(1)
    passing_audit(found.found.folder, "server")


@pytest.mark.slow
def test_a_lost_sum_leaves_no_shares(federated: Callable[..., Recording]) -> None:
    leaves = without(("movie-2", "mask"), ("movie-3", "mask"))
    found = federated(leaves, {**GIVEN, "strategy": "fedalt_fixed", "audit": True})
    assert found.found.noted("the sum of the adapters is lost")
    assert not any(SHARE in name for name in state(found.found.folder))
    passing_audit(found.found.folder)


# servers that lie


def lies(step: str, lie: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Handler:
    """A server that alters what it asks the first site for in a step."""

    def handle(name: str, _: str, ask: Callable[[], Any]) -> Any:
        answer = ask()
        is_told = (name, answer[0].get("step")) == ("movie-0", step)
        return lie(dict(answer[0]), dict(answer[1])) if is_told else answer

    return handle


def fewer(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
    return {**head, "group": {**head["group"], "clients": head["group"]["clients"][:3]}}, tensors


def another_round(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
    return {**head, "round": 2}, tensors


def other_tensors(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
    return {**head, "group": {**head["group"], "keys": ["another.lora_A"]}}, tensors


def no_begin(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
    return {**head, "step": "shares"}, tensors


def other_lists(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
    return head, write_packed({name: bytes(one ^ 1 for one in said) for name, said in read_packed(tensors).items()})


def own_certificate(folder: Path) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    make_certs(folder, servers=["x"], clients=["movie-3"])
    certs = open_certs(folder / "movie-3")

    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
        book = key_book(replace_settings(GIVEN, base=Config()), ca=certs.ca)
        identity = Identity(name="movie-3", book=book, signer=private_key_of(certs), certificate=certs.cert)
        said = bytes(COMMIT_BYTES + CLAIM_BYTES) + identity.public
        return head, write_packed({**read_packed(tensors), "movie-3": said})

    return lie


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "lie", "line"),
    [
        ("keys", fewer, "is of 3 sites, and this one takes part in sums of 4 or more, with it; nothing was sent"),
        ("keys", other_tensors, "is not of the model that this site has trained, or is its second; nothing was sent"),
        ("keys", no_begin, "asks for 'shares' of a sum that has not begun"),
        ("shares", own_certificate, "a certificate of 'movie-3' is not of this authority"),
        ("reveal", other_lists, "has 1 confirmations of the list of survivors that it gave this client, and 3 are"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_server_that_lies_ends_a_site_with_one_line(
    federated: Callable[..., Recording], tmp_path: Path, step: str, lie: Any, line: str
) -> None:
    told = lie(tmp_path / "own") if lie is own_certificate else lie
    found = federated(lies(step, told), secure=4)
    assert line in found.found.refused["movie-0"] and "\n" not in found.found.refused["movie-0"]
    said = [tensors for (_, tensors), _ in found.spoken["movie-0"].turns]
    assert not any("lora" in name for tensors in said for name in tensors)
    steps = [answer[0].get("step") for _, answer in found.spoken["movie-0"].turns]
    assert (steps.count("mask") > 0) is (step == "reveal")


@pytest.mark.slow
def test_a_site_is_in_no_sum_of_a_round_in_which_it_has_not_trained_and_goes_on(
    federated: Callable[..., Recording],
) -> None:
    """As one that was started again while the others trained."""
    found = federated(lies("keys", another_round), secure=4)
    assert (found.found.error, found.found.refused) == (None, {})
    assert found.found.noted("this site has trained nothing in round 2 since its start, and is in no sum of it")
    assert "failed" in [head["kind"] for (head, _), _ in found.spoken["movie-0"].turns]


def site_of(usual: Recording) -> SumSite:
    return [worker.sums for worker in usual.spoken["movie-1"].workers if worker is not None and worker.sums][-1]


def test_other_clients_in_a_later_round_and_a_second_sum_in_one_are_refused(usual: Recording) -> None:
    site = site_of(usual)
    keys = next(iter(site._sums))
    group = SumGroup(clients=FOUR, keys=keys, what="the adapters")
    with pytest.raises(ProtocolError, match="or is its second; nothing was sent"):
        site._check(dataclasses.replace(group, what="others"), round=2)
    again = dataclasses.replace(site, _sums={}, least=3)
    again._check(group, round=2)
    with pytest.raises(ProtocolError, match=r"another sum of the adapters by .*movie-1-sums, and both together would"):
        again._check(dataclasses.replace(group, clients=FOUR[:3]), round=2)


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
