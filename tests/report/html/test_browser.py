"""Pages in a real browser. Where no Chromium is installed these are left out: `apt-get install chromium` brings one."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from atlas_fl.report.html.write import write_report
from tests.report.html.chromium import Tab, find_chromium, open_browser
from tests.report.html.hostile import NAMES, rename

BROWSER = find_chromium()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed; apt-get install chromium")
WIDTHS = (375, 768, 1440, 2560)
CUT_LABELS = """[...document.querySelectorAll('svg .role-legend-label text')]
    .filter((one) => one.getBoundingClientRect().right > one.closest('svg').getBoundingClientRect().right + 1)
    .map((one) => one.textContent)"""


CUT_TABLES = """[...document.querySelectorAll('main .table')]
    .filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.ariaLabel)"""
CUT_CELLS = """[...document.querySelectorAll('main .table th, main .table td')]
    .filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent)"""
UNFOLD = "document.querySelectorAll('details.wide').forEach((one) => { one.open = true })"


def cut_tables(tab: Tab) -> list[str]:
    """Tables that are wider than their place and cells whose text is cut, with all that is folded open."""
    tab.evaluate(UNFOLD)
    return [*tab.evaluate(CUT_TABLES), *tab.evaluate(CUT_CELLS)]


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Tab]:
    with open_browser(BROWSER, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def compared(make_federation, tmp_path) -> Path:
    """The page of a comparison."""
    make_federation(2)
    return write_report(sorted(path.parent for path in tmp_path.glob("*/summary.json")))


def check_quiet(tab: Tab, page: Path) -> None:
    """Nothing was complained of, and nothing but the page itself was asked for."""
    assert tab.complaints == []
    assert tab.requests == [page.resolve().as_uri()]


def overflow(tab: Tab) -> int:
    """Pixels by which the page is wider than its window."""
    return int(tab.evaluate("document.documentElement.scrollWidth - innerWidth"))


@pytest.mark.slow
@pytest.mark.parametrize("is_dark", [False, True])
def test_a_run_fits_every_width_and_is_quiet(make_run, tab, is_dark: bool) -> None:
    page = write_report([rename(make_run(rounds=2, refused=True))])
    for width in WIDTHS:
        tab.open(page, width=width, is_dark=is_dark)
        check_quiet(tab, page)
        assert overflow(tab) <= 0, width
        assert tab.evaluate(CUT_LABELS) == [], width
        assert width == 768 or cut_tables(tab) == [], width
    assert tab.evaluate("[...document.querySelectorAll('[data-chart]')].every((one) => one.dataset.drawn === 'yes')")
    assert tab.evaluate("window.harmed") is None
    drawn = tab.evaluate("document.querySelector('#figure-outcome svg').textContent")
    assert "<script>window.har…" in drawn, "a long name is cut, and is text"
    assert NAMES["trec-0"] in drawn


@pytest.mark.slow
def test_a_comparison_fits_every_width_and_is_quiet(compared, tab) -> None:
    for width in WIDTHS:
        tab.open(compared, width=width, is_dark=width == 768)
        check_quiet(tab, compared)
        assert overflow(tab) <= 0, width
        assert width == 768 or cut_tables(tab) == [], width


@pytest.mark.slow
def test_a_page_with_a_long_name_and_gains_is_whole(make_run, tab) -> None:
    long = "a-hospital-of-a-rather-long-name-and-its-notes-fedavg_cluster-all-minilm-l6-v2-s42-0123456789"
    run = make_run(long, rounds=2)
    summary = json.loads((run / "summary.json").read_text())
    clients = {
        name: {"together": 0.75, "alone": 0.7, "gain": 0.05, "interval": [-0.01, 0.11]} for name in summary["clients"]
    }
    gains = {"clients": clients, "mean": {"gain": 0.05, "interval": [0.0, 0.1]}, "of": len(clients), "seconds": 1.0}
    (run / "summary.json").write_text(json.dumps({**summary, "alone": gains}))
    page = write_report([run])
    for width in (1440, 375):
        tab.open(page, width=width)
        assert overflow(tab) <= 0, width
        assert cut_tables(tab) == [], width
    first = tab.evaluate("document.querySelector('section p').textContent")
    assert re.match(r"\d of \d clients gain from training together, mean \+0.050", first)


@pytest.mark.product
def test_two_hundred_clients_are_drawn(make_run, tab) -> None:
    page = write_report([make_run(tasks=4, clients_per_task=50, rounds=20)])
    tab.open(page, width=1440, is_dark=True)
    check_quiet(tab, page)
    assert overflow(tab) <= 0
    assert tab.evaluate("document.querySelectorAll('#figure-scores canvas').length") == 1, "too many for an SVG"


@pytest.mark.slow
def test_drawn_numbers_are_the_stored_ones(make_run, tab) -> None:
    run = make_run(rounds=2)
    tab.open(write_report([run]), width=1440)
    cells = tab.evaluate(
        "[...document.querySelectorAll('#figure-scores .mark-text.role-mark text')].map(t => t.textContent)"
    )
    rows = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    stored = [f"{row['primary']:.2f}" for row in rows if row.get("split") == "validation"]
    assert sorted(cells) == sorted(stored)
    plan = json.loads((run / "plan.json").read_text("utf-8"))
    cells = tab.evaluate(
        "[...document.querySelectorAll('#figure-ranks .mark-text.role-mark text')].map(t => t.textContent)"
    )
    ranks = [cell for cell in cells if cell.isdigit()]  # devices stand beside them
    assert sorted(ranks) == sorted(str(rank) for client in plan["clients"] for rank in client["ranks"])


@pytest.mark.slow
def test_dots_lie_where_their_scores_say(make_run, tab) -> None:
    """Two clients' final scores and their distance in pixels give the scale; all others lie on it."""
    run = make_run()
    tab.open(write_report([run]), width=1440)
    places = tab.evaluate(
        "[...document.querySelectorAll('#figure-outcome .mark-symbol.role-mark')].at(-1)"
        ".querySelectorAll('path').values().map(p => [p.getAttribute('aria-label'), p.transform.baseVal[0].matrix.e])"
        ".toArray()"
    )
    summary = json.loads((run / "summary.json").read_text("utf-8"))["clients"]
    found = {
        re.search(r"client: ([\w-]+)", label)[1]: x  # type: ignore[index]
        for label, x in places
    }
    finals = {name: entry["final"]["test"]["primary"] for name, entry in summary.items()}
    assert set(found) == set(finals)
    low, high = min(finals, key=finals.__getitem__), max(finals, key=finals.__getitem__)
    scale = (found[high] - found[low]) / (finals[high] - finals[low])
    assert scale > 0
    for name, score in finals.items():
        assert found[name] == pytest.approx(found[low] + scale * (score - finals[low]), abs=0.01)


