"""Killed sites, cut links, a killed server and late clients change no bit of a federation of real processes."""

import os
import signal
import stat
from collections.abc import Mapping

import pytest

from atlas_fl.experiment.export import load_models
from atlas_fl.params import SHARE
from atlas_fl.runtime.transport.certificates import make_certs
from atlas_fl.storage.jsonl import read_rows
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import read_tensors
from tests.runs.federation import Federations, adapters, sorted_ledger
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runtime.conftest import Proxy

pytestmark = pytest.mark.slow

CUT_LATE = {"clients_per_task": 3, "rounds": 5, "split": "movie-2=1"}


@pytest.mark.parametrize(
    ("settings", "halves"),
    [
        ({"split": "movie-0=1,movie-1=2", "wire_noise": 0.2, "dropout": 0.1}, 0),
        ({"strategy": "kriging", "measure_round": 1}, 2),
        ({"strategy": "ditto", "ranks": "4", "space": "factors"}, 0),
        ({"strategy": "apfl", "ranks": "4", "space": "factors"}, 0),
        ({"strategy": "feddpa", "ranks": "4", "space": "factors"}, 0),
    ],
    ids=["cut models", "what a rule asks for", "a model that never leaves", "interpolated", "stacked"],
)
def test_no_fault_changes_a_bit(federation: Federations, settings: Mapping[str, object], halves: int) -> None:
    """A site killed in the middle of its job, a link cut, and the server killed with the reports in its checkpoint.

    With noise and dropout: what a site draws after it was killed is what it drew before, from the secret that it kept.
    """
    fed = federation(rounds=2, **settings)
    stays = settings.get("strategy") in ("ditto", "apfl", "feddpa")
    words = ("--no-late",) if stays else ()
    server, port = fed.serve(*words)
    proxy = Proxy(port)
    try:
        first = fed.join("movie-0", port)
        second = fed.join("movie-1", proxy.port)
        first.wait_for("train, round 1")
        first.kill()
        server.wait_for("movie-0 is gone")
        again = fed.join("movie-0", port)
        again.wait_for("train, round 1")
        assert server.said("movie-0 is back")
        proxy.cut()
        server.wait_for("round 1/")
        server.kill()
        last, _ = fed.serve(*words, port=port)
        again.end()
        assert "is lost; trying again" in second.end()
        assert "resumed after round" in last.end()
    finally:
        proxy.close()
    if stays:  # the server has no model of a client
        assert fed.own_adapters == adapters(fed.simulated) and not fed.served.adapters.exists()
        assert not list(fed.folder.glob("*-private"))
    else:
        fed.is_as_simulated()
    secrets = [fed.folder / f"{name}-secret" for name in fed.sites]
    assert [stat.S_IMODE(path.stat().st_mode) for path in secrets] == [0o600, 0o600]
    assert len({path.read_text() for path in secrets}) == 2
    passing_audit(fed.served.path)
    sent, expected = (
        [row for row in sorted_ledger(folder) if "'halves'" in row] for folder in (fed.served.path, fed.simulated)
    )
    assert sent == expected and len(sent) >= halves


def test_an_own_adapter_and_its_gate_go_on_from_their_site_after_faults(federation: Federations) -> None:
    """In secure sums nobody else has them: a site is killed as it trains, and the server after its second round."""
    sites = {f"movie-{k}": device for k, device in enumerate(("cpu_2gb", "cpu_2gb", "laptop_8gb"))}
    given = {"strategy": "fedalt", "ranks": "4", "secure": True, "clients_per_task": 3, "rounds": 4, "eval_every": 1}
    fed = federation(sites=sites, **given)
    server, port = fed.serve("--no-late")
    first, *others = (fed.join(name, port, "--secure", "3") for name in sites)
    first.wait_for("train a model of its own, round 2")
    first.kill()
    server.wait_for("movie-0 is gone")
    again = fed.join("movie-0", port, "--secure", "3")
    server.wait_for("round 2/")
    server.kill()
    last, _ = fed.serve("--no-late", port=port)
    for site in (again, *others):
        site.end()
    assert "resumed after round" in last.end()
    models = load_models(RunFolder(fed.simulated))
    for name, model in models.items():
        assert same_tensors(model, read_tensors(fed.folder / f"{name}-adapter/gated_model.safetensors"))
    assert any(key.endswith(".lora_gate") and bool(one[:, :-1].any()) for key, one in models["movie-0"].items())
    served, simulated = state(fed.served.path), state(fed.simulated)
    shares = {key for key in simulated if SHARE in key}
    assert len(shares) == 3 and same_tensors(*({key: one[key] for key in shares} for one in (served, simulated)))
    passing_audit(fed.served.path, "server")


