"""The norm bound, recomputed: what it refused had to be, and what it let through was within it."""

import re

from safetensors.torch import load_file, save_file

from atlas_fl.audit.check import audit_run
from atlas_fl.config.schema import MixingConfig
from tests.audit.written import edit_record, edit_tensors, found, only, write_run


def leave(run, *, factor):
    """The update of movie-1, refused in round two, as it is on record: its change so many times that of others."""
    before = load_file(run / "audit" / "round-0001" / "start.safetensors")
    other = load_file(run / "audit" / "round-0002" / "trained.safetensors")
    sent = {}
    for key in (key for key in before if key.startswith("movie-1/")):
        change = (other[key.replace("movie-1/", "trec-0/")] - before[key.replace("movie-1/", "trec-0/")]).std()
        sent[key] = before[key] + factor * change * before[key].sign()
    save_file(sent, run / "audit" / "round-0002" / "out_of_bound.safetensors")


def test_an_update_that_was_refused_for_its_norm_had_to_be(run):
    leave(run, factor=1000)
    assert audit_run(run).ok
    leave(run, factor=1)
    report = audit_run(run)
    assert found(report) == {(2, "movie-1", "bounded")}
    told = r"its change is \S+ times the median, and 10 are allowed, but it was not"
    assert re.search(told, report.failures[0].detail)


def test_an_update_beyond_the_bound_that_was_mixed_is_found(run):

    def blow_up(flat):
        for key in (key for key in flat if key.startswith("movie-0/")):
            flat[key] = flat[key] * 1000

    edit_tensors(run, 1, "trained", blow_up)
    (row,) = only(audit_run(run), "bounded")
    assert (row.round, row.client) == (1, "movie-0")
    assert row.detail.endswith("but it was mixed as it came")


def test_who_was_refused_is_nobodys_neighbour_and_the_record_says_so(tmp_path):
    run = write_run(tmp_path / "run", MixingConfig(strategy="atlas_laplacian", eta=0.3))
    assert audit_run(run).ok
    edit_record(run, 2, without_edges=[])
    report = audit_run(run)
    assert only(report, "record")[0].detail == "the updates of ['movie-1'] were refused, and without edges were []"
    assert "mixed" in {row.check for row in report.failures}, "with its edges the others would hold something else"
    edit_record(run, 2, without_edges=["movie-0", "movie-1"])
    assert only(audit_run(run), "record")[0].detail.endswith("without edges were ['movie-0', 'movie-1']")


def test_who_keeps_the_model_that_it_began_with_is_held_to_it_and_to_the_reason(run):
    edit_record(run, 1, restored={"movie-0": "the mixed model holds values"})
    assert only(audit_run(run), "mixed")[0].detail == "it was to keep the model that it began with, but it changed"
    begun = load_file(run / "audit" / "round-0000" / "start.safetensors")
    own = {key: tensor for key, tensor in begun.items() if key.startswith("movie-0/")}
    edit_tensors(run, 1, "start", lambda flat: flat.update(own))
    detail = only(audit_run(run), "mixed", round=1)[0].detail
    assert detail.startswith("no update explains why it keeps its model: the largest value is ")
