"""Preferences: the loss by hand, rows of pairs, and the frozen model as reference, computed once."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from atlas_fl.client.evaluation import evaluate
from atlas_fl.client.job import ClientTokens, Job, Site
from atlas_fl.client.local_training import train
from atlas_fl.client.options import EvaluateOptions, TrainOptions
from atlas_fl.client.preferences import odds_ratio_loss, preference_loss, reference_log_probs, sequence_log_probs
from atlas_fl.data.task import Task
from atlas_fl.models.prefix_cache import PrefixCache
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import Params
from atlas_fl.runtime.reuse import site_key

TRAIN = TrainOptions(seed=3, epochs=2, batch_size=4, lr=2e-2, dpo_beta=0.5)


def answers(seed: int, *, count: int = 9) -> EncodedExamples:
    """Texts of two to five tokens, all of which but the first are answers."""
    source = np.random.default_rng(seed)
    lengths = source.integers(2, 6, size=count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.ones(offsets[-1], dtype=np.bool_)
    mask[offsets[:-1]] = False
    ids = source.integers(3, 30, size=offsets[-1])
    labels = np.zeros(count, dtype=np.int64)
    return EncodedExamples(ids=ids, types=np.zeros_like(ids), offsets=offsets, labels=labels, target_mask=mask)


@pytest.fixture
def pair_site(writer_of: Callable, spec_of: Callable) -> Callable[..., tuple[Site, list[Job]]]:
    """Makes the site of two clients with pairs, and their jobs; adapters are in the blocks from `first` on."""

    def make(first: int = 0, architecture: str = "qwen2", **changes: Any) -> tuple[Site, list[Job]]:
        tiny = writer_of(architecture)
        task = Task(name="a", num_labels=0, chat=True, load=lambda _: pytest.fail("nobody reads it"))
        data, jobs = {}, []
        for number in (0, 1):
            pairs = replace(answers(number), rejected=answers(number + 10))
            data[f"a-{number}"] = ClientTokens(task=task, splits=dict.fromkeys(("train", "validation", "test"), pairs))
        how: dict[str, Any] = {
            "targets": tiny.targets,
            "scale": lambda _: 2.0,
            "max_tokens": 64,
            "first_adapted": first,
        }
        site = Site(backbone=tiny.backbone, data=data, **{**how, **changes})
        for name in data:
            drawn = tiny.params(spec_of(name=name, ranks=(2, 2, 2)))
            params = {key: one for key, one in drawn.items() if key[: key.rindex(".")] in site.modules}
            jobs.append(Job(client=name, params=_frozen(params), round=1, options=TRAIN))
        return site, jobs

    return make


def _frozen(params: Params) -> Params:
    """The adapters with B of zero, which add nothing."""
    return {key: torch.zeros_like(one) if key.endswith("lora_B") else one for key, one in params.items()}


@pytest.mark.parametrize(
    ("smoothing", "expected"),
    [
        # rewards 0.5 * (1, 2) of the chosen and 0.5 * (-1, 4) of the rejected: the margins are 1 and -1
        (0.0, (math.log1p(math.exp(-1)) + math.log1p(math.exp(1))) / 2),
        (0.5, (math.log1p(math.exp(-1)) + math.log1p(math.exp(1))) / 2),
        (1.0, (math.log1p(math.exp(1)) + math.log1p(math.exp(-1))) / 2),
    ],
)
def test_the_loss_of_two_pairs_is_the_one_by_hand(smoothing: float, expected: float) -> None:
    log_probs, reference = torch.tensor([-4.0, -3.0, -7.0, -2.0]), torch.tensor([-5.0, -5.0, -6.0, -6.0])
    loss = preference_loss(log_probs, reference, beta=0.5, smoothing=smoothing)
    assert float(loss) == pytest.approx(expected, abs=1e-6)


def test_the_loss_of_one_pair_is_the_one_by_hand() -> None:
    """The margin is 0.1 * ((-4 + 5) - (-7 + 6)) = 0.2, and log(1 + e^-0.2) = 0.598139, log(1 + e^0.2) = 0.798139."""
    log_probs, reference = torch.tensor([-4.0, -7.0]), torch.tensor([-5.0, -6.0])
    losses = [float(preference_loss(log_probs, reference, beta=0.1, smoothing=share)) for share in (0.0, 0.25)]
    assert losses == pytest.approx([0.598139, 0.648139], abs=1e-6)


def test_the_odds_ratio_loss_of_one_pair_is_the_one_by_hand() -> None:
    """Tokens of 1/2 and of 1/5: odds of 1 and of 1/4, so that sigmoid(log 4) = 4/5; log 2 is the loss of a token."""
    log_probs, counts = torch.tensor([2 * math.log(0.5), 3 * math.log(0.2)]), torch.tensor([2.0, 3.0])
    loss = float(odds_ratio_loss(log_probs, counts, weight=0.3))
    assert loss == pytest.approx(math.log(2) - 0.3 * math.log(0.8), abs=1e-6)


def test_a_certain_answer_has_finite_odds() -> None:
    log_probs = torch.tensor([0.0, -3.0], requires_grad=True)
    odds_ratio_loss(log_probs, torch.tensor([2.0, 3.0]), weight=0.3).backward()
    assert log_probs.grad is not None and bool(log_probs.grad.isfinite().all())


def test_log_probabilities_are_summed_over_the_answers_of_each_sequence() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]))
    found = sequence_log_probs(logits, torch.tensor([0, 1, 0]), [2, 1])
    assert found.tolist() == pytest.approx([math.log(0.5 * 0.8), math.log(0.2)])


def test_what_is_taken_of_pairs_is_the_chosen_and_then_the_rejected() -> None:
    chosen, rejected = answers(0), answers(10)
    pairs, index = replace(chosen, rejected=rejected), np.array([4, 1])
    found = pairs.take_pairs(index)
    parts = [side.take(index) for side in (chosen, rejected)]
    assert np.array_equal(found.ids, np.concatenate([part.ids for part in parts]))
    assert np.array_equal(found.num_targets, np.concatenate([part.num_targets for part in parts]))
    assert pairs.step_lengths.tolist() == (chosen.lengths + rejected.lengths).tolist()
    assert pairs.step_targets.tolist() == (chosen.num_targets + rejected.num_targets).tolist()
    assert chosen.step_lengths.tolist() == chosen.lengths.tolist()
    other = replace(chosen, rejected=answers(11))
    assert len({one.digest for one in (chosen, pairs, other)}) == 3


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_training_raises_the_share_of_preferred_answers_from_none(pair_site: Callable, architecture: str) -> None:
    site, jobs = pair_site(architecture=architecture)
    updates = train([replace(job, options=replace(TRAIN, epochs=20)) for job in jobs], site)
    models = {"before": [job.params for job in jobs], "after": [update.params for update in updates]}
    found = {
        name: [
            update.metrics["preferred"]
            for update in evaluate(
                [
                    replace(job, params=params, options=EvaluateOptions(split="test"))
                    for job, params in zip(jobs, trained, strict=True)
                ],
                site,
            )
        ]
        for name, trained in models.items()
    }
    assert found["before"] == [0.0, 0.0], "the frozen model prefers neither"
    assert min(found["after"]) > 0.8
    assert len(site.references) == 2, "once for each split, however often it is asked for"


def test_odds_ratios_are_learned_without_a_reference(pair_site: Callable) -> None:
    site, jobs = pair_site()
    options = TrainOptions(seed=3, epochs=20, batch_size=4, lr=2e-2, orpo_lambda=0.5)
    updates = train([replace(job, options=options) for job in jobs], site)
    assert not site.references
    scored = [
        replace(job, params=update.params, options=EvaluateOptions(split="test"))
        for job, update in zip(jobs, updates, strict=True)
    ]
    assert min(update.metrics["preferred"] for update in evaluate(scored, site)) > 0.8


@pytest.mark.parametrize("options", [TRAIN, replace(TRAIN, dpo_beta=None, orpo_lambda=0.5)], ids=["DPO", "ORPO"])
def test_a_pack_trains_each_client_as_if_alone(pair_site: Callable, options: TrainOptions) -> None:
    site, jobs = pair_site()
    jobs = [replace(job, options=options) for job in jobs]
    together = train(jobs, site)
    alone = [train([job], site)[0] for job in jobs]
    assert together[0].metrics["loss"] != pytest.approx(math.log(2), abs=1e-3)
    for one, other in zip(together, alone, strict=True):
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=1e-6)
        for key, tensor in one.params.items():
            torch.testing.assert_close(tensor, other.params[key], atol=1e-5, rtol=1e-4)


def test_a_kept_prefix_changes_no_bit_of_training_and_scores(pair_site: Callable) -> None:
    results = []
    for budget in (0, 10**9):
        site, jobs = pair_site(first=2, prefix_cache=PrefixCache(budget_bytes=budget))
        updates = train(jobs, site)
        scored = [
            replace(job, params=one.params, options=EvaluateOptions(split="test")) for job, one in zip(jobs, updates)
        ]
        metrics = [{**one.metrics, "seconds": 0} for one in evaluate(scored, site)]
        results.append((updates, metrics))
        assert bool(site.prefix_cache.used_bytes) == bool(budget)
    (first, scores), (second, others) = results
    assert scores == others
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one.params[key], other.params[key]) for key in one.params)


def test_the_reference_is_the_frozen_model_whatever_the_adapters_are(pair_site: Callable) -> None:
    """Also where a client begins with adapters (`--init-adapter`)."""
    site, jobs = pair_site()
    examples = site.data["a-0"].splits["train"]
    trained = {key: torch.full_like(tensor, 0.3) for key, tensor in jobs[0].params.items()}
    (update,) = train([replace(jobs[0], params=trained, options=replace(TRAIN, lr=1e-9))], site)
    fresh, _ = pair_site()
    assert np.array_equal(reference_log_probs("a-0", examples, site), reference_log_probs("a-0", examples, fresh))
    assert update.metrics["loss"] != pytest.approx(math.log(2), abs=1e-2), "the adapters differ from the reference"


def test_results_are_reused_for_the_same_rejected_answers_alone(pair_site: Callable) -> None:
    site, _ = pair_site()
    tokens = site.data["a-0"]
    other = replace(tokens.splits["train"], rejected=answers(77))
    changed = replace(site, data={**site.data, "a-0": replace(tokens, splits={**tokens.splits, "train": other})})
    assert site_key(site) == site_key(pair_site()[0]) != site_key(changed)
