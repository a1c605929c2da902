"""Runs whose models are cut: the adapters of a run without a cut, every byte in the ledger, audit and resume."""

import io
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
from rich.console import Console

from atlas_fl.errors import AtlasError, BudgetError, ConfigError
from atlas_fl.experiment.run import RunResult, run_config
from atlas_fl.planning.planner import make_plan
from atlas_fl.planning.ranks_and_cuts import cuts_for_planning
from atlas_fl.report.tables import plan_tables
from atlas_fl.setup.assembly import assemble
from atlas_fl.storage.jsonl import read_json
from atlas_fl.storage.run_folder import RunFolder
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors, state

# So small that the whole model does not fit: the runtime alone takes 427,819,008 bytes.
SMALL = "small=memory_gb={gb},gflops=20,up_mbps=2,down_mbps=10,latency_ms=60,max_rank=8"


def sums(folder: Path, *, round: int | None = None) -> dict[tuple[str, str, str], int]:
    found: dict[tuple[str, str, str], int] = {}
    for row in rows(folder, "ledger"):
        if round in (None, row["round"]):
            key = (str(row["client"]), str(row["kind"]), str(row["direction"]))
            found[key] = found.get(key, 0) + int(str(row["bytes"]))
    return found


def planned(folder: Path, client: str, phase: str) -> dict[tuple[str, str], int]:
    """Bytes before round one of what is labelled so, by kind and direction."""
    return {
        (str(row["kind"]), str(row["direction"])): int(str(row["bytes"]))
        for row in rows(folder, "ledger")
        if (row["round"], row["client"], row.get("phase", "")) == (0, client, phase)
    }


@pytest.fixture(scope="module")
def whole(shared_config: Make) -> RunResult:
    return run_config(shared_config(name="whole", dropout=0.1, eta=0.3, pack_tokens=1))  # who is cut is in no pack


@pytest.mark.slow
@pytest.mark.parametrize("head", ["server", "client"])
def test_a_run_with_a_cut_ends_with_the_adapters_of_one_without(config: Make, whole: RunResult, head: str) -> None:
    words = {"dropout": 0.1, "eta": 0.3, "pack_tokens": 1}
    cut = run_config(config(name="cut", split="cpu_2gb=2,trec-0=1", head=head, **words))
    assert same_tensors(state(whole.folder), state(cut.folder))
    whole_rows, cut_rows = ([row for row in rows(run.folder) if row.get("event") != "timed"] for run in (whole, cut))
    assert whole_rows == cut_rows, "all but the seconds that a device takes"
    passing_audit(cut.folder)
    plans = [read_json(RunFolder(result.folder).plan) for result in (whole, cut)]
    for part in ("clustering", "importance", "adjacency"):
        assert plans[0][part] == plans[1][part], part
    before, after = sums(whole.folder), sums(cut.folder)
    clients = {client for client, kind, _ in after if kind == "activation"}
    assert len(clients) == 2
    for client in clients:
        assert after[client, "activation", "up"] > after[client, "gradient", "down"] > 0
        # what is above the cut never travels
        assert after[client, "adapter", "up"] < before[client, "adapter", "up"]
        assert ((client, "head", "up") in after) == (head == "client")
        assert ((client, "label", "up") in after) == (head == "server")
        for phase in ("fingerprint", "importance"):
            assert planned(cut.folder, client, phase)["activation", "up"] > 0
        # The sketches are the server's, so the client sends its part of them and no sketch.
        assert set(planned(cut.folder, client, "")) == {("control", "down")}
    others = {key: size for key, size in after.items() if key[0] not in clients and key[1] != "control"}
    assert others == {key: size for key, size in before.items() if key[0] not in clients and key[1] != "control"}
    assert cut.summary["bytes"]["by_kind"]["activation"]["up"] > 0
    assert cut.summary["bytes"]["by_kind"]["gradient"]["down"] > 0


def test_a_client_that_trains_alone_sends_what_crosses_its_cut_and_nothing_else(config: Make) -> None:
    result = run_config(config(name="alone", strategy="local", split="1", rounds=1))
    kinds = {kind for _, kind, _ in sums(result.folder, round=1)}
    assert kinds == {"activation", "gradient", "label", "control"}


@pytest.mark.slow
def test_the_plan_predicts_what_the_ledger_counts(config: Make) -> None:
    settings = {"name": "cut", "split": "1", "rounds": 1, "eval_every": 1}
    result = run_config(config(**settings))
    counted = sums(result.folder, round=1)
    for client in make_plan(config(**settings)).clients:
        predicted = dict(client.split["crossing_bytes"])
        crossed = {
            f"{kind}_{direction}": size
            for (name, kind, direction), size in counted.items()
            if name == client.name and kind in ("activation", "gradient", "label", "control")
        }
        assert set(crossed) == set(predicted)
        assert crossed["gradient_down"] == pytest.approx(predicted["gradient_down"], rel=0.01)
        assert crossed["control_up"] == predicted["control_up"]
        # evaluation sends a pass more of these
        assert all(crossed[kind] > 0.98 * predicted[kind] for kind in ("activation_up", "label_up"))
        assert client.predicted["up_bytes"] >= predicted["activation_up"] + predicted["label_up"]
        parts = ("client_seconds", "server_seconds", "link_seconds")
        assert client.predicted["seconds"] == pytest.approx(sum(client.split[part] for part in parts))


def plan_of(config: Make, gb: float, **settings: object):
    return make_plan(config(devices=("small",), device=(SMALL.format(gb=gb),), ranks="2", **settings))


