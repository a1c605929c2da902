"""Do halves of clients that do not differ say so, on examples that were trained on together before, and on others?

Three rounds of `--preset null` inside clusters, on the first half of every client's examples; in the fourth, halves of
these (seen) or of the others (unseen). All clients of a task begin that round with one model, so that tau^2 should be
zero; or a little below, since all clients have one mix of classes, so that what one half has more of a class than the
other has less. tau^2 is what halves of one client have in common beyond those of two: all of which are seen, or unseen,
alike. It is told of each task and group of parameters, over the noise N and without a bound at zero.

    OMP_NUM_THREADS=1 python benchmarks/split_halves.py
"""

import argparse
import statistics
import tempfile
from itertools import product
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from atlas_fl import find_preset, run_config, with_values
from atlas_fl.audit.kriging import HALVES, read_halves
from atlas_fl.client import local_training
from atlas_fl.client.options import TrainOptions
from atlas_fl.methods.kriging import measure, variance_between
from atlas_fl.params import HEAD, LORA_A, LORA_B, unflatten_by_client
from atlas_fl.storage import checkpoint
from atlas_fl.storage.run_folder import RunFolder

ROUND = 4
GROUPS = ("adapters", "head")


def measured_models(seed: int, dial: int, *, seen: bool) -> dict[str, dict[str, dict[str, Tensor]]]:
    """By half and client the models of round four, which have trained on examples that it has seen, or on others."""

    def positions(count: int, client: str, options: TrainOptions, *, secret: bytes | None) -> np.ndarray:
        assert options.most is None and secret is None, f"{client} of a simulation has all of its examples"
        known = np.arange(count // 2)
        if options.half is None:
            return known
        return (known if seen else np.arange(count // 2, count))[options.half :: 2]

    with tempfile.TemporaryDirectory() as base, patch.object(local_training, "positions", positions):
        values = {"strategy": "kriging", "within": "clusters", "measure_round": ROUND, "max_rounds": ROUND}
        config = with_values(find_preset("null", dial=dial), {**values, "seed": seed, "runs_dir": base})
        result = run_config(config)
        labels: list[int] = result.summary["clustering"]["labels"]
        clusters = set(zip(map(task_of, result.summary["clients"]), labels, strict=True))
        assert len(clusters) == len(set(labels)) == 3, f"clusters are not the tasks: {labels}"
        saved = checkpoint.load_latest(RunFolder(result.folder).checkpoints)[0]
        assert saved is not None, "the run has just written it"
        return read_halves(unflatten_by_client(saved.tensors)["server"])


def task_of(client: str) -> str:
    return client.rpartition("-")[0]


def flat(model: dict[str, Tensor], group: str) -> Tensor:
    """The head, or the products B A of all adapters, in one float64 vector."""
    if group == "head":
        return torch.cat([model[key].double().flatten() for key in sorted(model) if key.startswith(HEAD)])
    pairs = [(model[key], model[key.removesuffix(LORA_A) + LORA_B]) for key in sorted(model) if key.endswith(LORA_A)]
    return torch.cat([(up.double() @ down.double()).flatten() for down, up in pairs])


def ratios(halves: dict[str, dict[str, dict[str, Tensor]]]) -> dict[tuple[str, str], float]:
    """tau^2 / N of each task and group of parameters; `halves` are by half and client."""
    found = {}
    names = sorted(halves[HALVES[0]])
    for task in sorted({task_of(name) for name in names}):
        members = [name for name in names if task_of(name) == task]
        for group in GROUPS:
            vectors = torch.stack([flat(halves[half][name], group) for half in HALVES for name in members])
            changes = vectors - vectors.mean(dim=0)  # what all have in common drops out
            gram = (changes @ changes.T).numpy()
            found[task, group] = variance_between(gram) / float(measure(gram)[1].mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[9001, 9002, 9003, 9004])
    parser.add_argument(
        "--dial", type=int, default=4, help="of `null`; half of its examples are kept for the fourth round"
    )
    args = parser.parse_args()
    told: dict[tuple[str, bool], list[float]] = {}
    print("seed  task    group     seen    unseen")
    for seed in args.seeds:
        found = {seen: ratios(measured_models(seed, args.dial, seen=seen)) for seen in (True, False)}
        for (task, group), ratio in found[True].items():
            print(f"{seed}  {task:6}  {group:8} {ratio:+.3f}  {found[False][task, group]:+.3f}")
        for group, seen in product(GROUPS, (True, False)):
            of_tasks = [ratio for (_, one), ratio in found[seen].items() if one == group]
            told.setdefault((group, seen), []).append(statistics.fmean(of_tasks))
    for (group, seen), values in told.items():  # a seed is the unit: its tasks share what is drawn
        kind, error = "seen" if seen else "unseen", statistics.stdev(values) / len(values) ** 0.5
        print(f"{group}, {kind}: mean {statistics.fmean(values):+.3f}, standard error over seeds {error:.3f}")


if __name__ == "__main__":
    main()
