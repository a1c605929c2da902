"""What hostile clients do under each rule, and what each rule costs where nobody is hostile.

    python benchmarks/byzantine.py --to byzantine.jsonl            # trains what the file lacks, prints the tables
    python benchmarks/byzantine.py --to byzantine.jsonl --table    # prints them alone
    python benchmarks/byzantine.py --to skewed.jsonl --dirichlet-alpha 0.5
    python benchmarks/byzantine.py --to groups.jsonl --groups 3

Clients of the handwritten digits, 30 training images each, train a LoRA adapter of rank 4 or 8 on a frozen layer of
random features, and a head. That takes tenths of a second, so every attack meets every rule with five seeds. The
server's part is the package's own: the update check, the norm bound, the rules of `strategies`, the attacks of
`atlas run --attack`. Scores are of each honest client's own 40 test images; chance is .1.

With `--groups 3` nine clients are three groups, and each group has a permutation of the labels of its own: a head that
is right for one group is wrong for the others. `atlas_laplacian` and `fedavg_cluster` know the groups, `fedavg`
does not. A tenth client, in a group of its own, takes part where an attacker is to be alone.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from atlas_fl.aggregation.matrices import Federation, without_edges
from atlas_fl.aggregation.norm_bound import bound_updates
from atlas_fl.aggregation.rules import StrategyOptions, twice_the_rank
from atlas_fl.aggregation.update_checks import check_update, unusable_models
from atlas_fl.config import Config, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.data.clients import ClientData
from atlas_fl.errors import ProtocolError
from atlas_fl.methods.method import Method, StepInputs
from atlas_fl.methods.registry import find_method
from atlas_fl.params import ByClient, Params
from atlas_fl.rng import torch_generator
from atlas_fl.runtime.attacks import ATTACKS, AttackContext, with_flipped_labels
from atlas_fl.setup.assembly import load_clients

SEEDS = (42, 123, 456, 789, 1024)
SIZES = ((5, 1), (9, 2))
"""(clients, hostile ones)."""
FEATURES, RANKS = 64, (4, 8)
ROUNDS, STEPS, BATCH, RATE = 12, 8, 10, 0.1
LAYER = "layer.0.hidden"
SPACE = StrategyOptions(space="product", share=("A", "B", "head"), scale=twice_the_rank)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    clients: int
    hostile: int
    attack: str
    size: float | None
    rule: str
    norm_bound: str
    seed: int
    place: str = ""
    """With groups, where the hostile clients are: one of `PLACES`."""


ATTACKED: tuple[tuple[str, float | None], ...] = (
    ("none", None),
    ("label_flip", None),
    ("sign_flip", None),
    ("sign_flip", 9.0),
    ("sign_flip", 30.0),
    ("scale", 30.0),
    ("noise", None),
    ("model_replacement", None),
)
RULED = (
    ("local", "off"),
    ("fedavg", "off"),
    ("fedavg", "refuse"),
    ("fedavg", "clip"),
    ("median", "off"),
    ("trimmed_mean", "off"),
    ("krum", "off"),
    ("multi_krum", "off"),
    ("geometric_median", "off"),
    ("atlas_laplacian", "off"),
    ("atlas_laplacian", "refuse"),
)
"""(rule, norm bound). `atlas_laplacian` knows the true task, so that all are one cluster."""


PLACES: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "one of nine": (9, (8,)),
    "two of nine, in two groups": (9, (5, 8)),
    "a tenth, alone in its group": (10, (9,)),
}
"""(clients, the places of the hostile ones); client k is in group k // 3."""
GROUP_ATTACKED = tuple(one for one in ATTACKED if one[1] != 9 and one != ("sign_flip", None))
GROUP_RULED = (
    ("local", "off"),
    *((rule, bound) for rule in ("fedavg", "fedavg_cluster", "atlas_laplacian") for bound in ("off", "refuse")),
)


def grouped_cases() -> Iterator[Case]:
    """Clients in groups that differ."""
    groups = [(clients, len(hostile), position) for position, (clients, hostile) in PLACES.items()]
    return _cases(groups, GROUP_ATTACKED, GROUP_RULED)


