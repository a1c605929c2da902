"""A host's side: the upper parts of its guests' jobs, and answers to what they ask through the server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from atlas_fl.clients import SERVER_SIDE
from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.clients.cut.half import Asked, Half
from atlas_fl.clients.cut.halves import answers_to
from atlas_fl.engines.hall.lodging import ABOUT, numbered
from atlas_fl.engines.messages.census import Census, read_census, stand_in
from atlas_fl.engines.messages.wire import read_job, read_payloads, update_message, write_payloads
from atlas_fl.engines.stream.frames import Head
from atlas_fl.errors import ProtocolError
from atlas_fl.io.results import from_json
from atlas_fl.tree import digest
from atlas_fl.types import Params


@dataclass(kw_only=True, eq=False)
class Guests:
    """The guests of one site; a guest's data is not here, only how many examples and tokens there are."""

    _halves: dict[str, Half] = field(default_factory=dict)
    _models: dict[str, Params] = field(default_factory=dict)
    """The upper part that each guest's last job began with, by guest."""

    def clear(self) -> None:
        """Forget everyone, as the server has."""
        self._halves.clear()
        self._models.clear()

    def answer(self, head: Mapping[str, Any], tensors: Params, site: Site) -> tuple[Head, Params]:
        """The answers to all items of a message; questions about cuts are one pass.

        Raises `ProtocolError` for what is no such message; an item that cannot be is refused in its answer.
        """
        items, live, guests = (_listed(head.get(name)) for name in ("items", "live", "guests"))
        if not all(isinstance(item, dict) for item in items):
            raise ProtocolError("the server's message to a host has an item that is none; install its version")
        self._halves = {key: half for key, half in self._halves.items() if key in live}
        self._models = {key: model for key, model in self._models.items() if key in guests}
        answers: dict[int, tuple[Head, Params]] = {}
        asked: dict[int, Asked] = {}
        for k, item in enumerate(items):
            key, own = str(item.get("half")), numbered(tensors, k)
            try:
                if item.get("kind") == "begin":
                    self._halves[key] = self._begun(item, own, site)
                elif item.get("kind") == "end":
                    answers[k] = self._ended(key, own)
                else:
                    asked[k] = self._asked(key, item, own)
            except ProtocolError as error:
                answers[k] = {"refused": str(error)}, {}
        for k, found in zip(asked, answers_to(list(asked.values()), site), strict=True):
            refused = isinstance(found, ProtocolError)
            answers[k] = ({"refused": str(found)}, {}) if refused else ({}, write_payloads(found))  # type: ignore[arg-type]
        told = [{**answers[k][0], "half": items[k].get("half")} for k in answers]
        sent = {f"{n}:{key}": tensor for n, k in enumerate(answers) for key, tensor in answers[k][1].items()}
        return {"kind": "hosted", "items": told}, sent

    def _begun(self, item: Mapping[str, Any], tensors: Params, site: Site) -> Half:
        """The half of a guest that begins its job, for the first time or again."""
        guest, about = str(item.get("client")), tensors.get(f"/{ABOUT}")
        above = {key: tensor for key, tensor in tensors.items() if key != f"/{ABOUT}"} or self._models.get(guest)
        if about is None or above is None or digest(above) != item.get("model"):
            raise ProtocolError("a guest came without its model or what is known of it; install the server's version")
        self._models[guest] = above
        below, census = _known(about)
        action, job, _ = read_job(item, {**dict.fromkeys(below, torch.empty(0)), **above}, client=guest)
        _, data = stand_in(guest, census)
        if job.cut is None or action not in SERVER_SIDE:
            raise ProtocolError(f"{action} of a guest without a cut; install the server's version of atlas-fl")
        return SERVER_SIDE[action](job, replace(site, data={**site.data, guest: data}))

    def _half(self, key: str) -> Half:
        if key not in self._halves:
            raise ProtocolError("a guest asks for what its host does not have; install the same atlas-fl on both ends")
        return self._halves[key]

    def _asked(self, key: str, item: Mapping[str, Any], tensors: Params) -> Asked:
        what, done = item.get("what"), item.get("done")
        if not isinstance(what, str) or type(done) is not int:
            raise ProtocolError("a question about a cut names no step or kind; install the same atlas-fl on both ends")
        return Asked(half=self._half(key), what=what, done=done, payloads=read_payloads(tensors))

    def _ended(self, key: str, tensors: Params) -> tuple[Head, Params]:
        half = self._half(key)
        own: Update = half.end(read_payloads(tensors))
        del self._halves[key]
        job: Job = replace(half.side.job, params=half.side.above)
        return update_message(own, job, number=0)


def _known(about: torch.Tensor) -> tuple[list[str], Census]:
    """(names of a guest's own tensors, what is known of its data); raises `ProtocolError` for anything else."""
    try:
        known = from_json(about.numpy().tobytes())
        return [str(name) for name in known["below"]], read_census(known["census"])
    except (KeyError, TypeError, ValueError):
        raise ProtocolError("what is said of a guest cannot be read; install the server's version") from None


def _listed(found: Any) -> Sequence[Any]:
    if not isinstance(found, list):
        raise ProtocolError("the server's message to a host has no list; install its version of atlas-fl")
    return found