def test_a_round_goes_on_without_who_is_away(federation: Federations) -> None:
    fed = federation(rounds=3)
    server, port = fed.serve("--min-clients", "1", "--deadline", "3")
    stays, leaves = fed.join("movie-0", port), fed.join("movie-1", port)
    server.wait_for("round 1/3")
    leaves.kill()
    stays.end()
    said = server.end()
    assert "of movie-1 in round" in said
    missing = [row for row in read_rows(fed.served.metrics) if row.get("event") == "missing"]
    assert {row["client"] for row in missing} == {"movie-1"}
    passing_audit(fed.served.path)
    assert "movie-1 did not get the model at the end of the run" in said
    # who may not join is not waited for
    make_certs(fed.folder / "others", servers=["localhost"], clients=["movie-0"])
    words = [*server.words[: server.words.index("--certs")], "--certs", "others/server"]
    said = fed.programs.start(*words, folder=fed.folder).end()
    assert "movie-1 did not get the model, and may not join now; start this again once they may" in said
    assert "listening" not in said
    # both commands once more, and it gets what the others have
    again, port = fed.serve()
    assert again.wait_for(r"is complete; listening on .* for up to 600 seconds for movie-1, without a model yet")
    fed.join("movie-1", port).end()
    again.end()
    assert fed.own_adapters == adapters(fed.served.path)
    # then all is over
    assert "listening" not in fed.programs.start("serve", *again.words[1:], folder=fed.folder).end()


def test_a_client_that_comes_late_is_placed_and_no_fault_changes_a_bit_of_it(federation: Federations) -> None:
    fed = federation(**CUT_LATE)
    number = fed.joins_late("movie-2", device="laptop_8gb", where=": cluster 0, beside movie-0, movie-1")
    simulated = fed.simulate(arrive=f"movie-2={number}")
    assert adapters(fed.served.path) == adapters(simulated)
    assert sorted_ledger(fed.served.path) == sorted_ledger(simulated)
    passing_audit(fed.served.path)


def test_what_is_not_shared_stays_at_its_site_and_no_fault_changes_a_bit(federation: Federations) -> None:
    """B and heads are at the sites alone: one is killed, one comes late and cut, the server dies."""
    fed = federation(**CUT_LATE, share=("A",), space="factors", head="client")

    def parts_stay() -> None:
        assert list((fed.folder / "movie-1-private").glob("*.safetensors"))

    number = fed.joins_late("movie-2", device="laptop_8gb", meanwhile=parts_stay)
    simulated = fed.simulate(arrive=f"movie-2={number}")
    assert fed.own_adapters == adapters(simulated)
    assert not list(fed.folder.glob("*-private"))
    assert sorted_ledger(fed.served.path) == sorted_ledger(simulated)
    metrics = [[row for row in rows(folder) if row.get("event") != "mixed"] for folder in (fed.served.path, simulated)]
    assert metrics[0] == metrics[1]
    for path in sorted(fed.served.path.rglob("*.safetensors")):
        for key, tensor in read_tensors(path).items():
            above = "movie-2/" in key and ".layer.0." not in key
            assert above or not tensor.numel() or not (key.endswith("lora_B") or "/head." in key), (path, key)
    report = passing_audit(fed.served.path)
    assert report.unseen == ("served: movie-0", "served: movie-1", "served: movie-2")
    assert not fed.served.adapters.exists()


ENDED = "atlas: the server was stopped before the run was complete; start this command again once `atlas serve` is"


@pytest.mark.parametrize(
    "how", [signal.SIGINT, *(pytest.param(how, marks=pytest.mark.product) for how in (signal.SIGTERM, None))]
)
def test_sites_end_with_a_server_that_is_stopped_and_go_on_when_both_are_started_again(
    federation: Federations, how: signal.Signals | None
) -> None:
    """By a signal, or after one round of a session."""
    fed = federation()
    server, port = fed.serve(*(() if how else ("--max-rounds", "1")))
    sites = [fed.join(name, port) for name in fed.sites]
    server.wait_for("round 1/")
    if how is not None:
        os.kill(server.pid, how)
        assert "stopped; a run goes on where it was with the same command" in server.end(130).splitlines()[-1]
    else:
        server.end()
    for site in sites:
        assert site.end(2).splitlines()[-1].startswith(ENDED)
    assert "resumed after round" in fed.complete()[0]
    fed.is_as_simulated()


def test_a_site_whose_server_is_killed_ends_after_its_patience(federation: Federations) -> None:
    fed = federation()
    server, port = fed.serve()
    site = fed.join("movie-0", port, "--patience", "1")
    server.wait_for(r"movie-0: movie, .*\(1 of 2 here\)")
    server.kill()
    assert f"atlas: no answer from localhost:{port} for 1 seconds" in site.end(2).splitlines()[-1]


def test_ctrl_c_ends_a_server_and_a_site_with_one_line(federation: Federations) -> None:
    fed = federation()
    server, port = fed.serve()
    site = fed.join("movie-0", port)
    server.wait_for(r"movie-0: movie, .*\(1 of 2 here\)")
    for program in (site, server):
        os.kill(program.pid, signal.SIGINT)
        assert "stopped; a run goes on where it was with the same command" in program.end(130).splitlines()[-1]
