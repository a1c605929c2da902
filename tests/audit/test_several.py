"""Runs that should differ must not end alike."""

import shutil
from dataclasses import replace

import pytest

from atlas_fl.audit.check import audit_run
from atlas_fl.config import MixingConfig
from tests.audit.written import only, write_run


def test_two_runs_that_should_differ_must_not_end_alike(tmp_path):
    local = write_run(tmp_path / "local", MixingConfig(strategy="local"))
    disguised = write_run(tmp_path / "atlas", real=MixingConfig(strategy="local"))
    honest = write_run(tmp_path / "honest")
    report = audit_run(local, [honest])
    assert report.ok
    assert [row.check for row in report.rows if row.round == 0] == ["different"]
    (row,) = only(audit_run(local, [disguised, honest]), "different")
    assert (row.run, row.detail) == ("local", "ends with the very models of atlas, yet it should differ")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (MixingConfig(strategy="local", eta=0.1), MixingConfig(strategy="local", eta=0.5, space="factors")),
        (MixingConfig(strategy="local"), MixingConfig(strategy="atlas_laplacian", eta=0.0)),
        (MixingConfig(strategy="fedavg_cluster"), MixingConfig(strategy="atlas_no_laplacian", eta=0.7)),
        (MixingConfig(strategy="fedavg", alpha=2.0), MixingConfig(strategy="standard_fl")),
    ],
)
def test_runs_that_say_the_same_in_other_words_may_end_alike(tmp_path, first, second):
    one, other = write_run(tmp_path / "one", first), write_run(tmp_path / "other", second)
    assert audit_run(one, [other]).ok


@pytest.mark.parametrize("eta", [0.1, 0.5])
def test_the_step_that_moved_nothing_would_have_been_found(tmp_path, eta):
    """The earlier system's results for eta = 0, 0.1 and 0.5 were the same to the last bit."""
    nothing = MixingConfig(strategy="atlas_laplacian", eta=0.0)
    zero = write_run(tmp_path / "zero", nothing)
    same = write_run(tmp_path / "same", replace(nothing, eta=eta), real=nothing)
    assert only(audit_run(zero, [same]), "different")


def test_another_seed_is_another_run(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    assert audit_run(run, [copy]).ok, "the same run twice"
    text = (copy / "config.toml").read_text()
    assert "seed = 42" in text
    (copy / "config.toml").write_text(text.replace("seed = 42", "seed = 43"))
    assert only(audit_run(run, [copy]), "different")