def cases() -> Iterator[Case]:
    """Clients of one group."""
    return _cases([(clients, hostile, "") for clients, hostile in SIZES], ATTACKED, RULED)


def _cases(
    federations: Sequence[tuple[int, int, str]],
    attacks: Sequence[tuple[str, float | None]],
    rules: Sequence[tuple[str, str]],
) -> Iterator[Case]:
    for seed, (clients, hostile, position), (attack, size), (rule, norm_bound) in product(
        SEEDS, federations, attacks, rules
    ):
        yield Case(
            clients=clients,
            hostile=hostile,
            attack=attack,
            size=size,
            rule=rule,
            norm_bound=norm_bound,
            seed=seed,
            place=position,
        )


@cache
def digits(clients: int, seed: int, alpha: float | None) -> tuple[ClientData, ...]:
    """The clients and their images."""
    values = {"tasks": "digits", "clients_per_task": str(clients), "seed": str(seed), "participation": "1"}
    values |= {"samples": "30", "validation_samples": "20", "test_samples": "40"}
    values |= {} if alpha is None else {"partition": "dirichlet", "dirichlet_alpha": str(alpha)}
    config: Config = with_values(find_preset("vision-quick"), values)
    return load_clients(config)


@dataclass(frozen=True, kw_only=True)
class Net:
    """The frozen layer, and what is trained beside it."""

    frozen: Tensor

    def start(self, rank: int, seed: int) -> dict[str, Tensor]:
        a = torch.randn(max(RANKS), 64, generator=torch_generator(seed, "A")) / 8
        return {
            f"{LAYER}.lora_A": a[:rank].clone(),
            f"{LAYER}.lora_B": torch.zeros(FEATURES, rank),
            "head.weight": torch.zeros(10, FEATURES),
            "head.bias": torch.zeros(10),
        }

    def logits(self, params: Params, images: Tensor) -> Tensor:
        a, b = params[f"{LAYER}.lora_A"], params[f"{LAYER}.lora_B"]
        hidden = images @ self.frozen.T + 2.0 * (images @ a.mT) @ b.mT
        return hidden.relu() @ params["head.weight"].mT + params["head.bias"].unsqueeze(-2)


def images_of(client: ClientData, split: str) -> tuple[Tensor, Tensor]:
    rows = getattr(client, split)
    pixels = torch.from_numpy(np.asarray(rows.pixels, np.float32)).reshape(len(rows), -1)
    return pixels / 255.0 * 2 - 0.5, torch.from_numpy(np.asarray(rows.label)).long()


def train_clients(
    net: Net, start: ByClient, data: Mapping[str, tuple[Tensor, Tensor]], case: Case, round: int
) -> ByClient:
    """Some steps of SGD of everyone from there, on its own images; zeros in the place of missing ranks stay zero."""
    names, ranks = list(start), [len(params[f"{LAYER}.lora_A"]) for params in start.values()]
    full = [dict(params) for params in start.values()]
    for params, rank in zip(full, ranks, strict=True):
        missing = max(RANKS) - rank
        params[f"{LAYER}.lora_A"] = pad(params[f"{LAYER}.lora_A"], (0, 0, 0, missing))
        params[f"{LAYER}.lora_B"] = pad(params[f"{LAYER}.lora_B"], (0, missing))
    stack = {key: torch.stack([params[key] for params in full]).requires_grad_() for key in full[0]}
    streams = [torch_generator(case.seed, name, round) for name in names]
    images, labels = (torch.stack([data[name][part] for name in names]) for part in (0, 1))
    row = torch.arange(len(names))[:, None]
    for _ in range(STEPS):
        index = torch.stack([torch.randint(images.shape[1], (BATCH,), generator=stream) for stream in streams])
        logits = net.logits(stack, images[row, index])
        loss = cross_entropy(logits.transpose(1, 2), labels[row, index], reduction="none").mean(1).sum()
        gradients = torch.autograd.grad(loss, list(stack.values()))
        with torch.no_grad():
            for tensor, gradient in zip(stack.values(), gradients, strict=True):
                tensor -= RATE * gradient
    models = {name: {key: tensor[k].detach().clone() for key, tensor in stack.items()} for k, name in enumerate(names)}
    for params, rank in zip(models.values(), ranks, strict=True):
        params[f"{LAYER}.lora_A"] = params[f"{LAYER}.lora_A"][:rank].clone()
        params[f"{LAYER}.lora_B"] = params[f"{LAYER}.lora_B"][:, :rank].clone()
    return models


