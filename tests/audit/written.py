"""Run folders with the audit's files, written by a reference that follows the equations, and edits of them."""

import json
from dataclasses import replace

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from atlas_fl.aggregation.matrices import Federation, without_edges
from atlas_fl.config import Config, to_toml
from atlas_fl.config.schema import MixingConfig, RanksConfig, RobustConfig, TrainingConfig, server_config
from atlas_fl.errors import ConfigError
from atlas_fl.methods.feddyn import dynamic_corrections
from atlas_fl.methods.registry import find_method
from atlas_fl.params import digest, flatten_by_client, flatten_state, with_frozen
from atlas_fl.storage.jsonl import read_sealed, write_sealed
from tests.aggregation.federations import server_step

CLIENTS = ("movie-0", "movie-1", "movie-2", "trec-0", "trec-1", "pairs-0")
TASKS = ("movie", "movie", "movie", "trec", "trec", "pairs")
LABELS = {"movie": 2, "trec": 6, "pairs": 2}
CLUSTERS = (0, 0, 0, 1, 1, -1)
RANKS = ((4, 8), (4, 8), (6, 4), (3, 5), (8, 3), (4, 4))
EXAMPLES = (200, 100, 300, 50, 150, 80)
LAYER_OF = {"layer.0.q": 0, "layer.1.q": 1}
D_IN, D_OUT = 14, 11
ROUNDS = 3
ALPHA = 0.1
"""Of FedDyn."""
ONE_RANK = (
    *("ifca", "fedavg_dynamic", "fedavg_orthonormal", "fedavg_rotated", "fedavg_by_arrival"),
    *("fedavg_with_residual", "fedavg_with_rest", "fedavg_in_levels"),
    *("fedavg_of_cores", "fedavg_of_heads", "fedavg_in_tree_and_outside", "fedavg_cluster_routed"),
)
"""Strategies for which validation asks for one rank."""


def adjacency():
    graph = np.triu(np.random.default_rng(3).random((6, 6)) + 0.1, 1)
    together = [[one >= 0 and one == other for other in CLUSTERS] for one in CLUSTERS]
    return (graph + graph.T) * np.array(together)


def importance():
    return np.random.default_rng(4).dirichlet(np.ones(2), 6)


def model(draw, ranks, labels):
    params = {}
    for module, layer in LAYER_OF.items():
        params[f"{module}.lora_A"] = torch.randn(ranks[layer], D_IN, generator=draw)
        params[f"{module}.lora_B"] = torch.randn(D_OUT, ranks[layer], generator=draw)
    return {**params, "head.weight": torch.randn(labels, D_IN, generator=draw)}


def trained(start, *, round):
    draw = torch.Generator().manual_seed(round)
    return {
        client: {key: tensor + 0.3 * torch.randn(tensor.shape, generator=draw) for key, tensor in params.items()}
        for client, params in start.items()
    }


def plan_json(*, alpha=None, rslora=False, graph=None, each=RANKS):
    clients = [
        {"name": name, "task": task, "device": "cpu_2gb", "examples": count, "cluster": cluster, "ranks": list(ranks)}
        for name, task, count, cluster, ranks in zip(CLIENTS, TASKS, EXAMPLES, CLUSTERS, each)
    ]
    return {
        "clients": clients,
        "adjacency": (adjacency() if graph is None else graph).tolist(),
        "importance": importance().tolist(),
        "layer_of": LAYER_OF,
        "lora": {"alpha": alpha, "rslora": rslora},
        "clustering": {},
    }


def federation(graph=None):
    return Federation(
        clients=CLIENTS,
        weights=np.array(EXAMPLES, float),
        clusters=np.array(CLUSTERS),
        adjacency=adjacency() if graph is None else graph,
        head_groups=TASKS,
        importance=importance(),
        layer_of=LAYER_OF,
    )


def class_features(clients, *, round):
    """What these clients report of their training examples, drawn; the counts add up to their examples."""
    draw = np.random.default_rng(round)
    reports = {}
    for name, task, examples in zip(CLIENTS, TASKS, EXAMPLES):
        counts = draw.multinomial(examples, draw.dirichlet(np.ones(LABELS[task])))
        arrays = {
            "counts": counts,
            "means": draw.normal(size=(len(counts), D_IN)),
            "variances": draw.random(len(counts)),
        }
        reports[name] = {key: torch.tensor(array, dtype=torch.float32) for key, array in arrays.items()}
    return {client: reports[client] for client in clients}


def halves(params, *, round):
    """What a client reports of a model that it trained on each half of its examples, drawn."""
    draw = torch.Generator().manual_seed(round)
    return {
        f"{half}/{key}": tensor + 0.2 * torch.randn(tensor.shape, generator=draw)
        for half in ("first", "second")
        for key, tensor in params.items()
    }


def reported(strategy, state, good, *, round):
    """What a rule is told beside these updates; halves from round two on."""
    if strategy.report == "class_features":
        return class_features(good, round=round)
    new = good.keys() - state.get("halves", {}).keys() if strategy.report == "halves" and round > 1 else ()
    return {client: halves(good[client], round=round) for client in sorted(new)}


