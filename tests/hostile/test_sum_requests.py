"""Servers that ask sites for sums out of which one site's model could be read, or for none: nothing is given out."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key

from atlas_fl.aggregation.secure_mean import SumGroup, SumSettings
from atlas_fl.client.job import Job
from atlas_fl.client.options import TrainOptions
from atlas_fl.deployment.privacy_record import pay_sums
from atlas_fl.errors import DataError, ProtocolError
from atlas_fl.params import HEAD, Params, shared_params
from atlas_fl.runtime.coordinator.secure_sums import SumSite
from atlas_fl.runtime.protocol.messages import read_packed, write_packed
from atlas_fl.secure_sums import CLAIM_BYTES, COMMIT_BYTES, STEPS, Identity, KeyBook, Messages, SumResult, run_sum

ADAPTERS, HEADS = ("q.lora_A", "q.lora_B"), ("head.weight",)
START = {"q.lora_A": torch.ones(2, 3), "q.lora_B": torch.zeros(3, 2), "head.weight": torch.ones(2, 3)}
NO_HEAD = {**START, "head.weight": torch.zeros(2, 3)}
"""With this head an adapter has no gradient: the sum of all updates is that of who has another one."""
SETTINGS = SumSettings(run="a run", bound=4.0, max_share=1.0)
SIX = tuple(f"s{k}" for k in range(6))


@dataclass(kw_only=True)
class Sites:
    """Sites of a run, each with its record of sums in a folder."""

    folder: Path
    names: tuple[str, ...] = SIX
    settings: SumSettings = SETTINGS
    least: Mapping[str, int] = field(default_factory=dict)
    """By site its --secure, 3 for others."""
    said: list[tuple[str, str]] = field(default_factory=list)
    """(step, site) of all answers."""

    def __post_init__(self) -> None:
        self.signers: dict[str, EllipticCurvePrivateKey] = {name: generate_private_key(SECP256R1()) for name in SIX}
        self.signers |= {name: generate_private_key(SECP256R1()) for name in self.names}
        self.restart()

    def restart(self) -> None:
        """All sites begin anew, with what is in their folders."""
        book = KeyBook(run=self.settings.run, verifier=lambda name, _: self.signers[name].public_key())
        self.by_name = {
            name: SumSite(
                identity=Identity(name=name, book=book, signer=self.signers[name], examples=10),
                settings=self.settings,
                least=self.least.get(name, 3),
                secret=name.encode().ljust(32),
                pay=partial(pay_sums, path=self.folder / f"{name}-sums"),
            )
            for name in self.names
        }

    def train(self, starts: Mapping[str, Params], *, round: int = 1) -> None:
        """Each site moves the adapters of its start by its place and one."""
        for place, (name, start) in enumerate(starts.items()):
            job = Job(client=name, params=start, round=round, options=TrainOptions(seed=0))
            moved = {key: one if key.startswith(HEAD) else one + 0.1 * (place + 1) for key, one in start.items()}
            sent = {f"param/{key}": one for key, one in shared_params(moved, self.settings.share).items()}
            self.by_name[name].withhold(job, moved, {}, sent)

    def group(self, keys: Sequence[str] = (*ADAPTERS, *HEADS), names: Sequence[str] = ()) -> SumGroup:
        return SumGroup(clients=tuple(names or self.names), keys=tuple(keys), what="the adapters")

    def answer(self, name: str, group: SumGroup, step: str, told: Messages, *, round: int = 1) -> dict[str, bytes]:
        asked = {"clients": list(group.clients), "keys": list(group.keys), "what": group.what}
        answer = self.by_name[name].answer({"group": asked, "step": step, "round": round}, write_packed(told))
        self.said.append((step, name))
        return read_packed(answer)

    def sum(self, group: SumGroup, gone: Mapping[str, str] | None = None, *, round: int = 1) -> SumResult:
        """The sum at an honest server where these sites leave before these steps."""

        def ask(step: str, told: Mapping[str, Messages]) -> dict[str, Messages]:
            left = {name for name, last in (gone or {}).items() if STEPS.index(last) <= STEPS.index(step)}
            answers: dict[str, Messages] = {}
            for name in told.keys() - left:
                with suppress(DataError):
                    answers[name] = self.answer(name, group, step, told[name], round=round)
            return answers

        size = sum(START[key].numel() for key in group.keys)
        terms = self.settings.terms(group, round=round)
        return run_sum(terms, self.by_name[group.clients[0]].identity.book, ask, size=size)

    def mask(self, group: SumGroup, alter: Callable[[str, Messages], Messages] = lambda _, keys: keys) -> None:
        """A server that goes on with everyone, whatever they began with, up to `mask`."""
        keys = {name: self.answer(name, group, "keys", {})[""] for name in group.clients}
        shares = {name: self.answer(name, group, "shares", alter(name, keys)) for name in group.clients}
        for name in group.clients:
            self.answer(name, group, "mask", {by: told[name] for by, told in shares.items() if by != name})

    def steps(self, step: str) -> list[str]:
        return [name for said, name in self.said if said == step]


def tasks(*sizes: int) -> dict[str, Params]:
    """Starts of the sites of tasks of these sizes, `a0` to `b0` and on: one adapter, a head for each task."""
    heads = {task: torch.full((2, 3), float(place + 1)) for place, task in enumerate("abc")}
    return {
        f"{task}{k}": {**START, "head.weight": heads[task]} for task, size in zip("abc", sizes) for k in range(size)
    }


# what is summed


@pytest.mark.parametrize(
    "keys",
    [(), ("q.lora_A",) * 2500, (*ADAPTERS, *ADAPTERS), (*ADAPTERS, "q.lora_A"), ("q.lora_A",), ("another.lora_A",)],
    ids=["none", "one many times", "all twice", "one twice", "a part", "another"],
)
def test_a_sum_that_is_not_of_the_adapters_or_the_head_once_is_refused(keys: tuple[str, ...], tmp_path: Path) -> None:
    """Of many copies of one tensor, each with noise of its own, the mean has none."""
    sites = Sites(folder=tmp_path, settings=replace(SETTINGS, deviation=0.5, clip=0.5))
    sites.train(dict.fromkeys(SIX, START))
    with pytest.raises(ProtocolError, match="is not of the model that this site has trained, or is its second"):
        sites.answer("s0", sites.group(keys), "keys", {})
    assert not (tmp_path / "s0-sums").exists()


def test_what_a_site_does_not_share_is_in_no_sum(tmp_path: Path) -> None:
    sites = Sites(folder=tmp_path, settings=replace(SETTINGS, share=("A", "B")))
    sites.train({name: {**START, "head.weight": torch.full((2, 3), float(k))} for k, name in enumerate(SIX)})
    for keys in (HEADS, (*ADAPTERS, *HEADS)):
        with pytest.raises(ProtocolError, match="is not of the model that this site has trained"):
            sites.answer("s0", sites.group(keys), "keys", {})
    # 0.1 (1 + 2 + 3 + 4 + 5 + 6) above starts of ones and of zeros, whatever head each keeps to itself
    assert sites.sum(sites.group(ADAPTERS)).total == pytest.approx(np.repeat([8.1, 2.1], 6), abs=1e-6)


# what sites began with


@pytest.mark.parametrize("keys", [ADAPTERS, HEADS, (*ADAPTERS, *HEADS)], ids=["adapters", "head", "both"])
@pytest.mark.parametrize("other", [NO_HEAD, {**START, "q.lora_A": torch.zeros(2, 3)}], ids=["head", "adapters"])
def test_sites_that_were_given_different_starts_make_no_sum(
    keys: tuple[str, ...], other: Params, tmp_path: Path
) -> None:
    sites = Sites(folder=tmp_path)
    sites.train({**dict.fromkeys(SIX, other), "s2": START})
    with pytest.raises(DataError, match="s2 began with another model than most, or too few for its --secure began"):
        sites.mask(sites.group(keys))
    assert sites.steps("mask") == []
    sites.restart()
    sites.train({**dict.fromkeys(SIX, other), "s2": START})
    made = sites.sum(sites.group(keys))  # an honest server leaves out who claims another start
    assert set(made.survivors) == {*SIX} - {"s2"}


def test_not_even_two_starts_of_many_sites_each_make_a_sum(tmp_path: Path) -> None:
    sites = Sites(folder=tmp_path)
    sites.train({name: NO_HEAD if name > "s2" else START for name in SIX})
    with pytest.raises(DataError, match="s3 began with another model than most"):
        sites.mask(sites.group())
    assert sites.steps("mask") == []


def test_a_server_that_alters_what_a_site_says_of_its_start_gets_no_sum(tmp_path: Path) -> None:
    sites = Sites(folder=tmp_path)
    sites.train({**dict.fromkeys(SIX, NO_HEAD), "s2": START})

    def alter(name: str, keys: Messages) -> Messages:
        """To each all others with the claim of its own start."""
        own = keys[name][COMMIT_BYTES:][:CLAIM_BYTES]
        return {by: said[:COMMIT_BYTES] + own + said[COMMIT_BYTES + CLAIM_BYTES :] for by, said in keys.items()}

    with pytest.raises(DataError, match=r"shares of s. in a secure sum are not for this client and these keys"):
        sites.mask(sites.group(), alter)
    assert "s2" not in sites.steps("mask")


def test_sites_of_several_tasks_sum_their_adapters_and_each_task_its_head(tmp_path: Path) -> None:
    starts = tasks(3, 4)
    sites = Sites(folder=tmp_path, names=tuple(starts))
    sites.train(starts)
    assert len(sites.sum(sites.group(ADAPTERS)).survivors) == 7
    assert len(sites.sum(sites.group(HEADS, ("a0", "a1", "a2"))).survivors) == 3
    assert len(sites.sum(sites.group(HEADS, ("b0", "b1", "b2", "b3"))).survivors) == 4


def test_a_site_has_as_many_of_its_own_head_in_a_sum_of_adapters_as_it_asks_for(tmp_path: Path) -> None:
    starts = tasks(3, 7)
    sites = Sites(folder=tmp_path, names=tuple(starts), least={"a0": 4})
    sites.train(starts)
    with pytest.raises(DataError, match="a0 began with another model than most, or too few for its --secure began"):
        sites.mask(sites.group(ADAPTERS))


def test_no_list_of_survivors_leaves_a_site_alone_with_its_head(tmp_path: Path) -> None:
    starts = tasks(3, 9)
    sites = Sites(folder=tmp_path, names=tuple(starts))
    sites.train(starts)
    group = sites.group(ADAPTERS)
    assert SETTINGS.terms(group).threshold == 9
    sites.mask(group)
    survivors = [name for name in starts if name not in ("a1", "a2")]
    for name in survivors:  # the others too: nine of them confirm without a0
        with pytest.raises(DataError, match="a0 began with another model than most, or too few"):
            sites.answer(name, group, "confirm", dict.fromkeys(survivors, b"survived"))
    sites.restart()
    sites.train(starts)
    made = sites.sum(group, {"a1": "mask"})  # an honest server leaves all of the task out
    assert {name[0] for name in made.survivors} == {"b"}


# how many are in a sum


@pytest.mark.parametrize(("sites", "least", "left"), [(5, {}, 4), (6, 5, 5), (5, 5, 0), (9, {"s0": 9}, 7)])
def test_as_many_sites_end_a_sum_as_each_in_it_asks_for(sites: int, least: Any, left: int, tmp_path: Path) -> None:
    """t of five is 4: with `--secure 5` it is no sum."""
    names = tuple(f"s{k}" for k in range(sites))
    made = Sites(folder=tmp_path, names=names, least=dict.fromkeys(names, least) if isinstance(least, int) else least)
    made.train(dict.fromkeys(names, START))
    ask = partial(made.sum, made.group(), {names[-1]: "mask"})
    if not left:
        with pytest.raises(ProtocolError, match="0 of 5 clients have answered mask with as many of one start as their"):
            ask()
        return
    assert len(ask().survivors) == left


# after a restart


def test_a_round_that_is_done_again_has_the_same_survivors_also_after_a_restart(tmp_path: Path) -> None:
    sites = Sites(folder=tmp_path)
    starts = dict.fromkeys(SIX, START)
    sites.train(starts)
    whole = sites.sum(sites.group()).total
    for restart in (lambda: None, sites.restart):
        restart()
        sites.train(starts)
        with pytest.raises(ProtocolError, match="0 of 6 clients have answered confirm"):
            sites.sum(sites.group(), {"s3": "mask"})
        sites.train(starts)
        assert sites.sum(sites.group()).total == pytest.approx(whole)  # a server that was killed
    sites.train(starts, round=2)
    assert len(sites.sum(sites.group(), {"s3": "mask"}, round=2).survivors) == 5
    sites.restart()
    sites.train(starts, round=2)
    with pytest.raises(DataError, match=r"another sum of the adapters in round 2 by .*s0-sums, and both together"):
        group = sites.group()
        sites.by_name["s0"]._pay(group, "in round 2 of a run, survivors", " ".join(SIX))


def test_later_sums_are_of_the_same_sites_also_after_a_restart(tmp_path: Path) -> None:
    sites = Sites(folder=tmp_path)
    sites.train(dict.fromkeys(SIX, START))
    sites.sum(sites.group())
    for restart in (lambda: None, sites.restart):
        restart()
        sites.train(dict.fromkeys(SIX, START), round=2)
        with pytest.raises(ProtocolError, match=r"has answered another sum of the adapters by .*s0-sums, and both"):
            sites.answer("s0", sites.group(names=SIX[:5]), "keys", {}, round=2)


# what is no request


@pytest.mark.parametrize(
    ("head", "line"),
    [
        ({"group": None}, "group is None; allowed"),
        ({"group": {"clients": list(SIX), "keys": [], "what": "x"}}, "is not of the model"),
        ({"group": {"clients": list(SIX), "keys": [7], "what": "x"}}, "keys"),
        ({"group": {"clients": [*SIX[:5], "s0"], "keys": [*ADAPTERS], "what": "x"}}, "of 6 clients; allowed: 3 to"),
        ({"group": {"clients": [f"s{k}" for k in range(1025)], "keys": [*ADAPTERS], "what": "x"}}, "of 1025 clients"),
        ({"group": {"clients": list(SIX[:2]), "keys": [*ADAPTERS], "what": "x"}}, "is of 2 sites, and this one"),
        ({"step": "nonsense"}, "asks for 'nonsense' of a sum that has not begun"),
        ({"step": None}, "step is None; allowed"),
        ({"round": "1"}, "round is '1'; allowed"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.split(";")[0],
)
def test_a_request_for_no_sum_ends_a_site_in_one_line(head: dict[str, Any], line: str, tmp_path: Path) -> None:
    sites = Sites(folder=tmp_path)
    sites.train(dict.fromkeys(SIX, START))
    usual = {"group": {"clients": list(SIX), "keys": [*ADAPTERS], "what": "x"}, "step": "keys", "round": 1}
    with pytest.raises(ProtocolError, match=line) as refused:
        sites.by_name["s0"].answer({**usual, **head}, write_packed({}))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("said", [b"", bytes(80), bytes(400)])
def test_keys_that_are_none_end_a_site_in_one_line(said: bytes, tmp_path: Path) -> None:
    sites = Sites(folder=tmp_path)
    sites.train(dict.fromkeys(SIX, START))
    sites.answer("s0", sites.group(), "keys", {})
    with pytest.raises(ProtocolError, match="that it has not signed for this run"):
        sites.answer("s0", sites.group(), "shares", dict.fromkeys(SIX, said))
