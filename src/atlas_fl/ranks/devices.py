"""Device profiles: memory, speed, link and the largest rank of the devices that clients run on.

The numbers are profiles, that is assumptions about classes of devices, and not measurements of any one machine.
They are chosen so that the four default profiles differ clearly in what they may upload: with one second of
upload, LoRA on query and value of a 6 x 384 encoder (36,864 bytes for each rank) gets a mean rank of about 7
(cpu_2gb), 14 (tablet_4gb), 25 (laptop_8gb) and 51 (gpu_16gb). The largest rank is the per-device list of the
first ATLAS, kept as a bound. `memory_gb` counts 2^30 bytes, as memory is sold; `mbps` counts 10^6 bits.
"""

import re
from collections.abc import Mapping, Sequence

from atlas_fl.errors import ConfigError, check_known, short_repr
from atlas_fl.frozen import Frozen
from atlas_fl.packaged import packaged_tables
from atlas_fl.ranges import Range

UPLOAD_SECONDS = 1.0
"""Time that the upload of the adapters may take."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


BOUNDS: Mapping[str, Range] = {
    "memory_gb": Range(least=1e-4, most=10**6),
    "gflops": Range(least=1e-3, most=1e9),
    "up_mbps": Range(least=1e-3, most=10**7),
    "down_mbps": Range(least=1e-3, most=10**7),
    "latency_ms": Range(least=0, most=10**5),
    "max_rank": Range(least=1, most=2**14),
    "adapter_bytes": Range(least=1, most=1e12),
}
"""Ranges of a device's numbers: from a microcontroller on a slow radio link to a data centre. Predictions of any
model on it are finite, and a device that says more is mistaken, or wants a plan that nobody can read."""


class Device(Frozen):
    """One class of devices."""

    name: str
    memory_bytes: int
    """Memory that training may use, everything included."""
    flops_per_second: float
    """Sustained floating-point operations per second."""
    up_bytes_per_second: float
    down_bytes_per_second: float
    latency_seconds: float
    """Delay of one message."""
    max_rank: int
    """Largest rank that an allocator may choose."""
    own_adapter_bytes: int | None
    """An upload allowance in bytes that stands in for upload rate times `UPLOAD_SECONDS`."""

    @property
    def adapter_bytes(self) -> int:
        """Most bytes of adapter parameters that the device sends in a round."""
        if self.own_adapter_bytes is not None:
            return self.own_adapter_bytes
        return int(self.up_bytes_per_second * UPLOAD_SECONDS)


def _profile(name: str, values: Mapping[str, float]) -> Device:
    """The profile with these values in the units of `BOUNDS`."""
    return Device(
        name=name,
        memory_bytes=int(values["memory_gb"] * 2**30),
        flops_per_second=values["gflops"] * 1e9,
        up_bytes_per_second=values["up_mbps"] * 1e6 / 8,
        down_bytes_per_second=values["down_mbps"] * 1e6 / 8,
        latency_seconds=values["latency_ms"] / 1e3,
        max_rank=int(values["max_rank"]),
        own_adapter_bytes=int(values["adapter_bytes"]) if "adapter_bytes" in values else None,
    )


_WHOLE = ("max_rank", "adapter_bytes")
REQUIRED = ("memory_gb", "gflops", "up_mbps", "down_mbps", "latency_ms", "max_rank")
"""Numbers that every profile has, in the order of `--device`."""
PROFILES: Mapping[str, Mapping[str, float]] = packaged_tables(__package__, "devices.toml")
"""The numbers of every profile, in the units of `BOUNDS`."""
DEVICES: dict[str, Device] = {name: _profile(name, values) for name, values in PROFILES.items()}


def parse_device(text: str) -> Device:
    """The profile that a user wrote as `name=memory_gb=3,gflops=50,up_mbps=5,down_mbps=20,latency_ms=60,max_rank=8`.

    `adapter_bytes=N` may follow: the upload allowance, else one second at `up_mbps`.
    Raises `ConfigError` for a missing, repeated or unknown setting and for a value out of range.
    """
    name, _, rest = text.partition("=")
    if text in DEVICES:
        raise ConfigError(f"--device {text} is a profile that is there already; clients get it by --devices {text}")
    if not _NAME.fullmatch(name) or not rest:
        raise ConfigError(
            f"--device {short_repr(text)} is no profile of a client; write name=memory_gb=3,gflops=50,... with"
            f" {', '.join(REQUIRED)}; what this machine trains on is --accelerator cpu or cuda"
        )
    values: dict[str, float] = {}
    for part in rest.split(","):
        key, _, value = part.strip().partition("=")
        check_known("device setting", key, among=BOUNDS)
        if key in values:
            raise ConfigError(f"device {name!r} sets {key} twice; keep one")
        values[key] = _number(name, key, value)
    if missing := [key for key in REQUIRED if key not in values]:
        raise ConfigError(f"device {name!r} lacks {', '.join(missing)}; a profile needs {', '.join(REQUIRED)}")
    return _profile(name, values)


def _number(name: str, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not BOUNDS[key].fits(value) or (key in _WHOLE and not value.is_integer()):
        kind = "a whole number" if key in _WHOLE else "a number"
        allowed = BOUNDS[key].allowed
        raise ConfigError(f"device {name!r}: {key}={short_repr(text)} is not allowed; give {kind}, {allowed}")
    return value


def find_devices(names: Sequence[str], descriptions: Sequence[str] = ()) -> tuple[Device, ...]:
    """The profiles of these names in this order, then those of `descriptions` that no name mentions.

    `descriptions` holds strings for `parse_device`; a name may be repeated so that its profile is dealt out more often.
    Raises `ConfigError` for an unknown name, for a name that is taken, and where there is no device at all.
    """
    custom: dict[str, Device] = {}
    for device in map(parse_device, descriptions):
        if device.name in DEVICES or device.name in custom:
            raise ConfigError(f"device name {device.name!r} is taken; choose another name for your profile")
        custom[device.name] = device
    available = DEVICES | custom
    check_known("device", *names, among=available)
    chosen = [available[name] for name in names] + [device for device in custom.values() if device.name not in names]
    if not chosen:
        raise ConfigError(f"no devices; choose from {', '.join(sorted(DEVICES))} or describe one with --device")
    return tuple(chosen)
