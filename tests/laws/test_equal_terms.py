"""Equal terms, over the registry: alike clients, steps of head and body, tuning, and answers that are no numbers."""

import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atlas_fl.aggregation.matrices import Federation
from atlas_fl.aggregation.rules import Answers
from atlas_fl.client.job import Job
from atlas_fl.client.local_training import num_head_steps, num_steps, train
from atlas_fl.client.options import TrainOptions
from atlas_fl.config import Config, with_values
from atlas_fl.config.methods import with_method_settings
from atlas_fl.config.presets import find_preset
from atlas_fl.data.metrics import scores
from atlas_fl.data.task import METRICS as TASK_METRICS
from atlas_fl.data.task import MULTILABEL_METRICS, Task
from atlas_fl.experiment.tuning import KNOBS, candidates
from atlas_fl.methods.registry import METHODS, RULES, find_method
from atlas_fl.params import HEAD, LORA_A, LORA_B, Params, flatten_by_client, is_last_layer
from atlas_fl.planning.planner import make_plan
from atlas_fl.setup.options import train_options
from tests.aggregation.federations import server_step

ALL = (*RULES, *METHODS)
CLIENTS = tuple("abcdefgh")
NOISE, SIGNAL = 3.0, 1.0
"""Mean square of a client's error, and the square of what all are after; an average over eight has an error of 3/8."""
BODY, TOP = "layer.0.q", "head.weight"


def of_method(name: str, **values: Any) -> Config:
    """The config of this method."""
    return with_method_settings(with_values(Config(), {"strategy": name, **values}))


def alike(seed: int) -> tuple[Params, dict[str, Params], dict[str, Params]]:
    """(what all are after, the updates, the halves) of clients that differ by noise alone, in B and in the head."""
    draw = torch.Generator().manual_seed(seed)

    def vector(shape: tuple[int, int], square: float) -> torch.Tensor:
        drawn = torch.randn(shape, generator=draw)
        return drawn * (square / drawn.numel()) ** 0.5

    shapes = {BODY + LORA_B: (40, 4), TOP: (4, 40)}
    fixed = {BODY + LORA_A: torch.eye(4, 32)}
    truth = {key: vector(shape, SIGNAL) for key, shape in shapes.items()}
    updates, halves = {}, {}
    for client in CLIENTS:
        first, second = ({key: truth[key] + vector(shape, 2 * NOISE) for key, shape in shapes.items()} for _ in "12")
        updates[client] = fixed | {key: (first[key] + second[key]) / 2 for key in shapes}
        halves[client] = flatten_by_client({"first": fixed | first, "second": fixed | second})
    return fixed | truth, updates, halves


def errors(name: str, seed: int) -> dict[str, float]:
    """Mean square error of the clients' models after a step of this method, in errors of the average of all."""
    truth, updates, halves = alike(seed)
    row = METHODS.get(name)
    values = {"space": "factors", "scale": lambda _: 1.0, "last_aggregation": 60}
    method = find_method(
        row.rule if row else name, **values | (dict(row.settings) | dict(row.suggested) if row else {})
    )
    federation = Federation(
        clients=CLIENTS,
        weights=np.full(8, 100.0),
        clusters=np.zeros(8, np.int64),
        adjacency=1 - np.eye(8),
        head_groups=("t",) * 8,
        importance=np.ones((8, 1)),
        layer_of={BODY: 0},
    )
    before = {client: {**truth, BODY + LORA_B: torch.zeros(40, 4), TOP: torch.zeros(4, 40)} for client in CLIENTS}
    state = method.init(before)
    if method.report == "halves":
        state = method.record_reports(state, halves)
    if method.report == "class_features":
        features = {"counts": torch.full((4,), 25), "means": truth[TOP].double(), "variances": torch.ones(4).double()}
        state = method.record_reports(state, dict.fromkeys(CLIENTS, features))
    answers = Answers(
        metrics={client: {"loss": 1.0, "steps": 8.0} for client in CLIENTS}, validation=dict.fromkeys(CLIENTS, 0.5)
    )
    models = server_step(method, state, before, updates, federation, round=31, answers=answers).client_models

    def dense(params: Params, part: str) -> torch.Tensor:
        return params[TOP] if part == "head" else params[BODY + LORA_B] @ params[BODY + LORA_A]

    return {
        part: float(np.mean([float((dense(one, part) - dense(truth, part)).square().sum()) for one in models.values()]))
        / (NOISE / 8)
        for part in ("body", "head")
    }


