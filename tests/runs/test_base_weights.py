"""Runs on a tiny Llama whose frozen weights are held in other types: resumed, audited, in workers, cut."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atlas_fl.cli.main import main
from atlas_fl.config import Config
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.models.weights import QUANTISERS
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runs.workers import check_workers


@pytest.fixture
def made(config: Make, tmp_path: Path, writer_of: Callable) -> Callable[..., Config]:
    """The config of two clients that write and two that classify."""
    draw = np.random.default_rng(5)
    lines = [f"w{a} w{b},w{a},{a % 2}" for a, b in draw.integers(0, 30, size=(200, 2))]
    (tmp_path / "rows.csv").write_text("\n".join(["ask,answer,label", *lines]))

    def make(**values: object) -> Config:
        base = config(ranks="4", max_length=16, rouge_examples=2, new_tokens=3, **values)
        source = f"{tmp_path}/rows.csv"
        tasks = (f"next={source},text=ask,target=answer", f"kind={source},text=ask")
        data = replace(base.data, tasks=(), task=tasks, samples=20, validation_samples=8, test_samples=8)
        return replace(base, data=data, model=replace(base.model, model=str(writer_of("llama").path)))

    return make


@pytest.mark.parametrize(
    "held", ["bf16", *(pytest.param(held, marks=pytest.mark.slow) for held in ("fp16", *QUANTISERS))]
)
def test_a_stopped_and_resumed_run_ends_in_the_same_bits(made, finished: FinishedRuns, held: str) -> None:
    if held in QUANTISERS:
        pytest.importorskip("torchao", reason="without the extra quant no run is in 8 and 4 bits")
    changes = {"base_weights": held, "fingerprint": "fisher", "clusters": "auto"}
    whole, parts = run_config(made(name="whole", **changes)), run_config(made(name="parts", max_rounds=1, **changes))
    parts = resume_run(parts.folder)
    assert same_tensors(state(whole.folder, round=2), state(parts.folder, round=2))
    assert rows(whole.folder) == rows(parts.folder)
    passing_audit(whole.folder)
    exact = finished(made(name="exact", **{**changes, "base_weights": "fp32"}))
    assert not same_tensors(state(whole.folder, round=2), state(exact.folder, round=2))
    losses = {(row["client"], row["round"]): row["loss"] for row in rows(whole.folder) if row.get("split") == "train"}
    assert all(losses[client, 2] < losses[client, 1] for client, _ in losses if client.startswith("next"))


@pytest.mark.slow
def test_workers_share_one_copy_in_bf16_and_cuts_cross_it(config: Make, writer_of: Callable) -> None:
    model = writer_of("llama").path
    check_workers(config, model=model, base_weights="bf16", split="trec-0=1", pack_tokens=200)


REFUSED = {
    "--base-weights nf4 --workers 2": "cannot be shared by processes",
    "--base-weights int8 --engine ray": "cannot be shared by processes",
    "--base-weights bf16 --trainable full": "is for adapters",
    "--base-weights bf16 --preset vision-quick": "is for models of texts",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_together_is_refused_in_one_line(words: str, tmp_path: Path, capsys) -> None:
    assert main(["run", *words.split(), "--runs-dir", str(tmp_path / "runs")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--base-weights" in line and REFUSED[words] in line
    assert not list(tmp_path.iterdir())
