"""A whole run: what it leaves behind, that it is a function of its config, and what it does with bad updates."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atlas_fl.audit import audit
from atlas_fl.clients.base import Job, Update
from atlas_fl.config import Config, load_config
from atlas_fl.engines.local import LocalEngine
from atlas_fl.errors import AtlasError, BudgetError, CheckpointError, ConfigError
from atlas_fl.events import Event, Note
from atlas_fl.io.ledger import payload_bytes
from atlas_fl.run import RunResult, resume, run
from atlas_fl.strategies import STRATEGIES
from atlas_fl.tree import shared_part, unprefixed
from tests.runs.reading import rows, same_tensors, state

Make = Callable[..., Config]


def test_a_run_leaves_everything_of_the_design_behind(config: Make) -> None:
    result = run(config())
    for name in ("config.toml", "plan.json", "metrics.jsonl", "ledger.jsonl", "summary.json", "log.txt"):
        assert (result.folder / name).stat().st_size > 0, name
    assert result.complete and result.rounds == 3
    assert {path.name for path in (result.folder / "adapters").iterdir()} == {"movie-0", "movie-1", "trec-0", "trec-1"}
    assert {(row["round"], row["split"]) for row in rows(result.folder) if "split" in row} == {
        (t, split) for t in (1, 2, 3) for split in ("train", "validation", "test")
    }
    assert load_config(result.folder / "config.toml").mixing == config().mixing


def test_every_evaluated_round_says_what_mixing_did(config: Make) -> None:
    result = run(config(eta="0.4", space="product", ranks=4))
    mixed = [row for row in rows(result.folder) if row.get("event") == "mixed"]
    assert [row["round"] for row in mixed] == [1, 2, 3]
    assert all(float(str(row["energy_after"])) < float(str(row["energy_before"])) for row in mixed)
    lost = [share for row in mixed for share in dict(row["discarded"]).values()]  # type: ignore[call-overload]
    assert any(lost), "clients of lower rank cannot hold all of a mixed update"
    assert all(0 <= share < 1 for share in lost)
    assert all(row["norms"] and row["moves"] for row in mixed)
    plan = json.loads((result.folder / "plan.json").read_text())
    assert len(plan["graph"]["effective_neighbours"]) == 4 and plan["data"][0]["labels"]


def test_a_run_is_a_function_of_its_config(config: Make) -> None:
    first, second = run(config(name="a")), run(config(name="b"))
    assert same_tensors(state(first.folder), state(second.folder))
    assert rows(first.folder) == rows(second.folder)
    assert rows(first.folder, "ledger") == rows(second.folder, "ledger")
    other = run(config(name="c", seed=1))
    assert not same_tensors(state(first.folder), state(other.folder))


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("space", ["product", "factors"])
def test_every_strategy_passes_its_audit(config: Make, strategy: str, space: str) -> None:
    result = run(config(strategy=strategy, space=space, eta="0.4", participation="0.75", rounds=2))
    report = audit(result.folder)
    assert report.ok, report.rows
    checked = json.loads((result.folder / "audit/round-0002/record.json").read_text())
    assert len(checked["participants"]) == 3 and set(checked["loaded"]) == set(checked["participants"])


def test_strategies_that_should_differ_do(config: Make) -> None:
    results = [
        run(config(strategy=name, eta="0.3", name=name)) for name in ("local", "fedavg", "fedavg_cluster", "atlas")
    ]
    assert audit(results[0].folder, others=[result.folder for result in results[1:]]).ok
    states = [state(result.folder) for result in results]
    for left in range(len(states)):
        for right in range(left):
            assert not same_tensors(states[left], states[right])


def test_eta_has_an_effect_and_zero_is_local_training(config: Make) -> None:
    zero, tenth, half, local = (
        run(config(eta=eta, strategy=strategy, name=f"{strategy}-{eta}", ranks=4))
        for eta, strategy in (("0", "atlas"), ("0.1", "atlas"), ("0.5", "atlas"), ("0.1", "local"))
    )
    assert same_tensors(state(zero.folder), state(local.folder))
    assert not same_tensors(state(tenth.folder), state(half.folder))
    assert not same_tensors(state(tenth.folder), state(local.folder))


def test_local_sends_nothing_and_others_send_what_their_tensors_encode(config: Make) -> None:
    local = run(config(strategy="local", name="local"))
    assert rows(local.folder, "ledger") == []
    assert local.summary["bytes"]["total"] == 0
    atlas = run(config(name="atlas", share=("A", "B"), eta="0.3"))
    trained = unprefixed(load_file(atlas.folder / "audit/round-0002/trained.safetensors"))
    sent = {r["client"]: r["bytes"] for r in rows(atlas.folder, "ledger") if r["round"] == 2 and r["direction"] == "up"}
    assert sent == {name: payload_bytes(shared_part(params, ("A", "B"))) for name, params in trained.items()}
    assert {row["kind"] for row in rows(atlas.folder, "ledger")} == {"fingerprint", "control", "adapter"}


def test_an_unshared_head_never_moves_on_the_server(config: Make) -> None:
    result = run(config(share=("A", "B"), eta="0.5"))
    trained = load_file(result.folder / "audit/round-0001/trained.safetensors")
    start = load_file(result.folder / "audit/round-0001/start.safetensors")
    heads = [key for key in trained if "/head." in key]
    assert heads and all(torch.equal(trained[key], start[key]) for key in heads)
    assert any(not torch.equal(trained[key], start[key]) for key in trained)


class Spoiler:
    """The local engine, with one client whose update is spoilt in round two."""

    def __init__(
        self, engine: LocalEngine, spoil: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    ) -> None:
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


@pytest.mark.parametrize("kind", SPOILS)
def test_a_bad_update_is_refused_and_recorded_and_the_round_goes_on(
    config: Make, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    import atlas_fl.run as module

    spoil, text = SPOILS[kind]
    whole = module.local_engine
    monkeypatch.setattr(module, "local_engine", lambda assembly, tell: Spoiler(whole(assembly, tell), spoil))
    told: list[Event] = []
    result = run(config(eta="0.3"), on_event=told.append)
    refused = [row for row in rows(result.folder) if row.get("event") == "refused"]
    assert [(row["round"], row["client"]) for row in refused] == [(2, "movie-1")]
    assert text in str(refused[0]["reason"])
    assert any(isinstance(event, Note) and "movie-1" in event.text for event in told)
    assert result.complete and audit(result.folder).ok
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state(result.folder).values())


def test_an_existing_run_is_not_overwritten(config: Make) -> None:
    finished = run(config())
    before = (finished.folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"exists already.*atlas resume"):
        run(config())
    again = run(config(), resume=True)
    assert again.complete and again.summary == finished.summary
    with pytest.raises(CheckpointError, match=r"begun with eta = 0.1, not 0.5.*choose another --name"):
        run(config(eta="0.5"), resume=True)
    assert (finished.folder / "metrics.jsonl").read_bytes() == before


def test_what_cannot_be_planned_leaves_nothing_behind(config: Make) -> None:
    impossible = config(adapter_bytes=10)
    with pytest.raises(BudgetError, match="adapter_bytes 10 does not hold rank 2"):
        run(impossible)
    assert not (Path(impossible.run.runs_dir) / "run").exists()


def test_resume_of_something_else_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(AtlasError, match="not a run folder") as error:
        resume(tmp_path)
    assert "\n" not in str(error.value)


def test_keep_best_never_delivers_a_model_that_is_worse_on_validation(config: Make) -> None:
    mixed = run(config(eta="1.5", name="mixed", laplacian="symmetric"))
    best = run(config(eta="1.5", name="best", laplacian="symmetric", keep="best"))
    record = json.loads((best.folder / "audit/round-0003/record.json").read_text())
    assert record["kept"], "this eta is far too large, so somebody must prefer its own model"

    def losses(result: RunResult) -> dict[str, float]:
        found = [r for r in rows(result.folder) if r["round"] == 3 and r.get("split") == "validation"]
        return {str(row["client"]): float(str(row["loss"])) for row in found}

    assert all(losses(best)[name] <= losses(mixed)[name] for name in losses(mixed))
    assert any(losses(best)[name] < losses(mixed)[name] for name in record["kept"])
    assert audit(best.folder).ok


def test_reclustering_writes_a_new_plan_that_the_audit_uses(config: Make) -> None:
    result = run(config(recluster_every=1, eta="0.3"))
    assert {path.name for path in result.folder.glob("plan*.json")} == {"plan.json", "plan-0002.json", "plan-0003.json"}
    plans = [json.loads((result.folder / name).read_text()) for name in ("plan.json", "plan-0003.json")]
    labels = [[client["cluster"] for client in plan["clients"]] for plan in plans]
    assert labels[0] == labels[1]
    assert plans[0]["clustering"]["reliability"] != plans[1]["clustering"]["reliability"], "it was not measured again"
    assert audit(result.folder).ok


def test_an_imported_adapter_is_the_start(config: Make) -> None:
    first = run(config(ranks=4, strategy="local", name="first"))
    adapter = first.folder / "adapters" / "movie-0"
    second = run(config(ranks=4, strategy="local", name="second", init_adapter=adapter))
    last = unprefixed({k.removeprefix("strategy/"): t for k, t in state(first.folder).items()})["movie-0"]
    begun = unprefixed(load_file(second.folder / "audit/round-0000/start.safetensors"))
    for key, tensor in last.items():
        assert torch.equal(begun["movie-1"][key], tensor), key
    assert torch.equal(begun["trec-0"][key := sorted(k for k in last if "lora_B" in k)[0]], last[key])
