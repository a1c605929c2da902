"""Secure sums across machines: the server's part in a round, and a site's in the place of its update.

A site that has trained asks the server for one step after the other (`secure_sums.STEPS`), in all groups at once. The
server answers a step when all who are still there have taken it, and goes on without who has left. Who comes later
takes no part in the round. The sites' certificates, which the authority has signed, say whose keys are whose.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from atlas_fl.aggregation.secure_mean import SumGroup, check_range, weights_by_examples
from atlas_fl.client.job import Job, Update
from atlas_fl.errors import DataError, ProtocolError, short_repr
from atlas_fl.params import Params
from atlas_fl.runtime.protocol.messages import read, read_payloads, write_payloads
from atlas_fl.runtime.transport.certificates import Certs, private_key_of, public_key_of
from atlas_fl.runtime.transport.frames import Head
from atlas_fl.runtime.transport.sessions import Exchange, Message
from atlas_fl.secure_sums import LEAST, STEPS, PublicKeys, SumClient, Terms, has_signed, open_sum

POLL_SECONDS = 0.02
BEFORE = {step: STEPS[place - 1] for place, step in enumerate(STEPS)}
"""The step before each; that before the first is none."""


@dataclass(frozen=True, kw_only=True)
class SumSettings:
    """Settings of all sums of a run."""

    run: str
    """Hash of the settings."""
    bound: float
    max_share: float

    def terms(self, group: SumGroup, round: int) -> Terms:
        """The terms of the sum of this group in one round."""
        return group.terms(about=f"{self.run}, round {round}", bound=self.bound)


Payloads = dict[str, bytes]


@dataclass(kw_only=True, eq=False)
class SumServer:
    """The sums of one round at the server. All methods run in one event loop but `apply`, which comes after it."""

    groups: Sequence[SumGroup]
    settings: SumSettings
    ca: bytes
    """Certificate of the authority of the sites."""
    round: int
    sizes: Sequence[int]
    """Numbers in a vector of each group."""
    seconds: float
    """For all: half of them until the last client has trained, a tenth for each step after it."""
    is_here: Callable[[str], bool]
    _said: dict[str, dict[str, Payloads]] = field(default_factory=lambda: {step: {} for step in STEPS})
    _closed: dict[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    """By step and group the clients that took it; none of a group that is lost."""

    async def answer(self, name: str, head: Mapping[str, Any], tensors: Params) -> Message:
        """The answer to a client's step, once all have taken it."""
        step = head.get("what")
        if step == "begin":
            told = [{"clients": group.clients, "keys": group.keys, "what": group.what} for group in self.groups]
            return {"kind": "sum", "groups": told}, {}
        if step not in STEPS:
            raise ProtocolError(f"{name} takes the step {short_repr(step)} of a sum; allowed: {', '.join(STEPS)}")
        if step not in self._closed:
            said = {peer: payload for peer, payload in read_payloads(tensors).items() if payload}
            self._said[step].setdefault(name, said)
            await self._close(step)
        return {"kind": "sum"}, write_payloads(self._payloads_for(name, step))

    async def _close(self, step: str) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.seconds * (0.5 if step == STEPS[0] else 0.1)
        while step not in self._closed:
            waited = [self._members(step, place) for place in range(len(self.groups))]
            missing = {name for names in waited for name in names if name not in self._said[step]}
            if clock() >= deadline or not any(map(self.is_here, missing)):
                self._closed[step] = tuple(self._taken(step, place, names) for place, names in enumerate(waited))
                return
            await asyncio.sleep(POLL_SECONDS)

    def _members(self, step: str, place: int) -> tuple[str, ...]:
        """The clients of a group that may take this step."""
        return self.groups[place].clients if step == STEPS[0] else self._closed[BEFORE[step]][place]

    def _taken(self, step: str, place: int, names: Sequence[str]) -> tuple[str, ...]:
        """Those of them who have said all that belongs to it; none where the sum is lost."""
        peers = {"shares": "keys", "reveal": "shares"}
        needed = self._closed[peers[step]][place] if step in peers else ("",)
        said = self._said[step]
        taken = tuple(
            name
            for name in names
            if name in said
            and all(f"{place}/{peer}" in said[name] for peer in needed)
            and self._is_right(step, place, name, said[name])
        )
        return taken if len(taken) >= max(LEAST, self._terms(place).threshold) else ()

    def _is_right(self, step: str, place: int, name: str, said: Mapping[str, bytes]) -> bool:
        """Return whether this is a vector of its size, or keys that are signed; what is not would end the others."""
        if step == "mask":
            return len(said[f"{place}/"]) == 4 * self.sizes[place]
        if step != "keys":
            return True
        try:
            verifier = public_key_of(said.get("cert", b""), name=name, ca=self.ca)
        except ProtocolError:
            return False
        return has_signed(self._terms(place), name, said[f"{place}/"], by=verifier)

    def _terms(self, place: int) -> Terms:
        return self.settings.terms(self.groups[place], self.round)

    def _payloads_for(self, name: str, step: str) -> Payloads:
        """The others' payloads of a step, in the groups of this client that are not lost."""
        payloads: Payloads = {}
        for place, names in enumerate(self._closed[step]):
            if name not in names or step == "reveal":
                continue
            for peer in names:
                said = self._said[step][peer]
                if step == "mask":  # who survived is all that others may know
                    payloads[f"{place}/{peer}"] = b"survived"
                else:
                    payloads[f"{place}/{peer}"] = said[f"{place}/{name if step == 'shares' else ''}"]
                if step == "keys":
                    payloads[f"{place}/{peer}/cert"] = said.get("cert", b"")
        return payloads

    def apply(self, updates: Sequence[Update], jobs: Sequence[Job]) -> tuple[list[Update], tuple[str, ...]]:
        """(the updates with the mean of each group, the sums that were lost); these tensors are as they were sent."""
        params = {update.client: dict(update.params) for update in updates}
        sent = {job.client: job.params for job in jobs}
        lost = []
        for place, group in enumerate(self.groups):
            here = [name for name in group.clients if name in params]
            try:
                mean = self._mean(place, sent[here[0]]) if here else {}
            except ProtocolError as error:
                lost.append(f"round {self.round}: the sum of {group.what} is lost: {error}")
                mean = {}
            for name in here:
                params[name] |= mean or {key: sent[name][key] for key in group.keys}
        return [replace(update, params=params[update.client]) for update in updates], tuple(lost)

    def _mean(self, place: int, like: Params) -> Params:
        group, said = self.groups[place], self._said
        revealers = self._closed["reveal"][place] if "reveal" in self._closed else ()
        if not revealers:
            raise ProtocolError("too few clients have taken all of its steps")
        survivors, sharers = self._closed["mask"][place], self._closed["shares"][place]
        masked = {name: np.frombuffer(said["mask"][name][f"{place}/"], "<u4") for name in survivors}
        keys = {name: said["keys"][name][f"{place}/"] for name in self._closed["keys"][place]}
        revealed = {name: {peer: said["reveal"][name][f"{place}/{peer}"] for peer in sharers} for name in revealers}
        total = open_sum(self._terms(place), keys=keys, sharers=sharers, masked=masked, revealed=revealed)
        return weighted_by(group, keys, max_share=self.settings.max_share).read_mean(total, survivors, like)


