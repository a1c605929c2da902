"""Differential privacy that the examples of a site have spent, in a file beside its secret, over all runs.

A job is paid for before it is trained, so that a site that is killed has paid. The same question asked again costs
nothing: its answer is the same, bit for bit (`client.private_training`). Of secure sums another file remembers of which
clients they were, since two would show who is in one alone, and with noise what was answered, since the noise is that
of one answer. A run with `--dp client` is paid for as a whole.

An account judges all that was ever paid at the smallest delta that it has seen, so that no later run makes earlier ones
cheaper. Several processes of a site share it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atlas_fl.client.options import TrainOptions
from atlas_fl.client.privacy import delta_of, epsilon_of_all, epsilon_of_sums, noise_multiplier, rate_of
from atlas_fl.errors import ConfigError, DataError
from atlas_fl.storage.files import run_lock
from atlas_fl.storage.jsonl import read_sealed, write_sealed


@contextmanager
def _opened(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """The content of an account, which nobody else reads or writes meanwhile; it is written unless an error ends it."""
    with run_lock(path.parent, file=f".{path.name}.lock", waits=True):
        account = read_sealed(path, name) if path.exists() else {name: {}}
        yield account
        write_sealed(path, account, mode=0o600)


def pay_job(
    question: str, examples: int, options: TrainOptions, steps: int, *, path: Path, epsilon: float | None
) -> int:
    """Record the steps of this question; the steps that were paid at this rate and noise, with them.

    `epsilon` is the most of all runs together; None for that of the settings. Raises ConfigError where all that was
    ever paid is more. Then nothing is recorded.
    """
    rate, noise = rate_of(examples, options), noise_multiplier(examples, options)
    with _opened(path, "paid") as account:
        paid = account["paid"]
        if question not in paid:
            paid[question] = [rate, noise, steps]
            delta = account["delta"] = min(account.get("delta", 1.0), delta_of(examples, options.delta))
            steps_by_cost = Counter[tuple[float, float]]()
            for q, z, count in paid.values():
                steps_by_cost[q, z] += count
            spent = epsilon_of_all(tuple((*cost, count) for cost, count in steps_by_cost.items()), delta)
            most = options.epsilon if epsilon is None else epsilon
            if spent > most:
                raise ConfigError(
                    f"the training examples here would spend epsilon {spent:.4g} at delta {delta:.2g} with this"
                    f" round by {path}; allowed: {most:g}; bring new examples with a --secret of their own, or give a"
                    " larger --epsilon"
                )
    return sum(count for asked, (*cost, count) in paid.items() if cost == [rate, noise] and " " not in asked)


def pay_sums(sums: Mapping[str, str], *, path: Path) -> None:
    """Record the secure sums that are answered at these places: of the adapters and of the head each one a round.

    Raises DataError where something else was answered at one, in any run.
    """
    with _opened(path, "sums") as account:
        paid = account["sums"]
        if odd := [place for place, value in sums.items() if paid.get(place, value) != value]:
            what = odd[0].partition(" of ")[0]
            raise DataError(
                f"this site has answered another sum of {what} by {path}, and both together would show single"
                " sites; bring back who was in it, or begin a run with another --seed"
            )
        paid |= sums


def pay_run(path: Path, run: str, cost: Sequence[float], *, delta: float, most: float) -> None:
    """Record the sums of a run with `--dp client`, (noise multiplier, unit, sums), of which this site pays for all.

    Raises ConfigError where all runs that were ever recorded spend more than this epsilon. Then nothing is recorded.
    """
    with _opened(path, "runs") as account:
        runs = account["runs"]
        if run in runs:
            return
        runs[run] = [*cost]
        delta = account["delta"] = min(account.get("delta", 1.0), delta)
        if (spent := epsilon_of_sums([*runs.values()], delta)) > most:
            raise ConfigError(
                f"this site would spend epsilon {spent:.4g} at delta {delta:.2g} with this run by {path}; allowed:"
                f" {most:g}; leave the run out, or give a larger --epsilon"
            )
