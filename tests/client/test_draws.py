"""What a client draws about its own examples: from its secret, which nobody else has, or in simulations by the seed."""

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from atlas_fl import client
from atlas_fl.client.batching import dropout_masks
from atlas_fl.client.draws import Draws
from atlas_fl.client.job import Job, Update
from atlas_fl.client.local_training import LocalTrainer, batches, positions
from atlas_fl.client.options import FingerprintOptions, ImportanceOptions, SensitivityOptions, TrainOptions
from atlas_fl.client.registry import ACTIONS
from atlas_fl.client.split_server import server_side_trainer
from atlas_fl.models.tokenization import encode_images
from atlas_fl.params import digest
from atlas_fl.rng import generator, torch_generator
from atlas_fl.split.channel import Cut
from atlas_fl.split.codec import simulated_secret
from tests.client.full.test_text import full_params
from tests.client.test_train import numbered
from tests.sources import MODULES, called, nodes

SECRET, OTHER = bytes(range(32)), bytes(range(1, 33))
TRAIN = TrainOptions(seed=2, lr=1e-2, batch_size=2)
LOOK = FingerprintOptions(kind="gradient", sketch_dim=16, train=TRAIN, batches=2, steps=2, samples=6)


def order(secret: bytes | None, *, count: int = 24, round: int = 1, name: str = "a-0", **changes: object) -> list[int]:
    job = Job(client=name, params={}, round=round, options=dataclasses.replace(TRAIN, **changes))
    found = [batch.labels for batch in batches(numbered(count), job, secret=secret)]
    return np.concatenate(found).tolist()


# What an attacker can and cannot do

ROUNDS, MOMENTUM = 36, 0.9


def solved(observed: np.ndarray, orders: list[list[int]]) -> np.ndarray:
    """Single examples of sums over rounds: what the order attack does with the order that it takes for true."""
    return np.linalg.pinv(weights(orders)) @ observed


def weights(orders: list[list[int]]) -> np.ndarray:
    """The weight of every example in every round's update of SGD with momentum, (rounds, examples)."""
    count = len(orders[0])
    of_step = (1 - MOMENTUM ** (count - np.arange(count))) / (1 - MOMENTUM)
    made = np.zeros((len(orders), count))
    for row, one in zip(made, orders, strict=True):
        row[one] = of_step
    return made


def test_who_knows_all_but_the_secret_cannot_tell_the_order_and_solves_for_no_example() -> None:
    """The attack on updates of rounds with one example a step; with the secret, or by the seed, it has each of them."""
    gradients = generator(0, "gradients of the test").normal(size=(24, 8))
    rounds = range(1, ROUNDS + 1)
    true, public = ([order(secret, round=number, batch_size=1) for number in rounds] for secret in (SECRET, None))
    observed = weights(true) @ gradients
    assert np.abs(solved(observed, true) - gradients).max() < 1e-8
    assert np.abs(solved(weights(public) @ gradients, public) - gradients).max() < 1e-8
    known = {"seed": 2, "client": "a-0"}
    guesses = {
        "the seed": public,
        "a simulation's secret": [order(simulated_secret(**known), round=number, batch_size=1) for number in rounds],
        "another site's secret": [order(OTHER, round=number, batch_size=1) for number in rounds],
        "the path": [generator(2, "order", "a-0", r, 0, 1, None, None, None).permutation(24).tolist() for r in rounds],
        "an earlier round": [order(SECRET, round=number + 1, batch_size=1) for number in rounds],
    }
    for what, guess in guesses.items():
        assert np.abs(solved(observed, guess) - gradients).mean() > 0.5, what
        hits = np.mean([np.equal(own, other).mean() for own, other in zip(true, guess, strict=True)])
        assert hits == pytest.approx(1 / 24, abs=0.03), what


def test_every_round_epoch_and_size_has_an_order_of_its_own_and_the_same_question_the_same() -> None:
    questions: list[dict[str, object]] = [{}, {"round": 2}, {"batch_size": 3}, {"max_steps": 11}, {"name": "b-0"}]
    found = [order(SECRET, **asked)[:20] for asked in questions]
    epochs = order(SECRET, epochs=2)
    found += [epochs[24:44]]
    assert epochs[:24] == order(SECRET)
    assert found == [order(SECRET, **asked)[:20] for asked in questions] + [epochs[24:44]]
    assert len({tuple(one) for one in found}) == len(found)
    assert all(np.equal(one, found[0]).mean() < 0.4 for one in found[1:])
    assert sorted(order(SECRET)) == list(range(24))


def test_no_seed_that_a_server_names_changes_what_a_site_draws() -> None:
    assert order(SECRET, seed=2) == order(SECRET, seed=3)
    halves = [positions(24, "a-0", TrainOptions(seed=seed, half=0, most=5), secret=SECRET).tolist() for seed in (2, 3)]
    assert halves[0] == halves[1]


