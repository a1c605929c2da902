"""A whole run: what it leaves behind, that it is a function of its config, and what it does with bad updates."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atlas_fl.audit.check import audit_run
from atlas_fl.client.job import Job, Update
from atlas_fl.config import Config, config_hash, load_config
from atlas_fl.errors import AtlasError, BudgetError, CheckpointError, ConfigError
from atlas_fl.events import Event, Note, OnEvent, PhaseStarted
from atlas_fl.experiment.backends import Backend, in_process_backend
from atlas_fl.experiment.export import export_client
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.methods.registry import RULES
from atlas_fl.params import shared_params, unflatten_by_client
from atlas_fl.planning.planner import make_plan, plan_run
from atlas_fl.runtime.engine import Engine
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.runtime.reuse import REUSED_RESULTS
from atlas_fl.setup.assembly import Assembly, assemble
from atlas_fl.storage.tensors import encoded_size
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import audited, passing_audit, rows, same_tensors, state
from tests.runs.sessions import check_same_runs


def test_a_run_leaves_everything_of_the_design_behind(config: Make, finished: FinishedRuns) -> None:
    result = finished(config())
    for name in ("config.toml", "plan.json", "metrics.jsonl", "ledger.jsonl", "summary.json", "log.txt"):
        assert (result.folder / name).stat().st_size > 0, name
    assert result.complete and result.rounds == 2
    assert {path.name for path in (result.folder / "adapters").iterdir()} == {"movie-0", "movie-1", "trec-0", "trec-1"}
    assert {(row["round"], row["split"]) for row in rows(result.folder) if "split" in row} == {
        (t, split) for t in (1, 2) for split in ("train", "validation", "test")
    }
    assert load_config(result.folder / "config.toml").mixing == config().mixing


def test_an_adapter_names_its_labels_in_the_order_of_its_logits(config: Make, finished: FinishedRuns, tmp_path) -> None:
    result = finished(config(rounds=1))
    names = {client.name: client.task.label_names for client in assemble(config()).clients}
    assert names["trec-0"] != names["movie-0"]
    for client in ("movie-0", "trec-0"):
        for folder in (
            result.folder / "adapters" / client,
            export_client(result.folder, client=client, to=tmp_path / client),
        ):
            assert tuple(json.loads((folder / "labels.json").read_text())) == names[client]


def test_the_log_is_written_in_words(config: Make) -> None:
    lines = (run_config(config(rounds=1)).folder / "log.txt").read_text().splitlines()
    assert re.search(
        r"INFO round 1 of 1: loss \d\.\d{3}, \d+\.\d s, [\d,]+ bytes; validation: movie-0 0\.\d", lines[-2]
    )
    assert lines[-1].endswith("INFO export")
    assert not any("(" in line and "=" in line for line in lines), "no Python in it"


def test_the_summary_says_how_much_of_its_device_each_client_uses(config: Make) -> None:
    result = run_config(config(devices=("cpu_2gb", "workstation"), rounds=2))
    plan = json.loads((result.folder / "plan.json").read_text())
    slowest = max(client["predicted"]["seconds"] for client in plan["clients"])
    used = {name: client["utilisation"] for name, client in result.summary["clients"].items()}
    for client in plan["clients"]:
        own = used[client["name"]]
        assert own["busy"] == pytest.approx(client["predicted"]["seconds"] / slowest)
        assert own["memory"] == pytest.approx(client["predicted"]["memory_bytes"] / client["memory"]["total"])
    assert max(own["busy"] for own in used.values()) == 1.0
    assert used["movie-1"]["busy"] < 0.5, "the workstation waits for the slow device"


def test_every_evaluated_round_says_what_mixing_did(config: Make) -> None:
    result = run_config(config(eta="0.4", space="product", ranks=4))
    mixed = [row for row in rows(result.folder) if row.get("event") == "mixed"]
    assert [row["round"] for row in mixed] == [1, 2]
    assert all(float(str(row["spread_after"])) < float(str(row["spread_before"])) for row in mixed)
    lost = [share for row in mixed for share in dict(row["discarded"]).values()]  # type: ignore[call-overload]
    assert any(lost), "clients of lower rank cannot hold all of a mixed update"
    assert all(0 <= share < 1 for share in lost)
    assert all(row["norms"] for row in mixed)
    plan = json.loads((result.folder / "plan.json").read_text())
    assert plan["data"][0]["labels"]


@pytest.mark.parametrize(("fingerprint", "taken"), [("fisher", 0), ("gradient", 0), ("delta", 1)])
def test_only_a_fingerprint_that_trains_is_taken_where_nothing_is_clustered(
    config: Make, fingerprint: str, taken: int
) -> None:
    """Else `fedavg` would start elsewhere than `atlas`, or wait for sketches that nobody reads."""
    actions: list[str] = []

    class Watched(LocalEngine):
        def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
            actions.append(action)
            return super().run(action, jobs)

    starts = {}
    for strategy in ("fedavg", "atlas"):
        actions.clear()
        assembly = assemble(config(fingerprint=fingerprint, strategy=strategy))
        starts[strategy] = plan_run(assembly, Watched(site=assembly.site)).initial_models
        assert actions.count("fingerprint") == (taken if strategy == "fedavg" else 1)
    for name, model in starts["fedavg"].items():
        assert same_tensors(dict(model), dict(starts["atlas"][name]))


@pytest.mark.parametrize("fingerprint", ["delta", "gradient"])
def test_every_cluster_of_the_plan_has_the_mean_loss_of_its_clients_warm_up(config: Make, fingerprint: str) -> None:
    chosen = config(fingerprint=fingerprint)
    assembly = assemble(chosen)
    seen: list[Update] = []

    class Watched(LocalEngine):
        def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
            updates = super().run(action, jobs)
            seen.extend(updates if action == "fingerprint" else ())
            return updates

    plan = plan_run(assembly, Watched(site=assembly.site)).plan
    losses = {update.client: update.metrics["loss"] for update in seen}
    assert plan.clustering["settings"]["clusters"] == "oracle"
    clusters = plan.clustering["clusters"]
    assert [cluster["size"] for cluster in clusters] == [2, 2]
    for cluster in clusters:
        assert cluster["difficulty"] == pytest.approx(sum(losses[name] for name in cluster["clients"]) / 2)


def test_the_plan_shows_the_largest_rank_of_every_device(config: Make) -> None:
    chosen = config(devices=("smartphone", "workstation"), adapter_bytes=30_000)
    plan = make_plan(chosen)
    # query and value of three blocks, each 32 by 32: a rank takes 2 * (32 + 32) * 3 * 4 bytes of parameters
    assert 30_000 // (2 * 64 * 3 * 4) == 19
    assert [client.largest_rank for client in plan.clients] == [8, 19, 8, 19], "the smartphone's profile ends at 8"


@pytest.mark.parametrize("change", [{"fingerprint_blocks": 1}, {"fingerprint_samples": 12}])
def test_blocks_and_samples_of_the_fingerprint_reach_the_sketches(config: Make, change: dict[str, int]) -> None:
    sketches = []
    for values in ({}, change):
        assembly = assemble(config(fingerprint="gradient", **values))
        found = plan_run(assembly, LocalEngine(site=assembly.site)).sketches
        assert found is not None
        sketches.append(found)
    assert sketches[0].shape == sketches[1].shape
    assert (abs(sketches[0] - sketches[1]).max(axis=2) > 0.05).all()


def test_a_run_is_a_function_of_its_config(config: Make, finished: FinishedRuns, monkeypatch) -> None:
    monkeypatch.setattr(REUSED_RESULTS, "max_bytes", 0)
    first, second = finished(config(name="a")), run_config(config(name="b"))
    check_same_runs(first.folder, second.folder)
    other = run_config(config(name="c", seed=1))
    assert not same_tensors(state(first.folder), state(other.folder))


NEEDED: Mapping[str, Mapping[str, object]] = {
    "fedavg_dynamic": {"space": "factors", "ranks": "4", "proximal_mu": 0.1},
    # the last of its rounds waits for everyone, and the second for three
    "fedavg_by_arrival": {"space": "factors", "ranks": "4", "participation": 1, "buffer": 3, "rounds": 3},
    "fedavg_by_qr": {"space": "factors"},
    "fedavg_by_rank": {"space": "product"},
    "fedavg_by_rank_one": {"space": "factors"},
    "fedavg_cluster_routed": {"space": "factors", "ranks": "4"},
    "fedavg_in_levels": {"space": "product", "ranks": "4"},
    "fedavg_in_tree_and_outside": {"space": "factors", "ranks": "4", "tree_threshold": 0},
    "fedavg_of_cores": {"space": "factors", "ranks": "4", "trained_parts": "core"},
    "fedavg_of_heads": {"space": "factors", "ranks": "4", "trained_parts": "core"},
    "fedavg_orthonormal": {"space": "factors", "ranks": "4"},
    "fedavg_rotated": {"space": "factors", "ranks": "4"},
    "fedavg_stacked": {"space": "factors"},
    "fedavg_with_rest": {"space": "product", "ranks": "4"},
    "fedavg_with_residual": {"space": "factors", "ranks": "4"},
    "ifca": {"ranks": "4"},
    "kriging": {"measure_round": 1},
}
"""What validation asks of a strategy beside its name."""


# tests/audit/test_honest.py has every strategy in both spaces, on rounds that are written without training
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "space"), list(zip(sorted(RULES), cycle(("product", "factors")))))
def test_every_strategy_passes_its_audit(config: Make, strategy: str, space: str) -> None:
    words = {"space": space, "participation": "0.75", "rounds": 2, **NEEDED.get(strategy, {})}
    result = run_config(config(strategy=strategy, eta="0.4", **words))
    passing_audit(result.folder)
    checked = json.loads((result.folder / "audit/round-0002/record.json").read_text())
    assert len(checked["participants"]) == 3 and set(checked["loaded"]) == set(checked["participants"])


@pytest.mark.slow
def test_strategies_that_should_differ_do(config: Make) -> None:
    results = [
        run_config(config(strategy=name, eta="0.3", name=name, rounds=2))
        for name in ("local", "fedavg", "fedavg_cluster", "atlas_laplacian")
    ]
    for result in results:
        passing_audit(result.folder)
    states = [state(result.folder, round=2) for result in results]
    for left in range(len(states)):
        for right in range(left):
            assert not same_tensors(states[left], states[right])


@pytest.mark.slow
def test_eta_has_an_effect_and_zero_is_local_training(config: Make) -> None:
    def end(strategy: str, eta: str) -> dict[str, torch.Tensor]:
        made = config(eta=eta, strategy=strategy, name=f"{strategy}-{eta}", ranks=4, rounds=2)
        return state(run_config(made).folder, round=2)

    none, little, much = (end("atlas_laplacian", eta) for eta in ("0", "0.1", "0.5"))
    alone = end("local", "0.1")
    assert same_tensors(none, alone)
    assert not same_tensors(little, much)
    assert not same_tensors(little, alone)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["atlas_laplacian", "fedavg"])
def test_aggregating_every_second_round_halves_the_bytes_and_passes_the_audit(config: Make, strategy: str) -> None:
    usual = {"rounds": 4, "eta": "0.4", "strategy": strategy, "ranks": 4}
    every = run_config(config(name="every", **usual))
    second = run_config(config(name="second", aggregate_every=2, **usual))
    sent = [[row for row in rows(result.folder, "ledger") if row["round"]] for result in (every, second)]
    totals = [sum(int(str(row["bytes"])) for row in found) for found in sent]
    assert totals[0] == 2 * totals[1] > 0
    assert {row["round"] for row in sent[1]} == {2, 4}
    passing_audit(second.folder)
    for at, waits in ((1, True), (2, False), (3, True), (4, False)):
        assert same_tensors(*audited(second.folder, at, "trained", "start")) == waits
    assert [row["round"] for row in rows(second.folder) if row.get("event") == "mixed"] == [2, 4]


def test_a_mixture_in_a_round_without_aggregation_fails_the_audit(config: Make) -> None:
    result = run_config(config(eta="0.4", ranks=4, rounds=2))
    passing_audit(result.folder)
    file = result.folder / "config.toml"
    file.write_text(file.read_text().replace("aggregate_every = 1", "aggregate_every = 2"))
    report = audit_run(result.folder)
    assert not report.ok and {row.round for row in report.failures if row.check == "mixed"} == {1}


def test_who_trains_stays_the_same_up_to_the_next_aggregation(config: Make) -> None:
    result = run_config(config(aggregate_every=2, participation="0.5", rounds=5, eta="0.4"))
    records = [json.loads((result.folder / f"audit/round-{at:04d}/record.json").read_text()) for at in range(1, 6)]
    who = [record["participants"] for record in records]
    assert who[0] == who[1] and who[2] == who[3] and len({tuple(names) for names in who}) > 1
    assert [record["eta"] for record in records] == [0.0, 0.4, 0.0, 0.4, 0.4]
    passing_audit(result.folder)
    up = {(row["round"], row["client"]) for row in rows(result.folder, "ledger") if row["kind"] == "adapter"
          and row["direction"] == "up"}  # fmt: skip
    assert up == {(at, name) for at in (2, 4, 5) for name in who[at - 1]}


def test_local_sends_nothing_and_others_send_what_their_tensors_encode(config: Make) -> None:
    local = run_config(config(strategy="local", name="local"))
    assert rows(local.folder, "ledger") == []
    assert local.summary["bytes"]["total"] == 0
    atlas = run_config(config(name="atlas", share=("A", "B"), eta="0.3"))
    trained = unflatten_by_client(load_file(atlas.folder / "audit/round-0002/trained.safetensors"))
    sent = {r["client"]: r["bytes"] for r in rows(atlas.folder, "ledger") if r["round"] == 2 and r["direction"] == "up"}
    assert sent == {name: encoded_size(shared_params(params, ("A", "B"))) for name, params in trained.items()}
    assert {row["kind"] for row in rows(atlas.folder, "ledger")} == {"fingerprint", "importance", "control", "adapter"}


@pytest.mark.slow
def test_an_unshared_head_never_moves_on_the_server(config: Make) -> None:
    result = run_config(config(share=("A", "B"), eta="0.5"))
    trained, start = audited(result.folder, 1, "trained", "start")
    heads = [key for key in trained if "/head." in key]
    assert heads and all(torch.equal(trained[key], start[key]) for key in heads)
    assert any(not torch.equal(trained[key], start[key]) for key in trained)


Spoil = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class Spoiler:
    """The local engine, with one client whose update is spoilt in round two."""

    def __init__(self, engine: Engine, spoil: Spoil) -> None:
        self.engine, self.spoil = engine, spoil

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        updates = self.engine.run(action, jobs)
        if action != "train" or jobs[0].round != 2:
            return updates
        return [replace(u, params=self.spoil(dict(u.params))) if u.client == "movie-1" else u for u in updates]


def first_key(params: dict[str, torch.Tensor]) -> str:
    return sorted(params)[0]


SPOILS = {
    "NaN": (lambda p: {**p, first_key(p): p[first_key(p)] * float("nan")}, "NaN or infinite"),
    "infinity": (lambda p: {**p, first_key(p): p[first_key(p)] + float("inf")}, "NaN or infinite"),
    "shape": (lambda p: {**p, first_key(p): p[first_key(p)][:1]}, "return it as sent"),
    "missing": (lambda p: {key: t for key, t in p.items() if key != first_key(p)}, "lacks"),
}


def spoilt(spoil: Spoil) -> Backend:
    """This process, where one client's update is spoilt."""

    @contextmanager
    def backend(config: Config, tell: OnEvent) -> Iterator[tuple[Assembly, Engine]]:
        with in_process_backend(config, tell) as (assembly, engine):
            yield assembly, Spoiler(engine, spoil)

    return backend


