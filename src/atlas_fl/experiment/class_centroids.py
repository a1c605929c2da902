"""Which class means each client is sent before a round, for FedPAC's feature alignment (`client.feature_alignment`).

They are those of the last aggregation, by the models that its round began with; in round one nobody is sent any. In
personal rounds nobody is pulled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from atlas_fl.aggregation.fedpac import class_centroids
from atlas_fl.client.job import Job, without_empty
from atlas_fl.config import Config
from atlas_fl.experiment.state import FederationState


def with_centroids(jobs: Sequence[Job], config: Config, state: FederationState, tasks: Mapping[str, str]) -> list[Job]:
    """The jobs of the round after this state with the class means of their tasks; as they are where there are none.

    `tasks` are those of all clients of the run, by name.
    """
    is_personal = state.round >= config.training.rounds - config.mixing.personal_rounds
    if not config.training.feature_alignment or is_personal:
        return list(jobs)
    centroids = class_centroids(state.server_state, tasks)
    return [
        replace(job, sent=without_empty({**job.sent, "centroids": centroids.get(tasks[job.client], {})}))
        for job in jobs
    ]
