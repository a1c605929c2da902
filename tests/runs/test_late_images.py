"""Image clients that join a run of whole models: they begin with what all hold, and count from then on."""

from pathlib import Path

import pytest
import torch

from atlas_fl.audit.check import audit_run
from atlas_fl.audit.run_files import Models, models_in
from atlas_fl.errors import AtlasError
from atlas_fl.experiment.run import RunResult, run_config
from atlas_fl.storage.jsonl import read_json
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import read_tensors, write_tensors
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors
from tests.runs.sessions import check_same_runs, in_sessions
from tests.runs.test_image_adapters import _stripes

SMALL = {"clients_per_task": 3, "samples": 24, "participation": 1, "nc": "iid", "eval_every": 2, "arrive": "digits-2=2"}
MASKED = {**SMALL, "mask": "random", "sparsity": 0.8}


def audited(result: RunResult, round: int, name: str) -> Models:
    return models_in(RunFolder(result.folder).audit_round(round) / f"{name}.safetensors")


def arrival(result: RunResult, name: str) -> Models:
    return models_in(RunFolder(result.folder).audit_arrival(2) / f"{name}.safetensors")


@pytest.mark.parametrize("values", [SMALL, MASKED], ids=["dense", "mask"])
def test_a_newcomer_begins_with_the_global_weights_and_counts_in_the_next_average(
    image_config: Make, values: dict[str, object]
) -> None:
    result = run_config(image_config(**values))
    held, begun = audited(result, 1, "start"), arrival(result, "start")["digits-2"]
    assert held.keys() == {"digits-0", "digits-1"}
    assert same_tensors(begun, held["digits-0"]) and same_tensors(begun, held["digits-1"])
    trained, start = audited(result, 2, "trained"), audited(result, 2, "start")
    assert trained.keys() == start.keys() == {"digits-0", "digits-1", "digits-2"}
    for key, tensor in start["digits-2"].items():
        mean = sum(own[key].double() for own in trained.values()) / 3  # 24 images each
        assert torch.allclose(tensor.double(), mean, rtol=0, atol=1e-6), key
    found = passing_audit(result.folder)
    assert [(row.round, row.client) for row in found.rows if row.check == "joined"] == [(2, "digits-2")]
    folder = RunFolder(result.folder)
    assert list(result.summary["clients"]) == ["digits-0", "digits-1", "digits-2"]
    assert [path.name for path in folder.plans()] == ["plan.json", "plan-0002.json"]
    before, after = (read_json(path)["clients"] for path in folder.plans())
    assert after[:2] == before and after[2]["predicted"]["up_bytes"] == after[0]["predicted"]["up_bytes"]
    sent = [row for row in rows(result.folder, "ledger") if row["client"] == "digits-2"]
    assert {row["round"] for row in sent} == {2}
    planned = [row for row in rows(result.folder, "ledger") if row["client"] == "digits-0" and row["round"] == 0]
    masks = [[row["bytes"] for row in some if row["kind"] == "mask"] for some in (sent, planned)]
    assert masks[0] == masks[1] and len(masks[0]) == ("mask" in values), "the mask once, and nobody fits a head again"
    assert [row["direction"] for row in sent if row["kind"] == "weights"] == ["down", "up", "down"]


@pytest.mark.slow
def test_sessions_with_a_newcomer_make_the_same_run(image_config: Make, tmp_path: Path) -> None:
    """It has a task of its own, whose head is fitted by its own images."""
    own = f"stripes={_stripes(tmp_path / 'stripes', each=60)}"
    values = {**SMALL, "clients_per_task": 1, "task": own, "arrive": "stripes-0=2"}
    once = run_config(image_config(name="once", **values))
    parts = in_sessions(image_config(name="parts", max_rounds=1, **values))
    check_same_runs(once.folder, parts.folder)
    passing_audit(once.folder)
    passing_audit(parts.folder)
    fresh, start = arrival(once, "fresh")["stripes-0"], arrival(once, "start")["stripes-0"]
    held = audited(once, 1, "start")["digits-0"]
    for key in start:
        head = key.startswith("head.")
        assert torch.equal(start[key], fresh[key] if head else held[key]), key
    sent = [row for row in rows(once.folder, "ledger") if (row["client"], row["round"]) == ("stripes-0", 2)]
    assert [(row["direction"], row["kind"]) for row in sent][:4] == [
        ("up", "head"), ("down", "head"), ("up", "head"), ("down", "head"),
    ]  # fmt: skip


@pytest.mark.parametrize("values", [SMALL, MASKED], ids=["dense", "mask"])
def test_an_altered_start_of_a_newcomer_is_found(image_config: Make, values: dict[str, object]) -> None:
    """Of a body that a mask freezes one last bit is too much; what rounding may do to a mean is let pass."""
    result = run_config(image_config(**values, rounds=2))
    place = RunFolder(result.folder).audit_arrival(2) / "start.safetensors"
    tensors = read_tensors(place)
    key = next(key for key in arrival(result, "start")["digits-2"] if not key.startswith("head."))
    changed = tensors[f"digits-2/{key}"].clone()
    if "mask" in values:
        frozen = ~read_tensors(result.folder / "mask.safetensors")[key].flatten()
        at = int(frozen.int().argmax())
        changed.view(-1)[at] = torch.nextafter(changed.view(-1)[at], torch.tensor(9.0))
    else:
        changed *= 1.01
    write_tensors(place, {**tensors, f"digits-2/{key}": changed})
    found = [row for row in audit_run(result.folder).failures if row.check == "joined"]
    assert [(row.round, row.client) for row in found] == [(2, "digits-2")]


def test_a_rule_that_sends_nothing_lets_a_newcomer_begin_with_its_own(image_config: Make) -> None:
    result = run_config(image_config(**SMALL, strategy="local", rounds=2))
    assert same_tensors(arrival(result, "fresh")["digits-2"], arrival(result, "start")["digits-2"])
    assert not same_tensors(arrival(result, "start")["digits-2"], audited(result, 1, "start")["digits-0"])
    assert rows(result.folder, "ledger") == [] and audit_run(result.folder).ok


def test_a_mask_holds_for_heads_of_one_size(image_config: Make, tmp_path: Path) -> None:
    own = f"stripes={_stripes(tmp_path / 'stripes', each=60)}"
    values = {**MASKED, "clients_per_task": 1, "task": own}
    for arrive in ("none", "stripes-0=2"):
        with pytest.raises(AtlasError, match=r"^one mask holds for the heads.*digits 10, stripes 3; give") as caught:
            run_config(image_config(**{**values, "arrive": arrive}))
        assert "\n" not in str(caught.value)
