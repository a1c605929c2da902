import dataclasses
from itertools import pairwise

import pytest

from atlas_fl.errors import ConfigError
from atlas_fl.ranks.devices import DEVICES, find_devices, parse_device

PHONE = "phone=memory_gb=3,gflops=50,up_mbps=5,down_mbps=20,latency_ms=60,max_rank=8"
BYTES_A_RANK = 6 * 2 * (384 + 384) * 4  # six blocks, query and value, A and B, float32


def test_the_promised_profiles_exist() -> None:
    assert set(DEVICES) == {
        *("cpu_2gb", "tablet_4gb", "laptop_8gb", "gpu_16gb", "smartphone"),
        *("tablet", "edge_gpu", "laptop_cpu", "laptop_gpu", "workstation"),
    }
    assert all(name == device.name for name, device in DEVICES.items())


@pytest.mark.parametrize(
    ("name", "mean_rank", "max_rank"),
    [("cpu_2gb", 6.8, 16), ("tablet_4gb", 13.6, 32), ("laptop_8gb", 25.4, 64), ("gpu_16gb", 50.9, 64)],
)
def test_default_profiles_have_binding_and_different_upload_budgets(name: str, mean_rank: float, max_rank: int) -> None:
    device = DEVICES[name]
    assert device.adapter_bytes / BYTES_A_RANK == pytest.approx(mean_rank, abs=0.05)
    assert device.max_rank == max_rank > mean_rank


def test_bigger_devices_are_bigger_in_everything() -> None:
    order = [DEVICES[name] for name in ("cpu_2gb", "tablet_4gb", "laptop_8gb", "gpu_16gb")]
    for small, large in pairwise(order):
        for field in ("memory_bytes", "flops_per_second", "up_bytes_per_second", "down_bytes_per_second"):
            assert getattr(small, field) < getattr(large, field)
        assert small.latency_seconds > large.latency_seconds


def test_parse_gives_the_units_of_the_fields() -> None:
    device = parse_device(PHONE)
    assert dataclasses.astuple(device) == ("phone", 3 * 2**30, 50e9, 625_000.0, 2_500_000.0, 0.06, 8, None)
    assert device.adapter_bytes == 625_000  # 5 Mbit/s for one second


def test_adapter_bytes_stand_in_for_the_upload_rate() -> None:
    assert parse_device(PHONE + ",adapter_bytes=1234").adapter_bytes == 1234


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "laptop_8gb",
            "--device laptop_8gb is a profile that is there already; clients get it by --devices laptop_8gb",
        ),
        ("phone", "--device 'phone' is no profile of a client; write name="),
        ("=memory_gb=3", "is no profile of a client; write name="),
        ("a/b=memory_gb=3", "is no profile of a client; write name="),
        (PHONE.replace("gflops", "gflop"), "unknown device setting 'gflop'; did you mean 'gflops'?"),
        (PHONE + ",", "unknown device setting ''"),
        (PHONE + ",max_rank=8", "sets max_rank twice; keep one"),
        ("phone=memory_gb=3,gflops=50", "lacks up_mbps, down_mbps, latency_ms, max_rank; a profile needs"),
        (PHONE.replace("=50", "=-1"), "gflops='-1' is not allowed; give a number, at least 0.001, at most 1e+09"),
        (
            PHONE.replace("=50", "=1e-300"),
            "gflops='1e-300' is not allowed; give a number, at least 0.001, at most 1e+09",
        ),
        (PHONE.replace("=50", "=5e-324"), "gflops='5e-324' is not allowed"),
        (
            PHONE.replace("gb=3", "gb=1e-9"),
            "memory_gb='1e-9' is not allowed; give a number, at least 0.0001, at most 1000000",
        ),
        (PHONE.replace("max_rank=8", "max_rank=1e15"), "max_rank='1e15' is not allowed"),
        (PHONE.replace("=60", "=1e15"), "latency_ms='1e15' is not allowed"),
        ("p" * 101 + PHONE.removeprefix("phone"), "is no profile of a client; write name="),
        (PHONE.replace("=50", "=nan"), "gflops='nan' is not allowed"),
        (PHONE.replace("=50", "=inf"), "gflops='inf' is not allowed"),
        (PHONE.replace("=50", "=fast"), "gflops='fast' is not allowed"),
        (PHONE.replace("=50", "="), "gflops='' is not allowed"),
        (PHONE.replace("=60", "=-60"), "latency_ms='-60' is not allowed; give a number, at least 0, at most 100000"),
        (
            PHONE.replace("max_rank=8", "max_rank=0"),
            "max_rank='0' is not allowed; give a whole number, at least 1, at most 16384",
        ),
        (PHONE.replace("max_rank=8", "max_rank=8.5"), "max_rank='8.5' is not allowed"),
        (
            PHONE + ",adapter_bytes=0",
            "adapter_bytes='0' is not allowed; give a whole number, at least 1, at most 1e+12",
        ),
    ],
)
def test_a_bad_profile_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_device(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_no_latency_is_allowed() -> None:
    assert parse_device(PHONE.replace("latency_ms=60", "latency_ms=0")).latency_seconds == 0


def test_find_keeps_order_and_repeats_and_appends_own_profiles() -> None:
    found = find_devices(["gpu_16gb", "cpu_2gb", "cpu_2gb"], [PHONE])
    assert [device.name for device in found] == ["gpu_16gb", "cpu_2gb", "cpu_2gb", "phone"]
    assert [device.name for device in find_devices(["phone", "cpu_2gb"], [PHONE])] == ["phone", "cpu_2gb"]


@pytest.mark.parametrize(
    ("names", "own", "message"),
    [
        (["cpu_2g"], [], "unknown device 'cpu_2g'; did you mean 'cpu_2gb'?"),
        ([], [], "no devices; choose from cpu_2gb"),
        ([], [PHONE, PHONE], "device name 'phone' is taken"),
        ([], [PHONE.replace("phone", "tablet")], "device name 'tablet' is taken"),
    ],
)
def test_find_refuses(names: list[str], own: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_devices(names, own)
    assert message in str(error.value)
