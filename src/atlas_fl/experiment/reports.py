"""What a rule asks clients for beside their updates, and when.

Class features (`client.class_features`) are asked for in every round of an aggregation. Halves (`client.split_halves`)
are asked for once: of each client in the first round from `--measure-round` on in which it takes part. Until then it is
given averages, so that its halves begin with what everyone has in common.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from atlas_fl.aggregation.kriging import HALVES
from atlas_fl.client.job import Job
from atlas_fl.client.options import Report
from atlas_fl.config import Config
from atlas_fl.experiment.state import FederationState
from atlas_fl.setup.options import strategy_of


def report_of_round(config: Config, round: int) -> Report:
    """What the rule asks clients for in this round, which ends in an aggregation: halves of those without alone."""
    known: dict[str, Report] = {report: report for report in get_args(Report)}
    report = known[strategy_of(config).report]
    return "none" if report == "halves" and round < config.server.measure_round else report


def with_reports(jobs: Sequence[Job], config: Config, state: FederationState) -> list[Job]:
    """The training jobs of the round after this state, with what each client is to report; it ends in an aggregation.

    Nobody reports in rounds before `--measure-round` what is asked for once.
    """
    report, known = report_of_round(config, state.round + 1), state.server_state.get(HALVES, {})
    if report == "none":
        return list(jobs)
    asked = {job.client for job in jobs if report != "halves" or job.client not in known}
    return [replace(job, options=replace(job.options, report=report)) if job.client in asked else job for job in jobs]
