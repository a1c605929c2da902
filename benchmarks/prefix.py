"""How much faster are rounds where what is frozen below the first adapted block is computed once for each example?

The same clients train adapters on the upper blocks of a model and score themselves, from one cache of prefix states and
by packs that run through all blocks in every step. They take turns; the largest difference of the adapters afterwards
says whether they did the same work (states of a chunk differ from those of a pack in their last bits).

    OMP_NUM_THREADS=1 python benchmarks/prefix.py                     # two of six blocks, MiniLM
    python benchmarks/prefix.py --adapted-blocks 1 --rounds 10
"""

import argparse
import dataclasses
import statistics
import time

from atlas_fl.client.evaluation import evaluate
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.local_training import train
from atlas_fl.client.options import EvaluateOptions, TrainOptions
from atlas_fl.config import Config
from atlas_fl.config.schema import DataConfig, ModelConfig, RunConfig
from atlas_fl.setup.assembly import assemble

RANK = 8


def one_round(jobs: list[Job], site: Site, number: int) -> tuple[list[float], list[Update]]:
    """Seconds of training and of scoring the test split, and the updates."""
    began = time.perf_counter()
    updates = train([dataclasses.replace(job, round=number) for job in jobs], site)
    trained = time.perf_counter()
    models = {update.client: update.params for update in updates}
    options = EvaluateOptions(split="test")
    evaluate([dataclasses.replace(job, params=models[job.client], options=options) for job in jobs], site)
    return [trained - began, time.perf_counter() - trained], updates


def largest_difference(left: list[Update], right: list[Update]) -> float:
    return max(
        float((one.params[key] - other.params[key]).abs().max())
        for one, other in zip(left, right, strict=True)
        for key in one.params
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--adapted-blocks", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--samples", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=6)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    config = Config(
        data=DataConfig(tasks=("trec",), clients_per_task=args.clients, samples=args.samples, test_samples=120),
        model=ModelConfig(adapted_blocks=args.adapted_blocks),
        run=RunConfig(accelerator=args.device),
    )
    assembly = assemble(config)
    site = assembly.site
    assert site.first_adapted, "some blocks carry no adapters"
    ranks = (0,) * site.first_adapted + (RANK,) * (assembly.shape.num_layers - site.first_adapted)
    options = TrainOptions(seed=0, rounds=args.rounds, lr=1e-3)
    jobs = [
        Job(client=c.name, params=assembly.initial_params(c, ranks), round=1, options=options) for c in assembly.clients
    ]
    through_all = dataclasses.replace(site, first_adapted=0)
    vars(through_all)["modules"] = site.modules  # adapters stay where they are
    one_round(jobs, through_all, 0)  # warm up
    totals: dict[str, list[list[float]]] = {"once": [], "through all": []}
    for number in range(1, args.rounds + 1):
        seconds, once = one_round(jobs, site, number)
        totals["once"].append(seconds)
        seconds, packed = one_round(jobs, through_all, number)
        totals["through all"].append(seconds)
    print(
        f"{args.clients} clients, {args.samples} examples each,"
        f" {args.adapted_blocks} of {len(site.backbone.blocks)} blocks"
    )
    for part, what in enumerate(("training", "scoring")):
        first = totals["through all"][0][part] / totals["once"][0][part]
        later = statistics.median(
            all_blocks[part] / once[part] for all_blocks, once in list(zip(totals["through all"], totals["once"]))[1:]
        )
        print(f"{what}: ratio {first:.2f} in round 1, which fills the cache; median {later:.2f} in later rounds")
    whole = sum(map(sum, totals["through all"])) / sum(map(sum, totals["once"]))
    print(f"{args.rounds} rounds together: ratio {whole:.2f}")
    print(f"largest difference of the adapters: {largest_difference(once, packed):.1e}")


if __name__ == "__main__":
    main()
