"""Secure sums across machines: what a site says in the place of its update, and what the server asks it for.

A step of a sum (`secure_sums.STEPS`) is a job as any other: the server goes on with who has answered by the deadline.
The sites' certificates, which the authority has signed, say whose keys are whose. A site takes part in one sum of its
adapters and of its head a round, always of the same clients, and remembers so over restarts (`pay`): the difference of
two sums would show who is in one of them. All clients of a sum began with the same adapters, and N of `--secure N` with
the same head, or they get no sum (`secure_sums.claims_that_hold`). With `--dp client` a site clips its change and adds
its share of the noise, which follows from its secret and from all that it hides: the same sum that is asked for again
has the same noise.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atlas_fl.aggregation.secure_mean import SumGroup, SumSettings, clipped_change
from atlas_fl.client.job import Job
from atlas_fl.errors import DataError, ProtocolError, short_repr
from atlas_fl.frozen import Frozen
from atlas_fl.params import HEAD, REPORT, SHARE, Params, digest, select, shared_params
from atlas_fl.rng import derive_secret
from atlas_fl.runtime.protocol.messages import read, read_packed, write_packed
from atlas_fl.runtime.transport.frames import Head, Message
from atlas_fl.secure_sums import LEAST, Identity, Noise, SumClient

SUM = "sum"
"""The action of a step, and the kind of its messages."""


class SumStep(Frozen):
    """A step of the sum of a group, as the server asks a site for it."""

    step: str
    group: SumGroup


@dataclass(kw_only=True, eq=False)
class SumSite:
    """A site that sends masked vectors, and never its update."""

    identity: Identity
    settings: SumSettings
    least: int = LEAST
    """Fewest clients, which began with its model, that it is in a sum with, itself one of them."""
    is_own: bool = False
    """It goes on with a model of its own, which is summed (`--personal-models`)."""
    secret: bytes = b""
    """The site's own, from which its share of the noise is drawn."""
    pay: Callable[[Mapping[str, str]], None]
    """Records what is answered, by place in the run; raises DataError where something else was answered there."""
    _head: Any = field(default=None, init=False)
    _group: SumGroup = field(init=False)
    """The newest group, and as the server has written it: to read all its names costs more than most steps."""
    _round: int = 0
    _start: Params = field(default_factory=dict)
    """The shared part of the model that this round began with."""
    _own: str = ""
    """The digest of the model of its own that it went on with in this round, where it has one."""
    _share: str = ""
    """Words on its share in the mean beside that model, where it has one."""
    _most: float = 0.0
    """Its largest share in a mean of as few clients as a sum may have; 0 until it knows the examples of others."""
    _trained: Params = field(default_factory=dict)
    """The model of this round, of which the server gets sums; that which it began with where it adds noise."""
    _change: Params = field(default_factory=dict)
    """The clipped change of this round where it adds noise."""
    _sums: dict[tuple[str, ...], SumClient] = field(default_factory=dict)
    """The sums of this round by their tensors."""

    def withhold(self, job: Job, trained: Params, head: Head, tensors: Params) -> Message:
        """The answer to a job of training without the trained tensors.

        A model that a client goes on with by itself is summed too, and what all begin with is then its anchor, or its
        companion but for the client's own share. One that it keeps for itself, its second or that of a personal round,
        is not.
        """
        options, share, is_own = job.options, self.settings.share, self.is_own
        if (is_own or options.second_model == "none") and not options.is_personal(job.round):
            common = {**job.sent.get("anchor", {}), **job.sent.get("companion", {})} if is_own else dict(job.params)
            own_share = common.pop(SHARE, None)
            self._round, self._start = job.round, shared_params(common, share)
            self._own = digest({**job.params, **job.kept.get("gate", {})}) if is_own else ""
            is_others = options.second_model == "stacked"  # the site takes itself out of the mean by its share
            if is_others and own_share is not None and 0 < self._most < float(own_share) - 1e-6:
                raise ProtocolError(
                    f"the server gives this site a share of {float(own_share):.3g} in the mean; allowed:"
                    f" {self._most:.3g} by the examples of all; nothing was sent: ask who runs it"
                )
            self._share = "" if own_share is None else f" with share {float(own_share)}"
            self._trained = {**self._start, **shared_params(trained, share)}
            if self.settings.clip:
                self._change = clipped_change(self._start, self._trained, self.settings.clip)
                self._trained = self._start
            self._trained |= {key: one for key, one in tensors.items() if key.startswith(REPORT)}
            self._sums.clear()
        withheld = sorted(key for key in tensors if key.startswith(("param/", REPORT)))
        rest = {key: one for key, one in tensors.items() if key not in withheld}
        return {**head, "withheld": [key.removeprefix("param/") for key in withheld]}, rest

    def answer(self, head: Head, tensors: Params) -> Params:
        """The answer to a step; raises ProtocolError for a server that does not keep to the protocol, or DataError."""
        if head.get("group") != self._head or self._head is None:
            self._group = read(SumGroup, head.get("group"), "the server's sum: group")
            self._head = head["group"]
        group = self._group
        step = read(str, head.get("step"), "the server's sum: step")
        if step == "keys":
            self._check(group, round=read(int, head.get("round"), "the server's sum: round"))
            if self._own:  # two sums that one site alone began otherwise would show what that makes of its model
                run, place = self.settings.run, f"round {self._round}"
                self._pay(group, f"of {run}, own start in {place}", self._own + self._share)
                self._pay(group, f"of {run}, round of own start {self._own}", place)
            vector = self.settings.vector(group, self.identity.name, self._trained, self._change)
            terms = self.settings.terms(group, round=self._round)
            noise = self._noise(group, terms.digest()) if self.settings.clip else None
            self._sums[group.keys] = SumClient(
                identity=self.identity, terms=terms, vector=vector, noise=noise, claim=self._claim(group)
            )
        if group.keys not in self._sums:
            raise ProtocolError(f"the server asks for {short_repr(step)} of a sum that has not begun; ask who runs it")
        answer = write_packed(self._sums[group.keys].answer(step, read_packed(tensors)))
        if step == "mask":
            self._most = max(self._most, self._largest_share(self._sums[group.keys]))
        if step == "confirm":
            survivors = " ".join(self._sums[group.keys].survivors)
            self._pay(group, f"in round {self._round} of {self.settings.run}, survivors", survivors)
        return answer

    def _largest_share(self, client: SumClient) -> float:
        """q_k over its sum with the smallest of as many others as a sum is of at least."""
        weights = self.settings.weights(client.examples)
        own = weights.pop(self.identity.name)
        return own / (own + sum(sorted(weights.values())[: client.terms.threshold - 1]))

    def _claim(self, group: SumGroup) -> bytes:
        """The model that this site began with: who shares its head shares all, and adapters several tasks share."""
        has_head = any(key.startswith(HEAD) for key in group.keys)
        common = self._start if has_head else select(self._start, self._start.keys() & group.keys)
        return bytes.fromhex(digest(common) + digest(self._start)) + self.least.to_bytes(2, "big")

    def _noise(self, group: SumGroup, terms: bytes) -> Noise:
        """This site's share of the noise in this sum, which it pays for first."""
        changes = {f"change/{key}": one for key, one in self._change.items()}
        question = f"{terms.hex()} {digest({**self._trained, **changes})}"
        self._pay(group, f"in round {self._round} of {self.settings.run}", question)
        size = sum(self._trained[key].numel() for key in group.keys)
        return self.settings.noise(group, size, derive_secret(self.secret, "share of noise", question))

    def _pay(self, group: SumGroup, place: str, value: str) -> None:
        self.pay({f"the {'head' if key.startswith(HEAD) else 'adapters'} {place}": value for key in group.keys})

    def _check(self, group: SumGroup, *, round: int) -> None:
        """Raise DataError in a round without training here, ProtocolError for a sum that breaks the protocol."""
        if round != self._round:
            raise DataError(f"this site has trained nothing in round {round} since its start, and is in no sum of it")
        summed = {key for keys in self._sums for key in keys}
        heads = {key for key in self._trained if key.startswith(HEAD)}
        parts = [sorted(keys) for keys in (self._trained, heads, self._trained.keys() - heads) if keys]
        if sorted(group.keys) not in parts or summed & {*group.keys}:
            raise ProtocolError(
                "the server's sum is not of the model that this site has trained, or is its second; nothing was sent:"
                " ask who runs it"
            )
        if self.identity.name not in group.clients or len({*group.clients}) < self.least:
            raise ProtocolError(
                f"the server's sum of {short_repr(group.what)} is of {len(group.clients)} sites, and this one takes"
                f" part in sums of {self.least} or more, with it; nothing was sent: ask who runs it"
            )
        try:
            self._pay(group, f"of {self.settings.run}, clients", " ".join(group.clients))
        except DataError as error:
            raise ProtocolError(str(error)) from None
