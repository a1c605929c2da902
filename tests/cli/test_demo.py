from pathlib import Path

import pytest

from atlas_fl.cli import doctor
from atlas_fl.cli.doctor import introduction, time_lines
from atlas_fl.config.presets import find_preset
from atlas_fl.experiment.run_time import RunTime

TIME = RunTime(loading=5, planning=40, round=25, rounds=12, alone=150)


def test_it_says_what_it_will_do_and_how_long_it_takes() -> None:
    text = "\n".join([*introduction(find_preset("quick")), *time_lines(TIME)])
    assert "9 clients train together on this machine, 3 for each task: movie, trec, pairs." in text
    assert "12 rounds" in text and "report.html" in text
    assert "about 8.2 min on this machine as busy as it is now: 45.0 s before round 1, then 25.0 s for each" in text
    assert "for each of 12 rounds, then 2.5 min for clients alone" in text


@pytest.mark.slow
def test_it_ends_with_the_path_of_a_page_that_is_written_and_again_without_training(
    atlas, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(doctor, "measure", lambda _: TIME)
    said = atlas("demo", "--preset", "smoke", "--runs-dir", str(tmp_path))
    assert (said.code, said.err) == (0, "")
    page = Path(said.out.splitlines()[-1])
    assert page.name == "report.html" and page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "\nround 1/2 " in said.out
    assert "about 8.2 min on this machine" in said.out

    monkeypatch.setattr(doctor, "measure", lambda _: pytest.fail("a run that is there is not measured"))
    again = atlas("demo", "--preset", "smoke", "--runs-dir", str(tmp_path))
    assert (again.code, again.err) == (0, "")
    assert again.out.splitlines()[-1] == str(page)
    assert "is complete" in again.out and "round 1/2" not in again.out
