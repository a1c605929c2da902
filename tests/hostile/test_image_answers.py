"""What sites with whole models answer is looked at as well: sums for heads, scores for masks, models, classes."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from atlas_fl.params import digest
from tests.hostile.federation import federate
from tests.hostile.test_answers import Kind, at, extra, full, metric, renamed, saying, tensors_as, without
from tests.runs.test_deployed_images import MASKED, settings

pytestmark = pytest.mark.slow

SITES = ("digits-0", "digits-1", "digits-2")


def counts_moved(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """Examples by class that others were registered with."""
    rows = {name: [*own[1:], own[0]] for name, own in head["classes"].items()} if head["classes"] else None
    return {**head, "classes": rows}, tensors


def every(tensor: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return tensors_as(tensor)


KINDS: Mapping[str, tuple[str, Kind]] = {
    "no sums": ("ridge", Kind(without("gram"), "it lacks 'gram'")),
    "sums of another size": ("ridge", Kind(every(lambda t: t[:3, :3]), "is (3, 3) torch.float64; allowed: (33, 33)")),
    "NaN sums": ("ridge", Kind(every(full(math.nan)), "holds values from nan")),
    "sums of 1e300": ("ridge", Kind(every(full(1e300)), "holds values from 1e+300")),
    "negative sums": ("ridge", Kind(every(lambda t: -t), "gram is no sum of products of 24 examples")),
    "sums of nothing": ("ridge", Kind(every(torch.zeros_like), "gram is no sum of products of 24 examples")),
    "examples of sums": ("ridge", Kind(saying(examples=10**9), "it answers on 1000000000 examples; allowed: the 24")),
    "negative losses": ("scale", Kind(every(full(-1.0)), "holds values from -1")),
    "two losses": ("scale", Kind(every(lambda t: t[:2]), "is (2,) torch.float64; allowed: (8,)")),
    "infinite scores": ("sensitivity", Kind(every(full(math.inf)), "holds values from inf")),
    "negative scores": ("sensitivity", Kind(every(full(-1.0)), "holds values from -1")),
    "scores of 3e38": ("sensitivity", Kind(every(full(3e38)), "allowed: 0 to 1e+30")),
    "scores of other weights": ("sensitivity", Kind(extra("param/x", torch.ones(2)), "it has unknown 'x'")),
    "no loss": ("train", Kind(renamed, "it lacks the metrics loss")),
    "values of another number": ("train", Kind(every(lambda t: t[:5]), "")),
    "values that are no bytes": ("train", Kind(every(lambda t: t.float()), "no row of bytes")),
    "no values": ("train", Kind(without("param/"), "")),
    "an accuracy of 3": ("evaluate", Kind(metric("accuracy", 3.0), "accuracy is 3; allowed: 0 to 1")),
    "other classes": ("evaluate", Kind(counts_moved, "")),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_run_of_whole_models_goes_on_without_who_answers_nonsense(tmp_path: Path, name: str) -> None:
    action, kind = KINDS[name]
    config = settings(
        tmp_path, rounds=1, participation=1.0, calibration_clients=3, **{**MASKED, "calibration_rounds": 1}
    )
    found = federate(config, {"digits-2": at(action, kind.change)}, names=SITES, least=2)
    assert found.error is None
    assert found.faults == [], found.faults[0]
    told = [note for note in found.notes if " of digits-2 " in note]
    assert told and kind.note in told[0], found.notes
    assert not [note for note in found.notes if " of digits-0 " in note or " of digits-1 " in note]
    for site in SITES[:2]:
        assert all(bool(tensor.isfinite().all()) for tensor in found.models[site].values())
        assert digest(found.models[site]), site
