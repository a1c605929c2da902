"""What a site lets out beside a model: what the job asked for, and only then."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from atlas_fl.client.job import Job
from atlas_fl.client.options import EvaluateOptions, ImportanceOptions, ScaleOptions, TrainOptions
from atlas_fl.config import Config, validate, with_values
from atlas_fl.deployment.job_policy import JobPolicy, Outline
from atlas_fl.deployment.start_models import start_models_of
from atlas_fl.errors import ProtocolError
from atlas_fl.params import flatten_by_client
from atlas_fl.runtime.protocol.client_metadata import read_metadata
from atlas_fl.setup.options import importance_options, train_options
from tests.runtime.coordinator.test_coordinator import CENSUS

MODEL = {"q.lora_A": torch.ones(2, 5), "q.lora_B": torch.zeros(4, 2), "head.weight": torch.ones(3, 4)}
SENT = {"metrics": torch.zeros(3), **{f"param/{key}": tensor for key, tensor in MODEL.items()}}
FEATURES = {f"report/class_features/{name}": torch.zeros(3) for name in ("counts", "means", "variances")}
HALVES = flatten_by_client({f"report/halves/{half}": MODEL for half in ("first", "second")})


def policy(config: Config) -> JobPolicy:
    outline = Outline(
        like=MODEL, names=lambda _: frozenset(MODEL), initial=lambda _: MODEL, places=lambda *_: (), blocks=3
    )
    return JobPolicy(
        config=config,
        client="a",
        metadata=replace(read_metadata(CENSUS), task="movie", num_labels=3),
        device="cpu_2gb",
        outline=outline,
        starts=start_models_of(config, outline.initial, examples=20, images=False),
        most_rounds=10,
    )


@pytest.mark.parametrize(("report", "own"), [("none", {}), ("class_features", FEATURES), ("halves", HALVES)])
def test_a_report_leaves_with_the_answer_to_the_job_that_asked_for_it(
    report: str, own: dict[str, torch.Tensor]
) -> None:
    job = Job(client="a", params=MODEL, round=1, options=TrainOptions(seed=0, report=report))
    policy(Config()).check_answer("train", job, {**SENT, **own})
    for others in (FEATURES, HALVES, {"report/texts": torch.zeros(9)}):
        if others is not own:
            with pytest.raises(ProtocolError, match=r"'report/.*' with its answer to train, and .* what the settings"):
                policy(Config()).check_answer("train", job, {**SENT, **others})
    with pytest.raises(ProtocolError, match=r"'report/.*' with its answer to evaluate"):
        scored = replace(job, options=EvaluateOptions(split="test"))
        policy(Config()).check_answer("evaluate", scored, {"metrics": SENT["metrics"], **(own or FEATURES)})


@pytest.mark.parametrize(
    ("action", "options"),
    [
        ("evaluate", EvaluateOptions(split="test")),
        ("importance", ImportanceOptions(kind="gradient", train=TrainOptions(seed=0), batches=1)),
        ("scale", ScaleOptions(examples=1)),
    ],
)
def test_no_model_leaves_with_an_answer_that_has_none(action: str, options: Any) -> None:
    job = Job(client="a", params=MODEL, round=1, options=options)
    policy(Config()).check_answer(action, job, {"metrics": SENT["metrics"]})
    with pytest.raises(ProtocolError, match=rf"'param/q.lora_A' with its answer to {action}"):
        policy(Config()).check_answer(action, job, SENT)


def test_halves_have_no_tensor_that_is_not_shared() -> None:
    """Settings with halves share all; whatever a job says, the rest stays."""
    kept = with_values(Config(), {"strategy": "fedper", "share": "A+B"})
    job = Job(client="a", params=MODEL, round=1, options=TrainOptions(seed=0, report="halves"))
    shared = {key: tensor for key, tensor in {**SENT, **HALVES}.items() if "head" not in key}
    policy(kept).check_answer("train", job, shared)
    with pytest.raises(ProtocolError, match=r"'report/halves/first/head.weight' with its answer to train"):
        policy(kept).check_answer("train", job, {**shared, "report/halves/first/head.weight": MODEL["head.weight"]})


def test_class_means_come_with_training_from_the_second_round_to_the_last_that_is_averaged() -> None:
    config = validate(with_values(Config(), {"strategy": "fedpac", "rounds": 4, "personal_rounds": 1}))
    means = {"means": torch.zeros(3, 4), "seen": torch.ones(3, dtype=torch.bool)}
    for round in (1, 2, 3, 4):
        job = Job(client="a", params=MODEL, round=round, options=TrainOptions(seed=0), sent={"centroids": means})
        policy(config).check_model("train", replace(job, sent={}), is_own=False, own={})
        if round in (2, 3):
            policy(config).check_model("train", job, is_own=False, own={})
            continue
        with pytest.raises(
            ProtocolError, match=rf"train in round {round} with \['centroids'\] beside the model, and .* none then"
        ):
            policy(config).check_model("train", job, is_own=False, own={})


def test_a_site_counts_the_rounds_in_which_it_trains() -> None:
    """The settings leave the choice of the rounds to the server, so a share of the clients is no bound."""
    config = validate(with_values(Config(), {"rounds": 40, "participation": 0.1}))
    site = policy(config)
    for round in (*range(1, 11), 3):
        site._check_rounds(Job(client="a", params=MODEL, round=round, options=TrainOptions(seed=0)))
    with pytest.raises(ProtocolError, match=r"training in a 11th round, and .* 10 .*--max-rounds-per-example"):
        site._check_rounds(Job(client="a", params=MODEL, round=11, options=TrainOptions(seed=0)))


def test_a_job_of_an_earlier_round_is_held_to_what_every_job_is() -> None:
    """A late site trains in a round that is past; a server gains no further look at its examples by it."""
    site = policy(validate(with_values(Config(), {"strategy": "fedbuff", "ranks": "4", "rounds": 9})))
    options = train_options(site.config, with_images=False)

    def ask(round: int, *, move: float) -> None:
        job = Job(client="a", params={**MODEL, "q.lora_B": MODEL["q.lora_B"] + move}, round=round, options=options)
        site._check_action("train", job)
        site.check_model("train", job, is_own=False, own={})
        site._check_rounds(job)

    for round, move in ((5, 0.01), (2, 0.02), (2, 0.03), (2, 0.03)):
        ask(round, move=move)
    with pytest.raises(ProtocolError, match="train of round 2 with 3 different models; allowed: 2 a round"):
        ask(2, move=0.04)
    with pytest.raises(ProtocolError, match=r"train in round 10, and the settings .* say --rounds 9"):
        ask(10, move=0.01)


def test_under_differential_privacy_no_job_has_less_noise_or_another_look_at_the_examples() -> None:
    values = {"dp": "example", "epsilon": "3", "strategy": "fedavg", "ranks": "4", "alone": "none", "rounds": "2"}
    site = policy(validate(with_values(Config(), values)))
    options = train_options(site.config, with_images=False)
    site._check_action("train", Job(client="a", params=MODEL, round=2, options=options))
    for changes in ({"dp": "none"}, {"epsilon": 8.0}, {"epochs": 9}, {"batch_size": 2}, {"clip": 9.0}, {"rounds": 1}):
        other = replace(options, **changes)
        with pytest.raises(ProtocolError, match=f"train with {next(iter(changes))} .*; nothing was sent"):
            site._check_action("train", Job(client="a", params=MODEL, round=2, options=other))
    with pytest.raises(ProtocolError, match=r"train in round 3, and the settings .* say --rounds 2"):
        site._check_action("train", Job(client="a", params=MODEL, round=3, options=options))
    for action in ("importance", "fingerprint"):
        with pytest.raises(ProtocolError, match=rf"asks for {action}, and the settings .* say train, evaluate"):
            site._check_action(action, Job(client="a", params=MODEL, round=0, options=options))


def test_a_site_measures_importance_where_ranks_or_cuts_follow_it_alone() -> None:
    for ranks, is_asked in (("budget", True), ("8", False), ("uniform", False)):
        config = validate(with_values(Config(), {"ranks": ranks, "strategy": "fedavg"}))
        job = Job(client="a", params=MODEL, round=0, options=importance_options(config))
        if is_asked:
            policy(config)._check_action("importance", job)
            continue
        with pytest.raises(ProtocolError, match=r"the server asks for importance, and .* say .*train, evaluate"):
            policy(config)._check_action("importance", job)
