import json

import pytest

from atlas_fl.report.format import isolate
from atlas_fl.report.html.charts import Chart
from atlas_fl.report.html.elements import Page, Section, Text, in_script, render
from atlas_fl.report.table import Number, Table, count, duration, plain, share, size
from tests.report.html.reading import chart_of, parse_page, table_of


def page_of(*blocks) -> str:
    return render(Page(title="t", subtitle="s", sections=[Section(name="one", title="One", blocks=blocks)]))


def test_a_number_is_stored_in_full_and_read_in_short() -> None:
    assert (plain(1 / 3).text, plain(0.25, sign=True).text, plain(None).text) == ("0.333", "+0.250", "-")
    assert (count(12345).text, size(4096).text, duration(0.0123).text) == ("12\u202f345", "4.1 kB", "12 ms")
    assert [share(value).text for value in (0.0, 0.0001, 0.5, None)] == ["0.0%", "below 0.1%", "50.0%", "-"]
    table = Table(title="t", columns=("name", "value"), rows=[["a", plain(1 / 3)]])
    assert table_of(parse_page(page_of(table)), "t") == [{"name": "a", "value": 1 / 3}]


def test_a_column_of_which_nothing_is_known_is_left_out() -> None:
    rows = [["a", plain(None), "-", plain(1.0)], ["b", plain(None), "-", plain(None)]]
    table = Table(title="t", columns=("name", "never", "nowhere", "once"), rows=rows)
    assert table_of(parse_page(page_of(table)), "t") == [{"name": "a", "once": 1.0}, {"name": "b", "once": "-"}]


@pytest.mark.slow
def test_rows_are_those_of_the_chart_by_name() -> None:
    rows = [{"client": "a", "score": 1 / 3, "gain": None}, {"client": "b", "round": 2, "score": 0.5, "gain": 1}]
    chart = Chart(name="c", title="t", note="n", spec={"mark": "bar"}, rows=rows)
    found = chart_of(parse_page(page_of(chart)), "c")
    assert [{name: row.get(name) for name in found[0]} for row in rows] == found


def test_nothing_in_data_ends_a_script() -> None:
    text = "</script><!--<script>&\u2028\u2029"
    packed = in_script(json.dumps(text, ensure_ascii=False))
    assert not set("<>&\u2028\u2029") & set(packed)
    assert json.loads(packed) == text


def test_a_page_without_charts_carries_no_library() -> None:
    assert len(page_of(Text(lines=["a < b"]))) < 40_000


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused(value: float) -> None:
    from atlas_fl.errors import DataError

    chart = Chart(name="c", title="t", note="", spec={}, rows=[{"x": value}])
    with pytest.raises(DataError, match=r"is (nan|inf)"):
        page_of(chart)


def test_only_names_that_turn_words_are_set_apart() -> None:
    assert isolate("movie-0 (a, b) ‰ 3%") == "movie-0 (a, b) ‰ 3%"
    for name in ("\u05e2", "a\u202eb", "\u0627\u0644"):
        assert isolate(name) == f"\u2068{name}\u2069"


def test_number_keeps_its_value() -> None:
    assert plain(0.1 + 0.2) == Number(value=0.30000000000000004, text="0.300")
