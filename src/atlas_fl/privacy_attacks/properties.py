"""Property inference from fingerprints: which share of a client's texts has a label, or a word?

The attack with shadow clients of Ateniese et al. 2015 (arXiv:1306.4447) and Ganju et al. 2018 (CCS,
doi:10.1145/3243734.3243834). The server has texts of the task, here those of its other clients. It makes shadow clients
of known shares, takes their sketches, and fits ridge regression from sketch to share. Then clients of other draws are
made from the attacked client's examples, and their shares are predicted.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.linear_model import RidgeCV

from atlas_fl.client.fingerprint import FIRST, SECOND
from atlas_fl.client.job import make_jobs
from atlas_fl.data.clients import ClientData
from atlas_fl.errors import ConfigError
from atlas_fl.events import OnEvent
from atlas_fl.models.tokenization import EncodedExamples, concatenate
from atlas_fl.params import Split
from atlas_fl.planning.planner import local_engine
from atlas_fl.privacy_attacks.membership import check_shadows, initial_model, others_of
from atlas_fl.rng import generator
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import fingerprint_options

SMALLEST, LARGEST = 0.1, 0.9
"""Shares in shadow clients."""
LEAST_EXAMPLES = 8


def infer_properties(
    assembly: Assembly, client: ClientData, *, shadows: int, on_event: OnEvent
) -> list[dict[str, Any]]:
    """Attack two shares in so many clients that are made from the client's examples.

    A row has the `property`, the number of `examples` of each, the mean `error` of the predicted shares, `error_chance`
    where the mean share is predicted for all, and the `correlation` of predicted and true shares.

    Raises ConfigError where the task has no other client, and where examples are too few.
    """
    check_shadows(client, shadows=shadows)
    others = [assembly.site.data[one.name].splits["train"] for one in others_of(assembly, client)]
    known, attacked = concatenate(others), assembly.site.data[client.name].splits["train"]
    label = int(np.bincount(attacked.labels).argmax())
    token = common_token(attacked)
    word = assembly.site.backbone.tokenizer.convert_ids_to_tokens(token)
    sides = {"known": known, "attacked": attacked}
    truths = {
        f"label {label}": {side: pool.labels == label for side, pool in sides.items()},
        f"word {word}": {side: holds(pool, token) for side, pool in sides.items()},
    }
    rows = []
    for name, has in truths.items():
        size = int(min(np.bincount(one, minlength=2).min() for one in has.values()) / LARGEST)
        if size < LEAST_EXAMPLES:
            raise ConfigError(
                f"the examples of {client.name} and of its task make clients of {size} with any share of {name};"
                f" allowed: at least {LEAST_EXAMPLES}; give more (--samples)"
            )
        shares, made = np.linspace(SMALLEST, LARGEST, shadows), {}
        for side, pool in sides.items():
            for index, share in enumerate(shares):
                draw = generator(assembly.config.run.seed, "attack", name, side, index)
                made[f"{side}-{index}"] = pool.take(_draw_share(has[side], round(share * size), size, draw))
        sketches = measure_sketches(assembly, client, made, on_event=on_event)
        model = RidgeCV(alphas=np.logspace(-4, 2, 25)).fit(sketches[:shadows], shares)
        predicted = model.predict(sketches[shadows:]).clip(0.0, 1.0)
        rows.append({"client": client.name, "property": name, "examples": size, **errors(predicted, shares)})
    return rows


def errors(predicted: np.ndarray, shares: np.ndarray) -> dict[str, float]:
    """Metrics of predicted and true shares.

    >>> errors(np.array([0.4, 0.6]), np.array([0.2, 0.8])) == {"error": 0.2, "error_chance": 0.3, "correlation": 1.0}
    True
    """
    correlation = float(np.corrcoef(predicted, shares)[0, 1]) if np.ptp(predicted) > 0 else 0.0
    error, chance = (float(np.abs(one - shares).mean()) for one in (predicted, shares.mean()))
    return {"error": round(error, 9), "error_chance": round(chance, 9), "correlation": round(correlation, 9)}


def common_token(pool: EncodedExamples) -> int:
    """The token that is nearest to being in half of the texts."""
    texts = np.repeat(np.arange(len(pool)), pool.lengths)
    counts = np.bincount(np.unique(np.stack([texts, pool.ids]), axis=1)[1])
    return int(np.abs(counts - len(pool) / 2).argmin())


def holds(pool: EncodedExamples, token: int) -> np.ndarray:
    """Return which texts hold this token, (examples,) bool."""
    return np.logical_or.reduceat(pool.ids == token, pool.offsets[:-1])


def measure_sketches(
    assembly: Assembly, client: ClientData, made: dict[str, EncodedExamples], *, on_event: OnEvent
) -> np.ndarray:
    """The mean of the two sketches that each of these clients would send, (clients, sketch_dim)."""
    own, data = assembly.site.data[client.name], {}
    for name, train in made.items():
        splits: dict[Split, EncodedExamples] = {**own.splits, "train": train}
        data[name] = replace(own, splits=splits, prompts={})
    engine = local_engine(replace(assembly, site=replace(assembly.site, data=data, secrets={})), on_event)
    models = dict.fromkeys(made, initial_model(assembly, client))
    updates = engine.run("fingerprint", make_jobs(models, fingerprint_options(assembly.config), round=0))
    return np.stack([(one.params[FIRST] + one.params[SECOND]).numpy() / 2 for one in updates])


def _draw_share(has: np.ndarray, count: int, size: int, draw: np.random.Generator) -> np.ndarray:
    """Places of so many examples, `count` of them with the property."""
    inside = draw.choice(np.flatnonzero(has), count, replace=False)
    outside = draw.choice(np.flatnonzero(~has), size - count, replace=False)
    return draw.permutation(np.concatenate([inside, outside]))
