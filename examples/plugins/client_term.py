"""A term of one's own in every client's objective: lambda / 2 || w ||^2 on adapters, which keeps updates small.

atlas run --plugin examples/plugins/client_term.py --preset smoke
"""

import torch

from atlas_fl.plugins import register

LAMBDA = 0.01


@register("term", "small_adapters")
def small_adapters(options, start):
    """The gradient lambda w of adapters; heads are left as they are."""
    del options, start  # settings of the run, and the model that the round began with

    def gradient(name, value):
        return LAMBDA * value if ".lora_" in name else torch.zeros_like(value)

    return gradient