def test_who_is_refused_at_an_aggregation_goes_back_to_what_the_server_has(config: Make) -> None:
    spoil, _ = SPOILS["NaN"]
    result = run_config(config(eta="0.3", aggregate_every=2), backend=spoilt(spoil))
    passing_audit(result.folder)
    begun = unflatten_by_client(load_file(result.folder / "audit/round-0000/start.safetensors"))
    after = unflatten_by_client(load_file(result.folder / "audit/round-0002/start.safetensors"))
    assert same_tensors(dict(begun["movie-1"]), dict(after["movie-1"]))
    assert not same_tensors(dict(begun["movie-0"]), dict(after["movie-0"]))


@pytest.mark.parametrize("kind", SPOILS)
def test_a_bad_update_is_refused_and_recorded_and_the_round_goes_on(config: Make, kind: str) -> None:
    spoil, text = SPOILS[kind]
    told: list[Event] = []
    result = run_config(config(eta="0.3", rounds=2), on_event=told.append, backend=spoilt(spoil))
    refused = [row for row in rows(result.folder) if row.get("event") == "refused"]
    assert [(row["round"], row["client"]) for row in refused] == [(2, "movie-1")]
    assert text in str(refused[0]["reason"])
    assert any(isinstance(event, Note) and "movie-1" in event.text for event in told)
    assert result.complete and audit_run(result.folder).ok
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state(result.folder, round=2).values())


