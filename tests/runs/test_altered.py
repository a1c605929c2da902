"""A run's folder that was altered ends every command that reads it in one line."""

import random
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from atlas_fl.audit.check import audit_run
from atlas_fl.config import Config
from atlas_fl.errors import AtlasError, CheckpointError
from atlas_fl.experiment.export import export_client
from atlas_fl.experiment.recorder import check_run_files
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.planning.place_client import place_client
from atlas_fl.planning.plan import Plan
from atlas_fl.report.figures import FIGURES
from atlas_fl.report.record import read_record
from atlas_fl.report.score_table import comparison_rows
from atlas_fl.report.tables import closing_table
from atlas_fl.storage import checkpoint
from atlas_fl.storage.jsonl import read_json
from atlas_fl.storage.run_folder import RunFolder
from tests.runs.mutations import mutate
from tests.runs.resealing import resealed

Make = Callable[..., Config]
SECONDS = 8.0
MUTATIONS = 100
DRAWN_EVERY, PLACED_EVERY = 15, 30
"""Figures take half a second and a newcomer's fingerprint as much: so many mutations share one."""


@pytest.fixture(scope="module")
def folders(shared_config: Make) -> Mapping[str, Path]:
    """A complete run and one of two rounds, with clusters."""
    return {
        "complete": run_config(shared_config(name="complete", clusters="2", recluster_every=2)).folder,
        "partial": run_config(shared_config(name="partial", clusters="2", max_rounds=2)).folder,
    }


def read(folder: Path, number: int) -> Mapping[str, Callable[[], Any]]:
    """What the commands read, without what they do with it."""

    def drawn() -> None:
        record = read_record(folder)
        for figure in FIGURES.values() if number % DRAWN_EVERY == 0 else ():
            figure.draw(figure.section(record))

    def gone_on_with() -> None:
        if RunFolder(folder).summary.exists():
            closing_table(resume_run(folder).summary)
            return
        found, _ = checkpoint.load_latest(
            RunFolder(folder).checkpoints, check=lambda one: check_run_files(RunFolder(folder), one)
        )
        if found is not None:
            Plan.from_json(read_json(folder / found.state["plan"]))

    def exported() -> None:
        export_client(folder, client="0", to=folder.with_name(f"out-{number}"))

    readers: dict[str, Callable[[], Any]] = {
        "audit": lambda: audit_run(folder),
        "report": drawn,
        "resume": gone_on_with,
        "export": exported,
        "compare": lambda: comparison_rows({"one": [folder]}),
    }
    if number % PLACED_EVERY == 0:
        readers["place"] = lambda: place_client(folder, task="movie", samples=8)
    return readers


@pytest.mark.slow
def test_no_altered_file_of_a_run_is_a_traceback(folders: Mapping[str, Path], tmp_path: Path) -> None:
    warnings.simplefilter("ignore")  # of NumPy, for numbers that nobody wrote
    draw = random.Random(16)
    refused = 0
    for number in range(MUTATIONS):
        base = folders[draw.choice(sorted(folders))]
        files: dict[str, list[Path]] = {}
        for file in sorted(base.rglob("*")):
            if file.suffix in (".json", ".jsonl", ".toml") and "adapters" not in file.parts:
                files.setdefault(file.name, []).append(file.relative_to(base))
        file = draw.choice(files[draw.choice(sorted(files))])
        copy = Path(shutil.copytree(base, tmp_path / f"run-{number}"))
        told = f"{base.name}, {file}: {mutate(copy / file, draw)}"
        for name, reader in read(copy, number).items():
            began = time.perf_counter()
            try:
                reader()
            except AtlasError as error:
                refused += 1
                assert "\n" not in str(error), (told, name)
            except Exception as error:
                raise AssertionError(f"{name} of {told}: {error!r}") from error
            assert time.perf_counter() - began < SECONDS, (told, name)
        shutil.rmtree(copy)
    assert refused > MUTATIONS


@pytest.mark.parametrize("plan", ["../../elsewhere/plan.json", "/etc/passwd", "audit/round-0001/record.json", 3, ""])
def test_a_record_names_no_plan_outside_of_its_run(folders: Mapping[str, Path], tmp_path: Path, plan: object) -> None:
    import json

    copy = Path(shutil.copytree(folders["complete"], tmp_path / "run"))
    file = copy / "audit/round-0002/record.json"
    resealed(file, {**json.loads(file.read_text()), "plan": plan})
    with pytest.raises(CheckpointError, match=r"record\.json is no record of a round: .*; restore it from a copy"):
        audit_run(copy)


@pytest.mark.parametrize("name", ["../../elsewhere.json", "/etc/passwd", ""])
def test_digests_name_no_file_outside_of_their_run(folders: Mapping[str, Path], tmp_path: Path, name: str) -> None:
    import json

    copy = Path(shutil.copytree(folders["complete"], tmp_path / "run"))
    resealed(copy / "digests.json", {"files": {name: "0" * 64}})
    with pytest.raises(CheckpointError, match="no file inside the folder"):
        read_record(copy)
    content = json.loads((copy / "audit/round-0001/record.json").read_text())
    resealed(copy / "audit/round-0001/record.json", {**content, "files": {name: "0" * 64}})
    assert any("no file inside the folder" in row.detail for row in audit_run(copy).failures)
