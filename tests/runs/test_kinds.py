"""What shows at once that a kind of training is broken: a run, a resume after a kill, a federation, a failing audit."""

import signal
from collections.abc import Collection, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from atlas_fl.audit.check import audit_run
from atlas_fl.config import Config, to_toml, validate, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.deployment.server import check_served
from atlas_fl.deployment.service import ServerOptions
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.run import resume_run
from atlas_fl.params import PRIVATE
from atlas_fl.partial_sharing import is_fully_shared, is_placeholder
from atlas_fl.storage.jsonl import read_json
from tests.models.tiny_vision import save_tiny
from tests.runs.conftest import configs, saved_once
from tests.runs.covering import PRODUCT
from tests.runs.federation import Federation, adapters
from tests.runs.finished import FinishedRuns
from tests.runs.processes import Programs
from tests.runs.reading import alter_tensors, passing_audit, rows, same_tensors, state
from tests.runs.test_method_sessions import CASES

pytestmark = [
    # PEFT still asks for it under its old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
]

DEVICE = "cpu_2gb"
SIZES: Mapping[str, Any] = {
    **{"clients_per_task": 2, "samples": 16, "validation_samples": 8, "test_samples": 8, "rounds": 2},
    **{"eval_every": 2, "devices": DEVICE, "pack_tokens": 1},
}
"""Of every federation; packs of one, because a site that is alone has no others."""
TEXT: Mapping[str, Any] = {**SIZES, "tasks": "movie", "dropout": 0.1}
IMAGES: Mapping[str, Any] = {**SIZES, "tasks": "digits", "image_size": 16, "audit": True}
ADAPTERS: Mapping[str, Any] = {"batch_size": 8, "lr": 5e-3, "clusters": "oracle", "candidates": "2+4", "sketch_dim": 64}
FULL: Mapping[str, Any] = {
    **{"trainable": "full", "audit": True, "lr": 1e-3, "candidates": "4+8+16+32+64", "adapter_bytes": "none"},
    **{"fingerprint": "fisher", "fingerprint_steps": 60, "fingerprint_batches": 2, "clusters": "oracle"},
}
"""All weights of the tiny text model, with no setting of adapters."""
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adapters on text": ("", TEXT),
    "cut models": ("", {**TEXT, "split": "movie-0=1"}),
    "a head as drawn, and a last round for oneself": ("", {**TEXT, "strategy": "fedbabu", "personal_rounds": 1}),
    "B alone, A as drawn": ("", {**TEXT, "strategy": "ffa", "ranks": "4"}),
    "A and B in turn": ("", {**TEXT, "strategy": "rolora", "ranks": "4", "rounds": 3}),
    "first the head, then the rest": ("", {**TEXT, "strategy": "fedrep"}),
    "class frequencies in the logits": ("", {**TEXT, "strategy": "fedavg_prior"}),
    "what a filter took, added to the next change": ("", {**TEXT, "update_filter": "topk=0.2", "error_feedback": True}),
    "adapters on images": ("vision-lora", {**IMAGES, **ADAPTERS, "fingerprint_steps": 2, "fingerprint_batches": 2}),
    "whole images": ("vision-quick", {**IMAGES, "participation": 1, "local_steps": 2, "lr": 0.02, "nc": "5"}),
    "whole images with the momentum of the round before": (
        "vision-quick",
        {**IMAGES, "participation": 1, "local_steps": 2, "lr": 0.02, "momentum": 0.5, "carry_momentum": True},
    ),
    "whole images under a mask": (
        "vision-quick",
        {**IMAGES, "participation": 1, "local_steps": 2, "lr": 0.02, "mask": "least_sensitive"},
    ),
    "whole images in clusters by AdamW": (
        "vision-quick",
        {
            **{**IMAGES, "participation": 1, "local_steps": 2, "lr": 1e-3, "optimizer": "adamw", "proximal_mu": 0.1},
            **{"strategy": "fedavg_cluster", "clusters": "oracle", "sketch_dim": 64, "fingerprint_batches": 2},
        },
    ),
    "whole text models": ("", {**TEXT, **FULL, "strategy": "atlas_laplacian", "recluster_every": 1}),
    "whole text models under a mask": (
        "",
        {
            **{**TEXT, **FULL, "clusters": "auto", "strategy": "fedavg", "optimizer": "sgd", "momentum": 0.5},
            **{"mask": "least_sensitive", "sparsity": 0.8, "sketch_dim": 1024, "fingerprint_batches": 12},
        },
    ),
}
"""The preset of each, and its settings."""
ONE_RANK: Mapping[str, Any] = {**TEXT, "ranks": "4"}
METHODS_OF_THEIR_OWN: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gradients corrected by the mean of all": ("", {**ONE_RANK, "strategy": "scaffold"}),
    "gradients corrected by one's own changes": ("", {**ONE_RANK, "strategy": "feddyn"}),
    "clusters by the least loss": ("", {**ONE_RANK, "strategy": "ifca", "ifca_clusters": 2}),
    "heads combined by class features": ("", {**TEXT, "strategy": "fedpac"}),
    "models predicted from split halves": ("", {**TEXT, "strategy": "kriging", "measure_round": 1}),
    "a model beside the shared one": ("", {**ONE_RANK, "strategy": "ditto"}),
    "an own model interpolated with the shared one": ("", {**ONE_RANK, "strategy": "apfl"}),
    "an own adapter on the shared one": ("", {**ONE_RANK, "strategy": "feddpa"}),
    "an own adapter with a gate": ("", {**ONE_RANK, "strategy": "fedalt"}),
    "a router over the adapters of all clusters": ("", {**ONE_RANK, "strategy": "fedlease_router"}),
    "own models pulled to a mixture": ("", {**ONE_RANK, "strategy": "fedamp"}),
    "own models moved to their mean": ("", {**ONE_RANK, "strategy": "shrinkage", "measure_round": 1}),
    "own models pulled to their mean": ("", {**ONE_RANK, "strategy": "mr_mtl"}),
    "a frozen part beside the adapter": ("", {**ONE_RANK, "strategy": "fedex"}),
    "a rest of products held frozen": ("", {**ONE_RANK, "strategy": "fedmomentum"}),
    "a factor that the server alone moves": ("", {**ONE_RANK, "strategy": "fedsvd"}),
    "factors rotated by the server": ("", {**ONE_RANK, "strategy": "fedrot"}),
    "changes dropped by the seed": ("", {**TEXT, "strategy": "dare"}),
    "clusters cut in two": ("", {**TEXT, "strategy": "cfl"}),
    "nested clusters": ("", {**TEXT, "strategy": "fedtreelora"}),
}
"""Those of which tests of their own say what they do."""
NOT_SERVED = {
    "scaffold": "--control-variates has a second set of tensors beside the model, which no message across machines",
    "feddyn": "--strategy feddyn has a second set of tensors beside the model",
    "fedex": "--strategy fedex has a second set of tensors beside the model",
    "fedmomentum": "--strategy fedmomentum has a second set of tensors beside the model",
    "fedlease_router": "--strategy fedlease_router has a second set of tensors beside the model",
    "ifca": "--strategy ifca scores the models of all clusters at each client before a round, which no site does yet",
    "shrinkage": "--personal-models and --second-model shrunk each site scores a model of its own that stays there",
    "fedalt": "--personal-models and --second-model stacked each site scores a model of its own that stays there",
}
"""What a server says of methods that stay in one process."""
ALL_KINDS = {**KINDS, **METHODS_OF_THEIR_OWN}
IN_SESSIONS = {kind for kind, (_, values) in METHODS_OF_THEIR_OWN.items() if values["strategy"] in CASES}
"""Methods that test_method_sessions.py resumes."""
CORE = (
    *("adapters on text", "cut models", "adapters on images", "whole images", "whole images under a mask"),
    *("whole text models", "class frequencies in the logits"),
)
"""One of each kind of weights and of what a client sends; the others differ from these in what they train."""


