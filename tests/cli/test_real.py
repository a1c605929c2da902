"""The commands end to end on the embedded model and data: a tiny run is trained once, and everything looks at it."""

import json

import pytest

from atlas_fl.cli.main import main
from atlas_fl.config import load_config
from atlas_fl.storage.run_folder import RunFolder

TINY = ["--preset", "smoke", "--samples", "8", "--validation-samples", "4", "--test-samples", "4", "--batch-size", "4"]
TINY += ["--fingerprint-steps", "1", "--alone", "none"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    """A run of two rounds, stopped after the first and resumed."""
    runs = tmp_path_factory.mktemp("runs")
    assert main(["run", *TINY, "--audit", "--name", "tiny", "--runs-dir", str(runs), "--max-rounds", "1"]) == 0
    assert not (runs / "tiny" / "summary.json").exists()
    assert main(["resume", "tiny", "--runs-dir", str(runs)]) == 0
    return RunFolder(runs / "tiny")


def test_the_run_is_complete_and_its_config_repeats_it(run) -> None:
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    config = load_config(run.config)
    assert summary["run"]["rounds"] == 2
    assert (config.data.samples, config.run.preset, config.run.audit) == (8, "smoke", True)


def test_the_audit_passes_and_an_altered_file_fails_it(run, atlas, tmp_path) -> None:
    said = atlas("audit", str(run.path))
    assert (said.code, said.err) == (0, "")
    assert "audit passed" in said.out
    copy = tmp_path / "altered"
    copy.mkdir()
    for path in (path for path in run.path.rglob("*") if path.is_file()):
        (copy / path.relative_to(run.path)).parent.mkdir(parents=True, exist_ok=True)
        (copy / path.relative_to(run.path)).write_bytes(path.read_bytes())
    record = copy / "audit" / "round-0002" / "record.json"
    text = record.read_text(encoding="utf-8")
    digest = json.loads(text)["loaded"]["movie-0"]["digest"]
    record.write_text(text.replace(digest, "0" * 64), encoding="utf-8")
    said = atlas("audit", str(copy))
    assert said.code == 1
    assert "record.json: it is not what was written" in said.out


def test_a_newcomer_is_placed_beside_the_clusters(run, atlas) -> None:
    said = atlas("place", str(run.path), "--task", "sms", "--samples", "8")
    assert (said.code, said.err) == (0, "")
    assert "sms-0 is undecided" in said.out
    assert "over 8 examples" in said.out


@pytest.mark.parametrize("client", ["3"])
def test_a_client_is_exported_by_name_or_number(client: str, run, atlas, tmp_path) -> None:
    said = atlas("export", str(run.path), "--client", client, "--to", str(tmp_path / "adapter"))
    assert (said.code, said.err) == (0, "")
    exported = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    assert exported == (run.adapter("trec-1") / "adapter_model.safetensors").read_bytes()


def test_nothing_is_exported_among_other_files(run, atlas, tmp_path) -> None:
    (tmp_path / "mine.txt").touch()
    said = atlas("export", str(run.path), "--client", "0", "--to", str(tmp_path))
    assert said.code == 2
    assert said.err.endswith("there is something already; name a folder that is new or empty\n")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_unknown_client_has_its_nearest(run, atlas, tmp_path) -> None:
    said = atlas("export", str(run.path), "--client", "trec-9", "--to", str(tmp_path / "adapter"))
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("atlas: unknown client 'trec-9'; did you mean 'trec-")


def test_the_same_run_is_refused_and_with_resume_shown(run, atlas) -> None:
    words = ["run", *TINY, "--audit", "--name", "tiny", "--runs-dir", str(run.path.parent)]
    refused = atlas(*words)
    assert refused.code == 2
    assert refused.err.startswith(f"atlas: run {run.path} exists already;")
    assert atlas(*words, "--resume").out.splitlines()[-1] == f"run folder: {run.path}"
    other = atlas(*words, "--resume", "--alpha", "0.25")
    assert other.code == 2
    assert "was begun with alpha = None, not 0.25" in other.err


def test_the_plan_trains_nothing(atlas, tmp_path) -> None:
    said = atlas("plan", *TINY, "--runs-dir", str(tmp_path / "runs"), "--to", str(tmp_path / "plan.json"))
    assert said.code == 0
    assert "movie-0" in said.out
    assert said.out.splitlines()[-1].startswith(f"the run would be {tmp_path / 'runs' / 'smoke-atlas-minilm-s42-'}")
    assert not (tmp_path / "runs").exists()
    assert len(json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["clients"]) == 4


@pytest.mark.slow
def test_users_of_leaf_are_clients_from_run_to_place(atlas, tmp_path) -> None:
    """Sent140 as LEAF writes it: train and test apart, x a list with the text in the fifth place."""
    for split, count in (("train", 12), ("test", 4)):
        texts = {
            user: [f"{split} tweet {n} of {user}, {'good' if n % 2 else 'bad'}" for n in range(count)]
            for user in ("ann", "bob", "7")
        }
        users = {
            user: {"x": [["1", "a date", "NO_QUERY", user, text] for text in own], "y": [n % 2 for n in range(count)]}
            for user, own in texts.items()
        }
        (tmp_path / f"leaf/{split}").mkdir(parents=True)
        leaf = {"users": list(users), "num_samples": [count] * 3, "user_data": users}
        (tmp_path / f"leaf/{split}/all_data_niid_keep_0_{split}_9.json").write_text(json.dumps(leaf))
    task = f"mood={tmp_path}/leaf,text=x.4,label=y"
    words = ["--preset", "smoke", "--fingerprint-steps", "1", "--alone", "none"]
    words += ["--name", "moods", "--runs-dir", str(tmp_path)]
    assert atlas("run", *words, "--clusters", "auto", "--task", f"{task},client=user").code == 0
    summary = json.loads((tmp_path / "moods/summary.json").read_text())
    assert set(summary["clients"]) == {"user-7", "ann", "bob"}
    rows = [{"text": f"new tweet {n}, {'good' if n % 2 else 'bad'}", "label": n % 2} for n in range(12)]
    (tmp_path / "new.json").write_text(json.dumps(rows))
    said = atlas("place", str(tmp_path / "moods"), "--task", f"mood={tmp_path}/new.json")
    assert (said.code, said.err) == (0, "")
    assert "mood-3" in said.out