@pytest.mark.slow
def test_the_keyboard_sorts_a_table(make_run, tab) -> None:
    tab.open(write_report([make_run(tasks=1, clients_per_task=4)]), width=1440)
    column = "[...document.querySelectorAll('#outcome table')].at(-1).tBodies[0].rows"
    read = f"[...{column}].map((row) => Number(row.cells[4].querySelector('data').value))"
    before = tab.evaluate(read)
    tab.evaluate("[...document.querySelectorAll('#outcome table')].at(-1).tHead.rows[0].cells[3].firstChild.focus()")
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "final"
    tab.press("Enter")
    assert tab.evaluate(read) == sorted(before, reverse=True)
    assert tab.evaluate("document.activeElement.parentElement.ariaSort") == "descending"
    tab.press("Enter")
    assert tab.evaluate(read) == sorted(before)


@pytest.mark.slow
def test_what_a_pointer_shows_of_a_mark_is_text(make_run, tab) -> None:
    tab.open(write_report([rename(make_run(rounds=2))]), width=1440)
    marks = "[...document.querySelectorAll('#figure-outcome .mark-symbol.role-mark path')]"
    shown = set()
    for place in range(tab.evaluate(f"{marks}.length")):
        x, y = tab.evaluate(
            f"{{ const mark = {marks}[{place}]; mark.scrollIntoView({{ block: 'center' }});"
            " const box = mark.getBoundingClientRect(); [box.x + box.width / 2, box.y + box.height / 2]; }"
        )
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        tab.wait("document.querySelector('#vg-tooltip-element td')")
        shown.add(tab.evaluate("document.querySelector('#vg-tooltip-element tr').cells[1].textContent"))
    assert NAMES["movie-1"] in shown and tab.evaluate("window.harmed") is None


