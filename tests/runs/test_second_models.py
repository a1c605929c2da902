"""Runs in which every client trains a model of its own beside the shared one: Ditto, APFL, FedDPA, shrinkage."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from atlas_fl.audit.check import audit_run
from atlas_fl.config import Config, validate
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.export import GATED, export_client, load_models
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.methods.apfl import WEIGHT
from atlas_fl.params import SHARE, Params
from atlas_fl.setup.assembly import assemble
from atlas_fl.storage.run_folder import RunFolder
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import alter_tensors, audited, passing_audit, rows, same_tensors, state
from tests.second_model import add_gated

pytestmark = pytest.mark.core

METHODS = ("ditto", "apfl", "feddpa")
"""Those with a second model; `fedalt` has one own model beside the mean of the others."""
PLAIN: Mapping[str, Any] = {"space": "factors", "ranks": "4", "tasks": "movie"}


def adapters(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [load_file(path) for path in sorted((folder / "adapters").rglob("adapter_model.safetensors"))]


def gated(folder: Path, client: str) -> Params:
    return load_models(RunFolder(folder))[client]


def loss_of(config: Config, params: Params, *, client: str) -> float:
    """The mean test loss of the stock classifier with these gated adapters on a client's rows."""
    site = assemble(validate(config)).site
    rows = site.data[client].splits["test"]
    classes = site.data[client].task.num_labels
    stock = AutoModelForSequenceClassification.from_pretrained(site.backbone.source, num_labels=classes)
    model = add_gated(stock.eval(), params, family=site.backbone.family, scale=site.scale)
    losses = []
    for start, stop, label in zip(rows.offsets[:-1], rows.offsets[1:], rows.labels, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(rows.ids[start:stop])[None]).logits
        losses.append(float(torch.nn.functional.cross_entropy(logits, torch.tensor([int(label)]))))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("strategy", METHODS)
def test_a_run_passes_its_audit_and_the_shared_model_is_that_of_fedavg(config, finished, strategy: str) -> None:
    folder = run_config(config(**PLAIN, strategy=strategy)).folder
    fedavg = finished(config(**PLAIN, strategy="fedavg", name="fedavg")).folder
    passing_audit(folder)
    assert {"second", "mixed"} <= {row.check for row in audit_run(folder).rows}
    for name in ("start", "trained"):
        first, second = (load_file(one / f"audit/round-0002/{name}.safetensors") for one in (folder, fedavg))
        assert all(torch.equal(first[key], second[key]) for key in first)
    assert rows(folder, "ledger") == rows(fedavg, "ledger"), "no byte more"
    ends = [adapters(one) for one in (folder, fedavg)]
    assert all(
        mine[key].shape != other[key].shape or not torch.equal(mine[key], other[key])
        for mine, other in zip(*ends, strict=True)
        for key in mine
        if "lora_B" in key
    )


def test_a_stack_that_is_all_one_s_own_is_local_training(config: Make) -> None:
    own = config(**PLAIN, strategy="feddpa", second_weight=1.0, dropout=0.0)
    local = config(**PLAIN, strategy="local", dropout=0.0, name="local")
    mine, alone = (adapters(run_config(one).folder) for one in (own, local))
    for one, other in zip(mine, alone, strict=True):
        for key in (key for key in one if "lora_A" in key):
            of_b = key.replace("lora_A", "lora_B")
            update, wanted = (params[of_b][:, :4] @ params[key][:4] for params in (one, other))
            torch.testing.assert_close(update, wanted, rtol=1e-3, atol=1e-5)


def test_a_strong_pull_holds_the_own_model_near_the_shared_one(config: Make) -> None:
    def distance(weight: float) -> float:
        values = {**PLAIN, "strategy": "ditto", "second_weight": weight, "clip": 0, "name": f"pull-{weight}"}
        folder = run_config(config(**values)).folder
        own = load_file(folder / "audit/round-0002/second.safetensors")
        sent = load_file(folder / "audit/round-0001/start.safetensors")
        return sum(float((own[key] - sent[key]).norm()) for key in own if key in sent)

    assert distance(50.0) < 0.8 * distance(0.001)