LEAVES_ALONE = {"local", "centralized", "linear_probe", "local_prior", "fedsa"}
"""Methods that leave the body and the head as they were trained; of FedSA it is B that stays."""
OWN_HEADS = {"fedper", "fedrep", "fedbabu", "fedalt", "fedalt_fixed"}
BOUND_OF = {
    **dict.fromkeys(("median", "kriging"), 1.5),
    "stb": 2.0,
    # without the part that they put into the frozen weights
    **dict.fromkeys(("fedavg_stacked", "flora", "fedavg_in_levels", "hilora"), 3.0),
    **dict.fromkeys(("pfedgraph", "mta", "mta_minimax"), 3.5),
    **dict.fromkeys(("fedamp", "fedavg_by_distance"), 4.0),
    **dict.fromkeys(("krum", "atlas_laplacian", "atlas_pad", "atlas_truncate"), 8.0),
}
"""Errors of an average that a rule may have whose rows follow noise, leave clients out or take a step of a tenth.

Of all others at most 1.25."""
NO_AVERAGE = {
    **dict.fromkeys(("fedadagrad", "fedyogi", "fedadam"), "steps of the server's optimizer"),
    **dict.fromkeys(("fedavg_dynamic", "feddyn"), "a step that its correction lengthens"),
    **dict.fromkeys(("fedavg_by_arrival", "fedbuff"), "a step in which late updates count less"),
    **dict.fromkeys(("ties", "dare"), "parts of updates, enlarged"),
    **dict.fromkeys(("fedavg_of_cores", "fedsb"), "adapters of another form"),
}
"""Methods whose step among alike clients is no average, each with its reason."""


@pytest.mark.parametrize("name", [name for name in ALL if name not in NO_AVERAGE])
def test_among_alike_clients_a_rule_is_as_good_as_fedavg_within_noise(name: str) -> None:
    found = [errors(name, seed) for seed in range(4)]
    for part in ("body", "head"):
        error = float(np.mean([one[part] for one in found]))
        if name in LEAVES_ALONE or (part == "head" and name in OWN_HEADS):
            assert error == pytest.approx(8.0, rel=0.1), part
        else:
            assert error < BOUND_OF.get(name, 1.25), part


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3001, pytest.param(9001, marks=pytest.mark.product)])
def test_eight_alike_clients_of_trec_are_one_cluster(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atlas_fl.setup.options.IMPORTANCE_BATCHES", 1)  # ranks are not looked at
    base = find_preset("label-skew", dial=0)
    plan = make_plan(with_values(base, {"strategy": "fedavg_cluster", "seed": seed}))
    assert [client.cluster for client in plan.clients] == [0] * 8 and not plan.clustering["structure"]["found"]


EXAMPLES, BATCH, EPOCHS = 14, 4, 2
"""Four batches a pass, eight steps a round."""
PARTS = ("A", "B", "head", "core")
STEPS_OF: Mapping[str, tuple[int, int, int, int]] = {
    # Collins et al. 2021, algorithm 1: ten passes of the head, then all of the body's
    "fedrep": (8, 8, 40, 0),
    # Xu et al. 2023: one pass of the classifier, then all of the extractor's
    "fedpac": (8, 8, 4, 0),
    "fedbabu": (8, 8, 0, 0),
    "linear_probe": (0, 0, 8, 0),
    **dict.fromkeys(("ffa", "fedsvd"), (0, 8, 8, 0)),
    "rolora": (0, 8, 8, 0),
    **dict.fromkeys(("fedsb", "ravan"), (0, 0, 8, 8)),
}
"""Steps of A, B, head and what stands between A and B in round one, as the method's paper says; of others 8, 8, 8."""
LATER = {("rolora", 2): (8, 0, 8, 0), ("fedbabu", 10): (8, 8, 8, 0), ("fedavg_ft", 10): (8, 8, 8, 0)}
"""The same in a round that differs from the first one, of ten."""


def options_of(name: str) -> TrainOptions:
    """The options of training of this method."""
    values = {"local_epochs": EPOCHS, "batch_size": BATCH, "rounds": 10, "audit": False}
    return train_options(of_method(name, **values), with_images=False)


def steps_of(options: TrainOptions, round: int) -> tuple[int, ...]:
    """Steps in which each part moves."""
    total, first = (count(EXAMPLES, options, round=round) for count in (num_steps, num_head_steps))
    names = ("q" + LORA_A, "q" + LORA_B, HEAD + "weight", "q.lora_core")
    return tuple(
        sum(
            options.trains(name, round=round) and options.moves(name, round=round, is_head_step=step < first)
            for step in range(total)
        )
        * (name != names[3] or options.trained_parts == "core")
        for name in names
    )


@pytest.mark.parametrize("name", ALL)
def test_head_and_body_take_the_steps_that_the_paper_says(name: str) -> None:
    options = options_of(name)
    rows = {1: STEPS_OF.get(name, (8, 8, 8, 0)), **{at: row for (one, at), row in LATER.items() if one == name}}
    assert {at: steps_of(options, at) for at in rows} == rows
    assert (options.head_rate, options.half, options.most) == (1.0, None, None)


@cache
def trained_ways() -> dict[tuple[object, ...], str]:
    """A method of each way to train that the small client can take: its parts and the passes of the head."""
    ways: dict[tuple[object, ...], str] = {}
    for name in ALL:
        options = options_of(name)
        if options.trained_parts != "core":
            ways.setdefault((options.trained_parts, options.head_epochs), name)
    return ways


@pytest.mark.parametrize("half", [None, 0, 1])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "fedrep")) for name in trained_ways().values()]
)
def test_clients_and_their_halves_take_these_steps(client_of: Callable[..., Any], name: str, half: int | None) -> None:
    site, params = client_of(examples=EXAMPLES)
    moved = dict.fromkeys(params, 0)
    last = dict(params)

    def watch(_done: int, live: Mapping[int, Params]) -> tuple[int, ...]:
        for key, tensor in live[0].items():
            moved[key] += not torch.equal(tensor, last[key])
            last[key] = tensor.detach().clone()
        return ()

    options = options_of(name)
    options = TrainOptions(**{**vars(options), "half": half, "lr": 1e-2, "second_model": "none"})
    train([Job(client="a-0", params=params, round=1, options=options)], site, watch=watch)
    body_a, body_b, head, _ = STEPS_OF.get(name, (8, 8, 8, 0))
    for key, steps in moved.items():
        of_head = head if is_last_layer(key) or options.trained_parts != "last_layer_then_rest" else body_b
        assert steps == (of_head if key.startswith(HEAD) else body_a if key.endswith(LORA_A) else body_b), key


