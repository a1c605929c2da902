"""Gains over training alone: intervals, the sentence, and the settings of the reference for every method."""

from pathlib import Path

import numpy as np
import pytest
import torch

from atlas_fl.config import Config, validate, with_values
from atlas_fl.data.task import Task
from atlas_fl.experiment.alone import LEVEL, RESAMPLES, reference_config, resample_scores
from atlas_fl.experiment.summary import gain_note
from atlas_fl.methods.registry import METHODS, RULES
from atlas_fl.setup.options import strategy_of
from atlas_fl.storage.run_folder import RunFolder


def task_of(metric: str, labels: int = 2) -> Task:
    return Task(name="t", num_labels=labels, metric=metric, load=lambda _: pytest.fail("nothing is read"))


def outcomes(hits: list[int], *, rows: list[int] | None = None) -> dict[str, torch.Tensor]:
    """Examples of class 1, recognised or not; with `rows` tokens of so many texts, right or not."""
    right = np.array(hits, np.float32)
    outputs = np.stack([1 - right, right], axis=1)
    labels = np.ones(len(hits) if rows is None else len(rows), np.int64)
    sizes = np.array(rows if rows is not None else [1] * len(hits), np.int64)
    return {
        name: torch.from_numpy(array) for name, array in (("outputs", outputs), ("labels", labels), ("rows", sizes))
    }


def gains(task: Task, together: dict[str, torch.Tensor], alone: dict[str, torch.Tensor]) -> np.ndarray:
    first, second = (resample_scores(task, own, rng=np.random.default_rng(0)) for own in (together, alone))
    return first - second


def test_the_interval_of_a_gain_is_that_of_paired_differences() -> None:
    # 30 examples are right together alone, 10 alone alone, 60 in both: the difference is .2 with a standard error of
    # sqrt((.4 - .04) / 100) = .06
    together, alone = [1] * 30 + [0] * 10 + [1] * 60, [0] * 30 + [1] * 10 + [1] * 60
    draws = gains(task_of("accuracy"), outcomes(together), outcomes(alone))
    assert draws.shape == (RESAMPLES,)
    assert draws.mean() == pytest.approx(0.2, abs=0.01) and draws.std() == pytest.approx(0.06, abs=0.005)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    assert (low, high) == pytest.approx((0.2 - 1.96 * 0.06, 0.2 + 1.96 * 0.06), abs=0.02)


def test_another_metric_is_computed_on_every_draw_and_accuracy_is_the_same_either_way() -> None:
    together, alone = outcomes([1] * 25 + [0] * 15), outcomes([1] * 20 + [0] * 20)
    by_metric = {metric: gains(task_of(metric), together, alone) for metric in ("accuracy", "f1", "mcc")}
    assert by_metric["accuracy"].mean() == pytest.approx(5 / 40, abs=0.01)
    # all examples are of class 1: precision is 1, and F1 is 2 r / (1 + r) of recalls 25/40 and 20/40
    assert by_metric["f1"].mean() == pytest.approx(2 * 0.625 / 1.625 - 2 * 0.5 / 1.5, abs=0.01)
    assert not by_metric["mcc"].any(), "with one class there is no correlation"


def test_texts_are_drawn_whole() -> None:
    # ten texts of four tokens, of which five are all right together and none alone: a share of texts, not of tokens
    writer = task_of("generation", 0)
    rows, together, alone = [4] * 10, [1] * 20 + [0] * 20, [0] * 40
    draws = gains(writer, outcomes(together, rows=rows), outcomes(alone, rows=rows))
    assert draws.std() == pytest.approx((0.5 * 0.5 / 10) ** 0.5, abs=0.02)


def test_all_runs_draw_the_same_examples() -> None:
    accuracy, own = task_of("accuracy"), outcomes([1, 0, 0, 1, 1] * 8)
    assert not gains(accuracy, own, own).any()
    assert gains(accuracy, own, outcomes([0, 1, 1, 0, 0] * 8)).std() > 0.1


def gain(value: float, *interval: float) -> dict[str, object]:
    return {"gain": value, "interval": list(interval)}


CLEAR, NOISE, LOSS = gain(0.1, 0.05, 0.15), gain(-0.01, -0.03, 0.02), gain(-0.05, -0.08, -0.01)
SENTENCES = {
    "all gain": ({"a": CLEAR, "b": CLEAR}, 2, "2 of 2 clients gain from training together, mean +0.050"),
    "one loses": (
        {"a": CLEAR, "b": CLEAR, "c": NOISE},
        3,
        "2 of 3 clients gain from training together, mean +0.050; c loses 0.010 (within noise)",
    ),
    "a sample": ({"a": CLEAR}, 40, "1 of 1 clients (a sample of 40) gains from training together, mean +0.050"),
    "equal": (
        {"a": gain(0.0, 0, 0), "b": LOSS},
        2,
        "0 of 2 clients gain from training together, mean +0.050; b loses 0.050, a neither gains nor loses",
    ),
    "many lose": (
        dict.fromkeys("abcde", LOSS),
        5,
        "0 of 5 clients gain from training together, mean +0.050; a loses 0.050, b loses 0.050, c loses 0.050, 2 more"
        " lose",
    ),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_one_sentence_says_who_gains(case: str) -> None:
    clients, of, sentence = SENTENCES[case]
    assert gain_note({"alone": {"clients": clients, "of": of, "mean": gain(0.05, 0.01, 0.09)}}) == sentence
    assert gain_note({}) == ""


@pytest.mark.parametrize("name", {**RULES, **METHODS})
def test_every_method_has_a_reference_that_sends_nothing(name: str) -> None:
    row = METHODS.get(name)
    personal = {"personal_rounds": 1} if row and "personal_rounds" in row.suggested else {}
    dynamic = {"proximal_mu": 0.1} if name == "fedavg_dynamic" else {}
    space = {"space": "factors"} if RULES.get(name) and RULES[name].in_factors else {}
    ranks = row.settings.get("ranks", "4") if row else "4"
    values = {"strategy": name, "ranks": ranks, "name": "run", **personal, **dynamic, **space}
    config = validate(with_values(Config(), values))
    reference = reference_config(config, RunFolder(Path("runs/run")))
    assert not strategy_of(reference).communicates
    assert reference.ranks == config.ranks and reference.data == config.data and reference.model == config.model
    assert (reference.run.alone, reference.run.name, reference.run.runs_dir) == ("none", "alone", "runs/run")
    kept = ("rounds", "local_epochs", "batch_size", "lr", "participation")
    assert all(getattr(reference.training, one) == getattr(config.training, one) for one in kept)
    assert reference.training.proximal_mu == 0 or not row or "proximal_mu" not in row.suggested
