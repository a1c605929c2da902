"""Filters of updates: what a client does to the change of its model before that leaves (`--update-filter`).

    w_sent = w_start + filter_n(... filter_1(w_trained - w_start))

Filters act in the order in which they are named, at the client, in every round whose updates leave it; a client that
goes on with its own model goes on with what it sent. Their draws are the client's own (`client.draws`).
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

from atlas_fl.errors import ConfigError, short_repr, unknown_name
from atlas_fl.params import Params
from atlas_fl.sparse.compression import step_exponent

UpdateFilter: TypeAlias = Callable[[Params, torch.Generator], Params]
"""(change by name, float32 on the CPU, a generator of the CPU) -> the change that leaves, of these names and shapes."""
UpdateFilterOf: TypeAlias = Callable[[float | None], UpdateFilter]
"""(the number behind the filter's name, None without one) -> the filter; raises ConfigError for a wrong number."""


def clip(number: float | None) -> UpdateFilter:
    """Scale the whole change down to an L2 norm of at most this number."""
    most = _number("clip", number, least=0.0)

    def scale(change: Params, _: torch.Generator) -> Params:
        norm = float(torch.linalg.vector_norm(torch.stack([tensor.norm() for tensor in change.values()])))
        return {name: tensor * (most / norm) for name, tensor in change.items()} if norm > most else change

    return scale


def noise(number: float | None) -> UpdateFilter:
    """Add Gaussian noise of this standard deviation to every value."""
    deviation = _number("noise", number, least=0.0)

    def add(change: Params, draws: torch.Generator) -> Params:
        return {
            name: tensor + deviation * torch.randn(tensor.shape, generator=draws) for name, tensor in change.items()
        }

    return add


def quantise(number: float | None) -> UpdateFilter:
    """Round every value at random, without bias, to one of 2^(bits - 1) - 1 steps of its tensor on each side of 0.

    It is QSGD with a scale from the largest value (Alistarh et al. 2017, arXiv:1610.02132). A step is a power of two,
    so that the message needs one byte a value with up to 8 bits, and two with up to 16 (`sparse.compression`).
    """
    bits = _number("quantise", number, least=1.0, most=32.0)

    def round_values(change: Params, draws: torch.Generator) -> Params:
        rounded = {}
        for name, tensor in change.items():
            size = 2.0 ** step_exponent(float(tensor.abs().max()), steps=2.0 ** (bits - 1) - 1)
            rounded[name] = torch.floor(tensor / size + torch.rand(tensor.shape, generator=draws)) * size
        return rounded

    return round_values


def topk(number: float | None) -> UpdateFilter:
    """Keep this share of the whole change, its largest values, and set the others to 0.

    Stich et al. 2018 (arXiv:1809.07599) with `--error-feedback`, which is their memory. The message has a bit for each
    value, and those that are kept.
    """
    share = _number("topk", number, least=0.0, most=1.0)

    def keep(change: Params, _: torch.Generator) -> Params:
        sizes = torch.cat([tensor.abs().flatten() for tensor in change.values()])
        is_kept = torch.zeros_like(sizes, dtype=torch.bool)
        is_kept[sizes.topk(max(1, round(share * len(sizes)))).indices] = True
        parts = torch.split(is_kept, [tensor.numel() for tensor in change.values()])
        return {name: tensor * part.view_as(tensor) for part, (name, tensor) in zip(parts, change.items(), strict=True)}

    return keep


UPDATE_FILTERS: dict[str, UpdateFilterOf] = {"clip": clip, "noise": noise, "quantise": quantise, "topk": topk}
"""Every filter by name."""


def make_filter(word: str) -> UpdateFilter:
    """The filter of a word of `--update-filter`: its name, or `name=number`.

    Raises:
        ConfigError: no filter has this name, or it does not take this number.
    """
    name, sign, text = word.partition("=")
    if name not in UPDATE_FILTERS:
        raise unknown_name("filter in --update-filter", name, UPDATE_FILTERS)
    try:
        number = float(text) if sign else None
    except ValueError:
        number = math.nan
    if number is not None and not math.isfinite(number):
        raise ConfigError(f"--update-filter is {short_repr(word)}; allowed: name, or name=number; give a number")
    return UPDATE_FILTERS[name](number)


def apply_filter(word: str, change: Params, draws: torch.Generator) -> Params:
    """Change after the filter of this word.

    Raises:
        ConfigError: it gives back other tensors.
    """
    filtered = make_filter(word)(change, draws)
    if {name: one.shape for name, one in filtered.items()} != {name: one.shape for name, one in change.items()}:
        raise ConfigError(f"--update-filter {word} gives back other names or shapes than it was given; mend its code")
    return filtered


def _number(name: str, number: float | None, *, least: float, most: float = math.inf) -> float:
    if number is None or not least < number <= most:
        raise ConfigError(
            f"--update-filter is {name if number is None else f'{name}={number:g}'}; allowed: {name}=NUMBER above"
            f" {least:g}{'' if most == math.inf else f', {most:g} at most'}; give one"
        )
    return number
