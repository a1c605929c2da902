"""Property inference from fingerprints: which share of a client's texts has a label, or a word?

The attack with shadow clients of Ateniese et al. 2015 (arXiv:1306.4447) and Ganju et al. 2018 (CCS,
doi:10.1145/3243734.3243834). The server has texts of the task, here those of its other clients. It makes shadow clients
of known shares, takes their sketches, and fits ridge regression from sketch to share. Then clients of other draws are
made from the attacked client's examples, and their shares are predicted.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from atlas_fl.client.fingerprint import FIRST, SECOND
from atlas_fl.client.job import make_jobs
from atlas_fl.data.clients import ClientData
from atlas_fl.errors import ConfigError
from atlas_fl.events import OnEvent
from atlas_fl.models.tokenization import EncodedExamples, concatenate
from atlas_fl.privacy_attacks.membership import check_shadows, initial_model, others_of, shadow_engine
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
    from sklearn.linear_model import RidgeCV

    check_shadows(client, shadows=shadows)
    data = assembly.site.data
    others = concatenate([data[one.name].splits["train"] for one in others_of(assembly, client)])
    pools = [others, data[client.name].splits["train"]]
    label, token = int(np.bincount(pools[1].labels).argmax()), common_token(pools[1])
    word = assembly.site.backbone.tokenizer.convert_ids_to_tokens(token)
    properties = {
        f"label {label}": [pool.labels == label for pool in pools],
        f"word {word}": [holds(pool, token) for pool in pools],
    }
    rows = []
    for name, sides in properties.items():
        size = int(min(np.bincount(has, minlength=2).min() for has in sides) / LARGEST)
        if size < LEAST_EXAMPLES:
            raise ConfigError(
                f"the examples of {client.name} and of its task make clients of {size} with any share of {name};"
                f" allowed: at least {LEAST_EXAMPLES}; give more (--samples)"
            )
        shares, draw = np.linspace(SMALLEST, LARGEST, shadows), generator(assembly.config.run.seed, "attack", name)
        made = [
            pool.take(_draw_share(has, round(share * size), size, draw))
            for pool, has in zip(pools, sides, strict=True)
            for share in shares
        ]
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
    assembly: Assembly, client: ClientData, made: Sequence[EncodedExamples], *, on_event: OnEvent
) -> np.ndarray:
    """The mean of the two sketches that clients with these examples would send, (clients, sketch_dim)."""
    names = [f"shadow-{index}" for index in range(len(made))]
    engine = shadow_engine(assembly, client, dict(zip(names, made, strict=True)), on_event=on_event)
    models = dict.fromkeys(names, initial_model(assembly, client))
    updates = engine.run("fingerprint", make_jobs(models, fingerprint_options(assembly.config), round=0))
    return np.stack([(one.params[FIRST] + one.params[SECOND]).numpy() / 2 for one in updates])


def _draw_share(has: np.ndarray, count: int, size: int, draw: np.random.Generator) -> np.ndarray:
    """Places of so many examples, `count` of them with the property."""
    inside = draw.choice(np.flatnonzero(has), count, replace=False)
    outside = draw.choice(np.flatnonzero(~has), size - count, replace=False)
    return draw.permutation(np.concatenate([inside, outside]))
