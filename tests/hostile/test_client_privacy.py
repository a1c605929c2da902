"""Client-level differential privacy across sites: noise from the operating system, every sum paid before it is made."""

import math
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from scipy.stats import chi2

from atlas_fl.aggregation.secure_mean import SumGroup, SumSettings
from atlas_fl.client.job import Job
from atlas_fl.client.options import TrainOptions
from atlas_fl.config import Config, run_folder
from atlas_fl.deployment.privacy_record import pay_sums
from atlas_fl.deployment.service import run_id
from atlas_fl.errors import AtlasError, ConfigError, ProtocolError
from atlas_fl.experiment.run import run_config
from atlas_fl.planning.client_privacy import noisy_settings
from atlas_fl.runtime.coordinator.secure_sums import SumSite
from atlas_fl.runtime.protocol import messages
from atlas_fl.runtime.protocol.messages import write_packed
from atlas_fl.runtime.remote import RemoteEngine
from atlas_fl.secure_sums import Identity, KeyBook
from atlas_fl.storage.jsonl import read_sealed, write_sealed
from tests.hostile.servers import Spoken, lie_to, record
from tests.runs.reading import passing_audit, rows, same_tensors, state

pytest.importorskip("dp_accounting", reason="the extra dp is not installed")

THREE = tuple(f"movie-{k}" for k in range(3))
GIVEN = {
    **{"strategy": "fedit", "ranks": "4", "clients_per_task": 3, "rounds": 2, "tasks": "movie", "pack_tokens": 1},
    **{"dp": "client", "epsilon": 5.0, "update_filter": ("clip=0.5",), "alone": "none"},
}


@pytest.mark.slow
def test_a_server_draws_noise_that_no_seed_gives_and_pays_for_every_sum(
    shared_config: Callable[..., Config], tmp_path: Path
) -> None:
    found = record(shared_config(name="served", **GIVEN), tmp_path, THREE)
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    passing_audit(found.found.folder, "epsilon")
    assert read_sealed(found.found.folder / "releases.json", "rounds")["rounds"] == [1, 2]
    spent = {row["round"]: row["epsilon"] for row in rows(found.found.folder) if row.get("split") == "train"}
    assert spent[1] < spent[2] and 4.9 < spent[2] <= 5.0
    simulated = run_config(shared_config(name="simulated", secrets=str(found.folder), **GIVEN))
    assert not same_tensors(state(simulated.folder), state(found.found.folder))


@pytest.mark.slow
def test_sites_leave_a_clip_that_follows_the_norms_to_the_server(
    shared_config: Callable[..., Config], tmp_path: Path
) -> None:
    given = {**GIVEN, "epsilon": 60.0, "clip_quantile": 0.5, "update_filter": ("clip=0.001",)}
    found = record(shared_config(name="adapted", **given), tmp_path, THREE)
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    passing_audit(found.found.folder, "epsilon")
    said = [row["reason"] for row in rows(found.found.folder) if "clipped to" in str(row.get("reason"))]
    assert len(said) == 2 and said[0].startswith("clipped to 0.001, and to 0.001")  # all norms are above it