def test_fedalt_sends_everyone_the_mean_of_all_with_its_share_and_keeps_its_own(config: Make) -> None:
    folder = run_config(config(**{**PLAIN, "clients_per_task": 3}, strategy="fedalt")).folder
    passing_audit(folder, "server")
    trained, start, anchor, shares = audited(folder, 2, "trained", "start", "anchor", "server")
    assert {name: float(share) for name, share in shares.items()} == pytest.approx(
        {f"{SHARE}/movie-{k}/{SHARE}": 1 / 3 for k in range(3)}
    )
    for key in {key.split("/", 1)[1] for key in trained}:
        for k in range(3):
            everyone = [trained[f"movie-{one}/{key}"].double() for one in range(3)]
            assert torch.equal(start[f"movie-{k}/{key}"], trained[f"movie-{k}/{key}"])
            if key.startswith("head."):
                continue
            torch.testing.assert_close(anchor[f"movie-{k}/{key}"].double(), sum(everyone) / 3, atol=1e-6, rtol=1e-5)
    assert anchor.keys() == start.keys()
    stacked = gated(folder, "movie-0")
    for key in [key for key in stacked if key.endswith("lora_A")]:
        own, rest = stacked[key].chunk(2)  # both adapters, one on the other
        assert torch.equal(own, start[f"movie-0/{key}"])
        others = [trained[f"movie-{other}/{key}"].double() for other in (1, 2)]
        torch.testing.assert_close(rest.double(), sum(others) / 2, atol=1e-6, rtol=1e-5)
        assert not torch.allclose(rest, anchor[f"movie-0/{key}"], atol=1e-5)


@pytest.mark.parametrize("secure", [False, True])
def test_an_audit_finds_a_share_that_was_altered(config: Make, secure: bool) -> None:
    folder = run_config(config(**{**PLAIN, "clients_per_task": 3}, strategy="fedalt_fixed", secure=secure)).folder
    passing_audit(folder, "server")
    path = folder / "audit/round-0002/server.safetensors"
    for factor in (1.01, 0.0):
        alter_tensors(path, lambda shares, factor=factor: shares[f"{SHARE}/movie-1/{SHARE}"].mul_(factor))
        assert "server" in {row.check for row in audit_run(folder).failures}


@pytest.mark.parametrize("strategy", ["fedalt", "fedalt_fixed"])
def test_secure_sums_make_the_same_own_models(config: Make, strategy: str) -> None:
    given = {**PLAIN, "clients_per_task": 3, "strategy": strategy}
    plain, secure = (run_config(config(**given, secure=one, name=f"sums-{one}")).folder for one in (False, True))
    passing_audit(secure, "server", "mixed")
    for client in ("movie-0", "movie-1", "movie-2"):
        one, other = gated(plain, client), gated(secure, client)
        assert one.keys() == other.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(tensor, other[key], atol=2e-4, rtol=1e-3)


def test_a_run_with_shares_goes_on_to_the_same_bits(config: Make) -> None:
    given = {**PLAIN, "clients_per_task": 3, "strategy": "fedalt_fixed"}
    whole = run_config(config(**given, name="whole")).folder
    parts = run_config(config(**given, name="parts", max_rounds=1)).folder
    assert resume_run(parts).complete
    assert same_tensors(state(whole), state(parts))


SHRUNK: Mapping[str, Any] = {
    **{"strategy": "shrinkage", "measure_round": 1, "rounds": 3, "ranks": "4", "lr": 0.02},
    **{"tasks": "sms", "clients_per_task": 4, "flipped_clients": 0.5},
}
"""Two clients have each class under the other's name, so that the clients differ."""


def test_shrinkage_goes_on_with_the_mean_and_a_part_of_its_own(config: Make) -> None:
    """The variances are those of round one; the model that predicts is moved to the newest mean."""
    folder = run_config(config(**SHRUNK)).folder
    passing_audit(folder, "server", "mixed")
    (told,) = audited(folder, 1, "server")
    assert not (folder / "audit/round-0002/server.safetensors").exists(), "it is measured once"
    parts = {f"sms-{k}": float(told[f"{SHARE}/sms-{k}/{SHARE}"]) for k in range(4)}
    assert all(0.2 < part < 1 for part in parts.values())
    first, start, last, mean = (
        *audited(folder, 1, "trained"),
        *audited(folder, 0, "start"),
        *audited(folder, 3, "trained", "anchor"),
    )
    lengths = [
        torch.cat([(first[key] - start[key]).flatten() for key in start if key.startswith(name) and "lora" in key])
        for name in parts
    ]
    length = sum(float(one.double().square().mean()) for one in lengths) / len(lengths)
    assert float(told["means/length"]) == pytest.approx(length, rel=1e-4)
    for name, model in load_models(RunFolder(folder)).items():
        for key, tensor in model.items():
            own, shared = last[f"{name}/{key}"].double(), mean[f"{name}/{key}"].double()
            part = 0.0 if key.startswith("head.") else parts[name]
            torch.testing.assert_close(tensor.double(), shared + part * (own - shared), atol=1e-6, rtol=1e-5)


