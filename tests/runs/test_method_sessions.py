"""Runs that keep something between rounds: the same bits in sessions, and an audit that finds what was altered."""

from collections.abc import Mapping
from typing import Any

import pytest
from safetensors.torch import load_file

from atlas_fl.audit.check import audit_run
from atlas_fl.experiment.export import load_models
from atlas_fl.experiment.run import run_config
from atlas_fl.storage.run_folder import RunFolder
from tests.runs.finished import Make
from tests.runs.reading import alter_tensors, passing_audit, same_tensors
from tests.runs.sessions import check_same_runs, in_sessions
from tests.runs.test_rerank import WORDS as RERANK

SMALL: Mapping[str, Any] = {"samples": 16, "validation_samples": 6, "test_samples": 6, "dropout": 0.1, "eval_every": 2}
SOME: Mapping[str, Any] = {**SMALL, "tasks": "movie", "clients_per_task": 3, "participation": 0.5}
"""Clients that rest have to be remembered, too."""
FACTORS: Mapping[str, Any] = {"space": "factors", "ranks": "4"}
LATE: Mapping[str, Any] = {"arrive": ("movie-1=2", "trec-0=3"), "rounds": 3}
ATTACKED: Mapping[str, Any] = {"tasks": "movie", "clients_per_task": 4, "ranks": 4, "attackers": "movie-1", "rounds": 2}
CASES: Mapping[str, Mapping[str, Any]] = {
    "scaffold": {**SOME, "ranks": "4"},
    "feddyn": {**SOME, "ranks": "4", "proximal_mu": 0.1},
    "flora": {**SOME, "ranks": "4"},
    "fedex": {**SOME, "ranks": "4"},
    "fedmomentum": {**SOME, "ranks": "4"},
    "fedsvd": {**SOME, "ranks": "4"},
    "fedrot": {**SOME, "ranks": "4"},
    "dare": SOME,
    "fedplora": SOME,
    "fedsb": {**SOME, "ranks": "4"},
    "ravan": {**SOME, "ranks": "4"},
    "fedlease_router": {**SMALL, "ranks": "4", "rounds": 3},
    "ilora": {**SOME, "devices": ("cpu_2gb", "workstation"), "adapter_bytes": 8_000, "rounds": 3},
    "hilora": {**SMALL, "ranks": "4", "rounds": 4, "personal_rounds": 1, "participation": 0.75},
    "fedtreelora_outside": {**SMALL, "ranks": "4", "rounds": 3, "tree_threshold": 0},
    "fedpac": SMALL,
    "ifca": {**SMALL, "ranks": "4", "ifca_clusters": 2},
    "mr_mtl": {**SOME, "ranks": "4", "proximal_mu": 0.5},
    "apfl": {**SOME, "ranks": "4"},
    "feddpa": {**SOME, "ranks": "4"},
    "fedalt": {**SOME, "ranks": "4"},
    "rolora": {**SOME, "ranks": "4", "rounds": 3},
}
SERVERS: Mapping[str, Mapping[str, Any]] = {
    "moments": {"strategy": "fedadam", "participation": 0.75, "server_lr": 0.02},
    "moments inside clusters": {"strategy": "fedyogi", "within": "clusters"},
    "moments in factor space": {"strategy": "fedavgm", **FACTORS, "aggregate_every": 2, "rounds": 3},
    "moments that a newcomer joins": {"strategy": "fedadam", **LATE},
    "models by layer": {"strategy": "pfedgraph", "gram_by": "layer", "participation": 0.75},
    "models that a newcomer joins": {"strategy": "pfedgraph", "space": "factors", **LATE},
}
"""What a server remembers."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "cuts": {"split": "2", "wire": "int8", "wire_noise": 0.05, "participation": 0.75, "dropout": 0.1},
    "rounds between two aggregations": {"aggregate_every": 3, "participation": 0.5, "rounds": 5, "eta": 0.3},
    "edges of who is refused": {**ATTACKED, "attack": "scale", "attack_scale": 1e6, "eta": 0.5},
    "new ranks": {"rounds": 3, **RERANK},
    **{
        rule: {"strategy": rule, **ATTACKED, "norm_bound": "off", "attack": "sign_flip", "attack_scale": 30.0}
        for rule in ("median", "krum")
    },
}


@pytest.mark.parametrize(
    "values",
    [
        *(pytest.param({"strategy": method, **values}, id=method) for method, values in CASES.items()),
        *(pytest.param(one, id=name, marks=pytest.mark.slow) for name, one in {**SERVERS, **SETTINGS}.items()),
    ],
)
def test_a_run_in_sessions_ends_in_the_same_bits(config: Make, values: Mapping[str, Any]) -> None:
    whole = run_config(config(name="whole", **values)).folder
    # a checkpoint holds equal models of rolora once or twice, as they were in memory; none follows on its resumption
    most = 2 if values.get("strategy") == "rolora" else 1
    parts = in_sessions(config(name="parts", max_rounds=most, **values)).folder
    check_same_runs(whole, parts)
    exported = sorted(path.relative_to(whole) for path in whole.glob("adapters/*/*.safetensors"))
    audited = sorted(path.relative_to(whole) for path in whole.glob("audit/*/*.safetensors"))
    assert audited and bool(exported) == (values.get("strategy") not in ("fedalt", "fedlease_router")), (
        "PEFT has no gate"
    )
    models, again = (load_models(RunFolder(folder)) for folder in (whole, parts))
    assert all(same_tensors(models[name], again[name]) for name in models)
    assert all((whole / path).read_bytes() == (parts / path).read_bytes() for path in (*exported, *audited))
    passing_audit(parts, *(["server"] if values in SERVERS.values() else []))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "file", "checks"),
    [
        ("scaffold", "control", {"corrected"}),
        ("scaffold", "correction", {"corrected"}),
        ("feddyn", "correction", {"corrected"}),
        ("feddyn", "server", {"server"}),
        ("feddyn", "start", {"mixed"}),
        # whoever trained in the next round says that it loaded something else
        ("flora", "server", {"server", "loaded"}),
        ("flora", "start", {"mixed", "loaded"}),
        ("fedex", "server", {"server", "loaded"}),
        ("fedex", "start", {"mixed", "loaded"}),
        ("fedlease_router", "server", {"server", "loaded"}),
        ("fedlease_router", "start", {"mixed", "loaded"}),
        ("mr_mtl", "anchor", {"mixed"}),
        ("mr_mtl", "start", {"own"}),
    ],
)
def test_an_audit_finds_what_was_altered(config, finished, method: str, file: str, checks: set[str]) -> None:
    settings = {"proximal_mu": 0.1} if method == "feddyn" else {"proximal_mu": 0.5} if method == "mr_mtl" else {}
    folder = finished(config(strategy=method, ranks="4", rounds=3, **settings)).folder
    path = folder / f"audit/round-0002/{file}.safetensors"
    key = next(key for key in load_file(path) if key.endswith("lora_B") and not key.startswith("newest"))
    alter_tensors(path, lambda tensors: tensors[key].add_(1.0))
    assert checks <= {row.check for row in audit_run(folder).failures}
