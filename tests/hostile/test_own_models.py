"""Models that never leave their sites (Ditto, MR-MTL, APFL, FedALT): what sites say, and a server that asks for one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from atlas_fl.aggregation.secure_mean import SumGroup
from atlas_fl.config import Config, validate
from atlas_fl.deployment import site
from atlas_fl.errors import DataError
from atlas_fl.methods.apfl import WEIGHT
from atlas_fl.methods.second_model import initial_gate
from atlas_fl.params import SHARE, Params, digest
from atlas_fl.runtime.coordinator.secure_sums import SumSite
from atlas_fl.runtime.protocol.messages import SENT, read_sent, write_packed, write_trees
from atlas_fl.runtime.protocol.model_sync import model_name
from tests.hostile.federation import federate
from tests.hostile.servers import Ended, Lie, Recording, branch, lie_to, record
from tests.runs.reading import audited, passing_audit, state

TWO = ("movie-0", "movie-1")
THREE = (*TWO, "movie-2")
GIVEN = {"strategy": "ditto", "ranks": "4", "clients_per_task": 2, "rounds": 2, "audit": True}


@pytest.fixture(scope="module")
def usual(shared_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Recording:
    made = shared_config(tasks="movie", pack_tokens=1, name="ditto", **GIVEN)
    found = record(made, tmp_path_factory.mktemp("ditto"), TWO, how={"late": False})
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    return found


@pytest.fixture(scope="module", params=["apfl", "feddpa"])
def paired(
    request: pytest.FixtureRequest, shared_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    """Sites that predict with a model of their own and the shared one together."""
    made = shared_config(tasks="movie", pack_tokens=1, name=request.param, **{**GIVEN, "strategy": request.param})
    found = record(made, tmp_path_factory.mktemp(request.param), TWO, how={"late": False})
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    return found


@pytest.fixture(scope="module")
def summed(shared_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Recording:
    given = {**GIVEN, "strategy": "mr_mtl", "clients_per_task": 3, "secure": True, "max_share": 0.5}
    made = shared_config(tasks="movie", pack_tokens=1, name="summed", **given)
    found = record(made, tmp_path_factory.mktemp("summed"), THREE, secure=3)
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    return found


def first_start(found: Recording) -> Params:
    """The model that all began with."""
    turns = [message for _, message in found.spoken["movie-0"].turns]
    return next(read_sent(tensors)[0] for head, tensors in turns if head.get("action") == "train")


def without_head(params: Params) -> Params:
    """A model of which the adapters have no gradient."""
    return {key: torch.zeros_like(one) if key.startswith("head.") else one for key, one in params.items()}


def named(head: Mapping[str, Any], params: Params) -> dict[str, Any]:
    """The head of a job with all of these tensors in its message."""
    return {**head, "base": None, "model": model_name({key: digest({"": one}) for key, one in params.items()})}


def is_second(head: Mapping[str, Any]) -> bool:
    return head.get("action") == "train" and head["options"]["second_model"] != "none"


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


@pytest.mark.core
def test_a_model_of_ones_own_is_named_beside_no_whole_one_of_the_server(usual: Recording, tmp_path: Path) -> None:
    own = said_to(usual, lambda head: is_second(head) and own_one(head))[0]["private"]

    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        is_shared = head.get("action") == "train" and head["round"] == 2 and not is_second(head)
        return ({**head, "private": {**own, "ranks": []}}, tensors) if is_shared else None

    ended = turned(usual, lie, tmp_path)
    assert "the server names as a part of the model what is none" in ended.error
    assert [head["kind"] for head, _ in ended.said_after] == ["failed"]


@pytest.mark.core
def test_a_model_of_ones_own_is_named_at_no_smaller_ranks_than_it_has(usual: Recording, tmp_path: Path) -> None:
    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        is_own = head.get("action") == "evaluate" and own_one(head)
        return ({**head, "private": {**head["private"], "ranks": [1] * 6}}, tensors) if is_own else None

    ended = turned(usual, lie, tmp_path)
    assert "the server names as a part of the model what is none" in ended.error
    assert [head["kind"] for head, _ in ended.said_after] == ["failed"]


@pytest.mark.core
@pytest.mark.parametrize("rank", [-1, 0, 3 * 10**8])
def test_a_model_at_the_end_has_ranks_of_the_settings(usual: Recording, tmp_path: Path, rank: int) -> None:
    """They take memory before the model can be looked at."""

    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        is_last = head.get("kind") == "done"
        return ({**head, "private": {**head["private"], "ranks": [rank] * 6}}, tensors) if is_last else None

    ended = turned(usual, lie, tmp_path)
    assert f"the server asks for rank {rank}, and the settings" in ended.error and not ended.said_after
    assert list((tmp_path / "movie-0-private").glob("*.safetensors"))


@pytest.mark.core
def test_no_tensors_of_the_server_are_scored_in_a_model_of_ones_own(usual: Recording, tmp_path: Path) -> None:
    """Their scores would be measurements of the rest."""
    part = {key: torch.zeros_like(one) for key, one in first_start(usual).items() if key.startswith("head.")}

    def lie(head: dict[str, Any], _: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        is_own = head.get("action") == "evaluate" and head.get("private") is not None
        return (named(head, part), part) if is_own else None

    ended = lie_to(usual.spoken["movie-0"], lie, tmp_path, "movie-0", certs=usual.folder / "certs" / "movie-0")
    assert "asks for evaluate of a model that never leaves this site" in ended.error and not ended.said_after


@pytest.mark.core
@pytest.mark.parametrize(
    ("second", "line"),
    [
        (False, r"asks for train in round 2 with ['anchor'] beside the model"),
        (True, "asks for the anchor with encoder.layer.0.attention.self.query.lora_A (1, 32)"),
    ],
    ids=["beside the shared model", "of another rank"],
)
def test_an_anchor_is_of_the_second_model_and_of_its_shapes(
    usual: Recording, tmp_path: Path, second: bool, line: str
) -> None:
    """Under secure sums a site says what it began with, which beside the shared model an anchor would stand for."""
    shared = first_start(usual)
    cut = {key: one[:1] if key.endswith("lora_A") else one[:, :1] for key, one in shared.items() if "lora" in key}
    anchor = {**shared, **{key: one.contiguous() for key, one in cut.items()}}

    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        if head.get("action") != "train" or head["round"] != 2 or is_second(head) is not second:
            return None
        beside = write_trees(SENT, {"anchor": anchor if second else shared})
        return {**head, "beside": []}, {**tensors, **beside}

    ended = lie_to(usual.spoken["movie-0"], lie, tmp_path, "movie-0", certs=usual.folder / "certs" / "movie-0")
    assert line in ended.error and not ended.said_after


def own_one(head: Mapping[str, Any]) -> bool:
    """Whether this job names a model of the site's own."""
    return head.get("private") is not None and head["private"]["sha256"] is not None