def of_kinds(kinds: Iterable[str], *, seldom: Container[str] = ()) -> pytest.MarkDecorator:
    """Give a test the config of each of these kinds in turn: core, slow, or left to `make test-all`."""
    params = [
        pytest.param(kind, marks=pytest.mark.core if kind in CORE else PRODUCT if kind in seldom else pytest.mark.slow)
        for kind in kinds
    ]
    return pytest.mark.parametrize("config", params, indirect=True)


@pytest.fixture
def config(request: pytest.FixtureRequest, tiny_model: Path, shared_folder: Path, tmp_path: Path) -> Config:
    """A federation of two clients for two rounds, of a kind."""
    preset, values = ALL_KINDS[request.param]
    if not preset:
        return configs(tiny_model, tmp_path)(**values)
    model = saved_once(shared_folder / "tiny-vit-of-three-blocks", save_tiny)
    places = {"model": str(model), "runs_dir": str(tmp_path / "runs"), "name": "run"}
    return with_values(find_preset(preset), {**values, **places})


@of_kinds(ALL_KINDS)
def test_a_run_passes_its_audit_which_fails_where_a_mixed_model_was_altered(config, finished) -> None:
    result = finished(config)
    assert (result.complete, result.rounds) == (True, config.training.rounds)
    passing_audit(result.folder, "mixed", "loaded")
    file = result.folder / "audit/round-0002/start.safetensors"
    key = next(key for key in load_file(file) if key.endswith("lora_B") or ("head." in key and key.endswith("weight")))
    alter_tensors(file, lambda tensors: tensors[key].add_(0.01))
    # of clients that go on with their own model the audit says `own`
    failures = [row for row in audit_run(result.folder).failures if row.check in ("mixed", "own")]
    assert failures and {row.round for row in failures} <= {2, 3}


