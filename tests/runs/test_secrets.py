"""Simulations that are given the secrets of sites: other draws, the same bits again, and none but these on resume."""

from pathlib import Path

import pytest

from atlas_fl.config import config_hash
from atlas_fl.deployment.server import check_served
from atlas_fl.deployment.service import ServerOptions
from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.storage.files import load_or_create_secret, secret_digest, secret_file
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, same_tensors, state
from tests.runs.workers import check_workers

NAMES = ("movie-0", "movie-1", "trec-0", "trec-1")


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """A folder with a secret of every client."""
    folder = tmp_path / "secrets"
    for name in NAMES:
        load_or_create_secret(secret_file(folder, name))
    return folder


@pytest.mark.slow
def test_a_run_with_secrets_is_another_one_resumes_with_these_alone_and_keeps_none_of_them(
    config: Make, secrets: Path
) -> None:
    values = {"rounds": 2, "strategy": "fedavg", "dropout": 0.1}
    public = run_config(config(name="public", **values)).folder
    whole = run_config(config(name="whole", secrets=secrets, **values)).folder
    cut_short = config(name="cut", secrets=secrets, max_rounds=1, **values)
    assert config_hash(cut_short) == config_hash(config(**values))
    run_config(cut_short)
    own = secret_file(secrets, "movie-1")
    kept = own.read_text()
    own.unlink()
    with pytest.raises(ConfigError, match=r"^no secret .*movie-1-secret; copy it there from where its site keeps it"):
        resume_run(Path(cut_short.run.runs_dir) / "cut")
    other = load_or_create_secret(own)
    digests = [secret_digest(bytes.fromhex(kept)), secret_digest(other)]
    line = f"was begun with the secret {digests[0]} of client movie-1, and now it is the secret {digests[1]}; give as"
    with pytest.raises(CheckpointError, match=line):
        resume_run(Path(cut_short.run.runs_dir) / "cut")
    with pytest.raises(CheckpointError, match="of client movie-0, and now it is no secret; give as"):
        run_config(config(name="cut", **values), resume=True)
    own.write_text(kept)
    resumed = resume_run(Path(cut_short.run.runs_dir) / "cut").folder
    assert same_tensors(state(whole, round=2), state(resumed, round=2))
    assert not same_tensors(state(whole, round=2), state(public, round=2))
    passing_audit(resumed)
    written = [path.read_bytes() for path in resumed.rglob("*") if path.is_file()]
    for name in NAMES:
        text = secret_file(secrets, name).read_text()
        assert not any(text.encode() in content or bytes.fromhex(text) in content for content in written)


def test_a_run_that_was_begun_without_secrets_goes_on_with_none(config: Make, secrets: Path) -> None:
    values = {"rounds": 2, "strategy": "fedavg", "tasks": ("movie",)}
    run_config(config(max_rounds=1, **values))
    with pytest.raises(CheckpointError, match="was begun with no secret of client movie-0, and now it is"):
        run_config(config(secrets=secrets, **values), resume=True)


def test_no_server_is_given_secrets(config: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is for a simulation, and every site keeps its own secret, which no server"):
        check_served(config(secrets=tmp_path), ServerOptions(certs=tmp_path))


@pytest.mark.slow
def test_workers_draw_from_the_same_secrets(config: Make, secrets: Path) -> None:
    check_workers(config, strategy="fedavg", secrets=secrets, dropout=0.1, pack_tokens=200)
