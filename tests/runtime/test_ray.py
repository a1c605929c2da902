"""The resources of actors on a cluster, and the line where there is no Ray; the cluster itself is in tests/runs."""

import sys

import pytest

from atlas_fl.errors import ConfigError
from atlas_fl.runtime.ray import ActorResources, actor_resources_of, ray_cluster


@pytest.mark.parametrize(
    ("nodes", "count", "cuda", "expected"),
    [
        ([{"CPU": 4.0}], None, False, ActorResources(count=4, cpus=1)),
        ([{"CPU": 4.0}], 1, False, ActorResources(count=1, cpus=4)),
        ([{"CPU": 8.0}], 3, False, ActorResources(count=3, cpus=2)),
        # three of two each do not lie across the nodes: 4 // 3 is 1
        ([{"CPU": 4.0}, {"CPU": 4.0}], 3, False, ActorResources(count=3, cpus=2)),
        ([{"CPU": 2.0}, {"CPU": 16.0}, {}], 2, False, ActorResources(count=2, cpus=8)),
        ([{"CPU": 16.0, "GPU": 2.0}], None, True, ActorResources(count=2, cpus=8, gpus=1.0)),
        # two GPUs for three: no GPU is cut in more than two
        ([{"CPU": 16.0, "GPU": 2.0}], 3, True, ActorResources(count=3, cpus=5, gpus=0.5)),
    ],
)
def test_actors_share_what_the_nodes_have(nodes, count, cuda, expected) -> None:
    found = actor_resources_of(nodes, count, cuda=cuda)
    assert found == expected
    assert sum(int(node.get("CPU", 0)) // found.cpus for node in nodes) >= found.count


@pytest.mark.parametrize(
    ("nodes", "count", "cuda", "message"),
    [
        ([{"CPU": 2.0}], 3, False, "--workers is 3, and the Ray cluster has 2 CPUs and 0 GPUs; allowed: 1 to 2$"),
        ([], None, False, "has 0 CPUs"),
        ([{"CPU": 2.0}], 1, True, "with at least one GPU for --accelerator cuda"),
    ],
)
def test_more_than_fit_are_refused_instead_of_waited_for(nodes, count, cuda, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        actor_resources_of(nodes, count, cuda=cuda)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray, which is not installed; pip install 'ray>=2\.40'"):
        ray_cluster().__enter__()
