"""Multiple choice by log-likelihood: the answer that a model finds likeliest among several.

    log p(choice | prompt) = sum of the log-probabilities of its tokens

As lm-evaluation-harness 0.4 scores it (Gao et al. 2024, doi:10.5281/zenodo.12608602): without the tokens that end an
answer; `acc` takes the largest sum, `acc_norm` the largest sum by characters of the choice.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atlas_fl.client import batching, evaluation, options
from atlas_fl.client.job import ClientTokens, Job, Site
from atlas_fl.config.schema import DataConfig
from atlas_fl.data.chat import choices_of, last_answer
from atlas_fl.data.clients import ClientData
from atlas_fl.data.task import Rows, as_texts
from atlas_fl.errors import ConfigError
from atlas_fl.frozen import Frozen
from atlas_fl.models.chat_template import ChatTemplate
from atlas_fl.models.tokenization import EncodedExamples, TextEncoder
from atlas_fl.params import Params, Split
from atlas_fl.setup.assembly import encoders, length_limit

OWN_ANSWERS = ("answers",)
"""The choices that are the different answers of a client's training rows."""
MOST_CHOICES = 100


class Choices(Frozen):
    """Prompts of a client with the answers that there are to each."""

    encoded: EncodedExamples
    """Every choice of the first prompt, then of the second and so on."""
    texts: tuple[tuple[str, ...], ...]
    correct: tuple[int, ...]
    """By prompt the index of the reference."""
    left_out: int
    """Rows whose reference is none of the choices."""


def find_choices(
    client: ClientData, split: Split, *, given: Sequence[str], site: Site, config: DataConfig
) -> Choices | None:
    """The prompts of a split whose reference is among the choices: those that are given, or the row's own.

    None where there is no such row.

    Raises:
        ConfigError: the client has too many different answers.
    """
    task, rows = client.task, client.splits[split]
    if not task.writes:
        return None
    rows = as_texts(rows, task=task.name)
    references = _references(rows, is_chat=task.chat)
    if tuple(given) == OWN_ANSWERS:
        given = sorted(set(_references(as_texts(client.train, task=task.name), is_chat=task.chat)))
        if len(given) > MOST_CHOICES:
            raise ConfigError(
                f"the training rows of {client.name} have {len(given)} different answers, and --choices answers takes"
                f" at most {MOST_CHOICES}; name some, as in --choices yes no"
            )
    choices = [tuple(given or (choices_of(text) if task.chat else ())) for text in rows.text]
    # among less than two there is nothing to choose
    kept = [index for index, texts in enumerate(choices) if len(texts) > 1 and references[index] in texts]
    if not kept:
        return None
    chosen, offered = rows.take(kept), tuple(choices[index] for index in kept)
    limit, tokenizer = length_limit(task, config, site.backbone), site.backbone.tokenizer
    _, encode_prompt = encoders(task, site.backbone)
    contexts = [""] * len(kept)
    if task.chat:
        template = ChatTemplate(tokenizer, task.template)
        contexts = [template.prompt(text) for text in chosen.text]
    encoder = TextEncoder(tokenizer=tokenizer, max_length=limit)
    encoded = encoder.choices(encode_prompt(chosen, limit), contexts, offered)
    correct = tuple(offered[place].index(references[index]) for place, index in enumerate(kept))
    return Choices(encoded=encoded, texts=offered, correct=correct, left_out=sum(map(bool, choices)) - len(kept))


def _references(rows: Rows, *, is_chat: bool) -> list[str]:
    return [last_answer(text) for text in rows.text] if is_chat else list(rows.pair or [""] * len(rows))


def score_choices(choices: Choices, params: Params, *, client: str, site: Site) -> dict[str, float]:
    """Shares of the prompts to which the reference is the likeliest choice (`acc`), or by character (`acc_norm`)."""
    found = log_likelihoods(choices, params, client=client, site=site)
    by_length = [own / np.asarray([len(text) for text in texts]) for own, texts in zip(found, choices.texts)]
    # to NaN there is no likeliest
    hits = [
        [np.isfinite(own).all() and own.argmax() == correct for own, correct in zip(values, choices.correct)]
        for values in (found, by_length)
    ]
    return {name: float(np.mean(own)) for name, own in zip(("acc", "acc_norm"), hits, strict=True)}


def log_likelihoods(choices: Choices, params: Params, *, client: str, site: Site) -> list[np.ndarray]:
    """log p(choice | prompt) of every choice, by prompt; all choices of a prompt are in one pack."""
    stops = np.cumsum([len(texts) for texts in choices.texts])
    indices = np.split(np.arange(stops[-1]), stops[:-1])
    tokens = choices.encoded.lengths
    found = []
    for pack in batching.greedy_packs([(own, float(tokens[own].sum())) for own in indices], site.max_tokens):
        part = choices.encoded.take(np.concatenate(pack))
        data = {client: ClientTokens(task=site.data[client].task, splits={"test": part})}
        job = Job(client=client, params=params, round=0, options=options.EvaluateOptions(split="test", outcomes=True))
        (update,) = evaluation.evaluate([job], replace(site, data=data))
        outcomes = update.reported[evaluation.OUTCOMES]
        losses = np.split(outcomes["outputs"].numpy()[:, 0], np.cumsum(outcomes["rows"].numpy())[:-1])
        sums = np.empty(len(part))
        sums[batching.in_order(part.lengths)] = [-own.sum(dtype=np.float64) for own in losses]
        found.extend(np.split(sums, np.cumsum([len(own) for own in pack])[:-1]))
    return found
