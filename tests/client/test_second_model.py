"""What a client computes with from its own model and the shared one: against dense products and gradients by hand."""

import pytest
import torch

from atlas_fl.client.second_model import WEIGHT, combine, initial_second, keep_in_range


def twice(_rank: int) -> float:
    return 2.0


def model(rank: int, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "q.lora_A": torch.randn(rank, 6, generator=draw),
        "q.lora_B": torch.randn(5, rank, generator=draw),
        "head.weight": torch.randn(3, 6, generator=draw),
    }


@pytest.mark.parametrize("scale", [twice, lambda rank: 16 / rank, lambda rank: 16 / rank**0.5])
@pytest.mark.parametrize("ranks", [(4, 4), (2, 6)])
def test_a_stack_computes_the_weighted_sum_of_both_updates(scale, ranks) -> None:
    own, shared = (model(rank, seed) for seed, rank in enumerate(ranks))
    both = combine(own, shared, "stacked", weight=0.3, scale=scale)

    def update(params):
        return scale(len(params["q.lora_A"])) * params["q.lora_B"].double() @ params["q.lora_A"].double()

    torch.testing.assert_close(update(both), 0.3 * update(own) + 0.7 * update(shared), rtol=1e-5, atol=1e-5)
    assert both["head.weight"] is own["head.weight"]


def test_an_interpolated_model_by_hand() -> None:
    """With a = .25: .25 * 8 + .75 * 4 = 5."""
    made = combine(
        {"w": torch.tensor([8.0]), WEIGHT: torch.tensor(0.25)},
        {"w": torch.tensor([4.0])},
        "interpolated",
        weight=0.0,
        scale=twice,
    )
    assert {key: value.tolist() for key, value in made.items()} == {"w": [5.0]}


def test_gradients_of_an_interpolated_model_are_those_of_the_paper() -> None:
    """a times the gradient at the mixture for v, and its product with v - w for a (APFL, equations 4 and 10)."""
    own = {"w": torch.tensor([1.0, -2.0, 0.5], requires_grad=True), WEIGHT: torch.tensor(0.3, requires_grad=True)}
    shared = {"w": torch.tensor([0.2, 1.0, -1.0])}
    mixture = combine(own, shared, "interpolated", weight=0.0, scale=twice)["w"]
    mixture.pow(3).sum().backward()
    at_mixture = 3 * mixture.detach() ** 2
    torch.testing.assert_close(own["w"].grad, 0.3 * at_mixture)
    torch.testing.assert_close(own[WEIGHT].grad, (at_mixture * (own["w"].detach() - shared["w"])).sum())


def test_the_shared_model_gets_no_gradient_and_a_proximal_one_is_alone() -> None:
    own, shared = model(2, 0), model(2, 1)
    assert combine(own, shared, "proximal", weight=0.5, scale=twice) is own


def test_a_trained_weight_stays_between_zero_and_one() -> None:
    leaves = {WEIGHT: torch.tensor(1.2, requires_grad=True), "w": torch.tensor([7.0])}
    keep_in_range(leaves)
    assert (float(leaves[WEIGHT].detach()), float(leaves["w"])) == (1.0, 7.0)


def test_only_an_interpolated_model_holds_a_weight() -> None:
    start = model(2, 0)
    assert WEIGHT in initial_second(start, "interpolated", 0.4)
    assert initial_second(start, "stacked", 0.4) is start
