"""What a run took of the machine, and what it ran on."""

import os
import platform
import resource
import sys
from importlib.metadata import version

import torch

LIBRARIES = ("torch", "transformers", "peft", "safetensors", "numpy", "scikit-learn")


def versions() -> dict[str, str]:
    """The versions that a result depends on: this package, Python, the libraries, the operating system."""
    own = {"atlas_fl": version("atlas-fl"), "python": platform.python_version()}
    return own | {name: version(name) for name in LIBRARIES} | {"system": platform.platform(terse=True)}


def peak_memory() -> dict[str, int]:
    """The most memory in bytes that this process has held: `rss_bytes`, and `vram_bytes` where a GPU was used."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there and KiB elsewhere
    peak = {"rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if vram := _vram_bytes():
        peak["vram_bytes"] = vram
    return peak


def machine() -> dict[str, int | str]:
    """What the seconds of a run were measured on: processors, threads, and the GPU where one was used."""
    found: dict[str, int | str] = {"cpus": os.cpu_count() or 1, "threads": torch.get_num_threads()}
    if _vram_bytes():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _vram_bytes() -> int:
    """Zero without a GPU, and for one that was never touched: asking does not start it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return sum(torch.cuda.max_memory_allocated(index) for index in devices)
