"""Clipped sums of gradients of single examples by Opacus 1.6.0, recorded for `test_opacus`.

python -m tests.parity.opacus_sums tests/parity/opacus_sums.json     in an environment that has Opacus beside ATLAS

Opacus is no dependency: it brings opt-einsum. Each case is one client of a tiny model in transformers' own code, with A
and B of every adapted layer as linear layers beside the frozen one, and one padded batch of all its examples, in
float64.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.conftest import TARGETS, Spec, Tiny, _save, _tokens

CLIP = 3.8
CASES = {"bert": Spec(name="a-0", labels=3, examples=12), "llama": Spec(name="b-0", labels=4, examples=9)}
"""An encoder, and a causal model."""


def scale(rank: int) -> float:
    """LoRA's factor."""
    return 0.5 + 1 / rank


class Lora(nn.Module):
    """W x + s B A x with A and B as linear layers, which Opacus hooks."""

    def __init__(self, layer: nn.Linear, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.layer, self.factor = layer, scale(len(a))
        self.A, self.B = (nn.Linear(one.shape[1], len(one), bias=False, dtype=torch.float64) for one in (a, b))
        self.A.weight.data.copy_(a)
        self.B.weight.data.copy_(b)

    def forward(self, inputs: Tensor) -> Tensor:
        """The layer's output with the update."""
        return self.layer(inputs) + self.factor * self.B(self.A(inputs))


def stock_with_adapters(tiny: Tiny, params: dict[str, Tensor], labels: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """transformers' model with these adapters and head, and its trainable parameters by the names of ATLAS."""
    model = tiny.stock(labels).double()
    model.requires_grad_(False)
    named = {}
    for key, value in params.items():
        if key.endswith(".lora_A"):
            module = key.removesuffix(".lora_A")
            path = f"{model.base_model_prefix}.{module}"
            lora = Lora(model.get_submodule(path), value, params[f"{module}.lora_B"])
            model.set_submodule(path, lora)
            named |= {key: lora.A.weight, f"{module}.lora_B": lora.B.weight}
        elif key.startswith("head."):
            named[key] = model.get_parameter(key.removeprefix("head."))
            named[key].data.copy_(value)
    for parameter in named.values():
        parameter.requires_grad_()
    return model, named


def opacus_sums(tiny: Tiny, spec: Spec) -> dict[str, Tensor]:
    """sum_i g_i min(1, C / ||g_i||) over all examples of this client, by tensor."""
    from opacus import GradSampleModule

    data = _tokens(spec, tiny.backbone.tokenizer).splits["train"]
    model, named = stock_with_adapters(tiny, tiny.params(spec), spec.labels)
    hooked = GradSampleModule(model, loss_reduction="sum", strict=False)
    for layer in hooked.modules():  # its hooks are for training, and dropout stays off
        layer.training = isinstance(layer, nn.Linear)
    bounds = zip(data.offsets[:-1], data.offsets[1:], strict=True)
    texts = [torch.from_numpy(data.ids[first:last]) for first, last in bounds]
    ids = pad_sequence(texts, batch_first=True, padding_value=tiny.backbone.tokenizer.pad_token_id)
    mask = (torch.arange(ids.shape[1]) < torch.from_numpy(data.lengths)[:, None]).long()
    logits = hooked(input_ids=ids, attention_mask=mask).logits
    nn.functional.cross_entropy(logits, torch.from_numpy(data.labels), reduction="sum").backward()
    samples: dict[str, Any] = {key: parameter.grad_sample for key, parameter in named.items()}
    norms = torch.stack([one.flatten(1).norm(dim=1) for one in samples.values()]).norm(dim=0)
    factors = (CLIP / norms).clamp(max=1.0)
    assert 0 < (factors < 1).sum() < len(factors), "some are clipped, and some are not"
    return {key: torch.einsum("n,n...->...", factors, one) for key, one in samples.items()}


def main() -> None:
    """Write the file."""
    from atlas_fl.models.loading import load_backbone

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    sums = {}
    for architecture, spec in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = _save(architecture, Path(folder))
            backbone = load_backbone(str(path))
            tiny = Tiny(name=architecture, path=path, backbone=backbone, targets=TARGETS[architecture])
            flat = {key: one.flatten().tolist() for key, one in opacus_sums(tiny, spec).items()}
            sums[architecture] = {key: [float(f"{value:.7g}") for value in one] for key, one in flat.items()}
    out.write_text(json.dumps(sums) + "\n")


if __name__ == "__main__":
    main()
