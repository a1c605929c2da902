"""Whatever a listed site answers, the run ends well, the honest sites get honest models, and the notes name that site.

Every kind goes through a whole run, several at a time: two sites are honest, and each of the others sends one kind. The
honest sites end with the very bits of a federation in which the others did not answer: in the plan, in training, or in
an evaluation. Where the server refuses an update, its sender is nobody's neighbour in that round, whatever it sent.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from atlas_fl.config import Config
from atlas_fl.params import digest
from atlas_fl.runtime.coordinator import client_registry
from atlas_fl.runtime.protocol.answer_schema import SCORES
from atlas_fl.storage.jsonl import read_rows
from tests.hostile.federation import SITES, Change, Outcome, federate

pytestmark = pytest.mark.slow

Head, Tensors = dict[str, Any], dict[str, Any]
HONEST = SITES[:2]
SKETCH = 64
KNOWN = {"round", "client", "task", "split", "majority", "classes", "examples", "seconds", "auroc"} | {
    *("steps", "head_steps", "extra_steps"),
    *SCORES["classes"],
}
"""What a row of scores holds."""


def at(actions: str, change: Callable[[Head, Tensors], Any]) -> Change:
    """The change, made to every answer to these actions."""

    def changed(head: Head, tensors: Tensors, asked: str) -> Any:
        return change(head, tensors) if head["kind"] == "result" and asked in actions.split() else (head, tensors)

    return changed


def tensors_as(alter: Callable[[torch.Tensor], torch.Tensor], part: str = "param/") -> Callable[[Head, Tensors], Any]:
    return lambda head, tensors: (head, {k: alter(t) if part in k else t for k, t in tensors.items()})


def without(part: str) -> Callable[[Head, Tensors], Any]:
    return lambda head, tensors: (head, {key: tensor for key, tensor in tensors.items() if part not in key})


def saying(**words: Any) -> Callable[[Head, Tensors], Any]:
    return lambda head, tensors: ({**head, **words}, tensors)


def metric(name: str, value: float) -> Callable[[Head, Tensors], Any]:
    """One metric has this value, whether it was there or not."""

    def change(head: Head, tensors: Tensors) -> Any:
        found = dict(zip(head["metrics"], tensors["metrics"].tolist())) | {name: value}
        return {**head, "metrics": list(found)}, {
            **tensors,
            "metrics": torch.tensor([*found.values()], dtype=torch.float64),
        }

    return change


def renamed(head: Head, tensors: Tensors) -> Any:
    return {**head, "metrics": [f"{name}x" for name in head["metrics"]]}, tensors


def many_names(head: Head, tensors: Tensors) -> Any:
    names = [f"m{n}" for n in range(20_000)]
    return {**head, "metrics": names}, {**tensors, "metrics": torch.zeros(20_000).double()}


def extra(name: str, tensor: torch.Tensor) -> Callable[[Head, Tensors], Any]:
    return lambda head, tensors: (head, {**tensors, name: tensor})


def failing(head: Head, _: Tensors) -> Any:
    return {"kind": "failed", "number": head["number"], "reason": "no"}, {}


def full(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


@dataclass(frozen=True)
class Kind:
    """A hostile answer."""

    change: Callable[[Head, Tensors], Any]
    note: str | tuple[str, str]
    """What the server says of it; or one of two lines, where sizes of splits decide which it finds first."""


def importance(values: Any) -> Callable[[Head, Tensors], Any]:
    return lambda head, tensors: (head, {**tensors, "param/importance": torch.tensor(values, dtype=torch.float64)})


REFUSED = "its answer was refused: "
PLANNING: Mapping[str, Kind] = {
    "no sketch": Kind(without("sketch"), "it lacks 'sketch.first', 'sketch.second'"),
    "short sketch": Kind(tensors_as(lambda _: torch.ones(7), "sketch"), "is (7,) torch.float32"),
    "bf16 sketch": Kind(tensors_as(lambda t: t.bfloat16(), "sketch"), "(64,) torch.bfloat16"),
    "NaN sketch": Kind(tensors_as(full(math.nan), "sketch"), "'sketch.first' holds values from nan"),
    "zero sketch": Kind(tensors_as(full(0.0), "sketch"), "sketch.first has length 0; allowed: 1"),
    "sketch x 1e38": Kind(tensors_as(lambda t: t * 1e38, "sketch"), "'sketch.first' holds values from"),
    "a third sketch": Kind(extra("param/sketch.third", torch.ones(64)), "unknown 'sketch.third'"),
    "renamed metrics": Kind(renamed, "it lacks the metrics agreement, steps, loss"),
    "agreement of two": Kind(metric("agreement", 2.0), "agreement is 2; allowed: -1 to 1"),
    "a model of 3e38": Kind(tensors_as(full(3e38), "lora"), "allowed: -1e+06 to 1e+06"),
    "no model": Kind(without("lora"), "it lacks 'encoder.layer.0"),
    "examples of a fingerprint": Kind(saying(examples=5), "it answers on 5 examples; allowed: the 0"),
    "no update at all": Kind(lambda head, _: (head, {}), "the answer is no update"),
    "terminal codes": Kind(metric("\x1b[2J\n", 1.0), r"it has a metric '\x1b[2J\n'"),
}
"""Fingerprints without which a plan is made of the others."""

LAYERS: Mapping[str, Kind] = {
    "no importance": Kind(without("importance"), "it lacks 'importance'"),
    "nine layers": Kind(importance([1 / 9] * 9), "is (9,) torch.float64; allowed: (3,)"),
    "NaN importance": Kind(importance([math.nan] * 3), "holds values from nan to nan; allowed: 0 to 1"),
    "importance without a sum": Kind(importance([0.0] * 3), "importance sums to 0; allowed: 1"),
}
"""The same of importance, which nobody is asked for who comes late to a cluster."""

TRAINING: Mapping[str, Kind] = {
    "no loss": Kind(renamed, REFUSED + "it lacks the metrics loss, seconds, steps"),
    "NaN loss": Kind(metric("loss", math.nan), REFUSED + "loss is nan; allowed: 0 to 3.40282e+38"),
    "a metric called round": Kind(metric("round", 7.0), REFUSED + "it has a metric 'round'"),
    "20,000 metrics": Kind(many_names, REFUSED + "it lacks the metrics loss"),
    "10^9 examples": Kind(saying(examples=10**9), REFUSED + "it answers on 1000000000 examples; allowed: the 8"),
    "examples as words": Kind(saying(examples="8"), REFUSED + "the answer is no update"),
    "a digest of words": Kind(saying(loaded="../../etc"), REFUSED + "the answer is no update: loaded is '../../etc'"),
    "a private part that is a path": Kind(
        saying(private={"sha256": "../../x", "ranks": []}), REFUSED + "private.sha256 is '../../x'"
    ),
    "classes that do not add up": Kind(
        saying(classes={"hits": [9], "examples": [1], "predicted": [9]}), REFUSED + "the counts by class"
    ),
    "failed, with terminal codes": Kind(
        lambda head, _: ({"kind": "failed", "number": head["number"], "reason": "\x1b[2J\nx" * 999}, {}), "?[2J?x?[2J"
    ),
    "a head alone": Kind(without("lora"), "the update lacks encoder"),
    "NaN": Kind(tensors_as(full(math.nan)), "values that are NaN or infinite"),
    "another shape": Kind(tensors_as(lambda t: t.reshape(-1)), "return it as sent"),
    "one tensor more": Kind(extra("param/x", torch.ones(1)), "the update has unknown x"),
}
"""Answers that count as if the site had not answered in that round, or as any other update that is refused."""

SCORING: Mapping[str, Kind] = {
    "no primary": Kind(renamed, "it lacks the metrics loss, ece, accuracy"),
    "NaN scores": Kind(tensors_as(full(math.nan), "metrics"), "accuracy is nan; allowed: 0 to 1"),
    "an accuracy of 1e300": Kind(metric("accuracy", 1e300), "accuracy is 1e+300; allowed: 0 to 1"),
    "a primary of its own": Kind(metric("primary", 1.0), "primary is 1; allowed: its accuracy"),
    "a negative loss": Kind(metric("loss", -5.0), "loss is -5"),
    "seconds without end": Kind(metric("seconds", 1e300), "seconds is 1e+300"),
    "a perplexity": Kind(metric("perplexity", 3.0), "it has a metric 'perplexity'"),
    "examples of another split": Kind(
        saying(examples=8),
        ("it answers on 8 examples; allowed: the 6 that were registered", "the counts by class are {"),
    ),
    "a model": Kind(lambda h, t: ({**h, "same": False}, {**t, "param/x": torch.ones(1)}), "it brings tensors ('x')"),
    "counts by class": Kind(saying(classes={"hits": [0, 0], "examples": [0, 0], "predicted": [0, 0]}), "by class"),
}
"""Answers without which a round's scores are those of the others."""


