"""What sites with whole models answer is looked at as well: sums for heads, scores for masks, models, classes."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.hostile.federation import Outcome, federate
from tests.hostile.test_answers import Kind, at, extra, full, metric, renamed, saying, tensors_as, without
from tests.runs.test_deployed_images import MASKED, settings

pytestmark = pytest.mark.slow


def counts_moved(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """Examples by class that others were registered with."""
    rows = {name: [*own[1:], own[0]] for name, own in head["classes"].items()} if head["classes"] else None
    return {**head, "classes": rows}, tensors


KINDS: Mapping[str, tuple[str, Kind]] = {
    "no sums": ("ridge", Kind(without("gram"), "it lacks 'gram'")),
    "sums of another size": (
        "ridge",
        Kind(tensors_as(lambda t: t[:3, :3]), "is (3, 3) torch.float64; allowed: (33, 33)"),
    ),
    "NaN sums": ("ridge", Kind(tensors_as(full(math.nan)), "holds values from nan")),
    "negative sums": ("ridge", Kind(tensors_as(torch.neg), "gram is no sum of products of 24 examples")),
    "examples of sums": ("ridge", Kind(saying(examples=10**9), "it answers on 1000000000 examples; allowed: the 24")),
    "negative losses": ("scale", Kind(tensors_as(full(-1.0)), "holds values from -1")),
    "two losses": ("scale", Kind(tensors_as(lambda t: t[:2]), "is (2,) torch.float64; allowed: (8,)")),
    "infinite scores": ("sensitivity", Kind(tensors_as(full(math.inf)), "holds values from inf")),
    "scores of 3e38": ("sensitivity", Kind(tensors_as(full(3e38)), "allowed: 0 to 1e+30")),
    "scores of other weights": ("sensitivity", Kind(extra("param/x", torch.ones(2)), "it has unknown 'x'")),
    "no loss": ("train", Kind(renamed, "it lacks the metrics loss")),
    "values of another number": ("train", Kind(tensors_as(lambda t: t[:5]), "")),
    "values that are no bytes": ("train", Kind(tensors_as(lambda t: t.float()), "no row of bytes")),
    "an accuracy of 3": ("evaluate", Kind(metric("accuracy", 3.0), "accuracy is 3; allowed: 0 to 1")),
    "other classes": ("evaluate", Kind(counts_moved, "")),
}
HONEST = ("digits-0", "digits-1")
SITES = dict(zip((f"digits-{2 + k}" for k in range(len(KINDS))), KINDS))
"""The kind that each hostile site sends."""


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run in which two sites are honest, and each of the others sends one kind."""
    many = {"clients_per_task": len(HONEST) + len(SITES), "calibration_clients": len(HONEST) + len(SITES)}
    values = {**MASKED, **many, "calibration_rounds": 1, "rounds": 1, "participation": 1.0}
    changes = {site: at(KINDS[name][0], KINDS[name][1].change) for site, name in SITES.items()}
    folder = tmp_path_factory.mktemp("attacked")
    return federate(settings(folder, **values), changes, names=(*HONEST, *SITES), least=2)


@pytest.mark.parametrize("site", SITES, ids=SITES.values())
def test_a_run_of_whole_models_goes_on_without_who_answers_nonsense(attacked: Outcome, site: str) -> None:
    told = [note for note in attacked.notes if f" of {site} " in note]
    assert told and KINDS[SITES[site]][1].note in told[0], attacked.notes


def test_honest_sites_of_that_run_are_not_blamed_and_get_their_models(attacked: Outcome) -> None:
    assert attacked.error is None
    assert attacked.faults == [], attacked.faults[0]
    for site in HONEST:
        assert not attacked.noted(f" of {site} ")
        assert all(bool(tensor.isfinite().all()) for tensor in attacked.models[site].values())