@pytest.mark.slow
def test_a_server_that_has_given_out_all_sums_gives_out_no_more(
    shared_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a server that was killed in round 1 and did it again
    monkeypatch.setattr(RemoteEngine, "release", lambda _, round: [1, *range(1, round + 1)])
    found = record(shared_config(name="spent", **GIVEN), tmp_path, THREE)
    assert isinstance(found.found.error, ConfigError)
    assert "with this round; allowed: 5: a killed server did rounds again" in str(found.found.error)
    passing_audit(found.found.folder)


NO_NOISE = {"dp": "none", "epsilon": 8.0, "delta": None, "secure_range": 4.0}
SUMMED = {**GIVEN, "secure": True, "secure_range": 16.0, "delta": 0.1}
SPENDS = {"dp": "client", "epsilon": 5.0, "delta": 0.1}
"""What a site agrees to spend."""


@pytest.mark.slow
def test_a_site_pays_for_every_run_of_the_same_settings_and_once_for_one_that_goes_on(
    shared_config: Callable[..., Config], tmp_path: Path
) -> None:
    found = record(shared_config(name="quarterly", **GIVEN, delta=0.1), tmp_path, THREE, **SPENDS)
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    own = read_sealed(found.found.folder / "releases.json", "run")["run"]
    account = tmp_path / "movie-0-runs"
    spoken, certs = found.spoken["movie-0"], tmp_path / "certs" / "movie-0"
    assert [*read_sealed(account, "runs")["runs"]] == [f"{spoken.welcome['config']} {own}"]

    def ended(number: int, welcome: dict[str, Any]) -> str:
        said = Spoken(welcome={**spoken.welcome, **welcome}, hello=spoken.hello, turns=spoken.turns)
        return lie_to(said, lambda *_: None, tmp_path / f"{number}", "movie-0", certs=certs, **SPENDS).error

    paid = account.read_bytes()
    assert "would spend epsilon 8.963 at delta 0.1" in ended(1, {"run": "f" * 64})
    assert "the server's welcome: run" in ended(2, {"run": None})
    assert ended(3, {}) == "" and account.read_bytes() == paid


def test_a_run_keeps_its_id_and_a_site_of_another_one_is_told_to_start_again(
    shared_config: Callable[..., Config],
) -> None:
    first, second = (shared_config(name=name, **GIVEN) for name in ("first", "second"))
    ids = [run_id(first), run_id(first), run_id(second), run_id(shared_config(name="third", **SUMMED))]
    assert ids[0] == ids[1] != ids[2] and ids[3] is None
    engine = RemoteEngine(
        **{"manager": None, "bridge": None, "deadline_seconds": 1.0, "split_server": None, "min_clients": 0},
        releases=run_folder(first).releases,
    )
    assert [engine.release(1), engine.release(1)] == [[1], [1, 1]] and run_id(first) == ids[0]
    server = messages.Identity(version="1", config="c", model="m", architecture="a", tokenizer="t", run=ids[2])
    with pytest.raises(ProtocolError, match=r"has run .*; start the site again, which pays for this run then"):
        server.check("movie-0", {"run": ids[0]})


@pytest.mark.slow
def test_sites_add_their_noise_to_secure_sums_from_their_secrets(
    shared_config: Callable[..., Config], tmp_path: Path
) -> None:
    found = record(shared_config(name="shares", **SUMMED), tmp_path, THREE, secure=3, **SPENDS)
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    passing_audit(found.found.folder, "epsilon")
    spent = {row["round"]: row["epsilon"] for row in rows(found.found.folder) if row.get("split") == "train"}
    assert spent[1] < spent[2] and 4.9 < spent[2] <= 5.0
    assert not (found.found.folder / "releases.json").exists()
    settings = noisy_settings(found.config, THREE)
    for name in THREE:
        paid = read_sealed(tmp_path / f"{name}-sums", "sums")["sums"]
        rounds = {"1": 4, "2": 4}  # of the adapters and of the head what was masked and who was in the sum
        assert Counter(place.split()[4] for place in paid if " in round " in place) == rounds
        assert {who for place, who in paid.items() if place.endswith("survivors")} == {" ".join(THREE)}
        ((noise, unit, sums),) = read_sealed(tmp_path / f"{name}-runs", "runs")["runs"].values()
        assert (noise, sums) == (settings.deviation / 0.5, 2) and 0 < unit < 1e-3
    # a site that has spent as much in another run says nothing to this server
    account = tmp_path / "movie-0-runs"
    write_sealed(account, {"runs": {"another run": [noise, unit, sums]}})
    ended = lie_to(
        found.spoken["movie-0"],
        lambda *_: None,
        tmp_path / "again",
        "movie-0",
        **{"certs": tmp_path / "certs" / "movie-0", "secure": 3, **SPENDS},
    )
    assert re.search(
        r"would spend epsilon 9\.084 at delta 0\.1 with this run by .*movie-0-runs; allowed: 5; leave the run out",
        ended.error,
    )
    assert ended.link.sent == [] and [*read_sealed(account, "runs")["runs"]] == ["another run"]
    # the noise of the first round's sum: of three clients, two of which have the stated deviation
    plain = run_config(shared_config(name="exact", secrets=str(tmp_path), **{**SUMMED, "secure": False, **NO_NOISE}))
    first, exact = state(found.found.folder, round=1), state(plain.folder, round=1)
    names = [name for name in first if "/movie-0/" in name and name.startswith("strategy")]
    off = torch.cat([(first[name] - exact[name]).flatten() for name in names if first[name].is_floating_point()])
    wanted = settings.deviation * math.sqrt(3 / 2) / 3
    assert chi2.ppf(1e-6, len(off)) < float((off / wanted).pow(2).sum()) < chi2.ppf(1 - 1e-6, len(off))
    (line,) = [line for line in found.told["movie-0"] if "a hostile server may still learn" in line]
    assert "with noise of epsilon 5 for this site" in line


def test_a_server_without_a_delta_is_refused_in_one_line(shared_config: Callable[..., Config], tmp_path: Path) -> None:
    given = {name: value for name, value in SUMMED.items() if name != "delta"}
    found = record(shared_config(name="default", **given), tmp_path, THREE, secure=3)
    assert isinstance(found.found.error, ConfigError)
    assert "each site finds the noise by itself, and the default of --delta follows" in str(found.found.error)


def test_a_site_answers_one_sum_of_a_tensor_in_a_round_and_the_same_one_alike(tmp_path: Path) -> None:
    settings = SumSettings(run="a run", bound=4.0, max_share=1.0, deviation=0.5, clip=0.5)
    group = SumGroup(clients=THREE, keys=("x.lora_A",), what="the adapters")
    model = {"x.lora_A": torch.zeros(2, 3)}

    def said(trained: float, *, round: int = 1, what: str = "the adapters", clients: tuple[str, ...] = THREE) -> Any:
        """What a site, started anew, masks in a sum."""
        book = KeyBook(run="a run", verifier=lambda *_: signer.public_key())
        site = SumSite(
            identity=Identity(name="movie-0", book=book, signer=signer),
            settings=settings,
            secret=bytes(32),
            pay=partial(pay_sums, path=tmp_path / "movie-0-sums"),
        )
        options = TrainOptions(seed=0)
        job = Job(client="movie-0", params=model, round=round, options=options)
        moved = torch.full((2, 3), trained)
        site.withhold(job, {"x.lora_A": moved}, {}, {"param/x.lora_A": moved})
        asked = {"what": what, "clients": list(clients), "keys": ["x.lora_A"]}
        site.answer({"group": asked, "step": "keys", "round": round}, write_packed({}))
        return site._sums[group.keys].noise

    signer = generate_private_key(SECP256R1())
    noise = said(0.1)
    assert np.array_equal(noise, said(0.1))
    for other in ({"trained": 0.2}, {"trained": 0.1, "what": "others"}, {"trained": 0.1, "clients": (*THREE, "m")}):
        with pytest.raises(AtlasError, match=r"another sum of the adapters (in round 1 )?by .*movie-0-sums, and both"):
            said(**other)
    assert not np.array_equal(noise, said(0.2, round=2))
