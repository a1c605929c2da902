"""How much of a site's training texts does a server read that chooses the start models of its rounds?

The attack of `tests/hostile/reader.py` on MiniLM: under each of six settings, by a server that knows the order of the
examples or does not, from a site that looks at start models or does not.

    python benchmarks/read_updates.py
    python benchmarks/read_updates.py --examples 16 --rounds 24 --length 16
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atlas_fl.config import with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.deployment.start_models import start_models_of
from atlas_fl.params import Params
from atlas_fl.setup.assembly import Assembly, assemble
from atlas_fl.setup.options import train_options

RANK, RANK_OF_B = 16, 64
WAYS = (
    ("order known, models not checked", False, False, False),
    ("order secret, models not checked", False, True, False),
    ("order known, models checked", True, False, False),
    ("order known, models inside the bounds", True, False, True),
    ("order secret, models inside the bounds", True, True, True),
)
"""(in words, whether the site checks start models, draws its order from a secret, the server stays in the bounds)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=24, help="training examples of the site")
    parser.add_argument("--rounds", type=int, default=36, help="rounds that the server asks for")
    parser.add_argument("--length", type=int, default=32, help="longest text in tokens")
    args = parser.parse_args()
    # the attack lies beside the tests that hold it, which no installation has
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.hostile.reader import CASES

    for name, case in CASES.items():
        values = {"tasks": "movie", "clients_per_task": "1", "samples": str(args.examples), "rounds": "1000"}
        values |= {"max_length": str(args.length), **{key: str(value) for key, value in case.values.items()}}
        assembly = assemble(with_values(find_preset("quick"), values))
        for words, *way in WAYS:
            print(f"{name}; {words}: {reading(assembly, case, args.rounds, *way)}", flush=True)


def reading(assembly: Assembly, case: Any, rounds: int, checks: bool, secret: bool, near: bool) -> str:
    from tests.hostile import reader

    client, config = assembly.clients[0], assembly.config
    like = assembly.initial_params(client, (RANK_OF_B if case.by_b else RANK,) * assembly.shape.num_layers)
    server = reader.Server(
        site=assembly.site,
        client=client.name,
        options=train_options(config, with_images=False),
        case=case,
        starts=lambda _: like,
    )
    server.starts = reader.made_up(like, case=case, first=server.modules)
    if near:
        server.starts, server.growth = near_starts(like, server, case), reader.growth
    if checks:
        known = start_models_of(config, lambda _: like, examples=len(client.train), images=False)
        server.guard, server.trained = lambda job: known.check("train", job), known.remember
    if secret:
        server.site = reader.with_secret(server.site, client.name)
    return str(server.read(rounds))


def near_starts(like: Params, server: Any, case: Any) -> Callable[[int], Params]:
    from tests.hostile import reader

    starts: Callable[[int], Params] = reader.near_honest(like, first=server.modules, size=case.near)
    return starts


if __name__ == "__main__":
    main()
