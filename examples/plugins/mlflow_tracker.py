"""MLflow as a tracker: runs of an experiment on the server, or in the database, of `MLFLOW_TRACKING_URI`.

pip install '.[mlflow]'
atlas run --plugin examples/plugins/mlflow_tracker.py --tracker mlflow=EXPERIMENT
"""

import re
import time
from collections.abc import Mapping
from typing import Any

from atlas_fl.errors import ConfigError
from atlas_fl.plugins import register
from atlas_fl.report.trackers import TrackedRun, Tracker, importing, summary_numbers

RUN, HASH = "mlflow.runName", "atlas_fl.hash"
"""The tags by which a run that goes on is found again."""
NOT_IN_NAMES = re.compile(r"[^\w\-. :/]", re.ASCII)
"""Characters that MLflow refuses in the name of a metric."""
MOST_METRICS, MOST_PARAMS = 1000, 100
"""Limits of one call to MLflow."""
LONGEST = 6000
"""Characters of a setting's value that MLflow keeps."""


@register("tracker", "mlflow")
class MlflowTracker(Tracker):
    """Logs to an experiment of MLflow, through its client and without its current run, of which a process has one."""

    title = "MLflow"

    def __init__(self, experiment: str) -> None:
        self.experiment = experiment
        self._client: Any = None
        self._run_id = ""
        self._round = 0

    def check(self) -> None:
        """Raise ConfigError unless mlflow is installed and the experiment has a name."""
        if not self.experiment.strip():
            raise ConfigError("--tracker mlflow= names no experiment; give one, as in --tracker mlflow=federations")
        _mlflow()

    def begin(self, run: TrackedRun) -> None:
        """Begin a run, or go on with the newest of this name and these settings."""
        mlflow = _mlflow()
        self._client = client = mlflow.MlflowClient()
        found = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if found is None else found.experiment_id
        tags = {RUN: run.name, HASH: run.settings["hash"]}
        if run.first_round > 1:
            wanted = f"tags.`{HASH}` = '{tags[HASH]}'"
            for before in client.search_runs([experiment], wanted):
                if before.data.tags.get(RUN) == run.name:
                    self._run_id = before.info.run_id
                    client.update_run(self._run_id, status="RUNNING")
                    return
        self._run_id = client.create_run(experiment, tags=tags).info.run_id
        params = [mlflow.entities.Param(name, str(value)[:LONGEST]) for name, value in run.settings.items()]
        for at in range(0, len(params), MOST_PARAMS):
            client.log_batch(self._run_id, params=params[at : at + MOST_PARAMS])

    def log(self, numbers: Mapping[str, float], *, round: int) -> None:
        """Log a metric for each, at the step of the round; what no name may have becomes `_`."""
        self._round = round
        now, entities = int(time.time() * 1000), _mlflow().entities
        metrics = [
            entities.Metric(NOT_IN_NAMES.sub("_", name), float(value), now, round) for name, value in numbers.items()
        ]
        for at in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[at : at + MOST_METRICS])

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Log what it says of all clients, at the step of the last round."""
        self.log(summary_numbers(summary), round=self._round)

    def finish(self, *, is_failed: bool) -> None:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self._run_id, "FAILED" if is_failed else "FINISHED")


def _mlflow() -> Any:
    with importing("MLflow", package="mlflow"):
        import mlflow

        _ = mlflow.MlflowClient, mlflow.entities
    return mlflow