def write_models(folder, name, models):
    folder.mkdir(parents=True, exist_ok=True)
    flat = {key: tensor.clone().contiguous() for key, tensor in flatten_by_client(models).items()}
    save_file(flat, folder / f"{name}.safetensors")


def write_state(folder, state):
    if state:
        flat = {path: tensor.clone().contiguous() for path, tensor in flatten_state(state).items()}
        save_file(flat, folder / "server.safetensors")


def who(round):
    """(who was asked to train, whose update was refused): all in round one, fewer later."""
    return {1: (CLIENTS, ()), 2: (CLIENTS[1:], ("movie-1",)), 3: (("movie-0", "trec-1", "pairs-0"), ("trec-1",))}[round]


def accepted_ranks(strategy):
    """Ranks that the strategy takes: different ones where it can."""
    draw = torch.Generator().manual_seed(0)
    start = {name: model(draw, ranks, LABELS[task]) for name, ranks, task in zip(CLIENTS, RANKS, TASKS)}
    try:
        strategy.check(start, federation())
    except ConfigError:
        return ((4, 3),) * len(CLIENTS)
    return RANKS


def write_run(
    path, mixing=None, *, robust=None, server=None, seed=42, alpha=None, rslora=False, real=None, served=None
):
    """A run folder as the round loop writes it. `real` are the words that the server really followed, `served(round,
    trained, start)` may replace what it delivers.
    """
    mixing, robust, server = (
        mixing or MixingConfig(strategy="atlas_laplacian"),
        robust or RobustConfig(),
        server or server_config(measure_round=2),
    )
    real = real or mixing
    claimed, strategy = (
        find_method(
            words.strategy,
            **{**vars(words), **vars(robust), **vars(server), "seed": seed, "rounds": ROUNDS},
            scale=lambda rank: (2 * rank if alpha is None else alpha) / (rank**0.5 if rslora else rank),
        )
        for words in (mixing, real)
    )
    each = accepted_ranks(claimed if accepted_ranks(claimed) != RANKS else strategy)
    # of those in the plan only a strategy that takes no others asks for one rank in the settings
    ranks = RanksConfig(ranks="8") if mixing.strategy in ONE_RANK else RanksConfig()
    training = TrainingConfig(rounds=ROUNDS, proximal_mu=ALPHA if mixing.strategy == "fedavg_dynamic" else 0.0)
    config = Config(mixing=mixing, robust=robust, server=server, ranks=ranks, training=training)
    path.mkdir()
    (path / "config.toml").write_text(to_toml(replace(config, run=replace(config.run, seed=seed))))
    (path / "plan.json").write_text(json.dumps(plan_json(alpha=alpha, rslora=rslora, each=each)))
    draw = torch.Generator().manual_seed(seed)
    start = {name: model(draw, ranks, LABELS[task]) for name, ranks, task in zip(CLIENTS, each, TASKS)}
    state = strategy.init(start)
    if strategy.name == "fedavg_cluster_routed":
        start, state = strategy.begin(start, federation())
    if strategy.name == "fedavg_by_qr":
        weights = {module: torch.randn(D_OUT, D_IN, generator=draw) for module in LAYER_OF}
        start, state = strategy.begin_in_weights(start, federation(), weights.__getitem__)
    write_models(path / "audit" / "round-0000", "start", start)
    write_state(path / "audit" / "round-0000", state)
    for round in range(1, ROUNDS + 1):
        asked, refused = who(round)
        updates = {client: params for client, params in trained(start, round=round).items() if client in asked}
        good = {client: params for client, params in updates.items() if client not in refused}
        held = {client: with_frozen(start[client], strategy.frozen_part(state, client)) for client in good}
        loaded = {client: {"digest": digest(held[client]), "keys": len(held[client])} for client in good}
        corrections = dynamic_corrections(state, asked, alpha=ALPHA)
        state = strategy.record_reports(state, reported(strategy, state, good, round=round))
        stepped = server_step(strategy, state, start, good, without_edges(federation(), refused), round=round)
        state, start = stepped.server_state, stepped.client_models
        if served is not None:
            start = served(round, good, start)
        folder = path / "audit" / f"round-{round:04d}"
        write_models(folder, "trained", good)
        if corrections:
            write_models(folder, "correction", corrections)
        write_models(folder, "start", start)
        write_state(folder, state)
        record = {
            "round": round,
            "participants": list(asked),
            "refused": dict.fromkeys(refused, "head.weight holds 1 values that are NaN"),
            "eta": strategy.eta(round),
            "plan": "plan.json",
            "loaded": loaded,
            "clipped": {},
            "restored": {},
            "files": {},
        }
        if refused:
            record["without_edges"] = list(refused)
        write_sealed(folder / "record.json", record)
    return path


def edit_record(path, round, **changes):
    file = path / "audit" / f"round-{round:04d}" / "record.json"
    write_sealed(file, read_sealed(file) | changes)


def edit_tensors(path, round, name, change):
    file = path / "audit" / f"round-{round:04d}" / f"{name}.safetensors"
    flat = load_file(file)
    change(flat)
    save_file(flat, file)


def found(report):
    return {(row.round, row.client, row.check) for row in report.failures}


def only(report, check, *, round=None):
    return [row for row in report.failures if row.check == check and (round is None or row.round == round)]


def only_rows(report, check):
    return [row for row in report.rows if row.check == check]
