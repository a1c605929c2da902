"""A server that reads texts out of updates: it reads without the site's guards, and nothing with them.

The attack is `tests.hostile.reader`, as `benchmarks/read_updates.py` carries it out on a larger model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from atlas_fl.config import Config, with_values
from atlas_fl.deployment.start_models import start_models_of
from atlas_fl.setup.assembly import Assembly, assemble
from atlas_fl.setup.options import train_options
from tests.hostile import reader
from tests.hostile.reader import CASES, Reading, Server, made_up, near_honest

EXAMPLES, ROUNDS = 12, 16
NAMES = [name for name in CASES if name != "SGD, batch 1"]
"""Clipped it is read as well."""
BATCH = {"8": "6", "1": "1"}
"""As many steps a round as the review's cases had, of fewer examples."""


@dataclass(kw_only=True, eq=False)
class Victim:
    """One site of twelve short texts."""

    assembly: Assembly
    case: reader.Case

    def read(self, *, guarded: bool = False, secret: bool = False, near: bool = False) -> Reading:
        """What a server reads in a few more rounds than there are examples."""
        site, client, config = self.assembly.site, self.assembly.clients[0], self.assembly.config
        like = self.assembly.initial_params(client, (32 if self.case.by_b else 8,) * 3)
        server = Server(
            site=site,
            client=client.name,
            options=train_options(config, with_images=False),
            case=self.case,
            starts=lambda _: like,
            vocabulary=vocabulary(self.assembly),
        )
        server.starts = made_up(like, case=self.case, first=server.modules)
        if near:
            server.starts = near_honest(like, first=server.modules, size=self.case.near)
            server.growth = reader.growth
        if guarded:
            known = start_models_of(config, lambda _: like, examples=EXAMPLES, images=False)
            server.guard, server.trained = lambda job: known.check("train", job), known.remember
        if secret:
            server.site = reader.with_secret(site, client.name)
        return server.read(ROUNDS)


def vocabulary(assembly: Assembly) -> torch.Tensor:
    """All tokens of the client's texts among two thousand others: a search over all would take a minute."""
    data = assembly.site.data[assembly.clients[0].name].splits.values()
    return torch.unique(torch.cat([torch.arange(0, 30000, 15), *(torch.from_numpy(split.ids) for split in data)]))


@pytest.fixture
def victim(config: Callable[..., Config]) -> Callable[[str], Victim]:
    def make(name: str) -> Victim:
        small = {"clients_per_task": 1, "samples": EXAMPLES, "max_length": 10, "rounds": 64, "candidates": (8, 32)}
        values = {**CASES[name].values, "batch_size": BATCH[str(CASES[name].values["batch_size"])]}
        return Victim(assembly=assemble(with_values(config(**small), values)), case=CASES[name])

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_server_that_knows_the_order_and_whose_models_nobody_looks_at_reads_the_texts(
    victim: Callable[[str], Victim], name: str
) -> None:
    """The control of all tests below; AdamW with all parts is no exception."""
    found = victim(name).read()
    assert found.sentences >= found.of_sentences / 2, found
    assert found.tokens >= found.of_tokens * 2 / 3


@pytest.mark.parametrize("name", NAMES)
def test_a_site_refuses_the_models_out_of_whose_updates_texts_were_read(
    victim: Callable[[str], Victim], name: str
) -> None:
    """Whatever the order: the first one where it sets A, and where it sets nothing but B the fourth that stays."""
    found = victim(name).read(guarded=True)
    by_b = CASES[name].by_b
    assert ("of 3 rounds before" if by_b else "is not the initialisation of --seed 42") in found.refusal
    assert found.rounds == (3 if by_b else 0)
    assert found.sentences == 0
    assert found.tokens <= 0.1 * found.of_tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_where_the_order_comes_from_a_secret(victim: Callable[[str], Victim], name: str) -> None:
    found = victim(name).read(secret=True)
    assert (found.rounds, found.sentences) == (ROUNDS, 0)
    assert found.tokens <= 0.1 * found.of_tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_by_a_server_that_stays_inside_the_bounds(victim: Callable[[str], Victim], name: str) -> None:
    """With the order known it reads by B all the same, which the secret ends; with A as drawn it never reads."""
    known, found = (victim(name).read(guarded=True, secret=secret, near=True) for secret in (False, True))
    assert (known.rounds, found.rounds) == (ROUNDS, ROUNDS), "no start was refused"
    assert (known.sentences >= known.of_sentences / 2) is CASES[name].by_b, known
    assert found.sentences == 0
    assert found.tokens <= 0.1 * found.of_tokens