AT_ONCE = 14
"""Hostile sites of one federation."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What became of one hostile site in its federation."""

    found: Outcome
    name: str
    kind: Kind

    def said(self) -> list[str]:
        return [note for note in self.found.notes if f" of {self.name} " in note]


class Federations:
    """Whole runs with several hostile sites each, as they are asked for."""

    def __init__(self, make: Callable[..., Config]) -> None:
        self._make, self._found = make, dict[Any, Outcome]()

    def run(self, key: Any, changes: Mapping[str, Change], *, names: Sequence[str], **how: Any) -> Outcome:
        if key not in self._found:
            values = {"rounds": 1, "samples": 8, "validation_samples": 6, "test_samples": 6, "fingerprint": "delta"}
            config = self._make(
                **values, tasks="movie", clients_per_task=2 + AT_ONCE, pack_tokens=1, name=f"r{len(self._found)}"
            )
            self._found[key] = federate(config, changes, names=names, least=2, **how)
        return self._found[key]

    def with_kind(self, action: str, kinds: Mapping[str, Kind], name: str) -> Ended:
        """The federation in which one site sends this kind at this action, and others those that stand beside it."""
        place = list(kinds).index(name)
        first = place - place % AT_ONCE
        group = list(kinds)[first : first + AT_ONCE]
        sites = {f"movie-{2 + k}": kinds[own] for k, own in enumerate(group)}
        changes = {site: at(action, kind.change) for site, kind in sites.items()}
        found = self.run((action, *group), changes, names=(*HONEST, *sites))
        return Ended(found=found, name=f"movie-{2 + place - first}", kind=kinds[name])


