"""What is missing or cannot be read in a folder is named."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from atlas_fl.audit.check import audit_run
from atlas_fl.config.schema import MixingConfig
from atlas_fl.errors import CheckpointError
from tests.audit.written import ROUNDS, write_run
from tests.runs.resealing import resealed


def test_a_folder_that_is_no_run_is_named(run, tmp_path):
    with pytest.raises(CheckpointError, match=r"is no run: it has no config\.toml"):
        audit_run(tmp_path)
    shutil.rmtree(run / "audit")
    with pytest.raises(CheckpointError, match="holds no audited round; run it again with --audit"):
        audit_run(run)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.toml", "[mixing", "config.toml cannot be read"),
        ("config.toml", '[mixing]\nstrategy = "fedmagic"', "config.toml cannot be read: unknown strategy 'fedmagic'"),
        ("config.toml", "[mixing]\naggregate_every = 0", "config.toml cannot be read: --aggregate-every is 0"),
        ("plan.json", "{", "damaged file .*plan.json"),
        ("plan.json", "{}", "plan.json is no plan: KeyError"),
        ("plan.json", None, "no file .*plan.json"),
        ("plan.json", "[]", "plan.json is no plan: TypeError"),
        ("audit/round-0002/record.json", None, "no file .*record.json"),
        ("audit/round-0002/start.safetensors", "broken", "start.safetensors is damaged"),
        ("audit/round-0001/trained.safetensors", None, "trained.safetensors is missing"),
    ],
)
def test_files_that_cannot_be_read_are_named(run, file, content, message):
    if content is None:
        (run / file).unlink()
    else:
        (run / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        audit_run(run)


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("start", float("nan"), "movie-0/head.weight"),
        ("start", float("inf"), "trec-1/layer.0.q.lora_A"),
        ("trained", float("nan"), "trec-1/layer.0.q.lora_A"),
    ],
)
def test_numbers_that_are_none_are_found_and_end_in_no_traceback(run, name, value, key):
    file = run / f"audit/round-0001/{name}.safetensors"
    flat = load_file(file)
    assert key in flat, sorted(flat)[:30]
    flat[key].view(-1)[-1] = value
    save_file(flat, file)
    failed = [row for row in audit_run(run).failures if row.check == "names" and "NaN or infinity" in row.detail]
    assert key.split("/")[0] in {row.client for row in failed}


@pytest.mark.parametrize("told_by", ["summary", "checkpoint"])
def test_last_rounds_that_are_missing_are_found(run, told_by):
    if told_by == "summary":
        text = (run / "config.toml").read_text()
        (run / "config.toml").write_text(re.sub(r"(?m)^rounds = .*$", f"rounds = {ROUNDS}", text))
        (run / "summary.json").write_text("{}")
    else:
        (run / f"checkpoints/round-{ROUNDS:04d}").mkdir(parents=True)
    assert audit_run(run).ok
    shutil.rmtree(run / f"audit/round-{ROUNDS:04d}")
    assert [row.detail for row in audit_run(run).failures] == [f"no rounds [{ROUNDS}]"]


def test_other_folders_beside_the_rounds_do_not_matter(run):
    (run / "audit/round-0001.bak").mkdir()
    assert audit_run(run).ok


NONSENSE = (None, True, -1, 1e999, "x", [], {}, [[]], {"x": 1}, [None], [1e999], {"movie-0": None})


def entries_of(value, path=()):
    """The paths of all entries of this JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in items:
        yield (*path, key)
        yield from entries_of(entry, (*path, key))


@pytest.mark.parametrize("file", ["plan.json", "audit/round-0002/record.json"])
def test_what_somebody_changed_together_with_its_digest_ends_in_rows_or_in_a_line_with_the_file(tmp_path, file):
    run = write_run(tmp_path / "run", MixingConfig(strategy="atlas_laplacian", layer_weighting="importance"))
    content = json.loads((run / file).read_text())
    draw, paths, refused = random.Random(0), list(entries_of(content)), 0
    for _ in range(30):
        changed = json.loads(json.dumps(content))
        *above, last = draw.choice(paths)
        part = changed
        for key in above:
            part = part[key]
        if isinstance(last, int) or draw.random() < 0.8:
            part[last] = draw.choice(NONSENSE)
        else:
            del part[last]
        resealed(run / file, changed) if "record" in file else (run / file).write_text(json.dumps(changed))
        try:
            audit_run(run)
        except CheckpointError as error:
            refused += 1
            assert Path(file).name in str(error) and "\n" not in str(error)
    assert refused > 5
