import pytest
import torch

from atlas_fl.errors import ConfigError
from atlas_fl.setup.assembly import pick_device


def test_auto_takes_fp16_to_a_gpu_and_refuses_it_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto", precision="bf16") == "cpu"
    with pytest.raises(ConfigError, match=r"--precision fp16 needs a GPU with CUDA.*bf16 or fp32"):
        pick_device("auto", precision="fp16")
    with pytest.raises(ConfigError, match="accelerator 'cuda' is not available"):
        pick_device("cuda", precision="fp16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto", precision="fp16") == "cuda"