@pytest.fixture(scope="module")
def federations(shared_config: Callable[..., Config]) -> Federations:
    return Federations(shared_config)


@pytest.fixture
def small(config: Callable[..., Config]) -> Callable[..., Config]:
    return lambda **values: config(**{"rounds": 1, "samples": 8, "validation_samples": 6, "test_samples": 6, **values})


def models(found: Outcome) -> dict[str, str]:
    return {name: digest(found.models[name]) for name in HONEST}


def number_of(site: str) -> int:
    return int(site.partition("-")[2])


def ends_well(found: Outcome) -> None:
    assert found.error is None, found.error
    assert found.faults == []
    for name in HONEST:
        assert name not in found.refused
        assert all(bool(tensor.isfinite().all()) for tensor in found.models[name].values())
        assert not found.noted(f" of {name} "), "an honest site is blamed"
    assert all(note.isprintable() for note in found.notes)
    rows = [row for row in read_rows(found.folder / "metrics.jsonl") if "split" in row]
    assert all(row.keys() <= KNOWN for row in rows)


@pytest.mark.parametrize("name", PLANNING)
def test_a_plan_is_made_without_who_answers_nonsense(federations: Federations, name: str) -> None:
    ended = federations.with_kind("fingerprint", PLANNING, name)
    ends_well(ended.found)
    (first, *_) = ended.said()
    assert first.startswith(f"no fingerprint of {ended.name} in round 0: {REFUSED}")
    assert ended.kind.note in first
    assert [note for note in ended.found.noted("the plan is made without") if ended.name in note]
    assert ended.found.noted(f"{ended.name} does not join: 0 of 1"), "it is asked once more, as one who comes late"
    assert models(ended.found) == models(federations.run("plan", {}, names=HONEST))


