"""A cluster's adapters above its clients' cuts, where all of these train one set of them (`--server-adapters`).

    G = sum_k b_k g_k / sum_k b_k        over the clients k that step at this moment, in the order of their names

with g_k a client's gradient, clipped as ever by the norm over its whole model, and b_k the examples that its loss is a
mean over: G is the gradient of the mean loss over the concatenated activations, but for the clipping. One optimizer
moves the set by G. Lin et al. 2024, "SplitLoRA" (arXiv 2407.00952).

A tensor is shared by the clients whose cut is below its block. The heads are each client's own. The set goes on as long
as one of its clients does, and its schedule is that of the client with the most steps.
"""

from collections.abc import Mapping, Sequence

import torch

from atlas_fl.clients.member import Member, adamw, move


class SharedSet:
    """Adapters that the same clients of one cluster share, while they train."""

    def __init__(self, owners: Sequence[Member], keys: Sequence[str]) -> None:
        self.owners, self.keys = sorted(owners, key=lambda member: member.job.client), tuple(keys)
        first = self.owners[0]
        assert all(torch.equal(one.params[key], first.params[key]) for one in self.owners for key in keys), (
            "clients that share a set begin with the same one"
        )
        self._leaves = {
            key: first.params[key].detach().clone().requires_grad_() for key in keys if first.params[key].requires_grad
        }
        self._steps = max(member.steps for member in self.owners)
        self._optimizer = adamw(list(self._leaves.values()), first.options)

    def step(self, done: int, moving: Mapping[Member, int]) -> None:
        """Move the set by those of its owners who step now, with the examples of their step, and give it to all.

        A gradient that is not finite is left out where another one is: what a client broke is not broken for all.
        """
        present = [one for one in self.owners if one in moving]
        sound = [one for one in present if self._is_finite(one)] or present
        if not sound or not self._leaves:
            return
        total = sum(moving[one] for one in sound)
        for key, leaf in self._leaves.items():
            leaf.grad = torch.zeros_like(leaf) if len(sound) > 1 else None
            for one in sound:
                own = one.params[key].grad
                assert own is not None, "what is above a cut has a gradient in every step"
                leaf.grad = own.clone() if leaf.grad is None else leaf.grad.add_(own, alpha=moving[one] / total)
        first = self.owners[0]
        move(self._optimizer, first.options, round=first.job.round, done=done, steps=self._steps)
        with torch.no_grad():
            for key, leaf in self._leaves.items():
                for one in self.owners:
                    one.params[key].copy_(leaf)

    def _is_finite(self, member: Member) -> bool:
        gradients = [member.params[key].grad for key in self._leaves]
        return all(own is not None and bool(torch.isfinite(own).all()) for own in gradients)


def shared_sets(members: Sequence[Member]) -> list[SharedSet]:
    """The sets that these clients share, by cluster and by who is cut below a tensor's block."""
    owners: dict[tuple[int, str], list[Member]] = {}
    for member in members:
        for key in member.shared:
            assert member.cluster is not None, "only a client with a cut and a cluster shares"
            owners.setdefault((member.cluster, key), []).append(member)
    found: dict[tuple[int, ...], tuple[list[Member], list[str]]] = {}
    for (_, key), own in owners.items():
        found.setdefault(tuple(map(id, own)), (own, []))[1].append(key)
    return [SharedSet(own, keys) for own, keys in found.values()]


def step_all(moving: Mapping[Member, int], done: int, sets: Sequence[SharedSet]) -> None:
    """One optimizer step of these clients, each with the examples of its step, and of the sets that they share."""
    clipped = {member: count for member, count in moving.items() if member.clip()}
    for shared in sets:
        shared.step(done, clipped)
    for member in clipped:
        member.move(done)