@pytest.mark.parametrize("number", [4, 8])
def test_tuning_gives_every_method_one_grid_of_rates_and_knobs_of_its_own(number: int) -> None:
    grids = {name: candidates(name, number, lr=1e-2) for name in ALL}
    assert {tuple(trial["lr"] for trial in grid) for grid in grids.values()} == {
        tuple(1e-2 * factor for factor in (1, 2, 0.5, 4, 0.25, 8, 0.125, 16)[:number])
    }
    for name, grid in grids.items():
        knobs = {knob for trial in grid for knob in trial} - {"lr"}
        assert knobs == KNOBS.get(name, {}).keys() and "trained_parts" not in knobs, name
    assert not {"kriging", "atlas"} & KNOBS.keys()


NOT_COMPARED = {
    **dict.fromkeys(("centralized", "fedavg_oracle"), "references that no federation can have"),
    **dict.fromkeys(("median", "trimmed_mean", "krum", "multi_krum", "geometric_median"), "against attackers"),
    **dict.fromkeys(("atlas_laplacian", "atlas_no_laplacian", "atlas_pad", "atlas_truncate"), "earlier rules of ours"),
    **dict.fromkeys(("fedavg_cluster_ft", "fedavg_cluster_prior", "mr_mtl_cluster"), "variants inside clusters"),
    **dict.fromkeys(("fedadagrad", "fedyogi"), "of the family of fedadam"),
    "fedalt_fixed": "a variant of fedalt",
    "hsplitlora": "it needs a cut",
    "shrinkage": "empirical_bayes of what secure sums tell",
}
"""Methods that the comparison of all leaves out, each with its reason; and rules that have the name of no method."""


def test_the_comparison_has_every_method_in_every_federation_tuned() -> None:
    plan = tomllib.loads((Path(__file__).parents[2] / "benchmarks/equal_terms.toml").read_text(encoding="utf-8"))
    parts = {row.rule for row in METHODS.values() if row.rule.startswith(("fedavg_", "classifier"))}
    compared = [*plan["main"]["methods"], *plan["others"]["methods"]]
    parts -= {"fedavg_cluster"}
    assert len(compared) == len({*compared}) and {*compared} | NOT_COMPARED.keys() >= {*ALL} - parts
    assert plan["main"]["trials"] > 1 < plan["others"]["trials"] and len(plan["federations"]) > 5


@pytest.mark.parametrize("metric", TASK_METRICS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("row", [0, 1])
def test_a_row_of_no_numbers_is_never_right(metric: Any, value: float, row: int) -> None:
    """All rows are right but for the one that is no number; of F1 class 1 counts alone."""
    kinds = [False] * (metric != "micro_f1") + [True] * (metric in MULTILABEL_METRICS)
    for multilabel in kinds:
        width = 1 if metric == "pearson" else 2
        task = Task(name="t", num_labels=width, metric=metric, load=pytest.fail, multilabel=multilabel)
        labels = np.array([[1, 0], [0, 1], [1, 0]]) if multilabel else np.array([0, 1, 0])
        logits = np.array([[2.0, -2.0], [-2.0, 2.0], [2.0, -2.0]], np.float32)
        if width == 1:
            labels, logits = np.array([0.0, 1.0, 2.0], np.float32), np.array([[0.0], [1.0], [2.0]], np.float32)
        broken = logits.copy()
        broken[row] = value
        right, found = (scores(task, labels, one) for one in (logits, broken))
        assert right["primary"] == pytest.approx(1) and not np.isfinite(found["loss"])
        assert found["primary"] < 0.999 or (metric, row) == ("f1", 0), multilabel
