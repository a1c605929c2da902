"""Hostile (Byzantine) clients of a simulation: label flip, sign flip, scaling, noise, replacement.

An attacker trains like any other client and alters the update that it sends.

    label_flip         training labels reversed, c -> C - 1 - c; the update is honest work on them
    sign_flip          w - c (w' - w)
    scale              w + c (w' - w)
    noise              w' + c |w' - w| z, z standard normal, |.| the root mean square of each tensor
    model_replacement  w + g (x - w), x a random model of the size of w', g = all examples over its own: under an
                       average by examples everyone gets x. Bagdasaryan et al., "How To Backdoor Federated Learning",
                       2020

Changes of adapters are those of s B A, cut to the client's rank (`aggregation.norm_bound.scaled_change`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch

from atlas_fl.aggregation.norm_bound import BODY, HEADS, scaled_change
from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.client.job import Job, Update
from atlas_fl.data.clients import ClientData
from atlas_fl.errors import ConfigError
from atlas_fl.frozen import Frozen
from atlas_fl.params import Params
from atlas_fl.rng import generator, torch_generator
from atlas_fl.runtime.engine import Engine


class AttackContext(Frozen):
    """The parameters of one attack on one update."""

    size: float
    """Strength of the attack."""
    space: StrategyOptions
    """The space in which the aggregation rule mixes."""
    random: torch.Generator
    """Random stream of this client and round."""


Alter: TypeAlias = Callable[[Params, Params, AttackContext], Params]
"""(params received, params trained, context) -> params sent."""


class Attack(Frozen):
    """One kind of attack."""

    alter: Alter
    size: float | None
    """Default strength; None: all examples over the client's own."""
    flips_labels: bool = False
    """It trains on reversed labels."""


def _scale_change(before: Params, after: Params, context: AttackContext, *, sign: int = 1) -> Params:
    """The update with its change scaled; unchanged where it is not finite, which the server refuses."""
    if any(not bool(tensor.isfinite().all()) for tensor in (*before.values(), *after.values())):
        return after
    factor = sign * context.size
    return scaled_change(before, after, context.space, factors={BODY: factor, HEADS: factor})


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


def _normal(params: Params, context: AttackContext) -> dict[str, torch.Tensor]:
    """Standard normal tensors of the shapes of the floating-point ones."""
    return {
        key: torch.randn(params[key].shape, generator=context.random).to(params[key])
        for key in sorted(params)  # the draws follow the order
        if params[key].is_floating_point()
    }


def _add_noise(before: Params, after: Params, context: AttackContext) -> Params:
    noise = _normal(after, context)
    return {**after, **{key: after[key] + context.size * _rms(after[key] - before[key]) * noise[key] for key in noise}}


def _replace_model(before: Params, after: Params, context: AttackContext) -> Params:
    model = {key: noise * _rms(after[key]) for key, noise in _normal(after, context).items()}
    return _scale_change(before, {**after, **model}, context)


ATTACKS: dict[str, Attack] = {
    "label_flip": Attack(alter=lambda _before, after, _context: after, size=1.0, flips_labels=True),
    "sign_flip": Attack(alter=partial(_scale_change, sign=-1), size=1.0),
    "scale": Attack(alter=_scale_change, size=30.0),
    "model_replacement": Attack(alter=_replace_model, size=None),
    "noise": Attack(alter=_add_noise, size=10.0),
}


def choose_attackers(words: Sequence[str], names: Sequence[str], *, seed: int) -> tuple[str, ...]:
    """The attackers in the order of the clients: the named ones, or a number of them, sampled with the seed.

    Raises ConfigError for an unknown client, and where no honest client is left.
    """
    if len(words) == 1 and words[0].isdecimal():
        drawn = generator(seed, "attackers").choice(len(names), size=min(int(words[0]), len(names)), replace=False)
        chosen = {names[index] for index in drawn}
    else:
        chosen = set(words)
    if unknown := sorted(chosen - set(names)):
        raise ConfigError(
            f"--attackers names {unknown[0]!r}, and the clients are {', '.join(names)}; name some of these"
        )
    if not chosen or len(chosen) == len(names):
        raise ConfigError(
            f"--attackers is {' '.join(words) or 'empty'}: of {len(names)} clients at least one attacks and one is"
            " honest; name clients, or give a number"
        )
    return tuple(name for name in names if name in chosen)


def with_flipped_labels(clients: Sequence[ClientData], attackers: Sequence[str]) -> tuple[ClientData, ...]:
    """The clients, the attackers' training labels reversed; raises ConfigError for a task without classes."""
    flipped = []
    for client in clients:
        if client.name in attackers:
            task = client.task
            if not task.has_classes:
                raise ConfigError(
                    f"--attack label_flip reverses classes, and task {task.name!r} has none; take another"
                )
            client = replace(client, train=replace(client.train, label=task.num_labels - 1 - client.train.label))
        flipped.append(client)
    return tuple(flipped)


class HostileEngine(Frozen):
    """An engine in which some clients alter their updates."""

    engine: Engine
    attack: Attack
    attackers: tuple[str, ...]
    size: float | None
    """Strength of the attack; None: the default of its kind."""
    space: StrategyOptions
    seed: int
    examples: Mapping[str, int]
    """Training examples of each client."""

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order; attackers alter theirs after training."""
        updates = self.engine.run(action, jobs)
        if action != "train":
            return updates
        job_by_client = {job.client: job for job in jobs if job.client in self.attackers}
        return [
            self._alter_update(job_by_client[update.client], update) if update.client in job_by_client else update
            for update in updates
        ]

    def _alter_update(self, job: Job, update: Update) -> Update:
        size = self.attack.size if self.size is None else self.size
        if size is None:
            size = sum(self.examples.values()) / self.examples[job.client]
        random = torch_generator(self.seed, "attack", job.client, job.round)
        params = self.attack.alter(job.params, update.params, AttackContext(size=size, space=self.space, random=random))
        # what does not train in a round is not sent, and the server has it
        untrained = {key: update.params[key] for key in params if not job.options.trains(key, round=job.round)}
        return replace(update, params={**params, **untrained})