def most_needed(config: Make, split: str) -> float:
    """The memory in GB that the greediest client of the tiny federation needs with this `--split`."""
    plan = plan_of(config, 1, split=split)
    return max(float(client.predicted["memory_bytes"]) for client in plan.clients) / 2**30


@pytest.fixture(scope="module")
def needs(shared_config: Make) -> Callable[[str], float]:
    """`most_needed`, worked out once for each `--split`."""
    return cache(partial(most_needed, shared_config))


def test_a_plan_says_who_decided_on_each_cut_and_on_none(config: Make) -> None:
    some, none = plan_of(config, 8, split="movie-0=1"), plan_of(config, 8, split="none")
    reasons = {client.name: client.split["reason"] for client in some.clients}
    assert reasons["movie-0"] == "set by --split"
    assert {reason for name, reason in reasons.items() if name != "movie-0"} == {"left whole by --split"}
    assert not any(client.split for client in none.clients), "nothing was asked for"


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["score", "time"])
def test_auto_cuts_only_where_the_device_cannot_hold_the_model(
    config: Make, needs: Callable[[str], float], objective: str
) -> None:
    roomy = plan_of(config, 1, split="auto")
    assert {client.cut for client in roomy.clients} == {None}
    assert {client.split["reason"] for client in roomy.clients} == {"the device holds the whole model"}
    least, most = needs("1"), needs("none")
    assert least < needs("2") < most
    tight = plan_of(config, (least + most) / 2, split="auto", split_objective=objective)
    cut = [client for client in tight.clients if client.cut is not None]
    assert cut
    for client in cut:
        assert client.cut in (1, 2)
        assert client.split["reason"].startswith("best score" if objective == "score" else "smallest round time")
        assert client.predicted["memory_bytes"] <= client.memory["total"]
        assert sum(client.split["server_memory"].values()) > 0
    shown = io.StringIO()
    for table in plan_tables(tight.to_json()):
        Console(width=80, file=shown).print(table)
    assert max(map(len, shown.getvalue().splitlines())) <= 80
    for part in ("Cuts", *(own.name for own in cut)):
        assert part in shown.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(("split", "cut"), [("auto", 1), ("2", 2), ("small=2,movie=auto", 1), ("none", None)])
def test_while_it_is_planned_a_client_is_cut_as_set_or_at_one_block_where_auto_has_to_cut(
    config: Make, needs: Callable[[str], float], split: str, cut: int | None
) -> None:
    gb = 1 if split == "none" else (needs("2") + needs("none")) / 2
    assembly = assemble(config(devices=("small",), device=(SMALL.format(gb=gb),), ranks="2", split=split))
    found = cuts_for_planning(assembly)
    greediest = max(assembly.clients, key=lambda own: int(assembly.site.data[own.name].splits["train"].offsets[-1]))
    assert (found[greediest.name].blocks if greediest.name in found else None) == cut
    roomy = assemble(config(devices=("small",), device=(SMALL.format(gb=1),), ranks="2", split="auto"))
    assert cuts_for_planning(roomy) == {}


@pytest.mark.parametrize(
    ("gb", "settings", "kind", "message"),
    [
        (1, {"split": "3"}, ConfigError, "--split cuts at block 3, and .* has 3 blocks .*; allowed: .* or 1 to 2"),
        (0.375, {"split": "auto"}, BudgetError, "small fits no cut of .*; with one block on it: small has"),
        (0.375, {"split": "2"}, BudgetError, "small has .* of memory and training takes"),
    ],
)
def test_a_cut_that_cannot_be_is_told_in_a_line(config: Make, gb: float, settings, kind, message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        plan_of(config, gb, **settings)
    assert isinstance(caught.value, AtlasError)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_memory_binds_the_ranks_below_the_cut_alone(config: Make, needs: Callable[[str], float]) -> None:
    """The blocks above the cut keep the ranks that the upload allows."""
    room = needs("1") + 24_000 / 2**30
    settings = {"split": "1", "ranks": "uniform", "candidates": (2, 4, 8), "adapter_bytes": 10**7}
    free = make_plan(config(devices=("small",), device=(SMALL.format(gb=1),), **settings))
    tight = make_plan(config(devices=("small",), device=(SMALL.format(gb=room),), **settings))
    assert {client.ranks for client in free.clients} == {(8, 8, 8)}
    assert all(client.ranks[1:] == (8, 8) for client in tight.clients)
    assert any(client.ranks[0] < 8 for client in tight.clients)


@pytest.mark.slow
def test_auto_is_the_run_at_the_cuts_that_it_took(config: Make) -> None:
    gb = (most_needed(config, "2") + most_needed(config, "none")) / 2
    settings = {"devices": ("small", "tablet_4gb"), "device": (SMALL.format(gb=gb),), "ranks": "2", "rounds": 1}
    settings |= {"dropout": 0.1, "eval_every": 1}
    auto = run_config(config(name="auto", split="auto", **settings))
    cuts = {client["name"]: client["cut"] for client in read_json(auto.folder / "plan.json")["clients"]}
    named = ",".join(f"{name}={cut}" for name, cut in cuts.items() if cut is not None)
    assert named
    fixed = run_config(config(name="fixed", split=named, **settings))
    assert same_tensors(state(auto.folder, round=1), state(fixed.folder, round=1))
    assert rows(auto.folder) == rows(fixed.folder)
    passing_audit(auto.folder)