@pytest.mark.parametrize(
    ("values", "is_same"),
    [
        ({"norm_bound": "refuse", "max_share": 1, "within": "all", "attack": "none", "server_tau": 0.001}, True),
        *((one, False) for one in ({"norm_bound": "off"}, {"server_tau": 0.01}, {"topology": "paired"})),
        ({"arrive": "movie-1=2"}, False),
    ],
)
def test_settings_at_their_defaults_alone_are_no_part_of_the_identity(
    config: Make, values: Mapping[str, object], is_same: bool
) -> None:
    assert (config_hash(config(**values)) == config_hash(config())) is is_same


def test_an_existing_run_is_not_overwritten(config: Make, finished: FinishedRuns) -> None:
    first = finished(config())
    before = (first.folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"exists already.*atlas resume"):
        run_config(config())
    again = run_config(config(), resume=True)
    assert again.complete and again.summary == first.summary
    with pytest.raises(CheckpointError, match=r"begun with eta = 0.5, not 0.25.*choose another --name"):
        run_config(config(eta="0.25"), resume=True)
    assert (first.folder / "metrics.jsonl").read_bytes() == before


def test_what_cannot_be_planned_leaves_nothing_behind(config: Make) -> None:
    impossible = config(adapter_bytes=10)
    with pytest.raises(BudgetError, match="adapter_bytes 10 does not hold rank 2"):
        run_config(impossible)
    assert not (Path(impossible.run.runs_dir) / "run").exists()