@pytest.mark.parametrize("name", LAYERS)
def test_who_measures_no_layers_is_planned_without_and_joins_as_who_comes_late(
    federations: Federations, name: str
) -> None:
    ended = federations.with_kind("importance", LAYERS, name)
    ends_well(ended.found)
    (first, *_) = ended.said()
    assert first.startswith(f"no importance of {ended.name} in round 0: {REFUSED}")
    assert ended.kind.note in first
    assert ended.found.noted(f"{ended.name} joins before round 1: cluster 0")


@pytest.mark.parametrize("name", TRAINING)
def test_a_round_goes_on_without_who_answers_nonsense(federations: Federations, name: str) -> None:
    ended = federations.with_kind("train", TRAINING, name)
    ends_well(ended.found)
    (told,) = [note for note in ended.found.noted(ended.name) if " of " + ended.name + " " in note]
    assert ended.kind.note in told
    rows = read_rows(ended.found.folder / "metrics.jsonl")
    (row,) = [row for row in rows if row.get("event") in ("missing", "refused") and row["client"] == ended.name]
    assert row["round"] == 1
    nothing = at("train", tensors_as(full(math.nan)))
    events = {row["client"]: row["event"] for row in rows if row.get("event") in ("missing", "refused")}
    attackers = sorted(events, key=number_of)
    assert len(attackers) == len(ended.found.models) - len(HONEST)
    without_them = federations.run(
        ("train", *sorted(events.items())),
        {name: at("train", failing) if events[name] == "missing" else nothing for name in attackers},
        names=(*HONEST, *attackers),
    )
    assert models(ended.found) == models(without_them)


REPORTING: Mapping[str, tuple[dict[str, object], Callable[[Head, Tensors], Any], str]] = {
    "no halves": ({"strategy": "kriging"}, without("report/"), "its report (halves): it lacks 'first/"),
    "counts of other data": (
        {"strategy": "fedpac"},
        tensors_as(lambda counts: counts + 1, "report/class_features/counts"),
        "that were registered",
    ),
}


@pytest.mark.parametrize("name", REPORTING)
def test_a_round_goes_on_without_who_reports_nonsense(small: Callable[..., Config], name: str) -> None:
    values, change, message = REPORTING[name]
    values = {**values, **({"measure_round": 1} if values["strategy"] == "kriging" else {})}
    found, without_it = (
        federate(small(**values, name=run), {SITES[2]: altered}, least=2)
        for run, altered in (("reports", at("train", change)), ("without", at("train", failing)))
    )
    ends_well(found)
    (note,) = found.noted(f"no train of {SITES[2]} in round 1: {REFUSED}")
    assert message in note
    assert models(found) == models(without_it)


@pytest.mark.parametrize(("factor", "strategy"), [(1e6, "atlas_laplacian"), (-30.0, "fedavg")])
def test_an_update_far_beyond_the_others_is_refused_with_the_name_of_its_sender(
    small: Callable[..., Config], factor: float, strategy: str
) -> None:
    """The honest ones end as where it sends no numbers at all; under an average also as where it does not answer."""
    names, liar = (*SITES, "movie-3"), "movie-3"
    large = at("train", tensors_as(lambda tensor: tensor * factor))
    other = at("train", failing) if strategy == "fedavg" else at("train", tensors_as(full(math.nan)))
    found, without_it = (
        federate(small(clients_per_task=4, strategy=strategy, name=name), {liar: change}, names=names, least=3)
        for name, change in (("large", large), ("without", other))
    )
    ends_well(found)
    (note,) = found.noted(f"the update of {liar} was refused: the change of its")
    assert "times the median" in note
    (row,) = [row for row in read_rows(found.folder / "metrics.jsonl") if row.get("event") == "refused"]
    assert (row["round"], row["client"]) == (1, liar)
    for name in SITES:
        assert digest(found.models[name]) == digest(without_it.models[name])