def weighted_by(group: SumGroup, keys: Mapping[str, bytes], *, max_share: float) -> SumGroup:
    """The group with the weights of the examples that clients have signed beside their keys."""
    examples = {name: PublicKeys.read(message).examples for name, message in keys.items()}
    return weights_by_examples(group, examples, max_share=max_share)


@dataclass(frozen=True, kw_only=True)
class ToldGroup:
    """A group as the server tells a site of it."""

    clients: tuple[str, ...]
    keys: tuple[str, ...]
    what: str


@dataclass(kw_only=True, eq=False)
class SumSite:
    """A site that sends masked vectors, and never its update."""

    certs: Certs
    settings: SumSettings
    examples: int
    share: Sequence[str]
    least: int = LEAST
    """Fewest clients of a sum that it takes part in."""
    _groups: tuple[ToldGroup, ...] = ()
    """Those of its first round, which stay."""
    _survivors: dict[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    """By round and group the list of survivors that it has confirmed."""

    def replace_update(
        self, ask: Callable[[str, Payloads], Message], job: Job, head: Head, tensors: Params
    ) -> tuple[Head, Params]:
        """The answer to a job of training without the trained tensors, which have gone into the sums.

        Raises ProtocolError for a server that does not keep to the protocol, DataError for values out of range.
        """
        trained = {key.removeprefix("param/"): one for key, one in tensors.items() if key.startswith("param/")}
        try:
            check_range(trained, self.share, bound=self.settings.bound)
        except ProtocolError as error:
            raise DataError(str(error)) from None
        params = {**job.params, **trained}
        groups = self._agreed(ask("begin", {}), trained)
        clients = {
            place: SumClient(
                name=self.certs.name,
                terms=self.settings.terms(group, job.round),
                signer=private_key_of(self.certs),
                verifiers={},
                examples=self.examples,
            )
            for place, group in groups.items()
        }
        said = ask("keys", {"cert": self.certs.cert, **{f"{p}/": one.keys() for p, one in clients.items()}})
        keys = _by_group(said, clients)
        for place, client in clients.items():
            certs = {peer.removesuffix("/cert"): pem for peer, pem in keys[place].items() if peer.endswith("/cert")}
            client.verifiers = {peer: public_key_of(pem, name=peer, ca=self.certs.ca) for peer, pem in certs.items()}
            keys[place] = {peer: one for peer, one in keys[place].items() if peer in certs}
        going = [place for place in clients if keys[place]]  # of the others the sum is lost
        shares = {place: clients[place].shares(keys[place]) for place in going}
        told = _by_group(ask("shares", _flat(shares)), going)
        vectors: dict[int, dict[str, bytes]] = {}
        for place in [place for place in going if told[place]]:
            weighted = weighted_by(groups[place], keys[place], max_share=self.settings.max_share)
            vector = clients[place].mask(told[place], weighted.vector(self.certs.name, params))
            vectors[place] = {"": vector.astype("<u4").tobytes()}
        told = _by_group(ask("mask", _flat(vectors)), vectors)
        for place, names in told.items():
            self._check_again(job.round, place, names)
        signed = {place: {"": clients[place].confirm(list(names))} for place, names in told.items() if names}
        told = _by_group(ask("confirm", _flat(signed)), signed)
        ask("reveal", _flat({place: clients[place].reveal(names) for place, names in told.items() if names}))
        rest = {key: one for key, one in tensors.items() if not key.startswith("param/")}
        return {**head, "same": "private" not in head}, rest

    def _check_again(self, round: int, place: int, names: Collection[str]) -> None:
        """Raise DataError where a round that is done again has other survivors: the difference would show who left."""
        survivors = tuple(sorted(names))
        if survivors and self._survivors.setdefault((round, place), survivors) != survivors:
            raise DataError(
                f"the sum of round {round} was of {len(self._survivors[round, place])} sites and is of"
                f" {len(survivors)} now, and their difference would show single ones; bring back who was in it"
            )

    def _agreed(self, answer: Message, trained: Params) -> dict[int, SumGroup]:
        """The groups of this site by their place; every tensor that it shares is in one of them."""
        told: tuple[ToldGroup, ...] = read(tuple[ToldGroup, ...], answer[0].get("groups"), "the server's sums: groups")
        own = {place: group for place, group in enumerate(told) if self.certs.name in group.clients}
        keys = [key for group in own.values() for key in group.keys]
        if len({*keys}) < len(keys) or not trained.keys() <= {*keys}:
            raise ProtocolError("the server's sums have a tensor twice or lack one; nothing was sent: ask who runs it")
        if few := [group for group in own.values() if len({*group.clients}) < self.least]:
            raise ProtocolError(
                f"the server's sum of {short_repr(few[0].what)} is of {len(few[0].clients)} sites, and this one takes"
                f" part in sums of {self.least} or more; nothing was sent: ask who runs it"
            )
        if self._groups and self._groups != told:
            raise ProtocolError(
                "the server's sums are of other clients than before, and their difference would show single ones;"
                " nothing was sent: ask who runs it"
            )
        self._groups = told
        return {place: SumGroup(**asdict(group), weights=()) for place, group in own.items()}


def asker(link: Exchange, number: int, cancelled: Callable[[Message], Exception]) -> Callable[[str, Payloads], Message]:
    """(step, payloads) -> the server's answer; raises what `cancelled` makes of another message than one about sums."""

    def ask(what: str, payloads: Payloads) -> Message:
        message = link.exchange({"kind": "sum", "number": number, "what": what}, write_payloads(payloads))
        if message[0].get("kind") != "sum":
            raise cancelled(message)
        return message

    return ask


def _flat(payloads: Mapping[int, Mapping[str, bytes]]) -> Payloads:
    return {f"{place}/{peer}": one for place, by_peer in payloads.items() for peer, one in by_peer.items()}


def _by_group(message: Message, places: Any) -> dict[int, dict[str, bytes]]:
    """The payloads of a message by group and peer; empty for a group that is lost."""
    found: dict[int, dict[str, bytes]] = {place: {} for place in places}
    for name, payload in read_payloads(message[1]).items():
        place, _, peer = name.partition("/")
        if place.isdecimal() and int(place) in found:
            found[int(place)][peer] = payload
    return found
