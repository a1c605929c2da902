"""Runs of ILoRA: clients of mixed ranks begin with the frozen model, corrected, and nobody is sent what is frozen."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from atlas_fl.audit.check import audit_run
from atlas_fl.experiment.run import run_config
from atlas_fl.models.lora import frozen_weight
from atlas_fl.setup.assembly import assemble
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import alter_tensors, audited, passing_audit, rows

NUMBERS = "memory_gb=2,gflops=20,up_mbps=2,down_mbps=10,latency_ms=60"
DEVICES: Mapping[str, Any] = {
    "devices": ("low", "high"),
    "device": tuple(f"{name}={NUMBERS},max_rank={rank}" for name, rank in (("low", 2), ("high", 8))),
}
ILORA: Mapping[str, Any] = {"strategy": "ilora", "rounds": 3, **DEVICES}
CLIENTS = ("movie-0", "movie-1", "trec-0", "trec-1")


def of_client(flat: Mapping[str, torch.Tensor], client: str) -> dict[str, torch.Tensor]:
    return {key.partition("/")[2]: one for key, one in flat.items() if key.startswith(f"{client}/")}


@pytest.mark.core
def test_adapters_begin_in_the_frozen_weights_and_the_frozen_part_is_not_sent(
    config: Make, finished: FinishedRuns
) -> None:
    folder = finished(config(**ILORA)).folder
    passing_audit(folder, "server", "mixed", "loaded", "corrected")
    modules, (start,) = assemble(config(**ILORA)).site.modules, audited(folder, 0, "start")
    ranks = set()
    for client in CLIENTS:
        for key, b in of_client(start, client).items():
            if key.endswith("lora_B") and b.numel():
                ranks.add(b.shape[1])
                a, module = start[f"{client}/{key[:-1]}A"], key.removesuffix(".lora_B")
                weight = frozen_weight(modules, module).double().numpy()
                q = np.linalg.qr(weight)[0][:, : b.shape[1]]
                np.testing.assert_allclose((2 * b @ a).numpy(), q @ (q.T @ weight), atol=1e-5)
    assert len(ranks) > 1, "ranks are mixed"
    ledger = rows(folder, "ledger")
    assert not any(row["kind"] == "frozen" for row in ledger) and any(row["kind"] == "correction" for row in ledger)


@pytest.mark.core
def test_clients_are_corrected_in_their_own_rank(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(**ILORA)).folder
    control, correction, trained = (
        audited(folder, round, name)[0] for round, name in ((1, "control"), (2, "correction"), (2, "trained"))
    )
    assert {key: one.shape for key, one in correction.items() if "lora" in key} == {
        key: one.shape for key, one in trained.items() if "lora" in key
    }
    key = next(key.partition("/")[2] for key in control if key.endswith("lora_A") and control[key].numel())
    own = {client: control[f"{client}/{key}"] for client in CLIENTS}
    shortest = min(own, key=lambda client: len(own[client]))
    rank = len(own[shortest])
    mean = torch.stack([one[:rank] for one in own.values()]).double().mean(0)
    torch.testing.assert_close(correction[f"{shortest}/{key}"].double(), mean - own[shortest].double())
    up = {row["client"]: row["bytes"] for row in rows(folder, "ledger") if row["kind"] == "correction"}
    assert up[shortest] >= len(save({key: own[shortest]}))


@pytest.mark.parametrize(
    ("file", "checks"), [("start", {"mixed"}), ("correction", {"corrected"}), ("server", {"server"})]
)
def test_an_audit_finds_what_was_altered(config: Make, finished: FinishedRuns, file: str, checks: set[str]) -> None:
    folder = finished(config(**ILORA)).folder
    # the server state is what it was before round one
    path = folder / f"audit/round-{0 if file == 'server' else 2:04d}/{file}.safetensors"
    key = next(key for key, one in load_file(path).items() if key.endswith("lora_B") and one.numel())
    alter_tensors(path, lambda tensors: tensors[key].add_(1.0))
    assert checks <= {row.check for row in audit_run(folder).failures}


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"participation": 0.5, "personal_rounds": 1}, id="clients that rest"),
        pytest.param({"aggregate_every": 2, "rounds": 4, "lora_alpha": 16, "rslora": True}, id="rounds in between"),
        pytest.param({"strategy": "fedavg_by_qr", "space": "factors"}, id="without corrections"),
    ],
)
def test_a_run_passes_its_audit(config: Make, values: Mapping[str, Any]) -> None:
    passing_audit(run_config(config(**{**ILORA, **values})).folder, "server", "loaded")
