"""What the rows that cross a cut give away of the tokens that went in.

Two measures, both of the client's part alone:

    dFIL   = Tr(J^T J) / d      J the derivative of the rows by what the first block is given, d its numbers
    probe  : a ridge regression from rows to token embeddings, and how often the nearest embedding is the right one

The first is the mean diagonal of the Fisher information that unit Gaussian noise on the rows leaves; its inverse bounds
the error of every unbiased attacker (Maeng et al. 2023, "Bounding the invertibility of privacy-preserving instance
encoding using Fisher information"). The second is an attacker of the simplest kind. It needs pairs of rows and tokens,
which anyone has who holds the public model. A probe that fails proves nothing; one that succeeds does.
"""

import torch
from torch import Tensor

from atlas_fl.models.backbone import Backbone
from atlas_fl.models.blocks import through
from atlas_fl.models.packing import Layout
from atlas_fl.rng import torch_generator

MOST_PRODUCTS = 1 << 24
"""Products of rows and token embeddings that are held at once."""


def fisher_leakage(
    backbone: Backbone, embedded: Tensor, layout: Layout, *, blocks: int, seed: int, draws: int = 4
) -> float:
    """Tr(J^T J) / d of the first `blocks` blocks at these rows, (tokens, hidden), as `models.blocks.embed` gives them.

    Hutchinson's estimate: the mean of |J^T u|^2 over `draws` normal u; exact, 1, for no block.
    """
    if not blocks:
        return 1.0
    total = 0.0
    for draw in range(draws):
        given = embedded.detach().requires_grad_()
        rows = through(backbone, given, layout, range(blocks))
        source = torch_generator(seed, "leakage", blocks, draw)
        upper = torch.randn(rows.shape, generator=source).to(rows.device)
        (found,) = torch.autograd.grad(rows, given, upper)
        total += float(found.double().square().sum())
    return total / draws / embedded.numel()


def token_probe(known: Tensor, tokens: Tensor, unseen: Tensor, *, embeddings: Tensor, ridge: float = 1e-3) -> Tensor:
    """The tokens that the probe reads out of `unseen` rows, (m,) int64.

    It is fitted on `known` rows (n, hidden) of `tokens` (n,) int64; `unseen` is (m, hidden) and `embeddings`
    (vocabulary, hidden) float32. `ridge` is in mean squares of the known rows' numbers.
    """
    centre, middle = known.mean(0), embeddings.mean(0)
    rows, wanted = (known - centre).double(), (embeddings[tokens] - middle).double()
    penalty = ridge * rows.square().mean() * len(rows)
    gram = rows.T @ rows + penalty.clamp(min=1e-12) * torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    weights = torch.linalg.solve(gram, rows.T @ wanted).float()
    guessed = torch.nn.functional.normalize((unseen - centre) @ weights, dim=-1)
    directions = torch.nn.functional.normalize(embeddings - middle, dim=-1)
    # Tokens times vocabulary would be larger than the model.
    at_once = max(1, MOST_PRODUCTS // len(directions))
    return torch.cat([(few @ directions.T).argmax(-1) for few in torch.split(guessed, at_once)])
