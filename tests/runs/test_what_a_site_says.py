"""The lines of a site at its start, and the phases of a plan, name what happens under the settings and nothing else."""

import pytest

from atlas_fl.config import Config, validate, with_values
from atlas_fl.data.task import Rows
from atlas_fl.deployment.settings_policy import what_leaves
from atlas_fl.events import PhaseStarted
from atlas_fl.planning.planner import make_plan
from tests.data.test_heterogeneity import client


@pytest.mark.parametrize(
    ("values", "plan"),
    [
        ({"strategy": "fedper", "ranks": "8"}, "for the plan how many examples each split has"),
        ({"strategy": "fedper"}, "for the plan the importance of each block, how many examples each split has"),
        (
            {"strategy": "atlas", "ranks": "8", "sketch_dim": "64"},
            "for the plan two sketches of 64 numbers, how many examples each split has",
        ),
    ],
)
def test_a_site_says_what_leaves_for_the_plan_also_where_it_is_counts_alone(values: dict[str, str], plan: str) -> None:
    config = validate(with_values(Config(), values), at_sites=True)
    own = client("movie-0", [0, 1] * 20)
    assert isinstance(own.train, Rows)
    line, *_ = what_leaves(config, client=own, device="laptop_8gb", blocks=6)
    assert f"; {plan}, test too, their token lengths, labels' names and counts" in line
    assert line.endswith("; scores, losses, seconds")


@pytest.mark.parametrize(
    ("strategy", "fingerprint", "takes"),
    [("fedavg", "gradient", False), ("fedavg", "delta", True), ("atlas", "gradient", True)],
)
def test_a_plan_names_fingerprints_where_it_takes_some(
    tiny_model, strategy: str, fingerprint: str, takes: bool
) -> None:
    values = {"strategy": strategy, "fingerprint": fingerprint, "tasks": "movie", "model": str(tiny_model)}
    small = {"ranks": "4", "samples": "8", "fingerprint_steps": "2", "fingerprint_batches": "2", "clusters": "oracle"}
    phases: list[str] = []
    make_plan(
        validate(with_values(Config(), {**values, **small, "validation_samples": "6", "test_samples": "6"})),
        on_event=lambda event: phases.append(event.name) if isinstance(event, PhaseStarted) else None,
    )
    assert ("fingerprints" in phases) is takes