def test_halves_with_a_secret_are_disjoint_of_the_same_sizes_and_not_alternate() -> None:
    for count in (7, 24):
        first, second = (positions(count, "a-0", TrainOptions(seed=2, half=half), secret=SECRET) for half in (0, 1))
        assert (len(first), len(second)) == ((count + 1) // 2, count // 2)
        assert sorted([*first, *second]) == list(range(count))
        assert first.tolist() == sorted(first) != list(range(0, count, 2))


def test_a_generator_of_a_secret_follows_from_all_of_its_bits() -> None:
    """PyTorch's `manual_seed` looks at 32 bits, which can be tried one after the other."""
    high = bytes([1, *range(1, 32)])
    made = [torch.rand(1000, generator=torch_generator(secret, "dropout")) for secret in (SECRET, high, SECRET)]
    assert torch.equal(made[0], made[2])
    assert (made[0] == made[1]).float().mean() < 0.01
    assert float(made[0].mean()) == pytest.approx(0.5, abs=0.03)
    assert len({int(generator(secret, "order").integers(2**62)) for secret in (SECRET, high, OTHER)}) == 3


# A simulation without secrets


def test_without_a_secret_all_follows_from_the_seed_as_it_always_has() -> None:
    draws = Draws(client="a-0", seed=2, secret=None)
    assert order(None, round=3) == generator(2, "order", "a-0", 3, 0).permutation(24).tolist()
    asked = (5, None, "whatever is asked")
    assert draws.generator("subset", 1, asked=asked).integers(2**62) == generator(2, "subset", "a-0", 1).integers(2**62)
    assert positions(9, "a-0", TrainOptions(seed=2, half=1), secret=None).tolist() == [1, 3, 5, 7]
    subset = generator(2, "subset", "a-0", 0).choice(np.arange(24), size=5, replace=False)
    assert positions(24, "a-0", TrainOptions(seed=2, most=5), secret=None).tolist() == sorted(subset)
    ours, theirs = draws.torch_generator("augment", 1, 0), torch_generator(2, "augment", "a-0", 1, 0)
    assert torch.equal(torch.rand(9, generator=ours), torch.rand(9, generator=theirs))
    assert order(None, round=1, count=6) == [4, 3, 2, 1, 5, 0], "as it was before clients had secrets"


# Every action of a client


def asked_of(tiny, name: str) -> list[object]:
    """The options of every job whose examples an action takes."""
    weights = tuple(key for key in full_params(tiny, labels=2) if key.endswith("query.weight"))
    jobs: dict[str, list[object]] = {
        "train": [TRAIN, dataclasses.replace(TRAIN, report="halves"), dataclasses.replace(TRAIN, most=5)],
        "fingerprint": [dataclasses.replace(LOOK, kind=kind) for kind in ("delta", "gradient", "fisher")],
        "importance": [ImportanceOptions(kind="gradient", train=TRAIN, batches=2)],
        "sensitivity": [SensitivityOptions(seed=2, examples=5, names=weights)],
    }
    return jobs[name]


NOTHING_DRAWN = {
    "evaluate": "all examples of a split",
    "ridge": "all training examples, each of which counts once",
    "scale": "the first validation examples",
}
"""Actions that draw nothing, by what they take."""


@pytest.mark.slow
@pytest.mark.parametrize("action", [name for name in ACTIONS if name not in NOTHING_DRAWN])
def test_with_another_secret_other_examples_are_taken_and_with_the_same_the_same(tiny_of, client_of, action) -> None:
    whole = action == "sensitivity"
    site, adapted = client_of(examples=13, **({"trainable": "full", "targets": ()} if whole else {}))
    params = full_params(tiny_of("bert"), labels=2) if whole else adapted
    for options in asked_of(tiny_of("bert"), action):
        job = Job(client="a-0", params=params, round=1, options=options)
        found = [
            told(ACTIONS[action]([job], dataclasses.replace(site, secrets=secrets))[0])
            for secrets in ({"a-0": SECRET}, {"a-0": SECRET}, {"a-0": OTHER}, {})
        ]
        assert found[0] == found[1]
        assert len(set(found)) == 3, options


def told(update: Update) -> str:
    metrics = {key: value for key, value in update.metrics.items() if key != "seconds"}
    return f"{digest(update.params)} {digest(update.beside_model())} {metrics}"


def test_images_are_cropped_and_mirrored_as_the_secret_says() -> None:
    pixels = generator(0, "pixels").integers(0, 255, size=(9, 6, 6, 1), dtype=np.uint8)
    data = encode_images(pixels, np.arange(9), length=5)
    job = Job(client="a-0", params={}, round=1, options=dataclasses.replace(TRAIN, crop=2, flip=True, batch_size=9))
    seen = []
    for secret in (SECRET, SECRET, OTHER, None):
        (batch,) = batches(data, job, secret=secret)
        seen.append(batch.pixels[np.argsort(batch.labels)].tobytes())
    assert seen[0] == seen[1] and len(set(seen)) == 3


def test_dropout_below_a_cut_is_of_the_secret_and_above_it_of_the_seed_that_the_server_has(client_of) -> None:
    plain, params = client_of()
    options = dataclasses.replace(TRAIN, dropout=0.5)
    job = Job(client="a-0", params=params, round=1, options=options, cut=Cut(blocks=1))
    below, above = (next(name for name in plain.modules if f".{index}." in name) for index in (0, 2))

    def drawn(trainer: LocalTrainer, module: str) -> str:
        mask = dropout_masks([trainer.dropout(0)], device=torch.device("cpu"))
        assert mask is not None
        return digest({"mask": mask(0, module, (30, 20))})

    secret = dataclasses.replace(plain, secrets={"a-0": SECRET})
    public, client_side, server = LocalTrainer(job, plain), LocalTrainer(job, secret), server_side_trainer(job, plain)
    # a simulation has the guest's secret, and a host has one of its own
    simulated = server_side_trainer(job, secret)
    host = server_side_trainer(job, dataclasses.replace(plain, secrets={"a-0": OTHER}))
    assert drawn(simulated, above) == drawn(public, above) == drawn(server, above) == drawn(host, above)
    assert drawn(client_side, below) != drawn(public, below)


# What the source says

FOLDER = Path(client.__file__).parent
FOR_ALL = {
    ("fingerprint.py", "sketch"): "the projection of sketches, which are compared with those of others",
    ("fingerprint.py", "sketch_parts"): "the same",
    ("split_client.py", "simulated_secret"): "noise of a simulation without secrets",
    ("trainers.py", "seeded_globals"): "no seed of the server's: a number that `Draws` drew",
}
"""Where a seed that the server knows is read, beside `Draws`, by module and the function that it is given to."""
FROM_A_DRAW = {("trainers.py", "manual_seed")}
"""Generators that begin from a number which `Draws` drew: the global ones, for a trainer of the user's."""
OF_DRAWS = frozenset({"generator", "torch_generator"})
DRAWING = OF_DRAWS | {"default_rng", "rand", "randn", "randint", "randperm", "manual_seed", "derive_seed"}


def test_no_client_draws_anything_about_its_rows_from_what_a_server_knows() -> None:
    """Below `client/` seeds are read to make `Draws`, which prefer a secret, and for the few public uses above."""
    readers, drawers = set(), set()
    for module in sorted(FOLDER.glob("*.py")):
        if module.name == "draws.py":
            continue
        for call in nodes(module, ast.Call):
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            place = module.name, called(call)
            if any(isinstance(value, ast.Attribute) and value.attr == "seed" for value in given):
                readers.add(place)
            is_of_draws = isinstance(call.func, ast.Attribute) and called(call) in OF_DRAWS
            if called(call) in DRAWING and not is_of_draws and place not in FROM_A_DRAW:
                drawers.add(place)
        imports = nodes(module, ast.ImportFrom)
        taken = {name.name for node in imports if node.module == "atlas_fl.rng" for name in node.names}
        assert taken <= {"Seed"}, (module.name, taken)
    assert drawers == set()
    assert {reader for reader in readers if reader[1] != "Draws"} == FOR_ALL.keys()


NO_SECRET = {("secret", "None"), ("secrets", "{}")}


@pytest.mark.slow
def test_every_draw_of_a_client_is_given_its_secret() -> None:
    """None is written out where nothing of a client is drawn: no dropout, the server's half of a cut."""
    without = {
        (name, called(call))
        for name, module in MODULES.items()
        for call in nodes(module, ast.Call)
        if any((keyword.arg, ast.unparse(keyword.value)) in NO_SECRET for keyword in call.keywords)
    }
    assert without == {
        ("client/batching.py", "Draws"),  # of no dropout
        ("client/importance.py", "positions"),  # which are counted alone
        ("client/split_server.py", "replace"),  # of the server's half of a cut model
        ("privacy_attacks/membership.py", "replace"),  # of an attack's own training
    }


def test_normals_of_a_secret_are_normal_and_follow_from_it_alone() -> None:
    """Against the normal distribution by Kolmogorov and Smirnov; two halves are independent."""
    draws = Draws(client="a", seed=0, secret=SECRET)
    values = draws.normals("noise", 1, 0, count=200_001)
    assert values.dtype == torch.float32 and torch.equal(values, draws.normals("noise", 1, 0, count=200_001))
    assert kstest(values.numpy().astype(np.float64), "norm").pvalue > 0.01
    assert abs(float(np.corrcoef(values[:100_000], values[100_000:200_000])[0, 1])) < 0.01
    others = [
        Draws(client="a", seed=0, secret=OTHER).normals("noise", 1, 0, count=9),
        draws.normals("noise", 1, 1, count=9),
        Draws(client="b", seed=0, secret=SECRET).normals("noise", 1, 0, count=9),
    ]
    assert not any(torch.equal(values[:9], other) for other in others)
    same = Draws(client="a", seed=9, secret=SECRET).normals("noise", 1, 0, count=200_001)
    assert torch.equal(same, values), "the seed, which a server knows, is not looked at"
