"""Models that never leave their sites (Ditto): what a site says of them, and a server that asks for one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from atlas_fl.config import Config
from tests.hostile.servers import Recording, lie_to, record
from tests.runs.reading import passing_audit

TWO = ("movie-0", "movie-1")
GIVEN = {"strategy": "ditto", "ranks": "4", "clients_per_task": 2, "rounds": 2, "audit": True}


@pytest.fixture(scope="module")
def usual(shared_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Recording:
    made = shared_config(tasks="movie", pack_tokens=1, name="ditto", **GIVEN)
    found = record(made, tmp_path_factory.mktemp("ditto"), TWO, how={"late": False})
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    return found


def is_second(head: Mapping[str, Any]) -> bool:
    return head.get("action") == "train" and head["options"]["second_model"] == "proximal"


@pytest.mark.core
def test_nothing_of_the_second_model_travels_and_its_anchor_is_named(usual: Recording) -> None:
    turns = [turn for name in TWO for turn in usual.spoken[name].turns]
    asked = [(head, tensors) for _, (head, tensors) in turns if is_second(head)]
    numbers = {name: {head["number"] for _, (head, _) in usual.spoken[name].turns if is_second(head)} for name in TWO}
    assert len(asked) == 4 and all((head["beside"], len(tensors)) == (["anchor"], 0) for head, tensors in asked)
    for name in TWO:
        said = [one for (one, _) in usual.spoken[name].turns if one[0].get("number") in numbers[name]]
        assert len(said) == 2 and all({*tensors} == {"metrics"} for _, tensors in said)
    first, second = (usual.whole[name]["head.classifier.weight"] for name in TWO)
    assert (first - second).abs().max() > 1e-4
    passing_audit(usual.found.folder)


@pytest.mark.core
def test_a_server_that_has_it_trained_as_the_shared_model_is_refused(usual: Recording, tmp_path: Path) -> None:
    turns = [head for _, (head, _) in usual.spoken["movie-0"].turns]
    first = next(head for head in turns if head.get("action") == "train" and not is_second(head))

    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        if not (is_second(head) and head["round"] == 2):
            return None
        assert head["private"]["sha256"] is not None
        return {**head, "options": first["options"], "beside": []}, tensors

    ended = lie_to(usual.spoken["movie-0"], lie, tmp_path, "movie-0", certs=usual.folder / "certs" / "movie-0")
    assert "asks for train of a model that never leaves this site" in ended.error
    assert "nothing was sent" in ended.error