def turned(found: Recording, lie: Lie, folder: Path) -> Ended:
    """How the first site ends whose server says this."""
    return lie_to(found.spoken["movie-0"], lie, folder, "movie-0", certs=found.folder / "certs" / "movie-0")


def said_to(found: Recording, wanted: Callable[[Mapping[str, Any]], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first such message that the first site had."""
    return next((dict(head), dict(tensors)) for _, (head, tensors) in found.spoken["movie-0"].turns if wanted(head))


@pytest.mark.core
def test_no_tensors_of_the_server_train_in_a_model_of_ones_own(usual: Recording, tmp_path: Path) -> None:
    """The loss of the training would be a measurement of the rest."""
    shared, _ = read_sent(said_to(usual, lambda head: head.get("action") == "train" and head["round"] == 2)[1])
    whole = {**first_start(usual), **shared}
    part = {key: one * 1.01 for key, one in whole.items() if key.startswith("head.")}

    def lie(head: dict[str, Any], _: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        if not (is_second(head) and own_one(head)):
            return None
        return {**named(head, part), "beside": []}, {**part, **write_trees(SENT, {"anchor": whole})}

    ended = turned(usual, lie, tmp_path)
    assert "asks for train of a model that never leaves this site" in ended.error and not ended.said_after


@pytest.mark.core
@pytest.mark.parametrize("action", ["evaluate", "train"])
def test_a_site_works_with_two_models_of_its_own_a_round(paired: Recording, tmp_path: Path, action: str) -> None:
    """Each older one that is scored or trained is another measurement."""
    first = said_to(paired, lambda head: is_second(head) and own_one(head))[0]["private"]
    last = said_to(paired, lambda head: head.get("kind") == "done")[0]["private"]
    drawn = {"sha256": None, "ranks": [4] * 6 if action == "train" else []}
    names = iter([first, drawn, last, first])

    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        if head.get("action") != action or head["round"] != 2 or not own_one(head):
            return None
        return {**head, "private": next(names)}, tensors

    ended = turned(paired, lie, tmp_path)
    assert f"asks for {action} of round 2 with 3 models of this site's own" in ended.error
    assert [head["kind"] for head, _ in ended.said_after] == ["result"] * 2


@pytest.mark.core
def test_of_two_models_that_predict_together_the_shared_one_alone_travels(paired: Recording) -> None:
    shared = {*first_start(paired)}
    for name in TWO:
        turns = paired.spoken[name].turns
        scored = [head for _, (head, _) in turns if head.get("action") == "evaluate" and own_one(head)]
        assert len(scored) == 4 and all(head["private"]["ranks"] == [] for head in scored)  # two splits, two rounds
        asked = [(head["beside"], len(tensors)) for _, (head, tensors) in turns if is_second(head) and own_one(head)]
        assert asked == [(["companion"], 0)]
        second = {head["number"] for _, (head, _) in turns if is_second(head)}
        said = [said for (said, _) in turns if said[0].get("kind") == "result"]
        assert all({*tensors} == {"metrics"} for head, tensors in said if head["number"] in second) and len(second) == 2
        trained = [tensors for _, tensors in said if {*tensors} != {"metrics"}]
        assert len(trained) == 2 and all({*one} == {"metrics", *(f"param/{key}" for key in shared)} for one in trained)
    first, second = (paired.whole[name]["head.classifier.weight"] for name in TWO)
    assert (first - second).abs().max() > 1e-4
    passing_audit(paired.found.folder)


@pytest.mark.core
@pytest.mark.parametrize("with_shared", [False, True], ids=["alone", "beside the shared one"])
def test_a_model_of_ones_own_is_trained_as_none_that_leaves(
    paired: Recording, tmp_path: Path, with_shared: bool
) -> None:
    own = said_to(paired, lambda head: is_second(head) and own_one(head))[0]["private"]

    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        if head.get("action") != "train" or is_second(head) or head["round"] != 2:
            return None
        if with_shared:
            return {**head, "private": {**own, "ranks": []}}, tensors
        return {**named(head, {}), "private": own}, {}

    ended = turned(paired, lie, tmp_path)
    assert "asks for train of a model that never leaves this site" in ended.error and not ended.said_after


@pytest.mark.core
def test_a_model_of_ones_own_is_scored_beside_the_whole_shared_one_alone(paired: Recording, tmp_path: Path) -> None:
    """By itself no honest server asks for it; tensors beside it are as those of any model that is scored."""
    own = said_to(paired, lambda head: is_second(head) and own_one(head))[0]["private"]
    head_alone = {key: one for key, one in first_start(paired).items() if key.startswith("head.")}
    far = {key: one + 100.0 if key.startswith("head.") else one for key, one in first_start(paired).items()}
    cut = {key: one[:1] if key.endswith("lora_A") else one[:, :1] for key, one in far.items() if "lora" in key}
    other = {**first_start(paired), **{key: one.contiguous() for key, one in cut.items()}}
    for place, (params, private, line) in enumerate(
        [
            ({}, own, "asks for evaluate of a model that never leaves this site"),
            (head_alone, None, "the model of evaluate lacks"),
            (far, None, "times as far from this site's last model as its own training moves it; allowed: 300"),
            (other, None, "names as a model beside the shared one what is none"),
        ]
    ):

        def lie(
            head: dict[str, Any],
            _: dict[str, Any],
            params: Params = params,
            private: Any = private,
        ) -> tuple[dict[str, Any], dict[str, Any]] | None:
            if head.get("action") != "evaluate" or not own_one(head):
                return None
            return {**named(head, params), "private": private or head["private"]}, dict(params)

        ended = turned(paired, lie, tmp_path / str(place))
        assert line in ended.error
        assert not [message for message in ended.said_after if message[0]["kind"] != "failed"]


@pytest.mark.core
@pytest.mark.parametrize(
    ("second", "line"),
    [
        (False, r"asks for train in round 2 with ['companion'] beside the model"),
        (True, "asks for the companion with encoder.layer.0.attention.self.query.lora_A (1, 32)"),
        (None, "the companion lacks 'encoder.layer.0"),
    ],
    ids=["beside the shared model", "of another rank", "none"],
)
def test_a_companion_is_of_the_second_model_and_of_its_shapes(
    paired: Recording, tmp_path: Path, second: bool | None, line: str
) -> None:
    shared = first_start(paired)
    cut = {key: one[:1] if key.endswith("lora_A") else one[:, :1] for key, one in shared.items() if "lora" in key}
    other = {**shared, **{key: one.contiguous() for key, one in cut.items()}}

    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        if head.get("action") != "train" or head["round"] != 2 or is_second(head) is (second is False):
            return None
        beside = {} if second is None else write_trees(SENT, {"companion": other if second else shared})
        model = {key: one for key, one in tensors.items() if not key.startswith(SENT)}
        return {**head, "beside": []}, {**model, **beside}

    ended = turned(paired, lie, tmp_path)
    assert line in ended.error and not ended.said_after


@pytest.mark.core
@pytest.mark.parametrize("action", ["train", "evaluate"])
def test_no_share_comes_with_a_shared_model_that_nobody_takes_itself_out_of(
    paired: Recording, tmp_path: Path, action: str
) -> None:
    params = {**first_start(paired), SHARE: torch.tensor(0.5)}

    def lie(head: dict[str, Any], _: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        if head.get("action") != action or not own_one(head):
            return None
        if action == "evaluate":
            return named(head, params), dict(params)
        return {**head, "beside": []}, write_trees(SENT, {"companion": params})

    ended = turned(paired, lie, tmp_path)
    what = "companion" if action == "train" else "model of evaluate"
    assert f"the {what} has '{SHARE}'" in ended.error and not ended.said_after


@pytest.mark.core
@pytest.mark.parametrize("paired", ["apfl"], indirect=True)
def test_the_weight_of_a_model_of_ones_own_begins_as_the_settings_say(paired: Recording, tmp_path: Path) -> None:
    """A server that chose it anew would score its own model, or the site's."""

    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        if not (is_second(head) and not own_one(head)):
            return None
        whole = {**first_start(paired), WEIGHT: torch.tensor(1.0)}
        shared = {key: one for key, one in tensors.items() if key.startswith(SENT)}
        return named(head, whole), {**whole, **shared}

    ended = turned(paired, lie, tmp_path)
    assert f"'{WEIGHT}' holds values from 1 to 1; allowed: 0.5 to 0.5" in ended.error and not ended.said_after


@pytest.mark.core
@pytest.mark.parametrize("paired", ["apfl"], indirect=True)
def test_other_words_about_two_models_end_a_site_in_a_line(paired: Recording, tmp_path: Path) -> None:
    own = said_to(paired, lambda head: is_second(head) and own_one(head))[0]["private"]["sha256"]
    cut = {"blocks": 1, "wire": "fp32", "head": "server", "noise": 0.0}
    for place, (action, options, words, line) in enumerate(
        [
            ("evaluate", {"outcomes": True}, {}, "asks for evaluate with outcomes True"),
            ("evaluate", {}, {"cut": cut}, "asks for a cut at block 1"),
            ("evaluate", {}, {"beside": ["companion"]}, "asks for evaluate in round 1 with ['companion'] beside"),
            ("train", {"second_weight": 0.25}, {}, "asks for train with second_weight 0.25"),
            ("train", {}, {"kept": [["gate", own]]}, "kept[0][0] is 'gate'; allowed: one of momentum, residual"),
            ("train", {}, {"kept": [["momentum", own]]}, "names as momentum what is none"),
            ("train", {}, {"beside": ["anchor", "companion"]}, "in round 2 with ['anchor'] beside the model"),
        ]
    ):

        def lie(
            head: dict[str, Any],
            tensors: dict[str, Any],
            action: str = action,
            options: Any = options,
            words: Any = words,
        ) -> tuple[dict[str, Any], dict[str, Any]] | None:
            if head.get("action") != action or not own_one(head):
                return None
            return {**head, "options": {**head["options"], **options}, **words}, tensors

        ended = turned(paired, lie, tmp_path / str(place))
        assert line in ended.error
        assert not [message for message in ended.said_after if message[0]["kind"] != "failed"]


@pytest.mark.core
def test_what_sites_sum_begins_with_a_model_of_their_own_or_the_initialisation(summed: Recording) -> None:
    """Else sites with one anchor could begin so that one update alone is no known model in their sum."""
    start = without_head(first_start(summed))

    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        if not (head.get("action") == "train" and head["round"] == 2):
            return None
        beside = write_trees(SENT, read_sent(tensors)[1])
        return {**named(head, start), "private": None}, {**start, **beside}

    ended = branch(summed.spoken["movie-0"], lie)
    assert "head.classifier.weight' is not the initialisation of --seed" in ended.error and not ended.said_after


@pytest.mark.core
def test_one_own_model_is_in_the_sum_of_one_round_and_no_other_is(summed: Recording) -> None:
    (*_, site) = (one.sums for one in summed.spoken["movie-0"].workers if one is not None and one.sums is not None)
    assert isinstance(site, SumSite) and site._round == 2
    own, (keys, *_) = site._own, site._sums
    head = {"group": {"clients": THREE, "keys": keys, "what": "the adapters"}, "step": "keys"}
    for round, start in ((2, "another"), (3, own)):
        site._round, site._own = round, start
        site._sums.clear()
        with pytest.raises(DataError, match="has answered another sum of the "):
            site.answer({**head, "round": round}, {})
    site._round, site._own = 2, own
    assert site.answer({**head, "round": 2}, write_packed({}))


@pytest.fixture(scope="module", params=["fedalt", "fedalt_fixed"])
def beside(
    request: pytest.FixtureRequest, shared_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    """Sites that go on with a model of their own beside the mean, of which each has its share."""
    given = {**GIVEN, "strategy": request.param, "clients_per_task": 3, "secure": True, "max_share": 0.5}
    made = shared_config(tasks="movie", pack_tokens=1, name=request.param, **given)
    with patch.object(site, "clear_store", lambda *_: ""):  # what a site goes on from stays for the tests
        found = record(made, tmp_path_factory.mktemp(request.param), THREE, secure=3)
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    return found


def mean_of(found: Recording) -> Params:
    """What the first site was sent of the mean of round one."""
    (anchor,) = audited(found.found.folder, 1, "anchor")
    own = {key.removeprefix("movie-0/"): one for key, one in anchor.items() if key.startswith("movie-0/")}
    return {key: one for key, one in own.items() if key.endswith((".lora_A", ".lora_B"))}


@pytest.mark.core
def test_the_mean_and_ones_share_in_it_are_all_that_comes_and_nothing_but_sums_leaves(beside: Recording) -> None:
    shared = {*mean_of(beside), SHARE}
    (shares,) = audited(beside.found.folder, 1, "server")
    assert sum(float(one) for one in shares.values()) == pytest.approx(1) and len(shares) == 3
    for name in THREE:
        turns = beside.spoken[name].turns
        asked = [(head, tensors) for _, (head, tensors) in turns if head.get("kind") == "job"]
        scored = [head for head, _ in asked if head["action"] == "evaluate"]
        assert len(scored) == 4 and all(own_one(head) and head["private"]["ranks"] == [] for head in scored)
        second = [(head, tensors) for head, tensors in asked if head["action"] == "train" and head["round"] == 2]
        assert [(head["beside"], len(tensors), head.get("kept")) for head, tensors in second] == [
            (["companion"], 0, None)
        ]
        came = {key for head, tensors in asked if head["round"] or head["action"] == "evaluate" for key in tensors}
        assert {key.removeprefix(f"{SENT}companion/") for key in came} == shared
        said = [said for (said, _) in turns if said[0].get("kind") == "result"]
        assert all({*tensors} <= {"metrics", "cut/"} for _, tensors in said)
    first, second = (beside.whole[name]["head.classifier.weight"] for name in THREE[:2])
    assert (first - second).abs().max() > 1e-4
    passing_audit(beside.found.folder, "server")


@pytest.mark.core
@pytest.mark.parametrize("action", ["train", "evaluate", "done"])
@pytest.mark.parametrize(
    ("share", "line"),
    [
        (1.0, f"'{SHARE}' holds values from 1 to 1; allowed: 0 to 1"),
        (-0.25, f"'{SHARE}' holds values from -0.25 to -0.25"),
        (torch.nan, f"'{SHARE}' holds values from nan to nan"),
        ([0.1, 0.2], f"'{SHARE}' is (2,) torch.float32; allowed: ()"),
        (1 - 2**-24, "without this site: 'encoder.layer.0."),
        (0.999, "because honest rounds lead no further, and out of other models' updates texts can be read"),
    ],
    ids=["alone", "negative", "nan", "of another shape", "beyond all values", "of no honest round"],
)
def test_a_share_makes_nothing_that_honest_rounds_do_not(beside: Recording, action: str, share: Any, line: str) -> None:
    """What is frozen beside a site's own model, or scored with it, is made of its own model by what the server says."""
    if action == "done" and share == 0.999:
        return  # nothing is computed with the model at the end, which is held against the settings alone
    params = {**mean_of(beside), SHARE: torch.tensor(share)}

    def lie(head: dict[str, Any], _: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        if "done" == head["kind"] == action or (head.get("action") == action == "evaluate" and own_one(head)):
            return named(head, params), dict(params)
        if head.get("action") != action or head["round"] != 2:
            return None
        return {**head, "beside": []}, write_trees(SENT, {"companion": params})

    ended = branch(beside.spoken["movie-0"], lie)
    assert line in ended.error and not ended.said_after


@pytest.mark.core
def test_beside_a_model_of_ones_own_stands_what_the_settings_share_and_no_more(beside: Recording) -> None:
    mean, whole = mean_of(beside), beside.whole["movie-0"]
    heads = {key: one for key, one in whole.items() if key.startswith("head.")}
    far = {key: one + 50.0 for key, one in mean.items()}
    own = said_to(beside, lambda head: head.get("action") == "train" and own_one(head))[0]["private"]
    for kind, params, line in [
        ("companion", {**mean, **heads}, "the companion has 'head.classifier."),
        ("companion", {}, "the companion lacks 'encoder.layer.0."),
        ("companion", far, "allowed: 20, because honest rounds lead no further"),
        ("anchor", mean, "the companion lacks 'encoder.layer.0."),
    ]:

        def lie(
            head: dict[str, Any], _: dict[str, Any], kind: str = kind, params: Params = params
        ) -> tuple[dict[str, Any], dict[str, Any]] | None:
            if head.get("action") != "train" or head["round"] != 2:
                return None
            return {**head, "beside": []}, write_trees(SENT, {kind: params})

        ended = branch(beside.spoken["movie-0"], lie)
        assert line in ended.error and not ended.said_after

    def alone(head: dict[str, Any], _: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        return ({**named(head, {}), "private": own}, {}) if head.get("action") == "evaluate" else None

    ended = branch(beside.spoken["movie-0"], alone)
    assert "asks for evaluate of a model that never leaves this site" in ended.error and not ended.said_after


@pytest.mark.core
@pytest.mark.parametrize("beside", ["fedalt"], indirect=True)
def test_a_gate_begins_at_its_site_and_a_server_makes_none(beside: Recording) -> None:
    """One that it chose would say which tokens train the site's own adapter."""
    assert any(key.endswith(".lora_gate") and one[:, :-1].any() for key, one in beside.whole["movie-0"].items())
    gate = initial_gate(mean_of(beside))
    kept = {key: torch.full_like(one, 3.0) for key, one in gate.items()}

    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        if head.get("action") != "train" or head["round"] != 1:
            return None
        model, sent = read_sent(tensors)
        model = {**first_start(beside), **model, **kept}
        return named(head, model), {**model, **write_trees(SENT, sent)}

    ended = branch(beside.spoken["movie-0"], lie)
    assert "the model of train has 'encoder.layer.0." in ended.error and ".lora_gate'" in ended.error

    def keep(head: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        own = head.get("private") or {}
        is_second = head.get("action") == "train" and head["round"] == 2
        return ({**head, "kept": [["gate", own.get("sha256")]]}, tensors) if is_second else None

    ended = branch(beside.spoken["movie-0"], keep)
    assert "kept[0][0] is 'gate'; allowed: one of momentum, residual" in ended.error


@pytest.mark.core
@pytest.mark.parametrize("beside", ["fedalt_fixed"], indirect=True)
def test_a_site_has_no_larger_share_than_the_examples_of_all_give_it(beside: Recording) -> None:
    """Sites of which each began beside another rest of the world could stand still, so that a sum shows the last."""
    (shares,) = audited(beside.found.folder, 1, "server")
    own = float(shares[f"{SHARE}/movie-0/{SHARE}"])
    for lie_by, error in ((0.02, f"a share of {own + 0.02:.3g} in the mean; allowed: {own:.3g} by the"), (0.0, "")):
        params = {**mean_of(beside), SHARE: torch.tensor(own + lie_by)}

        def lie(
            head: dict[str, Any], _: dict[str, Any], params: Params = params
        ) -> tuple[dict[str, Any], dict[str, Any]] | None:
            if head.get("action") != "train" or head["round"] != 2:
                return None
            return {**head, "beside": []}, write_trees(SENT, {"companion": params})

        ended = branch(beside.spoken["movie-0"], lie)
        assert error in ended.error and bool(ended.said_after) is not bool(error)


@pytest.mark.core
def test_a_site_whose_training_failed_is_scored_with_the_model_that_it_draws(beside: Recording) -> None:
    number = {"encoder.layer.0.attention.self.query.lora_A": torch.tensor(1.0)}
    for odd, kind, line in (({}, "result", ""), (number, "failed", "a model beside the shared one what is none")):

        def lie(
            head: dict[str, Any], tensors: dict[str, Any], odd: Params = odd
        ) -> tuple[dict[str, Any], dict[str, Any]] | None:
            if head.get("action") != "evaluate":
                return None
            drawn = {**head, "private": {"sha256": None, "ranks": []}}
            return (named(drawn, odd), dict(odd)) if odd else (drawn, tensors)

        ended = branch(beside.spoken["movie-0"], lie)
        assert ended.said_after[0][0]["kind"] == kind and line in ended.error


@pytest.mark.core
@pytest.mark.parametrize("beside", ["fedalt_fixed"], indirect=True)
def test_a_round_has_one_share_and_sites_of_other_shares_have_one_start(beside: Recording) -> None:
    last = {name: [one.sums for one in beside.spoken[name].workers if one is not None][-1] for name in THREE}
    first, other, _ = last.values()
    assert isinstance(first, SumSite) and isinstance(other, SumSite)
    (keys,) = first._sums
    group = SumGroup(clients=THREE, keys=keys, what="the adapters")
    assert first._share != "" and first._claim(group) == other._claim(group)
    said, share = {"group": {"clients": THREE, "keys": keys, "what": "the adapters"}, "step": "keys", "round": 2}, ""
    first._sums.clear()
    share, first._share = first._share, " with share 0.125"
    with pytest.raises(DataError, match="has answered another sum of the adapters"):
        first.answer(said, {})
    first._share = share
    assert first.answer(said, write_packed({}))


@pytest.mark.core
def test_a_site_that_says_no_second_model_is_refused_and_the_run_goes_on(
    config: Callable[..., Config],
) -> None:
    """Its name in a checkpoint would be one of another place there."""

    def lies(head: dict[str, Any], tensors: dict[str, Any], action: str) -> Any:
        if head["kind"] != "result" or action != "train" or head.get("private") is None:
            return head, tensors
        return {**head, "private": None}, {**tensors, "param/a/b": torch.full((2,), torch.nan)}

    made = validate(config(name="lies", **{**GIVEN, "clients_per_task": 3}))
    found = federate(made, {"movie-2": lies}, least=2, late=False, deadline=20)
    assert (found.error, found.faults) == (None, [])
    assert found.noted("no train of movie-2 in round 1: its answer was refused: the update lacks")
    assert not any("a/b" in name for name in state(found.folder))


@pytest.fixture(scope="module")
def shrunk(shared_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Sites of which each keeps a part of its own deviation from the mean."""
    given = {**GIVEN, "strategy": "shrinkage", "clients_per_task": 3, "secure": True, "max_share": 0.5, "rounds": 3}
    made = shared_config(tasks="movie", pack_tokens=1, name="shrunk", measure_round=1, **given)
    with patch.object(site, "clear_store", lambda *_: ""):
        found = record(made, tmp_path_factory.mktemp("shrunk"), THREE, secure=3)
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    return found


@pytest.mark.core
def test_variances_leave_in_a_sum_alone_and_what_is_kept_comes_with_the_mean(shrunk: Recording) -> None:
    (told,) = audited(shrunk.found.folder, 1, "server")
    assert {*told} >= {"means/half_length", "means/agreement", "means/length"}
    for name in THREE:
        turns = shrunk.spoken[name].turns
        said = [(head, tensors) for (head, tensors), _ in turns if head.get("kind") == "result"]
        assert all({*tensors} <= {"metrics", "cut/"} for _, tensors in said), "not a number of one site"
        numbers = {f"report/variances/{key.removeprefix('means/')}" for key in told if key.startswith("means/")}
        withheld = [numbers & {*head["withheld"]} for head, _ in said if head.get("withheld")]
        assert withheld == [numbers - {"report/variances/squares"}], "once"
        came = [float(one) for _, (_, tensors) in turns for key, one in tensors.items() if key.endswith(SHARE)]
        assert {*came} == {float(told[f"{SHARE}/{name}/{SHARE}"])}
    passing_audit(shrunk.found.folder, "server")


@pytest.mark.core
@pytest.mark.parametrize(
    ("share", "moved", "line"),
    [
        (1.5, 0.0, f"'{SHARE}' holds values from 1.5 to 1.5; allowed: 0 to 1"),
        (-0.25, 0.0, f"'{SHARE}' holds values from -0.25 to -0.25"),
        (torch.nan, 0.0, f"'{SHARE}' holds values from nan to nan"),
        (0.5, 50.0, "because honest rounds lead no further"),
        (0.0, 50.0, "because honest rounds lead no further"),
        (0.9, 0.0, ""),
    ],
    ids=["more than all", "negative", "nan", "a far mean", "a far mean alone", "honest"],
)
def test_a_site_begins_with_nothing_that_honest_rounds_do_not_make(
    shrunk: Recording, share: float, moved: float, line: str
) -> None:
    (anchor,) = audited(shrunk.found.folder, 1, "anchor")
    mean = {key.removeprefix("movie-0/"): one + moved for key, one in anchor.items() if key.startswith("movie-0/")}

    def lie(head: dict[str, Any], _: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        if head.get("action") != "train" or head["round"] != 2:
            return None
        return {**head, "beside": []}, write_trees(SENT, {"companion": {**mean, SHARE: torch.tensor(share)}})

    ended = branch(shrunk.spoken["movie-0"], lie)
    assert line in ended.error and bool(ended.said_after) is not bool(line)


@pytest.mark.slow
def test_a_second_model_goes_with_last_rounds_for_oneself_under_secure_sums(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    given = {**GIVEN, "clients_per_task": 3, "rounds": 3, "personal_rounds": 1, "secure": True, "max_share": 0.5}
    found = record(config(name="last", **given), tmp_path, THREE, secure=3, how={"deadline": 20})
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    passing_audit(found.found.folder)