def test_a_device_that_fits_nothing_is_refused_before_a_fingerprint_is_taken(config: Make) -> None:
    tiny = "tiny=memory_gb=0.05,gflops=50,up_mbps=5,down_mbps=20,latency_ms=60,max_rank=8"
    told: list[Event] = []
    with pytest.raises(BudgetError, match=r"tiny has 53\.7 MB of memory and training takes"):
        make_plan(config(devices=("gpu_16gb", "tiny"), device=(tiny,)), on_event=told.append)
    assert [event.name for event in told if isinstance(event, PhaseStarted)] == ["loading"]


def test_resume_of_something_else_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(AtlasError, match="not a run folder") as error:
        resume_run(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("fingerprint", ["fisher", "delta"])
def test_reclustering_measures_again_and_writes_a_new_plan_that_the_audit_uses(config: Make, fingerprint: str) -> None:
    result = run_config(config(recluster_every=1, eta="0.3", fingerprint=fingerprint))
    assert {path.name for path in result.folder.glob("plan*.json")} == {"plan.json", "plan-0002.json"}
    plans = [json.loads((result.folder / name).read_text()) for name in ("plan.json", "plan-0002.json")]
    labels = [[client["cluster"] for client in plan["clients"]] for plan in plans]
    assert labels[0] == labels[1]
    assert plans[0]["clustering"]["reliability"] != plans[1]["clustering"]["reliability"], "it was not measured again"
    passing_audit(result.folder)


@pytest.mark.parametrize("blocks", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_an_imported_adapter_is_the_start(config: Make, blocks: int | None) -> None:
    words = {"ranks": 4, "strategy": "local", "adapted_blocks": blocks}
    first = run_config(config(name="first", **words))
    adapter = first.folder / "adapters" / "movie-0"
    second = run_config(config(name="second", init_adapter=adapter, **words))
    last = unflatten_by_client({k.removeprefix("strategy/"): t for k, t in state(first.folder).items()})["movie-0"]
    begun = unflatten_by_client(load_file(second.folder / "audit/round-0000/start.safetensors"))
    for key, tensor in last.items():
        assert torch.equal(begun["movie-1"][key], tensor), key
    assert torch.equal(begun["trec-0"][key := sorted(k for k in last if "lora_B" in k)[0]], last[key])


@pytest.mark.slow
def test_shuffled_labels_bring_accuracy_to_the_majority_class(config: Make) -> None:
    def gain(name: str, *, shuffle: bool) -> float:
        """Accuracy on test examples over the share of their majority class, with the embedded model."""
        data = {"tasks": ("trec",), "clients_per_task": 1, "samples": 100, "validation_samples": 2, "test_samples": 200}
        training = {"model": "minilm", "lr": 5e-3, "rounds": 5, "eval_every": 5, "strategy": "local"}
        training |= {"adapted_blocks": 2}  # those below are computed once
        made = config(name=name, shuffle_labels=shuffle, audit=False, ranks=4, **data, **training)
        return float(run_config(made).summary["overall"]["final"]["test"]["gain_over_majority"])

    # 200 examples: one standard deviation of guessing is .03.
    assert (found := gain("true", shuffle=False)) > 0.2, found
    assert abs(found := gain("shuffled", shuffle=True)) < 0.1, found


def test_models_that_give_no_numbers_are_told_and_count_as_wrong(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.nn.functional.linear

    def breaks(features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = real(features, weight, bias)
        return output if torch.is_grad_enabled() else torch.full_like(output, float("nan"))

    monkeypatch.setattr("atlas_fl.models.registry.nn.functional.linear", breaks)
    events: list[Event] = []
    small = {"tasks": "movie", "samples": 8, "validation_samples": 4, "test_samples": 4, "rounds": 1}
    result = run_config(config(**small, strategy="local", clusters="oracle", audit=False), on_event=events.append)
    notes = [event.text for event in events if isinstance(event, Note) and "NaN or infinite" in event.text]
    assert notes[:2] == [
        f"round 1: the models of movie-0, movie-1 give outputs that are NaN or infinite for {split} examples, which"
        " count as wrong; lower the learning rate or clip"
        for split in ("validation", "test")
    ]
    scored = [row for row in rows(result.folder) if row.get("split") in ("validation", "test")]
    assert scored and all(row["accuracy"] == 0 and "loss" not in row for row in scored)