@pytest.mark.parametrize("name", SCORING)
def test_scores_are_of_those_who_answer_sense(federations: Federations, name: str) -> None:
    ended = federations.with_kind("evaluate", SCORING, name)
    ends_well(ended.found)
    notes = (ended.kind.note,) if isinstance(ended.kind.note, str) else ended.kind.note
    said = ended.said()
    assert len(said) == 2 and all(any(note in told for note in notes) for told in said), said
    rows = [
        row for row in read_rows(ended.found.folder / "metrics.jsonl") if row.get("split") in ("validation", "test")
    ]
    assert {row["client"] for row in rows} == set(HONEST)
    attackers = sorted(set(ended.found.models) - set(HONEST), key=number_of)
    honest = federations.run(("all", len(attackers)), {}, names=(*HONEST, *attackers))
    assert models(ended.found) == models(honest)


@pytest.mark.parametrize("action", ["fingerprint", "evaluate"])
def test_a_run_that_needs_everybody_ends_with_a_line_that_names_the_site(
    small: Callable[..., Config], action: str
) -> None:
    found = federate(small(), {"movie-2": at(action, renamed)})
    assert found.faults == []
    number = 0 if action == "fingerprint" else 1
    assert str(found.error).startswith(f"2 of 3 clients answered {action} in round {number}, not movie-2, and 3 are")
    assert "\n" not in str(found.error)


def test_who_is_refused_three_times_is_sent_away_with_the_reason(config: Callable[..., Config]) -> None:
    found = federate(config(rounds=3), {"movie-2": at("evaluate", renamed)}, least=2)
    ends_well(found)
    assert client_registry.MAX_REFUSALS == 3
    assert found.refused["movie-2"].startswith("3 answers of movie-2 were refused, the last of evaluate: it lacks")
    assert found.noted("no train of movie-2 in round 3: 3 of its answers were refused; it is asked again once")


def test_who_answers_twice_and_to_other_numbers_goes_on(small: Callable[..., Config]) -> None:
    """What it answers to nobody's question costs it what it holds, and nothing else."""

    def twice(head: Head, tensors: Tensors, _: str) -> Any:
        return [(head, tensors)] * 2 if head["kind"] == "result" else (head, tensors)

    found, alone = federate(small(), {"movie-2": twice}), federate(small(name="alone"))
    assert found.error is None and found.faults == []
    assert found.refused == {}
    assert models(found) == models(alone)
    assert digest(found.models["movie-2"]) == digest(alone.models["movie-2"])


WORDS: tuple[dict[str, Any], ...] = (
    {"kind": "unknown"},
    {"kind": None},
    {"kind": "next"},
    {"number": 10**9},
    {"number": None},
    {"number": "1"},
)


def test_who_never_answers_its_job_lets_two_deadlines_pass_and_no_more(federations: Federations) -> None:
    """One says nothing, the others something else, again and again; nobody waits for them in the third request."""
    changes = {f"movie-{2 + k}": at("train evaluate", saying(**words)) for k, words in enumerate(WORDS)}
    changes["movie-4"] = at("train evaluate", lambda *_: ({"kind": "next"}, {}))  # with tensors it is refused at once
    silent = f"movie-{2 + len(WORDS)}"
    changes[silent] = at("train evaluate", lambda *_: None)
    found = federations.run("silent", changes, names=(*HONEST, *changes), deadline=2.0)
    ends_well(found)
    for name in changes:
        told = [note for note in found.notes if f" of {name} " in note]
        reasons = [note.partition(": ")[2] for note in told]
        waits = reasons.count("no answer within 2 seconds")
        sent_away = name in ("movie-2", "movie-3")  # in the first request, or in the second where it answered late
        assert waits == 2 or (waits == 1 and sent_away)
        assert all(reason.startswith(("it let 2 deadlines pass", "it has been away")) for reason in reasons[waits:]), (
            reasons
        )
        assert len(reasons) == 3
    assert found.refused["movie-2"] == "movie-2 says 'unknown'; allowed: register, next, result, failed, cut, kept"
