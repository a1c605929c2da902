"""What a rule asks clients for beside their updates, and when.

Class features (`client.class_features`) are asked for in every round of an aggregation. Halves (`client.split_halves`)
are asked for once: of each client in the first round from `--measure-round` on in which it takes part. Until then it is
given averages, or predictions of clusters, so that its halves begin with what everyone has in common.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import get_args

from atlas_fl.aggregation.kriging import HALVES, MeasuredSharing, measured_sharing
from atlas_fl.aggregation.matrices import Federation
from atlas_fl.aggregation.strategies import RoundModels
from atlas_fl.client.job import Job
from atlas_fl.client.options import Report
from atlas_fl.config import Config
from atlas_fl.config.methods import first_measured_round
from atlas_fl.experiment.state import FederationState
from atlas_fl.params import ServerState
from atlas_fl.setup.options import strategy_of, strategy_options


def report_of_round(config: Config, round: int) -> Report:
    """What the rule asks clients for in this round, which ends in an aggregation: halves of those without alone."""
    known: dict[str, Report] = {report: report for report in get_args(Report)}
    report = known[strategy_of(config).report]
    return "none" if report == "halves" and round < first_measured_round(config) else report


def with_reports(jobs: Sequence[Job], config: Config, state: FederationState) -> list[Job]:
    """The training jobs of the round after this state, with what each client is to report; it ends in an aggregation.

    Nobody reports in rounds before `--measure-round` what is asked for once.
    """
    report, known = report_of_round(config, state.round + 1), state.server_state.get(HALVES, {})
    if report == "none":
        return list(jobs)
    asked = {job.client for job in jobs if report != "halves" or job.client not in known}
    return [replace(job, options=replace(job.options, report=report)) if job.client in asked else job for job in jobs]


def sharing_of_round(
    config: Config,
    federation: Federation,
    state: FederationState,
    server_state: ServerState,
    present: Collection[str],
) -> tuple[MeasuredSharing, ...]:
    """How much each client keeps of its own after the round that follows this state; nothing where nobody was measured.

    Args:
        server_state: as it is after the round.
        present: clients whose updates are mixed.
    """
    known, now = (one.get(HALVES, {}) for one in (state.server_state, server_state))
    if len(now) == len(known):
        return ()
    models = RoundModels(before=state.server_models, after=state.server_models, server_state=server_state)
    there = [client in present for client in federation.clients]
    matrices = strategy_of(config).matrices(federation, there, round=state.round + 1, models=models)
    return measured_sharing(server_state, federation, matrices, strategy_options(config))
