"""What a site takes for a start model: what honest rounds produce, and nothing far from it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from atlas_fl.client.job import Job
from atlas_fl.client.options import EvaluateOptions, TrainOptions
from atlas_fl.config import Config, with_values
from atlas_fl.deployment.start_models import SAME_STARTS, StartModels, dead_ratio
from atlas_fl.errors import ProtocolError
from atlas_fl.models.lora import init_adapters
from atlas_fl.params import LORA_A, LORA_B, Params

OPTIONS = TrainOptions(seed=42, lr=1e-3)


def initial(ranks: dict[str, int]) -> Params:
    return {**init_adapters({"q": (16, 16)}, ranks or {"q": 4}, seed=42), "head.weight": torch.full((2, 16), 0.02)}


FIRST = initial({"q": 4})


def known(**values: object) -> StartModels:
    config = with_values(Config(), {"space": "factors", "ranks": "budget", **values})
    return StartModels(config=config, initial=initial, options=OPTIONS, steps=10)


def job(params: Params, round: int) -> Job:
    return Job(client="a", params=params, round=round, options=OPTIONS)


def trained(params: Params, *, step: float = 1e-2) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {key: tensor + step * torch.randn(tensor.shape, generator=draw) for key, tensor in params.items()}


def test_the_ratio_of_dead_directions_is_the_one_worked_out_by_hand() -> None:
    """A has lengths 3 and 1/2 in its directions, B 6 and 2 beside them: with s = 2 the ratios are 4 and 8."""
    a = torch.tensor([[3.0, 0, 0], [0, 0.5, 0]]).double()
    b = torch.tensor([[6.0, 0], [0, 2]]).double()
    turn = torch.linalg.qr(torch.randn(2, 2, generator=torch.Generator().manual_seed(0)).double())[0]
    assert dead_ratio(a, b, scale=2.0) == pytest.approx(8)
    assert dead_ratio(turn @ a, b @ turn.T, scale=2.0) == pytest.approx(8)
    assert dead_ratio(a, 0 * b, scale=2.0) == 0


def test_round_one_begins_with_the_initialisation_and_a_fingerprint_always_does() -> None:
    known().check("train", job(FIRST, 1))
    moved = {**FIRST, "q" + LORA_B: FIRST["q" + LORA_B] + 1e-6}
    for action, round in (("train", 1), ("importance", 0), ("fingerprint", 0), ("fingerprint", 3)):
        with pytest.raises(
            ProtocolError, match=r"'q.lora_B' is not the initialisation of --seed 42 \(it is 1e-06 away"
        ):
            known().check(action, job(moved, round))
    with pytest.raises(ProtocolError, match=r"'head.weight' is not the initialisation"):
        known().check("train", job({**FIRST, "head.weight": 2 * FIRST["head.weight"]}, 1))
    known(init_adapter="somewhere").check("train", job({**FIRST, "q" + LORA_A: 2 * FIRST["q" + LORA_A]}, 1))


def test_a_warm_up_moves_b_up_to_its_own_rank_and_the_head_and_nothing_else() -> None:
    values = {"fingerprint": "delta", "candidates": "2+4"}
    b = torch.zeros(16, 4)
    b[:, :2] = 0.01
    known(**values).check("train", job({**FIRST, "q" + LORA_B: b, "head.weight": 2 * FIRST["head.weight"]}, 1))
    for key, value in (("q" + LORA_B, b + 0.01), ("q" + LORA_A, 1.01 * FIRST["q" + LORA_A])):
        with pytest.raises(ProtocolError, match=f"'{key}' is not the initialisation"):
            known(**values).check("train", job({**FIRST, key: value}, 1))


ODD: dict[str, tuple[Callable[[Params], Params], str]] = {
    "no A beside a chosen B": (
        lambda p: {**p, "q" + LORA_A: 0 * p["q" + LORA_A]},
        r"'q': its factor B has grown by .* times its factor A a round in a direction; allowed: 100",
    ),
    "one dead direction": (
        lambda p: {**p, "q" + LORA_A: torch.cat([p["q" + LORA_A][:3], 1e-7 * p["q" + LORA_A][3:]])},
        r"'q': its factor B has grown",
    ),
    "a small A": (
        lambda p: {"q" + LORA_A: p["q" + LORA_A] / 40, "q" + LORA_B: p["q" + LORA_B] / 40, **_heads(p)},
        r"'q': its factor A is .* times shorter than the initialisation in a direction; allowed: 30",
    ),
    "a large A": (
        lambda p: {**p, "q" + LORA_A: 90 * p["q" + LORA_A]},
        r"'q': its factor A has grown by .* times the initialisation a round; allowed: 20",
    ),
    "a large B": (
        lambda p: {**p, "q" + LORA_B: 400 * p["q" + LORA_B]},
        r"'the adapters or weights': it is .* times as far from this site's last model .*; allowed: 300",
    ),
    "another head": (
        lambda p: {**p, "head.weight": torch.stack([torch.ones(16), -torch.ones(16)]) * 30},
        r"'the head': it is .* times as far from this site's last model",
    ),
}


def _heads(params: Params) -> Params:
    return {key: tensor for key, tensor in params.items() if key.startswith("head")}


@pytest.mark.parametrize("name", list(ODD))
def test_a_model_that_no_round_leads_to_is_refused_with_its_figure(name: str) -> None:
    change, message = ODD[name]
    site, own = known(), trained(FIRST)
    site.check("train", job(FIRST, 1))
    site.remember(job(FIRST, 1), own)
    honest = trained(own, step=5e-3)
    site.check("evaluate", job(honest, 1))
    for action, round in (("evaluate", 1), ("train", 2)):
        with pytest.raises(ProtocolError, match=message) as error:
            replace(site).check(action, job(change(honest), round))
        assert "\n" not in str(error.value)
        site._models.clear()


def test_factors_that_shrink_together_are_refused_in_product_space_too() -> None:
    """Their gradients are below AdamW's epsilon, under which steps are linear and updates show the embeddings."""
    site = known(space="product")
    site.check("train", job(FIRST, 1))
    site.remember(job(FIRST, 1), trained(FIRST))

    def shrunk(factor: float) -> dict[str, Tensor]:
        own = trained(FIRST, step=5e-3)
        return {key: factor * tensor if key.startswith("q") else tensor for key, tensor in own.items()}

    site.check("train", job(shrunk(1e-2), 2))
    with pytest.raises(ProtocolError, match=r"'q': its factor A is .* times shorter .*; allowed: 1300"):
        known(space="product").check("train", job(shrunk(1e-4), 2))