@of_kinds((kind for kind in ALL_KINDS if kind not in IN_SESSIONS), seldom=ALL_KINDS)
def test_a_run_that_is_killed_in_its_second_round_goes_on_to_the_same_bits(
    config: Config, finished: FinishedRuns, programs: Programs, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text(to_toml(with_values(config, {"name": "killed"})))
    fault = "dies before the checkpoint of round two"
    programs.start("run", "--config", "config.toml", folder=tmp_path, fault=fault).end(-signal.SIGKILL)
    killed, whole = tmp_path / "runs/killed", finished(config).folder
    assert not (killed / "checkpoints/round-0002").exists()
    assert resume_run(killed).complete
    assert same_tensors(state(whole), state(killed))
    for kind in ("metrics", "ledger"):
        assert rows(whole, kind) == rows(killed, kind)
    passing_audit(killed)


@of_kinds(ALL_KINDS, seldom=("changes dropped by the seed", "clusters cut in two", "factors rotated by the server"))
def test_a_served_federation_ends_in_the_bits_of_its_simulation_or_says_why_there_is_none(
    config: Config, finished: FinishedRuns, programs: Programs, tmp_path: Path
) -> None:
    if (why := NOT_SERVED.get(config.mixing.strategy)) is not None:
        with pytest.raises(ConfigError, match=why):
            check_served(validate(config), ServerOptions(certs=tmp_path))
        return
    (task,) = config.data.tasks
    fed = Federation(config, tmp_path, {f"{task}-0": DEVICE, f"{task}-1": DEVICE}, programs, finished)
    mixing = validate(config).mixing
    beside = mixing.second_model != "none"
    try:
        _, said = fed.complete(serve=["--no-late"] if beside or mixing.personal_models else [])
    finally:
        programs.kill_all()
    served, simulated = spread(state(fed.served.path), task), spread(state(fed.simulated), task)
    kept = {key for key in simulated if key.startswith(("by client/residual/", "by client/momentum/"))}
    assert len({key.split("/")[2] for key in kept}) in (0, 2)
    simulated = without(kept, simulated)
    hidden = {key for key, value in served.items() if key.endswith(f"/{PRIVATE}") or is_placeholder(value)}
    assert same_tensors(without(hidden, simulated), without(hidden, served))
    # what is not shared is at the sites alone
    assert bool(hidden) is bool(beside or kept or not is_fully_shared(mixing.share))
    if beside:  # distances of what the server has would be of other models than those that are scored
        assert not [row for row in rows(fed.served.path, "metrics") if row.get("event") == "mixed"]
    if beside or mixing.personal_models:
        assert fed.own_adapters == adapters(fed.simulated) and len(fed.own_adapters) == 2
    # a site reports also what it trains for itself in its last rounds, of which a simulation sends nothing
    shared_rounds = config.training.rounds - config.mixing.personal_rounds
    sent, expected = (
        sorted(str(row) for row in rows(folder, "ledger") if row["round"] <= shared_rounds)
        for folder in (fed.served.path, fed.simulated)
    )
    assert sent == expected
    passing_audit(fed.served.path)
    clients = read_json(fed.served.summary)["clients"]
    measured = rows(fed.served.path, "metrics")
    shares = {row["client"]: row["majority"] for row in measured if row.get("split") == "test" and "majority" in row}
    for client, words in zip(fed.sites, said, strict=True):
        line = f"score on test, round {config.training.rounds}: {clients[client]['final']['test']['primary']:.3f}"
        line += f" (majority class: {shares[client]:.3f})\n" if client in shares else "\n"
        assert (line in words) is (f"{client}=" not in config.split.split)  # behind a cut the server has the head


def spread(tensors: Mapping[str, Tensor], task: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint, with a copy of the first client's model for the second where it is stored once.

    At a server with names in the place of what is not shared no two models are the same.
    """
    first, second = f"strategy/{task}-0/", f"strategy/{task}-1/"
    own = any(key.startswith(second) for key in tensors)
    copies = {second + key.removeprefix(first): one for key, one in tensors.items() if key.startswith(first)}
    return {**tensors, **({} if own else copies)}


def without(keys: Collection[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in tensors.items() if key not in keys}
