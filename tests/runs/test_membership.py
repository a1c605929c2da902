"""A site that is taken off the list is out at once, and the run goes on without it until it comes back."""

import pytest

from atlas_fl.client.job import Job
from atlas_fl.experiment.run import run_config
from atlas_fl.runtime.transport.certificates import make_certs, revoke_certs
from atlas_fl.storage.jsonl import read_json, read_rows
from tests.runs.federation import Federation, Federations, adapters
from tests.runs.finished import Make
from tests.runs.reading import passing_audit
from tests.runs.workers import backend_without

pytestmark = pytest.mark.slow

SITES = {"movie-0": "cpu_2gb", "movie-1": "tablet_4gb", "movie-2": "laptop_8gb"}
ROUNDS = 16


def missing(fed: Federation, client: str) -> list[int]:
    rows = read_rows(fed.served.metrics)
    return [row["round"] for row in rows if row.get("event") == "missing" and row["client"] == client]


def test_a_run_goes_on_without_who_was_taken_off_the_list_and_takes_it_back(federation: Federations) -> None:
    fed = federation(SITES, clients_per_task=3, rounds=ROUNDS)
    server, port = fed.serve("--min-clients", "2", "--deadline", "200")
    stays = [fed.join(name, port) for name in ("movie-0", "movie-1")]
    evicted = fed.join("movie-2", port)
    server.wait_for("round +2/")
    revoke_certs(fed.folder / "certs", clients=["movie-2"])
    assert "atlas: client 'movie-2' is not listed here; ask who runs the server" in evicted.end(2)
    assert "movie-0" not in evicted.text
    number = int(server.wait_for(r"no \w+ of movie-2 in round (\d+): it is not listed any more")[1])
    server.wait_for(f"round +{number + 1}/")  # nobody has waited for its deadline
    server.kill()
    # a server that is started again says what can be done
    words = server.words[: server.words.index("--min-clients")]
    certs = ("--certs", "certs/server", "--port", "0")
    said = fed.programs.start(*words, *certs, folder=fed.folder).end(2)
    assert "was planned with movie-2, not listed here; list them again, go on with --without movie-2" in said
    said = fed.programs.start(*words, *certs, "--without", "movie-9", folder=fed.folder).end(2)
    assert "unknown client in --without 'movie-9'" in said
    # without it every other one is needed, and all of them answer
    again, port = fed.serve("--without", "movie-2", port=port)
    again.wait_for("goes on without movie-2: missing in every round")
    number = int(again.wait_for(r"round +(\d+)/")[1])
    words = [f"localhost:{port}" if word.startswith("localhost") else word for word in evicted.words]
    words[words.index("certs/movie-2")] = "certs/.revoked/movie-2-1"
    assert "is not listed here" in fed.programs.start(*words, folder=fed.folder).end(2)
    again.wait_for(f"round +{number + 1}/")
    again.kill()
    assert {number, number + 1} <= set(missing(fed, "movie-2"))
    assert set(missing(fed, "movie-0") + missing(fed, "movie-1")) == set()
    # it comes back with a new certificate, and takes part as before
    make_certs(fed.folder / "certs", servers=[], clients=["movie-2"])
    last, _ = fed.serve(port=port)
    back = fed.join("movie-2", port)
    for site in (*stays, back):
        site.end()
    last.end()
    assert max(missing(fed, "movie-2")) < ROUNDS
    assert adapters(fed.served.path).keys() == SITES.keys()
    passing_audit(fed.served.path)
    assert read_json(fed.served.summary)["events"]["count"]["missing"] == len(missing(fed, "movie-2"))


def test_a_round_that_has_none_but_those_who_are_left_out_changes_nothing_and_is_audited(config: Make) -> None:
    """One client is away from round one on, and everybody in round two."""

    def is_away(_: str, job: Job) -> bool:
        return job.round > 0 and (job.client == "movie-1" or job.round == 2)

    settings = {"clients_per_task": 3, "rounds": 3, "pack_tokens": 1}
    found = run_config(config(tasks=("movie",), **settings), backend=backend_without(is_away))
    rows = [row for row in read_rows(found.folder / "metrics.jsonl") if row.get("event") == "missing"]
    assert [(row["round"], row["client"]) for row in rows] == [
        (1, "movie-1"),
        *[(2, name) for name in SITES],
        (3, "movie-1"),
    ]
    passing_audit(found.folder)
