from pathlib import Path

import pytest

from atlas_fl.cli.doctor import introduction
from atlas_fl.config.presets import find_preset


def test_it_says_what_it_will_do() -> None:
    text = "\n".join(introduction(find_preset("quick")))
    assert "9 clients train together on this machine, 3 for each task: movie, trec, pairs." in text
    assert "12 rounds" in text and "report.html" in text


@pytest.mark.slow
def test_it_ends_with_the_path_of_a_page_that_is_written_and_again_without_training(atlas, tmp_path) -> None:
    said = atlas("demo", "--preset", "smoke", "--runs-dir", str(tmp_path))
    assert (said.code, said.err) == (0, "")
    page = Path(said.out.splitlines()[-1])
    assert page.name == "report.html" and page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "\nround 1/2 " in said.out

    again = atlas("demo", "--preset", "smoke", "--runs-dir", str(tmp_path))
    assert (again.code, again.err) == (0, "")
    assert again.out.splitlines()[-1] == str(page)
    assert "is complete" in again.out and "round 1/2" not in again.out
