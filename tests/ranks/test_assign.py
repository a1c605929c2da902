import numpy as np
import pytest

from atlas_fl.errors import BudgetError, ConfigError
from atlas_fl.models.registry import ModelShape
from atlas_fl.ranks.allocation import ALLOCATORS, RankAssignment, assign_ranks
from atlas_fl.ranks.cost_model import TrainingStep, adapter_bytes, device_memory
from atlas_fl.ranks.devices import DEVICES, Device, parse_device

CANDIDATES = (4, 8, 16, 32, 64)
IMPORTANCE = np.array([0.05, 0.08, 0.12, 0.2, 0.25, 0.3])
STEP = TrainingStep(tokens=16 * 128, head_params=770)
DEFAULTS = ("cpu_2gb", "tablet_4gb", "laptop_8gb", "gpu_16gb")


def encoder(*, hidden: int = 384, blocks: int = 6) -> ModelShape:
    params = 12 * hidden**2 + 13 * hidden
    return ModelShape(
        hidden=hidden,
        intermediate=4 * hidden,
        heads=12,
        layers=(((hidden, hidden),) * 2,) * blocks,
        block_bytes=(4 * params,) * blocks,
        block_params=(params,) * blocks,
        embedding_bytes=4 * 31_000 * hidden,
    )


def assign(device: Device, rule: str = "budget", shape: ModelShape | None = None, **options: object) -> RankAssignment:
    shape = shape or encoder()
    values = {"importance": IMPORTANCE, "candidates": CANDIDATES, "step": STEP, **options}
    return assign_ranks(shape, device, rule=rule, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ALLOCATORS)
@pytest.mark.parametrize("name", DEVICES)
def test_ranks_go_through_the_upload_in_time_and_fit_the_memory(rule: str, name: str) -> None:
    device = DEVICES[name]
    found = assign(device, rule)
    assert adapter_bytes(encoder(), found.ranks) <= device.adapter_bytes
    assert 4 * adapter_bytes(encoder(), found.ranks) <= found.budget_bytes
    assert device_memory(encoder(), device, ranks=found.ranks, step=STEP).free_bytes > 0
    assert max(found.ranks) <= device.max_rank
    assert found.notes == ()


def test_the_default_devices_get_different_ranks_that_follow_importance() -> None:
    found = [assign(DEVICES[name]).ranks for name in DEFAULTS]
    assert [sum(ranks) for ranks in found] == [40, 80, 152, 304]
    assert all(list(ranks) == sorted(ranks) for ranks in found)  # importance ascends
    assert len({rank for ranks in found for rank in ranks}) == 5
    assert found[1] == (4, 4, 8, 16, 16, 32)


def test_own_bytes_stand_in_for_the_allowance_both_ways() -> None:
    assert assign(DEVICES["cpu_2gb"], "uniform", allowance_bytes=16 * 36_864).ranks == (16,) * 6
    assert assign(DEVICES["gpu_16gb"], "uniform", allowance_bytes=16 * 36_864 - 1).ranks == (8,) * 6


def test_the_largest_rank_estimate_is_the_budget_over_a_rank_everywhere() -> None:
    assert assign(DEVICES["cpu_2gb"]).largest_rank == 250_000 // 36_864 == 6


def test_an_allowance_by_rate_gives_way_with_a_note() -> None:
    found = assign(DEVICES["smartphone"], shape=encoder(hidden=768))
    assert found.ranks == (4,) * 6
    assert found.notes == (
        "smartphone: an upload allowance of 187,500 bytes does not hold rank 4 in every layer; "
        "294,912 bytes (1.6 s) are allowed instead",
    )


def test_an_allowance_that_was_spelled_out_does_not() -> None:
    text = "own=memory_gb=4,gflops=50,up_mbps=50,down_mbps=20,latency_ms=60,max_rank=8,adapter_bytes=147455"
    expected = (
        r"adapter_bytes 147,455 does not hold rank 4 in each of 6 layers \(147,456 bytes of parameters\); "
        "give more bytes or a smaller rank candidate"
    )
    with pytest.raises(BudgetError, match=expected):
        assign(parse_device(text))
    with pytest.raises(BudgetError, match=expected):
        assign(DEVICES["gpu_16gb"], allowance_bytes=147_455)


def test_a_number_is_that_rank_on_every_device_but_not_beyond_own_bytes_or_memory() -> None:
    assert assign(DEVICES["smartphone"], "32").ranks == (32,) * 6  # above its list and its second of upload
    with pytest.raises(BudgetError, match="adapter_bytes 300,000 does not hold rank 32"):
        assign(DEVICES["smartphone"], "32", allowance_bytes=300_000)
    small = parse_device("s=memory_gb=1,gflops=1,up_mbps=1,down_mbps=1,latency_ms=1,max_rank=4")
    with pytest.raises(BudgetError, match=r"rank 4096 in each of 6 layers takes .* and the budget is"):
        assign(small, "4096", candidates=(4, 4096))


def test_a_device_without_a_small_enough_candidate_is_an_error() -> None:
    tiny = parse_device("t=memory_gb=4,gflops=1,up_mbps=9,down_mbps=1,latency_ms=1,max_rank=3")
    with pytest.raises(ConfigError, match=r"no rank candidate of .* is at most 3"):
        assign(tiny)


def test_a_model_too_large_for_the_device_is_an_error() -> None:
    for budget in ({}, {"memory_budget": 10**9}):
        with pytest.raises(BudgetError, match=r"cpu_2gb has 2,147.5 MB of memory and training takes"):
            assign(DEVICES["cpu_2gb"], shape=encoder(hidden=1536), **budget)


def test_complexity_scales_the_budget_and_not_the_shares() -> None:
    whole, half = assign(DEVICES["gpu_16gb"]), assign(DEVICES["gpu_16gb"], factor=0.5)
    assert half.budget_bytes == whole.budget_bytes // 2
    assert sum(half.ranks) == 152
    assert list(half.ranks) == sorted(half.ranks)
    assert assign(DEVICES["cpu_2gb"], factor=0.01).ranks == (4,) * 6  # never below the smallest candidate


def test_few_candidates_stop_ranks_by_importance_by_hand() -> None:
    # 1,000,000 bytes of upload hold rank 27 everywhere, so that all six blocks reach 8
    assert assign(DEVICES["laptop_8gb"], candidates=(4, 8)).ranks == (8,) * 6
    # 250,000 bytes hold 40 ranks: the two least important blocks stay at 4
    assert assign(DEVICES["cpu_2gb"], candidates=(4, 8)).ranks == (4, 4, 8, 8, 8, 8)
