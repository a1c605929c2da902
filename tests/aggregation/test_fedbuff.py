"""FedBuff against numbers worked out by hand and a simulation of its algorithm with a clock of its own."""

import numpy as np
import pytest
import torch

from atlas_fl.methods.fedbuff import arrivals, in_time
from atlas_fl.methods.method import RoundStart
from atlas_fl.methods.registry import find_method
from tests.aggregation.federations import federation_of, server_step

SECONDS = {"a": 1.0, "b": 2.5, "c": 10.0}


def models(**values):
    return {client: {"head.bias": torch.tensor([value])} for client, value in values.items()}


def test_who_arrives_when_by_hand():
    # a is there at 1, 2, 3 ..., b at 2.5, 5 ...; with two in the buffer a waits for b until 2.5
    one = [arrivals(SECONDS, buffer=1, steps=step) for step in range(1, 5)]
    assert [clients for clients, _ in one] == [("a",), ("a",), ("b",), ("a",)]
    assert [seconds for _, seconds in one] == pytest.approx([1, 1, 0.5, 0.5])
    two = [arrivals(SECONDS, buffer=2, steps=step) for step in range(1, 4)]
    assert two[0] == (("a", "b"), 2.5)
    assert two[1] == (("a", "b"), pytest.approx(2.5))
    assert arrivals(SECONDS, buffer=9, steps=2) == (("a", "b", "c"), pytest.approx(10.0))


def test_a_slow_client_arrives_in_the_end():
    steps = [arrivals(SECONDS, buffer=1, steps=step) for step in range(1, 16)]
    assert sum(seconds for _, seconds in steps) == pytest.approx(10.0)
    assert steps[-1][0] in (("a",), ("b",), ("c",))
    assert ("c",) in [clients for clients, _ in steps]


@pytest.mark.parametrize("knob", [{"buffer": 1}, {"round_percentile": 1}])
def test_all_take_part_in_the_last_round(knob):
    method = find_method("fedavg_by_arrival", **knob)
    first = method.schedule(tuple(SECONDS), round=1, rounds=4, seconds=SECONDS)
    last = method.schedule(tuple(SECONDS), round=4, rounds=4, seconds=SECONDS)
    assert first == (("a",), 1.0)
    assert last == (("a", "b", "c"), 10.0)


def test_steps_of_equal_length_by_hand():
    # two of three are there within 2.5 seconds, and c is in every fourth step; all are there within 10
    steps = [in_time(SECONDS, percentile=60, step=step) for step in range(1, 9)]
    assert steps == [((*"ab", *"c"[step % 4 :]), 2.5) for step in (1, 2, 3, 0) * 2]
    assert in_time(SECONDS, percentile=100, step=1) == (("a", "b", "c"), 10.0)
    assert in_time(SECONDS, percentile=0.1, step=3) == (("a", "b"), 1.0), "b is there at 2.5 of seconds 2 to 3"


@pytest.mark.parametrize(
    ("knob", "expected", "late"),
    [
        # a arrives at 1, 2, 3, 4 and 5, b at 2.5
        ({"buffer": 1}, [{"a": 1}, {"a": 2}, {"b": 1}, {"a": 3}, {"a": 5}, {"a": 6}], [0.0]),
        (
            {"round_percentile": 50},
            [{"a": 1}, {"a": 2}, {"a": 3, "b": 1}, {"a": 4}, {"a": 5}, {"a": 6, "b": 4}],
            [0, 2],
        ),
    ],
)
def test_an_update_is_of_the_round_in_which_its_client_began(knob, expected, late):
    method, fed = find_method("fedavg_by_arrival", **knob), federation_of("ab")
    state, current, begun = {}, models(a=0.0, b=0.0), []
    for number in range(1, 7):
        clients, _ = method.schedule(("a", "b"), round=number, rounds=9, seconds={"a": 1.0, "b": 2.5})
        start = RoundStart(
            round=number, clients=clients, tasks={}, client_models=current, server_models=current, server_state=state
        )
        begun.append({client: method.began(start, client) for client in clients})
        found = [method.staleness(state, client, number) for client in clients]
        done = server_step(method, state, current, models(**dict.fromkeys(clients, 1.0)), fed, round=number)
        state, current = done.server_state, done.client_models
    assert begun == expected and found == late


def test_two_steps_by_hand():
    method, fed = find_method("fedavg_by_arrival", buffer=1), federation_of("ab", weights=(1.0, 3.0))
    done = server_step(method, {}, models(a=2.0, b=2.0), models(a=5.0), fed, round=1)
    assert {name: float(one["head.bias"]) for name, one in done.client_models.items()} == {"a": 5.0, "b": 2.0}
    # b began with 2, one step ago, and has trained 3 onto it: 5 + 3 / sqrt(2), whatever its number of examples
    late = server_step(method, done.server_state, done.client_models, models(b=5.0), fed, round=2)
    assert float(late.client_models["b"]["head.bias"]) == pytest.approx(5 + 3 / 2**0.5)
    assert float(late.client_models["a"]["head.bias"]) == 5.0, "a goes on with what it has"


@pytest.mark.parametrize("knob", [{"buffer": 1}, {"buffer": 2}, {"buffer": 3}, {"round_percentile": 60}])
def test_many_steps_are_those_of_a_simulation_by_events(knob):
    """The algorithm with a queue of its own, as its authors state it: clients that ask, train, send, and ask again."""
    targets, eta, rounds = {"a": 1.0, "b": -2.0, "c": 4.0}, 0.7, 9

    def train(client, x):
        return x + 0.3 * (targets[client] - x)

    x, version = 0.0, 0
    held = dict.fromkeys(targets, (x, version))
    due, expected = dict(SECONDS), []
    while len(expected) < rounds:
        if "buffer" in knob:
            arrived = sorted(due, key=lambda client: (due[client], client))[: knob["buffer"]]
            now = max(due[client] for client in arrived)
        else:  # the second of three
            now = SECONDS["b"] * (version + 1)
            arrived = [client for client in due if due[client] <= now]
        x += eta * np.mean(
            [(train(one, held[one][0]) - held[one][0]) / (1 + version - held[one][1]) ** 0.5 for one in arrived]
        )
        version += 1
        for client in arrived:
            held[client], due[client] = (x, version), now + SECONDS[client]
        expected.append(x)

    method, fed = find_method("fedavg_by_arrival", buffer_lr=eta, **knob), federation_of("abc")
    state, current, found = {}, models(a=0.0, b=0.0, c=0.0), []
    for number in range(1, rounds + 1):
        clients, _ = method.schedule(tuple(targets), round=number, rounds=rounds + 1, seconds=SECONDS)
        updates = models(**{one: train(one, float(current[one]["head.bias"])) for one in clients})
        done = server_step(method, state, current, updates, fed, round=number)
        state, current = done.server_state, done.client_models
        found.append(float(current[clients[0]]["head.bias"]))
    assert found == pytest.approx(expected, rel=1e-5)
