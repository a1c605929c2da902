"""Preferences: the losses of chosen and rejected answers (DPO, ORPO), and the share preferred.

DPO (Rafailov et al. 2023, arXiv:2305.18290) raises the chosen answer's reward over the rejected one's, where the reward
of an answer y to x is `beta log(pi(y | x) / pi_ref(y | x))`. The reference pi_ref is the frozen model without adapters,
in every round and under every method.

ORPO (Hong, Lee and Thorne 2024, arXiv:2403.07691) has no reference: with p the geometric mean of the probabilities of
an answer's tokens and odds = p / (1 - p),

    L = -log pi(chosen) a token - lambda log sigmoid(log odds(chosen) - log odds(rejected))          equations 6 and 7

The first term is of answers alone here; in the authors' program, and in TRL's, it is of the prompt too.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from atlas_fl.client.batching import forward, rows_in_order
from atlas_fl.client.job import Job, Site, initial_params
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import Params

CERTAIN = 1e-6
"""Least loss of a token for which odds are finite."""


def sequence_log_probs(logits: Tensor, targets: Tensor, counts: Sequence[int]) -> Tensor:
    """Log probability of the answers of every sequence, (sequences,) float32.

    `logits` are (tokens, vocabulary) of the tokens to be written, `targets` (tokens,), of which each sequence has so
    many as `counts` says.
    """
    losses = nn.functional.cross_entropy(logits, targets, reduction="none")
    return -torch.stack([own.sum() for own in torch.split(losses, list(counts))])


def preference_loss(log_probs: Tensor, reference: Tensor, *, beta: float, smoothing: float = 0.0) -> Tensor:
    """Mean of `-log sigmoid(m)` over pairs, where m is how much more reward the chosen answer has than the rejected.

    Both tensors are (2 pairs,): the chosen answers and then the rejected ones. `smoothing` is the share of pairs that
    are taken to be the wrong way round, with the loss `-log sigmoid(-m)`.
    """
    chosen, rejected = (log_probs - reference).chunk(2)
    margin = beta * (chosen - rejected)
    right, wrong = nn.functional.logsigmoid(margin), nn.functional.logsigmoid(-margin)
    return -((1 - smoothing) * right + smoothing * wrong).mean()


def odds_ratio_loss(log_probs: Tensor, counts: Tensor, *, weight: float) -> Tensor:
    """ORPO: the mean loss of the chosen answers' tokens, and the mean of `-log sigmoid` of the log odds ratio.

    Both tensors are (2 pairs,), float32: the chosen answers and then the rejected ones, with their numbers of tokens.
    """
    means = (log_probs / counts).clamp(max=-CERTAIN)
    chosen, rejected = (means - torch.log(-torch.expm1(means))).chunk(2)
    pairs = len(chosen)
    supervised = -log_probs[:pairs].sum() / counts[:pairs].sum()
    return supervised - weight * nn.functional.logsigmoid(chosen - rejected).mean()


def reference_log_probs(client: str, examples: EncodedExamples, site: Site) -> np.ndarray:
    """Log probabilities of the chosen answers and then of the rejected ones under the frozen model, (2n,) float32.

    They are computed once for a split, whoever asks.
    """
    if examples.digest not in site.references:
        # B is zero: what these adapters add is nothing, to the bit
        ranks = dict.fromkeys(site.modules, 1)
        frozen = initial_params(site.backbone, site.modules, ranks=ranks, task=site.data[client].task, seed=0)
        site.references[examples.digest] = _log_probs(examples.both, frozen, site)
    return site.references[examples.digest]


def score_preferences(job: Job, site: Site) -> dict[str, float]:
    """Share of held-out pairs whose chosen answer has the greater reward; empty where nothing is rejected.

    Equal rewards, as all of the frozen model are, prefer neither.
    """
    examples = site.data[job.client].splits[job.options.split]
    if examples.rejected is None or job.options.split == "train":
        return {}
    rewards = _log_probs(examples.both, job.params, site) - reference_log_probs(job.client, examples, site)
    chosen, rejected = np.split(rewards, 2)
    return {"preferred": float(np.mean(chosen > rejected))}


@torch.no_grad()
def _log_probs(examples: EncodedExamples, params: Params, site: Site) -> np.ndarray:
    """Log probability of the answers of every example under one model, (n,) float32, in rows of these alone."""
    placed = {key: tensor.to(site.backbone.device, copy=True) for key, tensor in params.items()}
    log_probs = np.empty(len(examples), dtype=np.float32)
    for places, part, row in rows_in_order(examples, site):
        with forward(row, [placed], site) as (logits,):
            log_probs[places] = sequence_log_probs(logits, row.labels[0], part.num_targets.tolist()).cpu()
    return log_probs