def measure(net: Net, params: Params, data: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Accuracy and loss."""
    images, labels = data
    logits = net.logits(params, images)
    return float((logits.argmax(1) == labels).float().mean()), float(cross_entropy(logits, labels))


def groups_of(case: Case) -> np.ndarray:
    """The group of every client: one of all, or three clients to a group."""
    return np.arange(case.clients) // 3 if case.place else np.zeros(case.clients, np.int64)


def hostile_of(case: Case, names: tuple[str, ...]) -> tuple[str, ...]:
    """Who is hostile under every attack of this case; under `none` the same ones are left out of the scores."""
    positions = PLACES[case.place][1] if case.place else range(case.clients - case.hostile, case.clients)
    return tuple(names[k] for k in positions)


def federation_of(case: Case, names: tuple[str, ...]) -> Federation:
    n, groups = len(names), groups_of(case)
    knows = case.rule != "fedavg"
    return Federation(
        clients=names,
        weights=np.full(n, 30.0),
        clusters=groups,
        adjacency=(groups[:, None] == groups[None, :]) * (np.ones((n, n)) - np.eye(n)),
        head_groups=tuple(f"digits {group}" if knows else "digits" for group in groups),
        layer_of={LAYER: 0},
    )


def relabel(case: Case, data: tuple[Tensor, Tensor], group: int) -> tuple[Tensor, Tensor]:
    """The images under the labels of this group."""
    if not case.place:
        return data
    order = torch.randperm(10, generator=torch_generator(case.seed, "labels", group))
    return data[0], order[data[1]]


def server_step(
    strategy: Method, case: Case, current: ByClient, sent: ByClient, federation: Federation, round: int
) -> tuple[ByClient, list[str]]:
    """What everyone goes on with, and whose update was refused."""
    good: dict[str, Params] = {}
    for name, params in sent.items():
        try:
            check_update(current[name], params)
        except ProtocolError:
            continue
        good[name] = params
    tasks = dict(zip(federation.clients, federation.head_groups, strict=True))
    mode = case.norm_bound if strategy.communicates else "off"
    accepted, _ = bound_updates(current, good, tasks, SPACE, mode=mode, ratio=10)
    # as in `experiment.rounds.one_round`
    linked = without_edges(federation, sorted(sent.keys() - accepted.keys()))
    inputs = StepInputs(server_state={}, client_models=current, updates=accepted, federation=linked, round=round)
    mixed = strategy.aggregate(inputs).client_models
    bad = unusable_models(mixed)
    return {name: current[name] if name in bad else params for name, params in mixed.items()}, sorted(
        sent.keys() - accepted.keys()
    )


def alter_update(case: Case, before: Params, after: Params, name: str, round: int) -> Params:
    attack = ATTACKS[case.attack]
    size = next((value for value in (case.size, attack.size) if value is not None), float(case.clients))
    stream = torch_generator(case.seed, "attack", name, round)
    return attack.alter(before, after, AttackContext(size=size, space=SPACE, random=stream))


def run(case: Case, alpha: float | None) -> dict[str, object]:
    """The scores of the honest clients."""
    clients = digits(case.clients, case.seed, alpha)
    names = tuple(client.name for client in clients)
    hostile = hostile_of(case, names) if case.attack != "none" else ()
    if case.attack != "none" and ATTACKS[case.attack].flips_labels:
        clients = with_flipped_labels(clients, hostile)
    net = Net(frozen=torch.randn(FEATURES, 64, generator=torch_generator(case.seed, "frozen")) / 8)
    strategy = find_method(case.rule, eta=0.5, byzantine=case.hostile, trim=case.hostile / case.clients)
    federation = federation_of(case, names)
    data = {
        client.name: {
            split: relabel(case, images_of(client, split), int(group)) for split in ("train", "validation", "test")
        }
        for client, group in zip(clients, groups_of(case), strict=True)
    }
    current: ByClient = {name: net.start(RANKS[k % len(RANKS)], case.seed) for k, name in enumerate(names)}
    refused = 0
    for round in range(1, ROUNDS + 1):
        local = train_clients(net, current, {name: data[name]["train"] for name in names}, case, round)
        sent = {
            name: alter_update(case, current[name], params, name, round) if name in hostile else params
            for name, params in local.items()
        }
        current, out = server_step(strategy, case, current, sent, federation, round)
        refused += len(set(out) - set(hostile))
    scores = [
        measure(net, current[name], data[name]["test"])[0] for name in names if name not in hostile_of(case, names)
    ]
    return {**asdict(case), "mean": fmean(scores), "worst": min(scores), "honest_refused": refused}


def tables(rows: list[dict[str, object]], grouped: bool) -> Iterator[str]:
    """Mean and standard deviation over the seeds of the honest clients' mean score, and the mean of the worst one's."""
    if grouped:
        for position in PLACES:
            yield f"\n{position}: mean +- std over seeds (mean of the worst honest client)\n"
            yield from _table([row for row in rows if row["place"] == position], GROUP_ATTACKED, GROUP_RULED)
    for clients, hostile in () if grouped else SIZES:
        yield f"\n{hostile} of {clients} clients: mean +- std over seeds (mean of the worst honest client)\n"
        yield from _table([row for row in rows if row["clients"] == clients], ATTACKED, RULED)
    bounded = [row for row in rows if row["norm_bound"] == "refuse"]
    refused = sum(int(str(row["honest_refused"])) for row in bounded)
    yield f"\n{len(rows)} runs; in the {len(bounded)} with a norm bound {refused} honest updates were refused"


def _table(
    rows: list[dict[str, object]], attacked: Sequence[tuple[str, float | None]], ruled: Sequence[tuple[str, str]]
) -> Iterator[str]:
    words = [attack if size is None else f"{attack} {size:g}" for attack, size in attacked]
    yield "| rule | " + " | ".join(words) + " |"
    yield "|---" * (len(words) + 1) + "|"
    for rule, norm_bound in ruled:
        name = rule + (f", norm bound {norm_bound}" if norm_bound != "off" else "")
        cells = []
        for attack, size in attacked:
            setting = {"attack": attack, "size": size, "rule": rule, "norm_bound": norm_bound}
            cells.append(_cell([row for row in rows if all(row[key] == value for key, value in setting.items())]))
        yield f"| {name} | " + " | ".join(cells) + " |"


def _cell(rows: list[dict[str, object]]) -> str:
    if not rows:
        return "-"
    means, worst = ([float(str(row[key])) for row in rows] for key in ("mean", "worst"))
    spread = stdev(means) if len(means) > 1 else 0.0
    return f"{fmean(means):.3f} +- {spread:.3f} ({fmean(worst):.2f})".replace("0.", ".")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("byzantine.jsonl"))
    parser.add_argument("--dirichlet-alpha", type=float, default=None)
    parser.add_argument("--clients", type=int, nargs="*", default=[n for n, _ in SIZES], help="federations to train")
    parser.add_argument("--groups", type=int, choices=(1, 3), default=1, help="groups with labels of their own")
    parser.add_argument("--rules", nargs="*", default=None, help="rules to train; by default all")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = args.to.read_text(encoding="utf-8").splitlines() if args.to.exists() else []
    rows = [json.loads(line) for line in lines]
    done = {tuple(row.get(key, "") for key in asdict(next(cases()))) for row in rows}
    selected = list(grouped_cases() if args.groups == 3 else cases())
    for case in selected if not args.table else ():
        chosen = (case.place or case.clients in args.clients) and (args.rules is None or case.rule in args.rules)
        if chosen and tuple(asdict(case).values()) not in done:
            rows.append(run(case, args.dirichlet_alpha))
            with args.to.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print("\n".join(tables(rows, args.groups == 3)))


if __name__ == "__main__":
    main()
