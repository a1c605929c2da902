"""`truncate=`: of long texts the same tokens are trained on however a run is carried out, as if cut by hand."""

import csv
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atlas_fl.config import Config
from atlas_fl.experiment.export import export_client
from atlas_fl.experiment.run import run_config
from atlas_fl.params import TRUNCATIONS
from atlas_fl.storage.tensors import read_tensors
from tests.runs.federation import Federation, adapters
from tests.runs.finished import FinishedRuns, Make
from tests.runs.processes import Programs
from tests.runs.reading import same_tensors
from tests.runs.sessions import check_same_runs, in_sessions
from tests.runs.workers import check_same, run_in_threads

WORDS = [str(number) for number in range(10, 60)]
"""A token each."""
MOST = 8
"""Tokens of an example, two of them around its words."""
CUT: dict[str, Callable[[list[str]], list[str]]] = {
    "tail": lambda words: words[:6],
    "head": lambda words: words[-6:],
    "middle": lambda words: [*words[:3], *words[-3:]],
}
SITES = ("north", "south")


def write(folder: Path, cut: Callable[[list[str]], list[str]] = list) -> None:
    draw = np.random.default_rng(3)
    rows = [(" ".join(cut(draw.choice(WORDS, 14).tolist())), "ab"[n % 2], SITES[n // 60]) for n in range(120)]
    for name in ("all", *SITES):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            own = [row for row in rows if name in ("all", row[2])]
            csv.writer(file).writerows([("text", "label", "site"), *own])


@pytest.fixture
def make(config: Make, tmp_path: Path) -> Callable[..., Config]:
    write(tmp_path)

    def make(truncate: str = "tail", *, file: str = "all.csv", **values: object) -> Config:
        whole = {"samples": "none", "validation_samples": "none", "test_samples": "none", "devices": ("laptop_8gb",)}
        small = config(max_length=MOST, strategy="fedavg", clients_per_task=3, pack_tokens=1, **whole, **values)
        task = f"notes={tmp_path}/{file},client=site,truncate={truncate}"
        return replace(small, data=replace(small.data, tasks=(), task=(task,)))

    return make


@pytest.mark.slow
def test_a_run_trains_on_the_tokens_of_texts_that_are_cut_by_hand(make: Callable[..., Config], tmp_path: Path) -> None:
    assert set(CUT) == set(TRUNCATIONS)
    found = {}
    for truncate, cut in CUT.items():
        found[truncate] = adapters(run_config(make(truncate, name=truncate)).folder)
        (tmp_path / truncate).mkdir()
        write(tmp_path / truncate, cut)
        by_hand = run_config(make(file=f"{truncate}/all.csv", name=f"{truncate}-by-hand"))
        assert found[truncate] == adapters(by_hand.folder)
    assert len({str(one) for one in found.values()}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("truncate", [pytest.param("head", marks=pytest.mark.product), "middle"])
def test_two_workers_and_a_resumed_run_train_on_the_same_tokens(
    make: Callable[..., Config], truncate: str, tmp_path: Path
) -> None:
    folder = run_config(make(truncate, name="alone")).folder
    check_same(folder, run_in_threads(make(truncate, name="workers"), 2).folder)
    check_same_runs(folder, in_sessions(make(truncate, name="sessions", max_rounds=1)).folder)
    exported = export_client(folder, client="north", to=tmp_path / "exported") / "adapter_model.safetensors"
    assert same_tensors(read_tensors(exported), read_tensors(folder / "adapters/north/adapter_model.safetensors"))


@pytest.fixture
def federation(
    make: Callable[..., Config], tmp_path: Path, programs: Programs, finished: FinishedRuns
) -> Iterator[Callable[[str], Federation]]:
    sites = dict.fromkeys(SITES, "laptop_8gb")
    yield lambda truncate: Federation(make(truncate, rounds=3), tmp_path, sites, programs, finished)
    programs.kill_all()


@pytest.mark.slow
def test_sites_train_on_the_same_tokens_and_so_does_a_server_that_was_killed(
    federation: Callable[[str], Federation], tmp_path: Path
) -> None:
    fed = federation("middle")
    server, port = fed.serve()
    sites = [
        fed.programs.start(
            *(
                "join",
                f"localhost:{port}",
                "--certs",
                f"certs/{name}",
                "--device",
                "laptop_8gb",
                "--least-examples",
                "2",
            ),
            *("--task", f"notes={name}.csv,truncate=middle", *fed.own_model),
            folder=tmp_path,
        )
        for name in SITES
    ]
    server.wait_for("round 2/")
    server.kill()
    server, _ = fed.serve(port=port)
    assert all(f"the run is complete for {name}" in site.end() for name, site in zip(SITES, sites, strict=True))
    assert "resumed after round" in server.end()
    fed.is_as_simulated()
