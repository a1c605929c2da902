"""`atlas serve --secure` and four `atlas join --secure 3` as processes, over mutual TLS; one is killed in mid-round."""

import json
from pathlib import Path

import pytest

from tests.runs.processes import Programs
from tests.runs.test_compose import DEPLOY

SITES = tuple(f"site-{k}" for k in range(1, 5))


@pytest.mark.product
@pytest.mark.slow
def test_a_site_is_killed_in_mid_round_and_the_sums_go_on_and_are_audited(programs: Programs, tmp_path: Path) -> None:
    settings = (DEPLOY / "fed.toml").read_text().replace("clients_per_task = 3", "clients_per_task = 4")
    settings = settings.replace('alone = "none"', 'alone = "none"\naudit = true')
    settings = settings.replace('strategy = "fedavg"', 'strategy = "fedit"\nsecure = true')
    (tmp_path / "fed.toml").write_text(settings)
    clients = [word for name in SITES for word in ("--client", name)]
    made = programs.start("certs", "make", "certs", "--server", "localhost", *clients, folder=tmp_path)
    assert programs.wait(made.pid) == 0
    given = ("--config", "fed.toml", "--certs", "certs/server", "--port", "0", "--no-late", "--min-clients", "3")
    server = programs.start("serve", *given, "--deadline", "60", folder=tmp_path)
    port = server.wait_for(r":(\d+)")[1]
    sites = {}
    for place, name in enumerate(SITES):
        own = ("--certs", f"certs/{name}", "--task", "movie", "--part", str(place), "--device", "laptop_8gb")
        words = (*own, "--config", "fed.toml", "--to", f"to/{name}", "--secure", "3")
        sites[name] = programs.start("join", f"localhost:{port}", *words, folder=tmp_path)
    sites["site-4"].wait_for("train, round 2")
    sites["site-4"].kill()
    assert [programs.wait(sites[name].pid) for name in SITES[:3]] == [0, 0, 0], server.text
    assert programs.wait(server.pid) == 0
    assert "the server sees the mean of the adapters and the head of movie over 4 clients" in server.text
    rows = [json.loads(line) for line in (tmp_path / "runs/reviews/metrics.jsonl").read_text().splitlines()]
    sums = {row["round"]: row["reason"] for row in rows if row.get("event") == "summed"}
    assert "of 4 of 4 clients, right to" in sums[1]
    assert "of 3 of 4 clients, right to" in sums[3]
    audit = programs.start("audit", "runs/reviews", folder=tmp_path)
    assert programs.wait(audit.pid) == 0, audit.text
    report = programs.start("report", "runs/reviews", folder=tmp_path)
    assert programs.wait(report.pid) == 0, report.text
    assert "summed" in (tmp_path / "runs/reviews/report.html").read_text()