@pytest.mark.slow
def test_every_control_can_be_reached_by_the_keyboard(make_run, tab) -> None:
    tab.open(write_report([make_run(rounds=2)]), width=768)
    controls = "[...document.querySelectorAll('a, button, select, summary, .table, pre')]"
    assert tab.evaluate(f"{controls}.filter((one) => one.tabIndex < 0).length") == 0
    assert tab.evaluate("document.querySelectorAll('.vega-bind select').length") >= 3, "clients are chosen by a menu"


@pytest.mark.slow
def test_the_numbers_of_a_figure_are_shown_on_demand(make_run, tab) -> None:
    tab.open(write_report([make_run(rounds=2)]), width=768)
    tab.evaluate("document.querySelector('#figure-bytes details').open = true")
    tab.wait("document.querySelector('#figure-bytes details tbody')")
    rows = tab.evaluate("document.querySelectorAll('#figure-bytes details tbody tr').length")
    assert rows == 9, "a fingerprint, and of two rounds adapter and head, up and down"
    check = tab.evaluate("document.querySelector('#figure-bytes details thead').textContent")
    assert check.startswith("rounddirectionkind")


@pytest.mark.slow
def test_on_paper_charts_shrink_to_its_width_and_ink_is_dark(make_run, tab) -> None:
    tab.open(write_report([make_run(rounds=2)]), width=1440, is_dark=True)
    widest = (
        "Math.max(...[...document.querySelectorAll('.drawing svg')].map((one) => one.getBoundingClientRect().right))"
    )
    try:
        tab.call("Emulation.setEmulatedMedia", media="print")
        tab.evaluate("document.body.style.width = '600px'")
        assert 300 < tab.evaluate(f"{widest} - document.body.getBoundingClientRect().left") <= 600
        assert tab.evaluate("getComputedStyle(document.documentElement).color") == "rgb(28, 33, 39)"
    finally:
        tab.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.slow
def test_a_client_that_is_chosen_stands_out(make_run, tab) -> None:
    run = make_run(tasks=1, clients_per_task=3)
    tab.open(write_report([run]), width=1440)
    opacities = (
        "[...document.querySelectorAll('#figure-score-0 .mark-line.role-mark path')]"
        ".map((path) => Number(path.getAttribute('opacity') ?? 1))"
    )
    assert len(set(tab.evaluate(opacities)[:3])) == 1
    tab.evaluate(
        "{ const menu = document.querySelector('#figure-score-0 select'); menu.selectedIndex = 2;"
        " for (const name of ['input', 'change']) menu.dispatchEvent(new Event(name, { bubbles: true })); }"
    )
    tab.wait(f"new Set({opacities}.slice(0, 3)).size > 1")
    assert sorted(tab.evaluate(opacities)[:3])[:2] == [0.08, 0.08]
    assert max(tab.evaluate(opacities)[:3]) > 0.5
    assert tab.complaints == []


@pytest.mark.slow
def test_a_canvas_follows_the_theme(make_run, tab) -> None:
    tab.open(write_report([make_run(tasks=4, clients_per_task=50, rounds=20)]), width=1440, is_dark=False)
    ground = "document.querySelector('#figure-scores .drawing').style.background"
    assert tab.evaluate(ground) == "rgb(255, 255, 255)"
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    tab.wait(f"{ground} === 'rgb(20, 24, 29)'")
    assert tab.complaints == []
