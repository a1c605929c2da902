"""Runs of more clients than a page names: charts and tables of some, means and CSV files of all."""

from statistics import fmean

import pytest

from atlas_fl.report.figures import charts_of, draw_all
from atlas_fl.report.format import MOST_SHOWN, evenly
from atlas_fl.report.html.run_page import run_page
from atlas_fl.report.record import read_record
from atlas_fl.report.table import Table, cell_at, table_of


@pytest.mark.parametrize("count", [0, 1, MOST_SHOWN, MOST_SHOWN + 1, 10_000])
def test_of_many_so_many_are_shown_with_both_ends_in_their_order(count: int) -> None:
    shown = evenly(range(count))
    assert len(shown) == min(count, MOST_SHOWN)
    assert list(shown) == sorted(set(shown))
    assert not count or (shown[0], shown[-1]) == (0, count - 1)


def test_a_table_says_of_how_many_rows_it_has_some() -> None:
    entries = [{"name": f"c{k}"} for k in range(1_000)]
    few = table_of("Clients", {"client": cell_at("name")}, entries, note="of one seed")
    assert (len(few.rows), few.note) == (MOST_SHOWN, "of one seed\n200 of 1,000 rows, evenly spaced")
    assert table_of("Clients", {"client": cell_at("name")}, entries[:200], note="of one seed").note == "of one seed"


@pytest.mark.product
@pytest.mark.slow
def test_the_page_names_some_clients_and_means_are_of_all(make_run) -> None:
    run = make_run(tasks=2, clients_per_task=150, rounds=2)
    record, page = read_record(run), run_page(run)
    assert any("name 200 of 300 clients" in warning for warning in page.warnings)
    tables = [block for section in page.sections for block in section.blocks if isinstance(block, Table)]
    assert {len(table.rows) for table in tables if table.columns[0] == "client"} == {MOST_SHOWN}
    (chart, *_) = charts_of(record, "convergence")
    named = {row["client"] for row in chart.rows} - {"(mean)"}
    assert 0 < len(named) < 150
    (shown,) = [
        row["value"]
        for row in chart.rows
        if (row["client"], row["series"], row["round"]) == ("(mean)", "validation score", 1)
    ]
    task = record.task_of[min(named)]
    assert shown == pytest.approx(fmean(member.series("validation", "primary")[1] for member in record.by_task[task]))
    draw_all(run)
    assert len((run / "figures/scores.csv").read_text().splitlines()) == 1 + 300 * 3
