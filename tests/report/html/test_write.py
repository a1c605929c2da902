from pathlib import Path

import pytest

from atlas_fl.cli.main import main
from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.report.html.write import is_page, write_report


@pytest.mark.slow
def test_a_run_has_its_page_in_its_folder_and_figures_beside(make_run, capsys) -> None:
    run = make_run(tasks=1, clients_per_task=2, rounds=1)
    assert main(["report", str(run)]) == 0
    written = capsys.readouterr().out.split()
    assert written[0] == str(run / "report.html")
    assert str(run / "figures" / "bytes.png") in written
    assert is_page(run / "report.html")


def test_several_runs_have_one_page_beside_them(make_federation, tmp_path) -> None:
    make_federation(2, seeds=(1,))
    runs = sorted(str(path.parent) for path in tmp_path.glob("*/summary.json"))
    assert main(["report", *runs, "--page-only", "--control", "local"]) == 0
    assert is_page(tmp_path / "report.html")
    assert not any((Path(run) / name).exists() for run in runs for name in ("figures", "report.html"))


def test_a_file_of_somebody_else_is_kept(make_run, tmp_path, capsys) -> None:
    run = make_run(tasks=1, clients_per_task=1, rounds=1)
    (run / "report.html").write_text("my own notes")
    write_report([run])
    assert is_page(run / "report.html")
    assert [path.read_text() for path in run.glob("report*") if not is_page(path)] == ["my own notes"]
    other = tmp_path / "notes.html"
    other.write_text("my own notes")
    assert main(["report", str(run), "--to", str(other)]) == 2
    assert "was not written by this command" in capsys.readouterr().err


def test_a_page_is_written_anew_and_where_it_is_wanted(make_run, tmp_path) -> None:
    run, to = make_run(tasks=1, clients_per_task=1, rounds=1), tmp_path / "page.html"
    for _ in range(2):
        assert main(["report", str(run), "--page-only", "--to", str(to)]) == 0
    assert is_page(to)
    assert not (run / "report.html").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_bad_input_is_one_line(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no run is named"):
        write_report([])
    with pytest.raises(CheckpointError, match="not a run folder"):
        write_report([tmp_path])
