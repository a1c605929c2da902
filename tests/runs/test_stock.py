"""Runs through the stock path: resumed, in workers, across sites, with newcomers; and what it refuses.

Scores, exports and methods are in `tests/runs/test_exports.py`, parity with plain PEFT in `tests/parity/test_stock.py`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atlas_fl.config import Config, with_values
from atlas_fl.data.registry import find_tasks
from atlas_fl.deployment.service import client_check
from atlas_fl.errors import AtlasError, ConfigError, ModelError, ProtocolError
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.models.loading import find_family
from atlas_fl.models.registry import FAMILIES
from atlas_fl.models.stock import NOTE
from atlas_fl.planning.plan import read_plan
from atlas_fl.planning.planner import measure_leakage
from atlas_fl.runtime.protocol.client_metadata import metadata_of, read_metadata
from atlas_fl.setup.assembly import NEEDS_PACKS, assemble, backbone_of, check_stock
from atlas_fl.storage.run_folder import RunFolder
from tests.models.stock_folders import save_stock_folder
from tests.models.tiny_vision import save_tiny
from tests.runs.conftest import saved_once
from tests.runs.federation import SITES, Federations
from tests.runs.finished import Make
from tests.runs.reading import passing_audit
from tests.runs.sessions import check_same_runs
from tests.runs.workers import check_workers


@pytest.fixture
def model_of(shared_folder: Path) -> Callable[[str], str]:
    """The folder of a tiny model."""

    def get(name: str) -> str:
        return str(saved_once(shared_folder / f"stock-{name}-False", lambda folder: save_stock_folder(folder, name)))

    return get


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_a_whole_one_and_its_plan_says_the_path(config: Make, model_of) -> None:
    values = {"model": model_of("deberta-v3"), "dropout": 0.1, "participation": 0.75, "recluster_every": 2, "rounds": 3}
    whole, parts = run_config(config(name="whole", **values)), run_config(config(name="parts", max_rounds=1, **values))
    assert resume_run(parts.folder).complete
    check_same_runs(whole.folder, parts.folder)
    passing_audit(parts.folder)
    folder = RunFolder(whole.folder)
    assert any(note.endswith(f"(deberta-v2) {NOTE}") for note in read_plan(folder, folder.plan).notes)


@pytest.mark.slow
def test_two_workers_and_one_process_make_the_same_run(config: Make, model_of) -> None:
    check_workers(config, model=model_of("modernbert"), dropout=0.1, strategy="kriging", measure_round=1)


@pytest.mark.slow
def test_a_client_that_arrives_later_takes_part(config: Make, model_of) -> None:
    found = run_config(config(model=model_of("falcon"), arrive="movie-1=2", rounds=2))
    assert found.complete
    passing_audit(found.folder)


@pytest.mark.slow
def test_sites_make_the_run_of_the_simulation(federation: Federations, model_of) -> None:
    fed = federation(SITES, model=model_of("t5"), rounds=2)
    said, _ = fed.complete()
    assert NOTE in said
    fed.is_as_simulated()
    passing_audit(fed.served.path)


WHOLE: Mapping[str, Any] = {
    **{"trainable": "full", "lr": 1e-3, "candidates": "4+8+16+32+64", "adapter_bytes": "none"},
    **{"fingerprint": "fisher", "strategy": "fedavg_cluster"},
}
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "split": ({"split": "movie-0=1"}, "--split movie-0=1 cuts a model"),
    "trainable": (WHOLE, "--trainable full trains all weights"),
    "gradient_checkpointing": ({"gradient_checkpointing": True}, "--gradient-checkpointing computes"),
    "base_weights": ({"base_weights": "bf16"}, "--base-weights bf16 unpacks"),
    "dp": (
        {"dp": "example", "strategy": "fedavg", "ranks": "4", "alone": "none"},
        "--dp example clips the gradients of single examples",
    ),
}


def test_fast_kernels_need_packs(model_of) -> None:
    """They need a GPU too, so that no run comes this far on a CPU."""
    assert set(NEEDS_PACKS) == {*REFUSED, "fast_kernels"}
    _, family = find_family(model_of("albert"))
    with pytest.raises(ConfigError, match=r"^--fast-kernels compute rows of a pack"):
        check_stock(with_values(Config(), {"fast_kernels": True}), family)


@pytest.mark.parametrize("setting", REFUSED)
def test_what_needs_packs_is_refused_in_one_line_and_nothing_is_left(config: Make, model_of, setting: str) -> None:
    values, words = REFUSED[setting]
    small = config(model=model_of("albert"), **values)
    with pytest.raises(ConfigError) as caught:
        run_config(small)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    assert all(f" {name}" in str(caught.value) for name in FAMILIES)


UNSUITED: Mapping[str, tuple[str, str, str]] = {
    "no classifier": ("clip_text_model", "kind", "transformers has no AutoModelForSequenceClassification or "),
    "reads both ways": ("camembert", "next", "the architecture 'camembert' reads both ways and cannot write text"),
    "labels beside texts to write": ("falcon", "kind next", "some tasks have labels and others text to write, and "),
    "nothing to write after": ("t5", "free", "task 'free' has texts to write and none to write them after, and "),
    "PEFT knows no layers": ("mpnet", "kind", "PEFT knows no LoRA targets for 'mpnet'; name them with --targets, or "),
}
TABLES: Mapping[str, str] = {
    "kind": "text=text,label=label",
    "next": "text=text,target=answer",
    "free": "text=text,target=text",
}


@pytest.mark.parametrize("name", UNSUITED)
def test_what_does_not_fit_is_refused_in_one_line(config: Make, tmp_path: Path, name: str) -> None:
    architecture, tasks, words = UNSUITED[name]
    rows = [f"w{n} w{n % 7} w{n % 5},{'ab'[n % 2]},w{n % 3}" for n in range(120)]
    (tmp_path / "table.csv").write_text("\n".join(["text,label,answer", *rows]))
    save_stock_folder(tmp_path / "model", architecture, writes=tasks != "kind")
    sources = tuple(f"{task}={tmp_path}/table.csv,{TABLES[task]}" for task in tasks.split())
    small = config(model=str(tmp_path / "model"))
    with pytest.raises(AtlasError) as caught:
        run_config(replace(small, data=replace(small.data, tasks=(), task=sources)))
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_leakage_is_not_measured_on_what_is_not_cut(config: Make, model_of) -> None:
    with pytest.raises(
        ConfigError, match=r"\(albert\) runs through the stock path and is not cut; leakage is measured"
    ):
        measure_leakage(config(model=model_of("albert")))


def test_a_model_of_convolutions_alone_is_refused_with_what_to_do(image_config: Make, tmp_path: Path) -> None:
    resnet = save_tiny(tmp_path / "resnet", "resnet")
    with pytest.raises(ModelError, match=r"\(resnet\) has no linear layer in its blocks, .* or --tune whole"):
        run_config(image_config(model=str(resnet), tune="lora", image_size=32))


@pytest.mark.parametrize(
    ("server_tasks", "site_tasks", "words"),
    [
        (
            "next",
            "kind",
            "task 'kind' of site has labels, and this model writes text and has no head for them; bring a",
        ),
        ("kind", "next", "task 'next' of site is to write text, and no task of the settings does; bring"),
    ],
)
def test_a_site_of_another_kind_of_task_is_refused(
    config: Make, tmp_path: Path, server_tasks: str, site_tasks: str, words: str
) -> None:
    """Before it is planned: a stock model is loaded for labels or for text to write, not both."""
    rows = [f"w{n} w{n % 7} w{n % 5},{'ab'[n % 2]},w{n % 3}" for n in range(120)]
    (tmp_path / "table.csv").write_text("\n".join(["text,label,answer", *rows]))

    def settings(task: str) -> Config:
        folder = save_stock_folder(tmp_path / task, "falcon", writes=task == "next")
        small = config(model=str(folder), clients_per_task=1)
        return replace(small, data=replace(small.data, tasks=(), task=(f"{task}={tmp_path}/table.csv,{TABLES[task]}",)))

    server = settings(server_tasks)
    site = assemble(settings(site_tasks))
    (client,) = site.clients
    metadata = read_metadata(json.loads(json.dumps(metadata_of(client, site.site.data[client.name]))))
    backbone = backbone_of(server, find_tasks((), server.data.task))
    check = client_check(server, backbone, most_tokens=64)
    with pytest.raises(ProtocolError) as caught:
        check("site", metadata, site.devices[0])
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
