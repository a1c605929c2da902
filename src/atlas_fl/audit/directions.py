"""Second formula of pFedGraph (Ye et al., 2023): rows by the cosines between the changes since the run began."""

from collections.abc import Callable, Sequence

import numpy as np

from atlas_fl.audit.averages import Averaging, Mean
from atlas_fl.audit.dense import arrays, cosines, is_mixed
from atlas_fl.audit.run_files import Models, Run
from atlas_fl.audit.step import Step
from atlas_fl.params import HEAD


class Since(Averaging):
    """A rule that compares changes since the beginning, from models that its state keeps."""

    def initial(self, run: Run, models: Models) -> dict[str, np.ndarray]:
        """Shared tensors of the models that clients begin with."""
        shared = {
            f"initial/{client}/{key}": tensor
            for client, params in models.items()
            for key, tensor in params.items()
            if is_mixed(key, run.mixing.share)
        }
        return arrays(shared)


def first_models(step: Step, models: Models) -> Models:
    """The first models of these clients, as the state keeps them.

    What it lacks counts as zero: the row of the state itself has failed then.
    """

    def of_state() -> Models:
        return {
            client: {key: step.state.get(f"initial/{client}/{key}", tensor * 0) for key, tensor in params.items()}
            for client, params in models.items()
        }

    first: Models = step.once(("first", id(models)), of_state)
    return first


def shares_matrix(step: Step, key: str) -> Callable[[str], bool]:
    """Return for another parameter whether both are heads, or neither is and `--gram-by` gives them one matrix."""
    by_layer = step.run.settings.server.gram_by == "layer"

    def shares(other: str) -> bool:
        if other.startswith(HEAD) or key.startswith(HEAD):
            return other.startswith(HEAD) and key.startswith(HEAD)
        return not by_layer or step.plan.layer(other) == step.plan.layer(key)

    return shares


class ByDirections(Since):
    """The row of each client by a program on the simplex; who took no part keeps its model."""

    average = Mean(within="settings")

    def row(self, step: Step, k: int, key: str) -> list[float]:
        """argmin over the simplex of sum_l m_l d_kl + alpha || m - p ||^2, by bisection on what each entry loses."""
        members = self.average.members(step, k, key)
        if not step.present[k]:
            return step.own_row(k)
        if len(members) < 2:
            return self.average.row(step, k, key)
        known, server = self._cosines(step, members, key), step.run.settings.server
        pulls = known[members.index(k)] / (2.0 * server.gram_alpha)
        point = [share + float(pull) for share, pull in zip(step.shares(members), pulls, strict=True)]
        low, high = min(point) - 1.0, max(point)
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(max(one - middle, 0.0) for one in point) > 1.0 else (low, middle)
        kept = [max(one - high, 0.0) for one in point]
        return step.row({one: weight / sum(kept) for one, weight in zip(members, kept, strict=True)})

    def _cosines(self, step: Step, members: Sequence[int], key: str) -> np.ndarray:
        """The cosines between these clients, over the parameters that share a matrix with `key`."""
        shares = (lambda _: True) if step.run.settings.server.gram_by == "all" else shares_matrix(step, key)
        keys = tuple(step.compared(step.trained, members, shares))
        first = first_models(step, step.trained)
        return np.asarray(
            step.once(
                ("cosines", tuple(members), keys),
                lambda: cosines(step.products(members, keys, first, step.trained)),
            )
        )