def test_variances_of_secure_sums_are_those_of_single_reports(config: Make) -> None:
    plain, secure = (run_config(config(**SHRUNK, secure=one, name=f"sums-{one}")).folder for one in (False, True))
    passing_audit(secure, "server", "mixed")
    one, other = (audited(folder, 1, "server")[0] for folder in (plain, secure))
    assert one.keys() == other.keys()
    for name, value in one.items():  # numbers of 1e-3 in a range of 4, right to 2e-8
        assert float(other[name]) == pytest.approx(float(value), rel=2e-3), name


def test_an_audit_finds_a_kept_part_that_was_altered(config: Make) -> None:
    folder = run_config(config(**SHRUNK, secure=True)).folder
    for name, change in ((f"{SHARE}/sms-1/{SHARE}", 0.1), ("means/agreement", 1e-4)):
        path = folder / "audit/round-0001/server.safetensors"
        alter_tensors(path, lambda told, name=name, change=change: told[name].add_(change))
        assert "server" in {row.check for row in audit_run(folder).failures}
        alter_tensors(path, lambda told, name=name, change=change: told[name].sub_(change))


def test_a_run_with_variances_goes_on_to_the_same_bits(config: Make) -> None:
    whole = run_config(config(**SHRUNK, name="whole")).folder
    parts = run_config(config(**SHRUNK, name="parts", max_rounds=1)).folder
    assert resume_run(parts).complete
    assert same_tensors(state(whole), state(parts))


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"strategy": "fedavg", "personal_models": True, "ranks": "4"},
            "--second-model shrunk goes by variances, which --strategy",
        ),
        ({"strategy": "fedavg_with_variances"}, "take --strategy shrinkage"),
    ],
)
def test_models_are_shrunk_where_variances_are_measured_and_they_are_what_is_mixed(
    config: Make, values: dict, line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        validate(config(**{**PLAIN, "second_model": "shrunk", **values}))


@pytest.mark.parametrize("strategy", ["fedalt", "shrinkage"])
@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"aggregate_every": 2}, "compares? what it sent with the mean, and with --aggregate-every 2 it trains on"),
        ({"personal_rounds": 1}, "and with --personal-rounds 1 it trains on without sending"),
        ({"dp": "client", "epsilon": 8.0, "update_filter": "clip=1", "delta": 0.01}, "--dp client changes what it sen"),
    ],
)
def test_a_client_compares_with_the_mean_what_it_goes_on_with(
    config: Make, strategy: str, values: dict, line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        validate(config(**{**PLAIN, "strategy": strategy, **values}))


def test_a_head_that_fedalt_never_shares_is_neither_sent_nor_billed(config: Make) -> None:
    folder = run_config(config(**PLAIN, strategy="fedalt")).folder
    assert {row["kind"] for row in rows(folder, "ledger")} >= {"adapter"}
    assert not [row for row in rows(folder, "ledger") if row["kind"] == "head"]


@pytest.mark.parametrize("strategy", ["fedalt", "fedalt_fixed"])
def test_fedalt_with_all_weight_on_its_own_adapter_is_local_training(config: Make, strategy: str) -> None:
    """The gate is closed to the rest of the world, and stays so."""
    own = config(**PLAIN, strategy=strategy, second_weight=1.0, dropout=0.0)
    local = config(**PLAIN, strategy="local", dropout=0.0, name="local")
    folders = [run_config(one).folder for one in (own, local)]
    mine, alone = (load_file(folder / "audit/round-0002/trained.safetensors") for folder in folders)
    for key in mine:
        torch.testing.assert_close(mine[key], alone[key], rtol=1e-3, atol=1e-5)
    scores = [[row["primary"] for row in rows(folder) if row.get("split") == "test"] for folder in folders]
    assert scores[0] == scores[1]


def test_a_gate_trains_at_its_client_and_costs_no_byte(config: Make) -> None:
    folder = run_config(config(**PLAIN, strategy="fedalt")).folder
    fixed = run_config(config(**PLAIN, strategy="fedalt_fixed", name="fixed")).folder
    passing_audit(folder)
    passing_audit(fixed)
    assert "gate" in {row.check for row in audit_run(folder).rows}
    assert rows(folder, "ledger") == rows(fixed, "ledger")
    assert not (fixed / "audit/round-0002/gate.safetensors").exists()
    (before,), (gates, trained) = audited(folder, 1, "gate"), audited(folder, 2, "gate", "trained")
    assert gates.keys() == {key.removesuffix("A") + "gate" for key in trained if key.endswith("lora_A")}
    assert all(gate.shape == (2, trained[key.removesuffix("gate") + "A"].shape[1]) for key, gate in gates.items())
    assert not any(torch.equal(gate, before[key]) for key, gate in gates.items()), "it goes on from round to round"
    last = next(key for key in gates if key.startswith("movie-0/"))
    assert not torch.equal(gates[last], gates[last.replace("movie-0/", "movie-1/")]), "each client has its own"


@pytest.mark.parametrize("values", [{"strategy": "fedalt"}, {"strategy": "fedlease_router", "tasks": "movie+trec"}])
def test_final_scores_are_those_of_the_stock_classifier_with_the_gate(config: Make, values: Mapping[str, Any]) -> None:
    one = config(**{**PLAIN, **values}, lr=0.05)
    folder = run_config(one).folder
    scores = [row["loss"] for row in rows(folder) if row.get("split") == "test" and row["client"] == "movie-0"]
    params = gated(folder, "movie-0")
    assert loss_of(one, params, client="movie-0") == pytest.approx(scores[-1], rel=1e-4)
    ungated = {key: torch.zeros_like(value) if key.endswith("gate") else value for key, value in params.items()}
    assert loss_of(one, ungated, client="movie-0") != pytest.approx(scores[-1], rel=1e-4)


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": "fedalt"},
        {"strategy": "feddpa", "second_gate": "input"},
        {"strategy": "fedlease_router", "tasks": "movie+trec"},
    ],
)
def test_models_with_a_gate_are_not_exported_and_a_line_says_why(
    config: Make, tmp_path: Path, values: Mapping[str, Any]
) -> None:
    notes: list[str] = []
    told = run_config(config(**{**PLAIN, **values}), on_event=lambda event: notes.append(str(event)))
    assert notes.count(GATED) == 1 and not (told.folder / "adapters").exists()
    with pytest.raises(ConfigError, match=r"^PEFT has no adapter with a gate .*--second-gate none"):
        export_client(told.folder, client="movie-0", to=tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_an_interpolated_model_learns_its_weight(config: Make) -> None:
    folder = run_config(config(**PLAIN, strategy="apfl")).folder
    own = load_file(folder / "audit/round-0002/second.safetensors")
    weights = [float(value) for key, value in own.items() if key.endswith(WEIGHT)]
    assert len(weights) == 2 and all(0 <= weight <= 1 and weight != 0.5 for weight in weights)
    assert not any(WEIGHT in key for one in adapters(folder) for key in one)


def test_a_second_adapter_beside_fedavg_may_have_a_gate_too(config: Make, finished: FinishedRuns) -> None:
    folder = run_config(config(**PLAIN, strategy="feddpa", second_gate="input")).folder
    fedavg = finished(config(**PLAIN, strategy="fedavg", name="fedavg")).folder
    passing_audit(folder)
    assert {"gate", "second"} <= {row.check for row in audit_run(folder).rows}
    assert rows(folder, "ledger") == rows(fedavg, "ledger"), "no byte more"
    assert any(key.endswith("lora_gate") and value[:, :-1].any() for key, value in gated(folder, "movie-1").items())


def test_a_client_whose_update_is_refused_goes_on_with_the_gate_that_it_had(config: Make) -> None:
    values = {**PLAIN, "strategy": "fedalt", "clients_per_task": 4, "attack": "scale", "attackers": "movie-1"}
    folder = run_config(config(**values)).folder
    passing_audit(folder)
    refused = {row["client"] for row in rows(folder) if row.get("event") == "refused" and row["round"] == 2}
    assert refused == {"movie-1"}
    gates = load_file(folder / "audit/round-0002/gate.safetensors")
    assert {key.split("/", 1)[0] for key in gates} == {"movie-0", "movie-2", "movie-3"}
    assert not gated(folder, "movie-1")[next(key for key in gated(folder, "movie-1") if "gate" in key)][:, :-1].any()


def test_an_audit_finds_an_own_model_that_moved_while_its_client_rested(config: Make) -> None:
    folder = run_config(config(**PLAIN, strategy="ditto", rounds=3, participation=0.5, clients_per_task=3)).folder
    path = folder / "audit/round-0002/second.safetensors"
    alter_tensors(path, lambda tensors: [tensor.add_(0.01) for tensor in tensors.values()])
    assert "second" in {row.check for row in audit_run(folder).failures}


def test_an_audit_finds_a_gate_that_moved_while_its_client_rested_or_is_gone(config: Make) -> None:
    folder = run_config(config(**PLAIN, strategy="fedalt", rounds=3, participation=0.5, clients_per_task=3)).folder
    path = folder / "audit/round-0002/gate.safetensors"
    alter_tensors(path, lambda tensors: [tensor.add_(0.01) for tensor in tensors.values()])
    found = {row.detail for row in audit_run(folder).failures if row.check == "gate"}
    assert "its own gate changed while it took no part" in found
    path.unlink()
    found = {row.detail for row in audit_run(folder).failures if row.check == "gate"}
    assert "it trained, and has no gate of its own" in found