def test_a_site_without_a_model_of_its_own_measures_from_the_initialisation() -> None:
    """After a restart, or where it came late: AdamW moves a number by its rate in a step at most, or about that."""
    late = known()
    late.check("train", job(trained(FIRST, step=0.02), 4))
    with pytest.raises(
        ProtocolError, match=r"times as far from the initialisation as training can move it; allowed: 100"
    ):
        known().check("train", job({**FIRST, "head.weight": FIRST["head.weight"] + 9}, 4))


def test_what_the_site_has_trained_itself_is_taken_whatever_it_has_come_to() -> None:
    """In personal rounds, between aggregations and where its own model is kept."""
    site = known()
    own = {**FIRST, "q" + LORA_A: 1e-6 * FIRST["q" + LORA_A], "q" + LORA_B: torch.ones(16, 4)}
    site.remember(job(FIRST, 1), own)
    site.check("train", job(own, 2))
    site.check("evaluate", job(own, 2))
    with pytest.raises(ProtocolError, match="its factor B has grown"):
        site.check("train", job({**own, "head.weight": 1.1 * own["head.weight"]}, 3))


def test_a_start_that_stays_while_training_moves_it_comes_in_three_rounds_and_no_more() -> None:
    site = known()
    for round in range(1, SAME_STARTS + 1):
        jitter = {**FIRST, "q" + LORA_B: FIRST["q" + LORA_B] + (1e-7 * round if round > 1 else 0)}
        site.check("train", job(jitter, round))
        site.remember(job(jitter, round), trained(jitter))
        if round > 1:
            site.check("train", job(trained(FIRST, step=1e-3), round), is_anchor=True)  # which is no start
    with pytest.raises(ProtocolError, match=f"train in round {SAME_STARTS + 1} is that of 3 rounds before"):
        site.check("train", job({**FIRST, "q" + LORA_B: FIRST["q" + LORA_B] + 1e-6}, SAME_STARTS + 1))
    moving, start = known(), FIRST
    for round in range(1, 8):
        moving.check("train", job(start, round))
        moving.remember(job(start, round), trained(start))
        start = trained(start, step=1e-3)


def test_a_round_has_few_models_because_each_is_another_look() -> None:
    """Two of each action, and of scores two on each split: four in all."""
    looks = [trained(FIRST, step=1e-3 * (1 + number)) for number in range(3)]
    site = known()
    site.remember(job(FIRST, 1), trained(FIRST))
    for split in ("validation", "test"):
        options = EvaluateOptions(split=split)  # type: ignore[arg-type]
        for look in 2 * looks[:2]:
            site.check("evaluate", replace(job(look, 1), options=options))
        with pytest.raises(ProtocolError, match=r"evaluate of round 1 with 3 .*; allowed: 2 a round on each split,"):
            site.check("evaluate", replace(job(looks[2], 1), options=options))
