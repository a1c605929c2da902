import platform

import numpy as np
import psutil
import pytest
import torch

from atlas_fl.experiment.summary import peak_memory, versions


def test_versions_are_those_that_run() -> None:
    found = versions()
    assert {"atlas_fl", "torch", "transformers", "peft", "system"} <= set(found)
    assert found["python"] == platform.python_version()
    assert torch.__version__.startswith(found["torch"].split("+")[0])


@pytest.mark.slow
def test_peak_memory_is_at_least_what_is_held_and_grows_with_use() -> None:
    before = peak_memory()["rss_bytes"]
    assert before >= 0.9 * psutil.Process().memory_info().rss
    held = np.ones(before // 8 + 2_000_000)  # more than the peak so far
    del held
    assert peak_memory()["rss_bytes"] >= before + 8_000_000


def test_no_gpu_no_vram() -> None:
    assert ("vram_bytes" in peak_memory()) == (torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0)
