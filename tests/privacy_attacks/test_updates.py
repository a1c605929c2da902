"""Tokens out of updates: all of them out of whole models; a hostile server stays inside the checks of a site."""

import numpy as np
import pytest
import torch

from atlas_fl.client.job import Job
from atlas_fl.client.options import TrainOptions
from atlas_fl.config import with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.deployment.start_models import start_models_of
from atlas_fl.errors import ConfigError
from atlas_fl.events import ignore
from atlas_fl.privacy_attacks import updates
from atlas_fl.privacy_attacks.membership import initial_model
from atlas_fl.privacy_attacks.registry import run_attack
from atlas_fl.privacy_attacks.updates import read_tokens
from atlas_fl.setup.assembly import Assembly, assemble
from tests.runs.finished import Make

SHORT = {"tasks": "movie", "samples": 16, "max_length": 10, "ranks": 8, "rounds": 8, "lr": 1e-3}


def test_the_rows_of_a_whole_models_embeddings_that_move_are_the_clients_tokens(config: Make) -> None:
    (row,) = run_attack(config(tasks="movie", trainable="full", strategy="fedavg", rounds=1), "tokens")
    assert (row["right"], row["found"]) == (1.0, 1.0)
    assert row["right_chance"] < 0.5


def test_a_hostile_server_stays_inside_the_checks_of_a_site(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, hostile = run_attack(config(**SHORT), "tokens")
    assert (honest["updates"], hostile["updates"], hostile["refusal"]) == (8, 7, "")
    assert honest["score"] is not None and hostile["score"] is None
    monkeypatch.setattr(updates, "TINY", 1e-6)
    _, hostile = run_attack(config(**SHORT), "tokens")
    assert hostile["updates"] == 1 and "times shorter than the initialisation" in hostile["refusal"]


SMALL = {"tasks": "movie", "clients_per_task": "2", "samples": "16", "max_length": "24", "ranks": "8", "rounds": "4"}
"""On MiniLM, whose embeddings are wide enough to tell thirty thousand tokens apart."""


@pytest.mark.slow
def test_words_of_a_client_are_read_with_the_defaults_of_a_site() -> None:
    honest, hostile = run_attack(with_values(find_preset("quick"), SMALL), "tokens")
    assert hostile["refusal"] == "" and hostile["right"] > 0.5 > 0.3 > hostile["right_chance"]
    assert honest["right"] < hostile["right"]


@pytest.mark.product
@pytest.mark.slow
def test_under_differential_privacy_nothing_is_read_beyond_chance() -> None:
    """At the settings with which more than half of the words are right without noise."""
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    private = {"strategy": "fedavg", "dp": "example", "epsilon": "8", "delta": "1e-3"}
    for row in run_attack(with_values(find_preset("quick"), {**SMALL, **private}), "tokens"):
        assert 7.9 < row["epsilon"] <= 8 or row["server"] == "hostile"
        assert row["read"] > 30 and row["right"] < 0.1


def test_updates_of_a_hostile_server_lie_in_the_span_of_the_embeddings(
    config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By NumPy: a client of two texts, whose embeddings span less than a row has numbers; of factors near nothing."""
    monkeypatch.setattr(updates, "TINY", 1e-14)
    assembly = assemble(config(**{**SHORT, "samples": 2, "ranks": 2, "batch_size": 1}))
    client, backbone = assembly.clients[0], assembly.site.backbone
    first = initial_model(assembly, client)
    start = updates._chosen(assembly, first, first, round=2)
    (update,) = updates.local_engine(assembly, ignore).run(
        "train", [Job(client=client.name, params=start, round=2, options=_options(assembly))]
    )
    directions = updates._directions(assembly, [start], [update.params]).double().numpy()
    examples = assembly.site.data[client.name].splits["train"]
    ids, lengths = torch.from_numpy(examples.ids), examples.lengths.tolist()
    layout = updates.make_layout(lengths)
    with torch.inference_mode():
        rows = updates.embed_tokens(backbone, ids, torch.zeros_like(ids), layout).double().numpy()
    assert rows.shape[0] < rows.shape[1] and directions.shape[1] > 0
    inside = np.linalg.lstsq(rows.T, directions, rcond=None)[0]
    assert np.abs(rows.T @ inside - directions).max() < 1e-3


def _options(assembly: Assembly) -> TrainOptions:
    return updates.train_options(assembly.config, with_images=False)


def test_the_checks_of_a_site_are_those_that_it_has(config: Make) -> None:
    """In round one none but the initialisation is trained on."""
    assembly = assemble(config(**SHORT))
    client = assembly.clients[0]
    first = initial_model(assembly, client)
    known = start_models_of(assembly.config, lambda _: first, examples=16, images=False)
    job = Job(client=client.name, params=updates._chosen(assembly, first, first, round=2), round=1, options=None)
    with pytest.raises(updates.ProtocolError, match="is not the initialisation"):
        known.check("train", job)


def test_what_the_attack_has_nothing_to_say_of_is_one_line(config: Make) -> None:
    with pytest.raises(ConfigError, match=r"movie-0 is one of 1 clients of its task, .* say --clients-per-task 2"):
        run_attack(config(tasks="movie", clients_per_task=1), "tokens")
    summed = {"secure": True, "strategy": "fedit", "ranks": "4"}
    with pytest.raises(ConfigError, match=r"movie-0 is one of 3 clients of its task, .* say --clients-per-task 6"):
        run_attack(config(tasks="movie", clients_per_task=3, **summed), "tokens")
    noisy = {"dp": "client", "update_filter": ("clip=0.5",), "strategy": "fedit", "ranks": "4"}
    with pytest.raises(ConfigError, match="--dp client adds noise to sums of many clients, and the attack reads one"):
        run_attack(config(tasks="movie", clients_per_task=3, **noisy), "tokens")
    with pytest.raises(ConfigError, match=r"--adapted-blocks is 1.*leave --adapted-blocks out"):
        run_attack(config(tasks="movie", adapted_blocks=1), "tokens")


def test_guessing_is_held_against_another_client(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By shares of the truth: out of updates of this model nothing is read."""
    assembly = assemble(config(**{**SHORT, "rounds": 1}))
    first, second = assembly.clients[:2]
    shares = torch.zeros(len(assembly.site.backbone.model.get_input_embeddings().weight), SHORT["max_length"])
    for text in updates._texts(assembly.site.data[first.name].splits["train"]):
        for place, token in text:
            shares[token, place] = 1.0
    monkeypatch.setattr(updates, "_shares_in_span", lambda *_, **__: shares)
    found = read_tokens(assembly, [first], [second], hostile=False, on_event=ignore)
    turned = read_tokens(assembly, [first], [first], hostile=False, on_event=ignore)
    assert all(found[key] > found[f"{key}_chance"] for key in ("right", "found", "placed")), found
    assert found["right"] == 1.0 and found["placed"] > 0.5
    same = [key for key in found if "chance" not in key]
    assert [turned[key] for key in same] == [found[key] for key in same]
    assert all(turned[f"{key}_chance"] == turned[key] for key in ("right", "found", "placed"))


def test_of_secure_sums_the_mean_of_three_is_all_that_is_read(config: Make) -> None:
    """By NumPy: the updates that the attack reads are the means of what three clients trained alone from one start."""
    assembly = assemble(config(**{**SHORT, "clients_per_task": 6, "rounds": 1}))
    three = assembly.clients[:3]
    starts, means, _, _ = updates._updates(assembly, three, hostile=False, on_event=ignore)
    alone = [updates._updates(assembly, [one], hostile=False, on_event=ignore)[1][0] for one in three]
    for key, mean in means[0].items():
        assert np.allclose(mean.numpy(), np.mean([params[key].numpy() for params in alone], axis=0), atol=1e-7), key
        assert torch.equal(starts[0][key], initial_model(assembly, three[0])[key])
    summed = {**SHORT, "clients_per_task": 6, "secure": True, "strategy": "fedit"}
    honest, hostile = run_attack(config(**summed), "tokens")
    assert honest["client"] == hostile["client"] == "movie-0+movie-1+movie-2"
    assert hostile["texts"] == 48 and hostile["refusal"] == "", "each site lets the same through as alone"
